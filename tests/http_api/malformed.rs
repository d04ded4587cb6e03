//! What clients get wrong: always OpenAI's envelope, never a panic, and the next request works.

use super::client::{call, connect, read_head};
use super::server::{Server, Setup};
use serde_json::{Value, json};
use std::io::Write;

const CHAT: &str = "/v1/chat/completions";

fn post(server: &Server, headers: &[(&str, &str)], body: &[u8]) -> super::client::Response {
    call(server.address, "POST", CHAT, headers, body)
}

#[test]
fn bodies_that_are_not_what_the_endpoint_takes() {
    let server = Setup::saying(&["x"]).start().ready();
    let json = [("content-type", "application/json")];
    let deep = format!("{}1{}", "[".repeat(200), "]".repeat(200));
    for body in [
        &b""[..],
        b"{",
        b"null",
        b"[]",
        b"\"hi\"",
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xFF\"}]}",
        b"{\"messages\":[],\"messages\":[]}",
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]} trailing",
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}],\"temperature\":1e999}",
        deep.as_bytes(),
    ] {
        let error = post(&server, &json, body).error(400);
        assert_eq!(
            error["type"],
            "invalid_request_error",
            "{}",
            String::from_utf8_lossy(body)
        );
    }
    server.chat(json!({})).ok();
    assert_eq!(server.counted("chat_completions", "rejected"), 10);
    assert_eq!(server.counted("chat_completions", "stop"), 1);
}

#[test]
fn content_types_other_than_json_are_refused_and_none_is_json() {
    let server = Setup::saying(&["x"]).start().ready();
    let body = br#"{"messages":[{"role":"user","content":"x"}]}"#;
    for (headers, status) in [
        (&[][..], 200),
        (&[("content-type", "application/json")], 200),
        (&[("content-type", "Application/JSON; charset=utf-8")], 200),
        (&[("content-type", "application/vnd.api+json")], 200),
        (&[("content-type", "text/plain")], 415),
        (
            &[("content-type", "application/x-www-form-urlencoded")],
            200,
        ),
        (&[("content-type", "")], 415),
    ] {
        let response = post(&server, headers, body);
        assert_eq!(response.status, status, "{headers:?}");
        if status != 200 {
            response.error(status);
        }
    }
}

#[test]
fn unknown_paths_and_methods_have_the_envelope() {
    let server = Setup::default().start().ready();
    server.get("/v2/nothing").error(404);
    server.get("/").error(404);
    server.get(CHAT).error(405);
    server.post("/health", &json!({})).error(405);
    assert_eq!(server.get(CHAT).header("allow"), Some("POST"));
    let error = server.get("/v1/models/other").error(404);
    assert_eq!(error["code"], "model_not_found");
    server.get("/v1/models/%FF").error(400);
    assert_eq!(server.get("/v1/models/scripted").ok()["id"], "scripted");
    let list = server.get("/v1/models").ok();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "scripted");
}

#[test]
fn long_prompts_are_a_matter_of_context_and_long_bodies_of_their_limit() {
    let server = Setup::saying(&["x"]).start().ready();
    let long = "a".repeat(3 << 20);
    let error = server
        .chat(json!({"messages": [{"role": "user", "content": long}]}))
        .error(400);
    assert_eq!(error["code"], "context_length_exceeded");

    let mut body = br#"{"messages":[{"role":"user","content":""#.to_vec();
    body.resize(strata::api::BODY_BYTES_MAX + 1, b'a');
    let error = post(&server, &[], &body).error(413);
    assert!(error["message"].as_str().unwrap().contains("16777216"));

    // The same without a length: chunked.
    let mut stream = connect(server.address);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body).unwrap();
    stream.write_all(b"\r\n0\r\n\r\n").unwrap();
    read_head(stream).finish().error(413);

    // A client that asks first is told at once, and sends nothing.
    let mut stream = connect(server.address);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
        1u64 << 40
    );
    stream.write_all(head.as_bytes()).unwrap();
    read_head(stream).finish().error(413);
    server.chat(json!({})).ok();
}

#[test]
fn prompts_fit_if_one_token_can_follow() {
    let server = Setup {
        script: super::model::Script {
            endless: true,
            ..Setup::saying(&["a", "b"]).script
        },
        ..Setup::saying(&["a", "b"])
    };
    let server = server.start().ready();
    for (prompt, generated) in [(62, Some(2)), (63, Some(1)), (64, None), (65, None)] {
        let fields = json!({"prompt": vec![super::model::byte(b'h'); prompt]});
        let response = server.complete(fields.clone());
        let streamed = server.complete(super::server::with(fields, json!({"stream": true})));
        match generated {
            Some(tokens) => {
                let body = response.ok();
                assert_eq!(body["usage"]["completion_tokens"], tokens);
                assert_eq!(body["usage"]["prompt_tokens"], prompt);
                assert_eq!(body["choices"][0]["finish_reason"], "length");
                assert_eq!(streamed.status, 200);
            }
            None => {
                for response in [response, streamed] {
                    let error = response.error(400);
                    assert_eq!(error["code"], "context_length_exceeded");
                    assert_eq!(error["param"], "prompt");
                    let message = error["message"].as_str().unwrap();
                    assert!(message.contains(&prompt.to_string()) && message.contains("64"));
                }
            }
        }
    }
}

#[test]
fn fields_that_would_change_the_answer_are_refused_and_others_ignored() {
    let server = Setup::saying(&["x"]).start().ready();
    for fields in [
        json!({"temperature": -1}),
        json!({"temperature": 1e39}),
        json!({"temperature": "1"}),
        json!({"top_p": 1.1}),
        json!({"n": 0}),
        json!({"max_tokens": 0}),
        json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"logit_bias": {"1": 5}}),
        json!({"frequency_penalty": 1}),
    ] {
        server.chat(fields.clone()).error(400);
        server
            .chat(super::server::with(fields, json!({"stream": true})))
            .error(400);
    }
    for fields in [
        json!({"temperature": 0}),
        json!({"temperature": 1e-30}),
        json!({"temperature": null}),
        json!({"top_p": 0}),
        json!({"top_k": 1_000_000_000}),
        json!({"seed": -5}),
        json!({"model": "any", "user": "me", "unheard_of": [1]}),
    ] {
        let body: Value = server.chat(fields.clone()).ok();
        assert_eq!(body["choices"][0]["message"]["content"], "x", "{fields}");
        assert_eq!(body["model"], "scripted");
    }
}

#[test]
fn what_a_body_becomes_in_memory_is_bounded() {
    let server = Setup::saying(&["x"]).start().ready();
    let zeros = |bytes: usize| format!("[{}0]", "0,".repeat(bytes / 2));
    let body = format!("{{\"messages\":{}}}", zeros(15 << 20));
    let error = post(&server, &[], body.as_bytes()).error(400);
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("more than 65536 values"), "{message}");
    let body = format!("{{\"prompt\":{}}}", zeros(15 << 20));
    let response = call(
        server.address,
        "POST",
        "/v1/completions",
        &[],
        body.as_bytes(),
    );
    let error = response.error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(error["message"].as_str().unwrap().contains("7864321"));
    // Fields that are refused are not kept to be.
    let body = format!("{{\"prompt\":\"x\",\"tools\":{}}}", zeros(15 << 20));
    let response = call(
        server.address,
        "POST",
        "/v1/completions",
        &[],
        body.as_bytes(),
    );
    assert_eq!(response.error(400)["code"], "unsupported_parameter");
    server.chat(json!({})).ok();
}
