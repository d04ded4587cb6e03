//! The storage reader: the handle to the I/O thread.

use std::sync::{Arc, OnceLock, PoisonError};
use std::thread::{JoinHandle, ThreadId};

use super::arena::Arena;
use super::block_reader::{BlockReader, FileIdentity, Limits, Waker};
use super::files::{FilePlace, PlacedFile, check_places};
use super::io_thread::{IoThread, ReadDone, ReadError, ReadPiece, Reopening, Shared};
use super::ladder::{self, ReaderChoice, Requests, Rung};
use super::{ReadRetries, TransferTotals};

/// Tickets that may be outstanding before `read` waits for one to end. Callers keep one per ring entry and two more, so
/// they never see this bound; it is here because every queue has one.
pub(super) const QUEUED_TICKETS_MAX: usize = 1024;

/// Reads the files of a model into one arena. Dropping it gives up what is outstanding and waits until all of it is
/// reported.
pub(super) struct Reader {
    rung: Rung,
    reason: String,
    /// Why `rung` does not hold for all memory any more.
    refused_later: Arc<OnceLock<String>>,
    limits: Limits,
    files: Vec<PlacedFile>,
    arena: Arc<Arena>,
    shared: Arc<Shared>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    thread_id: ThreadId,
}

impl Reader {
    /// Opens the files and starts the I/O thread. `on_done` is called there once per ticket; it may call `read`, and must
    /// neither block nor call `drain`.
    pub(super) fn start(
        files: &[FilePlace],
        arena: Arc<Arena>,
        choice: ReaderChoice,
        on_done: Box<dyn Fn(ReadDone) + Send>,
    ) -> Result<Reader, ReadError> {
        let (block_reader, rung, reason) = ladder::open(files, &arena, choice)?;
        Reader::spawn(block_reader, rung, reason, arena, on_done)
    }

    /// The same on one rung, or an error, and with requests of the caller's choice: for benches.
    pub(super) fn start_on(
        files: &[FilePlace],
        arena: Arc<Arena>,
        rung: Rung,
        requests: Requests,
        on_done: Box<dyn Fn(ReadDone) + Send>,
    ) -> Result<Reader, ReadError> {
        let block_reader = ladder::open_rung(files, &arena, rung, requests)?;
        let reason = "it was asked for".to_owned();
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
        let refused_later = block_reader.refused_later();
        let files = block_reader.files().to_vec();
        check_places(&files, limits.block_bytes)?;
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
            refused_later,
            limits,
            files,
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
        state.given += 1;
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

    /// Nobody wants what was given so far: what of it was not issued yet never is, and all of it is reported as soon as
    /// nothing is in flight.
    pub(super) fn give_up(&self) {
        let mut state = self.shared.lock();
        state.given_up = state.given;
        drop(state);
        (self.waker)();
    }

    /// The rung that is in use now.
    pub(super) fn rung(&self) -> Rung {
        match self.refused_later.get() {
            Some(_) => Rung::IoUringPartlyRegistered,
            None => self.rung,
        }
    }

    /// Why this rung and no better one, in words for the log.
    pub(super) fn rung_reason(&self) -> &str {
        self.refused_later.get().unwrap_or(&self.reason)
    }

    /// What pieces are aligned to.
    #[cfg(test)]
    pub(super) fn block_bytes(&self) -> u32 {
        self.limits.block_bytes
    }

    /// Opens the file at the path of one of the files again, which must be `expected`, and waits until that is done.
    /// Nothing is read meanwhile; after an error, reads go on from the file that was open.
    ///
    /// # Panics
    /// When `expected` has another size than the file had: tickets are cut to it.
    pub(super) fn reopen(&self, file: usize, expected: FileIdentity) -> Result<(), ReadError> {
        assert!(!self.on_io_thread(), "reopen is not called by on_done");
        let bytes = self.files[file].identity.bytes;
        assert_eq!(expected.bytes, bytes, "{expected:?}");
        self.shared.lock().reopening = Reopening::Asked(file, expected);
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

    /// The files as they were when they were opened first; compare with `FileIdentity::at` to see whether one was
    /// replaced.
    pub(super) fn files(&self) -> &[PlacedFile] {
        &self.files
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

#[cfg(test)]
mod tests;
