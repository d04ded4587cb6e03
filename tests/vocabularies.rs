//! Every vocabulary that llama.cpp tests its tokenizers with, against the ids that it expects: byte pairs and
//! SentencePiece are equal on every text, and the others are refused by name. And Gemma 3's vocabulary, with its runs of
//! spaces and tags, against llama.cpp's answers for the same file.

use serde_json::Value;
use std::path::{Path, PathBuf};
use strata::gguf::Gguf;
use strata::tokenizer::{Special, Tokenizer};

/// Between the texts of an `.inp` file; the ids of each are a line of the `.out` file.
const SEPARATOR: &str = "\n__ggml_vocab_test__\n";

/// The file or folder `default` of this repository, or what the variable names.
fn fetched(variable: &str, default: &str, how: &str) -> PathBuf {
    let path = std::env::var_os(variable).map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join(default),
        PathBuf::from,
    );
    assert!(
        path.exists(),
        "{} is missing: `{how}` fetches it",
        path.display()
    );
    path
}

/// `.inp` and `.out` of a vocabulary: texts and ids.
fn cases(folder: &Path, name: &str) -> Vec<(String, Vec<u32>)> {
    let read = |ending: &str| {
        let path = folder.join(format!("ggml-vocab-{name}.gguf.{ending}"));
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let (texts, ids) = (read("inp"), read("out"));
    // Some files end in a separator, some without.
    let texts = texts.strip_suffix(SEPARATOR).unwrap_or(&texts);
    let texts: Vec<&str> = texts.split(SEPARATOR).collect();
    let lines: Vec<&str> = ids.lines().collect();
    assert_eq!(texts.len(), lines.len(), "texts and lines of {name}");
    let ids = |line: &str| {
        let ids = line.split_whitespace();
        ids.map(|id| id.parse().expect("an id")).collect()
    };
    std::iter::zip(texts, lines)
        .map(|(text, line)| (text.to_string(), ids(line)))
        .collect()
}

fn load(path: &Path) -> Result<Tokenizer, String> {
    let gguf = Gguf::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Tokenizer::from_gguf(&gguf.metadata).map_err(|error| error.to_string())
}

/// How many of the cases are equal; those that are not are shown.
fn equal(tokenizer: &Tokenizer, name: &str, cases: &[(String, Vec<u32>)]) -> usize {
    let mut equal = 0;
    for (text, expected) in cases {
        let found = tokenizer.encode(text, Special::Text);
        if found == *expected {
            equal += 1;
        } else {
            println!("{name}: {text:?}\n  is {found:?}\n  not {expected:?}");
        }
    }
    equal
}

#[test]
fn every_vocabulary_gives_the_ids_that_llama_cpp_expects() {
    let folder = fetched(
        "STRATA_TEST_VOCABULARIES",
        "models/vocabularies",
        "make vocabularies",
    );
    // (vocabulary, texts with known ids; 0: it comes without)
    let supported = [
        ("aquila", 0),
        ("baichuan", 0),
        ("command-r", 46),
        ("deepseek-coder", 46),
        ("deepseek-llm", 46),
        ("falcon", 46),
        ("gemma-4", 46),
        ("gpt-2", 46),
        ("gpt-neox", 0),
        ("llama-bpe", 46),
        ("llama-spm", 46),
        ("mpt", 46),
        ("phi-3", 46),
        ("qwen2", 46),
        ("qwen35", 50),
        ("refact", 46),
        ("starcoder", 46),
    ];
    // (vocabulary, its `tokenizer.ggml.model`)
    let refused = [("bert-bge", "bert"), ("nomic-bert-moe", "t5")];

    let path = |name: &str| folder.join(format!("ggml-vocab-{name}.gguf"));
    let listed: Vec<PathBuf> = supported
        .iter()
        .map(|case| path(case.0))
        .chain(refused.iter().map(|case| path(case.0)))
        .collect();
    let mut unlisted: Vec<PathBuf> = std::fs::read_dir(&folder)
        .expect("the folder can be read")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "gguf"))
        .collect();
    unlisted.retain(|path| !listed.contains(path));
    assert!(unlisted.is_empty(), "vocabularies not tested: {unlisted:?}");

    println!("{:<16} {:>6} {:>6}", "vocabulary", "texts", "equal");
    let mut different = Vec::new();
    for (name, count) in supported {
        let tokenizer = load(&path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (texts, equal) = if count > 0 {
            let cases = cases(&folder, name);
            (cases.len(), equal(&tokenizer, name, &cases))
        } else {
            // Without ids to compare with, what is encoded must still be the whole text. All share their texts.
            let cases = cases(&folder, "gpt-2");
            let whole =
                |text: &str| tokenizer.decode(&tokenizer.encode(text, Special::Text)) == text;
            assert!(
                cases.iter().all(|(text, _)| whole(text)),
                "{name} loses text"
            );
            (0, 0)
        };
        println!("{name:<16} {texts:>6} {equal:>6}");
        if (texts, equal) != (count, count) {
            different.push(name);
        }
    }
    for (name, model) in refused {
        let error = load(&path(name))
            .err()
            .unwrap_or_else(|| panic!("{name} loads"));
        println!("{name:<16} refused: {error}");
        assert!(
            error.contains(&format!("{model:?}")) && error.contains("not supported"),
            "{name}: {error}"
        );
    }
    assert!(different.is_empty(), "differ: {different:?}");

    let phi3 = load(&path("phi-3")).expect("it loaded before");
    let parsed = |text| phi3.encode(text, Special::Parse);
    let turns = "<|user|>Why?<|end|><|assistant|>";
    assert_eq!(
        parsed("<|user|>\n Why?<|end|>\n<|assistant|>\n"),
        parsed(turns)
    );
    assert_ne!(parsed("<s>\nWhy?"), parsed("<s>Why?"));
}

#[test]
fn gemma_3_gives_the_ids_of_llama_cpp_with_and_without_control_tokens() {
    let path = fetched(
        "STRATA_TEST_GEMMA3",
        "models/gemma3-270m-q4_k_m.gguf",
        "make test-models",
    );
    let golden: Value =
        serde_json::from_str(include_str!("data/gemma3.json")).expect("golden file parses");
    let tokenizer = load(&path).expect("the tokenizer loads");
    assert_eq!(
        (tokenizer.vocabulary_size(), tokenizer.bos()),
        (262_144, Some(2))
    );
    let ids = |value: &Value| -> Vec<u32> {
        let ids = value.as_array().expect("an array of ids");
        ids.iter()
            .map(|id| id.as_u64().expect("an id") as u32)
            .collect()
    };
    let strings = golden["tokenize"].as_array().expect("tokenize cases");
    for case in strings {
        let text = case["text"].as_str().expect("a text");
        let plain = tokenizer.encode(text, Special::Text);
        assert_eq!(plain, ids(&case["plain"]), "{text:?} as plain text");
        let parsed = tokenizer.encode(text, Special::Parse);
        assert_eq!(
            parsed,
            ids(&case["parse_special"]),
            "{text:?} with control tokens"
        );
    }
    assert_eq!(strings.len(), 36);
    for case in golden["prompts"].as_array().expect("prompts") {
        let text = case["text"].as_str().expect("a text");
        assert_eq!(tokenizer.encode_prompt(text), ids(&case["ids"]), "{text:?}");
    }
}
