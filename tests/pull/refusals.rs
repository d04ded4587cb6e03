//! Answers that are no file: statuses, redirects, pages.

use super::server::{NOBODY, Server};
use super::{MODEL, Place, assert_fetched, assert_refused, fetched, refused, run};
use std::time::{Duration, Instant};

const VERSION: &str = "\"1\"";

#[test]
fn statuses_that_stay_are_not_tried_again() {
    for (status, parts) in [
        (400, ["says 400", "check the address"]),
        (401, ["says 401", "HF_TOKEN"]),
        (403, ["says 403", "HF_TOKEN"]),
        (404, ["says 404", "check the name"]),
        (410, ["says 410", "check the name"]),
        (204, ["says 204", "check the address"]),
        (304, ["says 304", "check the address"]),
        (999, ["says 999", "check the address"]),
    ] {
        refused(move |_, reply| reply.answer(status, &[], "no"), &parts, 1);
    }
}

#[test]
fn statuses_that_pass_are_waited_for() {
    for status in [408, 425, 429, 500, 502, 503, 504] {
        let says = format!("says {status}; next try in");
        fetched(
            move |request, reply| match request.number {
                0 => reply.answer(status, &[], "later"),
                _ => reply.file(request, MODEL, VERSION),
            },
            &[&says],
        );
        let says = format!("says {status}");
        refused(
            move |_, reply| reply.answer(status, &[], "later"),
            &[&says, "gave up after 3 tries"],
            3,
        );
    }
}

#[test]
fn a_server_says_how_long_to_wait() {
    let began = Instant::now();
    fetched(
        |request, reply| match request.number {
            0 => reply.answer(429, &[("Retry-After", "1")], ""),
            // A date is not read, and our own pause is taken.
            1 => reply.answer(503, &[("Retry-After", "Wed, 21 Oct 2015 07:28:00 GMT")], ""),
            _ => reply.file(request, MODEL, VERSION),
        },
        &["says 429; next try in 1.0 s", "says 503; next try in 0.0 s"],
    );
    assert!(began.elapsed() >= Duration::from_secs(1));
    refused(
        |_, reply| reply.answer(429, &[("Retry-After", "86400")], ""),
        &["says 429", "come back in 86400 s"],
        1,
    );
}

#[test]
fn an_error_half_way_keeps_what_has_come() {
    let server = Server::start(|request, reply| match request.number {
        0 => reply.file_until(request, MODEL, VERSION, 100_000),
        1 => reply.answer(403, &[], ""),
        _ => reply.file(request, MODEL, VERSION),
    });
    let place = Place::new();
    let url = server.url("/m.gguf");
    assert_refused(
        &place.pull(&url, &[]),
        1,
        &place.path("m.gguf"),
        &["says 403"],
    );
    super::assert_fetched(&place.pull(&url, &[]), &place.path("m.gguf"), MODEL);
    assert_eq!(server.sent(), MODEL.len() as u64);
}

#[test]
fn redirects_are_followed_to_an_end() {
    // Ten of all kinds, one to another host.
    let other = Server::start(|request, reply| reply.file(request, MODEL, VERSION));
    let there = other.url("/else?key=secret");
    let server = fetched(
        move |request, reply| match request.number {
            0 => reply.redirect(301, "/1", &[]),
            1 => reply.redirect(302, "2?x=y", &[]),
            2 => reply.redirect(303, "?z", &[]),
            3 => reply.redirect(307, "./4", &[]),
            4..=8 => reply.redirect(308, &format!("/{}", request.number + 1), &[]),
            _ => reply.redirect(302, &there, &[]),
        },
        &[],
    );
    let paths: Vec<String> = server
        .requests()
        .into_iter()
        .map(|request| request.path)
        .collect();
    assert_eq!(paths[..5], ["/m.gguf", "/1", "/2?x=y", "/2?z", "/./4"]);
    assert_eq!(paths.len(), 10);
    assert_eq!(other.requests().len(), 1);

    refused(
        |_, reply| reply.redirect(302, "/m.gguf", &[]),
        &["more than 10 redirects", "check the address"],
        11,
    );
    for (location, part) in [
        ("file:///etc/passwd", "only http and https"),
        ("javascript:alert(1)", "an address that is none"),
        ("http://", "an address that is none"),
        ("http://me:secret@127.0.0.1/x", "password"),
    ] {
        refused(
            move |_, reply| reply.redirect(302, location, &[]),
            &[part],
            1,
        );
    }
    // One to nowhere is an answer like any other.
    refused(|_, reply| reply.answer(302, &[], ""), &["says 302"], 1);
}

#[test]
fn pages_are_no_models() {
    let page = "<!DOCTYPE html><title>Sign in</title>";
    refused(
        move |_, reply| reply.answer(200, &[("Content-Type", "text/html")], page),
        &["no GGUF file", "<!DO", "text/html", "owner/repo/FILE.gguf"],
        1,
    );
    refused(
        |_, reply| reply.answer(200, &[], "{}"),
        &["no whole GGUF file"],
        1,
    );
    refused(
        |_, reply| reply.answer(200, &[], ""),
        &["no whole GGUF file"],
        1,
    );
    // A large one is not fetched to its end.
    let server = Server::start(|_, reply| {
        reply.head(200, &[("Content-Length", "1000000000")]);
        for _ in 0..1000 {
            reply.body(&[0x1b; 1_000_000]);
        }
    });
    let place = Place::new();
    let outcome = place.pull(&server.url("/m.gguf"), &[]);
    assert_refused(&outcome, 1, &place.path("m.gguf"), &["no GGUF file"]);
    assert!(!outcome.stderr.contains('\u{1b}'), "{:?}", outcome.stderr);
    assert!(server.sent() < 100_000_000, "{}", server.sent());
    assert!(place.names().is_empty(), "{:?}", place.names());
    // One that only begins like a model.
    let mut bytes = MODEL.to_vec();
    bytes[8..16].fill(0xff);
    refused(
        move |request, reply| reply.file(request, &bytes, VERSION),
        &["no whole GGUF file", "removed"],
        1,
    );
}

#[test]
fn headers_without_end() {
    refused(
        |_, reply| {
            reply.raw(b"HTTP/1.1 200 OK\r\n");
            for number in 0..10_000 {
                reply.raw(format!("X-{number}: {}\r\n", "x".repeat(1000)).as_bytes());
            }
        },
        &["127.0.0.1"],
        1,
    );
    refused(
        |_, reply| {
            reply.raw(b"HTTP/1.1 200 OK\r\nX: ");
            reply.raw(&vec![b'x'; 10_000_000]);
        },
        &["127.0.0.1"],
        1,
    );
}

#[test]
fn what_is_packed_is_refused() {
    refused(
        |_, reply| {
            reply.head(
                200,
                &[("Content-Encoding", "gzip"), ("Content-Length", "10")],
            );
            reply.body(&[0; 10]);
        },
        &["packed (gzip)"],
        1,
    );
    fetched(
        |_, reply| {
            let length = MODEL.len().to_string();
            reply.head(
                200,
                &[
                    ("Content-Encoding", "Identity"),
                    ("Content-Length", &length),
                ],
            );
            reply.body(MODEL);
        },
        &["is fetched"],
    );
}

/// Nobody is asked around a proxy, and it is told apart from who is asked by way of it.
#[test]
fn proxies_are_gone_by() {
    let server = Server::start(|request, reply| reply.file(request, MODEL, "\"1\""));
    let (url, place) = (server.url("/m.gguf"), Place::new());
    let with =
        |variables: &[(&str, &str)]| run(place.command(&url, &[]).envs(variables.iter().copied()));
    let secret = format!("http://me:secret@{NOBODY}");
    let path = place.path("m.gguf");
    let outcome = with(&[("HTTP_PROXY", &secret)]);
    let part = format!("cannot connect to {NOBODY}, the proxy for 127.0.0.1");
    assert_refused(&outcome, 1, &path, &[&part]);
    assert!(!outcome.stderr.contains("secret"), "{}", outcome.stderr);
    for value in ["socks5://127.0.0.1:1", "garbage://x"] {
        let outcome = with(&[("ALL_PROXY", value)]);
        assert_refused(&outcome, 2, &path, &["ALL_PROXY", "http://HOST:PORT"]);
    }
    assert!(server.requests().is_empty());
    assert_fetched(&with(&[("HTTPS_PROXY", NOBODY)]), &path, MODEL);
    std::fs::remove_file(&path).unwrap();
    // One that cannot be used matters only to who would be asked by way of it.
    let unused = [("HTTPS_PROXY", "socks5://127.0.0.1:1")];
    assert_fetched(&with(&unused), &path, MODEL);
    std::fs::remove_file(&path).unwrap();
    let direct = [("HTTP_PROXY", NOBODY), ("NO_PROXY", "x, 127.0.0.1")];
    assert_fetched(&with(&direct), &path, MODEL);
}
