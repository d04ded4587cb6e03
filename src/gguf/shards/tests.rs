//! Split models, good ones and hostile ones.

use super::super::{Header, TensorShape, TensorType, Value};
use super::*;

const NAMES: [&str; 3] = [
    "m-00001-of-00003.gguf",
    "m-00002-of-00003.gguf",
    "m-00003-of-00003.gguf",
];

/// A shard as it is to be written.
#[derive(Clone)]
struct Shard {
    metadata: Metadata,
    tensors: Vec<&'static str>,
    /// Of each tensor, in elements.
    columns: u64,
}

impl Shard {
    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.metadata.insert(key, value);
    }

    fn without(&mut self, key: &str) {
        let mut kept = Metadata::new();
        for (name, value) in self.metadata.iter().filter(|(name, _)| *name != key) {
            kept.insert(name, value.clone());
        }
        self.metadata = kept;
    }

    fn bytes(&self) -> Vec<u8> {
        let shape = |name: &&str| TensorShape::new(*name, TensorType::F32, [self.columns]);
        let shapes: Vec<TensorShape> = self.tensors.iter().map(shape).collect();
        let header = Header::new(3, &self.metadata, &shapes).unwrap();
        let mut bytes = Vec::new();
        let written = header.write(&mut bytes, |_, tensor, output| {
            output.write_all(&vec![1; tensor.bytes as usize])
        });
        written.unwrap();
        bytes
    }
}

/// Five tensors in three shards; the keys in the first.
fn shards() -> [Shard; 3] {
    let mut number = 0u16;
    [&["a", "b"][..], &["c"], &["d", "e"]].map(|tensors| {
        let mut metadata = Metadata::new();
        if number == 0 {
            metadata.insert("general.architecture", "llama");
            metadata.insert("general.name", "split");
        }
        metadata.insert(NUMBER_KEY, number);
        metadata.insert(COUNT_KEY, 3u16);
        metadata.insert(TENSORS_KEY, 5i32);
        number += 1;
        Shard {
            metadata,
            tensors: tensors.to_vec(),
            columns: 8,
        }
    })
}

fn write(folder: &Path, shards: &[Shard; 3]) {
    for (name, shard) in NAMES.iter().zip(shards) {
        std::fs::write(folder.join(name), shard.bytes()).unwrap();
    }
}

#[test]
fn any_shard_opens_the_whole_model() {
    let folder = tempfile::tempdir().unwrap();
    let mut shards = shards();
    // As `--no-tensor-first-split` writes it, and with an alignment of its own.
    shards[0].tensors.clear();
    for shard in &mut shards {
        shard.set(TENSORS_KEY, 3i32);
    }
    shards[1].set("general.alignment", 4096u32);
    write(folder.path(), &shards);
    for name in NAMES {
        let model = Gguf::open(&folder.path().join(name)).unwrap();
        assert_eq!(model.architecture().unwrap(), "llama");
        assert_eq!(model.alignment, 32);
        let names: Vec<&str> = model.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["c", "d", "e"]);
        let paths: Vec<PathBuf> = model.files.iter().map(|file| file.path.clone()).collect();
        assert_eq!(paths, NAMES.map(|name| folder.path().join(name)));
        let mut bytes = 0;
        let mut end = None;
        for file in &model.files {
            let size = std::fs::metadata(&file.path).unwrap().len();
            assert_eq!(file.bytes, size);
            bytes += size;
            assert_eq!(file.base % FILE_GAP, 0);
            assert!(end.is_none_or(|end| file.base >= end + FILE_GAP));
            end = Some(file.end());
        }
        assert_eq!(model.file_bytes, bytes);
        // Where a tensor's bytes are, in its own file.
        for (name, file) in [("c", 1), ("d", 2), ("e", 2)] {
            let (_, tensor) = model.tensor(name).unwrap();
            let file = &model.files[file];
            let start = (tensor.file_offset - file.base) as usize;
            let content = std::fs::read(&file.path).unwrap();
            assert_eq!(&content[start..start + 32], &[1; 32], "{name}");
        }
        assert_eq!(model.tensors[0].file_offset % 4096, 0);
    }
}

/// What is said when one thing is wrong with the shards, whichever of them is given.
#[track_caller]
fn check(damage: impl Fn(&mut [Shard; 3]), says: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut shards = shards();
    damage(&mut shards);
    write(folder.path(), &shards);
    for name in NAMES {
        let error = Gguf::open(&folder.path().join(name)).unwrap_err();
        let error = error.to_string();
        assert!(!error.contains('\n') && error.len() < 500, "{error}");
        assert!(
            says.iter().any(|part| error.contains(part)),
            "{name}: {error} lacks {says:?}"
        );
    }
}

#[test]
fn shards_that_are_not_of_one_model_are_refused() {
    check(
        |s| s[1].set(COUNT_KEY, 4u16),
        &[
            "is 4 and should be 3",
            "`-00002-of-00004.gguf`",
            "is 3 and should be 4",
        ],
    );
    check(|s| s[1].set(NUMBER_KEY, 2u16), &["`split.no`"]);
    check(|s| s[1].set(NUMBER_KEY, 3u16), &["they count from 0"]);
    check(|s| s[1].set(NUMBER_KEY, -1i32), &["`split.no`: is -1"]);
    check(|s| s[1].without(NUMBER_KEY), &["missing key `split.no`"]);
    check(|s| s[1].set(TENSORS_KEY, 6i32), &["`split.tensors.count`"]);
    check(
        |s| s[1].without(TENSORS_KEY),
        &["missing key `split.tensors.count`"],
    );
    for tensors in [0i32, 4, 6, i32::MAX] {
        check(
            |s| s.iter_mut().for_each(|s| s.set(TENSORS_KEY, tensors)),
            &["the shards hold", "at most"],
        );
    }
    check(
        |s| s[2].tensors = vec!["d", "a"],
        &["tensor `a`: stands in shard 1 too"],
    );
    check(
        |s| s[2].tensors = vec!["d", "f", "g"],
        &["is 5, and the shards hold 6"],
    );
    check(
        |s| s[2].set("general.architecture", "qwen2"),
        &["of another model"],
    );
    check(|s| s[1].set("general.name", "other"), &["of another model"]);
    // What repeats the first one's keys is as good; what it has beside is not looked at.
    let folder = tempfile::tempdir().unwrap();
    let mut good = shards();
    good[1].set("general.architecture", "llama");
    good[2].set("general.note", "third");
    write(folder.path(), &good);
    let model = Gguf::open(&folder.path().join(NAMES[1])).unwrap();
    assert!(!model.metadata.contains("general.note"));
}

/// Each is refused for its number alone, before any other file is opened.
#[test]
fn absurd_counts_are_refused_without_looking_for_the_files() {
    let folder = tempfile::tempdir().unwrap();
    for (count, says) in [
        (Value::from(257u16), "at most 256 files"),
        (65_535u16.into(), "is 65535; a model of at most 256 files"),
        (u64::MAX.into(), "`split.count`: is 18446744073709551615"),
        ((-1i32).into(), "`split.count`: is -1"),
        ("three".into(), "is of type string"),
        (vec![3u16].into(), "is of type array of u16"),
    ] {
        let [mut first, ..] = shards();
        first.set(COUNT_KEY, count);
        let path = folder.path().join("m-00001-of-65535.gguf");
        std::fs::write(&path, first.bytes()).unwrap();
        let error = Gguf::open(&path).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn a_shard_that_is_missing_or_misnamed_or_damaged_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    write(folder.path(), &shards());
    let error = |name: &str| Gguf::open(&path(name)).unwrap_err().to_string();

    std::fs::rename(path(NAMES[1]), path("away")).unwrap();
    for name in [NAMES[0], NAMES[2]] {
        let said = error(name);
        let missing = format!("shard 2 of 3 is missing: {}", path(NAMES[1]).display());
        assert!(said.starts_with(&missing), "{said}");
    }
    let said = error("away");
    assert!(
        said.contains("does not end in `-00002-of-00003.gguf`"),
        "{said}"
    );

    let whole = std::fs::read(path("away")).unwrap();
    for length in [0, 3, 23, 100, whole.len() - 32, whole.len() - 1] {
        std::fs::write(path(NAMES[1]), &whole[..length]).unwrap();
        let said = error(NAMES[0]);
        assert!(
            said.starts_with(&path(NAMES[1]).display().to_string()),
            "{said}"
        );
        let said = error(NAMES[1]);
        assert!(!said.contains(NAMES[0]), "{said}");
    }
    std::fs::remove_file(path(NAMES[1])).unwrap();
    std::fs::create_dir(path(NAMES[1])).unwrap();
    assert!(error(NAMES[0]).contains("is a directory"));
    std::fs::remove_dir(path(NAMES[1])).unwrap();
    std::fs::write(path(NAMES[1]), &whole).unwrap();
    assert_eq!(Gguf::open(&path(NAMES[0])).unwrap().tensors.len(), 5);

    // Another whole model under the name of a shard.
    let mut shard = shards()[1].clone();
    shard.without(COUNT_KEY);
    std::fs::write(path(NAMES[1]), shard.bytes()).unwrap();
    assert!(error(NAMES[0]).contains("by its name it is one of 3 shards"));
    // By itself it is a model of one file, whatever its name says.
    assert_eq!(Gguf::open(&path(NAMES[1])).unwrap().files.len(), 1);
}

/// A shard that was read from bytes has no neighbours to be joined with.
#[test]
fn bytes_of_one_shard_are_no_model() {
    let shard = Gguf::parse(&shards()[0].bytes()).unwrap();
    let error = refuse_alone(&shard).unwrap_err().to_string();
    assert!(
        error.contains("this is shard 1 of a split model"),
        "{error}"
    );
}

/// A split into one file is a whole model.
#[test]
fn a_split_into_one_needs_no_name() {
    let folder = tempfile::tempdir().unwrap();
    for count in [0u16, 1] {
        let [mut only, ..] = shards();
        only.set(COUNT_KEY, count);
        let path = folder.path().join("whole.gguf");
        std::fs::write(&path, only.bytes()).unwrap();
        let model = Gguf::open(&path).unwrap();
        assert_eq!(model.tensors.len(), 2);
        refuse_alone(&model).unwrap();
    }
}

/// Damage to the headers of all shards at once. Seeded, so that a failure repeats.
#[test]
fn ten_thousand_damaged_splits_never_panic() {
    use rand_chacha::ChaCha8Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    let whole = shards().map(|shard| shard.bytes());
    let mut random = ChaCha8Rng::seed_from_u64(21);
    let mut below = |bound: usize| (random.next_u64() % bound as u64) as usize;
    let (mut accepted, mut joined) = (0, 0);
    for _ in 0..10_000 {
        let mut damaged = whole.clone();
        for _ in 0..=below(3) {
            let shard = &mut damaged[below(3)];
            let at = below(shard.len() - 8);
            match below(4) {
                0 => shard[at] ^= 1 << below(8),
                1 => shard[at] = [0, 1, 2, 3, 5, 0xff][below(6)],
                2 => {
                    let numbers = [0, 1, 3, 65_535, u64::MAX, 1 << 63, 1 << 32];
                    shard[at..at + 8].copy_from_slice(&numbers[below(7)].to_le_bytes());
                }
                _ => shard.truncate(at),
            }
            if shard.len() < 64 {
                shard.resize(64, 0);
            }
        }
        let number = below(3);
        let path = Path::new("folder").join(NAMES[number]);
        let read = |path: &Path| {
            let index = NAMES.iter().position(|&name| path.ends_with(name));
            let Some(index) = index else {
                return Err(GgufError::Header("no such file".to_owned()));
            };
            let mut shard = Gguf::parse(&damaged[index])?;
            shard.files[0].path = path.to_owned();
            Ok(shard)
        };
        let Ok(given) = read(&path) else { continue };
        accepted += 1;
        match with_its_shards(&path, given, read) {
            Ok(model) => {
                joined += usize::from(model.files.len() == 3);
                for tensor in &model.tensors {
                    let inside = model.files.iter().any(|file| {
                        tensor.file_offset >= file.base
                            && tensor.file_offset + tensor.bytes <= file.end()
                    });
                    assert!(inside, "{tensor:?}");
                }
            }
            Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
        }
    }
    assert!(accepted > 2000, "{accepted} were accepted");
    assert!(joined > 1000, "{joined} were joined");
}
