//! Keys, origins and host names.

use super::client::{Response, call};
use super::server::{Server, Setup};
use strata::config::{Config, Secret};

fn with_key() -> Server {
    let setup = Setup::saying(&["x"]);
    Setup {
        config: Config {
            api_key: Some(Secret::new("k-123".to_owned())),
            ..setup.config
        },
        ..setup
    }
    .start()
    .ready()
}

fn get(server: &Server, path: &str, headers: &[(&str, &str)]) -> Response {
    call(server.address, "GET", path, headers, b"")
}

#[test]
fn a_key_is_asked_for_everywhere_but_where_operators_look() {
    let server = with_key();
    for path in ["/v1/models", "/memory", "/v1/chat/completions", "/nothing"] {
        for headers in [
            &[][..],
            &[("authorization", "Bearer k-124")],
            &[("authorization", "Bearer k-12")],
            &[("authorization", "Basic k-123")],
        ] {
            let response = get(&server, path, headers);
            assert_eq!(response.error(401)["code"], "invalid_api_key");
            assert_eq!(response.header("www-authenticate"), Some("Bearer"));
        }
    }
    call(
        server.address,
        "POST",
        "/v1/completions",
        &[],
        b"{\"prompt\":\"x\"}",
    )
    .error(401);
    get(&server, "/v1/models", &[("authorization", "Bearer k-123")]).ok();
    get(&server, "/health", &[]).ok();
    assert_eq!(get(&server, "/metrics", &[]).status, 200);
    // A browser's preflight carries no key, and must not be told of one.
    call(server.address, "OPTIONS", "/v1/models", &[], b"").error(405);
}

#[test]
fn no_answer_is_for_pages_of_other_origins() {
    let server = Setup::saying(&["x"]).start().ready();
    let evil = ("origin", "https://evil.example");
    let response = get(&server, "/v1/models", &[evil]);
    response.ok();
    assert_eq!(response.header("access-control-allow-origin"), None);
    let body = b"{\"prompt\":\"x\"}";
    let headers = [evil, ("sec-fetch-site", "cross-site")];
    call(server.address, "POST", "/v1/completions", &headers, body).error(403);
    let headers = [
        ("origin", "http://localhost"),
        ("sec-fetch-site", "same-origin"),
    ];
    call(server.address, "POST", "/v1/completions", &headers, body).ok();
}

#[test]
fn foreign_host_names_on_loopback_need_the_key() {
    let server = Setup::saying(&["x"]).start().ready();
    get(&server, "/v1/models", &[("host", "evil.example:8080")]).error(403);
    get(&server, "/v1/models", &[("host", "127.0.0.1:8080")]).ok();
    let server = with_key();
    let headers = [("host", "evil.example"), ("authorization", "Bearer k-123")];
    get(&server, "/v1/models", &headers).ok();
}
