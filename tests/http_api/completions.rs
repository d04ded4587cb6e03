//! `/v1/completions`, `/tokenize` and `/detokenize`.

use super::model::{BOS, FIRST_PIECE, byte};
use super::server::Setup;
use serde_json::{Value, json};

#[test]
fn prompts_may_be_text_or_tokens_one_or_several() {
    let server = Setup::saying(&["a", "b"]).start().ready();
    let h = byte(b'h');
    for (prompt, choices, prompt_tokens) in [
        (json!("hi"), 1, 3),
        (json!(["hi"]), 1, 3),
        (json!(["hi", "x"]), 2, 5),
        (json!([h, h]), 1, 2),
        (json!([[h], [h, h]]), 2, 3),
        (json!(""), 1, 1),
    ] {
        let body = server.complete(json!({"prompt": prompt})).ok();
        assert_eq!(body["object"], "text_completion");
        assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
        let list = body["choices"].as_array().unwrap();
        assert_eq!(list.len(), choices, "{prompt}");
        for (i, choice) in list.iter().enumerate() {
            assert_eq!(
                choice,
                &json!({"index": i, "text": "ab", "logprobs": null, "finish_reason": "stop"})
            );
        }
        assert_eq!(body["usage"]["prompt_tokens"], prompt_tokens, "{prompt}");
    }
    for prompt in [
        json!([]),
        json!([[]]),
        json!([FIRST_PIECE + 2]),
        json!([-1]),
        json!([1.5]),
        json!(5),
        json!(null),
        json!({"text": "x"}),
        json!(vec!["x"; 17]),
    ] {
        server.complete(json!({"prompt": prompt})).error(400);
    }
    server
        .complete(json!({"prompt": ["x", "y"], "n": 9}))
        .error(400);
}

#[test]
fn a_stream_is_the_whole_in_pieces() {
    let server = Setup::saying(&["a", "b", "c"]).start().ready();
    let chunks = server
        .complete(json!({"stream": true, "echo": true, "max_tokens": 2}))
        .chunks();
    let text: String = chunks
        .iter()
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(text, "hiab");
    assert_eq!(
        chunks.last().unwrap()["choices"][0]["finish_reason"],
        "length"
    );
    let whole = server.complete(json!({"echo": true, "max_tokens": 2})).ok();
    assert_eq!(whole["choices"][0]["text"], "hiab");
    let tokens = json!([BOS, byte(b'h')]);
    let whole = server
        .complete(json!({"prompt": tokens, "echo": true}))
        .ok();
    assert_eq!(whole["choices"][0]["text"], "habc");
}

#[test]
fn log_probabilities_are_lists() {
    let server = Setup::saying(&["ab", "é"]).start().ready();
    let body = server
        .complete(json!({"logprobs": 1, "temperature": 0}))
        .ok();
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["ab", "é"]));
    assert_eq!(logprobs["text_offset"], json!([0, 2]));
    assert_eq!(logprobs["token_logprobs"].as_array().unwrap().len(), 2);
    assert!(logprobs["top_logprobs"][0]["ab"].as_f64().unwrap() > -0.01);
    let body = server.complete(json!({"logprobs": 0})).ok();
    assert_eq!(
        body["choices"][0]["logprobs"]["top_logprobs"],
        json!([{}, {}])
    );
    server.complete(json!({"logprobs": 21})).error(400);
    server
        .complete(json!({"logprobs": 1, "echo": true}))
        .error(400);
}

#[test]
fn tokenize_and_detokenize_are_inverse() {
    let server = Setup::saying(&["ab"]).start().ready();
    let tokenize = |body: Value| server.post("/tokenize", &body).ok()["tokens"].clone();
    let e: Vec<u32> = "é".bytes().map(byte).collect();
    assert_eq!(tokenize(json!({"content": "é"})), json!(e));
    assert_eq!(
        tokenize(json!({"content": "é", "add_special": true})),
        json!([BOS, e[0], e[1]])
    );
    assert_eq!(tokenize(json!({"content": "<s>"})), json!([BOS]));
    assert_eq!(
        tokenize(json!({"content": "<s>", "parse_special": false}))
            .as_array()
            .unwrap()
            .len(),
        3
    );
    assert_eq!(
        tokenize(json!({"content": "é", "with_pieces": true})),
        json!([{"id": e[0], "piece": [0xC3]}, {"id": e[1], "piece": [0xA9]}])
    );
    let text = server.post("/detokenize", &json!({"tokens": [FIRST_PIECE, e[0], e[1]]}));
    assert_eq!(text.ok(), json!({"content": "abé"}));
    assert_eq!(
        server.post("/detokenize", &json!({"tokens": []})).ok(),
        json!({"content": ""})
    );
    server
        .post("/detokenize", &json!({"tokens": [99999]}))
        .error(400);
    server.post("/tokenize", &json!({"content": 5})).error(400);
    server.post("/tokenize", &json!({})).error(400);
}
