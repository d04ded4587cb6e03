use super::chunks::candle_type;
use super::*;
use crate::gguf::{Gguf, Header, Metadata, Mixture, TensorShape};
use crate::kernels::dequantise_row;
use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::path::Path;

/// A llama's metadata, as far as the rules ask for them.
fn metadata() -> Metadata {
    let mut metadata = Metadata::new();
    metadata.insert("general.architecture", "llama");
    metadata.insert("llama.block_count", 2u32);
    metadata.insert("llama.attention.head_count", 4u32);
    metadata.insert("general.file_type", 1u32);
    metadata.insert("tokenizer.ggml.tokens", vec!["a".to_owned()]);
    metadata
}

/// Random weights of every shape that matters: more than a chunk of them, rows of whole large blocks and of small ones
/// only, a vector.
fn shapes(kind: TensorType) -> Vec<TensorShape> {
    vec![
        TensorShape::new("token_embd.weight", kind, [512, 9]),
        TensorShape::new("blk.0.attn_norm.weight", TensorType::F32, [512]),
        TensorShape::new("blk.0.attn_q.weight", kind, [512, 1300]),
        TensorShape::new("blk.0.attn_v.weight", kind, [512, 3]),
        TensorShape::new("blk.0.ffn_down.weight", kind, [768, 512]),
        TensorShape::new("output.weight", kind, [512, 9]),
    ]
}

fn write_model(path: &Path, metadata: &Metadata, shapes: &[TensorShape]) -> Gguf {
    let header = Header::new(3, metadata, shapes).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let mut file = std::fs::File::create(path).unwrap();
    header
        .write(&mut file, |_, tensor, sink| {
            let floats: Vec<f32> = (0..tensor.columns() * tensor.rows())
                .map(|_| random.next_u32() as f32 / u32::MAX as f32 - 0.5)
                .collect();
            sink.write_all(&by_candle(&floats, tensor.kind))
        })
        .unwrap();
    Gguf::open_file(path).unwrap()
}

/// Candle's blocks of a whole tensor.
fn by_candle(floats: &[f32], kind: TensorType) -> Vec<u8> {
    let tensor = Tensor::new(floats, &Device::Cpu).unwrap();
    let quantised = QTensor::quantize(&tensor, candle_type(kind)).unwrap();
    quantised.data().unwrap().into_owned()
}

fn bytes_of(path: &Path, tensor: &crate::gguf::TensorInfo) -> Vec<u8> {
    let file = std::fs::read(path).unwrap();
    let start = tensor.file_offset as usize;
    file[start..start + tensor.bytes as usize].to_vec()
}

fn run(input: &Path, output: &Path, mixture: Mixture) -> Result<Gguf, QuantiseError> {
    let conversion = Conversion::new(Gguf::open(input).unwrap(), mixture)?;
    let threads = NonZeroUsize::new(3).unwrap();
    quantise(
        &conversion,
        Destination::replacing(output),
        threads,
        |_, _| true,
    )?;
    Ok(Gguf::open(output).unwrap())
}

/// Every tensor of the output is what candle makes of the whole tensor of the input.
#[track_caller]
fn check_equal(input: &Path, before: &Gguf, output: &Path, after: &Gguf) {
    for (from, to) in before.tensors.iter().zip(&after.tensors) {
        assert_eq!((&from.name, &from.dimensions), (&to.name, &to.dimensions));
        let stored = bytes_of(input, from);
        let ours = bytes_of(output, to);
        if from.kind == to.kind {
            assert!(stored == ours, "{} was changed", from.name);
            continue;
        }
        let mut floats = vec![0.0; (from.columns() * from.rows()) as usize];
        dequantise_row(from.kind, &stored, &mut floats);
        assert!(
            by_candle(&floats, to.kind) == ours,
            "{}: {} to {}",
            from.name,
            from.kind.name(),
            to.kind.name()
        );
    }
}

#[test]
fn blocks_are_those_of_candle_for_every_mixture() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (
        folder.path().join("in.gguf"),
        folder.path().join("out.gguf"),
    );
    for kind in [TensorType::F32, TensorType::F16, TensorType::BF16] {
        let before = write_model(&input, &metadata(), &shapes(kind));
        for mixture in Mixture::ALL {
            let after = run(&input, &output, mixture).unwrap();
            check_equal(&input, &before, &output, &after);
            let (_, query) = after.tensor("blk.0.attn_q.weight").unwrap();
            assert_eq!(query.kind, mixture.base(), "{}", mixture.name());
            let file_type = after.metadata.u32("general.file_type").unwrap();
            assert_eq!(file_type, Some(mixture.file_type()));
        }
    }
}

#[test]
fn what_is_quantised_already_is_taken_from_its_weights() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (
        folder.path().join("in.gguf"),
        folder.path().join("out.gguf"),
    );
    for kind in TensorType::ALL
        .into_iter()
        .filter(|kind| kind.block_elements() > 1)
    {
        let before = write_model(&input, &metadata(), &shapes(kind));
        for mixture in [Mixture::F32, Mixture::Q8_0, Mixture::Q4KM] {
            let after = run(&input, &output, mixture).unwrap();
            check_equal(&input, &before, &output, &after);
        }
        let remarks = Conversion::new(before, Mixture::F16).unwrap().remarks();
        let says = format!("5 tensors are quantised already (5 x {})", kind.name());
        assert!(remarks.concat().contains(&says), "{remarks:?}");
    }
}

#[test]
fn rows_of_small_blocks_get_other_types_and_it_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let input = folder.path().join("in.gguf");
    let mut shapes = shapes(TensorType::F16);
    shapes.push(TensorShape::new(
        "blk.1.attn_q.weight",
        TensorType::F16,
        [576, 4],
    ));
    shapes.push(TensorShape::new(
        "blk.1.attn_k.weight",
        TensorType::F16,
        [576, 4],
    ));
    let before = write_model(&input, &metadata(), &shapes);
    let conversion = Conversion::new(before, Mixture::Q4KM).unwrap();
    assert_eq!(
        conversion.remarks(),
        [
            "2 of 7 matrices have rows that are no whole number of blocks and get another type of about the size: 2 x Q5_0 for \
             Q4_K"
        ]
    );
    assert_eq!(conversion.kinds()[&TensorType::Q5_0], 2);
}

#[test]
fn metadata_are_kept_and_what_says_split_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (
        folder.path().join("in.gguf"),
        folder.path().join("out.gguf"),
    );
    let mut keys = metadata();
    let count = shapes(TensorType::F16).len() as u64;
    keys.insert("split.no", 0u16);
    keys.insert("split.count", 1u16);
    keys.insert("split.tensors.count", count);
    keys.insert("general.alignment", 64u32);
    write_model(&input, &keys, &shapes(TensorType::F16));
    let after = run(&input, &output, Mixture::Q4_0).unwrap();
    let names: Vec<&str> = after.metadata.iter().map(|(key, _)| key).collect();
    assert_eq!(
        names,
        [
            "general.architecture",
            "llama.block_count",
            "llama.attention.head_count",
            "general.file_type",
            "tokenizer.ggml.tokens",
            "general.alignment",
            "general.quantization_version",
        ]
    );
    assert_eq!(after.alignment, 64);

    keys.insert("split.count", 2u16);
    keys.insert("split.tensors.count", count + 1);
    write_model(&input, &keys, &shapes(TensorType::F16));
    let alone = Gguf::open_file(&input).unwrap();
    let error = Conversion::new(alone, Mixture::Q4_0).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("shard 1 of a split model"), "{error}");
}

#[test]
fn weights_that_no_block_holds_are_refused_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (
        folder.path().join("in.gguf"),
        folder.path().join("out.gguf"),
    );
    let shape = TensorShape::new("blk.0.attn_q.weight", TensorType::F32, [512, 1300]);
    let refused = |value: f32, mixture: Mixture| -> Result<Gguf, String> {
        let header = Header::new(3, &metadata(), std::slice::from_ref(&shape)).unwrap();
        let mut weights = vec![0.5f32; 512 * 1300];
        weights[400_000] = value;
        let bytes: Vec<u8> = weights
            .iter()
            .flat_map(|weight| weight.to_le_bytes())
            .collect();
        let mut file = std::fs::File::create(&input).unwrap();
        header
            .write(&mut file, |_, _, sink| sink.write_all(&bytes))
            .unwrap();
        run(&input, &output, mixture).map_err(|error| error.to_string())
    };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = refused(value, Mixture::Q4KM).unwrap_err();
        assert!(
            error.contains("in.gguf: tensor `blk.0.attn_q.weight`: holds"),
            "{error}"
        );
    }
    let error = refused(-70_000.0, Mixture::Q8_0).unwrap_err();
    assert!(
        error.contains("holds -70000.0, and Q8_0 holds no more than 65504.0; take bf16"),
        "{error}"
    );
    // Rounded to seven bits it would be an infinity.
    let error = refused(f32::MAX, Mixture::BF16).unwrap_err();
    assert!(
        error.contains("BF16 holds no more than 3.3895314e38; take f32"),
        "{error}"
    );
    let names: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
    assert!(refused(-70_000.0, Mixture::BF16).is_ok());
    // Blocks of nothing but zeros, and of one value.
    assert!(refused(0.5, Mixture::Q4KM).is_ok());
}

#[test]
fn an_interrupt_a_shrunk_input_and_a_missing_folder_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (
        folder.path().join("in.gguf"),
        folder.path().join("out.gguf"),
    );
    let before = write_model(&input, &metadata(), &shapes(TensorType::F32));
    std::fs::write(&output, b"old").unwrap();
    let conversion = Conversion::new(before, Mixture::Q8_0).unwrap();
    let threads = NonZeroUsize::new(2).unwrap();
    let mut calls = 0;
    let interrupted = quantise(
        &conversion,
        Destination::replacing(&output),
        threads,
        |done, total| {
            assert!(done <= total);
            calls += 1;
            calls < 3
        },
    );
    assert!(
        matches!(interrupted, Err(QuantiseError::Interrupted)),
        "{interrupted:?}"
    );
    let absent = folder.path().join("absent/out.gguf");
    let error = quantise(&conversion, Destination::new(&absent), threads, |_, _| true).unwrap_err();
    assert!(error.to_string().contains("cannot write"), "{error}");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&input)
        .unwrap();
    // Somebody writes to it meanwhile: the new file could have weights of two.
    let error = quantise(
        &conversion,
        Destination::replacing(&output),
        threads,
        |_, _| file.set_modified(std::time::UNIX_EPOCH).is_ok(),
    )
    .unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("in.gguf: it was changed meanwhile"),
        "{error}"
    );
    file.set_len(before_end(&conversion) - 1).unwrap();
    let error = quantise(
        &conversion,
        Destination::replacing(&output),
        threads,
        |_, _| true,
    )
    .unwrap_err();
    assert!(error.to_string().contains("cannot read"), "{error}");
    let mut names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["in.gguf", "out.gguf"]);
    assert_eq!(std::fs::read(&output).unwrap(), b"old");
}

/// Who is in the middle of writing a file has nothing damaged.
#[test]
fn what_looks_like_damage_in_a_changed_input_is_the_change() {
    let folder = tempfile::tempdir().unwrap();
    let [input, output] = ["in.gguf", "out.gguf"].map(|name| folder.path().join(name));
    // The first batch of one thread is written before the second, with the last weight, has failed.
    let shape = TensorShape::new("blk.0.attn_q.weight", TensorType::F32, [512, 2600]);
    let before = write_model(&input, &metadata(), &[shape]);
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&input)
        .unwrap();
    let last = before_end(&Conversion::new(before, Mixture::Q8_0).unwrap()) - 4;
    std::os::unix::fs::FileExt::write_all_at(&file, &f32::NAN.to_le_bytes(), last).unwrap();
    let conversion = Conversion::new(Gguf::open(&input).unwrap(), Mixture::Q8_0).unwrap();
    let error = |touch: bool| {
        let touched = |_, _| !touch || file.set_modified(std::time::UNIX_EPOCH).is_ok();
        let to = Destination::new(&output);
        quantise(&conversion, to, NonZeroUsize::MIN, touched).unwrap_err()
    };
    let damaged = error(false).to_string();
    assert!(damaged.contains("the file is damaged"), "{damaged}");
    let changed = error(true).to_string();
    assert!(changed.contains("it was changed meanwhile"), "{changed}");
}

/// Where the last tensor of the input ends.
fn before_end(conversion: &Conversion) -> u64 {
    let ends = conversion.input().tensors.iter();
    ends.map(|tensor| tensor.file_offset + tensor.bytes)
        .max()
        .unwrap()
}
