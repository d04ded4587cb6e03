//! The test instrument: a `BlockReader` over bytes in memory that misbehaves as it is told.
//!
//! It shortens reads, fails them, flips bits, holds completions back and returns them in another order, all from one
//! seed, so that a failure seen once is seen again. Unit tests and the tests in `tests/` use it; nothing else does.
//! Time enters only where a test asks for real milliseconds; otherwise a delay is a matter of order alone.

use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::block_reader::{
    BlockRead, BlockReadDone, BlockReader, FileIdentity, Limits, Waker, open_expected,
};
use super::files::{FilePlace, PlacedFile};

/// What goes wrong. The default is nothing. Offsets count through all files, as above the reader.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Probability that a read returns fewer bytes than were asked for, at least one.
    pub short_reads: f64,
    /// Probability that a read fails with EIO; the same read may succeed the next time.
    pub errors: f64,
    /// What is given for EIO.
    pub error_code: Option<i32>,
    /// Probability that a read fails with EINTR or EAGAIN.
    pub interruptions: f64,
    /// Reads that cover one of these file offsets fail with EIO, until the faults are changed.
    pub broken: Vec<u64>,
    /// As `broken`, but an offset is mended by the first read that fails on it.
    pub broken_once: Vec<u64>,
    /// Probability that one bit of what a read returns is wrong.
    pub flipped_bits: f64,
    /// The lowest bit of the byte at each of these file offsets is wrong in every read, until the faults are changed.
    pub flipped: Vec<u64>,
    /// As `flipped`, but an offset is mended by the first read that returns it.
    pub flipped_once: Vec<u64>,
    /// Completions come in random order, and some later than they could.
    pub reorder: bool,
    /// Real time that each read takes, one after another.
    pub read_time: Duration,
    /// Probability that a read takes 100 ms of real time more.
    pub stalls: f64,
    /// The files have lost what lay past this offset since they were opened.
    pub shrunk_to: Option<u64>,
    /// Nothing completes while this is set.
    pub held: bool,
    /// A read that covers one of these file offsets does not complete, nor does any that was submitted after it.
    pub held_at: Vec<u64>,
    /// Reads fail with ESTALE until a file is opened again.
    pub stale: bool,
}

/// What a stalled read takes.
const STALL: Duration = Duration::from_millis(100);

pub struct FaultyReader {
    files: Vec<PlacedFile>,
    limits: Limits,
    /// Of each file.
    contents: Vec<Vec<u8>>,
    random: ChaCha8Rng,
    in_flight: Vec<BlockRead>,
    control: FaultControl,
}

/// Changes the faults while the reader is at work; clones control the same reader.
#[derive(Clone, Default)]
pub struct FaultControl(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    faults: Faults,
    woken: bool,
    /// A read has come to be held.
    holds: bool,
    submitted: u64,
    completed: u64,
}

impl FaultControl {
    pub fn set(&self, faults: Faults) {
        self.lock().faults = faults;
        self.0.changed.notify_all();
    }

    pub fn change(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.lock().faults);
        self.0.changed.notify_all();
    }

    /// Blocks until that many reads have been submitted since the start.
    pub fn wait_for_submitted(&self, reads: u64) {
        let mut state = self.lock();
        while state.submitted < reads {
            state = self.wait(state);
        }
    }

    /// Waits until a read is held, for no longer than this; whether one is.
    pub fn wait_until_held(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut state = self.lock();
        while !state.holds {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.wait_for(state, left);
        }
        true
    }

    pub fn submitted(&self) -> u64 {
        self.lock().submitted
    }

    pub fn completed(&self) -> u64 {
        self.lock().completed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.0
            .changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        let waited = self.0.changed.wait_timeout(state, time);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl FaultyReader {
    /// A reader of `content` with blocks of 512 bytes, 8 slots, requests of 16 KiB and a border every 64 KiB: small, so
    /// that small tests meet every limit. `with_limits` changes them.
    pub fn new(content: Vec<u8>, seed: u64, faults: Faults) -> FaultyReader {
        let identity = FileIdentity {
            path: Path::new("faulty.gguf").to_owned(),
            bytes: content.len() as u64,
            device: 0,
            inode: 0,
            modified: (0, 0),
        };
        let file = PlacedFile { identity, base: 0 };
        FaultyReader::of(vec![file], vec![content], seed, faults)
    }

    /// A reader of what is in the files now.
    pub fn open(places: &[FilePlace], seed: u64, faults: Faults) -> io::Result<FaultyReader> {
        let mut files = Vec::new();
        let mut contents = Vec::new();
        for place in places {
            let mut identity = FileIdentity::at(&place.path)?;
            let content = std::fs::read(&place.path)?;
            identity.bytes = content.len() as u64;
            let base = place.base;
            files.push(PlacedFile { identity, base });
            contents.push(content);
        }
        Ok(FaultyReader::of(files, contents, seed, faults))
    }

    fn of(
        files: Vec<PlacedFile>,
        contents: Vec<Vec<u8>>,
        seed: u64,
        faults: Faults,
    ) -> FaultyReader {
        let control = FaultControl::default();
        control.set(faults);
        FaultyReader {
            files,
            limits: Limits {
                block_bytes: 512,
                in_flight_max: 8,
                request_bytes_max: 16 << 10,
                border_bytes: 64 << 10,
            },
            contents,
            random: ChaCha8Rng::seed_from_u64(seed),
            in_flight: Vec::new(),
            control,
        }
    }

    pub fn with_limits(mut self, limits: Limits) -> FaultyReader {
        self.limits = limits;
        self
    }

    pub fn control(&self) -> FaultControl {
        self.control.clone()
    }

    /// Where a read begins among all files.
    fn offset_of(&self, read: &BlockRead) -> u64 {
        self.files[read.file].base + read.file_offset
    }

    /// Whether the read that is next to complete does not.
    fn is_held(&self, faults: &Faults) -> bool {
        let next = self.in_flight.first().map(|read| {
            let begin = self.offset_of(read);
            begin..begin + read.buffer.span().bytes as u64
        });
        let is_within = |offset: &u64| next.as_ref().is_some_and(|next| next.contains(offset));
        faults.held || faults.held_at.iter().any(is_within)
    }

    /// Ends one read under `faults`; `broken_once` and `flipped_once` lose the offsets that it met.
    fn finish(&mut self, mut read: BlockRead, faults: &mut Faults) -> BlockReadDone {
        let result = self.outcome(&read, faults);
        if let Ok(bytes @ 1..) = result {
            let start = read.file_offset as usize;
            let mut copy = self.contents[read.file][start..start + bytes].to_vec();
            if self.random.random_bool(faults.flipped_bits) {
                let byte = self.random.random_range(0..bytes);
                copy[byte] ^= 1 << self.random.random_range(0..8);
            }
            let begin = self.offset_of(&read);
            let place = |offset: u64| {
                let place = offset.checked_sub(begin)? as usize;
                (place < bytes).then_some(place)
            };
            for place in faults.flipped.iter().filter_map(|&offset| place(offset)) {
                copy[place] ^= 1;
            }
            faults.flipped_once.retain(|&offset| {
                let place = place(offset);
                if let Some(place) = place {
                    copy[place] ^= 1;
                }
                place.is_none()
            });
            read.buffer.write(&copy);
        }
        BlockReadDone {
            slot: read.slot,
            buffer: read.buffer,
            result,
        }
    }

    /// The bytes that a read returns; they lie inside the content.
    fn outcome(&mut self, read: &BlockRead, faults: &mut Faults) -> io::Result<usize> {
        let file_end = self.files[read.file].base + self.contents[read.file].len() as u64;
        let size = faults.shrunk_to.unwrap_or(u64::MAX).min(file_end);
        let bytes = read.buffer.span().bytes;
        let begin = self.offset_of(read);
        let end = size.min(begin + bytes as u64);
        let bytes = end.saturating_sub(begin) as usize;
        let covers = |offset: &u64| (begin..end).contains(offset);
        let mended = faults.broken_once.len();
        faults.broken_once.retain(|offset| !covers(offset));
        if faults.stale {
            return Err(io::Error::from_raw_os_error(libc::ESTALE));
        }
        if faults.broken_once.len() < mended
            || faults.broken.iter().any(covers)
            || self.random.random_bool(faults.errors)
        {
            let code = faults.error_code.unwrap_or(libc::EIO);
            return Err(io::Error::from_raw_os_error(code));
        }
        if self.random.random_bool(faults.interruptions) {
            let codes = [libc::EINTR, libc::EAGAIN];
            return Err(io::Error::from_raw_os_error(
                codes[self.random.random_range(0..2)],
            ));
        }
        if bytes > 1 && self.random.random_bool(faults.short_reads) {
            return Ok(self.random.random_range(1..bytes));
        }
        Ok(bytes)
    }
}

impl BlockReader for FaultyReader {
    fn files(&self) -> &[PlacedFile] {
        &self.files
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn waker(&self) -> Waker {
        let control = self.control.clone();
        Arc::new(move || {
            control.lock().woken = true;
            control.0.changed.notify_all();
        })
    }

    fn submit(&mut self, read: BlockRead) {
        // What a disk would refuse, and what the limits forbid, is a fault of the code under test.
        let (span, limits) = (read.buffer.span(), self.limits);
        let block = limits.block_bytes as usize;
        assert!(
            span.bytes > 0
                && span.bytes <= limits.request_bytes_max
                && span.bytes.is_multiple_of(block)
                && read.buffer.pointer().addr().is_multiple_of(block)
                && read.file_offset.is_multiple_of(block as u64)
                && span.offset / limits.border_bytes == (span.end() - 1) / limits.border_bytes,
            "{span:?} at byte {} of the file keeps to {limits:?}",
            read.file_offset
        );
        assert!(
            read.slot < limits.in_flight_max && self.in_flight.iter().all(|r| r.slot != read.slot)
        );
        for other in &self.in_flight {
            let other = other.buffer.span();
            assert!(
                other.end() <= span.offset || span.end() <= other.offset,
                "{span:?} and {other:?} are in flight at once"
            );
        }
        self.in_flight.push(read);
        self.control.lock().submitted += 1;
        self.control.0.changed.notify_all();
    }

    fn wait(&mut self, timeout: Option<Duration>, ended: &mut Vec<BlockReadDone>) {
        let control = self.control.clone();
        let until = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = control.lock();
        while !state.woken && (self.in_flight.is_empty() || self.is_held(&state.faults)) {
            if !self.in_flight.is_empty() && !state.holds {
                state.holds = true;
                control.0.changed.notify_all();
            }
            let Some(until) = until else {
                state = control.wait(state);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = control.wait_for(state, left);
        }
        state.woken = false;
        if self.in_flight.is_empty() || self.is_held(&state.faults) {
            return;
        }
        state.holds = false;
        let before = state.faults.clone();
        drop(state);
        let mut faults = before.clone();
        let count = if faults.reorder {
            self.random.random_range(1..=self.in_flight.len())
        } else {
            1
        };
        for _ in 0..count {
            let next = if faults.reorder {
                self.random.random_range(0..self.in_flight.len())
            } else {
                0
            };
            let read = self.in_flight.remove(next);
            let stalls = self.random.random_bool(faults.stalls);
            let stall = if stalls { STALL } else { Duration::ZERO };
            std::thread::sleep(faults.read_time + stall);
            ended.push(self.finish(read, &mut faults));
        }
        let mut state = control.lock();
        state.completed += count as u64;
        // A test may have changed the faults meanwhile: only what was met goes.
        let State { faults: now, .. } = &mut *state;
        for (now, before, after) in [
            (&mut now.broken_once, before.broken_once, faults.broken_once),
            (
                &mut now.flipped_once,
                before.flipped_once,
                faults.flipped_once,
            ),
        ] {
            now.retain(|offset| !before.contains(offset) || after.contains(offset));
        }
        drop(state);
        control.0.changed.notify_all();
    }

    fn reopen(&mut self, file: usize, expected: &FileIdentity) -> io::Result<()> {
        let mut content = Vec::new();
        open_expected(expected, false)?.read_to_end(&mut content)?;
        self.contents[file] = content;
        self.files[file].identity = expected.clone();
        self.control.change(|faults| faults.stale = false);
        Ok(())
    }
}
