//! The tokenizer and the chat template of a real model against llama.cpp's answers for the same file: token ids with
//! and without control tokens, and chat renderings.

use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use strata::gguf::Gguf;
use strata::tokenizer::{
    ChatOptions, ChatTemplate, Detokenizer, Special, TemplateSource, Tokenizer,
};

/// `make model` puts the file there; `STRATA_TEST_SMOLLM2` names another place.
fn model() -> Gguf {
    let path = std::env::var_os("STRATA_TEST_SMOLLM2").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
    assert!(
        path.is_file(),
        "{} is missing: `make model` fetches it",
        path.display()
    );
    Gguf::open(&path).expect("the model file opens")
}

fn golden() -> Value {
    serde_json::from_str(include_str!("data/smollm2.json")).expect("golden file parses")
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("an array of ids");
    ids.iter()
        .map(|id| id.as_u64().expect("an id") as u32)
        .collect()
}

#[test]
fn token_ids_are_those_of_llama_cpp() {
    let gguf = model();
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf.metadata).expect("the tokenizer loads"));
    assert_eq!(
        (tokenizer.vocabulary_size(), tokenizer.add_bos()),
        (49152, false)
    );
    let ends = tokenizer.end_of_generation();
    assert!(ends.contains(&2) && ends.contains(&0));
    let mut strings = 0;
    for case in golden()["tokenize"].as_array().expect("tokenize cases") {
        let text = case["text"].as_str().expect("a text");
        let plain = tokenizer.encode(text, Special::Text);
        assert_eq!(plain, ids(&case["plain"]), "{text:?} as plain text");
        let parsed = tokenizer.encode(text, Special::Parse);
        assert_eq!(
            parsed,
            ids(&case["parse_special"]),
            "{text:?} with control tokens"
        );

        assert_eq!(tokenizer.decode(&plain), text);
        let mut stream = Detokenizer::new(tokenizer.clone());
        let mut joined: String = plain.iter().map(|&id| stream.push(id)).collect();
        joined += &stream.finish();
        assert_eq!(joined, text);
        strings += 1;
    }
    assert!(strings >= 28, "{strings} strings");
    for case in golden()["prompts"].as_array().expect("prompts") {
        let text = case["text"].as_str().expect("a text");
        assert_eq!(tokenizer.encode_prompt(text), ids(&case["ids"]), "{text:?}");
    }
}

#[test]
fn chats_render_as_llama_cpp_renders_them() {
    let gguf = model();
    let tokenizer = Tokenizer::from_gguf(&gguf.metadata).expect("the tokenizer loads");
    let template = ChatTemplate::from_gguf(&gguf.metadata, &tokenizer).expect("the template loads");
    assert_eq!(
        template.source(),
        &TemplateSource::File("tokenizer.chat_template".to_string())
    );
    let mut chats = 0;
    for case in golden()["chat"].as_array().expect("chats") {
        let messages = case["messages"].as_array().expect("messages");
        let prompt = template
            .prompt(&tokenizer, messages, &ChatOptions::default())
            .expect("the chat renders");
        let expected = case["prompt"].as_str().expect("a rendering");
        assert_eq!(prompt.text, expected);
        // One turn more than there are messages opens, and a default system turn where the chat has none.
        let system = usize::from(messages[0]["role"] != "system");
        let opened = prompt.tokens.iter().filter(|&&id| id == 1).count();
        assert_eq!(opened, messages.len() + 1 + system, "{expected:?}");
        chats += 1;
    }
    assert_eq!(chats, 5);
}
