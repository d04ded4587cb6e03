//! The proxies that the environment names, as curl and the hub's own tools read it: `https_proxy` for https, `http_proxy`
//! for http, `all_proxy` for what has none of its own, and `no_proxy` for hosts that are asked directly. Each of them is
//! read in capitals where it is not set otherwise; `HTTP_PROXY` is too, which curl ignores because of what a web server
//! sets for its programs, and strata is none of those.

use super::PullError;
use super::address::Address;
use std::net::IpAddr;
use ureq::{Proxy, ProxyProtocol};

/// Whom to ask by way of whom. It cannot be printed, because a proxy may have a password.
#[derive(Clone)]
pub struct Proxies {
    https: Option<Named>,
    http: Option<Named>,
    /// In lower case: hosts, domains with all hosts below them, and networks; `*` is all.
    direct: Vec<String>,
}

/// A proxy, or what is wrong with it. That matters only to who asks by way of it.
type Named = Result<Proxy, String>;

impl Proxies {
    /// `variable` gives the value of one of the environment.
    pub fn resolve(variable: impl Fn(&str) -> Option<String>) -> Proxies {
        let set = |name: String| {
            let value = variable(&name)?.trim().to_owned();
            (!value.is_empty()).then_some((name, value))
        };
        let either = |name: &str| set(name.to_owned()).or_else(|| set(name.to_ascii_uppercase()));
        let named = |name: &str| {
            let (name, value) = either(name).or_else(|| either("all_proxy"))?;
            Some(parse(&name, &value))
        };
        let direct = either("no_proxy").map(|(_, list)| list.to_ascii_lowercase());
        let separators = |c: char| c == ',' || c.is_whitespace();
        Proxies {
            https: named("https_proxy"),
            http: named("http_proxy"),
            direct: direct
                .unwrap_or_default()
                .split(separators)
                .map(|entry| match entry {
                    "*" => entry,
                    _ => entry.trim_start_matches('*').trim_start_matches('.'),
                })
                .filter(|entry| !entry.is_empty())
                .map(str::to_owned)
                .collect(),
        }
    }

    /// By way of whom an address is asked; `None`: directly.
    ///
    /// # Errors
    ///
    /// Its proxy cannot be used: to go around it would be what its owner did not want.
    pub(super) fn of(&self, address: &Address) -> Result<Option<&Proxy>, PullError> {
        let proxy = match address.is_secure() {
            true => &self.https,
            false => &self.http,
        };
        let host = address.host();
        let covers = |entry: &String| match host.parse() {
            _ if entry == "*" => true,
            Ok(host) => network_holds(entry, host),
            Err(_) => (host.strip_suffix(entry.as_str()))
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.')),
        };
        match proxy {
            Some(proxy) if !self.direct.iter().any(covers) => match proxy {
                Ok(proxy) => Ok(Some(proxy)),
                Err(problem) => Err(PullError::Usage(problem.clone())),
            },
            _ => Ok(None),
        }
    }
}

/// Whether it is that very address (`10.0.0.1`, `[::1]`), or in that network (`10.0.0.0/8`).
fn network_holds(network: &str, host: IpAddr) -> bool {
    let (start, bits) = match network.split_once('/') {
        Some((start, bits)) => (start, Some(bits)),
        None => (network, None),
    };
    let (equal, all) = match (start.trim_matches(['[', ']']).parse(), host) {
        (Ok(IpAddr::V4(start)), IpAddr::V4(host)) => {
            ((start.to_bits() ^ host.to_bits()).leading_zeros(), 32)
        }
        (Ok(IpAddr::V6(start)), IpAddr::V6(host)) => {
            ((start.to_bits() ^ host.to_bits()).leading_zeros(), 128)
        }
        _ => return false,
    };
    bits.map_or(Ok(all), str::parse)
        .is_ok_and(|bits| equal >= bits)
}

/// The value is not shown: it may hold a password.
fn parse(name: &str, value: &str) -> Named {
    let wrong = |what: &str| format!("{name}: {what}; give it as http://HOST:PORT, or unset it");
    let proxy = Proxy::new(value).map_err(|_| wrong("it is no address of a proxy"))?;
    match proxy.protocol() {
        ProxyProtocol::Http | ProxyProtocol::Https => Ok(proxy),
        _ => Err(wrong("only proxies by HTTP can be used")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(variables: &[(&str, &str)]) -> Proxies {
        let find = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Proxies::resolve(find)
    }

    #[test]
    fn each_scheme_has_its_own() {
        let check = |variables: &[(&str, &str)], expected: [Option<u16>; 2]| {
            let proxies = resolve(variables);
            let found = ["https://a.b/c", "http://a.b/c"].map(|text| {
                let proxy = proxies.of(&Address::parse(text).unwrap()).unwrap();
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
        check(&[socks, ("NO_PROXY", "*")], [None, None]);
        // Small letters come first, but not where there is nothing.
        let [empty, small] = [("HTTPS_PROXY", ""), ("https_proxy", "p:5")];
        check(&[empty, small], [Some(5), None]);
        check(&[("HTTPS_PROXY", "p:4"), small], [Some(5), None]);
        check(
            &[("HTTPS_PROXY", "p:4"), ("https_proxy", " ")],
            [Some(4), None],
        );
        check(&[("all_proxy", "p:6"), all], [Some(6), Some(6)]);
        check(&[all, ("NO_PROXY", ""), ("no_proxy", "a.b")], [None, None]);
    }

    #[test]
    fn hosts_that_are_asked_directly() {
        let check = |list: &str, address: &str, expected: bool| {
            let proxies = resolve(&[("ALL_PROXY", "p:1"), ("NO_PROXY", list)]);
            let address = Address::parse(address).unwrap();
            assert_eq!(
                proxies.of(&address).unwrap().is_none(),
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
        check("10.0.0.1", "http://10.0.0.1:80", true);
        check("0.0.1", "http://10.0.0.1", false);
        check("10.0.0.0/8", "http://10.200.3.4", true);
        check("10.0.0.0/8", "http://11.0.0.1", false);
        check("0.0.0.0/0", "http://11.0.0.1", true);
        check("192.168.4.0/22", "http://192.168.7.1", true);
        check("192.168.4.0/22", "http://192.168.8.1", false);
        check("fe80::/10", "http://[feb0::1]", true);
        check("[fe80::]/10", "http://[fec0::1]", false);
        for wrong in [
            "10.0.0.0/",
            "10.0.0.0/x",
            "10.0.0.1/33",
            "::/0",
            "10.0.0.0/8/8",
        ] {
            check(wrong, "http://10.0.0.1", false);
        }
    }

    #[test]
    fn what_is_no_proxy_is_not_gone_around() {
        for value in ["socks5://p:1", "garbage://p", "::::", "http://u:secret@/"] {
            let proxies = resolve(&[("HTTPS_PROXY", value)]);
            let error = proxies.of(&Address::parse("https://a").unwrap());
            let error = error.unwrap_err().to_string();
            // Whoever does not ask it does not hear of it.
            let other = proxies.of(&Address::parse("http://a").unwrap());
            assert!(other.unwrap().is_none());
            assert!(error.starts_with("HTTPS_PROXY: "), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
