//! One request, its redirects and its answer. Everything that a server may do wrong comes out as a `Trouble`, which says
//! whether it helps to try again.

use super::address::Address;
use super::proxies::Proxies;
use super::{Limits, PullError};
use std::io::{self, Read};
use std::time::Duration;
use ureq::http::{HeaderMap, Response};
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Body, Proxy};

/// Why a try came to nothing.
#[derive(Debug)]
pub(super) enum Trouble {
    /// It can be over the next time. The server may have said how long it takes.
    Passing {
        reason: String,
        wait: Option<Duration>,
    },
    /// Nothing was reached: like the one before where something was reached already, else like the one after.
    Unreachable(String),
    Final(PullError),
}

impl Trouble {
    pub(super) fn passing(reason: impl Into<String>) -> Trouble {
        Trouble::Passing {
            reason: reason.into(),
            wait: None,
        }
    }

    pub(super) fn refused(reason: impl Into<String>) -> Trouble {
        Trouble::Final(PullError::Refused(reason.into()))
    }
}

impl From<PullError> for Trouble {
    fn from(error: PullError) -> Trouble {
        Trouble::Final(error)
    }
}

/// As RFC 6750 has it, and only for the hub.
#[derive(Clone)]
pub(super) struct Token {
    pub(super) secret: String,
    /// Where it may be sent.
    pub(super) home: Address,
}

pub(super) struct Client {
    agent: ureq::Agent,
    token: Option<Token>,
    proxies: Proxies,
    pub(super) limits: Limits,
}

/// What a file is asked for from on.
#[derive(Clone, Debug)]
pub(super) struct Resume {
    pub(super) from: u64,
    /// Of the version whose first bytes are here (RFC 9110, section 13.1.5).
    pub(super) if_range: Option<String>,
}

/// An answer that is no redirect.
pub(super) struct Answer {
    pub(super) status: u16,
    headers: HeaderMap,
    body: Body,
    /// Who answered in the end.
    pub(super) address: Address,
    /// The hub's name of the content, which it sends with its redirect: for large files their SHA-256.
    pub(super) linked_etag: Option<String>,
    sent_token: bool,
    stall: Duration,
}

const REDIRECTS_MAX: usize = 10;
const HEADER_BYTES_MAX: usize = 64 << 10;
/// A longer version is none: it is kept with the file, and sent back with every request.
const VERSION_BYTES_MAX: usize = 1 << 10;
/// The longest time to wait because a server says so.
const WAIT_MAX: Duration = Duration::from_secs(300);
const CERTIFICATES_BYTES_MAX: u64 = 16 << 20;

impl Client {
    /// `certificates` is a file of authorities to trust in place of those that are built in.
    pub(super) fn new(
        limits: Limits,
        token: Option<Token>,
        certificates: Option<&str>,
        proxies: Proxies,
    ) -> Result<Client, PullError> {
        let roots = match certificates {
            Some(path) => RootCerts::from(read_certificates(path)?),
            None => RootCerts::WebPki,
        };
        let stall = limits.stall;
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            // They are followed here, where the token is.
            .max_redirects(0)
            .accept_encoding("identity")
            .accept("*/*")
            .user_agent(concat!("strata/", env!("CARGO_PKG_VERSION")))
            .max_response_header_size(HEADER_BYTES_MAX)
            .timeout_resolve(Some(stall))
            .timeout_connect(Some(stall))
            .timeout_send_request(Some(stall))
            // However slowly they drip.
            .timeout_recv_response(Some(stall.saturating_mul(2)))
            .timeout_per_read(Some(stall))
            .timeout_per_write(Some(stall))
            .tls_config(TlsConfig::builder().root_certs(roots).build())
            .build()
            .new_agent();
        Ok(Client {
            agent,
            token,
            proxies,
            limits,
        })
    }

    /// Asks for what is at an address, or for the rest of it. `deadline` bounds all of one exchange, body included.
    pub(super) fn get(
        &self,
        address: &Address,
        resume: Option<&Resume>,
        deadline: Option<Duration>,
    ) -> Result<Answer, Trouble> {
        let mut address = address.clone();
        let mut linked_etag = None;
        for _ in 0..=REDIRECTS_MAX {
            let token = self
                .token
                .as_ref()
                .filter(|token| token.home.same_origin(&address));
            let mut request = self.agent.get(address.text());
            if let Some(token) = token {
                request = request.header("authorization", format!("Bearer {}", token.secret));
            }
            if let Some(Resume { from, if_range }) = resume {
                request = request.header("range", format!("bytes={from}-"));
                if let Some(version) = if_range {
                    request = request.header("if-range", version);
                }
            }
            let proxy = self.proxies.of(&address)?;
            let response = request
                .config()
                .timeout_global(deadline)
                .proxy(proxy.cloned())
                .build()
                .call()
                .map_err(|error| trouble(error, &address, proxy, self.limits.stall))?;
            let headers = response.headers();
            linked_etag = text(headers, "x-linked-etag").or(linked_etag);
            let is_redirect = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            let Some(location) = text(headers, "location").filter(|_| is_redirect) else {
                let sent_token = token.is_some();
                return Ok(self.answer(response, address, linked_etag, sent_token));
            };
            address = follow(&address, &location)?;
        }
        Err(Trouble::refused(format!(
            "more than {REDIRECTS_MAX} redirects, the last to {address}: check the address"
        )))
    }

    fn answer(
        &self,
        response: Response<Body>,
        address: Address,
        linked_etag: Option<String>,
        sent_token: bool,
    ) -> Answer {
        let (parts, body) = response.into_parts();
        Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
            address,
            linked_etag,
            sent_token,
            stall: self.limits.stall,
        }
    }
}

impl Answer {
    pub(super) fn header(&self, name: &str) -> Option<String> {
        text(&self.headers, name)
    }

    /// Of the body, where the server says so before it sends it.
    pub(super) fn length(&self) -> Option<u64> {
        self.header("content-length")?.trim().parse().ok()
    }

    /// What a version of the file can be told by: a strong tag, or else its time.
    pub(super) fn version(&self) -> Option<String> {
        let tag = self.header("etag").filter(|tag| is_strong(tag));
        let version = tag.or_else(|| self.header("last-modified"));
        version.filter(|version| version.len() <= VERSION_BYTES_MAX)
    }

    /// Why the status is none of success. `what` is what was asked for.
    pub(super) fn refusal(&self, what: &str) -> Trouble {
        let status = self.status;
        let host = self.address.authority();
        match status {
            401 | 403 if self.sent_token => Trouble::refused(format!(
                "{what}: {host} says {status}: the token (HF_TOKEN) may not read it; accept the model's terms on its page, or check the name"
            )),
            401 | 403 => Trouble::refused(format!(
                "{what}: {host} says {status}: it is not public, or not there; check the name, and for a model of the hub set HF_TOKEN to a token that may read it"
            )),
            404 | 410 => Trouble::refused(format!(
                "{what}: {host} says {status}: it is not there; check the name"
            )),
            408 | 425 | 429 | 500..=599 => {
                let wait = self.header("retry-after");
                // A date is not read: the pauses of our own will do.
                let wait = wait.and_then(|wait| wait.trim().parse().ok());
                let wait = wait.map(Duration::from_secs);
                match wait {
                    Some(wait) if wait > WAIT_MAX => Trouble::refused(format!(
                        "{what}: {host} says {status} and asks to come back in {} s: run the same command again then",
                        wait.as_secs()
                    )),
                    wait => Trouble::Passing {
                        reason: format!("{host} says {status}"),
                        wait,
                    },
                }
            }
            _ => Trouble::refused(format!(
                "{what}: {host} says {status}, which is no answer to this question; check the address"
            )),
        }
    }

    /// The body, piece by piece.
    pub(super) fn into_reader(self) -> BodyReader {
        BodyReader {
            reader: self.body.into_reader(),
            address: self.address,
            stall: self.stall,
        }
    }
}

pub(super) struct BodyReader {
    reader: ureq::BodyReader<'static>,
    address: Address,
    stall: Duration,
}

impl BodyReader {
    /// 0 at the end. A body that ends before the length that was announced is a trouble.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, Trouble> {
        loop {
            match self.reader.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(trouble(error.into(), &self.address, None, self.stall)),
                Ok(read) => return Ok(read),
            }
        }
    }

    /// All of it.
    pub(super) fn read_to_end(mut self, bytes_max: usize) -> Result<Vec<u8>, Trouble> {
        let mut bytes = Vec::new();
        let mut chunk = vec![0; 64 << 10];
        loop {
            let read = self.read(&mut chunk)?;
            if read == 0 {
                return Ok(bytes);
            }
            bytes.extend_from_slice(&chunk[..read]);
            if bytes.len() > bytes_max {
                let address = &self.address;
                return Err(Trouble::refused(format!(
                    "{address} answers with more than {bytes_max} bytes"
                )));
            }
        }
    }
}

/// Where a redirect leads, if it may.
fn follow(from: &Address, location: &str) -> Result<Address, Trouble> {
    let to = from.join(location).map_err(|what| {
        Trouble::refused(format!("{from} leads to an address that is none: {what}"))
    })?;
    match from.is_secure() && !to.is_secure() {
        true => Err(Trouble::refused(format!(
            "{from} leads to {to}, where anybody on the way could change the file: not followed"
        ))),
        false => Ok(to),
    }
}

/// A header as text, where it is any.
fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    Some(headers.get(name)?.to_str().ok()?.to_owned())
}

fn is_strong(tag: &str) -> bool {
    tag.len() > 2 && tag.starts_with('"') && tag.ends_with('"')
}

/// `proxy` is who was asked to ask for it; of a body, nobody is connected to any more.
fn trouble(
    error: ureq::Error,
    address: &Address,
    proxy: Option<&Proxy>,
    stall: Duration,
) -> Trouble {
    use io::ErrorKind;
    use ureq::{Error, Timeout};
    let host = address.authority();
    let next = match proxy {
        Some(proxy) => format!("{}:{}, the proxy for {host}", proxy.host(), proxy.port()),
        None => host.to_owned(),
    };
    match error {
        Error::HostNotFound => Trouble::Unreachable(not_found(&next)),
        Error::Timeout(Timeout::Connect | Timeout::Resolve) => {
            Trouble::Unreachable(format!("{next} does not answer"))
        }
        Error::Timeout(Timeout::Global) => {
            Trouble::passing(format!("{host} takes too long to answer"))
        }
        Error::Timeout(_) => {
            Trouble::passing(format!("{host} sent nothing for {} s", stall.as_secs_f64()))
        }
        Error::Io(error) => match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                Trouble::passing(format!("{host} cut the connection"))
            }
            ErrorKind::ConnectionRefused
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable => {
                Trouble::Unreachable(format!("cannot connect to {next}: {error}"))
            }
            // The resolver's errors have neither a kind nor a number, only this text of the standard library.
            _ if error.to_string().contains("lookup address") => {
                Trouble::Unreachable(not_found(&next))
            }
            // What TLS finds wrong comes so.
            ErrorKind::InvalidData => Trouble::Unreachable(no_trust(host, &error.to_string())),
            _ => Trouble::passing(format!("{host}: {error}")),
        },
        Error::Rustls(error) => Trouble::Unreachable(no_trust(host, &error.to_string())),
        Error::LargeResponseHeader(..) => Trouble::refused(format!(
            "{host} answers with headers of more than {HEADER_BYTES_MAX} bytes"
        )),
        Error::ConnectProxyFailed(reason) => Trouble::Unreachable(format!(
            "{next}, does not connect to it ({reason}); check HTTPS_PROXY, or set NO_PROXY={}",
            address.host()
        )),
        error @ (Error::BadUri(_) | Error::Http(_) | Error::Tls(_)) => {
            Trouble::refused(format!("{host}: {error}"))
        }
        error => Trouble::passing(format!("{host}: {error}")),
    }
}

fn not_found(host: &str) -> String {
    format!("there is no host {host}: check the name, and the network")
}

fn no_trust(host: &str, error: &str) -> String {
    format!(
        "no secure connection to {host}: {error}; for an authority of your own set SSL_CERT_FILE to a PEM file with it"
    )
}

fn read_certificates(path: &str) -> Result<Vec<Certificate<'static>>, PullError> {
    let wrong = |what: String| PullError::Usage(format!("SSL_CERT_FILE {path}: {what}"));
    let mut pem = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(CERTIFICATES_BYTES_MAX).read_to_end(&mut pem))
        .map_err(|error| wrong(error.to_string()))?;
    let mut certificates = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| wrong(error.to_string()))? {
            certificates.push(certificate);
        }
    }
    match certificates.is_empty() {
        true => Err(wrong("it holds no certificate".to_owned())),
        false => Ok(certificates),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_never_lead_out_of_tls() {
        let check = |from: &str, location: &str, error: Option<&str>| {
            let from = Address::parse(from).unwrap();
            match (follow(&from, location), error) {
                (Ok(_), None) => {}
                (Err(Trouble::Final(found)), Some(part)) => {
                    assert!(found.to_string().contains(part), "{found}");
                }
                other => panic!("{from} to {location}: {other:?}"),
            }
        };
        check("https://a/b", "https://c/d", None);
        check("https://a/b", "//c/d", None);
        check("http://a/b", "https://c/d", None);
        check("http://a/b", "http://c/d", None);
        check("https://a/b", "http://a/b", Some("not followed"));
        check("https://a/b", "HTTP://c", Some("not followed"));
        check("https://a/b", "file:///etc/passwd", Some("only http"));
    }

    #[test]
    fn tags_of_versions_are_strong() {
        assert!(is_strong("\"a\""));
        for weak in ["W/\"a\"", "a", "\"\"", "\"", ""] {
            assert!(!is_strong(weak), "{weak}");
        }
    }
}
