//! How the files of a split model are called: `NAME-00001-of-00003.gguf`, as llama.cpp's `llama-gguf-split` has it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The most files of a model. More than any published one has; each is an open file.
pub(super) const SHARDS_MAX: u32 = 256;

/// A path that is called like a shard. Whether it is one, its keys say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardName<'a> {
    /// The path up to the number.
    pub stem: &'a str,
    /// From 1 to `count`.
    pub number: u32,
    /// At most `SHARDS_MAX`.
    pub count: u32,
}

impl ShardName<'_> {
    /// `None`: it is called like a whole model, or like nothing.
    pub fn of(path: &str) -> Option<ShardName<'_>> {
        let stem = path.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let parse = |digits: &str| {
            let all = digits.len() == 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
            all.then(|| digits.parse::<u32>().ok())?
        };
        let (number, count) = (parse(number)?, parse(count)?);
        let is_named = !stem.is_empty() && !stem.ends_with('/');
        (is_named && 1 <= number && number <= count && count <= SHARDS_MAX).then_some(ShardName {
            stem,
            number,
            count,
        })
    }
}

/// How the name of a shard ends. Numbers count from 1.
pub(super) fn shard_suffix(number: u32, count: u32) -> String {
    format!("-{number:05}-of-{count:05}.gguf")
}

/// The path that a model would have as one file: `NAME-00001-of-00003.gguf` is a shard of `NAME.gguf`. Any other path is
/// its own.
pub fn unsplit_path(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(OsStr::to_str);
    match name.and_then(ShardName::of) {
        Some(shard) => path.with_file_name(format!("{}.gguf", shard.stem)),
        None => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_split_model_has_no_number() {
        for (path, stem, number, count, unsplit) in [
            ("a/m-00001-of-00003.gguf", "a/m", 1, 3, "a/m.gguf"),
            ("m-00012-of-00012.gguf", "m", 12, 12, "m.gguf"),
            ("m-1b-00002-of-00004.gguf", "m-1b", 2, 4, "m-1b.gguf"),
            ("m-00001-of-00001.gguf", "m", 1, 1, "m.gguf"),
            ("m-00256-of-00256.gguf", "m", 256, 256, "m.gguf"),
        ] {
            let shard = ShardName {
                stem,
                number,
                count,
            };
            assert_eq!(ShardName::of(path), Some(shard));
            assert_eq!(unsplit_path(Path::new(path)), Path::new(unsplit));
            assert!(path.ends_with(&shard_suffix(number, count)));
        }
    }

    #[test]
    fn other_names_are_of_no_shard() {
        for path in [
            "m.gguf",
            "m-1-of-3.gguf",
            "m-0000x-of-00003.gguf",
            "m-+0001-of-00003.gguf",
            "m-00000-of-00003.gguf",
            "m-00004-of-00003.gguf",
            "m-00001-of-00257.gguf",
            "m-00001-of-00003.bin",
            "-00001-of-00003.gguf",
            "a/-00001-of-00003.gguf",
            "best-of-5.gguf",
        ] {
            assert_eq!(ShardName::of(path), None, "{path}");
            assert_eq!(unsplit_path(Path::new(path)), Path::new(path));
        }
    }
}
