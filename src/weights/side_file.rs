//! The file that keeps checksums from one run to the next. It is a help and never a need: one that cannot be read or
//! written costs a warning, and what is wrong in it is ignored. A thread of its own writes: the disk that it lies on, which
//! need not be that of the model, may be slow or away, and nobody who computes or reads weights waits for it.

use super::checksums::{ChecksumTable, ENCODED_BYTES_MAX, NotUsable, checksum};
use crate::memory::FileIdentity;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two writes: rows of the embedding become known one by one, for hours.
const WRITE_PAUSE: Duration = Duration::from_secs(60);

/// How long the end of a run waits for the last writes.
pub(super) const LAST_WRITES_PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct SideFile {
    path: PathBuf,
    /// The model file.
    file: FileIdentity,
    last_write: Option<Instant>,
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

    /// What a writer is given now.
    pub(super) fn encode(&mut self, table: &mut ChecksumTable) -> Vec<u8> {
        self.last_write = Some(Instant::now());
        table.encode(&self.file)
    }
}

/// Replaces a file by these bytes.
pub(super) type Replace = dyn Fn(&Path, &[u8]) -> io::Result<()> + Send;

/// Writes the side files of a model, on a thread of its own.
pub(super) struct SideFileWriter(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    /// There is something to write, or the thread is to end; or it has written.
    changed: Condvar,
    /// By file: writing failed, which has been said.
    given_up: Vec<AtomicBool>,
}

struct State {
    /// By file, at most one of each: what comes later takes the place of what was not begun.
    waiting: Vec<Option<(PathBuf, Vec<u8>)>>,
    is_writing: bool,
    is_over: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SideFileWriter {
    /// Starts the thread, for so many files.
    pub(super) fn start(files: usize) -> io::Result<SideFileWriter> {
        SideFileWriter::through(files, Box::new(replace))
    }

    /// The same with another way of writing, for tests.
    pub(super) fn through(files: usize, replace: Box<Replace>) -> io::Result<SideFileWriter> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                waiting: vec![None; files],
                is_writing: false,
                is_over: false,
            }),
            changed: Condvar::new(),
            given_up: (0..files).map(|_| AtomicBool::new(false)).collect(),
        });
        let of_thread = Arc::clone(&shared);
        // Never joined: the disk may not answer.
        std::thread::Builder::new()
            .name("strata-checksums".to_owned())
            .spawn(move || write_what_comes(&of_thread, &*replace))?;
        Ok(SideFileWriter(shared))
    }

    pub(super) fn is_given_up(&self, file: usize) -> bool {
        self.0.given_up[file].load(Ordering::Relaxed)
    }

    /// Has a file replaced as a whole, soon: a reader finds the old one or the new one.
    pub(super) fn write(&self, file: usize, path: &Path, bytes: Vec<u8>) {
        self.0.lock().waiting[file] = Some((path.to_owned(), bytes));
        self.0.changed.notify_all();
    }

    /// Waits until everything is written, or for so long.
    pub(super) fn finish(&self, patience: Duration) {
        let is_busy = |state: &mut State| state.is_writing || state.next().is_some();
        let state = self.0.lock();
        let waited = self.0.changed.wait_timeout_while(state, patience, is_busy);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        if waited.timed_out() {
            tracing::warn!(
                "the checksums are not written after {} seconds: the disk does not answer; a later run cannot verify its \
                 first reads; name a directory on another with --checksum-directory",
                patience.as_secs()
            );
        }
    }
}

impl Drop for SideFileWriter {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

impl State {
    /// The first file that waits.
    fn next(&self) -> Option<usize> {
        self.waiting.iter().position(Option::is_some)
    }
}

/// The life of the thread.
fn write_what_comes(shared: &Shared, replace: &Replace) {
    let mut state = shared.lock();
    loop {
        let Some(file) = state.next() else {
            if state.is_over {
                return;
            }
            let waited = shared.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        let Some((path, bytes)) = state.waiting[file].take() else {
            continue;
        };
        state.is_writing = true;
        drop(state);
        let is_given_up = &shared.given_up[file];
        if !is_given_up.load(Ordering::Relaxed)
            && let Err(error) = replace(&path, &bytes)
        {
            is_given_up.store(true, Ordering::Relaxed);
            tracing::warn!(
                "write the checksums {}: {error}; a later run cannot verify its first reads; name a directory with \
                 --checksum-directory, or give --checksum-directory none",
                path.display()
            );
        }
        state = shared.lock();
        state.is_writing = false;
        shared.changed.notify_all();
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
        let writer = SideFileWriter::start(1).unwrap();
        for _ in 0..2 {
            let bytes = side.encode(&mut table);
            writer.write(0, side.path(), bytes);
            writer.finish(Duration::MAX);
        }
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
        let writer = SideFileWriter::start(1).unwrap();
        for _ in 0..2 {
            let bytes = side.encode(&mut table);
            writer.write(0, side.path(), bytes);
            writer.finish(Duration::MAX);
            assert!(writer.is_given_up(0));
        }
    }

    #[test]
    fn nobody_waits_for_a_disk_that_does_not_answer_and_the_last_of_each_file_is_written() {
        let (answer, answers) = std::sync::mpsc::channel::<()>();
        let (asked, begun) = std::sync::mpsc::channel();
        let replace = move |path: &Path, bytes: &[u8]| {
            asked.send((path.to_owned(), bytes.to_owned())).unwrap();
            answers.recv().map_err(io::Error::other)
        };
        let writer = SideFileWriter::through(2, Box::new(replace)).unwrap();
        let [one, two] = ["one", "two"].map(Path::new);
        writer.write(0, one, vec![1]);
        assert_eq!(begun.recv().unwrap(), (one.to_owned(), vec![1]));
        for number in 2..5 {
            writer.write(0, one, vec![number]);
            writer.write(1, two, vec![number]);
        }
        // Nor does the end of a run, for ever.
        writer.finish(Duration::from_millis(1));
        drop(answer);
        drop(writer);
        let written: Vec<_> = begun.into_iter().collect();
        // The first disk has failed by now.
        assert_eq!(written, [(two.to_owned(), vec![4])]);
    }
}
