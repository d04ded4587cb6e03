//! Which tokens end the model's turn: those that the metadata name, and control tokens with texts that are known to.

use super::TokenizerError;
use super::vocabulary::{Kind, Vocabulary};
use crate::gguf::Metadata;

pub(super) const EOS: &str = "tokenizer.ggml.eos_token_id";

/// Keys of ids that end a turn, besides `EOS`. A completion of code ends at the padding and at the borders of files.
const KEYS: [&str; 5] = [
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
];

/// Texts that end a turn in the models that are known to use them.
const TEXTS: [&str; 32] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// The end tokens, sorted. A known text whose token is user-defined is a fault of the conversion that many files
/// have: it ends the turn all the same and becomes a control token. A normal piece of that text is text.
pub(super) fn find(
    metadata: &Metadata,
    vocabulary: &mut Vocabulary,
    eos: Option<u32>,
) -> Result<Vec<u32>, TokenizerError> {
    let mut ends: Vec<u32> = eos.into_iter().collect();
    for key in KEYS {
        ends.extend(super::load::token_id(metadata, key, vocabulary)?);
    }
    for id in 0..vocabulary.len() as u32 {
        let kind = vocabulary.kind(id);
        if !matches!(kind, Kind::Control | Kind::UserDefined) {
            continue;
        }
        let Some(text) = TEXTS
            .iter()
            .find(|text| text.as_bytes() == vocabulary.piece(id))
        else {
            continue;
        };
        if kind == Kind::UserDefined {
            tracing::warn!(
                id,
                text,
                "an end token is not marked as a control token in the file; taken as one"
            );
            vocabulary.set_kind(id, Kind::Control);
        }
        ends.push(id);
    }
    ends.sort_unstable();
    ends.dedup();

    // In these families `<|end|>` closes one message of several.
    let has = |text: &str| {
        ends.iter()
            .any(|&id| vocabulary.piece(id) == text.as_bytes())
    };
    let several_messages =
        (has("<|return|>") && has("<|call|>")) || (has("<|flush|>") && has("<|calls|>"));
    let tool_response = has("<|tool_response>");
    if several_messages {
        ends.retain(|&id| Some(id) == eos || vocabulary.piece(id) != b"<|end|>");
    }
    if tool_response {
        ends.retain(|&id| Some(id) == eos || vocabulary.piece(id) != b"</s>");
    }
    if ends.is_empty() {
        tracing::warn!(
            key = EOS,
            "the file names no end token; generation ends only at the requested length"
        );
    } else if eos.is_none() {
        tracing::warn!(key = EOS, ends = ?ends, "the file names no end-of-sequence token; taken from known texts");
    }
    Ok(ends)
}
