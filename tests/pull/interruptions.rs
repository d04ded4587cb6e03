//! Connections that are cut or say nothing, and processes that are killed: what has come is not fetched again.

use super::process::Guard;
use super::server::{NOBODY, Server};
use super::{
    IMPATIENT, IMPATIENT_AND_PERSISTENT, MODEL, OTHER, Place, assert_fetched, assert_refused,
    fetched, fetched_with, refused, refused_with,
};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const VERSION: &str = "\"1\"";

#[test]
fn a_good_server_sends_it_once() {
    let server = fetched(
        |request, reply| reply.file(request, MODEL, VERSION),
        &["is fetched"],
    );
    assert_eq!(server.requests().len(), 1);
    assert_eq!(server.sent(), MODEL.len() as u64);
    assert_eq!(
        server.requests()[0].header("accept-encoding"),
        Some("identity")
    );
}

#[test]
fn cut_connections_go_on_where_they_were() {
    // Every time 50 kB further: more cuts than tries, but each brings something.
    let server = fetched(
        |request, reply| {
            let end = (request.from() + 50_000).min(MODEL.len());
            reply.file_until(request, MODEL, VERSION, end);
        },
        &["cut the connection", "next try in"],
    );
    assert_eq!(server.sent(), MODEL.len() as u64);
    let requests = server.requests();
    assert_eq!(requests.len(), MODEL.len().div_ceil(50_000));
    assert_eq!(requests[1].header("range"), Some("bytes=50000-"));
    assert_eq!(requests[1].header("if-range"), Some(VERSION));
}

#[test]
fn versions_by_time_do_as_well() {
    let time = "Wed, 21 Oct 2015 07:28:00 GMT";
    let server = fetched(
        move |request, reply| {
            let from = request.from();
            let length = (MODEL.len() - from).to_string();
            let range = format!("bytes {from}-{}/{}", MODEL.len() - 1, MODEL.len());
            let headers = [
                ("Content-Length", length.as_str()),
                // A weak tag says nothing of bytes.
                ("ETag", "W/\"1\""),
                ("Last-Modified", time),
                ("Content-Range", &range),
            ];
            match request.number {
                0 => reply.head(200, &headers[..3]),
                _ => reply.head(206, &headers),
            }
            reply.body(
                &MODEL[from..if request.number == 0 {
                    1000
                } else {
                    MODEL.len()
                }],
            );
        },
        &[],
    );
    assert_eq!(server.sent(), MODEL.len() as u64);
    assert_eq!(server.requests()[1].header("if-range"), Some(time));
}

#[test]
fn a_server_that_stalls_is_asked_anew() {
    let began = Instant::now();
    // In the body, then before the headers or amid them.
    for beginning in ["", "HTTP/1.1 206 Whatever\r\nContent-"] {
        let stalls = AtomicUsize::new(0);
        fetched_with(
            &IMPATIENT_AND_PERSISTENT,
            // Who asks for all of it again never gets it.
            move |request, reply| match request.from() {
                0 => {
                    reply.file_until(request, MODEL, VERSION, 70_000);
                    reply.stall();
                }
                _ if stalls.fetch_add(1, Ordering::Relaxed) == 0 => {
                    reply.raw(beginning.as_bytes());
                    reply.stall();
                }
                _ => reply.file(request, MODEL, VERSION),
            },
            &["sent nothing for 0.5 s"],
        );
    }
    assert!(began.elapsed() >= Duration::from_secs(2));
}

#[test]
fn tries_without_a_byte_end() {
    refused(
        |request, reply| reply.file_until(request, MODEL, VERSION, 1000),
        &[
            "gave up after 3 tries",
            "m.gguf.part",
            "run the same command again",
        ],
        3,
    );
    refused_with(
        &IMPATIENT,
        |_, reply| reply.stall(),
        &["sent nothing for 0.5 s", "gave up after 3 tries"],
        3,
    );
    refused(
        |_, _| {},
        &["gave up after 3 tries", "run the same command again later"],
        3,
    );
    refused(
        |_, reply| reply.raw(b"SSH-2.0-OpenSSH_9\r\n"),
        &["gave up after 3 tries"],
        3,
    );
}

#[test]
fn headers_that_drip_are_not_waited_for() {
    // Each try would get all of them, and then an end, in ten seconds.
    refused_with(
        &IMPATIENT,
        |_, reply| {
            reply.raw(b"HTTP/1.1 200 OK\r\n");
            for number in 0..100 {
                reply.raw(format!("X-{number}: 1\r\n").as_bytes());
                std::thread::sleep(Duration::from_millis(100));
            }
        },
        &["sent nothing", "gave up after 3 tries"],
        3,
    );
}

#[test]
fn nobody_there_is_said_at_once() {
    let place = Place::new();
    let outcome = place.pull(&format!("http://{NOBODY}/m.gguf"), &[]);
    assert_refused(
        &outcome,
        1,
        &place.path("m.gguf"),
        &["cannot connect to 127.0.0.1:"],
    );
    let outcome = place.pull("http://no-such-host.invalid/m.gguf", &[]);
    assert_refused(
        &outcome,
        1,
        &place.path("m.gguf"),
        &["no-such-host.invalid"],
    );
    // A wrong name stays wrong.
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    assert!(place.names().is_empty(), "{:?}", place.names());
}

/// Waits until the part has so many bytes.
#[track_caller]
fn wait_for_bytes(part: &Path, bytes: u64) {
    let began = Instant::now();
    while part.metadata().map_or(0, |part| part.len()) < bytes {
        assert!(began.elapsed() < Duration::from_secs(60), "no bytes come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The first request is sent 250 kB and then nothing.
fn half_then_all() -> Server {
    Server::start(|request, reply| {
        if request.number == 0 {
            reply.file_until(request, MODEL, VERSION, 250_000);
            reply.stall();
        } else {
            reply.file(request, MODEL, VERSION);
        }
    })
}

const PATIENT: [&str; 2] = ["--stall-timeout", "60"];

#[test]
fn a_killed_process_loses_nothing() {
    let (server, place) = (half_then_all(), Place::new());
    let url = server.url("/m.gguf");
    let mut command = place.command(&url, &PATIENT);
    let mut first = Guard(command.stderr(Stdio::null()).spawn().unwrap());
    wait_for_bytes(&place.path("m.gguf.part"), 250_000);
    first.0.kill().unwrap();
    first.wait();
    assert_eq!(place.names(), ["m.gguf.part", "m.gguf.part.json"]);

    let outcome = place.pull(&url, &[]);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    assert!(
        outcome.stderr.contains("going on after 250000 bytes"),
        "{}",
        outcome.stderr
    );
    assert_eq!(server.requests()[1].from(), 250_000);
    assert_eq!(server.sent(), MODEL.len() as u64);
}

/// Killed between the last two steps it leaves the note.
#[test]
fn a_note_that_is_left_behind_goes() {
    let (server, place) = (half_then_all(), Place::new());
    let url = server.url("/m.gguf");
    let mut command = place.command(&url, &PATIENT);
    let mut first = Guard(command.stderr(Stdio::null()).spawn().unwrap());
    wait_for_bytes(&place.path("m.gguf.part"), 250_000);
    first.0.kill().unwrap();
    first.wait();
    std::fs::write(place.path("m.gguf"), MODEL).unwrap();
    std::fs::remove_file(place.path("m.gguf.part")).unwrap();
    let outcome = place.pull(&url, &[]);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    assert!(
        outcome.stderr.contains("is there already"),
        "{}",
        outcome.stderr
    );
}

/// A note of any length can be read again.
#[test]
fn a_version_that_is_too_long_is_none() {
    let version = format!("\"{}\"", "\\\"".repeat(20_000));
    let server = Server::start(move |request, reply| match request.number {
        0 => reply.file_until(request, MODEL, &version, 1000),
        1 => reply.answer(404, &[], ""),
        _ => reply.file(request, MODEL, &version),
    });
    let place = Place::new();
    let url = server.url("/m.gguf");
    let outcome = place.pull(&url, &[]);
    assert_refused(&outcome, 1, &place.path("m.gguf"), &["says 404"]);
    let said = "does not tell versions of the file apart";
    assert!(outcome.stderr.contains(said), "{}", outcome.stderr);
    assert_fetched(&place.pull(&url, &[]), &place.path("m.gguf"), MODEL);
}

#[test]
fn an_interrupt_says_how_to_go_on() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let (server, place) = (half_then_all(), Place::new());
        let url = server.url("/m.gguf");
        let mut command = place.command(&url, &PATIENT);
        let child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut first = Guard(child);
        wait_for_bytes(&place.path("m.gguf.part"), 250_000);
        let id = first.0.id().to_string();
        let kill = std::process::Command::new("kill")
            .args(["-s", signal, &id])
            .status();
        assert!(kill.unwrap().success());
        assert_eq!(first.wait().code(), Some(code));
        let text = std::io::read_to_string(first.0.stderr.take().unwrap()).unwrap();
        assert!(
            text.contains("m.gguf.part: run the same command again to go on"),
            "{text}"
        );
        assert!(!place.path("m.gguf").exists());
        assert_fetched(&place.pull(&url, &[]), &place.path("m.gguf"), MODEL);
        assert_eq!(server.sent(), MODEL.len() as u64);
    }
}

#[test]
fn only_one_fetches() {
    let (server, place) = (half_then_all(), Place::new());
    let url = server.url("/m.gguf");
    let mut command = place.command(&url, &PATIENT);
    let mut first = Guard(command.stderr(Stdio::null()).spawn().unwrap());
    wait_for_bytes(&place.path("m.gguf.part"), 250_000);
    let second = place.pull(&url, &[]);
    assert_refused(
        &second,
        1,
        &place.path("m.gguf"),
        &["being written by another process"],
    );
    first.0.kill().unwrap();
    first.wait();
    assert_fetched(&place.pull(&url, &[]), &place.path("m.gguf"), MODEL);
    assert_eq!(server.sent(), MODEL.len() as u64);
}

#[test]
fn what_was_left_of_another_version_or_file_is_not_used() {
    let left = |bytes: &[u8], version: &'static str| {
        let bytes = bytes.to_vec();
        let server = Server::start(move |request, reply| match request.number {
            0 => reply.file_until(request, &bytes, version, 1000),
            1..=2 => reply.answer(500, &[], ""),
            _ => reply.file(request, MODEL, VERSION),
        });
        let place = Place::new();
        place.pull(&server.url("/m.gguf"), &["--tries", "2"]);
        assert_eq!(
            std::fs::read(place.path("m.gguf.part")).unwrap().len(),
            1000
        );
        (server, place)
    };
    // The server has another version by now.
    let (server, place) = left(OTHER, "\"0\"");
    let outcome = place.pull(&server.url("/m.gguf"), &[]);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    assert!(
        outcome
            .stderr
            .contains("was changed on the server: starting over"),
        "{}",
        outcome.stderr
    );
    // It is of another address.
    let (server, place) = left(MODEL, VERSION);
    let outcome = place.pull(&server.url("/elsewhere/m.gguf"), &[]);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    assert!(
        outcome.stderr.contains("of another file: starting over"),
        "{}",
        outcome.stderr
    );
    // Its note is none of ours: then the bytes are somebody else's.
    let (server, place) = left(MODEL, VERSION);
    std::fs::write(place.path("m.gguf.part.json"), "{\"from\": ").unwrap();
    let outcome = place.pull(&server.url("/m.gguf"), &[]);
    let parts = ["m.gguf.part is there and is not of strata", "--output"];
    assert_refused(&outcome, 1, &place.path("m.gguf"), &parts);
    assert_eq!(place.path("m.gguf.part").metadata().unwrap().len(), 1000);
    // It is longer than the file.
    let (server, place) = left(MODEL, VERSION);
    std::fs::write(place.path("m.gguf.part"), vec![0; MODEL.len() + 1]).unwrap();
    let outcome = place.pull(&server.url("/m.gguf"), &[]);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
}
