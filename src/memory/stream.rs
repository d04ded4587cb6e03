//! The copy stream of the emulated device: a queue thread that copies from the host arena to the device arena, in order,
//! at the rate of the link that it stands for.
//!
//! The protocol is that of a CUDA stream: a copy first waits for the event of the last use of its destination, then
//! copies, then records the event that the next use waits for.

#![expect(unsafe_code, reason = "copies between arenas by address")]

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use super::arena::{Arena, Span};
use super::event::Event;
use super::{AbortOnPanic, TransferTotals};

/// Copies that may be queued before `copy` waits for one to end. Callers keep one per ring entry, so they never see this
/// bound; it is here because every queue has one.
pub const COPIES_QUEUED_MAX: usize = 1024;

/// The unit of pacing: long against the precision of a sleep at the rates of real links, short against a group.
const CHUNK_BYTES: usize = 1 << 20;

/// A handle; may be used from any thread. Dropping it waits for every copy.
pub struct CopyStream {
    source: Arc<Arena>,
    destination: Arc<Arena>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    thread_id: ThreadId,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// A copy was queued or has ended, or the thread is to stop.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Copy>,
    /// Given and not yet reported: the queue and the copy under way.
    outstanding: usize,
    stop: bool,
    totals: TransferTotals,
    busy_since: Option<Instant>,
}

struct Copy {
    ticket: u64,
    source: Span,
    destination: Span,
    after: Event,
    ready: Event,
    queued: Instant,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl CopyStream {
    /// Starts the queue thread. Without a rate it copies as fast as memory goes. `on_done` is called on the thread with
    /// each copy's ticket, after the copy's event has been recorded; it may call `copy`, and must neither block nor call
    /// `drain`.
    ///
    /// # Panics
    /// When the rate is not above 0, or the system has no thread left.
    pub fn start(
        source: Arc<Arena>,
        destination: Arc<Arena>,
        bytes_per_second: Option<f64>,
        on_done: Box<dyn Fn(u64) + Send>,
    ) -> CopyStream {
        assert!(
            bytes_per_second.is_none_or(|rate| rate > 0.0),
            "a link of {bytes_per_second:?} bytes per second"
        );
        let shared = Arc::new(Shared::default());
        let thread = std::thread::spawn({
            let (source, destination) = (Arc::clone(&source), Arc::clone(&destination));
            let shared = Arc::clone(&shared);
            move || {
                let _guard = AbortOnPanic;
                serve(&source, &destination, &shared, bytes_per_second, &on_done);
            }
        });
        CopyStream {
            source,
            destination,
            shared,
            thread_id: thread.thread().id(),
            thread: Some(thread),
        }
    }

    /// Queues a copy and returns the event that is recorded when the destination holds the bytes. From now until then
    /// nobody writes the source; from `after` until then nobody reads or writes the destination.
    ///
    /// # Panics
    /// When the spans differ in length or lie outside their arenas.
    pub fn copy(&self, ticket: u64, source: Span, destination: Span, after: Event) -> Event {
        assert_eq!(source.bytes, destination.bytes, "one length");
        self.source.pointer(source);
        self.destination.pointer(destination);
        let ready = Event::new();
        let mut state = self.shared.lock();
        // On the queue thread itself, in `on_done`, waiting would be for ever; there one copy goes as one comes.
        while state.outstanding >= COPIES_QUEUED_MAX && !self.on_queue_thread() {
            state = self.shared.wait(state);
        }
        state.outstanding += 1;
        state.queue.push_back(Copy {
            ticket,
            source,
            destination,
            after,
            ready: ready.clone(),
            queued: Instant::now(),
        });
        drop(state);
        self.shared.changed.notify_all();
        ready
    }

    /// Waits until every copy given so far, and every copy given meanwhile, has been reported.
    pub fn drain(&self) {
        assert!(!self.on_queue_thread(), "drain is not called by on_done");
        let mut state = self.shared.lock();
        while state.outstanding > 0 {
            state = self.shared.wait(state);
        }
    }

    /// Bytes copied, and the time during which a copy was under way (waits for `after` left out).
    pub fn totals(&self) -> TransferTotals {
        let state = self.shared.lock();
        let running = state
            .busy_since
            .map_or(Duration::ZERO, |since| since.elapsed());
        TransferTotals {
            bytes: state.totals.bytes,
            busy: state.totals.busy + running,
        }
    }

    fn on_queue_thread(&self) -> bool {
        std::thread::current().id() == self.thread_id
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        let on_queue_thread = self.on_queue_thread();
        if let Some(thread) = self.thread.take().filter(|_| !on_queue_thread) {
            // A thread that panicked has ended the process already.
            drop(thread.join());
        }
    }
}

/// The life of the queue thread: ends when it is told to stop and nothing is queued.
fn serve(
    source: &Arena,
    destination: &Arena,
    shared: &Shared,
    bytes_per_second: Option<f64>,
    on_done: &(dyn Fn(u64) + Send),
) {
    sleep_precisely();
    let mut pace = Pace::new(bytes_per_second);
    loop {
        let mut state = shared.lock();
        let copy = loop {
            match state.queue.pop_front() {
                Some(copy) => break copy,
                None if state.stop => return,
                None => state = shared.wait(state),
            }
        };
        drop(state);
        let ready_at = if copy.after.is_complete() {
            copy.queued
        } else {
            copy.after.wait();
            Instant::now()
        };
        shared.lock().busy_since = Some(Instant::now());
        pace.start(ready_at);
        for offset in (0..copy.source.bytes).step_by(CHUNK_BYTES) {
            let bytes = CHUNK_BYTES.min(copy.source.bytes - offset);
            copy_bytes(
                source,
                copy.source.part(offset, bytes),
                destination,
                copy.destination.part(offset, bytes),
            );
            pace.take(bytes);
        }
        let mut state = shared.lock();
        state.totals.bytes += copy.source.bytes as u64;
        if let Some(since) = state.busy_since.take() {
            state.totals.busy += since.elapsed();
        }
        drop(state);
        copy.ready.record();
        on_done(copy.ticket);
        shared.lock().outstanding -= 1;
        shared.changed.notify_all();
    }
}

fn copy_bytes(source: &Arena, from: Span, destination: &Arena, to: Span) {
    debug_assert_eq!(from.bytes, to.bytes);
    let (from_pointer, to_pointer) = (source.pointer(from), destination.pointer(to));
    // SAFETY: `pointer` checked that each span lies inside its arena, and both arenas are borrowed; u8 needs no alignment.
    // By the contract of `CopyStream::copy` nobody else writes the source or touches the destination meanwhile. `copy`,
    // not `copy_nonoverlapping`: the arenas may be one and the same.
    unsafe { std::ptr::copy(from_pointer, to_pointer, from.bytes) };
}

/// The time at which the link would have moved what was copied so far. It is kept absolutely, so that a sleep that
/// lasted too long is made up for by the next: the average rate is exact.
struct Pace {
    bytes_per_second: Option<f64>,
    /// When the link is free.
    free_at: Instant,
}

impl Pace {
    fn new(bytes_per_second: Option<f64>) -> Pace {
        Pace {
            bytes_per_second,
            free_at: Instant::now(),
        }
    }

    /// A copy could start at `ready_at`: until then the link was idle, which is not made up for.
    fn start(&mut self, ready_at: Instant) {
        self.free_at = self.free_at.max(ready_at);
    }

    /// Sleeps until the link has moved that many bytes more.
    fn take(&mut self, bytes: usize) {
        let Some(rate) = self.bytes_per_second else {
            return;
        };
        self.free_at += Duration::from_secs_f64(bytes as f64 / rate);
        std::thread::sleep(self.free_at.saturating_duration_since(Instant::now()));
    }
}

/// Asks the kernel to end this thread's sleeps within a microsecond of their time rather than fifty.
fn sleep_precisely() {
    // SAFETY: sets a number of the calling thread; no memory is involved. A refusal costs precision only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000usize) };
}
