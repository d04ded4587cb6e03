//! Files in good order whose keys and tensors make no model.

use super::models::{RandomOptions, random, write};
use super::{generate, serve};
use std::path::Path;
use strata::gguf::{Architecture, Gguf, Metadata, TensorShape, TensorType, Value};

/// Writes the model again with other keys and tensors. The weights are zeros.
fn changed(path: &Path, change: impl FnOnce(&mut Vec<(String, Value)>, &mut Vec<TensorShape>)) {
    changed_of(Architecture::Llama, path, change);
}

fn changed_of(
    architecture: Architecture,
    path: &Path,
    change: impl FnOnce(&mut Vec<(String, Value)>, &mut Vec<TensorShape>),
) {
    let options = RandomOptions {
        architecture,
        ..RandomOptions::default()
    };
    random(path, &options);
    let good = Gguf::open(path).unwrap();
    let keys = good.metadata.iter();
    let mut keys: Vec<(String, Value)> = keys.map(|(k, v)| (k.to_owned(), v.clone())).collect();
    let mut tensors: Vec<TensorShape> = good
        .tensors
        .iter()
        .map(|t| TensorShape::new(&t.name, t.kind, t.dimensions.clone()))
        .collect();
    change(&mut keys, &mut tensors);
    let mut metadata = Metadata::new();
    for (key, value) in keys {
        metadata.insert(key, value);
    }
    write(path, &metadata, &tensors, |shape| {
        let rows: u64 = shape.dimensions.iter().skip(1).product();
        vec![0; (shape.kind.row_bytes(shape.dimensions[0]).unwrap() * rows) as usize]
    });
}

#[track_caller]
fn refused(path: &Path, parts: &[&str]) {
    generate(path).refusal(1, parts);
    serve(path).refusal(1, parts);
}

#[test]
fn keys_that_make_no_model_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let words = |words: &[&str]| -> Value {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        words.into()
    };
    for (key, value, part) in [
        ("general.architecture", Value::from("gpt-j"), "`gpt-j`"),
        ("llama.block_count", 0u32.into(), ""),
        ("llama.block_count", 3u32.into(), "blk.2."),
        ("llama.block_count", u32::MAX.into(), ""),
        ("llama.context_length", 0u32.into(), ""),
        ("llama.embedding_length", 0u32.into(), ""),
        ("llama.embedding_length", 65u32.into(), ""),
        ("llama.feed_forward_length", 0u32.into(), ""),
        ("llama.feed_forward_length", (1u32 << 31).into(), "ffn_"),
        ("llama.attention.head_count", 0u32.into(), ""),
        ("llama.attention.head_count", 3u32.into(), ""),
        ("llama.attention.head_count_kv", 3u32.into(), ""),
        ("llama.attention.key_length", u32::MAX.into(), ""),
        (
            "llama.attention.layer_norm_rms_epsilon",
            f32::NAN.into(),
            "finite",
        ),
        ("llama.attention.layer_norm_rms_epsilon", 0.0f32.into(), ""),
        ("llama.rope.freq_base", f32::INFINITY.into(), "finite"),
        ("llama.rope.freq_base", 0.0f32.into(), ""),
        ("llama.rope.scaling.factor", f32::NAN.into(), ""),
        ("llama.rope.scaling.type", "ntk".into(), "not supported"),
        (
            "llama.rope.scaling.type",
            "longrope".into(),
            "rope_factors_long.weight",
        ),
        ("llama.rope.scaling.attn_factor", 0.0f32.into(), ""),
        ("llama.rope.dimension_count", 7u32.into(), "even"),
        ("llama.rope.dimension_count", 0u32.into(), "even"),
        ("tokenizer.ggml.model", "rwkv".into(), ""),
        ("tokenizer.ggml.tokens", words(&["a", "a"]), ""),
        ("tokenizer.ggml.tokens", words(&[]), ""),
        ("tokenizer.ggml.eos_token_id", u32::MAX.into(), ""),
        ("tokenizer.ggml.bos_token_id", "one".into(), ""),
        ("split.count", 2u32.into(), "`split.no`"),
    ] {
        changed(&path, |keys, _| {
            keys.retain(|(name, _)| name != key);
            keys.push((key.to_owned(), value.clone()));
        });
        let parts = if part.is_empty() { key } else { part };
        // An architecture is the prefix of the other keys; a width that fits nothing shows at the first tensor.
        let parts = match (key, part) {
            ("llama.embedding_length", _) => "embed",
            ("tokenizer.ggml.tokens", _) => "tokenizer.ggml",
            _ => parts,
        };
        refused(&path, &["model.gguf", parts]);
    }
}

#[test]
fn a_key_that_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.model",
        "tokenizer.ggml.tokens",
    ] {
        changed(&path, |keys, _| keys.retain(|(name, _)| name != key));
        refused(&path, &["model.gguf", key]);
    }
}

#[test]
fn a_tensor_that_is_missing_or_misshapen_is_named_before_weights_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let plan = || super::run(super::strata().arg("plan").arg(&path));
    for name in [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_norm.weight",
        "blk.1.attn_k.weight",
        "blk.1.ffn_down.weight",
    ] {
        changed(&path, |_, tensors| tensors.retain(|t| t.name != name));
        refused(&path, &["model.gguf", name]);
        plan().refusal(1, &[name]);
        changed(&path, |_, tensors| {
            let tensor = tensors.iter_mut().find(|t| t.name == name).unwrap();
            tensor.dimensions.push(1);
            tensor.dimensions[0] = 32;
        });
        refused(&path, &["model.gguf", name]);
        plan().refusal(1, &[name]);
    }
    changed(&path, |_, tensors| {
        let tensor = tensors.iter_mut().find(|t| t.name == "output_norm.weight");
        tensor.unwrap().kind = TensorType::Q8_0;
    });
    refused(&path, &["output_norm.weight", "F32 or F16"]);
}

#[test]
fn what_an_architecture_adds_is_named_where_it_is_missing_or_misshapen() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let plan = || super::run(super::strata().arg("plan").arg(&path));
    for architecture in Architecture::ALL {
        for added in architecture.added_vectors() {
            let name = format!("blk.1.{}", added.name);
            changed_of(architecture, &path, |_, tensors| {
                tensors.retain(|tensor| tensor.name != name);
            });
            refused(&path, &["model.gguf", &name]);
            changed_of(architecture, &path, |_, tensors| {
                let tensor = tensors.iter_mut().find(|tensor| tensor.name == name);
                tensor.unwrap().dimensions = vec![3];
            });
            plan().refusal(1, &[&name]);
        }
    }
    // A bias that nobody asked for has to fit all the same.
    changed(&path, |_, tensors| {
        tensors.push(TensorShape::new("blk.0.attn_k.bias", TensorType::F32, [3]));
    });
    plan().refusal(1, &["blk.0.attn_k.bias"]);
    // What divides a frequency is not zero.
    changed(&path, |_, tensors| {
        tensors.push(TensorShape::new("rope_freqs.weight", TensorType::F32, [8]));
    });
    refused(&path, &["rope_freqs.weight", "holds 0"]);
    let window = "gemma3.attention.sliding_window";
    changed_of(Architecture::Gemma3, &path, |keys, _| {
        keys.retain(|(name, _)| name != window);
        keys.push((window.to_owned(), u32::MAX.into()));
    });
    refused(&path, &["model.gguf", window, "is 4294967295"]);
}

#[test]
fn a_vocabulary_larger_than_the_embedding_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    changed(&path, |_, tensors| {
        for tensor in tensors {
            if ["token_embd.weight", "output.weight"].contains(&tensor.name.as_str()) {
                tensor.dimensions[1] = 100;
            }
        }
    });
    refused(&path, &["vocabulary", "100 rows", "damaged"]);
}

#[test]
fn a_card_of_more_weights_than_any_model_is_refused_without_memory_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let card = folder.path().join("card.toml");
    let text = super::CARD
        .replace("layers = 2", "layers = 4096")
        .replace("embedding_length = 64", "embedding_length = 32")
        .replace(
            "feed_forward_length = 96",
            "feed_forward_length = 2147483648",
        )
        .replace("\"f32\"", "\"q8_0\"");
    std::fs::write(&card, text).unwrap();
    // 2 GB of addresses: it may not try, and the test machine would not survive it.
    let limited = "ulimit -v 2000000; exec \"$0\" \"$@\"";
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", limited])
        .arg(super::strata().get_program())
        .arg("plan")
        .arg(&card)
        .stdin(std::process::Stdio::null());
    super::run(&mut command).refusal(1, &["card.toml", "weights", "groups"]);
}
