//! Copies the vocabulary of one file into the metadata of another with more rows.

use std::collections::HashSet;

use super::SynthError;
use crate::gguf::{GgufError, Metadata};

const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
/// Values of `enum llama_token_type`.
const TYPE_NORMAL: i32 = 1;
const TYPE_UNUSED: i32 = 5;
/// Below the score of any real token.
const FILLER_SCORE: f32 = -1e9;

/// Copies every `tokenizer.*` key. Where `source` has fewer tokens than `rows`, tokens `<filler_N>` of the type UNUSED
/// make up the number, which is returned.
pub(super) fn copy(
    source: &Metadata,
    rows: u32,
    destination: &mut Metadata,
) -> Result<u32, SynthError> {
    let tokens = source
        .require_strings(TOKENS)
        .map_err(SynthError::Vocabulary)?;
    let filler = match u32::try_from(tokens.len()) {
        Ok(count) if count <= rows => rows - count,
        _ => {
            return Err(SynthError::VocabularyTooLarge {
                tokens: tokens.len() as u64,
                rows,
            });
        }
    };
    for (key, value) in source.iter() {
        if key.starts_with("tokenizer.") {
            destination.insert(key, value.clone());
        }
    }
    if filler == 0 {
        return Ok(0);
    }

    let known: HashSet<&str> = tokens.iter().map(String::as_str).collect();
    let names = (0u64..)
        .map(|number| format!("<filler_{number}>"))
        .filter(|name| !known.contains(name.as_str()))
        .take(filler as usize);
    let all: Vec<String> = tokens.iter().cloned().chain(names).collect();

    let types = source.i64s(TYPES).map_err(SynthError::Vocabulary)?;
    let types = match types {
        None => vec![TYPE_NORMAL; tokens.len()],
        Some(types) => types
            .into_iter()
            .map(i32::try_from)
            .collect::<Result<_, _>>()
            .map_err(|_| SynthError::Vocabulary(GgufError::key(TYPES, "holds no token type")))?,
    };
    destination.insert(
        TYPES,
        extended(TYPES, types, tokens.len(), all.len(), TYPE_UNUSED)?,
    );
    if let Some(scores) = source.f32s(SCORES).map_err(SynthError::Vocabulary)? {
        let scores = extended(SCORES, scores, tokens.len(), all.len(), FILLER_SCORE)?;
        destination.insert(SCORES, scores);
    }
    destination.insert(TOKENS, all);
    Ok(filler)
}

/// `values`, one per token, made longer.
fn extended<T: Clone>(
    key: &str,
    mut values: Vec<T>,
    tokens: usize,
    length: usize,
    value: T,
) -> Result<Vec<T>, SynthError> {
    if values.len() != tokens {
        return Err(SynthError::Vocabulary(GgufError::key(
            key,
            format_args!("holds {} values for {tokens} tokens", values.len()),
        )));
    }
    values.resize(length, value);
    Ok(values)
}
