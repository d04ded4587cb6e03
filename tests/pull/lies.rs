//! Servers whose answers do not agree with what they send, or with each other.

use super::server::{Reply, Request, Server};
use super::{MODEL, OTHER, Place, assert_fetched, assert_refused, fetched, refused};

const VERSION: &str = "\"1\"";

/// 200 with this length, whatever is asked for.
fn whole(reply: &mut Reply, length: usize, bytes: &[u8]) {
    let length = length.to_string();
    reply.head(200, &[("Content-Length", &length), ("ETag", VERSION)]);
    reply.body(bytes);
}

#[test]
fn a_length_that_is_too_long() {
    refused(
        |request, reply| match request.from() {
            0 => whole(reply, MODEL.len() + 1, MODEL),
            _ => reply.file(request, MODEL, VERSION),
        },
        &["cut the connection", "gave up after 3 tries"],
        3,
    );
}

#[test]
fn a_length_that_is_too_short() {
    refused(
        |_, reply| whole(reply, MODEL.len() - 1, MODEL),
        &["no whole GGUF file", "removed"],
        1,
    );
}

#[test]
fn a_length_beyond_all_disks() {
    refused(
        |_, reply| whole(reply, 1 << 60, MODEL),
        &["not enough space", "make room"],
        1,
    );
    refused(
        |_, reply| {
            reply.head(200, &[("Content-Length", "99999999999999999999999999")]);
            reply.body(MODEL);
        },
        &["gave up after 3 tries"],
        3,
    );
}

#[test]
fn a_server_that_knows_no_ranges_sends_all_again() {
    let server = fetched(
        |request, reply| match request.number {
            0 => whole(reply, MODEL.len(), &MODEL[..100_000]),
            _ => whole(reply, MODEL.len(), MODEL),
        },
        &["cannot go on in the middle: starting over"],
    );
    assert_eq!(server.sent(), 100_000 + MODEL.len() as u64);
    // One that never gets further ends.
    refused(
        |_, reply| whole(reply, MODEL.len(), &MODEL[..100_000]),
        &["cut the connection", "gave up after 3 tries"],
        3,
    );
}

#[test]
fn without_a_version_nothing_is_put_together() {
    let server = fetched(
        |request, reply| match request.number {
            0 => reply.file_until(request, OTHER, "", 100_000),
            _ => reply.file(request, MODEL, ""),
        },
        &["does not tell versions of the file apart: starting over"],
    );
    assert_eq!(server.requests()[1].header("range"), None);
}

#[test]
fn a_file_that_changes_half_way() {
    // A server that minds If-Range answers with all of the new one.
    fetched(
        |request, reply| match request.number {
            0 => reply.file_until(request, OTHER, "\"0\"", 100_000),
            _ => reply.file(request, MODEL, VERSION),
        },
        &["the file was changed on the server: starting over"],
    );
    // One that does not sends the rest of it.
    let rest = |request: &Request, reply: &mut Reply, version: &str, bytes: &[u8]| {
        let (from, total) = (request.from(), bytes.len());
        let length = (total - from).to_string();
        let range = format!("bytes {from}-{}/{total}", total - 1);
        reply.head(
            206,
            &[
                ("Content-Length", &length),
                ("Content-Range", &range),
                ("ETag", version),
            ],
        );
        reply.body(&bytes[from..]);
    };
    fetched(
        move |request, reply| match request.number {
            0 => reply.file_until(request, OTHER, "\"0\"", 100_000),
            1 => rest(request, reply, VERSION, MODEL),
            _ => reply.file(request, MODEL, VERSION),
        },
        &["the file was changed on the server, so it starts over"],
    );
    // Or says that it is the same version, of another size.
    fetched(
        move |request, reply| match request.number {
            0 => reply.file_until(request, OTHER, VERSION, 100_000),
            1 => rest(request, reply, VERSION, MODEL),
            _ => reply.file(request, MODEL, VERSION),
        },
        &["the file was changed on the server, so it starts over"],
    );
}

#[test]
fn pieces_that_were_not_asked_for() {
    for range in [
        "bytes 0-9/10",
        "bytes 5-/x",
        "bytes */*",
        "",
        "bytes 99999999999999999999-1/2",
    ] {
        fetched(
            move |request, reply| match request.number {
                0 => reply.file_until(request, MODEL, VERSION, 100_000),
                1 => {
                    reply.head(206, &[("Content-Range", range), ("Content-Length", "10")]);
                    reply.body(&MODEL[..10]);
                }
                _ => reply.file(request, MODEL, VERSION),
            },
            &["so it starts over"],
        );
    }
    // More than the whole has.
    fetched(
        |request, reply| match request.number {
            0 => reply.file_until(request, MODEL, VERSION, 100_000),
            1 => {
                let range = format!("bytes 100000-{}/{}", MODEL.len() - 1, MODEL.len());
                let length = MODEL.len().to_string();
                reply.head(
                    206,
                    &[("Content-Range", &range), ("Content-Length", &length)],
                );
                reply.body(MODEL);
            }
            _ => reply.file(request, MODEL, VERSION),
        },
        &["the server sent more than it said, so it starts over"],
    );
    // A part, of what was asked for as a whole.
    refused(
        |_, reply| {
            reply.head(
                206,
                &[("Content-Range", "bytes 0-9/10"), ("Content-Length", "10")],
            );
            reply.body(&MODEL[..10]);
        },
        &["says 206"],
        1,
    );
}

#[test]
fn no_such_range() {
    fetched(
        |request, reply| match request.number {
            0 => reply.file_until(request, MODEL, VERSION, 100_000),
            1 => reply.answer(416, &[], ""),
            _ => reply.file(request, MODEL, VERSION),
        },
        &["fewer bytes than it said, so it starts over"],
    );
    refused(
        |request, reply| match request.from() {
            0 => reply.file_until(request, MODEL, VERSION, 100_000),
            _ => reply.answer(416, &[], ""),
        },
        &["gave up after 3 tries"],
        3,
    );
}

/// Bodies whose length is not said before.
#[test]
fn chunks() {
    let chunked = |reply: &mut Reply, bytes: &[u8], end: &[u8]| {
        reply.head(200, &[("Transfer-Encoding", "chunked"), ("ETag", VERSION)]);
        for chunk in bytes.chunks(30_000) {
            reply.raw(format!("{:x}\r\n", chunk.len()).as_bytes());
            reply.body(chunk);
            reply.raw(b"\r\n");
        }
        reply.raw(end);
    };
    let end = b"0\r\n\r\n";
    fetched(move |_, reply| chunked(reply, MODEL, end), &[]);
    // Cut, and the rest in one piece.
    let server = fetched(
        move |request, reply| match request.number {
            0 => {
                chunked(reply, &MODEL[..90_000], b"7530\r\n");
                reply.body(&MODEL[90_000..90_003]);
            }
            _ => reply.file(request, MODEL, VERSION),
        },
        &["cut the connection"],
    );
    let from = server.requests()[1].from();
    assert!((90_000..=90_003).contains(&from), "{from}");
    // All is there but the end.
    fetched(
        move |request, reply| match request.number {
            0 => chunked(reply, MODEL, b""),
            _ => reply.file(request, MODEL, VERSION),
        },
        &["cut the connection"],
    );
    // A length that is none: how much came before it was noticed is not the same each time, so only a first chunk has a
    // number of tries.
    fetched(
        move |request, reply| match request.number {
            0 => chunked(reply, &MODEL[..90_000], b"zzz\r\n"),
            _ => reply.file(request, MODEL, VERSION),
        },
        &["chunk length"],
    );
    refused(
        move |_, reply| chunked(reply, &[], b"zzz\r\n"),
        &["gave up after 3 tries"],
        3,
    );
    // The end too early.
    refused(
        move |_, reply| chunked(reply, &MODEL[..90_000], end),
        &["no whole GGUF file"],
        1,
    );
}

/// Where the connection's end is the end of the body, a cut one looks like a whole one.
#[test]
fn no_length_at_all() {
    fetched(
        |_, reply| {
            reply.head(200, &[]);
            reply.body(MODEL);
        },
        &[],
    );
    refused(
        |_, reply| {
            reply.head(200, &[]);
            reply.body(&MODEL[..300_000]);
        },
        &["no whole GGUF file"],
        1,
    );
}

#[test]
fn a_sum_that_is_not_the_files() {
    let place = Place::new();
    let server = Server::start(|request, reply| reply.file(request, MODEL, VERSION));
    let url = server.url("/m.gguf");
    let wrong = "0".repeat(64);
    let outcome = place.pull(&url, &["--sha256", &wrong]);
    assert_refused(
        &outcome,
        1,
        &place.path("m.gguf"),
        &["SHA-256 is", &wrong, "removed"],
    );
    assert!(place.names().is_empty(), "{:?}", place.names());
    // The right one is what it says.
    let (_, sum) = outcome.stderr.split_once("SHA-256 is ").unwrap();
    let outcome = place.pull(&url, &["--sha256", &sum[..64].to_uppercase()]);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    for no_sum in ["", "abc", &"g".repeat(64)] {
        let outcome = place.pull(&url, &["--sha256", no_sum]);
        assert_eq!(outcome.status.code(), Some(2), "{no_sum}");
    }
}

/// With a sum, bytes that were damaged on this machine are found and fetched again.
#[test]
fn what_an_earlier_run_left_is_damaged() {
    let place = Place::new();
    let server = Server::start(|request, reply| match request.number {
        0 => reply.file_until(request, MODEL, VERSION, 100_000),
        1 => reply.answer(404, &[], ""),
        _ => reply.file(request, MODEL, VERSION),
    });
    let good = Server::start(|request, reply| reply.file(request, MODEL, VERSION));
    let outcome = Place::new().pull(&good.url("/m.gguf"), &[]);
    let (_, sum) = outcome.stderr.split_once("SHA-256 ").unwrap();

    let flags = ["--sha256", &sum[..64]];
    place.pull(&server.url("/m.gguf"), &flags);
    let part = place.path("m.gguf.part");
    let mut bytes = std::fs::read(&part).unwrap();
    bytes[50_000] ^= 1;
    std::fs::write(&part, bytes).unwrap();
    let outcome = place.pull(&server.url("/m.gguf"), &flags);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    assert!(
        outcome.stderr.contains("another SHA-256"),
        "{}",
        outcome.stderr
    );
}
