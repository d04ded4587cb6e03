//! A tiny vocabulary, and a model whose next token depends on the last one alone.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex};
use strata::gguf::{Array, Metadata, Value};
use strata::model::{Batch, Model, StepError};

pub(super) const BOS: u32 = 1;
pub(super) const EOS: u32 = 2;
/// A control token that ends turns, besides `EOS`.
pub(super) const IM_END: u32 = 3;
/// A control token that ends nothing.
pub(super) const CONTROL: u32 = 4;
const FIRST_BYTE: u32 = 5;
/// The first of the pieces that a test names.
pub(super) const FIRST_PIECE: u32 = FIRST_BYTE + 256;

pub(super) const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}\
    {{ raise_exception('the system comes first') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}=";

/// The token of one byte.
pub(super) fn byte(value: u8) -> u32 {
    FIRST_BYTE + u32::from(value)
}

/// A SentencePiece vocabulary: control tokens, all bytes, and `pieces`.
pub(super) fn metadata(pieces: &[&str]) -> Metadata {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|pause|>"]
        .map(str::to_owned)
        .to_vec();
    let mut types = vec![2, 3, 3, 3, 3];
    for value in 0..=255u8 {
        tokens.push(format!("<0x{value:02X}>"));
        types.push(6);
    }
    for piece in pieces {
        tokens.push((*piece).to_owned());
        types.push(1);
    }
    let scores = vec![0.0f32; tokens.len()];
    let mut metadata = Metadata::new();
    metadata.insert("tokenizer.ggml.model", Value::String("llama".to_owned()));
    metadata.insert("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    metadata.insert("tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    metadata.insert("tokenizer.ggml.scores", Value::Array(Array::F32(scores)));
    metadata.insert("tokenizer.ggml.bos_token_id", Value::U32(BOS));
    metadata.insert("tokenizer.ggml.eos_token_id", Value::U32(EOS));
    metadata.insert("tokenizer.ggml.add_space_prefix", Value::Bool(false));
    metadata.insert(
        "tokenizer.chat_template",
        Value::String(TEMPLATE.to_owned()),
    );
    metadata
}

/// Holds steps until it is opened.
#[derive(Clone, Default)]
pub(super) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub(super) fn set(&self, closed: bool) {
        *self.0.0.lock().unwrap() = closed;
        self.0.1.notify_all();
    }

    fn pass(&self, cancelled: &dyn Fn() -> bool) -> Result<(), StepError> {
        let mut closed = self.0.0.lock().unwrap();
        while *closed {
            if cancelled() {
                return Err(StepError::Cancelled);
            }
            let (guard, _) = self
                .0
                .1
                .wait_timeout(closed, std::time::Duration::from_millis(5))
                .unwrap();
            closed = guard;
        }
        Ok(())
    }
}

/// What the model says.
#[derive(Clone, Default)]
pub(super) struct Script {
    /// In this order, begun by any token that is not one of them; then `EOS`.
    pub(super) tokens: Vec<u32>,
    /// Begins again instead of ending.
    pub(super) endless: bool,
    /// After this token a step fails as if the disk had.
    pub(super) fails_after: Option<u32>,
    /// After this token a step panics.
    pub(super) panics_after: Option<u32>,
    pub(super) gate: Gate,
}

pub(super) struct ScriptedModel {
    vocabulary: usize,
    next: HashMap<u32, u32>,
    script: Script,
}

impl ScriptedModel {
    pub(super) fn new(vocabulary: usize, script: Script) -> ScriptedModel {
        let mut next = HashMap::new();
        for pair in script.tokens.windows(2) {
            next.insert(pair[0], pair[1]);
        }
        if let (Some(last), Some(first)) = (script.tokens.last(), script.tokens.first()) {
            next.insert(*last, if script.endless { *first } else { EOS });
        }
        ScriptedModel {
            vocabulary,
            next,
            script,
        }
    }
}

impl Model for ScriptedModel {
    fn vocabulary_size(&self) -> usize {
        self.vocabulary
    }

    fn forward(
        &mut self,
        batch: &Batch<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        self.script.gate.pass(cancelled)?;
        let mut rows = Vec::new();
        for run in batch.runs.iter().filter(|run| run.wants_logits) {
            let last = run.tokens.last().copied();
            if self.script.fails_after.is_some() && last == self.script.fails_after {
                return Err(StepError::Weights(
                    "read /secret/model.gguf at 42".to_owned(),
                ));
            }
            assert!(
                self.script.panics_after.is_none() || last != self.script.panics_after,
                "the script says so"
            );
            let first = self.script.tokens.first().copied().unwrap_or(EOS);
            let chosen = last
                .and_then(|last| self.next.get(&last).copied())
                .unwrap_or(first);
            let mut row = vec![0.0; self.vocabulary];
            row[chosen as usize] = 50.0;
            rows.push(row);
        }
        Ok(rows)
    }
}
