//! The trait below which files differ: io_uring, `pread`, and the reader of the tests.
//!
//! A `BlockReader` belongs to one thread (the I/O thread), which submits reads into numbered slots and waits for any of
//! them to end. A reader keeps the buffer of a read from submission to completion and gives it back with the result,
//! so that no code can touch or release memory that the kernel is still writing to. It retries nothing and splits
//! nothing: that is the I/O thread's work, the same for every reader.

#![expect(
    unsafe_code,
    reason = "asks the kernel for a file's alignment and copies into buffers of an arena"
)]

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::arena::{Arena, SPAN_ALIGNMENT, Span};
use super::files::PlacedFile;

/// The largest logical block that is read directly. A file system that wants more is read through the page cache:
/// arenas align spans to 4096 bytes.
pub const MAX_BLOCK_BYTES: u32 = SPAN_ALIGNMENT as u32;

/// Ends the reader's `wait` early, from any thread, also one that starts later.
pub type Waker = Arc<dyn Fn() + Send + Sync>;

/// Reads blocks of files into buffers.
pub trait BlockReader: Send {
    /// The files as they were when opened, in the order of their places; at least one.
    fn files(&self) -> &[PlacedFile];

    fn limits(&self) -> Limits;

    fn waker(&self) -> Waker;

    /// Set once, where memory is refused that was to be registered like the rest: why. Reads go on.
    fn refused_later(&self) -> Arc<OnceLock<String>> {
        Arc::default()
    }

    /// Starts a read. Slots below `limits().in_flight_max` are the caller's to number; one that is in flight is not
    /// used again before its completion. What cannot be started ends like any other read: with an error, in `wait`.
    fn submit(&mut self, read: BlockRead);

    /// Blocks until a read has ended, the waker was called or the time has passed, and appends what ended, in any order.
    fn wait(&mut self, timeout: Option<Duration>, ended: &mut Vec<BlockReadDone>);

    /// Opens one of the files again, which must be `expected`, and reads from there on; after an error it reads from
    /// where it did. Nothing is in flight.
    fn reopen(&mut self, file: usize, expected: &FileIdentity) -> io::Result<()>;
}

/// What the caller of a `BlockReader` keeps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// File offsets, lengths and addresses are multiples of this power of two.
    pub block_bytes: u32,
    /// Slots.
    pub in_flight_max: u32,
    /// No read is longer. A multiple of `block_bytes`.
    pub request_bytes_max: usize,
    /// No read's buffer crosses a multiple of this arena offset: memory is registered in pieces. A multiple of
    /// `block_bytes`.
    pub border_bytes: usize,
}

pub struct BlockRead {
    pub slot: u32,
    /// Which of the reader's files.
    pub file: usize,
    /// Within this file.
    pub file_offset: u64,
    pub buffer: Buffer,
}

pub struct BlockReadDone {
    pub slot: u32,
    pub buffer: Buffer,
    /// Bytes read: fewer than asked for when the reader or the file ended early, 0 at or past the end of the file.
    pub result: io::Result<usize>,
}

/// A span of an arena that an operation owns while it is in flight. It cannot be cloned, and it keeps the arena alive.
#[derive(Debug)]
pub struct Buffer {
    arena: Arc<Arena>,
    span: Span,
}

impl Buffer {
    /// # Panics
    /// When the span does not lie inside the arena.
    pub(super) fn new(arena: Arc<Arena>, span: Span) -> Buffer {
        arena.pointer(span);
        Buffer { arena, span }
    }

    pub fn span(&self) -> Span {
        self.span
    }

    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Where to write; valid for `span().bytes` bytes while the buffer lives.
    pub fn pointer(&self) -> *mut u8 {
        self.arena.pointer(self.span)
    }

    /// Drops the first `bytes` bytes from the buffer: they have been read.
    pub(super) fn advance(&mut self, bytes: usize) {
        self.span = self.span.part(bytes, self.span.bytes - bytes);
    }

    /// Copies into the start of the buffer.
    ///
    /// # Panics
    /// When `source` is longer than the buffer.
    pub fn write(&mut self, source: &[u8]) {
        let target = self.arena.pointer(self.span.part(0, source.len()));
        // SAFETY: `part` and `pointer` checked that the target has room for the source inside the arena, which this
        // buffer keeps alive; u8 needs no alignment. The span belongs to this operation (module documentation of
        // `memory`), so nothing else accesses it, and `source`, a live shared slice, cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
    }
}

/// Which file it is and what it was when opened: a later difference means that the file was replaced or changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    pub path: PathBuf,
    pub bytes: u64,
    pub device: u64,
    pub inode: u64,
    /// Seconds and nanoseconds of the last change.
    pub modified: (i64, i64),
}

impl FileIdentity {
    /// The file that is now found under `path`.
    pub fn at(path: &Path) -> io::Result<FileIdentity> {
        FileIdentity::from_metadata(path, &std::fs::metadata(path)?)
    }

    pub(super) fn of(path: &Path, file: &File) -> io::Result<FileIdentity> {
        FileIdentity::from_metadata(path, &file.metadata()?)
    }

    fn from_metadata(path: &Path, metadata: &std::fs::Metadata) -> io::Result<FileIdentity> {
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        Ok(FileIdentity {
            path: path.to_owned(),
            bytes: metadata.len(),
            device: metadata.dev(),
            inode: metadata.ino(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

/// Opens for reading, past the page cache where `direct`. Between the reading of a model's header and this call
/// something else may have taken the file's place, and opening a pipe without a writer would block. (O_NONBLOCK would
/// not do: older kernels then give EAGAIN to io_uring for regular files too.)
pub(super) fn open_file(path: &Path, direct: bool) -> io::Result<File> {
    FileIdentity::at(path)?;
    let flags = if direct { libc::O_DIRECT } else { 0 };
    OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// Opens the file that `expected` describes, and no other.
pub fn open_expected(expected: &FileIdentity, direct: bool) -> io::Result<File> {
    let file = open_file(&expected.path, direct)?;
    if FileIdentity::of(&expected.path, &file)? != *expected {
        return Err(io::Error::other("it was changed or replaced meanwhile"));
    }
    Ok(file)
}

/// What offsets, lengths and addresses of direct reads from `path` must be multiples of: a power of two from 512 to
/// `MAX_BLOCK_BYTES`. Where the kernel does not say (before 6.1, or a file system without direct reads), the largest.
pub fn logical_block_bytes(path: &Path) -> u32 {
    match direct_alignment(path) {
        Some(bytes) if bytes.is_power_of_two() => bytes.clamp(512, MAX_BLOCK_BYTES),
        _ => MAX_BLOCK_BYTES,
    }
}

/// The alignment that the kernel names for direct I/O on `path`, if it names one.
pub(super) fn direct_alignment(path: &Path) -> Option<u32> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    // SAFETY: statx is a plain C struct of integers, for which all zeros is a valid value.
    let mut facts: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: `path` is a NUL-terminated string that outlives the call, and the kernel writes one statx into a local of
    // that type.
    let result = unsafe {
        libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            0,
            libc::STATX_DIOALIGN,
            &raw mut facts,
        )
    };
    let known = result == 0 && facts.stx_mask & libc::STATX_DIOALIGN != 0;
    let bytes = facts.stx_dio_offset_align.max(facts.stx_dio_mem_align);
    (known && bytes > 0).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logical_block_is_a_power_of_two_in_range() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [
            file.path(),
            Path::new("/proc/self/status"),
            Path::new("/none"),
        ] {
            let bytes = logical_block_bytes(path);
            assert!(bytes.is_power_of_two(), "{bytes}");
            assert!((512..=4096).contains(&bytes), "{bytes}");
        }
    }

    #[test]
    fn identity_tells_a_replaced_or_grown_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model");
        std::fs::write(&path, b"one").unwrap();
        let first = FileIdentity::at(&path).unwrap();
        assert_eq!(first, FileIdentity::at(&path).unwrap());
        std::fs::write(&path, b"longer").unwrap();
        assert_ne!(first, FileIdentity::at(&path).unwrap());
        assert!(FileIdentity::at(directory.path()).is_err());
    }
}
