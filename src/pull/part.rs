//! The file that grows: `OUT.part`, with `OUT.part.json` beside it that says of which version its bytes are.
//!
//! A process may die between any two system calls. So bytes are only ever added, the note is written before the first of
//! them, and a file whose note does not fit is emptied before the note is replaced. The length of the file is what has
//! come; no other record can contradict it. Whoever holds the lock on it is the one that writes.

use super::sha256::{Hasher, Sha256, hash_file};
use super::{PullError, folder_of};
use rustix::fs::XattrFlags;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What the bytes of a part are the beginning of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    /// The address that was asked for, which leads there again.
    pub(super) from: String,
    /// What the server calls this version (`ETag`, or the time of its last change).
    pub(super) version: Option<String>,
    /// Of the whole file.
    pub(super) bytes: Option<u64>,
    pub(super) sha256: Option<String>,
}

pub(super) struct Part {
    file: File,
    path: PathBuf,
    note_path: PathBuf,
    output: PathBuf,
    done: u64,
    hasher: Hasher,
    note: Note,
    /// Whether some of the bytes are of an earlier run.
    inherited: bool,
}

/// No note is longer.
const NOTE_BYTES_MAX: u64 = 64 << 10;
/// Where a file keeps what its version is called, so that it is known again.
const VERSION_ATTRIBUTE: &str = "user.strata.version";

impl Part {
    /// Opens or makes the part of `output`, and locks it.
    ///
    /// # Errors
    ///
    /// Another process is fetching the same file, or the folder cannot be written.
    pub(super) fn open(output: &Path) -> Result<Part, PullError> {
        let error = |error| PullError::write(output, error);
        let path = with_suffix(output, ".part");
        let file = loop {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                // Not what a link there points to, and a pipe would block.
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
                .open(&path)
                .map_err(error)?;
            if !file.metadata().map_err(error)?.is_file() {
                let what = format!("{} is no file", path.display());
                return Err(error(io::Error::other(what)));
            }
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(PullError::Busy {
                        path: output.to_owned(),
                    });
                }
                Err(TryLockError::Error(other)) => return Err(error(other)),
            }
            // Who held the lock before may have given the file its final name: then this is no part any more.
            if is_at(&file, &path) {
                break file;
            }
        };
        let note_path = with_suffix(output, ".part.json");
        let done = file.metadata().map_err(error)?.len();
        let note = read_note(&note_path);
        let mut part = Part {
            file,
            path,
            note_path,
            output: output.to_owned(),
            done,
            hasher: Hasher::new(),
            note: note.unwrap_or_default(),
            inherited: done > 0,
        };
        // Bytes of nobody knows what.
        if part.note == Note::default() && done > 0 {
            part.empty()?;
        }
        Ok(part)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn note(&self) -> &Note {
        &self.note
    }

    /// Bytes that have come.
    pub(super) fn done(&self) -> u64 {
        self.done
    }

    pub(super) fn inherited(&self) -> bool {
        self.inherited
    }

    /// Takes the bytes of an earlier run into the checksum. `progress` is told how many there were so far.
    pub(super) fn hash_inherited(&mut self, progress: impl FnMut(u64)) -> Result<(), PullError> {
        self.hasher = Hasher::new();
        self.file
            .seek(SeekFrom::Start(0))
            .and_then(|_| hash_file(&mut self.hasher, &mut self.file, self.done, progress))
            .map_err(|error| PullError::write(&self.output, error))
    }

    /// Begins again, with bytes of another version.
    pub(super) fn begin(&mut self, note: Note) -> Result<(), PullError> {
        self.empty()?;
        self.set_note(note)
    }

    /// Nothing of what has come is of use.
    pub(super) fn empty(&mut self) -> Result<(), PullError> {
        let error = |error| PullError::write(&self.output, error);
        self.file.set_len(0).map_err(error)?;
        self.file.seek(SeekFrom::Start(0)).map_err(error)?;
        (self.done, self.inherited, self.hasher) = (0, false, Hasher::new());
        Ok(())
    }

    /// The note is replaced as a whole: a half of one would be none, and the bytes be lost.
    pub(super) fn set_note(&mut self, note: Note) -> Result<(), PullError> {
        let error = |error| PullError::write(&self.output, error);
        let text = serde_json::to_string(&note).map_err(|json| error(json.into()))?;
        let new = with_suffix(&self.note_path, ".new");
        std::fs::write(&new, text)
            .and_then(|()| std::fs::rename(&new, &self.note_path))
            .map_err(error)?;
        self.note = note;
        Ok(())
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), PullError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match self.file.write_at(rest, self.done) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(PullError::write(&self.output, error)),
                Ok(0) => {
                    return Err(PullError::write(
                        &self.output,
                        io::ErrorKind::WriteZero.into(),
                    ));
                }
                Ok(written) => {
                    let (now, later) = rest.split_at(written);
                    self.hasher.update(now);
                    self.done += written as u64;
                    rest = later;
                }
            }
        }
        Ok(())
    }

    /// As many of its first bytes as there are.
    pub(super) fn head(&self) -> [u8; 4] {
        let mut head = [0; 4];
        // What cannot be read now is found when all of it is.
        let _ = self.file.read_exact_at(&mut head, 0);
        head
    }

    pub(super) fn sha256(&self) -> Sha256 {
        self.hasher.clone().finish()
    }

    /// Gives the file its name, durably.
    pub(super) fn finish(self) -> Result<(), PullError> {
        let error = |error| PullError::write(&self.output, error);
        if let Some(version) = &self.note.version {
            // Not every file system has them; without, only the size is compared another time.
            let value = version.as_bytes();
            let _ =
                rustix::fs::fsetxattr(&self.file, VERSION_ATTRIBUTE, value, XattrFlags::empty());
        }
        self.file.sync_all().map_err(error)?;
        std::fs::rename(&self.path, &self.output).map_err(error)?;
        // The new name is durable once the folder is. A note that stays is one of no bytes.
        let _ = std::fs::remove_file(&self.note_path);
        File::open(folder_of(&self.output))
            .and_then(|folder| folder.sync_all())
            .map_err(error)
    }

    /// Takes it away: nothing in it is of use to anybody.
    pub(super) fn remove(self) {
        self.unlink();
    }

    fn unlink(&self) {
        // Nothing is lost where this fails: no name says that the file is whole.
        let _ = std::fs::remove_file(&self.note_path);
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if self.done == 0 && is_at(&self.file, &self.path) {
            self.unlink();
        }
    }
}

/// What a file's version was called when it was fetched, where that was kept.
pub(super) fn version_of(path: &Path) -> Option<String> {
    let mut value = vec![0; 4 << 10];
    let bytes = rustix::fs::getxattr(path, VERSION_ATTRIBUTE, value.as_mut_slice()).ok()?;
    value.truncate(bytes);
    String::from_utf8(value).ok()
}

fn is_at(file: &File, path: &Path) -> bool {
    let there = std::fs::symlink_metadata(path);
    match (file.metadata(), there) {
        (Ok(file), Ok(there)) => (file.dev(), file.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

fn read_note(path: &Path) -> Option<Note> {
    let mut text = String::new();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .ok()?;
    file.take(NOTE_BYTES_MAX).read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note() -> Note {
        Note {
            from: "http://a/b.gguf".to_owned(),
            version: Some("\"1\"".to_owned()),
            bytes: Some(6),
            sha256: None,
        }
    }

    #[test]
    fn bytes_are_there_in_the_next_run() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("a.gguf");
        let mut part = Part::open(&output).unwrap();
        part.begin(note()).unwrap();
        part.append(b"abc").unwrap();
        assert!(matches!(Part::open(&output), Err(PullError::Busy { .. })));
        drop(part);

        let mut part = Part::open(&output).unwrap();
        assert_eq!((part.done(), part.note()), (3, &note()));
        assert!(part.inherited());
        part.hash_inherited(|_| {}).unwrap();
        part.append(b"def").unwrap();
        assert_eq!(part.head(), *b"abcd");
        let mut hasher = Hasher::new();
        hasher.update(b"abcdef");
        assert_eq!(part.sha256(), hasher.finish());
        assert!(!output.exists());
        part.finish().unwrap();
        assert_eq!(std::fs::read(&output).unwrap(), b"abcdef");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        if let Some(version) = version_of(&output) {
            assert_eq!(version, "\"1\"");
        }
    }

    #[test]
    fn bytes_without_a_note_are_of_no_use() {
        for damaged in [
            None,
            Some(""),
            Some("{"),
            Some("[1]"),
            Some("{\"from\": 3}"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let output = folder.path().join("a.gguf");
            std::fs::write(folder.path().join("a.gguf.part"), "abc").unwrap();
            if let Some(text) = damaged {
                std::fs::write(folder.path().join("a.gguf.part.json"), text).unwrap();
            }
            assert_eq!(Part::open(&output).unwrap().done(), 0, "{damaged:?}");
            // And nothing is left of it.
            assert_eq!(
                std::fs::read_dir(folder.path()).unwrap().count(),
                0,
                "{damaged:?}"
            );
        }
    }

    #[test]
    fn links_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [output, other] = ["a.gguf", "other"].map(|name| folder.path().join(name));
        std::fs::write(&other, "mine").unwrap();
        std::os::unix::fs::symlink(&other, folder.path().join("a.gguf.part")).unwrap();
        assert!(Part::open(&output).is_err());
        assert_eq!(std::fs::read(&other).unwrap(), b"mine");
    }
}
