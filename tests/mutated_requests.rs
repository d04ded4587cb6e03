//! Requests that are almost right: thousands of seeded mutations of good bodies. Each is answered with a success or with
//! the client's fault in the envelope; none is a fault of the server's.

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

use models::{RandomOptions, VocabularyKind, random};
use process::Server;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const MUTATIONS: usize = 2000;

/// A path, and a body that is answered with a success.
fn good() -> Vec<(&'static str, Value)> {
    vec![
        (
            "/v1/chat/completions",
            json!({
                "model": "model", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.01,
                "seed": 5, "stop": ["xyz", "\n\n"], "stream": false, "logprobs": true, "top_logprobs": 2, "n": 1,
                "messages": [
                    {"role": "system", "content": "be the hen"},
                    {"role": "user", "content": [{"type": "text", "text": "hello 😀"}]},
                    {"role": "assistant", "content": "tau"},
                    {"role": "user", "content": "on <|im_start|> the other"}
                ]
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "max_completion_tokens": 2, "stream": true, "stream_options": {"include_usage": true},
                "messages": [{"role": "user", "content": "hello"}], "frequency_penalty": 0, "user": "me",
            }),
        ),
        (
            "/v1/completions",
            json!({
                "prompt": "hello the", "max_tokens": 3, "temperature": 0, "logprobs": 1, "echo": false,
                "stop": "zzz", "stream": false, "seed": 1
            }),
        ),
        (
            "/v1/completions",
            json!({"prompt": [5, 9, 70], "max_tokens": 2, "stream": true}),
        ),
        (
            "/v1/completions",
            json!({"prompt": ["a", "the"], "max_tokens": 2}),
        ),
        (
            "/tokenize",
            json!({"content": "hello the hen", "add_special": true}),
        ),
        ("/detokenize", json!({"tokens": [1, 5, 9]})),
    ]
}

struct Mutator(ChaCha8Rng);

impl Mutator {
    fn below(&mut self, bound: usize) -> usize {
        self.0.next_u32() as usize % bound.max(1)
    }

    /// A value that tends to be trouble.
    fn value(&mut self) -> Value {
        let values = [
            json!(null),
            json!(true),
            json!(0),
            json!(-1),
            json!(1),
            json!(u64::MAX),
            json!(i64::MIN),
            json!(4294967296u64),
            json!(1e308),
            json!(-1e-308),
            json!(0.5),
            json!(""),
            json!("1"),
            json!("\u{0}"),
            json!("<|im_end|>"),
            json!("\u{feff}a\u{202e}"),
            json!("a".repeat(5000)),
            json!([]),
            json!([null]),
            json!([[1, 2], [3]]),
            json!(["a", "b", "c", "d", "e"]),
            json!([u32::MAX]),
            json!([-1]),
            json!({}),
            json!({"type": "text"}),
            json!({"type": "json_object"}),
            json!({"include_usage": 1}),
        ];
        let index = self.below(values.len());
        values[index].clone()
    }

    fn key(&mut self) -> &'static str {
        const KEYS: [&str; 24] = [
            "model",
            "messages",
            "prompt",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "stream",
            "stream_options",
            "logprobs",
            "top_logprobs",
            "n",
            "tools",
            "response_format",
            "logit_bias",
            "best_of",
            "echo",
            "content",
            "tokens",
            "role",
        ];
        KEYS[self.below(KEYS.len())]
    }

    /// Changes one thing somewhere inside.
    fn mutate(&mut self, value: &mut Value) {
        let deeper = self.below(3) > 0;
        match value {
            Value::Object(fields) if !fields.is_empty() && deeper => {
                let index = self.below(fields.len());
                let field = fields.values_mut().nth(index).unwrap();
                self.mutate(field);
            }
            Value::Array(items) if !items.is_empty() && deeper => {
                let index = self.below(items.len());
                self.mutate(&mut items[index]);
            }
            Value::Object(fields) => match self.below(3) {
                0 => {
                    let name = self.key();
                    let value = self.value();
                    fields.insert(name.to_owned(), value);
                }
                1 if !fields.is_empty() => {
                    let index = self.below(fields.len());
                    let name = fields.keys().nth(index).unwrap().clone();
                    fields.remove(&name);
                }
                _ => *value = self.value(),
            },
            Value::Array(items) => match self.below(3) {
                0 => items.push(self.value()),
                1 => {
                    let again = items.clone();
                    items.extend(again);
                }
                _ => *value = self.value(),
            },
            Value::String(text) if deeper => {
                let at = text
                    .char_indices()
                    .nth(self.below(text.chars().count() + 1));
                let at = at.map_or(text.len(), |(at, _)| at);
                let pieces = ["\\", "\"", "😀", "\u{0}", "<|im_end|>", "{{", "\n", "é"];
                text.insert_str(at, pieces[self.below(pieces.len())]);
            }
            _ => *value = self.value(),
        }
    }

    /// The bytes to send.
    fn body(&mut self, good: &Value) -> Vec<u8> {
        let mut value = good.clone();
        for _ in 0..self.below(4) {
            self.mutate(&mut value);
        }
        let mut bytes = value.to_string().into_bytes();
        if self.below(4) == 0 {
            let at = self.below(bytes.len());
            match self.below(5) {
                0 => bytes.truncate(at),
                1 => bytes[at] = self.0.next_u32() as u8,
                2 => bytes.insert(at, b"\"{}[],:\\0-e\xff"[self.below(12)]),
                3 => drop(bytes.remove(at)),
                _ => {
                    let deep = "[".repeat(1 + self.below(300));
                    bytes.splice(at..at, deep.bytes());
                }
            }
        }
        bytes
    }
}

#[test]
fn mutations_of_good_requests_are_never_the_servers_fault() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    random(
        &path,
        &RandomOptions {
            vocabulary: VocabularyKind::Bpe,
            context: 256,
            ..RandomOptions::default()
        },
    );
    let flags = [
        "--host-memory",
        "64MiB",
        "--context",
        "256",
        "--model-name",
        "model",
    ];
    let mut server = Server::start(&path, &flags);
    for (path, body) in good() {
        let response = server.post(path, &body);
        assert_eq!(response.status, 200, "{path} {body}: {}", response.text());
    }
    let mut statuses: BTreeMap<u16, usize> = BTreeMap::new();
    let mut mutator = Mutator(ChaCha8Rng::seed_from_u64(2026));
    for number in 0..MUTATIONS {
        let good = good();
        let (path, body) = &good[mutator.below(good.len())];
        let bytes = mutator.body(body);
        let headers = [("content-type", "application/json")];
        let response = http::call(server.address, "POST", path, &headers, &bytes);
        let told = || {
            format!(
                "{number}: {path} {}\n{}",
                String::from_utf8_lossy(&bytes),
                response.text()
            )
        };
        match response.status {
            200 if response.header("content-type") == Some("text/event-stream") => {
                // A stream may end in an event of an error, and it does end.
                assert!(response.text().ends_with("data: [DONE]\n\n"), "{}", told());
                assert!(!response.text().contains("server_error"), "{}", told());
            }
            200 => drop(response.ok()),
            status @ 400..=499 => {
                assert_ne!(status, 429, "{}", told());
                let error = response.error(status);
                assert_eq!(error["type"], "invalid_request_error", "{}", told());
            }
            _ => panic!("{}", told()),
        }
        *statuses.entry(response.status).or_default() += 1;
    }
    // Both kinds were met often, so the mutations are neither harmless nor hopeless.
    assert!(
        statuses[&200] > MUTATIONS / 10 && statuses[&400] > MUTATIONS / 10,
        "{statuses:?}"
    );
    server.eventually("nothing is left", |server| {
        server.metric("strata_requests_active", "") == 0.0
            && server.metric("strata_kv_pages", "used") == 0.0
    });
    server.assert_healthy();
    assert_eq!(server.metric("strata_requests_total", "error"), 0.0);
}
