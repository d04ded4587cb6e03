//! More clients than there is room for, clients that leave and clients that do not read, and a server that is killed
//! and started again on the same port.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod http;
#[path = "support/models.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "each test crate uses a part of this module"
)]
mod models;
#[path = "support/process.rs"]
mod process;

use models::{RandomOptions, random};
use process::{Server, completion};
use std::path::PathBuf;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use tempfile::TempDir;

const PARALLEL: usize = 2;
const QUEUE: usize = 4;
const CLIENTS: usize = 64;

/// A model that takes some milliseconds for a token, so that requests overlap.
fn model() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    random(
        &path,
        &RandomOptions {
            layers: 4,
            width: 256,
            ffn: 1024,
            context: 8192,
            ..RandomOptions::default()
        },
    );
    (folder, path)
}

fn flags() -> Vec<String> {
    let flags = format!(
        "--host-memory 512MiB --context 4096 --parallel {PARALLEL} --queue {QUEUE} --threads 2"
    );
    flags.split(' ').map(str::to_owned).collect()
}

fn start(listen: &str, model: &PathBuf, more: &[&str]) -> Server {
    let flags = flags();
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    flags.extend(more);
    Server::start_at(listen, model, &flags)
}

/// Nobody is served, nothing is held, and every request that came has one outcome.
#[track_caller]
fn assert_at_rest(server: &mut Server, requests: usize) {
    server.eventually("all requests are counted", |server| {
        server.metric("strata_requests_total", "") as usize == requests
    });
    server.eventually("nothing runs or waits", |server| {
        server.metric("strata_requests_active", "") == 0.0
            && server.metric("strata_kv_pages", "used") == 0.0
    });
    server.assert_healthy();
}

#[test]
fn more_clients_than_places_are_refused_at_once_and_the_others_are_served() {
    let (_folder, model) = model();
    let mut server = start("127.0.0.1:0", &model, &[]);
    let expected = server.text("the hen", 12);
    let (served, refused) = (AtomicUsize::new(0), AtomicUsize::new(0));
    const ROUNDS: usize = 3;
    for round in 0..ROUNDS {
        // All at once. One that fails after this holds up no other.
        let barrier = Barrier::new(CLIENTS);
        let client = |client: usize| {
            barrier.wait();
            let mut body = completion("the hen", 12);
            body["stream"] = ((client + round) % 2 == 0).into();
            let response = server.post("/v1/completions", &body);
            if response.status == 429 {
                let retry: u32 = response.header("retry-after").unwrap().parse().unwrap();
                assert!(retry > 0);
                assert_eq!(response.error(429)["code"], "queue_full");
                refused.fetch_add(1, Ordering::Relaxed);
                return;
            }
            let parts = if body["stream"] == true {
                response.chunks()
            } else {
                vec![response.ok()]
            };
            let text: String = parts
                .iter()
                .filter_map(|part| part["choices"][0]["text"].as_str())
                .collect();
            assert_eq!(text, expected);
            served.fetch_add(1, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let client = &client;
                scope.spawn(move || client(number));
            }
        });
    }
    let (served, refused) = (served.into_inner(), refused.into_inner());
    assert_eq!(served + refused, CLIENTS * ROUNDS);
    // As many as there are places are served in every round, whatever the timing.
    assert!(served >= ROUNDS * (PARALLEL + QUEUE), "{served} served");
    assert_eq!(
        server.metric("strata_requests_total", "rejected") as usize,
        refused
    );
    assert_at_rest(&mut server, 1 + CLIENTS * ROUNDS);
    let ended = server.metric("strata_requests_total", "stop")
        + server.metric("strata_requests_total", "length");
    assert_eq!(ended as usize, 1 + served);
}

#[test]
fn clients_that_leave_free_what_they_held() {
    let (_folder, model) = model();
    let mut server = start("127.0.0.1:0", &model, &[]);
    let expected = server.text("the hen", 12);
    let mut cancelled = 0;
    for round in 0..6 {
        let mut body = completion("the hen", 4000);
        body["stream"] = true.into();
        // Without an end by itself, within this test.
        body["temperature"] = 1.5.into();
        body["n"] = 1.into();
        let streams: Vec<_> = (0..PARALLEL + QUEUE)
            .map(|_| server.open("/v1/completions", &body))
            .collect();
        assert!(streams.iter().all(|stream| stream.status == 200));
        for (index, mut stream) in streams.into_iter().enumerate() {
            if index < PARALLEL && round % 2 == 0 {
                // The first chunk may be a comment or a token; either shows that it runs.
                drop(stream.chunk());
            }
            drop(stream);
            cancelled += 1;
        }
        server.eventually("everything is free", |server| {
            server.metric("strata_requests_active", "") == 0.0
                && server.metric("strata_kv_pages", "used") == 0.0
        });
    }
    // Clients that never see an answer: they leave while theirs is computed.
    for _ in 0..4 {
        let stream = http::connect(server.address);
        let body = completion("the hen", 4000).to_string();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let before = server.metric("strata_requests_total", "");
        std::io::Write::write_all(&mut &stream, head.as_bytes()).unwrap();
        server.eventually("it runs, or has run", |server| {
            server.metric("strata_requests_active", "") == 1.0
                || server.metric("strata_requests_total", "") > before
        });
        drop(stream);
        cancelled += 1;
        server.eventually("it is gone", |server| {
            server.metric("strata_requests_active", "") == 0.0
        });
    }
    assert_eq!(server.text("the hen", 12), expected);
    assert_at_rest(&mut server, 2 + cancelled);
    let ended = server.metric("strata_requests_total", "outcome=\"stop\"")
        + server.metric("strata_requests_total", "outcome=\"length\"");
    // Any of them may have met an end token before its client left.
    let left = server.metric("strata_requests_total", "cancelled");
    assert_eq!((ended + left) as usize, 2 + cancelled);
    assert!(left >= 1.0);
}

/// Connections that say nothing, half a request, or take nothing of their answer do not keep others from being served.
#[test]
fn clients_that_do_not_read_or_write_hold_up_nobody() {
    let (_folder, model) = model();
    let mut server = start("127.0.0.1:0", &model, &["--stall-timeout", "0.3"]);
    let expected = server.text("the hen", 12);
    let silent: Vec<_> = (0..40).map(|_| http::connect(server.address)).collect();
    let halves: Vec<_> = (0..40)
        .map(|_| {
            let stream = http::connect(server.address);
            let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{\"pro";
            std::io::Write::write_all(&mut &stream, head.as_bytes()).unwrap();
            stream
        })
        .collect();
    let mut body = completion("the hen", 4000);
    body["stream"] = true.into();
    body["temperature"] = 1.5.into();
    body["logprobs"] = 5.into();
    let unread: Vec<_> = (0..PARALLEL)
        .map(|_| server.open("/v1/completions", &body))
        .collect();
    for _ in 0..5 {
        assert_eq!(server.text("the hen", 12), expected);
    }
    server.eventually("those who do not read are given up", |server| {
        server.metric("strata_requests_active", "") == 0.0
            && server.metric("strata_kv_pages", "used") == 0.0
    });
    drop((silent, halves, unread));
    assert_eq!(server.text("the hen", 12), expected);
    server.assert_healthy();
}

#[test]
fn a_server_that_was_killed_starts_again_on_the_same_port_at_once() {
    let (_folder, model) = model();
    let mut server = start("127.0.0.1:0", &model, &[]);
    let expected = server.text("the hen", 12);
    for _ in 0..3 {
        let address = server.address.to_string();
        // Connections are open, in use and half read.
        let mut body = completion("the hen", 4000);
        body["stream"] = true.into();
        let mut stream = server.open("/v1/completions", &body);
        drop(stream.chunk());
        let idle = http::connect(server.address);
        server.kill();
        server = start(&address, &model, &[]);
        assert_eq!(server.text("the hen", 12), expected);
        drop((stream, idle));
    }
    server.assert_healthy();
}

/// SIGTERM lets answers end, refuses what comes later, and ends with code 0.
#[test]
fn a_server_that_is_told_to_end_ends_its_answers() {
    let (_folder, model) = model();
    let mut server = start("127.0.0.1:0", &model, &["--grace", "60"]);
    let mut body = completion("the hen", 60);
    body["stream"] = true.into();
    body["ignore_eos"] = true.into();
    let mut stream = server.open("/v1/completions", &body);
    let first = stream.chunk();
    server.signal("TERM");
    let mut text = first.unwrap_or_default();
    while let Some(chunk) = stream.chunk() {
        text += &chunk;
    }
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    let (status, log) = server.end();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(!log.contains("panicked"), "{log}");
}
