//! Addresses: what of a URL matters to who fetches from it, where a redirect leads, and the names of files in it.

use std::fmt;

/// An absolute http or https URL without user, password and fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    secure: bool,
    /// Host in lower case, with the port where one is given.
    authority: String,
    /// From the slash on.
    path: String,
    /// Without the question mark.
    query: Option<String>,
}

const ADDRESS_BYTES_MAX: usize = 16 << 10;

impl Address {
    /// # Errors
    ///
    /// What is wrong with it, as in "it has no host".
    pub fn parse(text: &str) -> Result<Address, &'static str> {
        if text.len() > ADDRESS_BYTES_MAX {
            return Err("it is too long");
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(
                "it has characters that must be percent-encoded in a URL, as a blank is: %20",
            );
        }
        let (scheme, rest) = text.split_once("://").ok_or("it has no http:// in front")?;
        let secure = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err("only http and https can be fetched"),
        };
        let rest = rest.split('#').next().unwrap_or_default();
        let (rest, query) = match rest.split_once('?') {
            Some((rest, query)) => (rest, Some(query.to_owned())),
            None => (rest, None),
        };
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, "/"),
        };
        if authority.contains('@') {
            return Err("it holds a user or a password, which are not sent");
        }
        if authority.is_empty() || authority.starts_with(':') {
            return Err("it has no host");
        }
        let address = Address {
            secure,
            authority: authority.to_ascii_lowercase(),
            path: path.to_owned(),
            query,
        };
        // The colons of an IPv6 address are in brackets.
        let behind_host = match authority.rfind(']') {
            Some(at) => &authority[at + 1..],
            None => &authority[authority.find(':').unwrap_or(authority.len())..],
        };
        let port = behind_host.strip_prefix(':');
        let port_is_one = port.is_some_and(|port| port.parse::<u16>().is_ok());
        match address.text().parse::<ureq::http::Uri>() {
            Ok(_) if behind_host.is_empty() || port_is_one => Ok(address),
            _ => Err("it is not a URL"),
        }
    }

    /// Where a `Location` header of an answer from here leads (RFC 3986, section 5.2).
    pub(super) fn join(&self, location: &str) -> Result<Address, &'static str> {
        let scheme = if self.secure { "https" } else { "http" };
        let Address { authority, .. } = self;
        let has_scheme = location
            .split_once(':')
            .is_some_and(|(scheme, _)| !scheme.contains(['/', '?', '#', '.']));
        let folder = match self.path.rfind('/') {
            Some(at) => &self.path[..=at],
            None => "/",
        };
        let path = &self.path;
        Address::parse(&match location {
            _ if has_scheme => location.to_owned(),
            _ if location.starts_with("//") => format!("{scheme}:{location}"),
            _ if location.starts_with('/') => format!("{scheme}://{authority}{location}"),
            _ if location.starts_with('?') => format!("{scheme}://{authority}{path}{location}"),
            _ => format!("{scheme}://{authority}{folder}{location}"),
        })
    }

    pub(super) fn is_secure(&self) -> bool {
        self.secure
    }

    /// As in `example.org:8080`.
    pub(super) fn authority(&self) -> &str {
        &self.authority
    }

    /// Without its port, and without the brackets of an IPv6 address.
    pub(super) fn host(&self) -> &str {
        match self.authority.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => self.authority.split(':').next().unwrap_or_default(),
        }
    }

    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Whether both are the same server: scheme, host and port.
    pub(super) fn same_origin(&self, other: &Address) -> bool {
        let port = |address: &Address| {
            let implied = if address.secure { ":443" } else { ":80" };
            match address.authority.strip_suffix(implied) {
                Some(host) => host.to_owned(),
                None => address.authority.clone(),
            }
        };
        self.secure == other.secure && port(self) == port(other)
    }

    /// With its query, to ask for it.
    pub(super) fn text(&self) -> String {
        let query = self.query.as_ref().map(|query| format!("?{query}"));
        format!("{self}{}", query.unwrap_or_default())
    }

    /// The name of the file that it leads to: the last piece of its path, decoded. It may be hostile or empty.
    pub(super) fn file_name(&self) -> String {
        decoded(self.path.rsplit('/').next().unwrap_or_default())
    }
}

/// For people: without the query, which may be long, and a secret that lets anybody fetch.
impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.secure { "https" } else { "http" };
        write!(formatter, "{scheme}://{}{}", self.authority, self.path)
    }
}

/// A path of the hub in a URL: all but slashes and what needs no code is encoded.
pub(super) fn encoded(path: &str) -> String {
    path.bytes()
        .map(|byte| match byte {
            b'/' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

/// The other way. What is no code stays as it is; what is no UTF-8 then becomes a mark that no name passes with.
pub(super) fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..2).filter(|_| first == b'%');
        let code =
            code.and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        match code {
            Some(byte) => (bytes.push(byte), rest = &after[2..]).1,
            None => (bytes.push(first), rest = after).1,
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| "\0".to_owned())
}

/// With `.part.json` behind it a name may have 255 bytes.
const NAME_BYTES_MAX: usize = 200;

/// Names come from others. One that is taken leads to a file in the folder that was chosen, whatever it is joined to, and
/// shows as what it is.
///
/// # Errors
///
/// What is wrong with it, as in "it leads to another folder".
pub(super) fn check_file_name(name: &str) -> Result<(), &'static str> {
    if name.contains(['/', '\\']) || name == ".." || name == "." {
        Err("it leads to another folder")
    } else if hides(name) {
        Err("it has characters that do not show")
    } else if name.len() > NAME_BYTES_MAX {
        Err("it is too long")
    } else if name.starts_with(['.', '-']) {
        Err("it begins like a hidden file or a flag")
    } else if !name.to_ascii_lowercase().ends_with(".gguf") {
        Err("it does not end in .gguf")
    } else {
        Ok(())
    }
}

/// Whether a name steers a terminal, or has marks that turn the direction of text or are not seen, and so looks like
/// another.
pub(super) fn hides(name: &str) -> bool {
    let unseen = |c: char| matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    name.chars().any(|c| c.is_control() || unseen(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_http() {
        let check = |text: &str, shown: &str, asked: &str| {
            let address = Address::parse(text).unwrap();
            assert_eq!(
                (address.to_string(), address.text()),
                (shown.into(), asked.into())
            );
        };
        check("http://a/b.gguf", "http://a/b.gguf", "http://a/b.gguf");
        check("HTTPS://A.b:9#x", "https://a.b:9/", "https://a.b:9/");
        check("http://a?b=/c", "http://a/", "http://a/?b=/c");
        check(
            "http://[::1]:8/x?k=v#f",
            "http://[::1]:8/x",
            "http://[::1]:8/x?k=v",
        );
        for (text, part) in [
            ("ftp://a/b", "only http and https"),
            ("file:///etc/passwd", "only http and https"),
            ("http:///b", "no host"),
            ("http://:80/b", "no host"),
            ("http://me:secret@a/b", "password"),
            ("http://a/b c", "percent-encoded"),
            ("http://a/\r\nx: y", "percent-encoded"),
            ("http://a:port/b", "not a URL"),
            ("http://a:/b", "not a URL"),
            ("http://a:65536/b", "not a URL"),
            ("http://[::1]x:80/b", "not a URL"),
            ("a/b", "no http://"),
        ] {
            let error = Address::parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn redirects_lead_where_browsers_go() {
        let from = Address::parse("https://a.b/c/d?e").unwrap();
        for (location, to) in [
            ("http://x/y", "http://x/y"),
            ("//x/y", "https://x/y"),
            ("/y?z=http://q", "https://a.b/y?z=http://q"),
            ("y", "https://a.b/c/y"),
            ("y.gguf?a=b:c", "https://a.b/c/y.gguf?a=b:c"),
            ("?y", "https://a.b/c/d?y"),
        ] {
            assert_eq!(from.join(location).unwrap().text(), to, "{location}");
        }
        for location in [
            "javascript:alert(1)",
            "file:///etc/passwd",
            "http://",
            "ht tp",
        ] {
            assert!(from.join(location).is_err(), "{location}");
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        let same = |a: &str, b: &str| {
            let [a, b] = [a, b].map(|text| Address::parse(text).unwrap());
            a.same_origin(&b)
        };
        assert!(same("https://a/x", "https://A:443/y?z"));
        assert!(same("http://a:80", "http://a"));
        assert!(!same("http://a", "https://a"));
        assert!(!same("https://a", "https://a:444"));
        assert!(!same("https://a", "https://a.evil"));
        assert!(!same("http://a:443", "https://a"));
    }

    #[test]
    fn names_stay_in_the_folder() {
        let name = |text: &str| Address::parse(text).unwrap().file_name();
        assert_eq!(name("http://a/b%20c.gguf?d=e.gguf"), "b c.gguf");
        assert_eq!(name("http://a/x/%2e%2e%2fb.gguf"), "../b.gguf");
        assert_eq!(name("http://a/100%.gguf"), "100%.gguf");
        assert_eq!(name("http://a/%zz%2"), "%zz%2");
        assert_eq!(name("http://a"), "");
        for good in ["a.gguf", "A-b_c.Q4_K_M.GGUF", "größe 1.gguf", "..a.gguf"] {
            let taken = check_file_name(good).is_ok();
            assert_eq!(taken, !good.starts_with('.'), "{good}");
        }
        let long = format!("{}.gguf", "x".repeat(200));
        for hostile in [
            "",
            ".",
            "..",
            "../a.gguf",
            "a/b.gguf",
            "/a.gguf",
            "a\\b.gguf",
            "a\0.gguf",
            "a\n.gguf",
            "\u{1b}[31m.gguf",
            "a\u{202e}fugg.gguf",
            ".a.gguf",
            "-a.gguf",
            "a.html",
            &long,
            &decoded("%ff.gguf"),
        ] {
            assert!(check_file_name(hostile).is_err(), "{hostile:?}");
        }
    }

    #[test]
    fn codes_of_paths() {
        assert_eq!(encoded("a b/c%?#+é.gguf"), "a%20b/c%25%3F%23%2B%C3%A9.gguf");
        assert_eq!(decoded(&encoded("a b/c%?#+é.gguf")), "a b/c%?#+é.gguf");
    }
}
