//! The file that keeps checksums from one run to the next. It is a help and never a need: one that cannot be read or
//! written costs a warning, and what is wrong in it is ignored.

use super::checksums::{ChecksumTable, ENCODED_BYTES_MAX, NotUsable, checksum};
use crate::memory::FileIdentity;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Between two writes: rows of the embedding become known one by one, for hours.
const WRITE_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct SideFile {
    path: PathBuf,
    /// The model file.
    file: FileIdentity,
    last_write: Option<Instant>,
    /// Writing failed, which has been said.
    is_given_up: bool,
}

impl SideFile {
    /// Of a model, in a directory that need not be there yet. The name is made from the model's path.
    pub(super) fn new(directory: &Path, file: &FileIdentity) -> SideFile {
        let model = file.path.canonicalize();
        let model = model.as_deref().unwrap_or(&file.path);
        let name = checksum(model.as_os_str().as_bytes());
        SideFile {
            path: directory.join(format!("{name:016x}.checksums")),
            file: file.clone(),
            last_write: None,
            is_given_up: false,
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What an earlier run has left of the same file.
    pub(super) fn read(&self) -> ChecksumTable {
        let path = self.path.display();
        let bytes = match read_regular(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return ChecksumTable::default(),
            Err(error) => {
                tracing::warn!("read the checksums {path}: {error}; they are recorded anew");
                return ChecksumTable::default();
            }
        };
        match ChecksumTable::decode(&bytes, &self.file) {
            Ok(table) => {
                tracing::info!("{} checksums of an earlier run: {path}", table.len());
                table
            }
            Err(NotUsable::OtherFile) => {
                tracing::info!("the file has changed since its checksums were recorded: {path}");
                ChecksumTable::default()
            }
            Err(NotUsable::Damaged(why)) => {
                tracing::warn!("the checksums {path} are ignored and recorded anew: {why}");
                ChecksumTable::default()
            }
        }
    }

    /// The model file is this one from now on.
    pub(super) fn set_file(&mut self, file: &FileIdentity) {
        self.file = file.clone();
    }

    pub(super) fn is_due(&self) -> bool {
        let waited = self.last_write.map(|last| last.elapsed());
        waited.is_none_or(|waited| waited >= WRITE_PAUSE)
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up
    }

    /// What `write` is given.
    pub(super) fn encode(&self, table: &mut ChecksumTable) -> Vec<u8> {
        table.encode(&self.file)
    }

    /// Replaces the file as a whole: a reader finds the old one or the new one.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        if self.is_given_up {
            return;
        }
        self.last_write = Some(Instant::now());
        if let Err(error) = replace(&self.path, bytes) {
            self.is_given_up = true;
            tracing::warn!(
                "write the checksums {}: {error}; a later run cannot verify its first reads; name a directory with \
                 --checksum-directory, or give --checksum-directory none",
                self.path.display()
            );
        }
    }
}

/// A regular file of at most the length that is ever written. A pipe without a writer would block.
fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let attributes = file.metadata()?;
    if !attributes.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    if attributes.len() > ENCODED_BYTES_MAX as u64 {
        return Err(io::Error::other("it is too long"));
    }
    let mut bytes = Vec::new();
    file.take(ENCODED_BYTES_MAX as u64)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let partial = path.with_extension(format!("{}.partial", std::process::id()));
    let written = write_new(&partial, bytes).and_then(|()| std::fs::rename(&partial, path));
    if written.is_err() {
        // Best effort: it may never have been made.
        drop(std::fs::remove_file(&partial));
    }
    written
}

/// Not followed by a sync: what a crash of the machine leaves unfinished, its own checksum tells.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file: File = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    file.write_all(bytes)
}

#[cfg(test)]
mod tests {
    use super::super::checksums::{SeenBy, Stretch, Verdict};
    use super::*;

    const STRETCH: Stretch = Stretch {
        offset: 0,
        bytes: 5,
    };

    fn side_file(directory: &Path) -> SideFile {
        let model = directory.join("model.gguf");
        std::fs::write(&model, b"bytes").unwrap();
        SideFile::new(&directory.join("a/b"), &FileIdentity::at(&model).unwrap())
    }

    #[test]
    fn what_is_written_is_read_and_nothing_else_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let mut side = side_file(directory.path());
        assert_eq!(side.read().len(), 0);
        assert!(side.is_due());
        let mut table = ChecksumTable::default();
        table.judge(STRETCH, 9);
        let bytes = side.encode(&mut table);
        side.write(&bytes);
        side.write(&bytes);
        assert!(!side.is_due());
        let mut read = side.read();
        let verdict = read.judge(STRETCH, 8);
        assert_eq!(verdict, Verdict::Differs(SeenBy::EarlierRun));
        let names = std::fs::read_dir(directory.path().join("a/b")).unwrap();
        assert_eq!(names.count(), 1);
    }

    #[test]
    fn the_name_is_that_of_the_file_and_not_of_the_way_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let side = side_file(directory.path());
        let link = directory.path().join("link.gguf");
        std::os::unix::fs::symlink(directory.path().join("model.gguf"), &link).unwrap();
        let other = SideFile::new(
            &directory.path().join("a/b"),
            &FileIdentity::at(&link).unwrap(),
        );
        assert_eq!(side.path(), other.path());
    }

    #[test]
    fn what_is_not_ours_is_ignored() {
        let directory = tempfile::tempdir().unwrap();
        let side = side_file(directory.path());
        std::fs::create_dir_all(side.path().parent().unwrap()).unwrap();
        std::fs::write(side.path(), b"hello").unwrap();
        assert_eq!(side.read().len(), 0);
        let long = File::create(side.path()).unwrap();
        long.set_len(1 << 40).unwrap();
        assert_eq!(side.read().len(), 0);
        std::fs::remove_file(side.path()).unwrap();
        std::fs::create_dir(side.path()).unwrap();
        assert_eq!(side.read().len(), 0);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_given_up_once() {
        let directory = tempfile::tempdir().unwrap();
        let mut side = side_file(directory.path());
        std::fs::write(directory.path().join("a"), b"a file, not a directory").unwrap();
        let mut table = ChecksumTable::default();
        table.judge(STRETCH, 9);
        let bytes = side.encode(&mut table);
        side.write(&bytes);
        assert!(side.is_given_up());
        side.write(&bytes);
    }
}
