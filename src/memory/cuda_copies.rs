//! Copies from the host arena to the arena on a CUDA device, by the device's copy stream.
//!
//! A copy is given to the stream by the thread that asks for it, at once: the stream waits for the last use of the
//! destination, copies, and records the event that the next use waits for. None of that blocks. A thread of this module
//! waits for each of these events in order and reports the copy, so that its source may be written again.

#![expect(
    unsafe_code,
    reason = "gives a stream addresses of arenas that regions in flight keep alive"
)]

use super::arena::{Arena, Span};
use super::cuda::CudaDevice;
use super::cuda_clock::Moment;
use super::event::Event;
use super::stream::{COPIES_QUEUED_MAX, CopyTimes, OnCopied};
use super::{AbortOnPanic, TransferTotals};
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the stream is given at once. What a step sends, or the host's part of a product, crosses between two pieces and
/// need not wait for a whole group: a third of a millisecond at 25 GB/s, against the microseconds that a piece costs.
const PIECE_BYTES: usize = 8 << 20;

/// A handle; may be used from any thread. Dropping it waits for every copy.
pub(super) struct CudaCopies {
    device: Arc<CudaDevice>,
    /// `None` only while it is dropped. Callers keep to `COPIES_QUEUED_MAX`, so that they never see the channel full.
    queue: Option<SyncSender<Queued>>,
    thread: Option<JoinHandle<()>>,
    totals: Arc<Mutex<Totals>>,
}

/// A copy that the stream has been given.
struct Queued {
    ticket: u64,
    bytes: usize,
    queued: Instant,
    /// The event of the last use of the destination: the copy does not start before it.
    after: Event,
    ready: Event,
    /// Begin and end by the device's clock, where that runs.
    timed: Option<(Moment, Moment)>,
}

#[derive(Default)]
struct Totals {
    done: TransferTotals,
    busy_since: Option<Instant>,
}

impl CudaCopies {
    /// `on_done` is called on the waiting thread with the ticket of each copy that is over, and its times: those of the
    /// device's clock where that runs, and otherwise as this thread sees them. It may start copies and must not block.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(super) fn start(device: Arc<CudaDevice>, on_done: OnCopied) -> io::Result<CudaCopies> {
        let (queue, queued) = sync_channel(COPIES_QUEUED_MAX);
        let totals = Arc::<Mutex<Totals>>::default();
        let thread = std::thread::Builder::new()
            .name("strata-copy".to_owned())
            .spawn({
                let (device, totals) = (Arc::clone(&device), Arc::clone(&totals));
                move || {
                    let _guard = AbortOnPanic;
                    report(&device, &queued, &totals, &on_done);
                }
            })?;
        Ok(CudaCopies {
            device,
            queue: Some(queue),
            thread: Some(thread),
            totals,
        })
    }

    /// Gives the stream a copy and returns the event that is complete when the destination holds the bytes. From now
    /// until then nobody writes the source; from `after` until then nobody uses the destination.
    ///
    /// # Panics
    /// When the spans differ in length or lie outside their arenas.
    pub(super) fn copy(
        &self,
        ticket: u64,
        (source, from): (&Arena, Span),
        (destination, to): (&Arena, Span),
        after: &Event,
    ) -> Event {
        assert_eq!(from.bytes, to.bytes, "one length");
        let queued = Instant::now();
        self.device.copy_waits_for(after);
        let began = self.device.copy_moment();
        for (start, length) in source.locked_and_rest(from) {
            for offset in (start..start + length).step_by(PIECE_BYTES) {
                let bytes = PIECE_BYTES.min(start + length - offset);
                let pointer = source.pointer(from.part(offset, bytes));
                let address = destination.address(to.part(offset, bytes));
                // SAFETY: both spans were found inside their arenas, which regions in flight keep alive; the caller lends
                // the source and the destination until the event below is complete.
                unsafe { self.device.copy_to_device(pointer, address, bytes) };
            }
        }
        let timed = began.zip(self.device.copy_moment());
        let ready = self.device.record_copies();
        let copy = Queued {
            ticket,
            bytes: from.bytes,
            queued,
            after: after.clone(),
            ready: ready.clone(),
            timed,
        };
        let Some(queue) = &self.queue else {
            unreachable!("the stream is in use while it is dropped");
        };
        assert!(queue.send(copy).is_ok(), "the copy thread ended early");
        ready
    }

    /// Bytes copied, and the time during which a copy was under way (waits for last uses left out).
    pub(super) fn totals(&self) -> TransferTotals {
        let totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        let running = totals
            .busy_since
            .map_or(Duration::ZERO, |since| since.elapsed());
        TransferTotals {
            bytes: totals.done.bytes,
            busy: totals.done.busy + running,
        }
    }
}

impl Drop for CudaCopies {
    fn drop(&mut self) {
        self.device.finish_all();
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has ended the process already.
            drop(thread.join());
        }
    }
}

/// The life of the waiting thread: ends when the handle is gone and every copy has been reported.
fn report(
    device: &CudaDevice,
    queued: &Receiver<Queued>,
    totals: &Mutex<Totals>,
    on_done: &(dyn Fn(u64, CopyTimes) + Send),
) {
    let lock = || totals.lock().unwrap_or_else(PoisonError::into_inner);
    // Copies run one after the other: each starts when it was asked for, when the one before is over, or when its
    // destination is free, whichever is last.
    let mut free_since = Instant::now();
    let mut last_ended = free_since;
    for copy in queued {
        if !copy.after.is_complete() {
            device.wait(&copy.after);
            free_since = Instant::now();
        }
        let began = free_since.max(copy.queued);
        lock().busy_since = Some(began);
        device.wait(&copy.ready);
        let mut totals = lock();
        // Under the lock, as on the emulated device: what was busy never becomes less.
        free_since = Instant::now();
        totals.done.bytes += copy.bytes as u64;
        totals.done.busy += free_since - began;
        totals.busy_since = None;
        drop(totals);
        let timed = copy
            .timed
            .and_then(|(began, ended)| Some((device.time_of(&began)?, device.time_of(&ended)?)));
        let (began, ended) = timed.unwrap_or((began, free_since));
        // One after the other, and none before it was asked for, however exact the clocks are.
        let began = began.max(copy.queued).max(last_ended);
        let ended = ended.max(began);
        last_ended = ended;
        on_done(copy.ticket, CopyTimes { began, ended });
    }
}
