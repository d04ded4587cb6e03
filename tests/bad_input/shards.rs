//! Split models that are not whole.

use super::models::{RandomOptions, random};
use super::split::{Dealt, split};
use super::{every_command, generate};
use std::path::{Path, PathBuf};
use strata::gguf::Gguf;

/// A good model in three files.
fn good_shards(folder: &Path) -> Vec<PathBuf> {
    let path = folder.join("good.gguf");
    random(&path, &RandomOptions::default());
    split(&path, 3, Dealt::InRuns)
}

/// Where the value of a key of type u16 or i32 stands.
fn value_of(bytes: &[u8], key: &str) -> usize {
    let mut text = (key.len() as u64).to_le_bytes().to_vec();
    text.extend_from_slice(key.as_bytes());
    let at = bytes.windows(text.len()).position(|window| window == text);
    at.unwrap() + text.len() + 4
}

#[test]
fn shards_that_make_no_model_are_refused_by_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let paths = good_shards(folder.path());
    generate(&paths[1]).success();
    let good: Vec<Vec<u8>> = paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect();
    let other = folder.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let other_path = other.join("good.gguf");
    random(
        &other_path,
        &RandomOptions {
            layers: 3,
            ..RandomOptions::default()
        },
    );
    let others = split(&other_path, 3, Dealt::InRuns);

    let with = |key: &str, value: &[u8]| {
        let mut bytes = good[1].clone();
        let at = value_of(&bytes, key);
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    };
    let cases: [(&str, Option<Vec<u8>>, &str); 9] = [
        ("missing", None, "shard 2 of 3 is missing: "),
        ("empty", Some(Vec::new()), "the file is empty"),
        (
            "cut",
            Some(good[1][..good[1].len() - 1].to_vec()),
            "past the end",
        ),
        (
            "count",
            Some(with("split.count", &[4, 0])),
            "`split.count`: is 4",
        ),
        (
            "absurd count",
            Some(with("split.count", &[255, 255])),
            "is 65535; a model of at most 256",
        ),
        (
            "number",
            Some(with("split.no", &[0, 0])),
            "`split.no`: is 0 and should be 1",
        ),
        (
            "tensors",
            Some(with("split.tensors.count", &[255, 255, 255, 127])),
            "is 2147483647",
        ),
        (
            "of another model",
            Some(std::fs::read(&others[1]).unwrap()),
            "of another model",
        ),
        (
            "twice",
            Some({
                // The first shard again, with the number of the second.
                let mut bytes = good[0].clone();
                let at = value_of(&bytes, "split.no");
                bytes[at] = 1;
                bytes
            }),
            "stands in shard 1 too",
        ),
    ];
    for (what, bytes, part) in cases {
        match bytes {
            Some(bytes) => std::fs::write(&paths[1], bytes).unwrap(),
            None => std::fs::remove_file(&paths[1]).unwrap(),
        }
        for outcome in every_command(&paths[0]) {
            eprintln!("{what}: {}", outcome.stderr.trim_end());
            outcome.refusal(1, &["good-00001-of-00003.gguf: ", "good-0000", part]);
        }
        std::fs::write(&paths[1], &good[1]).unwrap();
    }
    // What is no file is named once.
    std::fs::remove_file(&paths[1]).unwrap();
    std::fs::create_dir(&paths[1]).unwrap();
    for outcome in every_command(&paths[0]) {
        let text = outcome.refusal(1, &["good-00002-of-00003.gguf is a directory"]);
        assert_eq!(text.matches("-00002-of-").count(), 1, "{text}");
    }
    std::fs::remove_dir(&paths[1]).unwrap();
    std::fs::write(&paths[1], &good[1]).unwrap();
    let renamed = folder.path().join("renamed.gguf");
    std::fs::rename(&paths[1], &renamed).unwrap();
    for outcome in every_command(&renamed) {
        outcome.refusal(1, &["renamed.gguf", "`-00002-of-00003.gguf`"]);
    }
}

/// Seeded damage to the headers of the shards, run to the end of an answer: it is refused in one line or computed.
#[test]
fn random_damage_to_shards_is_refused_or_computed() {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};
    let folder = tempfile::tempdir().unwrap();
    let paths = good_shards(folder.path());
    let good: Vec<Vec<u8>> = paths
        .iter()
        .map(|path| std::fs::read(path).unwrap())
        .collect();
    let index = Gguf::open(&paths[0]).unwrap();
    // The vocabulary lies in the first header: most of its bytes are text.
    let header = |shard: usize| {
        let file = &index.files[shard];
        let starts = index.tensors.iter().map(|tensor| tensor.file_offset);
        let first = starts
            .filter(|start| (file.base..file.end()).contains(start))
            .min();
        (first.unwrap() - file.base) as usize
    };
    let mut random = ChaCha8Rng::seed_from_u64(9);
    let mut computed = 0;
    for case in 0..60 {
        let shard = random.next_u32() as usize % 3;
        let mut bytes = good[shard].clone();
        for _ in 0..1 + random.next_u32() % 3 {
            let at = random.next_u32() as usize % (header(shard) - 8);
            match random.next_u32() % 3 {
                0 => bytes[at] ^= 1 << (random.next_u32() % 8),
                1 => bytes[at] = random.next_u32() as u8,
                _ => {
                    let values = [0, 1, 2, 0x7fff_ffff, u32::MAX];
                    let value = values[random.next_u32() as usize % values.len()];
                    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        std::fs::write(&paths[shard], bytes).unwrap();
        let arguments = ["-p", "the", "-n", "2", "--log", "off", "--parallel", "1"];
        let placed: &[&str] = match case % 2 {
            0 => &["--host-memory", "64MiB"],
            _ => &["--copy", "--host-memory", "1MiB", "--context", "64"],
        };
        let mut command = super::strata();
        command
            .arg("generate")
            .arg(&paths[case % 3])
            .args(arguments);
        let outcome = super::run(command.args(placed));
        assert!(
            !outcome.stderr.contains("panicked"),
            "{case}: {}",
            outcome.stderr
        );
        match outcome.status.success() {
            true => computed += 1,
            false => {
                let code = outcome.status.code().unwrap_or(-1);
                assert!([1, 2].contains(&code), "{case}: {:?}", outcome.status);
                outcome.refusal(code, &[]);
            }
        }
        std::fs::write(&paths[shard], &good[shard]).unwrap();
    }
    assert!(computed > 0, "the damage is too coarse");
}
