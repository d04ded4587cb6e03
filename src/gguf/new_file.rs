//! A file that is whole or not there: written under a temporary name in the folder of its final one, synced, and renamed.
//! A run that fails or is interrupted leaves nothing under the final name, and what stood there before.
//!
//! `pull` keeps what has come under a temporary name for its next run, and uses the same steps: `open_locked`,
//! `check_space`, `put_in_place`.

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum NewFileError {
    #[error(
        "not enough space for {}: {needed} bytes ({:.1} GiB) are to be written and {free} bytes ({:.1} GiB) are free; make room and run the same command again, or choose another folder for the output",
        path.display(),
        *needed as f64 / GIB,
        *free as f64 / GIB
    )]
    NoSpace {
        path: PathBuf,
        needed: u64,
        free: u64,
    },

    #[error(
        "{} is being written by another process: wait for it, or choose another name for the output",
        path.display()
    )]
    Busy { path: PathBuf },

    /// It was not to be replaced, and may have come meanwhile.
    #[error(
        "{} is there already: choose another name, or replace it with --force",
        path.display()
    )]
    Exists { path: PathBuf },

    #[error("cannot write {}: {error}{}", path.display(), what_to_do(error))]
    Write { path: PathBuf, error: io::Error },
}

const GIB: f64 = (1u64 << 30) as f64;

fn what_to_do(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; make room and run the same command again, or choose another folder for the output"
        }
        io::ErrorKind::FileTooLarge => {
            "; raise the limit on the size of files (`ulimit -f`), or choose a file system that takes larger ones"
        }
        io::ErrorKind::NotFound
        | io::ErrorKind::NotADirectory
        | io::ErrorKind::PermissionDenied
        | io::ErrorKind::ReadOnlyFilesystem => "; choose another folder for the output",
        _ => "",
    }
}

/// Where a new file goes.
#[derive(Clone, Copy, Debug)]
pub struct Destination<'a> {
    pub path: &'a Path,
    /// Whether it may take the place of a file that is there by the time it is whole.
    pub replace: bool,
}

impl<'a> Destination<'a> {
    /// Where nothing is yet.
    pub fn new(path: &'a Path) -> Destination<'a> {
        Destination {
            path,
            replace: false,
        }
    }

    /// Whatever file is there.
    pub fn replacing(path: &'a Path) -> Destination<'a> {
        Destination {
            path,
            replace: true,
        }
    }
}

/// A file under a temporary name beside its final one. Dropped before `finish`, it is removed.
///
/// The temporary name is the final one and `.partial`, and who writes it holds a lock on it. So no two write to one, and
/// what a killed process leaves behind is found, and written over, by the next that writes the same file.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    path: PathBuf,
    replace: bool,
    partial: PathBuf,
    finished: bool,
}

impl NewFile {
    /// The name under which a file is written before it has its own.
    pub fn partial_path(path: &Path) -> PathBuf {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".partial");
        path.with_file_name(name)
    }

    /// Begins a file of so many bytes.
    ///
    /// # Errors
    /// There is no room for it, another process writes it, a file is there that is not to be replaced, or the folder
    /// cannot be written.
    pub fn create(destination: Destination<'_>, bytes: u64) -> Result<NewFile, NewFileError> {
        let Destination { path, replace } = destination;
        let error = |error| NewFileError::Write {
            path: path.to_owned(),
            error,
        };
        check_is_file(path).map_err(error)?;
        // A link that leads nowhere is there too.
        if !replace && path.symlink_metadata().is_ok() {
            return Err(NewFileError::Exists {
                path: path.to_owned(),
            });
        }
        let partial = NewFile::partial_path(path);
        let file = open_locked(&partial)
            .map_err(error)?
            .ok_or_else(|| NewFileError::Busy {
                path: path.to_owned(),
            })?;
        let new = NewFile {
            file,
            path: path.to_owned(),
            replace,
            partial,
            finished: false,
        };
        // What an interrupted run left is written over, so its room is free too.
        new.file.set_len(0).map_err(error)?;
        check_space(path, bytes)?;
        Ok(new)
    }

    /// To write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// What went wrong with it.
    pub fn error(&self, error: io::Error) -> NewFileError {
        NewFileError::Write {
            path: self.path.clone(),
            error,
        }
    }

    /// Gives the file its name, on the disk too.
    ///
    /// # Errors
    /// Another file has that name by now and is not to be replaced, or the disk failed.
    pub fn finish(mut self) -> Result<(), NewFileError> {
        let destination = Destination {
            path: &self.path,
            replace: self.replace,
        };
        put_in_place(&self.file, &self.partial, destination)?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing is lost where this fails: the temporary name says that the file is not whole.
            drop(std::fs::remove_file(&self.partial));
        }
    }
}

/// That a rename would put the new file in the place of nothing or of a file. Looked at first: whoever writes for an hour
/// would hear of it at the end.
///
/// # Errors
/// What is there instead, as in "it is a directory".
pub(crate) fn check_is_file(path: &Path) -> io::Result<()> {
    // Such as /dev/stdout, which may be a file that is written to, and would be a link no more.
    let is_stream = path
        .read_link()
        .is_ok_and(|target| target.starts_with("/proc"));
    let problem = if is_stream {
        "it leads to an open stream, not to a file; name a file"
    } else if path.exists() && !path.is_file() {
        "it is a directory or a device, not a file; name a file"
    } else if !ends_with_a_name(path) {
        "it ends like the name of a folder; add the name of a file"
    } else {
        return Ok(());
    };
    Err(io::Error::other(problem))
}

/// `file_name` passes over a slash and a `/.` at the end, which the system does not.
fn ends_with_a_name(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    path.file_name()
        .is_some_and(|name| bytes.ends_with(name.as_encoded_bytes()))
}

/// The folder that a file is in.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Opens the file that is written before it has its name, or makes it, and locks it. `None`: another process has the lock.
///
/// # Errors
/// What is there is no file, or it cannot be opened.
pub(crate) fn open_locked(path: &Path) -> io::Result<Option<File>> {
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            // Not what a link there points to, and a pipe would block.
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(path)
            .map_err(|error| in_the_way(path, error))?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other(format!(
                "{} is no file; remove it",
                path.display()
            )));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Who had the lock before may have given the file its final name: then it is not ours to write to.
        if is_at(&file, path) {
            return Ok(Some(file));
        }
    }
}

/// Where something is there, its name is another than that of the file that is asked for.
fn in_the_way(path: &Path, error: io::Error) -> io::Error {
    match path.symlink_metadata() {
        Ok(there) if there.is_symlink() => {
            io::Error::other(format!("{} is a link; remove it", path.display()))
        }
        Ok(_) => io::Error::new(error.kind(), format!("{}: {error}", path.display())),
        Err(_) => error,
    }
}

/// Whether this very file has that name.
pub(crate) fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), path.symlink_metadata()) {
        (Ok(file), Ok(there)) => (file.dev(), file.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// Gives the file that is written under `from` its name, durably.
///
/// # Errors
/// Another file has that name and is not to be replaced, or the disk failed.
pub(crate) fn put_in_place(
    file: &File,
    from: &Path,
    to: Destination<'_>,
) -> Result<(), NewFileError> {
    let error = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => NewFileError::Exists {
            path: to.path.to_owned(),
        },
        _ => NewFileError::Write {
            path: to.path.to_owned(),
            error,
        },
    };
    file.sync_all()
        .and_then(|()| rename(from, to))
        // The new name is durable once the folder is.
        .and_then(|()| File::open(folder_of(to.path))?.sync_all())
        .map_err(error)
}

fn rename(from: &Path, to: Destination<'_>) -> io::Result<()> {
    if !to.replace {
        match renameat_with(CWD, from, CWD, to.path, RenameFlags::NOREPLACE) {
            // Not every file system can tell in one step. Then a file may still come between these two.
            Err(Errno::INVAL | Errno::NOSYS) if to.path.symlink_metadata().is_ok() => {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            Err(Errno::INVAL | Errno::NOSYS) => {}
            done => return done.map_err(io::Error::from),
        }
    }
    std::fs::rename(from, to.path)
}

/// That the file system of `path` has room for so many bytes more.
///
/// # Errors
/// It has not, or its folder is not there.
pub fn check_space(path: &Path, needed: u64) -> Result<(), NewFileError> {
    let status = rustix::fs::statvfs(folder_of(path)).map_err(|error| NewFileError::Write {
        path: path.to_owned(),
        error: error.into(),
    })?;
    let free = status.f_bavail.saturating_mul(status.f_frsize);
    if needed > free {
        return Err(NewFileError::NoSpace {
            path: path.to_owned(),
            needed,
            free,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_file_that_comes_meanwhile_is_replaced_only_where_that_is_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        for replace in [false, true] {
            let to = Destination {
                path: &path,
                replace,
            };
            let new = NewFile::create(to, 3).unwrap();
            new.file().write_all(b"new").unwrap();
            std::fs::write(&path, "theirs").unwrap();
            let finished = new.finish();
            match replace {
                false => {
                    assert!(matches!(finished, Err(NewFileError::Exists { .. })));
                    assert_eq!(std::fs::read(&path).unwrap(), b"theirs");
                    // Not even begun where it is there before.
                    let early = NewFile::create(to, 3);
                    assert!(matches!(early, Err(NewFileError::Exists { .. })));
                    assert_eq!(names(), 1);
                    std::fs::remove_file(&path).unwrap();
                }
                true => {
                    finished.unwrap();
                    assert_eq!(std::fs::read(&path).unwrap(), b"new");
                }
            }
            assert!(names() <= 1);
        }
    }

    #[test]
    fn a_link_that_leads_nowhere_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        std::os::unix::fs::symlink(folder.path().join("none"), &path).unwrap();
        let early = NewFile::create(Destination::new(&path), 3);
        assert!(matches!(early, Err(NewFileError::Exists { .. })));
    }

    /// Neither is replaced, and none is found out about when all is written.
    #[test]
    fn streams_and_folders_are_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let [there, link] = ["there", "stdout"].map(|name| folder.path().join(name));
        std::fs::write(&there, "theirs").unwrap();
        let open = File::open(&there).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&open);
        std::os::unix::fs::symlink(format!("/proc/self/fd/{number}"), &link).unwrap();
        for (path, part) in [
            (link.clone(), "open stream"),
            (folder.path().to_owned(), "directory"),
            (folder.path().join("new/"), "ends like the name of a folder"),
            (folder.path().join("there/"), "name of a file"),
            (folder.path().join("new/."), "name of a folder"),
            (folder.path().join("there/."), "name of a folder"),
            (folder.path().join("new/.."), "name of a folder"),
            (PathBuf::new(), "name of a folder"),
        ] {
            let error = NewFile::create(Destination::replacing(&path), 3).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        assert!(link.is_symlink());
        assert_eq!(std::fs::read(&there).unwrap(), b"theirs");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let partial = NewFile::partial_path(&path);
        std::os::unix::fs::symlink(folder.path().join("none"), &partial).unwrap();
        let error = NewFile::create(Destination::new(&path), 3).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("a.gguf.partial is a link; remove it"),
            "{error}"
        );
        std::fs::remove_file(&partial).unwrap();
        std::fs::create_dir(&partial).unwrap();
        let error = NewFile::create(Destination::new(&path), 3).unwrap_err();
        assert!(error.to_string().contains("a.gguf.partial: "), "{error}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    /// The length of what an earlier run left is gone before there is anything about room.
    #[test]
    fn what_an_earlier_run_left_takes_no_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        std::fs::write(NewFile::partial_path(&path), "left").unwrap();
        let error = NewFile::create(Destination::new(&path), u64::MAX).unwrap_err();
        assert!(matches!(error, NewFileError::NoSpace { .. }), "{error}");
        // Only who has it open and locked takes it away.
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
