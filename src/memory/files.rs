//! The files of a model, read as if they were one.
//!
//! Each file has a place in one space of offsets: byte `i` of a file is at `base + i`. Bases ascend, the first is 0, and
//! nothing lies between the end of a file and the next base. Above this module there are offsets only; the I/O thread
//! turns them into a file and an offset within it. A single file has the base 0, so that its offsets are its own.

use super::block_reader::FileIdentity;
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

/// # Panics
/// When the places do not ascend from 0 with room for each file, or are not multiples of `block_bytes`: the reads of one
/// file would reach into the next.
pub(super) fn assert_places(files: &[PlacedFile], block_bytes: u32) {
    let mut end = 0;
    for file in files {
        assert!(
            file.base >= end && file.base.is_multiple_of(u64::from(block_bytes)),
            "{file:?} begins before {end} or within a block"
        );
        end = file
            .base
            .saturating_add(file.identity.bytes)
            .next_multiple_of(u64::from(block_bytes));
    }
    assert!(
        files.first().is_some_and(|first| first.base == 0),
        "{files:?}"
    );
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
        assert_places(&files, 4096);
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
    #[should_panic(expected = "begins before")]
    fn files_do_not_share_a_block() {
        assert_places(&[placed(0, 4097), placed(4096, 10)], 4096);
    }
}
