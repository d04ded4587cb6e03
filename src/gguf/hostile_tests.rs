//! What a file may do to hurt its reader, as tables: the file, and the one line that is said about it.

use std::path::Path;

use super::{Gguf, Header, Hyperparameters, Metadata, TensorShape, TensorType, Value};

/// A file written by hand, so that each field can be wrong.
struct Raw {
    version: u32,
    tensor_count: Option<u64>,
    pair_count: Option<u64>,
    /// Key, type code, bytes of the value.
    pairs: Vec<(Vec<u8>, u32, Vec<u8>)>,
    tensors: Vec<RawTensor>,
    data_bytes: usize,
}

struct RawTensor {
    name: Vec<u8>,
    dimensions: Vec<u64>,
    /// The number of dimensions that is written.
    dimension_count: u32,
    type_code: u32,
    offset: u64,
}

fn raw() -> Raw {
    Raw {
        version: 3,
        tensor_count: None,
        pair_count: None,
        pairs: Vec::new(),
        tensors: Vec::new(),
        data_bytes: 0,
    }
}

impl Raw {
    fn pair(mut self, key: &str, code: u32, value: impl Into<Vec<u8>>) -> Raw {
        self.pairs.push((key.into(), code, value.into()));
        self
    }

    fn tensor(mut self, name: &str, dimensions: &[u64], type_code: u32, offset: u64) -> Raw {
        self.tensors.push(RawTensor {
            name: name.into(),
            dimensions: dimensions.to_vec(),
            dimension_count: dimensions.len() as u32,
            type_code,
            offset,
        });
        self
    }

    fn dimension_count(mut self, count: u32) -> Raw {
        self.tensors.last_mut().unwrap().dimension_count = count;
        self
    }

    fn data(mut self, bytes: usize) -> Raw {
        self.data_bytes = bytes;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(
            self.tensor_count
                .unwrap_or(self.tensors.len() as u64)
                .to_le_bytes(),
        );
        bytes.extend(
            self.pair_count
                .unwrap_or(self.pairs.len() as u64)
                .to_le_bytes(),
        );
        for (key, code, value) in &self.pairs {
            bytes.extend((key.len() as u64).to_le_bytes());
            bytes.extend(key);
            bytes.extend(code.to_le_bytes());
            bytes.extend(value);
        }
        for tensor in &self.tensors {
            bytes.extend((tensor.name.len() as u64).to_le_bytes());
            bytes.extend(&tensor.name);
            bytes.extend(tensor.dimension_count.to_le_bytes());
            for dimension in &tensor.dimensions {
                bytes.extend(dimension.to_le_bytes());
            }
            bytes.extend(tensor.type_code.to_le_bytes());
            bytes.extend(tensor.offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32) + self.data_bytes, 0);
        bytes
    }
}

/// Both texts must stand in the error, which is one line.
#[track_caller]
fn check_refused(bytes: &[u8], names: &str, says: &str) {
    let error = Gguf::parse(bytes).unwrap_err().to_string();
    assert!(error.contains(names) && error.contains(says), "{error}");
    assert!(!error.contains('\n') && error.len() < 400, "{error}");
}

fn string(text: &[u8]) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    bytes
}

fn array(code: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    let mut bytes = code.to_le_bytes().to_vec();
    bytes.extend(count.to_le_bytes());
    bytes.extend(elements);
    bytes
}

#[test]
fn what_is_not_gguf_is_named() {
    for (bytes, says) in [
        (&b""[..], "the file is empty"),
        (b"GG", "the file ends inside the magic number"),
        (b"GGUF", "the file ends inside the version"),
        (b"FUGG\x03\0\0\0", "the magic number is reversed"),
        (b"<!DOCTYPE html><html>", "HTML page"),
        (b"<html><body>404", "HTML page"),
        (
            b"version https://git-lfs.github.com/spec/v1",
            "Git LFS pointer",
        ),
        (b"PK\x03\x04aaaa", "zip archive"),
        (b"tjgg\x01\0\0\0", "before GGUF"),
        (b"\x7fELF\x02\x01\x01\0", "it starts with `\\x7fELF`"),
    ] {
        check_refused(bytes, "", says);
    }
}

#[test]
fn other_versions_and_big_endian_files_are_named() {
    for version in [0, 1, 4, 0x7fff_ffff] {
        let bytes = Raw { version, ..raw() }.bytes();
        check_refused(&bytes, &format!("version {version} "), "unsupported");
    }
    for version in [2u32, 3] {
        let mut bytes = raw().bytes();
        bytes[4..8].copy_from_slice(&version.to_be_bytes());
        check_refused(&bytes, "big-endian", "convert");
        assert!(Gguf::parse(&Raw { version, ..raw() }.bytes()).is_ok());
    }
}

#[test]
fn counts_and_lengths_past_the_file_are_refused_without_being_allocated() {
    for count in [1 << 20, 1 << 60, u64::MAX] {
        let tensors = Raw {
            tensor_count: Some(count),
            ..raw()
        };
        check_refused(
            &tensors.bytes(),
            &format!("counts {count} tensors"),
            "damaged or incomplete",
        );
        let pairs = Raw {
            pair_count: Some(count),
            ..raw()
        };
        check_refused(
            &pairs.bytes(),
            &format!("counts {count} key-value pairs"),
            "",
        );
        let text = raw().pair("k", 8, count.to_le_bytes()).bytes();
        check_refused(&text, "key `k`", "the file ends");
        for code in [0, 4, 7, 8, 12] {
            let numbers = raw().pair("k", 9, array(code, count, &[])).bytes();
            check_refused(&numbers, "key `k`", "the file ends");
        }
        let element = raw()
            .pair("k", 9, array(8, 1, &count.to_le_bytes()))
            .bytes();
        check_refused(&element, "element 0 of key `k`", "the file ends");
    }
    let mut long_key = raw().pair(&"k".repeat(70_000), 4, 1u32.to_le_bytes());
    check_refused(&long_key.bytes(), "key 0 of 1", "at most 65535");
    long_key.pairs.clear();
    let long_name = long_key.tensor(&"t".repeat(65), &[1], 0, 0).data(64);
    check_refused(&long_name.bytes(), "tensor 0 of 1", "at most 64");
}

/// A sparse file is as long as it likes and takes no space.
#[test]
fn a_header_of_a_terabyte_is_refused_without_being_read() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for (code, count) in [(0, 1u64 << 39), (8, 1 << 36)] {
        let start = raw().pair("k", 9, array(code, count, &[])).bytes();
        std::fs::write(file.path(), start).unwrap();
        file.as_file().set_len(1 << 40).unwrap();
        let error = Gguf::open(file.path()).unwrap_err().to_string();
        assert!(
            error.contains("more than 128 MiB (at the value of key `k`)"),
            "{error}"
        );
    }
}

#[test]
fn values_of_unknown_types_and_damaged_text_name_the_key() {
    for (code, value, says) in [
        (13, vec![0; 8], "unknown value type 13"),
        (u32::MAX, vec![0; 8], "unknown value type 4294967295"),
        (7, vec![2], "bool with the value 2"),
        (8, string(b"\xff\xfe"), "not UTF-8"),
        (9, array(9, 1, &array(4, 1, &[0; 4])), "array of arrays"),
        (
            9,
            array(13, 1, &[0; 8]),
            "array of the unknown value type 13",
        ),
        (
            9,
            array(7, 2, &[1, 9]),
            "element 1 is a bool with the value 9",
        ),
        (
            9,
            array(8, 2, &[string(b"a"), string(b"\xc0\x80")].concat()),
            "element 1 is not UTF-8",
        ),
    ] {
        check_refused(
            &raw().pair("some.key", code, value).bytes(),
            "key `some.key`",
            says,
        );
    }
    let twice = raw().pair("k", 0, [1]).pair("k", 0, [1]);
    check_refused(&twice.bytes(), "key `k`", "stands twice");
    let mut not_utf8 = raw().pair("k", 0, [1]);
    not_utf8.pairs[0].0 = vec![0xff];
    check_refused(&not_utf8.bytes(), "key 0 of 1", "not UTF-8");
}

#[test]
fn an_alignment_that_is_no_power_of_two_is_refused() {
    for alignment in [0u32, 3, 33, 48, 1 << 25, u32::MAX] {
        let bytes = raw()
            .pair("general.alignment", 4, alignment.to_le_bytes())
            .bytes();
        check_refused(&bytes, "`general.alignment`", &format!("is {alignment};"));
    }
    let text = raw().pair("general.alignment", 8, string(b"32"));
    check_refused(&text.bytes(), "`general.alignment`", "is of type string");
    let wide = raw().pair("general.alignment", 10, 64u64.to_le_bytes());
    assert_eq!(Gguf::parse(&wide.bytes()).unwrap().alignment, 64);
}

#[test]
fn shapes_that_overflow_or_are_empty_are_refused() {
    let check = |dimensions: &[u64], code: u32, says: &str| {
        let file = raw().tensor("w", dimensions, code, 0).data(4096);
        check_refused(&file.bytes(), "tensor `w`", says);
    };
    check(&[u64::MAX, 2], 0, "larger than any file");
    check(
        &[4, 1_073_741_823, 1_073_741_825, 1],
        0,
        "larger than any file",
    );
    check(
        &[1 << 32, 1 << 32, 1 << 32, 1 << 32],
        0,
        "larger than any file",
    );
    check(&[1 << 60], 0, "past the end of the file");
    check(&[4, 0], 0, "dimension of zero");
    check(&[0], 0, "dimension of zero");
    check(&[100], 12, "not a multiple of the 256 of a Q4_K block");
    check(&[33, 2], 8, "not a multiple of the 32 of a Q8_0 block");
    for count in [0, 5, 9, u32::MAX] {
        let file = raw()
            .tensor("w", &[1], 0, 0)
            .dimension_count(count)
            .data(4096);
        check_refused(
            &file.bytes(),
            "tensor `w`",
            &format!("has {count} dimensions"),
        );
    }
}

#[test]
fn tensor_types_that_are_not_computed_with_are_refused_by_name() {
    for (code, name) in [
        (16, "IQ2_XXS"),
        (20, "IQ4_NL"),
        (23, "IQ4_XS"),
        (26, "I32"),
        (34, "TQ1_0"),
        (39, "MXFP4"),
        (40, "NVFP4"),
        (4, "Q4_2"),
        (1234, "with the unknown code 1234"),
    ] {
        let file = raw()
            .tensor("blk.0.ffn_up.weight", &[256], code, 0)
            .data(4096);
        check_refused(
            &file.bytes(),
            "tensor `blk.0.ffn_up.weight`",
            &format!("type {name} is not"),
        );
    }
}

#[test]
fn tensor_data_must_lie_apart_aligned_and_inside_the_file() {
    let check = |file: Raw, name: &str, says: &str| check_refused(&file.bytes(), name, says);
    let two = |first: u64, second: u64| {
        raw()
            .tensor("a", &[16], 0, first)
            .tensor("b", &[16], 0, second)
    };
    check(two(0, 32).data(256), "tensor `b`", "overlap those of `a`");
    check(two(64, 64).data(256), "tensor `b`", "overlap those of `a`");
    check(two(32, 0).data(256), "tensor `a`", "overlap those of `b`");
    check(
        two(0, 65).data(256),
        "tensor `b`",
        "not a multiple of the alignment 32",
    );
    check(
        two(0, 64).data(127),
        "tensor `b`",
        "past the end of the file",
    );
    check(
        two(0, 1 << 63).data(256),
        "tensor `b`",
        "past the end of the file",
    );
    check(
        two(0, u64::MAX - 31).data(256),
        "tensor `b`",
        "past the end of the file",
    );
    let twice = raw()
        .tensor("a", &[8], 0, 0)
        .tensor("a", &[8], 0, 32)
        .data(64);
    check(twice, "tensor `a`", "stands twice");
    // In any order, with a gap, and with nothing or some bytes after the last: all well.
    assert!(Gguf::parse(&two(64, 0).data(128).bytes()).is_ok());
    let gap = Gguf::parse(&two(0, 128).data(192 + 17).bytes()).unwrap();
    assert_eq!(gap.tensors[1].file_offset - gap.tensors[0].file_offset, 128);
}

/// A small model that loads: metadata of several types and two tensors, the last without padding.
pub(super) fn valid_file(change: impl FnOnce(&mut Metadata)) -> Vec<u8> {
    let mut metadata = Metadata::new();
    for (key, value) in [
        ("general.architecture", Value::from("llama")),
        ("llama.block_count", 2u32.into()),
        ("llama.context_length", 64u32.into()),
        ("llama.embedding_length", 8u32.into()),
        ("llama.feed_forward_length", 16u32.into()),
        ("llama.attention.head_count", 4u32.into()),
        ("llama.attention.head_count_kv", 2u32.into()),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5f32.into()),
        (
            "tokenizer.ggml.tokens",
            vec!["<s>".to_owned(), "a".to_owned()].into(),
        ),
        ("tokenizer.ggml.scores", vec![0.0f32, -1.0].into()),
    ] {
        metadata.insert(key, value);
    }
    change(&mut metadata);
    let shapes = [
        TensorShape::new("token_embd.weight", TensorType::F32, [8, 2]),
        TensorShape::new("odd", TensorType::F16, [3]),
    ];
    let mut file = Vec::new();
    let header = Header::new(3, &metadata, &shapes).unwrap();
    header
        .write(&mut file, |_, tensor, output| {
            output.write_all(&vec![0; tensor.bytes as usize])
        })
        .unwrap();
    let end = header
        .index()
        .tensors
        .last()
        .map(|last| last.file_offset + last.bytes)
        .unwrap();
    file.truncate(end as usize);
    file
}

#[test]
fn a_file_cut_anywhere_is_refused_and_spare_bytes_are_not() {
    let file = valid_file(|_| {});
    for length in 0..file.len() {
        let error = Gguf::parse(&file[..length]).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
    }
    assert!(Gguf::parse(&file).is_ok());
    assert!(Gguf::parse(&[&file[..], &[7; 17]].concat()).is_ok());
}

/// Seeded, so that a failure repeats. Debug builds check arithmetic and release builds check what users run.
#[test]
fn twenty_thousand_damaged_files_never_panic() {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    let file = valid_file(|_| {});
    let header_bytes = Gguf::parse(&file).unwrap().tensors[0].file_offset;
    let mut random = ChaCha8Rng::seed_from_u64(20);
    let mut below = |bound: usize| (random.next_u64() % bound as u64) as usize;
    let mut accepted = 0;
    for _ in 0..20_000 {
        let mut damaged = file.clone();
        for _ in 0..=below(3) {
            let at = below(header_bytes as usize);
            match below(6) {
                0 => damaged[at] ^= 1 << below(8),
                1 => damaged[at] = below(256) as u8,
                2 => damaged[at] = [0, 0xff, 0x7f, 0x80][below(4)],
                3 => {
                    // A number as a length, count, dimension or offset would hold it.
                    let numbers = [0, 1, u64::MAX, 1 << 63, 1 << 60, 1 << 32, u64::MAX / 4];
                    let number = numbers[below(7)].to_le_bytes();
                    damaged.splice(at..(at + 8).min(damaged.len()), number);
                }
                4 => drop(damaged.drain(at..(at + below(16)).min(damaged.len()))),
                _ => damaged.truncate(at.max(below(file.len()))),
            }
            damaged.resize(damaged.len().max(header_bytes as usize), 0);
        }
        if let Ok(gguf) = Gguf::parse(&damaged) {
            accepted += 1;
            for tensor in &gguf.tensors {
                assert!(tensor.file_offset + tensor.bytes <= damaged.len() as u64);
                assert!(tensor.row_bytes() * tensor.rows() == tensor.bytes);
            }
            // May refuse, must not panic.
            drop(Hyperparameters::from_gguf(&gguf));
        }
    }
    assert!(
        accepted > 100,
        "the damage is too coarse: {accepted} files were accepted"
    );
}

#[test]
fn what_is_not_a_readable_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = |path: &Path| Gguf::open(path).unwrap_err().to_string();
    assert!(error(folder.path()).ends_with("is a directory, not a GGUF file"));
    assert!(error(&folder.path().join("absent")).contains("cannot open"));
    assert!(error(Path::new("/dev/null")).ends_with("is a device, not a GGUF file"));
    let pipe = folder.path().join("pipe");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    assert!(error(&pipe).ends_with("is a pipe, not a GGUF file"));
    let empty = folder.path().join("empty");
    std::fs::write(&empty, b"").unwrap();
    assert!(error(&empty).contains("the file is empty"));
    let good = folder.path().join("good");
    std::fs::write(&good, valid_file(|_| {})).unwrap();
    assert_eq!(Gguf::open(&good).unwrap().tensors.len(), 2);
}
