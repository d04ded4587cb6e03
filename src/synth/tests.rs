use super::*;
use crate::gguf::{Metadata, TensorShape};
use std::path::Path;

const CARD: &str = "name = 'small'\narchitecture = 'llama'\nlayers = 2\nembedding_length = 256\nfeed_forward_length = 512\n\
    head_count = 4\nhead_count_kv = 2\nvocabulary_size = 20\ncontext_length = 512\nrms_epsilon = 1e-5\ntied_head = false\n\
    quantisation = 'q4_k_m'\n[rope]\nbase = 10000.0\n\
    llama3 = { factor = 8.0, low_frequency_factor = 1.0, high_frequency_factor = 4.0, original_context_length = 64 }\n";

/// The index of a file with these tokens and scores.
fn vocabulary(tokens: &[&str]) -> Gguf {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", "other");
    metadata.insert("tokenizer.ggml.model", "llama");
    let strings: Vec<String> = tokens.iter().map(|&token| token.to_owned()).collect();
    metadata.insert("tokenizer.ggml.scores", vec![-1.0f32; tokens.len()]);
    metadata.insert("tokenizer.ggml.token_type", vec![1u32; tokens.len()]);
    metadata.insert("tokenizer.ggml.tokens", strings);
    metadata.insert("tokenizer.chat_template", "{{ messages }}");
    let tensor = TensorShape::new("t", TensorType::F32, [1]);
    Header::new(3, &metadata, &[tensor])
        .unwrap()
        .index()
        .clone()
}

fn names_in(folder: &Path) -> Vec<String> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn a_card_becomes_a_file_with_its_tensors_and_the_vocabulary() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    let card = ShapeCard::parse(CARD).unwrap();
    let vocabulary = vocabulary(&["a", "<filler_1>", "b"]);
    let mut reports = Vec::new();
    let made = synthesise(
        &card,
        &vocabulary,
        Destination::new(&path),
        1,
        |done, all| {
            reports.push((done, all));
            true
        },
    )
    .unwrap();
    assert_eq!(made.filler_tokens, 17);
    assert_eq!(names_in(folder.path()), ["small.gguf"]);

    let read = Gguf::open(&path).unwrap();
    assert_eq!(read.file_bytes, made.index.file_bytes);
    let shapes = |gguf: &Gguf| -> Vec<_> {
        let shape =
            |tensor: &TensorInfo| (tensor.name.clone(), tensor.kind, tensor.dimensions.clone());
        gguf.tensors.iter().map(shape).collect()
    };
    assert_eq!(shapes(&read), shapes(&card.index()));
    let tokens = read
        .metadata
        .require_strings("tokenizer.ggml.tokens")
        .unwrap();
    assert_eq!(
        tokens[..5],
        ["a", "<filler_1>", "b", "<filler_0>", "<filler_2>"]
    );
    assert_eq!(tokens.len(), 20);
    let types = read
        .metadata
        .require_i64s("tokenizer.ggml.token_type")
        .unwrap();
    assert_eq!((types[2], types[3], types.len()), (1, 5, 20));
    let scores = read.metadata.require_f32s("tokenizer.ggml.scores").unwrap();
    assert_eq!((scores[2], scores[3], scores.len()), (-1.0, -1e9, 20));
    assert_eq!(
        read.metadata.string("general.architecture").unwrap(),
        Some("llama")
    );
    assert!(read.metadata.contains("tokenizer.chat_template"));

    let bytes: u64 = read.tensors.iter().map(|tensor| tensor.bytes).sum();
    assert_eq!(reports.last(), Some(&(bytes, bytes)));
    let file = std::fs::read(&path).unwrap();
    let data = |name: &str| {
        let (_, tensor) = read.tensor(name).unwrap();
        &file[tensor.file_offset as usize..][..tensor.bytes as usize]
    };
    let floats = |name: &str| -> Vec<f32> {
        let (chunks, _) = data(name).as_chunks();
        chunks
            .iter()
            .map(|&chunk| f32::from_le_bytes(chunk))
            .collect()
    };
    assert_eq!(floats("rope_freqs.weight"), card.rope_factors().unwrap());
    assert!(
        floats("output_norm.weight")
            .iter()
            .all(|value| (0.9..1.1).contains(value))
    );
    assert_ne!(data("blk.0.ffn_up.weight"), data("blk.1.ffn_up.weight"));
}

#[test]
fn one_seed_gives_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    let card = ShapeCard::parse(CARD).unwrap();
    let make = |seed| {
        synthesise(
            &card,
            &vocabulary(&["a"]),
            Destination::replacing(&path),
            seed,
            |_, _| true,
        )
        .unwrap();
        std::fs::read(&path).unwrap()
    };
    let first = make(1);
    assert!(first == make(1), "the same seed gave another file");
    assert!(first != make(2), "another seed gave the same file");
}

#[test]
fn a_failed_run_leaves_the_old_file_and_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("small.gguf");
    std::fs::write(&path, b"old").unwrap();
    let card = ShapeCard::parse(CARD).unwrap();
    let interrupted = std::panic::catch_unwind(|| {
        synthesise(
            &card,
            &vocabulary(&["a"]),
            Destination::replacing(&path),
            1,
            |_, _| panic!("stop here"),
        )
    });
    assert!(interrupted.is_err());
    assert_eq!(names_in(folder.path()), ["small.gguf"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    // What a killed process leaves is written over.
    std::fs::write(folder.path().join("small.gguf.partial"), b"half").unwrap();
    synthesise(
        &card,
        &vocabulary(&["a"]),
        Destination::replacing(&path),
        1,
        |_, _| true,
    )
    .unwrap();
    assert_eq!(names_in(folder.path()), ["small.gguf"]);
    assert!(Gguf::open(&path).is_ok());
}

#[test]
fn errors_say_what_is_short() {
    let folder = tempfile::tempdir().unwrap();
    let card = ShapeCard::parse(CARD).unwrap();
    let check = |card: &ShapeCard, vocabulary: &Gguf, path: &Path, says: &str| {
        let error = synthesise(card, vocabulary, Destination::new(path), 1, |_, _| true)
            .unwrap_err()
            .to_string();
        assert!(error.contains(says) && !error.contains('\n'), "{error}");
    };
    let path = folder.path().join("out.gguf");
    let names: Vec<String> = (0..21).map(|number| number.to_string()).collect();
    let many: Vec<&str> = names.iter().map(String::as_str).collect();
    check(
        &card,
        &vocabulary(&many),
        &path,
        "holds 21 tokens and the card has room for 20",
    );
    check(
        &card,
        &card.index(),
        &path,
        "missing key `tokenizer.ggml.tokens`",
    );
    check(&card, &vocabulary(&["a"]), folder.path(), "directory");
    check(
        &card,
        &vocabulary(&["a"]),
        &folder.path().join("absent/out.gguf"),
        "cannot write",
    );

    check(
        &card,
        &vocabulary(&["a"]),
        Path::new("/dev/null"),
        "a directory or a device",
    );

    let interrupted = synthesise(
        &card,
        &vocabulary(&["a"]),
        Destination::new(&path),
        1,
        |_, _| false,
    );
    assert!(matches!(interrupted, Err(SynthError::Interrupted)));
    assert_eq!(names_in(folder.path()), Vec::<String>::new());

    let huge = CARD
        .replace("layers = 2", "layers = 4000")
        .replace("length = 256", "length = 262144")
        .replace("length = 512", "length = 1048576");
    let huge = ShapeCard::parse(&huge).unwrap();
    check(&huge, &vocabulary(&["a"]), &path, "not enough space");
    assert_eq!(names_in(folder.path()), Vec::<String>::new());

    let partial = std::fs::File::create(folder.path().join("out.gguf.partial")).unwrap();
    partial.lock().unwrap();
    check(
        &card,
        &vocabulary(&["a"]),
        &path,
        "being written by another process",
    );
}
