//! How each name in `tokenizer.ggml.pre` cuts text, against llama.cpp.
//!
//! Tokens of a real vocabulary tell little about the cuts: most places between words are not bridged by any merge. So
//! the vocabulary here is made of the texts: everything of up to twelve bytes that stands in them is a token, and merges
//! grow each to its end. tests/data/pre_tokenizers.json has the lengths of the tokens that llama.cpp found with it.

use serde_json::Value;
use std::collections::BTreeSet;
use strata::gguf::Metadata;
use strata::tokenizer::{Special, Tokenizer};

const LONGEST: usize = 12;

/// Texts that are cut as the model's own tokenizer cuts them and not as llama.cpp does, by the first of the names.
const ORIGINAL: [(&str, &[&str]); 9] = [
    // It takes capital and small letters apart by ASCII alone, or not at all, and marks for no letters.
    ("tekken", &[CASES, MARKS]),
    ("gpt-4o", &[CASES, MARKS]),
    ("granite-embed-multi-97m", &[CASES]),
    ("youtu", &[CASES]),
    ("kimi-k2", &[CASES, MARKS]),
    // It joins what stands before a number to the number's first group, and then cuts both without a look at the rest.
    ("tiny_aya", &[BEFORE_NUMBER, CASES]),
    ("afmoe", &[BEFORE_NUMBER]),
    // It takes all white space for ASCII, where these patterns list some of it among the characters of Asian scripts.
    ("deepseek-llm", &[SEPARATORS]),
    ("deepseek-coder", &[SEPARATORS]),
];
const CASES: &str = "CamelCase HTTPServer iPhone ÉCOLE naïve";
const MARKS: &str = "e\u{301}a\u{300} \u{303} हिन्दी में";
const BEFORE_NUMBER: &str = "  99 bottles";
const SEPARATORS: &str = "line\u{2028}sep\u{a0}nbsp\u{3000}wide";

/// GPT-2's byte alphabet.
fn spell(bytes: &[u8]) -> String {
    let is_own = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let character = |byte: u8| {
        let others = (0..byte).filter(|&byte| !is_own(byte)).count() as u32;
        let code = if is_own(byte) {
            u32::from(byte)
        } else {
            0x100 + others
        };
        char::from_u32(code).expect("a character")
    };
    bytes.iter().map(|&byte| character(byte)).collect()
}

fn vocabulary(texts: &[&str]) -> Metadata {
    let mut pieces = BTreeSet::new();
    for bytes in texts.iter().map(|text| text.as_bytes()) {
        for length in 2..=LONGEST {
            pieces.extend(bytes.windows(length));
        }
    }
    let mut pieces: Vec<&[u8]> = pieces.into_iter().collect();
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.len()));
    let merges: Vec<String> = pieces
        .iter()
        .map(|piece| {
            let (last, before) = piece.split_last().expect("two bytes at least");
            format!("{} {}", spell(before), spell(&[*last]))
        })
        .collect();
    let bytes = (0..=255u8).map(|byte| spell(&[byte]));
    let tokens: Vec<String> = bytes
        .chain(pieces.iter().map(|piece| spell(piece)))
        .collect();
    let mut metadata = Metadata::new();
    metadata.insert("tokenizer.ggml.model", "gpt2");
    metadata.insert("tokenizer.ggml.tokens", tokens);
    metadata.insert("tokenizer.ggml.merges", merges);
    metadata
}

#[test]
fn every_name_cuts_text_as_llama_cpp_does_where_that_is_what_the_model_does() {
    let golden: Value = serde_json::from_str(include_str!("data/pre_tokenizers.json"))
        .expect("the golden file parses");
    let texts: Vec<&str> = golden["texts"]
        .as_array()
        .expect("texts")
        .iter()
        .map(|text| text.as_str().expect("a text"))
        .collect();
    let mut metadata = vocabulary(&texts);
    let mut names = 0;
    for group in golden["names"].as_array().expect("groups of names") {
        let lengths = group["lengths"].as_array().expect("lengths of each text");
        assert_eq!(lengths.len(), texts.len());
        let mut first = None;
        for name in group["names"].as_array().expect("names") {
            let name = name.as_str().expect("a name");
            let first = *first.get_or_insert(name);
            metadata.insert("tokenizer.ggml.pre", name);
            let tokenizer = Tokenizer::from_gguf(&metadata).expect("the tokenizer loads");
            let mut different = Vec::new();
            for (&text, expected) in std::iter::zip(&texts, lengths) {
                let tokens = tokenizer.encode(text, Special::Text);
                let found: Vec<usize> = tokens
                    .iter()
                    .map(|&id| tokenizer.piece_bytes(id).len())
                    .collect();
                if Value::from(found.clone()) != *expected {
                    println!("{name}: {text:?} is {found:?}, in llama.cpp {expected}");
                    different.push(text);
                }
            }
            let original = ORIGINAL.iter().find(|(name, _)| *name == first);
            let original = original.map_or(&[][..], |(_, texts)| texts);
            assert_eq!(different, original, "{name}");
            names += 1;
        }
    }
    println!("{names} names on {} texts", texts.len());
    assert!(names >= 80);
}
