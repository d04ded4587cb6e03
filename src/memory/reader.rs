//! The storage reader: the handle to the I/O thread, and the ladder of ways to read.
//!
//! The ladder, best first: io_uring with registered memory and file, plain io_uring, `pread` past the page cache,
//! `pread` through it. The first that the kernel, the file system and the limits of the process permit is taken, and
//! the reason of each step down is kept for the log, the memory view and the metrics.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::thread::{JoinHandle, ThreadId};

use super::arena::{Arena, Span};
use super::block_reader::{
    BlockRead, BlockReader, Buffer, FileIdentity, Limits, MAX_BLOCK_BYTES, Waker, direct_alignment,
    logical_block_bytes, open_file,
};
use super::io_thread::{IoThread, ReadDone, ReadError, ReadPiece, Reopening, Shared};
use super::io_uring::IoUringReader;
use super::pread::{PreadReader, read_at};
use super::{ReadRetries, TransferTotals};

/// Tickets that may be outstanding before `read` waits for one to end. Callers keep one per ring entry and two more, so
/// they never see this bound; it is here because every queue has one.
pub(super) const QUEUED_TICKETS_MAX: usize = 1024;

/// A request's length: disks reach their rate with a few requests of a megabyte.
const REQUEST_BYTES_MAX: usize = 1 << 20;
/// More than any disk needs for its rate with requests of that length, so that the queue does not run dry between the
/// I/O thread's turns.
const IN_FLIGHT_MAX: u32 = 32;
/// The longest buffer that io_uring registers.
const REGISTERED_BYTES_MAX: usize = 1 << 30;

/// The way to read that was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReaderChoice {
    /// The best that works.
    #[default]
    Auto,
    /// io_uring, or an error.
    IoUring,
    /// `pread`, although io_uring may work.
    Pread,
}

/// The way to read that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rung {
    IoUringRegistered,
    IoUring,
    PreadDirect,
    PreadBuffered,
}

impl Rung {
    /// The value of the label `reader` in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Rung::IoUringRegistered => "io_uring_registered",
            Rung::IoUring => "io_uring",
            Rung::PreadDirect => "pread_direct",
            Rung::PreadBuffered => "pread_buffered",
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Reads one file into one arena. Dropping it waits for every ticket to be reported.
pub(super) struct Reader {
    rung: Rung,
    reason: String,
    limits: Limits,
    file: FileIdentity,
    arena: Arc<Arena>,
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    thread_id: ThreadId,
}

impl Reader {
    /// Opens the file and starts the I/O thread. `on_done` is called there once per ticket; it may call `read`, and must
    /// neither block nor call `drain`.
    pub(super) fn start(
        path: &Path,
        arena: Arc<Arena>,
        choice: ReaderChoice,
        on_done: Box<dyn Fn(ReadDone) + Send>,
    ) -> Result<Reader, ReadError> {
        let (block_reader, rung, reason) = open(path, &arena, choice)?;
        Reader::spawn(block_reader, rung, reason, arena, on_done)
    }

    /// A reader over an implementation of the caller's, for tests. It calls itself `PreadBuffered`.
    pub(super) fn with_block_reader(
        block_reader: Box<dyn BlockReader>,
        arena: Arc<Arena>,
        on_done: Box<dyn Fn(ReadDone) + Send>,
    ) -> Result<Reader, ReadError> {
        let reason = "a block reader was given".to_owned();
        Reader::spawn(block_reader, Rung::PreadBuffered, reason, arena, on_done)
    }

    fn spawn(
        block_reader: Box<dyn BlockReader>,
        rung: Rung,
        reason: String,
        arena: Arc<Arena>,
        on_done: Box<dyn Fn(ReadDone) + Send>,
    ) -> Result<Reader, ReadError> {
        let limits = block_reader.limits();
        let block = limits.block_bytes as usize;
        assert!(
            block.is_power_of_two()
                && limits.in_flight_max > 0
                && limits.request_bytes_max >= block
                && limits.request_bytes_max.is_multiple_of(block)
                && limits.border_bytes >= block
                && limits.border_bytes.is_multiple_of(block),
            "{limits:?}"
        );
        let shared = Arc::new(Shared::default());
        let waker = block_reader.waker();
        let file = block_reader.file().clone();
        let io_thread = IoThread::new(
            block_reader,
            Arc::clone(&arena),
            Arc::clone(&shared),
            on_done,
        );
        let thread = std::thread::Builder::new()
            .name("strata-io".to_owned())
            .spawn(move || io_thread.run())
            .map_err(|source| ReadError::Thread { source })?;
        Ok(Reader {
            rung,
            reason,
            limits,
            file,
            arena,
            shared,
            waker,
            thread_id: thread.thread().id(),
            thread: Some(thread),
        })
    }

    /// Queues the pieces under a number of the caller's choice and returns. The pieces' spans belong to the reader until
    /// `on_done` reports the ticket: until then nobody reads or writes them.
    ///
    /// # Panics
    /// When a piece is not aligned to `block_bytes` or lies outside the arena.
    pub(super) fn read(&self, ticket: u64, pieces: Vec<ReadPiece>) {
        for piece in &pieces {
            let block = self.limits.block_bytes as usize;
            assert!(
                piece.file_offset.is_multiple_of(block as u64)
                    && piece.span.offset.is_multiple_of(block)
                    && piece.span.bytes.is_multiple_of(block),
                "{piece:?} is aligned to {block} bytes"
            );
            self.arena.pointer(piece.span);
        }
        let mut state = self.shared.lock();
        // On the I/O thread itself, in `on_done`, waiting would be for ever; there one ticket goes as one comes.
        while state.outstanding >= QUEUED_TICKETS_MAX && !self.on_io_thread() {
            state = self
                .shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.outstanding += 1;
        state.queue.push_back((ticket, pieces));
        drop(state);
        (self.waker)();
    }

    /// Waits until every ticket given so far, and every ticket given meanwhile, has been reported.
    #[cfg(test)]
    pub(super) fn drain(&self) {
        assert!(!self.on_io_thread(), "drain is not called by on_done");
        let mut state = self.shared.lock();
        while state.outstanding > 0 {
            state = self
                .shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn rung(&self) -> Rung {
        self.rung
    }

    /// Why this rung and no better one, in words for the log.
    pub(super) fn rung_reason(&self) -> &str {
        &self.reason
    }

    /// What pieces are aligned to.
    #[cfg(test)]
    pub(super) fn block_bytes(&self) -> u32 {
        self.limits.block_bytes
    }

    /// Opens the file at the same path again, which must be `expected`, and waits until that is done. Nothing is read
    /// meanwhile; after an error, reads go on from the file that was open.
    ///
    /// # Panics
    /// When `expected` has another size than the file had: tickets are cut to it.
    pub(super) fn reopen(&self, expected: FileIdentity) -> Result<(), ReadError> {
        assert!(!self.on_io_thread(), "reopen is not called by on_done");
        assert_eq!(expected.bytes, self.file.bytes, "{expected:?}");
        self.shared.lock().reopening = Reopening::Asked(expected);
        (self.waker)();
        let mut state = self.shared.lock();
        loop {
            match std::mem::take(&mut state.reopening) {
                Reopening::Done(result) => return result,
                asked => state.reopening = asked,
            }
            state = self
                .shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The file as it was when it was opened first; compare with `FileIdentity::at` to see whether it was replaced.
    pub(super) fn file_identity(&self) -> &FileIdentity {
        &self.file
    }

    /// Bytes that arrived, and the time during which at least one request was in flight.
    pub(super) fn totals(&self) -> TransferTotals {
        self.shared.totals()
    }

    pub(super) fn retries(&self) -> ReadRetries {
        self.shared.retries()
    }

    fn on_io_thread(&self) -> bool {
        std::thread::current().id() == self.thread_id
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        (self.waker)();
        let on_io_thread = self.on_io_thread();
        if let Some(thread) = self.thread.take().filter(|_| !on_io_thread) {
            // A thread that panicked has ended the process already.
            drop(thread.join());
        }
    }
}

/// Walks down the ladder.
fn open(
    path: &Path,
    arena: &Arena,
    choice: ReaderChoice,
) -> Result<(Box<dyn BlockReader>, Rung, String), ReadError> {
    let open_error = |source| ReadError::Open {
        file: path.to_owned(),
        source,
    };
    let thread_error = |source| ReadError::Thread { source };
    let limits = Limits {
        block_bytes: logical_block_bytes(path),
        in_flight_max: IN_FLIGHT_MAX,
        request_bytes_max: REQUEST_BYTES_MAX,
        border_bytes: REGISTERED_BYTES_MAX,
    };
    let buffered = open_file(path, false).map_err(open_error)?;
    let identity = FileIdentity::of(path, &buffered).map_err(open_error)?;
    let (file, refused) = match open_direct(path) {
        Ok(direct) => (direct, None),
        Err(reason) => (
            buffered,
            Some(format!("direct reads are refused: {reason}")),
        ),
    };
    let through_cache = refused.is_some();
    let mut reasons: Vec<String> = refused.into_iter().collect();

    // io_uring through the page cache gains nothing over `pread`: it is taken only when asked for by name.
    let try_io_uring = match choice {
        ReaderChoice::Auto => !through_cache,
        ReaderChoice::IoUring => true,
        ReaderChoice::Pread => {
            reasons.push("pread was asked for".to_owned());
            false
        }
    };
    if try_io_uring {
        let for_ring = file.try_clone().map_err(open_error)?;
        match IoUringReader::new(for_ring, identity.clone(), limits, through_cache) {
            Ok(mut ring) => {
                let rung = match ring.register(arena) {
                    Ok(()) => Rung::IoUringRegistered,
                    Err(reason) => {
                        reasons.push(reason);
                        Rung::IoUring
                    }
                };
                return Ok((Box::new(ring), rung, in_words(&reasons)));
            }
            Err(source) if choice == ReaderChoice::IoUring => {
                return Err(ReadError::IoUringRefused { source });
            }
            Err(error) => reasons.push(format!("io_uring is refused: {error}")),
        }
    }
    let rung = if through_cache {
        Rung::PreadBuffered
    } else {
        Rung::PreadDirect
    };
    let reader = PreadReader::new(file, identity, limits, through_cache).map_err(thread_error)?;
    Ok((Box::new(reader), rung, in_words(&reasons)))
}

fn in_words(reasons: &[String]) -> String {
    if reasons.is_empty() {
        "the best there is".to_owned()
    } else {
        reasons.join("; ")
    }
}

/// Opens the file for reads past the page cache and tries one: some file systems refuse the flag at open, others the
/// first read. The error says why not, in words.
fn open_direct(path: &Path) -> Result<File, String> {
    if let Some(bytes) = direct_alignment(path).filter(|&bytes| bytes > MAX_BLOCK_BYTES) {
        return Err(format!("the file system wants blocks of {bytes} bytes"));
    }
    let file = open_file(path, true).map_err(|error| error.to_string())?;
    try_read(&file).map_err(|error| error.to_string())?;
    Ok(file)
}

/// Reads the first block of a file opened for direct reads.
fn try_read(file: &File) -> io::Result<()> {
    let bytes = MAX_BLOCK_BYTES as usize;
    let arena = Arena::new("trial", bytes).map_err(io::Error::other)?;
    let read = BlockRead {
        slot: 0,
        file_offset: 0,
        buffer: Buffer::new(Arc::new(arena), Span { offset: 0, bytes }),
    };
    loop {
        match read_at(file, &read) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(drop),
        }
    }
}

#[cfg(test)]
mod tests;
