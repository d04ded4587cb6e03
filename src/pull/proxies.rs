//! The proxies that the environment names, as curl and the hub's own tools read it: `HTTPS_PROXY` for https, `HTTP_PROXY`
//! for http, `ALL_PROXY` for what has none of its own, and `NO_PROXY` for hosts that are asked directly. All of them in
//! capitals or not.

use super::PullError;
use super::address::Address;
use ureq::{Proxy, ProxyProtocol};

/// Whom to ask by way of whom. It cannot be printed, because a proxy may have a password.
#[derive(Clone)]
pub struct Proxies {
    https: Option<Proxy>,
    http: Option<Proxy>,
    /// In lower case: hosts, and domains with all hosts below them; `*` is all.
    direct: Vec<String>,
}

impl Proxies {
    /// # Errors
    ///
    /// One that cannot be used: to go around it would be what its owner did not want.
    pub fn resolve(variable: impl Fn(&str) -> Option<String>) -> Result<Proxies, PullError> {
        let variable = |name: &'static str| {
            let value = variable(name).or_else(|| variable(&name.to_ascii_lowercase()));
            let value = value.map(|value| value.trim().to_owned());
            Some((name, value.filter(|value| !value.is_empty())?))
        };
        let named = |name: &'static str| variable(name).or_else(|| variable("ALL_PROXY"));
        let direct = variable("NO_PROXY").map(|(_, list)| list.to_ascii_lowercase());
        let separators = |c: char| c == ',' || c.is_whitespace();
        Ok(Proxies {
            https: named("HTTPS_PROXY").map(parse).transpose()?,
            http: named("HTTP_PROXY").map(parse).transpose()?,
            direct: direct
                .unwrap_or_default()
                .split(separators)
                .map(|entry| match entry {
                    "*" => entry,
                    _ => entry.trim_start_matches('*').trim_start_matches('.'),
                })
                .map(|entry| entry.trim_matches(['[', ']']).to_owned())
                .filter(|entry| !entry.is_empty())
                .collect(),
        })
    }

    /// By way of whom an address is asked; `None`: directly.
    pub(super) fn of(&self, address: &Address) -> Option<&Proxy> {
        let proxy = match address.is_secure() {
            true => &self.https,
            false => &self.http,
        };
        let host = address.host();
        let covers = |entry: &String| {
            let below = host.strip_suffix(entry.as_str());
            entry == "*" || below.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        proxy.as_ref().filter(|_| !self.direct.iter().any(covers))
    }
}

/// The value is not shown: it may hold a password.
fn parse((name, value): (&str, String)) -> Result<Proxy, PullError> {
    let wrong = |what: &str| {
        PullError::Usage(format!(
            "{name}: {what}; give it as http://HOST:PORT, or unset it"
        ))
    };
    let proxy = Proxy::new(&value).map_err(|_| wrong("it is no address of a proxy"))?;
    match proxy.protocol() {
        ProxyProtocol::Http | ProxyProtocol::Https => Ok(proxy),
        _ => Err(wrong("only proxies by HTTP can be used")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(variables: &[(&str, &str)]) -> Result<Proxies, String> {
        let find = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Proxies::resolve(find).map_err(|error| error.to_string())
    }

    #[test]
    fn each_scheme_has_its_own() {
        let check = |variables: &[(&str, &str)], expected: [Option<u16>; 2]| {
            let proxies = resolve(variables).unwrap();
            let found = ["https://a.b/c", "http://a.b/c"].map(|text| {
                let proxy = proxies.of(&Address::parse(text).unwrap());
                proxy.map(Proxy::port)
            });
            assert_eq!(found, expected, "{variables:?}");
        };
        let all = ("ALL_PROXY", "http://p:1");
        check(&[], [None, None]);
        check(&[all], [Some(1), Some(1)]);
        check(&[("HTTPS_PROXY", "p:2")], [Some(2), None]);
        check(&[("http_proxy", "http://p:3/")], [None, Some(3)]);
        check(&[all, ("https_proxy", "u:pw@p:2")], [Some(2), Some(1)]);
        // One that is not used may be of any kind.
        let socks = ("ALL_PROXY", "socks5://p:1");
        let both = [("HTTPS_PROXY", "p:2"), ("HTTP_PROXY", "p:3")];
        check(&[both[0], both[1], socks], [Some(2), Some(3)]);
        check(&[all, ("HTTP_PROXY", " ")], [Some(1), Some(1)]);
        check(&[all, ("NO_PROXY", "x, A.B")], [None, None]);
    }

    #[test]
    fn hosts_that_are_asked_directly() {
        let check = |list: &str, address: &str, expected: bool| {
            let proxies = resolve(&[("ALL_PROXY", "p:1"), ("NO_PROXY", list)]).unwrap();
            let address = Address::parse(address).unwrap();
            assert_eq!(
                proxies.of(&address).is_none(),
                expected,
                "{list}: {address}"
            );
        };
        check("*", "http://a", true);
        check("a.b", "https://A.b:443/c", true);
        check("a.b", "https://x.a.b", true);
        check(".a.b", "https://x.a.b", true);
        check("*.a.b", "https://x.a.b", true);
        check("a.b", "https://xa.b", false);
        check("a.b", "https://b", false);
        check("::1", "http://[::1]:80", true);
        check("[::1],x", "http://[::1]", true);
        check(" , ,", "http://a", false);
    }

    #[test]
    fn what_is_no_proxy_is_not_gone_around() {
        for value in ["socks5://p:1", "garbage://p", "::::", "http://u:secret@/"] {
            let error = resolve(&[("HTTPS_PROXY", value)]).err().unwrap();
            assert!(error.starts_with("HTTPS_PROXY: "), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
