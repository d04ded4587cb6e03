//! Who may ask: the API key, and what a web page that someone visits must not do to a server on their machine.
//!
//! There are no CORS headers, so no page of another origin reads an answer. Without a key, two more things are refused:
//! requests that a browser itself marks as coming from another site, and, on a loopback address, host names that are
//! not local (a foreign name that resolves to 127.0.0.1 would make its pages same-origin with this server).

use super::Api;
use super::error::ApiError;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::IpAddr;
use std::sync::Arc;

/// Open without the key: orchestrators and Prometheus probe them, and they say nothing about prompts.
const OPEN_PATHS: [&str; 2] = ["/health", "/metrics"];

/// Lets a request through or answers it.
pub(super) async fn guard(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    match check(&api, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check(api: &Api, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    match &api.api_key {
        Some(key) => {
            // Browsers send OPTIONS without the header that it asks leave for.
            let open =
                OPEN_PATHS.contains(&request.uri().path()) || request.method() == Method::OPTIONS;
            if !open && !has_key(headers, key.expose()) {
                return Err(ApiError::unauthorized());
            }
        }
        None => {
            let writes = request.method() != Method::GET && request.method() != Method::HEAD;
            if writes && text(headers, "sec-fetch-site") == Some("cross-site") {
                return Err(ApiError::forbidden(
                    "requests from pages of other sites are refused; set an --api-key and send it",
                ));
            }
            if api.loopback_only && !text(headers, header::HOST.as_str()).is_none_or(is_local_host)
            {
                return Err(ApiError::forbidden(
                    "this host name is not local; ask for localhost, or set an --api-key and send it",
                ));
            }
        }
    }
    Ok(())
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn has_key(headers: &HeaderMap, key: &str) -> bool {
    let Some(given) = headers.get(header::AUTHORIZATION) else {
        return false;
    };
    let given = given.as_bytes();
    const SCHEME: &[u8] = b"bearer ";
    given
        .split_at_checked(SCHEME.len())
        .is_some_and(|(scheme, token)| {
            scheme.eq_ignore_ascii_case(SCHEME) && equal_in_constant_time(token, key.as_bytes())
        })
}

/// Takes time by the length of what was given, and none by where it differs.
fn equal_in_constant_time(given: &[u8], expected: &[u8]) -> bool {
    let mut difference = usize::from(given.len() != expected.len());
    for (a, b) in given.iter().zip(expected.iter().cycle()) {
        difference |= usize::from(std::hint::black_box(a ^ b));
    }
    std::hint::black_box(difference) == 0
}

/// Addresses, and names that no public zone can hold.
fn is_local_host(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    name.is_empty()
        || name.parse::<IpAddr>().is_ok()
        || name == "localhost"
        || !name.contains('.')
        || [".localhost", ".local", ".internal"]
            .iter()
            .any(|suffix| name.ends_with(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_is_equal() {
        for (given, equal) in [
            ("secret", true),
            ("secreT", false),
            ("Secret", false),
            ("secre", false),
            ("secrets", false),
            ("secretsecret", false),
            ("", false),
        ] {
            assert_eq!(
                equal_in_constant_time(given.as_bytes(), b"secret"),
                equal,
                "{given}"
            );
        }
    }

    #[test]
    fn the_scheme_is_bearer_in_any_case() {
        for (value, allowed) in [
            ("Bearer k", true),
            ("bearer k", true),
            ("Basic k", false),
            ("Bearer  k", false),
            ("k", false),
            ("Bearer", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            assert_eq!(has_key(&headers, "k"), allowed, "{value}");
        }
        assert!(!has_key(&HeaderMap::new(), "k"));
    }

    #[test]
    fn foreign_names_are_not_local() {
        for (host, local) in [
            ("localhost:8080", true),
            ("LOCALHOST", true),
            ("127.0.0.1:8080", true),
            ("[::1]:8080", true),
            ("192.168.1.2", true),
            ("workstation", true),
            ("box.local:80", true),
            ("host.docker.internal", true),
            ("evil.example:8080", false),
            ("127.0.0.1.evil.example", false),
            ("localhost.evil.example", false),
        ] {
            assert_eq!(is_local_host(host), local, "{host}");
        }
    }
}
