//! Files that begin as a model does.

use super::models::{RandomOptions, random};
use super::{every_command, generate, good_model};
use std::path::Path;
use strata::gguf::Gguf;

/// Where in the file the offset of a tensor's data stands.
fn offset_field(bytes: &[u8], name: &str) -> usize {
    let mut text = (name.len() as u64).to_le_bytes().to_vec();
    text.extend_from_slice(name.as_bytes());
    let entry = bytes
        .windows(text.len())
        .position(|window| window == text)
        .unwrap();
    let dimensions = entry + text.len();
    dimensions + 4 + 8 * usize::from(bytes[dimensions]) + 4
}

fn read_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn put(bytes: &mut [u8], at: usize, value: impl AsRef<[u8]>) {
    let value = value.as_ref();
    bytes[at..at + value.len()].copy_from_slice(value);
}

const TENSORS: usize = 8;
const PAIRS: usize = 16;
const FIRST: &str = "blk.0.attn_q.weight";
const SECOND: &str = "blk.1.attn_q.weight";

#[test]
fn damaged_headers_are_refused_by_every_command() {
    type Damage = fn(&mut Vec<u8>);
    let cases: [(&str, Damage, &str); 12] = [
        (
            "big-endian",
            |b| {
                b[4..8].reverse();
                b[TENSORS..TENSORS + 8].reverse();
                b[PAIRS..PAIRS + 8].reverse();
            },
            "big-endian",
        ),
        (
            "version",
            |b| put(b, 4, 4u32.to_le_bytes()),
            "unsupported version 4",
        ),
        ("reversed magic", |b| b[..4].reverse(), "reversed"),
        (
            "tensors",
            |b| put(b, TENSORS, (1u64 << 60).to_le_bytes()),
            "1152921504606846976 tensors",
        ),
        (
            "no tensors",
            |b| put(b, TENSORS, 0u64.to_le_bytes()),
            "missing tensor `token_embd.weight`",
        ),
        (
            "keys",
            |b| put(b, PAIRS, u64::MAX.to_le_bytes()),
            "key-value pairs",
        ),
        (
            "misaligned",
            |b| {
                let at = offset_field(b, FIRST);
                let offset = read_u64(b, at);
                put(b, at, (offset + 1).to_le_bytes());
            },
            "multiple of the alignment",
        ),
        (
            "overlap",
            |b| {
                let at = offset_field(b, SECOND);
                let of_first = read_u64(b, offset_field(b, FIRST));
                put(b, at, of_first.to_le_bytes());
            },
            "overlap",
        ),
        (
            "outside",
            |b| {
                let at = offset_field(b, FIRST);
                put(b, at, (1u64 << 63).to_le_bytes());
            },
            "past the end",
        ),
        (
            "type",
            |b| {
                let at = offset_field(b, FIRST) - 4;
                put(b, at, 16u32.to_le_bytes());
            },
            "IQ2_XXS is not supported",
        ),
        (
            "dimensions",
            |b| {
                let at = offset_field(b, FIRST) - 4 - 16;
                put(b, at, (1u64 << 62).to_le_bytes());
                put(b, at + 8, (1u64 << 62).to_le_bytes());
            },
            "larger than any file",
        ),
        (
            "zero dimension",
            |b| {
                let at = offset_field(b, FIRST) - 4 - 16;
                put(b, at + 8, 0u64.to_le_bytes());
            },
            "dimension of zero",
        ),
    ];
    let (folder, model) = good_model();
    let good = std::fs::read(model).unwrap();
    let path = folder.path().join("damaged.gguf");
    for (what, damage, part) in cases {
        let mut bytes = good.clone();
        damage(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        for (command, outcome) in every_command(&path).into_iter().enumerate() {
            // `inspect` describes files without tensors, and `synth` wants the vocabulary alone.
            if what == "no tensors" && [0, 3].contains(&command) {
                continue;
            }
            // And tensors of a type that nothing computes with, which it names.
            if what == "type" && command == 0 {
                let said = outcome.success();
                assert!(said.contains("served            no: "), "{said}");
                assert!(said.contains(part), "{said}");
                continue;
            }
            outcome.refusal(1, &["damaged.gguf", part]);
        }
    }
}

#[test]
fn files_that_end_too_early_are_refused_and_longer_ones_are_read() {
    let (folder, model) = good_model();
    let good = std::fs::read(&model).unwrap();
    let data = Gguf::open(&model).unwrap().tensors[0].file_offset as usize;
    let path = folder.path().join("short.gguf");
    for length in [3, 4, 7, 23, 24, 100, data / 2, data - 40, data, data + 1] {
        std::fs::write(&path, &good[..length]).unwrap();
        for outcome in every_command(&path) {
            outcome.refusal(1, &["short.gguf"]);
        }
    }
    std::fs::write(&path, &good[..good.len() - 1]).unwrap();
    for outcome in every_command(&path) {
        outcome.refusal(1, &["past the end", "download may be incomplete"]);
    }
    let mut longer = good.clone();
    longer.extend_from_slice(b"seventeen bytes..");
    std::fs::write(&path, longer).unwrap();
    generate(&path).success();
}

/// Seeded damage to metadata and tensor table, run to the end of an answer: it is refused in one line or computed.
#[test]
fn random_damage_is_refused_or_computed() {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.gguf");
    random(&path, &RandomOptions::default());
    let good = std::fs::read(&path).unwrap();
    let keys = key_bytes(&good);
    let table = offset_field(&good, "token_embd.weight") - 60..header_bytes(&path);
    let mut random = ChaCha8Rng::seed_from_u64(7);
    for case in 0..250 {
        let mut bytes = good.clone();
        for _ in 0..1 + random.next_u32() % 3 {
            let place = match random.next_u32() % 3 {
                0 => table.clone(),
                _ => keys.clone(),
            };
            let at = place.start + random.next_u32() as usize % (place.len() - 8);
            match random.next_u32() % 4 {
                0 => bytes[at] ^= 1 << (random.next_u32() % 8),
                1 => bytes[at] = random.next_u32() as u8,
                2 => {
                    let values = [0, 1, 2, 0x7fff_ffff, u32::MAX];
                    let value = values[random.next_u32() as usize % values.len()];
                    put(&mut bytes, at, value.to_le_bytes());
                }
                _ => {
                    let values = [f32::NAN, f32::INFINITY, -1.0, 0.0, 1e-30, 1e30];
                    let value = values[random.next_u32() as usize % values.len()];
                    put(&mut bytes, at, value.to_le_bytes());
                }
            }
        }
        std::fs::write(&path, bytes).unwrap();
        let arguments = ["-p", "the", "-n", "2", "--log", "off", "--parallel", "1"];
        let small: &[&str] = match case % 2 {
            0 => &["--host-memory", "64MiB"],
            _ => &["--copy", "--host-memory", "1MiB", "--context", "64"],
        };
        let outcome = super::run(
            super::strata()
                .arg("generate")
                .arg(&path)
                .args(arguments)
                .args(small),
        );
        assert!(
            !outcome.stderr.contains("panicked"),
            "{case}: {}",
            outcome.stderr
        );
        if !outcome.status.success() {
            // 2: the plan of a wild size exceeds the machine.
            let code = outcome.status.code().unwrap_or(-1);
            assert!([1, 2].contains(&code), "{case}: {:?}", outcome.status);
            outcome.refusal(code, &[]);
        }
    }
}

/// The keys in front of the vocabulary.
fn key_bytes(bytes: &[u8]) -> std::ops::Range<usize> {
    let tokens = b"tokenizer.ggml.tokens";
    let end = bytes.windows(tokens.len()).position(|w| w == tokens);
    24..end.unwrap()
}

fn header_bytes(path: &Path) -> usize {
    Gguf::open(path).unwrap().tensors[0].file_offset as usize
}
