//! Server-sent events: their form, comments, failures on the way, and clients that do not read.

use super::client::open;
use super::model::{FIRST_PIECE, Script};
use super::server::{Setup, with};
use serde_json::{Value, json};
use std::time::Duration;
use strata::config::Config;

#[test]
fn a_chat_stream_has_openais_form() {
    let server = Setup::saying(&["Hel", "lo"]).start().ready();
    let response = server.chat(json!({"stream": true}));
    assert_eq!(response.header("cache-control"), Some("no-cache"));
    let chunks = response.chunks();
    let id = chunks[0]["id"].clone();
    for chunk in &chunks {
        assert_eq!(chunk["id"], id);
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["model"], "scripted");
        assert_eq!(chunk["choices"][0]["index"], 0);
        assert_eq!(chunk.get("usage"), None);
    }
    let deltas: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"])
        .collect();
    assert_eq!(
        deltas,
        [
            &json!({"role": "assistant", "content": ""}),
            &json!({"content": "Hel"}),
            &json!({"content": "lo"}),
            &json!({}),
        ]
    );
    let finishes: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["finish_reason"])
        .collect();
    assert_eq!(
        finishes,
        [&Value::Null, &Value::Null, &Value::Null, &json!("stop")]
    );
}

#[test]
fn usage_comes_in_a_chunk_of_its_own_where_it_is_wanted() {
    let server = Setup::saying(&["Hel", "lo"]).start().ready();
    let wanted = json!({"stream": true, "stream_options": {"include_usage": true}});
    for stop in [json!(null), json!("lo")] {
        let fields = json!({"stop": stop});
        let whole = server.chat(fields.clone()).ok();
        let chunks = server.chat(with(fields, wanted.clone())).chunks();
        let (last, others) = chunks.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"], whole["usage"]);
        assert!(others.iter().all(|chunk| chunk["usage"] == Value::Null));
    }
    let unwanted = json!({"stream": true, "stream_options": {"include_usage": false}});
    let chunks = server.chat(unwanted).chunks();
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    // Without a stream it means nothing.
    server
        .chat(json!({"stream_options": {"include_usage": true}}))
        .ok();
}

#[test]
fn silence_is_filled_with_comments_before_the_first_data() {
    let setup = Setup::saying(&["x"]);
    let gate = setup.script.gate.clone();
    gate.set(true);
    let server = Setup {
        config: Config {
            keep_alive: Some(Duration::from_millis(20)),
            ..setup.config
        },
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
    for _ in 0..3 {
        assert_eq!(stream.chunk().as_deref(), Some(": keep-alive\n\n"));
    }
    gate.set(false);
    let rest = stream.finish();
    assert!(rest.text().ends_with("data: [DONE]\n\n"));
    for event in rest.text().split_terminator("\n\n") {
        assert!(
            event == ": keep-alive" || (event.starts_with("data: ") && event.lines().count() == 1)
        );
    }
}

#[test]
fn a_failed_step_is_a_500_or_an_error_event_and_the_server_lives() {
    let setup = Setup::saying(&["a", "b", "c"]);
    let server = Setup {
        script: Script {
            fails_after: Some(FIRST_PIECE + 1),
            ..setup.script.clone()
        },
        ..setup
    };
    let server = server.start().ready();
    let response = server.chat(json!({}));
    assert_eq!(response.error(500)["code"], "internal_error");
    assert!(!response.text().contains("secret"));
    let response = server.chat(json!({"stream": true}));
    let events = response.events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let error: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(error["error"]["code"], "internal_error");
    assert!(response.text().contains("event: error\ndata: {\"error\""));
    assert!(response.text().contains("\"content\":\"a\""));
    server.eventually("both are counted", |server| {
        server.counted("chat_completions", "error") == 2
    });
    // What does not come that far still works.
    server.chat(json!({"max_tokens": 1})).ok();
}

#[test]
fn an_engine_that_panics_fails_its_requests_and_health() {
    let setup = Setup::saying(&["a", "b"]);
    let server = Setup {
        script: Script {
            panics_after: Some(FIRST_PIECE),
            ..setup.script.clone()
        },
        ..setup
    };
    let server = server.start().ready();
    server.chat(json!({})).error(500);
    assert_eq!(server.get("/health").json(), json!({"status": "failed"}));
    server.chat(json!({})).error(503);
}

#[test]
fn a_client_that_does_not_read_is_cut_off_and_slows_nobody() {
    let setup = Setup::saying(&["a", "b"]);
    let server = Setup {
        script: Script {
            endless: true,
            ..setup.script.clone()
        },
        config: Config {
            stall_timeout: Duration::from_millis(300),
            keep_alive: None,
            ..setup.config
        },
        context: 1 << 22,
        ..setup
    };
    let server = server.start().ready();
    let body = json!({"prompt": "x", "stream": true, "max_tokens": 4_000_000}).to_string();
    // Held open and never read.
    let stalled = open(
        server.address,
        "POST",
        "/v1/completions",
        &[],
        body.as_bytes(),
    );
    server.eventually("the other is cut off", |server| {
        // Others are served all the while.
        server.complete(json!({"max_tokens": 20})).ok();
        server.counted("completions", "cancelled") == 1
    });
    server.eventually("its place is free", |server| {
        server.engine.load().running == 0
    });
    drop(stalled);
}
