//! The models that other tests are made of are what they claim to be, and so are the files in tests/data.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::Path;

use strata::gguf::{Gguf, Hyperparameters, RopeScaling, TensorType};
use support::models::{self, ChainOptions, Piece, RandomOptions, VocabularyKind};

/// The matrix of an F32 tensor, by rows.
fn rows(path: &Path, name: &str) -> Vec<Vec<f32>> {
    let gguf = Gguf::open(path).unwrap();
    let (_, tensor) = gguf.tensor(name).unwrap();
    let file = std::fs::read(path).unwrap();
    let data = &file[tensor.file_offset as usize..][..tensor.bytes as usize];
    let floats: Vec<f32> = data
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect();
    floats
        .chunks(tensor.columns() as usize)
        .map(<[f32]>::to_vec)
        .collect()
}

/// The greedy output of a chain, computed from the file: attention and feed-forward add nothing.
fn greedy(path: &Path, start: u32, steps: usize) -> Vec<u32> {
    let output = rows(path, "output.weight");
    let mut token = start as usize;
    (0..steps)
        .map(|_| {
            let logit = |&row: &usize| output[row][token];
            token = (0..output.len())
                .max_by(|left, right| logit(left).total_cmp(&logit(right)))
                .unwrap();
            token as u32
        })
        .collect()
}

#[test]
fn a_chain_leads_from_s_through_its_pieces_to_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chain.gguf");
    let mut pieces = models::texts(&["al", "pha D"]);
    pieces.extend(models::bytes("😀".as_bytes()));
    pieces.push(Piece::Control("<|eot|>".to_owned()));
    let options = ChainOptions {
        end_of_turn: Some("<|eot|>".to_owned()),
        template: Some("S".to_owned()),
        ..ChainOptions::default()
    };
    let tokens = models::chain(&path, &pieces, &options);
    let wanted = [
        tokens.id("al"),
        tokens.id("pha▁D"),
        tokens.id("<0xF0>"),
        tokens.id("<0x9F>"),
        tokens.id("<0x98>"),
        tokens.id("<0x80>"),
        tokens.id("<|eot|>"),
        tokens.id("</s>"),
    ];
    assert_eq!(greedy(&path, tokens.id("S"), 8), wanted);
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(
        gguf.metadata.u32("tokenizer.ggml.eot_token_id").unwrap(),
        Some(tokens.id("<|eot|>"))
    );
    let parameters = Hyperparameters::from_gguf(&gguf).unwrap();
    assert_eq!((parameters.layers, parameters.key_length), (1, 64));
    assert_eq!(parameters.vocabulary_size as usize, tokens.len());
}

#[test]
fn a_chain_can_be_endless_or_stuck() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chain.gguf");
    let endless = ChainOptions {
        endless: true,
        ..ChainOptions::default()
    };
    let tokens = models::chain(&path, &models::texts(&["a", "b"]), &endless);
    let (a, b) = (tokens.id("a"), tokens.id("b"));
    assert_eq!(greedy(&path, tokens.id("S"), 5), [a, b, a, b, a]);

    let stuck = ChainOptions {
        always: Some(Piece::Text(" ".to_owned())),
        ..ChainOptions::default()
    };
    let tokens = models::chain(&path, &models::texts(&["a"]), &stuck);
    assert_eq!(greedy(&path, tokens.id("S"), 3), [tokens.id("▁"); 3]);
    let output = rows(&path, "output.weight");
    assert!(output[tokens.id("a") as usize][tokens.id("S") as usize] > 0.0);
}

#[test]
fn random_models_load_in_every_type_and_follow_their_seed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("random.gguf");
    for kind in TensorType::ALL {
        for (vocabulary, tied) in [(VocabularyKind::Spm, false), (VocabularyKind::Bpe, true)] {
            let options = RandomOptions {
                width: 256,
                ffn: 512,
                vocabulary,
                tied,
                kind,
                ..RandomOptions::default()
            };
            let tokens = models::random(&path, &options);
            let gguf = Gguf::open(&path).unwrap();
            let parameters = Hyperparameters::from_gguf(&gguf).unwrap();
            assert_eq!(parameters.vocabulary_size as usize, tokens.len());
            assert_eq!(parameters.tied_head, tied);
            assert_eq!(gguf.tensor("blk.1.ffn_down.weight").unwrap().1.kind, kind);
        }
    }
    let file = |seed| {
        let options = RandomOptions {
            seed,
            ..RandomOptions::default()
        };
        models::random(&path, &options);
        std::fs::read(&path).unwrap()
    };
    assert!(file(1) == file(1), "the same seed gave another file");
    assert!(file(1) != file(2), "another seed gave the same file");
}

#[test]
fn the_files_in_tests_data_are_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny");
    for (file, tied, scaling, factors) in [
        ("llama.gguf", false, RopeScaling::None, false),
        ("llama-tied.gguf", true, RopeScaling::None, false),
        ("llama-rope-factors.gguf", false, RopeScaling::None, true),
        (
            "llama-rope-linear.gguf",
            false,
            RopeScaling::Linear { factor: 4.0 },
            false,
        ),
        ("qwen2.gguf", false, RopeScaling::None, false),
        ("qwen3.gguf", false, RopeScaling::None, false),
    ] {
        let gguf = Gguf::open(&folder.join(file)).unwrap();
        let parameters = Hyperparameters::from_gguf(&gguf).unwrap();
        assert_eq!(
            (parameters.tied_head, parameters.rope_scaling),
            (tied, scaling),
            "{file}"
        );
        assert_eq!(
            gguf.tensor("rope_freqs.weight").is_some(),
            factors,
            "{file}"
        );
        assert_eq!(
            (
                parameters.layers,
                parameters.embedding_length,
                parameters.vocabulary_size
            ),
            (2, 64, 288)
        );
    }
}
