//! Reads through `pread`, direct or through the page cache: the rungs below io_uring.
//!
//! One thread would leave the disk with one request at a time, so a small fixed number of threads take requests from
//! a queue; the I/O thread waits for completions as it does with io_uring. After a read through the page cache the
//! kernel is told to drop those pages: weights are read in a cycle longer than any cache, which would only push out
//! what others use.

#![expect(
    unsafe_code,
    reason = "gives the kernel an address to write to for the length of a call"
)]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::AbortOnPanic;
use super::block_reader::{
    BlockRead, BlockReadDone, BlockReader, FileIdentity, Limits, Waker, open_expected,
};
use super::files::PlacedFile;
use super::io_uring::forget_cached;

/// Requests under way at once. Disks reach their rate with four to eight requests of a megabyte, and on the buffered
/// rung each thread also copies, so more would take processors from the computation.
const THREADS: usize = 4;

pub(super) struct PreadReader {
    placed: Vec<PlacedFile>,
    limits: Limits,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// The open file of each place. Written only while nothing is in flight.
    files: RwLock<Vec<File>>,
    buffered: bool,
    state: Mutex<State>,
    /// A request was queued, or the threads are to stop.
    requested: Condvar,
    /// A request has ended, or the waker was called.
    ended: Condvar,
}

/// At most `Limits::in_flight_max` requests are in here or in the hands of a thread.
#[derive(Default)]
struct State {
    requests: VecDeque<BlockRead>,
    ended: Vec<BlockReadDone>,
    woken: bool,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PreadReader {
    pub(super) fn new(
        files: Vec<File>,
        placed: Vec<PlacedFile>,
        limits: Limits,
        buffered: bool,
    ) -> io::Result<PreadReader> {
        let shared = Arc::new(Shared {
            files: RwLock::new(files),
            buffered,
            state: Mutex::new(State::default()),
            requested: Condvar::new(),
            ended: Condvar::new(),
        });
        let mut reader = PreadReader {
            placed,
            limits,
            shared,
            threads: Vec::with_capacity(THREADS),
        };
        for number in 0..THREADS.min(limits.in_flight_max as usize) {
            let shared = Arc::clone(&reader.shared);
            let thread = std::thread::Builder::new()
                .name(format!("strata-pread-{number}"))
                .spawn(move || serve(&shared))?;
            reader.threads.push(thread);
        }
        Ok(reader)
    }
}

impl BlockReader for PreadReader {
    fn files(&self) -> &[PlacedFile] {
        &self.placed
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn waker(&self) -> Waker {
        let shared = Arc::clone(&self.shared);
        Arc::new(move || {
            shared.lock().woken = true;
            shared.ended.notify_one();
        })
    }

    fn submit(&mut self, read: BlockRead) {
        self.shared.lock().requests.push_back(read);
        self.shared.requested.notify_one();
    }

    fn wait(&mut self, timeout: Option<Duration>, ended: &mut Vec<BlockReadDone>) {
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.shared.lock();
        while state.ended.is_empty() && !state.woken {
            let Some(until) = until else {
                let waited = self.shared.ended.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.woken = false;
        ended.append(&mut state.ended);
    }

    fn reopen(&mut self, index: usize, expected: &FileIdentity) -> io::Result<()> {
        let file = open_expected(expected, !self.shared.buffered)?;
        let mut files = self
            .shared
            .files
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        files[index] = file;
        drop(files);
        self.placed[index].identity = expected.clone();
        Ok(())
    }
}

impl Drop for PreadReader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.requested.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has ended the process already.
            drop(thread.join());
        }
    }
}

/// The life of a reading thread.
fn serve(shared: &Shared) {
    let _guard = AbortOnPanic;
    loop {
        let mut state = shared.lock();
        let read = loop {
            if state.stop {
                return;
            }
            match state.requests.pop_front() {
                Some(read) => break read,
                None => {
                    state = shared
                        .requested
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        drop(state);
        let files = shared.files.read().unwrap_or_else(PoisonError::into_inner);
        let file = &files[read.file];
        let result = read_at(file, &read);
        if shared.buffered {
            forget_cached(file, read.file_offset, read.buffer.span().bytes);
        }
        drop(files);
        shared.lock().ended.push(BlockReadDone {
            slot: read.slot,
            buffer: read.buffer,
            result,
        });
        shared.ended.notify_one();
    }
}

pub(super) fn read_at(file: &File, read: &BlockRead) -> io::Result<usize> {
    let offset = i64::try_from(read.file_offset)
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the buffer's pointer is valid for its length inside an arena that the buffer keeps mapped for longer than
    // this call, and the span belongs to this operation: nobody else accesses it meanwhile.
    let bytes = unsafe {
        libc::pread(
            file.as_raw_fd(),
            read.buffer.pointer().cast(),
            read.buffer.span().bytes,
            offset,
        )
    };
    usize::try_from(bytes).map_err(|_| io::Error::last_os_error())
}
