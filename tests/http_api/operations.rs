//! Metrics, memory, and the end of a server.

use super::client::open;
use super::model::Script;
use super::server::Setup;
use serde_json::json;
use std::net::TcpStream;
use std::time::Duration;
use strata::config::Config;

#[test]
fn every_request_is_counted_once_by_how_it_ended() {
    let server = Setup::saying(&["a", "b"]).start().ready();
    server.chat(json!({})).ok();
    server.chat(json!({"max_tokens": 1})).ok();
    server.chat(json!({"stream": true})).chunks();
    server
        .chat(json!({"stream": true, "max_tokens": 1}))
        .chunks();
    server.chat(json!({"n": 0})).error(400);
    server.complete(json!({"n": 2})).ok();
    server.eventually("all have ended", |server| {
        server.counted("chat_completions", "length") == 2
            && server.counted("chat_completions", "stop") == 2
    });
    let page = server.get("/metrics");
    assert!(
        page.header("content-type")
            .unwrap()
            .starts_with("text/plain; version=0.0.4")
    );
    let text = page.text();
    for line in [
        "strata_requests_total{endpoint=\"chat_completions\",outcome=\"stop\"} 2",
        "strata_requests_total{endpoint=\"chat_completions\",outcome=\"length\"} 2",
        "strata_requests_total{endpoint=\"chat_completions\",outcome=\"rejected\"} 1",
        "strata_requests_total{endpoint=\"completions\",outcome=\"stop\"} 1",
        "strata_request_seconds_count{endpoint=\"chat_completions\"} 5",
        "strata_requests_active{state=\"running\"} 0",
        "strata_requests_active{state=\"waiting\"} 0",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
    assert_eq!(server.get("/memory").ok(), json!({"tiers": []}));
}

#[test]
fn a_server_that_stops_lets_streams_end_and_refuses_new_ones() {
    let setup = Setup::saying(&["a", "b"]);
    let gate = setup.script.gate.clone();
    gate.set(true);
    let server = Setup {
        config: Config {
            grace: Duration::from_secs(30),
            ..setup.config
        },
        ..setup
    };
    let server = server.start().ready();
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let stream = open(
        server.address,
        "POST",
        "/v1/completions",
        &[],
        body.as_bytes(),
    );
    server.eventually("it runs", |server| server.engine.load().running == 1);
    server.stop.stop();
    server.eventually("connections are refused", |server| {
        TcpStream::connect(server.address).is_err()
    });
    gate.set(false);
    let rest = stream.finish();
    assert_eq!(rest.chunks().len(), 3);
    server.join();
}

#[test]
fn after_the_grace_streams_are_told_and_the_server_ends() {
    let setup = Setup::saying(&["a", "b"]);
    let server = Setup {
        script: Script {
            endless: true,
            ..setup.script.clone()
        },
        context: 1 << 22,
        ..setup
    };
    let server = server.start().ready();
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let mut stream = open(
        server.address,
        "POST",
        "/v1/completions",
        &[],
        body.as_bytes(),
    );
    assert!(stream.chunk().is_some());
    server.stop.stop();
    let rest = stream.finish();
    assert!(
        rest.text().ends_with("data: [DONE]\n\n"),
        "{}",
        rest.text().len()
    );
    assert!(rest.text().contains("\"code\":\"shutting_down\""));
    server.join();
}

#[test]
fn a_port_that_is_taken_is_told_in_one_line() {
    let server = Setup::default().start();
    let error = strata::api::listen(&server.address.to_string())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(&server.address.to_string()) && error.contains("--listen"),
        "{error}"
    );
    assert!(!error.contains('\n'));
    assert!(strata::api::listen("999.1.1.1:80").is_err());
}

#[test]
fn a_handler_that_panics_costs_one_request() {
    let server = Setup {
        memory_panics: true,
        ..Setup::saying(&["x"])
    };
    let server = server.start().ready();
    let response = server.get("/memory");
    assert_eq!(response.error(500)["code"], "internal_error");
    assert!(!response.text().contains("secret"));
    server.chat(json!({})).ok();
}
