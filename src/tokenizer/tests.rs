//! Whole tokenizers of small hand-made vocabularies: loading, BOS, end tokens, decoding, hostile files.

use super::byte_level::character_of;
use super::*;
use crate::gguf::{Metadata, Value};
use rand::{RngExt, SeedableRng};
use std::sync::Arc;

/// A SentencePiece vocabulary: <unk>, <s>, </s>, the 256 bytes, then normal pieces from id 259.
pub(super) fn sentence_piece(pieces: &[&str]) -> Metadata {
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    texts.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
    texts.extend(pieces.iter().map(|p| p.to_string()));
    let mut types = vec![2, 3, 3];
    types.extend([6; 256]);
    types.extend(vec![1; pieces.len()]);
    let scores: Vec<f32> = (0..texts.len()).map(|i| -(i as f32)).collect();
    let mut metadata = Metadata::new();
    metadata.insert("tokenizer.ggml.model", "llama");
    metadata.insert("tokenizer.ggml.tokens", texts);
    metadata.insert("tokenizer.ggml.token_type", types);
    metadata.insert("tokenizer.ggml.scores", scores);
    metadata.insert("tokenizer.ggml.eos_token_id", 2u32);
    metadata
}

/// A GPT-2-style vocabulary: the given control tokens first, then the 256 bytes, then nothing but bytes.
pub(super) fn byte_level(controls: &[&str]) -> Metadata {
    let mut texts: Vec<String> = controls.iter().map(|c| c.to_string()).collect();
    texts.extend((0..=255).map(|byte| character_of(byte).to_string()));
    let mut types = vec![3; controls.len()];
    types.extend([1; 256]);
    let mut metadata = Metadata::new();
    metadata.insert("tokenizer.ggml.model", "gpt2");
    metadata.insert("tokenizer.ggml.pre", "gpt-2");
    metadata.insert("tokenizer.ggml.tokens", texts);
    metadata.insert("tokenizer.ggml.token_type", types);
    metadata.insert("tokenizer.ggml.merges", Vec::<String>::new());
    metadata
}

pub(super) fn with(mut metadata: Metadata, entries: &[(&str, Value)]) -> Metadata {
    for (key, value) in entries {
        metadata.insert(*key, value.clone());
    }
    metadata
}

pub(super) fn load(metadata: &Metadata) -> Tokenizer {
    Tokenizer::from_gguf(metadata).unwrap()
}

fn refused(metadata: &Metadata) -> String {
    Tokenizer::from_gguf(metadata).err().unwrap().to_string()
}

/// The same entries without one key.
fn without(metadata: &Metadata, key: &str) -> Metadata {
    let mut rest = Metadata::new();
    for (other, value) in metadata.iter().filter(|(other, _)| *other != key) {
        rest.insert(other, value.clone());
    }
    rest
}

#[test]
fn broken_files_are_refused_by_key() {
    let strings =
        |list: &[&str]| Value::from(list.iter().map(|s| s.to_string()).collect::<Vec<_>>());
    let spm = sentence_piece(&["a"]);
    let bpe = byte_level(&["<s>"]);
    for (base, key, value) in [
        (&spm, "tokenizer.ggml.model", Value::from("bert")),
        (&spm, "tokenizer.ggml.model", Value::from(7u32)),
        (&spm, "tokenizer.ggml.bos_token_id", Value::from(260u32)),
        (&spm, "tokenizer.ggml.eos_token_id", Value::from(u64::MAX)),
        (
            &spm,
            "tokenizer.ggml.eot_token_id",
            Value::from(1_000_000u32),
        ),
        (&spm, "tokenizer.ggml.unknown_token_id", Value::from(-1i32)),
        (&spm, "tokenizer.ggml.scores", Value::from(vec![0.0f32; 3])),
        (&spm, "tokenizer.ggml.scores", Value::from("none")),
        (
            &spm,
            "tokenizer.ggml.token_type",
            Value::from(vec![1i32; 3]),
        ),
        (
            &spm,
            "tokenizer.ggml.token_type",
            Value::from(vec![1.0f32; 260]),
        ),
        (&spm, "tokenizer.ggml.tokens", strings(&[])),
        (&spm, "tokenizer.ggml.tokens", Value::from(vec![1u32])),
        (&spm, "tokenizer.ggml.add_bos_token", Value::from(1u32)),
        (&bpe, "tokenizer.ggml.merges", strings(&["ab"])),
        (&bpe, "tokenizer.ggml.merges", Value::from(1u32)),
        (&bpe, "tokenizer.ggml.pre", Value::from(1u32)),
        (&bpe, "tokenizer.ggml.add_bos_token", Value::from(1u32)),
    ] {
        let error = refused(&with(base.clone(), &[(key, value)]));
        assert!(error.contains(key), "{key}: {error}");
    }
    for (base, key) in [
        (&spm, "tokenizer.ggml.model"),
        (&spm, "tokenizer.ggml.tokens"),
        (&bpe, "tokenizer.ggml.merges"),
    ] {
        let error = refused(&without(base, key));
        assert!(error.contains(key), "{key}: {error}");
    }
    // BOS is to be added and there is none.
    let error = refused(&with(bpe, &[("tokenizer.ggml.add_bos_token", true.into())]));
    assert!(error.contains("tokenizer.ggml.bos_token_id"), "{error}");
}

#[test]
fn unusual_files_load() {
    let spm = sentence_piece(&["a"]);
    let types: Vec<u32> = [vec![2, 3, 3], vec![6; 256], vec![1]].concat();
    let wide: Vec<u64> = types.iter().map(|&t| u64::from(t)).collect();
    for value in [Value::from(types), Value::from(wide)] {
        let tokenizer = load(&with(spm.clone(), &[("tokenizer.ggml.token_type", value)]));
        assert_eq!(tokenizer.encode("</s>", Special::Parse), [2]);
    }
    // Neither types nor scores nor end token: bytes are still known by their spelling.
    let bare = without(
        &without(
            &without(&spm, "tokenizer.ggml.token_type"),
            "tokenizer.ggml.scores",
        ),
        "tokenizer.ggml.eos_token_id",
    );
    let tokenizer = load(&with(
        bare,
        &[("tokenizer.ggml.add_space_prefix", false.into())],
    ));
    assert_eq!(tokenizer.encode("ab", Special::Text), [259, 3 + 98]);
    assert_eq!(tokenizer.decode(&[259, 3 + 98]), "ab");
    // A pre-tokeniser of the future.
    let tokenizer = load(&with(
        byte_level(&[]),
        &[("tokenizer.ggml.pre", "of the future".into())],
    ));
    assert_eq!(tokenizer.encode("a1", Special::Text), [97, 49]);
    // Without an end token.
    let tokenizer = load(&without(
        &byte_level(&["<x>"]),
        "tokenizer.ggml.eos_token_id",
    ));
    assert!(tokenizer.end_of_generation().is_empty());
}

/// Seeded damage to every key: an error or a tokenizer that encodes and decodes, never a panic.
#[test]
fn damaged_vocabularies_never_panic() {
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(3);
    let texts = [
        "",
        "a",
        " ",
        "▁",
        "<0x41>",
        "<0xZZ>",
        "<s>",
        "é",
        "\u{0}",
        "aa",
        "Ġ",
        "日本",
        "a b",
        "<|im_end|>",
    ];
    for round in 0..3000 {
        let mut metadata = Metadata::new();
        let count = random.random_range(1..20);
        let mut tokens: Vec<String> = (0..count)
            .map(|_| texts[random.random_range(0..texts.len())].to_string())
            .collect();
        if random.random_range(0..4) > 0 {
            tokens.sort();
            tokens.dedup();
        }
        let merges: Vec<String> = (0..random.random_range(0..5))
            .map(|_| {
                format!(
                    "{} {}",
                    texts[random.random_range(0..texts.len())],
                    texts[random.random_range(0..texts.len())]
                )
            })
            .collect();
        metadata.insert(
            "tokenizer.ggml.model",
            ["gpt2", "llama", "gemma4"][random.random_range(0..3)],
        );
        metadata.insert(
            "tokenizer.ggml.pre",
            ["default", "llama3", "smollm", "gemma4", "superbpe"][random.random_range(0..5)],
        );
        if random.random_range(0..3) > 0 {
            let types: Vec<i32> = tokens.iter().map(|_| random.random_range(-1..9)).collect();
            metadata.insert("tokenizer.ggml.token_type", types);
        }
        let scores: Vec<f32> = tokens
            .iter()
            .map(|_| [0.0, f32::NAN, f32::INFINITY, -1.0][random.random_range(0..4)])
            .collect();
        metadata.insert("tokenizer.ggml.scores", scores);
        metadata.insert("tokenizer.ggml.eos_token_id", random.random_range(0..12u32));
        metadata.insert("tokenizer.ggml.tokens", tokens);
        metadata.insert("tokenizer.ggml.merges", merges);
        let Ok(tokenizer) = Tokenizer::from_gguf(&metadata) else {
            continue;
        };
        for special in [Special::Parse, Special::Text] {
            let ids = tokenizer.encode("aa <s>é▁日本\u{0}<0x41> <|im_end|>a b", special);
            assert!(
                ids.iter()
                    .all(|&id| (id as usize) < tokenizer.vocabulary_size()),
                "round {round}"
            );
            tokenizer.decode(&ids);
        }
        tokenizer.decode(&[0, 1, u32::MAX]);
    }
}

#[test]
fn characters_merge_in_vocabularies_like_gemma_4s() {
    let spm = sentence_piece(&["▁", "a", "▁a", "\n", "\n\n", "▁▁"]);
    let merges = vec!["▁ a".to_string(), "▁ ▁".to_string()];
    let tokenizer = load(&with(
        spm,
        &[
            ("tokenizer.ggml.model", "gemma4".into()),
            ("tokenizer.ggml.merges", merges.into()),
            ("tokenizer.ggml.bos_token_id", 1u32.into()),
            // Files say so, and are wrong.
            ("tokenizer.ggml.add_bos_token", false.into()),
        ],
    ));
    // A word of line breaks is a piece without any merge, where there is one; no space goes before the text.
    let check = |text: &str, expected: &[u32]| {
        assert_eq!(tokenizer.encode(text, Special::Text), expected, "{text:?}");
        assert_eq!(tokenizer.decode(expected), text.replace('▁', " "));
    };
    check("a a", &[260, 261]);
    check("a\n\na", &[260, 263, 260]);
    check("\n\n\n", &[262, 262, 262]);
    check("   a", &[264, 261]);
    check("a▁a", &[260, 261]);
    check("é", &[3 + 0xC3, 3 + 0xA9]);
    assert_eq!(tokenizer.encode_prompt("a"), [1, 260]);
}

/// Embeddings are often padded to a round number of rows, and a client may send any id.
#[test]
fn an_id_beyond_the_vocabulary_prints_nothing() {
    let tokenizer = Arc::new(load(&byte_level(&["<s>"])));
    let padding = tokenizer.vocabulary_size() as u32;
    assert_eq!(tokenizer.decode(&[98, padding, u32::MAX, 99]), "ab");
    assert!(tokenizer.piece_bytes_with_control(padding).is_empty());
    let mut sequence = SequenceText::new(Detokenizer::new(tokenizer), ["b".to_string()]);
    assert_eq!(sequence.push(98).text, "a");
    assert_eq!(sequence.push(padding), Piece::default());
}

#[test]
fn plain_text_never_becomes_a_control_token() {
    // All the pieces that would merge into </s>, and a word that is a control token.
    let spm = sentence_piece(&["<", "/", "s", ">", "</", "</s", "s>"]);
    let tokenizer = load(&with(
        spm,
        &[("tokenizer.ggml.add_space_prefix", false.into())],
    ));
    assert!(
        !tokenizer
            .encode("</s><unk><s>", Special::Text)
            .iter()
            .any(|&id| id < 3)
    );
    assert_eq!(tokenizer.encode("</s>a", Special::Parse), [2, 3 + 97]);

    let bpe = with(
        byte_level(&["hello", "ab"]),
        &[
            ("tokenizer.ggml.pre", "llama3".into()),
            ("tokenizer.ggml.merges", vec!["a b".to_string()].into()),
            ("tokenizer.ggml.add_bos_token", false.into()),
        ],
    );
    let tokenizer = load(&bpe);
    assert_eq!(tokenizer.encode("ab", Special::Text), [2 + 97, 2 + 98]);
    assert_eq!(tokenizer.encode("hello", Special::Text).len(), 5);
    assert_eq!(tokenizer.encode("hello", Special::Parse), [0]);
}

#[test]
fn sentence_piece_spaces_and_bytes() {
    let spm = sentence_piece(&["▁", "▁Hi", "▁x", "a", "b", "H", "▁H", "i", "x"]);
    let prefixed = load(&spm);
    assert_eq!(prefixed.encode("Hi", Special::Text), [260]);
    // After a control token the text has its unwritten space again.
    assert_eq!(prefixed.encode("Hi</s>x", Special::Parse), [260, 2, 261]);
    let plain = load(&with(
        spm,
        &[("tokenizer.ggml.add_space_prefix", false.into())],
    ));
    assert_eq!(
        plain.encode("a🦙b", Special::Text),
        [262, 3 + 0xF0, 3 + 0x9F, 3 + 0xA6, 3 + 0x99, 263]
    );
    assert!(!plain.encode("<0x41>", Special::Text).contains(&(3 + 0x41)));
    assert_eq!(
        plain.encode("a▁ b", Special::Text),
        plain.encode("a  b", Special::Text)
    );

    let ids = [259, 260, 3 + 10, 261];
    assert_eq!(prefixed.decode(&ids), " Hi\n x");
    assert_eq!(plain.decode(&ids), "  Hi\n x");
    let prefixed = Arc::new(prefixed);
    let stream = |mut detokenizer: Detokenizer, ids: &[u32]| {
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text += &detokenizer.finish();
        text
    };
    assert_eq!(stream(Detokenizer::new(prefixed.clone()), &ids), " Hi\n x");
    assert_eq!(
        stream(Detokenizer::continuing(prefixed.clone()), &ids),
        "  Hi\n x"
    );
    // Control tokens print nothing and do not use up the space.
    assert_eq!(
        stream(Detokenizer::new(prefixed.clone()), &[1, 260, 2, 261]),
        "Hi x"
    );
    assert_eq!(prefixed.piece_bytes(2), b"");
    assert_eq!(prefixed.piece_bytes_with_control(2), b"</s>");
}

#[test]
fn byte_level_text_is_lossless() {
    let tokenizer = load(&byte_level(&["<s>"]));
    for text in [" a", "", "\u{0}é🙂\u{FEFF}\n", "  a  "] {
        assert_eq!(
            tokenizer.decode(&tokenizer.encode(text, Special::Text)),
            text
        );
    }
}

#[test]
fn streams_of_random_tokens_join_to_the_whole() {
    let tokenizer = Arc::new(load(&sentence_piece(&["▁", "▁é", "日", "a"])));
    let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(11);
    for _ in 0..500 {
        let ids: Vec<u32> = (0..random.random_range(0..30))
            .map(|_| random.random_range(0..265))
            .collect();
        let mut stream = Detokenizer::new(tokenizer.clone());
        let mut joined: String = ids.iter().map(|&id| stream.push(id)).collect();
        joined += &stream.finish();
        assert_eq!(joined, tokenizer.decode(&ids), "{ids:?}");
    }
}

#[test]
fn beginning_of_sequence_for_raw_prompts() {
    let check = |metadata: Metadata, text: &str, expected: &[u32]| {
        assert_eq!(load(&metadata).encode_prompt(text), expected, "{text:?}");
    };
    let add = |yes: bool| ("tokenizer.ggml.add_bos_token", Value::from(yes));
    let spm = with(
        sentence_piece(&["a"]),
        &[("tokenizer.ggml.add_space_prefix", false.into())],
    );
    check(spm.clone(), "a", &[1, 259]);
    check(spm.clone(), "", &[1]);
    check(spm.clone(), "<s>a", &[1, 259]);
    check(with(spm.clone(), &[add(false)]), "a", &[259]);
    check(with(spm, &[add(false)]), "<s>a</s>", &[1, 259, 2]);
    let bpe = with(
        byte_level(&["<s>"]),
        &[("tokenizer.ggml.bos_token_id", 0u32.into())],
    );
    check(bpe.clone(), "a", &[98]);
    check(with(bpe.clone(), &[add(true)]), "a", &[0, 98]);
    check(
        with(bpe, &[("tokenizer.ggml.pre", "llama-bpe".into())]),
        "a",
        &[0, 98],
    );
}

#[test]
fn end_tokens_are_the_union_of_ids_and_known_texts() {
    let controls = ["</s>", "<|im_end|>", "<|eot_id|>", "<other>", "<|end|>"];
    let check = |metadata: &Metadata, expected: &[u32]| {
        let tokenizer = load(metadata);
        assert_eq!(tokenizer.end_of_generation(), expected);
    };
    let bpe = byte_level(&controls);
    check(&bpe, &[0, 1, 2, 4]);
    check(
        &with(bpe.clone(), &[("tokenizer.ggml.eot_token_id", 3u32.into())]),
        &[0, 1, 2, 3, 4],
    );
    check(
        &with(bpe, &[("tokenizer.ggml.eos_token_id", 5u32.into())]),
        &[0, 1, 2, 4, 5],
    );
    // Of several messages in one turn, <|end|> closes only one.
    check(&byte_level(&["<|return|>", "<|call|>", "<|end|>"]), &[0, 1]);
    // A user-defined token of a known text ends the turn and prints nothing; a normal piece is text.
    let mut types = vec![4, 1];
    types.extend([1; 256]);
    let odd = with(
        byte_level(&["<|im_end|>", "</s>"]),
        &[("tokenizer.ggml.token_type", types.into())],
    );
    check(&odd, &[0]);
    assert_eq!(load(&odd).piece_bytes(0), b"");
    assert_eq!(load(&odd).control_token("<|im_end|>"), Some(0));
    assert_eq!(load(&odd).control_token("a"), None);
}

#[test]
fn a_sequence_ends_at_a_stop_string_and_at_the_control_token_that_one_names() {
    let tokenizer = Arc::new(load(&byte_level(&["<|im_end|>"])));
    let end = tokenizer.control_token("<|im_end|>").unwrap();
    let tokens = tokenizer.encode("say no more", Special::Text);
    let run = |stop: &str, last: u32| {
        let detokenizer = Detokenizer::new(Arc::clone(&tokenizer));
        let mut sequence = SequenceText::new(detokenizer, [stop.to_string()]);
        let mut text = String::new();
        for &id in tokens.iter().chain([&last]) {
            let piece = sequence.push(id);
            text.push_str(&piece.text);
            if piece.ended.is_some() {
                return (text, piece.ended);
            }
        }
        let piece = sequence.finish();
        (text + &piece.text, piece.ended)
    };
    let ended = |text: &str, ended| (text.to_string(), ended);
    assert_eq!(
        run("<|im_end|>", end),
        ended("say no more", Some(Ended::AtToken))
    );
    assert_eq!(run(" no", end), ended("say", Some(Ended::AtString)));
    // What was held back as a possible beginning is text when it comes to nothing.
    assert_eq!(run("more!", end), ended("say no more", None));
}
