//! All raw memory and I/O: arenas, the storage reader, CUDA devices and their streams, the copy stream of the emulated
//! device, mapped files. And, for when memory runs out, what the process is doing (`phase`).
//!
//! The rest of the program sees regions (owned ranges of an arena), tickets (numbers of its own choosing) and callbacks;
//! it never sees a file descriptor or a ring. A `RegionReader` brings bytes from the model's files into a region, a
//! `RegionCopies` takes them from one arena to another, and each gives the regions back when the bytes are there.
//!
//! Threads: one I/O thread per reader (it owns the io_uring), one thread per copy stream (on the emulated device it copies,
//! on a CUDA device it waits for copies to end), and four reading threads where the reader had to step down to
//! `pread`. Handles may be used from any thread. Callbacks run on the thread that did
//! the work and must not block.
//!
//! Inside the module `Reader` and `CopyStream` work on spans, which say where and not whose: a span that is handed to
//! them belongs to that operation until its callback (or its event) says that it is over. Regions are what keeps that
//! promise, so only regions leave the module.

mod arena;
mod block_reader;
mod crossing;
mod cuda;
mod cuda_clock;
mod cuda_copies;
mod cuda_event;
mod device_address;
mod event;
mod faulty;
mod files;
mod heap;
mod io_thread;
mod io_uring;
mod ladder;
mod mapped;
mod phase;
mod pread;
mod reader;
mod region;
mod stream;

pub use arena::{Arena, MemoryError, SPAN_ALIGNMENT, Span};
pub use block_reader::{
    BlockRead, BlockReadDone, BlockReader, Buffer, FileIdentity, Limits, MAX_BLOCK_BYTES, Waker,
    logical_block_bytes, open_expected,
};
pub use crossing::Crossing;
pub use cuda::{CudaDevice, CudaError, DEVICE_RESERVE_BYTES, find_cuda_driver, in_words};
pub use cuda_clock::Moment;
pub use device_address::DeviceAddress;
pub use event::Event;
pub use faulty::{FaultControl, Faults, FaultyReader};
pub use files::{FilePlace, PlacedFile, file_at};
pub use heap::{CountingHeap, heap_live_bytes, heap_peak_bytes, restart_heap_peak};
pub use io_thread::ReadError;
pub use ladder::{ReaderChoice, Requests, Rung};
pub use mapped::MappedFiles;
pub use phase::{Phase, StepScope};
pub use region::{
    Ordered, Region, RegionCopied, RegionCopies, RegionPiece, RegionRead, RegionReader,
};
pub use stream::CopyTimes;

use std::time::Duration;

/// What went over one way between tiers since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TransferTotals {
    /// Bytes moved, alignment included.
    pub bytes: u64,
    /// Time during which at least one transfer was under way.
    pub busy: Duration,
}

impl TransferTotals {
    pub fn busy_seconds(&self) -> f64 {
        self.busy.as_secs_f64()
    }
}

/// Requests that were given to the drive again, since the file was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadRetries {
    /// After an error of the drive that may pass; what the kernel lacked for a moment does not count.
    pub errors: u64,
    /// For the rest of a read that came back short.
    pub short_reads: u64,
}

/// Ends the process when a thread that brings weights unwinds. Such a thread owes its callers completions that nobody else
/// can give: without it every later step would wait for ever, so an end with the panic's message is the better one.
pub struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}
