//! SIGTERM ends the program with exit code 0 whatever it is doing, and clients hear the end of their answers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod client;
#[expect(dead_code, reason = "the program is shared with other tests")]
#[path = "support/program.rs"]
mod program;
#[path = "support/synthesised.rs"]
mod synthesised;

use client::open;
use program::{Page, Program, eventually, get, wait_until_ready};
use serde_json::json;

/// Everything goes over a link that is so slow that what is under way cannot end by itself within the test.
const SLOW: [&str; 12] = [
    "--device",
    "emulated",
    "--device-memory",
    "128MiB",
    "--host-memory",
    "128MiB",
    "--link-rate",
    "4MB/s",
    "--context",
    "512",
    "--parallel",
    "1",
];

#[test]
fn before_it_listens() {
    let mut program = Program::serve(&synthesised::tinyllama(), &SLOW);
    program.line_with("the plan:");
    program.terminate();
    assert_eq!(program.wait().code(), Some(0), "{}", program.whole_log());
}

#[test]
fn while_the_model_is_loaded() {
    let mut program = Program::serve(&synthesised::tinyllama(), &SLOW);
    let address = program.address();
    let health = get(address, "/health");
    assert_eq!(health.status, 503);
    assert_eq!(health.json()["status"], "loading");
    program.terminate();
    assert_eq!(program.wait().code(), Some(0));
    let log = program.whole_log();
    assert!(!log.contains("the weights are in place"), "{log}");
    assert!(!log.contains("ERROR"), "{log}");
}

#[test]
fn in_the_middle_of_long_prompts() {
    // A step takes more than ten seconds, a prompt takes many steps, and grace is short.
    let flags = [
        "--device",
        "emulated",
        "--device-memory",
        "128MiB",
        "--host-memory",
        "128MiB",
        "--link-rate",
        "40MB/s",
        "--context",
        "512",
        "--parallel",
        "4",
        "--grace",
        "1",
    ];
    let mut program = Program::serve(&synthesised::tinyllama(), &flags);
    let address = program.address();
    wait_until_ready(address);
    let prompt: Vec<u32> = (300..700).collect();
    let body = json!({"prompt": prompt, "max_tokens": 100, "stream": true}).to_string();
    let headers = [("content-type", "application/json")];
    let streams: Vec<_> = (0..4)
        .map(|_| {
            open(
                address,
                "POST",
                "/v1/completions",
                &headers,
                body.as_bytes(),
            )
        })
        .collect();
    eventually("a prompt is computed", || {
        Page::of(address).value(r#"strata_requests_active{state="running"}"#) >= 1.0
    });
    program.terminate();
    for stream in streams {
        let answer = stream.finish();
        assert_eq!(answer.status, 200);
        let text = answer.text();
        assert!(text.contains(r#""code":"shutting_down""#), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    }
    assert_eq!(program.wait().code(), Some(0));
}
