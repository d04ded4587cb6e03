//! From GGUF metadata to a [`Tokenizer`], with every check that a file needs.

use super::byte_pairs::{BytePairs, MERGES};
use super::end_tokens;
use super::pre_patterns::{Bos, FALLBACK, Known, known};
use super::pre_tokenizer::PreTokenizer;
use super::sentence_pieces::SentencePieces;
use super::special_tokens::{SpaceAfter, SpecialTokens};
use super::vocabulary::{Kind, Spelling, TOKEN_TYPE, TOKENS, Vocabulary, byte_of};
use super::{Method, Tokenizer, TokenizerError};
use crate::gguf::Metadata;

const NAME: &str = "general.name";
const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const SCORES: &str = "tokenizer.ggml.scores";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";

pub(super) fn tokenizer(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
    // SentencePiece's own way of merging has no pre-tokeniser.
    let cutting = match metadata.require_string(MODEL)? {
        "llama" => None,
        "gpt2" => Some(pre_tokenizer(metadata.string(PRE)?.unwrap_or_default())),
        "gemma4" => Some(pre_tokenizer("gemma4")),
        other => {
            return Err(TokenizerError::invalid(
                MODEL,
                format!("tokenizer {other:?} is not supported; `gpt2`, `llama` and `gemma4` are"),
            ));
        }
    };
    let spelling = cutting.map_or(Spelling::SentencePiece, |known| known.spelling);
    let texts = metadata.require_strings(TOKENS)?;
    let types = metadata.i64s(TOKEN_TYPE)?;
    let mut vocabulary = Vocabulary::new(texts, types.as_deref(), spelling)?;

    let (method, bos_rule) = match &cutting {
        Some(known) => (byte_pairs(metadata, known, texts, &vocabulary)?, known.bos),
        None => (
            sentence_pieces(metadata, texts, &vocabulary)?,
            Bos::UnlessTold,
        ),
    };
    // SentencePiece files that do not name them have <s> and </s> at these places.
    let usual = |id: u32| {
        let usual = cutting.is_none() && vocabulary.kind(id) == Kind::Control;
        usual.then_some(id)
    };
    let bos = token_id(metadata, BOS, &vocabulary)?.or_else(|| usual(1));
    let eos = token_id(metadata, end_tokens::EOS, &vocabulary)?.or_else(|| usual(2));
    let add_bos = metadata.bool(ADD_BOS)?;
    if add_bos == Some(true) && bos.is_none() {
        return Err(TokenizerError::invalid(
            BOS,
            format!("missing, though `{ADD_BOS}` is true"),
        ));
    }
    let end_of_generation = end_tokens::find(metadata, &mut vocabulary, eos)?;
    let add_space_prefix = metadata.bool(ADD_SPACE_PREFIX)?.unwrap_or(true);
    let space_after = SpaceAfter::of_model(metadata.string(NAME)?.unwrap_or_default());
    Ok(Tokenizer {
        specials: SpecialTokens::new(&vocabulary, space_after),
        vocabulary,
        method,
        bos,
        eos,
        add_bos: match bos_rule {
            Bos::IfTold => add_bos == Some(true),
            Bos::UnlessTold => add_bos != Some(false),
            Bos::Always => true,
        },
        add_space_prefix: add_space_prefix && cutting.is_none(),
        end_of_generation,
    })
}

/// A key that holds the id of a token, which must be one of the vocabulary.
pub(super) fn token_id(
    metadata: &Metadata,
    key: &'static str,
    vocabulary: &Vocabulary,
) -> Result<Option<u32>, TokenizerError> {
    let id = metadata.u32(key)?;
    match id {
        Some(id) if id as usize >= vocabulary.len() => Err(TokenizerError::invalid(
            key,
            format!("token {id} of a vocabulary of {}", vocabulary.len()),
        )),
        _ => Ok(id),
    }
}

fn pre_tokenizer(name: &str) -> Known {
    known(name).unwrap_or_else(|| {
        tracing::warn!(
            key = PRE,
            name,
            fallback = FALLBACK,
            "unknown pre-tokeniser; prompts may be cut into other tokens than the model was trained with"
        );
        known(FALLBACK).expect("the fallback is a known pre-tokeniser")
    })
}

fn byte_pairs(
    metadata: &Metadata,
    known: &Known,
    texts: &[String],
    vocabulary: &Vocabulary,
) -> Result<Method, TokenizerError> {
    let bytes = byte_tokens(texts, vocabulary);
    Ok(Method::BytePairs {
        words: PreTokenizer::new(known),
        pairs: BytePairs::new(metadata.require_strings(MERGES)?, vocabulary, bytes)?,
    })
}

fn sentence_pieces(
    metadata: &Metadata,
    texts: &[String],
    vocabulary: &Vocabulary,
) -> Result<Method, TokenizerError> {
    let scores = metadata
        .f32s(SCORES)?
        .unwrap_or_else(|| vec![0.0; texts.len()]);
    if scores.len() < texts.len() {
        return Err(TokenizerError::invalid(
            SCORES,
            format!("{} scores for {} tokens", scores.len(), texts.len()),
        ));
    }
    let bytes = byte_tokens(texts, vocabulary);
    let unknown = token_id(metadata, UNKNOWN, vocabulary)?
        .or((vocabulary.kind(0) == Kind::Unknown).then_some(0))
        // Never a control token: text that cannot be spelt is left out rather than ending a turn.
        .filter(|&id| vocabulary.kind(id) != Kind::Control);
    Ok(Method::SentencePieces(SentencePieces::new(
        &scores, bytes, unknown, vocabulary,
    )))
}

/// From a byte to its token: the one spelt `<0x41>`, failing that the piece that is this byte.
fn byte_tokens(texts: &[String], vocabulary: &Vocabulary) -> [Option<u32>; 256] {
    let mut bytes = [None; 256];
    for (id, text) in (0..).zip(texts) {
        let kind = vocabulary.kind(id);
        if let Some(byte) = byte_of(text)
            && matches!(kind, Kind::Byte | Kind::Normal)
        {
            bytes[usize::from(byte)].get_or_insert(id);
        }
    }
    for byte in 0..=255u8 {
        let entry = &mut bytes[usize::from(byte)];
        *entry = entry.or_else(|| vocabulary.find(&[byte]));
    }
    bytes
}
