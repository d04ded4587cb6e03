//! Who is taken: loading, a full queue, several sequences at once.

use super::client::{Response, open};
use super::model::Script;
use super::server::{Server, Setup};
use serde_json::json;
use strata::config::Config;

/// One place, a queue of two, and a model that waits for its gate.
fn gated() -> (Server, super::model::Gate) {
    let setup = Setup::saying(&["a", "b"]);
    let gate = setup.script.gate.clone();
    gate.set(true);
    let server = Setup {
        config: Config {
            parallel: 1,
            queue: 2,
            ..setup.config
        },
        ..setup
    };
    (server.start().ready(), gate)
}

#[test]
fn a_full_queue_is_a_429_at_once_and_those_before_are_served() {
    let (server, gate) = gated();
    std::thread::scope(|scope| {
        let served: Vec<_> = (0..3)
            .map(|i| {
                let request = scope.spawn(|| server.chat(json!({"stream": true})));
                server.eventually("the request is taken", |server| {
                    let load = server.engine.load();
                    load.running + load.waiting > i
                });
                request
            })
            .collect();
        for stream in [false, true] {
            // They return while the gate is closed.
            let response = server.chat(json!({"stream": stream}));
            assert_eq!(response.error(429)["code"], "queue_full");
            assert_eq!(response.header("retry-after"), Some("1"));
        }
        // Two sequences of one request are refused together, and the first of them does not stay behind.
        server.complete(json!({"prompt": ["a", "b"]})).error(429);
        let load = server.engine.load();
        assert_eq!((load.running, load.waiting), (1, 2));
        gate.set(false);
        for request in served {
            let response: Response = request.join().unwrap();
            assert_eq!(response.chunks().len(), 4);
        }
    });
    assert_eq!(server.counted("chat_completions", "rejected"), 2);
    assert_eq!(server.counted("completions", "rejected"), 1);
    server.eventually("all three are counted", |server| {
        server.counted("chat_completions", "stop") == 3
    });
}

#[test]
fn while_the_model_loads_health_tells_how_far_it_is() {
    let (loaded, loading) = std::sync::mpsc::channel();
    let server = Setup {
        loading: Some(loading),
        ..Setup::saying(&["x"])
    };
    let server = server.start();
    server.eventually("progress shows", |server| {
        server.get("/health").json() == json!({"status": "loading", "progress": 0.5})
    });
    assert_eq!(server.get("/health").status, 503);
    let response = server.chat(json!({}));
    assert_eq!(response.error(503)["code"], "model_loading");
    assert!(response.header("retry-after").is_some());
    server.get("/v1/models").ok();
    loaded.send(()).unwrap();
    let server = server.ready();
    assert_eq!(server.get("/health").ok(), json!({"status": "ok"}));
    server.chat(json!({})).ok();
}

#[test]
fn a_model_that_does_not_load_is_told_without_its_path() {
    let server = Setup {
        load_fails: true,
        ..Setup::default()
    };
    let server = server.start();
    server.engine.wait_until_loaded();
    let response = server.get("/health");
    assert_eq!(
        (response.status, response.json()),
        (503, json!({"status": "failed"}))
    );
    let response = server.chat(json!({}));
    assert_eq!(response.error(503)["code"], "engine_stopped");
    assert!(!response.text().contains("secret"));
}

#[test]
fn a_client_that_leaves_frees_its_place_running_or_waiting() {
    let (server, gate) = gated();
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true}).to_string();
    let streams: Vec<_> = (0..3)
        .map(|_| {
            open(
                server.address,
                "POST",
                "/v1/chat/completions",
                &[],
                body.as_bytes(),
            )
        })
        .collect();
    assert!(streams.iter().all(|stream| stream.status == 200));
    drop(streams);
    server.eventually("all are cancelled", |server| {
        server.counted("chat_completions", "cancelled") == 3
    });
    server.eventually("nothing runs or waits", |server| {
        let used = server
            .metrics
            .kv_pages
            .with_label_values(&["host", "used"])
            .get();
        let load = server.engine.load();
        (load.running, load.waiting, used) == (0, 0, 0)
    });
    gate.set(false);
    server.chat(json!({})).ok();
}

#[test]
fn a_client_that_leaves_a_whole_answer_cancels_it_too() {
    let setup = Setup::saying(&["a", "b"]);
    let server = Setup {
        script: Script {
            endless: true,
            ..setup.script.clone()
        },
        context: 1 << 20,
        ..setup
    };
    let server = server.start().ready();
    let mut stream = super::client::connect(server.address);
    let body = r#"{"prompt":"x"}"#;
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
    server.eventually("it runs", |server| server.engine.load().running == 1);
    drop(stream);
    server.eventually("it is cancelled", |server| {
        server.engine.load().running == 0 && server.counted("completions", "cancelled") == 1
    });
}

#[test]
fn bodies_that_do_not_come_keep_nobody_out() {
    let server = Setup::saying(&["x"]).start().ready();
    let stalled: Vec<_> = (0..40)
        .map(|i| {
            let length = if i % 2 == 0 {
                "transfer-encoding: chunked"
            } else {
                "content-length: 16000000"
            };
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{length}\r\n\r\n"
            );
            let mut stream = super::client::connect(server.address);
            std::io::Write::write_all(&mut stream, head.as_bytes()).unwrap();
            stream
        })
        .collect();
    // Behind all of these.
    std::thread::sleep(std::time::Duration::from_millis(100));
    let asked = std::time::Instant::now();
    server.chat(json!({})).ok();
    assert!(asked.elapsed().as_secs() < 20);
    drop(stalled);
}

#[test]
fn a_connection_that_asks_nothing_is_closed_before_the_others_would_be() {
    let server = Setup::saying(&["x"]).start().ready();
    let mut silent = super::client::connect(server.address);
    let connected = std::time::Instant::now();
    let read = std::io::Read::read(&mut silent, &mut [0]);
    assert_eq!(read.unwrap(), 0);
    assert!(connected.elapsed().as_secs() < 40);
}
