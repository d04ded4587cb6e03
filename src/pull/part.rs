//! The file that grows: `OUT.part`, with `OUT.part.json` beside it that says of which version its bytes are.
//!
//! A process may die between any two system calls. So bytes are only ever added, the note is written before the first of
//! them, and a file whose note does not fit is emptied before the note is replaced. The length of the file is what has
//! come; no other record can contradict it. Whoever holds the lock on it is the one that writes.

use super::PullError;
use super::sha256::{Hasher, Sha256, hash_file};
use crate::gguf::{Destination, NewFileError, check_is_file, is_at, open_locked, put_in_place};
use rustix::fs::XattrFlags;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
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
    /// Another process is fetching the same file, what is there is of somebody else, or the folder cannot be written.
    pub(super) fn open(output: &Path) -> Result<Part, PullError> {
        let error = |error| PullError::write(output, error);
        check_is_file(output).map_err(error)?;
        let path = with_suffix(output, ".part");
        let file = open_locked(&path).map_err(error)?;
        let file = file.ok_or_else(|| NewFileError::Busy {
            path: output.to_owned(),
        })?;
        let note_path = with_suffix(output, ".part.json");
        let done = file.metadata().map_err(error)?.len();
        let note = read_note(&note_path);
        // A note of ours is there before the first byte is.
        if note.is_none() && done > 0 {
            return Err(PullError::Refused(format!(
                "{} is there and is not of strata: remove it, or choose another name with --output",
                path.display()
            )));
        }
        Ok(Part {
            file,
            path,
            note_path,
            output: output.to_owned(),
            done,
            hasher: Hasher::new(),
            note: note.unwrap_or_default(),
            inherited: done > 0,
        })
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
        // One that a killed process left. Whatever else is there now is not opened.
        let _ = std::fs::remove_file(&new);
        let write = || {
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                // The address may hold a secret in its query.
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&new)?;
            file.write_all(text.as_bytes())?;
            // Without it the bytes would be of nobody after the machine lost its power.
            file.sync_all()?;
            std::fs::rename(&new, &self.note_path)
        };
        if let Err(problem) = write() {
            // Half a note is of use to nobody.
            let _ = std::fs::remove_file(&new);
            return Err(error(problem));
        }
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

    /// Gives the file its name, durably. Another that has the name by now is replaced only where that is wanted.
    pub(super) fn finish(self, replace: bool) -> Result<(), PullError> {
        if let Some(version) = &self.note.version {
            // Not every file system has them; without, only the size is compared another time.
            let value = version.as_bytes();
            let _ =
                rustix::fs::fsetxattr(&self.file, VERSION_ATTRIBUTE, value, XattrFlags::empty());
        }
        let to = Destination {
            path: &self.output,
            replace,
        };
        put_in_place(&self.file, &self.path, to)?;
        // A note that stays is one of no bytes.
        let _ = std::fs::remove_file(&self.note_path);
        Ok(())
    }

    /// Takes it away: nothing in it is of use to anybody.
    pub(super) fn remove(self) {
        self.unlink();
    }

    fn unlink(&self) {
        // Nothing is lost where this fails: no name says that the file is whole.
        if read_note(&self.note_path).is_some() {
            let _ = std::fs::remove_file(&self.note_path);
        }
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

/// A process that ended just after it had given `output` its name has left the note. It goes, unless another process is at
/// work or there are bytes that it is about.
pub(super) fn forget_note(output: &Path) {
    if read_note(&with_suffix(output, ".part.json")).is_some() {
        // An empty part takes its note along.
        drop(Part::open(output));
    }
}

/// What a file's version was called when it was fetched, where that was kept.
pub(super) fn version_of(path: &Path) -> Option<String> {
    let mut value = vec![0; 4 << 10];
    let bytes = rustix::fs::getxattr(path, VERSION_ATTRIBUTE, value.as_mut_slice()).ok()?;
    value.truncate(bytes);
    String::from_utf8(value).ok()
}

/// Whether something has come that the next run can go on with.
pub fn has_bytes(part: &Path) -> bool {
    part.metadata().is_ok_and(|part| part.len() > 0)
}

/// `None`: there is none, or it is not of ours.
fn read_note(path: &Path) -> Option<Note> {
    let mut text = String::new();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)
        .ok()?;
    file.take(NOTE_BYTES_MAX).read_to_string(&mut text).ok()?;
    let note: Note = serde_json::from_str(&text).ok()?;
    (note != Note::default()).then_some(note)
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

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
        let busy = Part::open(&output).err().unwrap().to_string();
        assert!(busy.contains("being written by another process"), "{busy}");
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
        // What came meanwhile stays, and so do the bytes.
        std::fs::write(&output, "theirs").unwrap();
        let error = part.finish(false).unwrap_err().to_string();
        assert!(error.contains("--force"), "{error}");
        assert_eq!(std::fs::read(&output).unwrap(), b"theirs");
        let part = Part::open(&output).unwrap();
        assert_eq!(part.done(), 6);
        part.finish(true).unwrap();
        assert_eq!(std::fs::read(&output).unwrap(), b"abcdef");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        if let Some(version) = version_of(&output) {
            assert_eq!(version, "\"1\"");
        }
    }

    #[test]
    fn bytes_without_a_note_of_ours_are_not_ours() {
        for other in [
            None,
            Some(""),
            Some("{"),
            Some("[1]"),
            Some("{\"from\": 3}"),
            Some("{\"from\": \"\"}"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let [output, part, note] =
                ["a.gguf", "a.gguf.part", "a.gguf.part.json"].map(|name| folder.path().join(name));
            std::fs::write(&part, "abc").unwrap();
            if let Some(text) = other {
                std::fs::write(&note, text).unwrap();
            }
            let error = Part::open(&output).err().unwrap().to_string();
            assert!(error.contains("is not of strata: remove it"), "{error}");
            // And all of it is left.
            assert_eq!(std::fs::read(&part).unwrap(), b"abc", "{other:?}");
            assert_eq!(std::fs::read_to_string(&note).ok().as_deref(), other);
        }
    }

    #[test]
    fn a_note_is_for_its_owner_and_written_to_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let [output, other, new, json] = [
            "a.gguf",
            "other",
            "a.gguf.part.json.new",
            "a.gguf.part.json",
        ]
        .map(|name| folder.path().join(name));
        std::fs::write(&other, "mine").unwrap();
        std::os::unix::fs::symlink(&other, &new).unwrap();
        let mut part = Part::open(&output).unwrap();
        part.begin(note()).unwrap();
        assert_eq!(std::fs::read(&other).unwrap(), b"mine");
        let mode = std::fs::symlink_metadata(&json).unwrap().permissions();
        assert_eq!(mode.mode() & 0o777, 0o600);
        // A pipe would be waited at.
        let made = std::process::Command::new("mkfifo").arg(&new).status();
        assert!(made.unwrap().success());
        part.begin(note()).unwrap();
        assert!(!new.exists());
    }

    #[test]
    fn a_note_without_bytes_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("a.gguf");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        let mut part = Part::open(&output).unwrap();
        part.begin(note()).unwrap();
        // Whoever is at work goes on.
        forget_note(&output);
        assert_eq!(names(), 2);
        part.append(b"abc").unwrap();
        drop(part);
        forget_note(&output);
        assert_eq!(names(), 2);
        std::fs::rename(with_suffix(&output, ".part"), &output).unwrap();
        forget_note(&output);
        assert_eq!(names(), 1);
    }

    #[test]
    fn what_others_keep_under_the_name_of_a_note_stays() {
        let folder = tempfile::tempdir().unwrap();
        let [output, part, json] =
            ["a.gguf", "a.gguf.part", "a.gguf.part.json"].map(|name| folder.path().join(name));
        std::fs::write(&part, "").unwrap();
        std::fs::write(&json, "{\"theirs\": 1}").unwrap();
        forget_note(&output);
        assert!(part.exists() && json.exists());
        // A try that comes to nothing.
        drop(Part::open(&output).unwrap());
        assert!(json.exists());
    }

    #[test]
    fn a_note_that_cannot_be_written_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("a.gguf");
        let mut part = Part::open(&output).unwrap();
        // No file can have the name of a folder.
        std::fs::create_dir(folder.path().join("a.gguf.part.json")).unwrap();
        part.begin(note()).unwrap_err();
        drop(part);
        assert!(!with_suffix(&output, ".part.json.new").exists());
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
