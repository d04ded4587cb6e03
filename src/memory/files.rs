//! The files of a model, read as if they were one.
//!
//! Each file has a place in one space of offsets: byte `i` of a file is at `base + i`. Bases ascend, the first is 0, and
//! nothing lies between the end of a file and the next base. Above this module there are offsets only; the I/O thread
//! turns them into a file and an offset within it. A single file has the base 0, so that its offsets are its own.

use super::block_reader::FileIdentity;
use super::io_thread::ReadError;
use std::path::{Path, PathBuf};

/// A file that is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePlace {
    pub path: PathBuf,
    /// The offset of its first byte among those of all files.
    pub base: u64,
}

impl FilePlace {
    /// A file that is read by itself.
    pub fn alone(path: &Path) -> Vec<FilePlace> {
        vec![FilePlace {
            path: path.to_owned(),
            base: 0,
        }]
    }
}

/// A file as it was when it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedFile {
    pub identity: FileIdentity,
    /// As in `FilePlace`.
    pub base: u64,
}

/// Which of the files an offset belongs to: the last that begins at or before it.
///
/// # Panics
/// When there is no file.
pub fn file_at(files: &[PlacedFile], offset: u64) -> usize {
    files
        .partition_point(|file| file.base <= offset)
        .checked_sub(1)
        .unwrap_or_else(|| panic!("no file begins at or before byte {offset}: {files:?}"))
}

/// Checks that files do not reach into each other: one that has grown since its place was chosen may. The error names it.
///
/// # Panics
/// When the first place is not 0, or one is no multiple of `block_bytes`.
pub(super) fn check_places(files: &[PlacedFile], block_bytes: u32) -> Result<(), ReadError> {
    let mut before: Option<&PlacedFile> = None;
    for file in files {
        assert!(
            file.base.is_multiple_of(u64::from(block_bytes)),
            "{file:?} begins within a block"
        );
        let end = before.map_or(0, |before| {
            let end = before.base.saturating_add(before.identity.bytes);
            end.checked_next_multiple_of(u64::from(block_bytes))
                .unwrap_or(u64::MAX)
        });
        if let Some(before) = before.filter(|_| file.base < end) {
            return Err(ReadError::Open {
                file: before.identity.path.clone(),
                source: std::io::Error::other(format!(
                    "it has {} bytes now, more than when its header was read: it is being written; start again when it is \
                     complete",
                    before.identity.bytes
                )),
            });
        }
        before = Some(file);
    }
    assert!(
        files.first().is_some_and(|first| first.base == 0),
        "{files:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(base: u64, bytes: u64) -> PlacedFile {
        let identity = FileIdentity {
            path: "model.gguf".into(),
            bytes,
            device: 0,
            inode: 0,
            modified: (0, 0),
        };
        PlacedFile { identity, base }
    }

    #[test]
    fn an_offset_belongs_to_the_last_file_that_begins_before_it() {
        let files = [placed(0, 10), placed(4096, 0), placed(8192, 100)];
        check_places(&files, 4096).unwrap();
        for (offset, file) in [
            (0, 0),
            (9, 0),
            (4095, 0),
            (4096, 1),
            (8191, 1),
            (8192, 2),
            (u64::MAX, 2),
        ] {
            assert_eq!(file_at(&files, offset), file, "{offset}");
        }
    }

    #[test]
    fn a_file_that_has_grown_into_the_next_is_named() {
        for (bytes, fits) in [(4095, true), (4096, true), (4097, false), (u64::MAX, false)] {
            let checked = check_places(&[placed(0, bytes), placed(4096, 10)], 4096);
            assert_eq!(checked.is_ok(), fits, "{bytes}");
            if let Err(error) = checked {
                let error = error.to_string();
                assert!(error.contains("open model.gguf: it has"), "{error}");
            }
        }
    }
}
