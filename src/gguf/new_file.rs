//! A file that is whole or not there: written under a temporary name in the folder of its final one, synced, and renamed.
//! A run that fails or is interrupted leaves nothing under the final name, and what stood there before.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum NewFileError {
    #[error(
        "not enough space for {}: the file takes {needed} bytes ({:.1} GiB) and {free} bytes ({:.1} GiB) are free",
        path.display(),
        *needed as f64 / GIB,
        *free as f64 / GIB
    )]
    NoSpace {
        path: PathBuf,
        needed: u64,
        free: u64,
    },

    #[error("{} is being written by another process", path.display())]
    Busy { path: PathBuf },

    #[error("cannot write {}: {error}", path.display())]
    Write { path: PathBuf, error: io::Error },
}

const GIB: f64 = (1u64 << 30) as f64;

/// A file under a temporary name beside its final one. Dropped before `finish`, it is removed.
///
/// The temporary name is the final one and `.partial`, and who writes it holds a lock on it. So no two write to one, and
/// what a killed process leaves behind is found, and written over, by the next that writes the same file.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    path: PathBuf,
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
    /// There is no room for it, another process writes it, or the folder cannot be written.
    pub fn create(path: &Path, bytes: u64) -> Result<NewFile, NewFileError> {
        let error = |error| NewFileError::Write {
            path: path.to_owned(),
            error,
        };
        let busy = || NewFileError::Busy {
            path: path.to_owned(),
        };
        let no_file = || {
            error(io::Error::other(
                "it is a directory or a device, not a file",
            ))
        };
        // A rename would put the file in the place of a device.
        if path.exists() && !path.is_file() {
            return Err(no_file());
        }
        if path.file_name().is_none() {
            return Err(error(io::ErrorKind::InvalidFilename.into()));
        }
        let partial = NewFile::partial_path(path);
        check_space(path, bytes)?;
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            // What stands under the temporary name is ours to write over, but not what a link there points to, and a
            // pipe would block.
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&partial)
            .map_err(error)?;
        let opened = file.metadata().map_err(error)?;
        if !opened.is_file() {
            return Err(no_file());
        }
        // An interrupted run leaves its file behind, unlocked; the next one writes over it.
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Err(busy()),
            Err(std::fs::TryLockError::Error(other)) => return Err(error(other)),
        }
        // Between opening and locking, another process may have finished it: then it has its final name, and is not ours.
        let is_ours =
            |named: std::fs::Metadata| (named.dev(), named.ino()) == (opened.dev(), opened.ino());
        if !std::fs::symlink_metadata(&partial).is_ok_and(is_ours) {
            return Err(busy());
        }
        let new = NewFile {
            file,
            path: path.to_owned(),
            partial,
            finished: false,
        };
        new.file.set_len(0).map_err(error)?;
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
    pub fn finish(mut self) -> Result<(), NewFileError> {
        let folder = folder_of(&self.path);
        self.file
            .sync_all()
            .and_then(|()| std::fs::rename(&self.partial, &self.path))
            // The new name is durable once the folder is.
            .and_then(|()| File::open(folder)?.sync_all())
            .map_err(|error| self.error(error))?;
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

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

fn check_space(path: &Path, needed: u64) -> Result<(), NewFileError> {
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
