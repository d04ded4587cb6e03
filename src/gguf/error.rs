//! What can be wrong with a GGUF file. Every message is one line that names the key or the tensor.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// An error of a file, a key or a tensor. Text that came from the file is quoted and shortened, so that a hostile name
/// cannot forge lines of a log.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    #[error("cannot open {}: {error}", path.display())]
    Open { path: PathBuf, error: io::Error },

    #[error(
        "shard {number} of {count} is missing: {}; all shards of a model lie in one folder: fetch it too",
        path.display()
    )]
    MissingShard {
        /// From 1, as in the name.
        number: u32,
        count: u32,
        path: PathBuf,
    },

    /// In another shard than the one that was named.
    #[error("{}: {error}", path.display())]
    InShard {
        path: PathBuf,
        error: Box<GgufError>,
    },

    #[error("{} is {what}, not a GGUF file", path.display())]
    NotAFile { path: PathBuf, what: &'static str },

    #[error("cannot read the file at byte {position}: {error}")]
    Read { position: u64, error: io::Error },

    #[error("not a GGUF file: {found}")]
    NotGguf { found: String },

    #[error(
        "this is a big-endian GGUF file (version field {field:#010x}); strata reads little-endian files: convert it with \
         llama.cpp's gguf_convert_endian.py"
    )]
    BigEndian { field: u32 },

    #[error("unsupported version {0} of the GGUF format; strata reads versions 2 and 3")]
    Version(u32),

    #[error(
        "the file ends inside {place}: {needed} more bytes are needed at byte {position} and {left} are left; the download may \
         be incomplete"
    )]
    Truncated {
        place: String,
        position: u64,
        needed: u64,
        left: u64,
    },

    /// A count or a length of the header itself.
    #[error("{0}")]
    Header(String),

    #[error("missing key {}", quote(.key))]
    MissingKey { key: String },

    #[error("key {}: {problem}", quote(.key))]
    Key { key: String, problem: String },

    #[error("missing tensor {}", quote(.name))]
    MissingTensor { name: String },

    #[error("tensor {}: {problem}", quote(.name))]
    Tensor { name: String, problem: String },

    #[error(
        "tensor {}: type {kind} is not supported; strata computes with F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and Q2_K to \
         Q6_K: take the model in one of these, such as Q4_K_M",
        quote(.name)
    )]
    UnsupportedTensorType { name: String, kind: String },
}

impl GgufError {
    /// What is wrong with the value of a key.
    pub fn key(key: &str, problem: impl fmt::Display) -> GgufError {
        GgufError::Key {
            key: key.to_owned(),
            problem: problem.to_string(),
        }
    }

    /// What is wrong with a tensor.
    pub fn tensor(name: &str, problem: impl fmt::Display) -> GgufError {
        GgufError::Tensor {
            name: name.to_owned(),
            problem: problem.to_string(),
        }
    }
}

/// Characters of a name that an error shows.
const QUOTED_CHARACTERS_MAX: usize = 96;

/// Text from a file, in backquotes, escaped to one line and cut where it is long.
pub(super) fn quote(text: &str) -> String {
    let mut quoted = String::from("`");
    let mut characters = text.chars();
    for character in characters.by_ref().take(QUOTED_CHARACTERS_MAX) {
        if character == '\'' || character == '"' {
            quoted.push(character);
        } else {
            quoted.extend(character.escape_debug());
        }
    }
    if characters.next().is_some() {
        quoted.push('…');
    }
    quoted.push('`');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_a_file_stay_on_one_line_and_short() {
        assert_eq!(
            GgufError::key("a\nERROR forged\u{1b}[0m", "is wrong").to_string(),
            "key `a\\nERROR forged\\u{1b}[0m`: is wrong"
        );
        let long = GgufError::tensor(&"x".repeat(10_000), "is wrong").to_string();
        assert!(long.len() < 200 && long.contains("x…`"), "{long}");
    }
}
