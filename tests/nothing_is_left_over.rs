//! When all requests have ended, however they ended, the metrics of the real program add up: nobody runs or waits, no
//! page of the KV cache is in use, and every request and token is counted once.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod client;
#[expect(dead_code, reason = "the program is shared with other tests")]
#[path = "support/program.rs"]
mod program;

use client::open;
use program::{Page, Program, eventually, get, post, wait_until_ready};
use serde_json::json;
use std::path::Path;

#[test]
fn after_requests_that_ended_in_every_way() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama.gguf");
    let flags = ["--device", "cpu", "--context", "512", "--parallel", "2"];
    let mut program = Program::serve(&model, &flags);
    let address = program.address();
    wait_until_ready(address);
    let at_rest = Page::of(address);
    let used = r#"strata_kv_pages{tier="host",state="used"}"#;
    let pages = at_rest.sum("strata_kv_pages");
    assert!(pages > 0.0);

    // To the limit of tokens, alone and at once; some end by an end token.
    let answers: Vec<_> = (0..6)
        .map(|number| {
            std::thread::spawn(move || {
                let body = json!({"prompt": [10 + number, 20, 30], "max_tokens": 40, "seed": number, "temperature": 1});
                post(address, "/v1/completions", &body).ok()["usage"].clone()
            })
        })
        .collect();
    let usages: Vec<_> = answers
        .into_iter()
        .map(|answer| answer.join().unwrap())
        .collect();
    let counted = |key: &str| {
        usages
            .iter()
            .map(|usage| usage[key].as_f64().unwrap())
            .sum::<f64>()
    };
    let page = Page::of(address);
    assert_eq!(
        page.value("strata_prompt_tokens_total"),
        counted("prompt_tokens")
    );
    assert_eq!(
        page.value("strata_generated_tokens_total"),
        counted("completion_tokens")
    );

    // Refused.
    post(address, "/v1/completions", &json!({"prompt": [99_999_999]})).error(400);
    post(
        address,
        "/v1/completions",
        &json!({"prompt": [5], "temperature": -1}),
    )
    .error(400);
    // Clients that leave: one before it has read anything, one in the middle.
    let body = json!({"prompt": [40, 41], "max_tokens": 500, "stream": true}).to_string();
    for chunks in [0, 2] {
        let headers = [("content-type", "application/json")];
        let mut stream = open(
            address,
            "POST",
            "/v1/completions",
            &headers,
            body.as_bytes(),
        );
        for _ in 0..chunks {
            assert!(stream.chunk().is_some());
        }
    }

    eventually("every request has ended", || {
        Page::of(address).sum("strata_requests_total") == 10.0
    });
    eventually("nothing is left over", || {
        let page = Page::of(address);
        page.sum("strata_requests_active") == 0.0 && page.value(used) == 0.0
    });
    let page = Page::of(address);
    assert_eq!(page.sum("strata_kv_pages"), pages);
    assert_eq!(
        page.sum("strata_weight_home_bytes"),
        at_rest.sum("strata_weight_home_bytes")
    );
    assert_eq!(
        page.sum("strata_memory_used_bytes"),
        at_rest.sum("strata_memory_used_bytes")
    );
    let outcome = |outcome: &str| {
        let sample =
            format!(r#"strata_requests_total{{endpoint="completions",outcome="{outcome}"}}"#);
        page.value(&sample)
    };
    assert_eq!(outcome("rejected"), 2.0);
    assert_eq!(
        outcome("stop") + outcome("length") + outcome("cancelled"),
        8.0
    );
    assert_eq!(
        page.value(r#"strata_request_seconds_count{endpoint="completions"}"#),
        10.0
    );
    let steps = page.value("strata_step_seconds_count");
    assert!(steps > 0.0);
    assert_eq!(page.value("strata_step_width_count"), steps);
    assert_eq!(get(address, "/memory").ok()["steps"].as_f64(), Some(steps));
}
