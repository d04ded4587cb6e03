//! What chat and completion answers have in common: the envelope, usage, and log-probabilities' tokens.

use super::sequence::Delta;
use super::{chat, completions};
use crate::engine::FinishReason;
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Names this build: with the same fingerprint, seed and request, the answer is the same.
const FINGERPRINT: &str = concat!("strata-", env!("CARGO_PKG_VERSION"));

/// One answer, streamed or whole.
pub(super) struct Answer {
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: Arc<str>,
    pub(super) tokenizer: Arc<Tokenizer>,
    pub(super) shape: Shape,
}

/// Whose format it is.
pub(super) enum Shape {
    Chat { logprobs: bool },
    Completion { logprobs: bool },
}

/// What a stream remembers of one choice.
#[derive(Default)]
pub(super) struct Choice {
    pub(super) index: usize,
    /// A chunk of it has been sent.
    pub(super) started: bool,
    /// Text of the prompt that comes first, where the client wants an echo.
    pub(super) echo: String,
    /// Characters of the tokens before, for `text_offset`.
    pub(super) characters: usize,
}

impl Answer {
    /// The choices that each go into a chunk of their own for this delta.
    pub(super) fn chunk_choices(&self, choice: &mut Choice, delta: &Delta) -> Vec<Value> {
        match self.shape {
            Shape::Chat { logprobs } => {
                chat::chunk_choices(&self.tokenizer, choice, delta, logprobs)
            }
            Shape::Completion { logprobs } => {
                completions::chunk_choices(&self.tokenizer, choice, delta, logprobs)
            }
        }
    }

    /// The choice of a whole answer; `whole` is all its deltas together.
    pub(super) fn whole_choice(&self, choice: &mut Choice, whole: &Delta) -> Value {
        match self.shape {
            Shape::Chat { logprobs } => {
                chat::whole_choice(&self.tokenizer, choice, whole, logprobs)
            }
            Shape::Completion { logprobs } => {
                completions::whole_choice(&self.tokenizer, choice, whole, logprobs)
            }
        }
    }

    /// A chunk of a stream. `usage` is there where the client wants usage: null in all chunks but the last.
    pub(super) fn chunk(&self, choices: Vec<Value>, usage: Option<Value>) -> Value {
        self.envelope(true, choices, usage)
    }

    pub(super) fn whole(&self, choices: Vec<Value>, usage: Value) -> Value {
        self.envelope(false, choices, Some(usage))
    }

    fn envelope(&self, chunk: bool, choices: Vec<Value>, usage: Option<Value>) -> Value {
        let object = match (&self.shape, chunk) {
            (Shape::Chat { .. }, false) => "chat.completion",
            (Shape::Chat { .. }, true) => "chat.completion.chunk",
            (Shape::Completion { .. }, _) => "text_completion",
        };
        let mut envelope = Map::new();
        envelope.insert("id".to_owned(), json!(self.id));
        envelope.insert("object".to_owned(), json!(object));
        envelope.insert("created".to_owned(), json!(self.created));
        envelope.insert("model".to_owned(), json!(*self.model));
        envelope.insert("system_fingerprint".to_owned(), json!(FINGERPRINT));
        envelope.insert("choices".to_owned(), Value::Array(choices));
        if let Some(usage) = usage {
            envelope.insert("usage".to_owned(), usage);
        }
        Value::Object(envelope)
    }
}

pub(super) fn usage(prompt_tokens: usize, completion_tokens: usize) -> Value {
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    })
}

pub(super) fn finish_reason(finish: Option<FinishReason>) -> Value {
    match finish {
        None => Value::Null,
        Some(FinishReason::Stop) => json!("stop"),
        Some(FinishReason::Length) => json!("length"),
    }
}

/// A token's text for log-probabilities: pieces of characters show as U+FFFD; `bytes` has them.
pub(super) fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8_lossy(tokenizer.piece_bytes_with_control(id)).into_owned()
}

/// JSON has no infinities; a probability of zero is this small.
pub(super) fn logarithm(logprob: Option<f32>) -> f32 {
    logprob
        .filter(|value| value.is_finite())
        .unwrap_or(LOGPROB_MIN)
}

/// What OpenAI sends for tokens that are not among the most probable.
const LOGPROB_MIN: f32 = -9999.0;
