//! Whether the paths still lead to the files that are read, and what happens where one does not. Each file of a split model
//! is watched by itself.
//!
//! The descriptor keeps the file that was opened alive, so one that another takes the place of goes on being served, with
//! a warning. Only after a read has failed is the file at the path looked at more closely, before the next step: where it
//! has the size of the first, and everything whose checksum is known has the same one in it, it is as good as the first,
//! and reads go on from it. Weights that rest in memory came from the first, so any other file is refused. Where it is
//! the same as ever it is opened again all the same: a handle that a network file system's server has forgotten, or that is
//! of a drive which was away for a while, reads nothing more.

use super::Weights;
use super::verify::Compared;
use crate::memory::{FileIdentity, PlacedFile, ReadError};
use std::time::{Duration, Instant};

/// Between two looks at the path while nothing fails.
const LOOK_PAUSE: Duration = Duration::from_secs(1);

/// Lives on the engine thread.
#[derive(Debug)]
pub(super) struct FileWatch {
    files: Vec<WatchedFile>,
    looked: Instant,
    /// A read has failed since the last step that ended well. Nothing is in flight before the next one then.
    read_failed: bool,
}

impl FileWatch {
    pub(super) fn new(files: &[PlacedFile]) -> FileWatch {
        let files = files.iter().enumerate();
        let watched = files.map(|(index, file)| WatchedFile::new(index, file.identity.clone()));
        FileWatch {
            files: watched.collect(),
            looked: Instant::now(),
            read_failed: false,
        }
    }

    /// A step has failed because of this.
    pub(super) fn note_failure(&mut self, error: &ReadError) {
        self.read_failed = true;
        if let ReadError::Io { file, .. } = error {
            let files = self.files.iter_mut();
            let failed = files.filter(|watched| watched.file.path == *file);
            failed.for_each(|watched| watched.is_handle_in_doubt = true);
        }
    }

    /// A step has ended well: whatever failed before can be read.
    pub(super) fn note_success(&mut self) {
        if self.read_failed {
            self.read_failed = false;
            let files = self.files.iter_mut();
            files.for_each(|watched| watched.is_handle_in_doubt = false);
        }
    }
}

#[derive(Debug)]
struct WatchedFile {
    /// Among the files of the model.
    index: usize,
    /// What is read.
    file: FileIdentity,
    /// What was found at the path last, where that is another, which has been said.
    told: Option<FileIdentity>,
    /// What was found to hold other weights, or could not be compared or opened, which has been said. It is not looked into
    /// again: that takes as long as reading the whole model.
    refused: Option<FileIdentity>,
    /// Reads have failed, perhaps because of the handle.
    is_handle_in_doubt: bool,
}

impl WatchedFile {
    const fn new(index: usize, file: FileIdentity) -> WatchedFile {
        WatchedFile {
            index,
            file,
            told: None,
            refused: None,
            is_handle_in_doubt: false,
        }
    }

    /// The same inode, whatever is in it.
    fn is_open(&self, found: &FileIdentity) -> bool {
        (self.file.device, self.file.inode) == (found.device, found.inode)
    }

    /// Says once that the path leads to something else; a file that is being written is another at every look.
    fn tell(&mut self, found: &FileIdentity) {
        let before = self.told.replace(found.clone());
        if before.is_some_and(|it| (it.device, it.inode) == (found.device, found.inode)) {
            return;
        }
        let path = self.file.path.display();
        if self.is_open(found) {
            tracing::warn!("{path} was written to while it is served");
        } else {
            tracing::warn!(
                "{path} was replaced while it is served: the former file goes on being read; restart the server to serve \
                 the new one"
            );
        }
    }

    /// Says once why a file is not read.
    fn refuse(&mut self, found: FileIdentity, why: &str) {
        tracing::error!(
            "{} was replaced, or written to, while it was served, and {why}; restart the server",
            self.file.path.display()
        );
        self.refused = Some(found);
    }
}

impl Weights {
    /// Before a step.
    pub(super) fn look_at_file(&self, cancelled: &dyn Fn() -> bool) {
        let Some(watch) = &self.watch else { return };
        let watch = &mut *watch.borrow_mut();
        if !watch.read_failed && watch.looked.elapsed() < LOOK_PAUSE {
            return;
        }
        watch.looked = Instant::now();
        for file in &mut watch.files {
            self.look_at(file, watch.read_failed, cancelled);
        }
    }

    fn look_at(&self, watch: &mut WatchedFile, read_failed: bool, cancelled: &dyn Fn() -> bool) {
        // Where nothing is at the path, or something of another size, reads find out what the open file has.
        let Ok(found) = FileIdentity::at(&watch.file.path) else {
            return;
        };
        if found == watch.file {
            watch.told = None;
            if read_failed && watch.is_handle_in_doubt {
                self.renew_handle(watch);
            }
            return;
        }
        watch.tell(&found);
        if !read_failed || found.bytes != watch.file.bytes || watch.refused.as_ref() == Some(&found)
        {
            return;
        }
        let compared = match &self.checks {
            Some(checks) => checks.compare(watch.index, &found, cancelled),
            None => Compared::Nothing,
        };
        match compared {
            Compared::Agrees => self.accept(watch, found, true),
            Compared::Nothing if watch.is_open(&found) => self.accept(watch, found, false),
            Compared::Nothing => watch.refuse(found, "there is nothing to compare it with"),
            Compared::Differs(offset) => {
                let why =
                    format!("at byte {offset} it has other weights than those that are in memory");
                watch.refuse(found, &why);
            }
            Compared::Unreadable(error) => {
                watch.refuse(
                    found,
                    &format!("it cannot be compared with its checksums ({error})"),
                );
            }
            Compared::Cancelled => {}
        }
    }

    /// Reads go on from what is at the path, if that can be opened.
    fn accept(&self, watch: &mut WatchedFile, found: FileIdentity, was_compared: bool) {
        if (watch.is_handle_in_doubt || !watch.is_open(&found))
            && let Err(error) = self.reopen(watch, &found)
        {
            watch.refuse(found, &format!("it cannot be read from ({error})"));
            return;
        }
        let path = found.path.display();
        if was_compared {
            tracing::info!("{path} is whole again");
        } else {
            tracing::warn!(
                "{path} goes on being read; it was not compared with what it had before, because no checksums of it are \
                 known (--verify-reads)"
            );
        }
        if let Some(checks) = &self.checks {
            checks.set_file(watch.index, &found);
        }
        watch.file = found;
        watch.told = None;
        watch.is_handle_in_doubt = false;
    }

    /// The file is what it was. Its handle may be good for nothing.
    fn renew_handle(&self, watch: &mut WatchedFile) {
        let path = watch.file.path.display();
        match self.reopen(watch, &watch.file) {
            Ok(()) => {
                tracing::info!("{path} was opened again, after reads of it had failed");
                watch.is_handle_in_doubt = false;
            }
            // Tried again before the next step: what it lies on may be away for now.
            Err(error) => tracing::warn!("reads of {path} have failed: {error}"),
        }
    }

    fn reopen(&self, watch: &WatchedFile, found: &FileIdentity) -> Result<(), ReadError> {
        (self.shared).reopen(watch.index, found.clone(), self.plan.read_alignment)
    }
}
