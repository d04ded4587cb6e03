//! A model whose embedding has more rows than the vocabulary has tokens, as files of some models have: the rows beyond are
//! padding. They are never chosen, never listed, and have no share of the probability.

#[path = "support/http.rs"]
mod http;
#[path = "support/models.rs"]
mod models;
#[path = "support/process.rs"]
mod process;

use models::{RandomOptions, pad, random};
use process::{Server, completion};
use serde_json::{Value, json};
use std::path::Path;

/// Rows of opposite signs: one of them has the largest logit by far, whatever the state is.
const PADDING: [f32; 2] = [1000.0, -1000.0];
const FLAGS: [&str; 6] = ["--device", "cpu", "--threads", "2", "--parallel", "1"];
const TOKENS: usize = 48;

/// What is answered at a temperature, with log-probabilities, and which tokens the prompt may have.
fn answers(path: &Path, tokens: usize) -> Vec<Value> {
    let server = Server::start(path, &FLAGS);
    let mut answers = Vec::new();
    for temperature in [2.0, 0.0] {
        for seed in [1, 2, 3] {
            let mut body = completion("the hen", TOKENS as u32);
            body["temperature"] = temperature.into();
            body["seed"] = seed.into();
            body["logprobs"] = 20.into();
            let mut answer = server.post("/v1/completions", &body).ok();
            answers.push(answer["choices"].take());
        }
    }
    for beyond in 0..PADDING.len() {
        let body = json!({"prompt": [tokens + beyond], "max_tokens": 1});
        server.post("/v1/completions", &body).error(400);
    }
    server.assert_healthy();
    answers
}

#[test]
fn rows_beyond_the_tokens_are_never_chosen_nor_listed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let padded = folder.path().join("padded.gguf");
    for tied in [false, true] {
        let options = RandomOptions {
            tied,
            ..RandomOptions::default()
        };
        let tokens = random(&path, &options).len();
        pad(&path, &padded, &PADDING);
        let (whole, with_padding) = (answers(&path, tokens), answers(&padded, tokens));
        let sampled = whole[0][0]["logprobs"]["tokens"].as_array().unwrap();
        assert!(sampled.len() > 1, "{sampled:?}");
        assert_ne!(whole[0], whole[1], "nothing is left to chance");
        assert_eq!(whole, with_padding, "tied: {tied}");
    }
}
