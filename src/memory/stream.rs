//! The copy stream of the emulated device: a queue thread that copies from the host arena to the device arena, in order,
//! at the rate of the link that it stands for.
//!
//! The protocol is that of a CUDA stream: a copy first waits for the event of the last use of its destination, then
//! copies, then records the event that the next use waits for.

#![expect(unsafe_code, reason = "copies between arenas by address")]

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use super::arena::{Arena, Span};
use super::event::Event;
use super::{AbortOnPanic, TransferTotals};

/// Copies that may be queued before `copy` waits for one to end. Callers keep one per ring entry, so they never see this
/// bound; it is here because every queue has one.
pub(super) const COPIES_QUEUED_MAX: usize = 1024;

/// The unit of pacing: long against the precision of a sleep at the rates of real links, short against a group.
const CHUNK_BYTES: usize = 1 << 20;

/// When a copy was under way, waits for the last use of its destination left out.
#[derive(Clone, Copy, Debug)]
pub struct CopyTimes {
    pub began: Instant,
    pub ended: Instant,
}

/// What hears of a copy that is over: its ticket and its times.
pub(super) type OnCopied = Box<dyn Fn(u64, CopyTimes) + Send>;

/// A handle; may be used from any thread. Dropping it waits for every copy.
pub(super) struct CopyStream {
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
    /// each copy's ticket and times, after the copy's event has been recorded; it may call `copy`, and must neither block
    /// nor call `drain`.
    ///
    /// # Errors
    /// The system has no thread left.
    ///
    /// # Panics
    /// When the rate is not above 0.
    pub(super) fn start(
        source: Arc<Arena>,
        destination: Arc<Arena>,
        bytes_per_second: Option<f64>,
        on_done: OnCopied,
    ) -> io::Result<CopyStream> {
        assert!(
            bytes_per_second.is_none_or(|rate| rate > 0.0),
            "a link of {bytes_per_second:?} bytes per second"
        );
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new()
            .name("strata-copy".to_owned())
            .spawn({
                let (source, destination) = (Arc::clone(&source), Arc::clone(&destination));
                let shared = Arc::clone(&shared);
                move || {
                    let _guard = AbortOnPanic;
                    serve(&source, &destination, &shared, bytes_per_second, &on_done);
                }
            })?;
        Ok(CopyStream {
            source,
            destination,
            shared,
            thread_id: thread.thread().id(),
            thread: Some(thread),
        })
    }

    /// Queues a copy and returns the event that is recorded when the destination holds the bytes. From now until then
    /// nobody writes the source; from `after` until then nobody reads or writes the destination.
    ///
    /// # Panics
    /// When the spans differ in length or lie outside their arenas.
    pub(super) fn copy(&self, ticket: u64, source: Span, destination: Span, after: Event) -> Event {
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
    #[cfg(test)]
    pub(super) fn drain(&self) {
        assert!(!self.on_queue_thread(), "drain is not called by on_done");
        let mut state = self.shared.lock();
        while state.outstanding > 0 {
            state = self.shared.wait(state);
        }
    }

    /// Bytes copied, and the time during which a copy was under way (waits for `after` left out).
    pub(super) fn totals(&self) -> TransferTotals {
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
    on_done: &(dyn Fn(u64, CopyTimes) + Send),
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
        let began = Instant::now();
        shared.lock().busy_since = Some(began);
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
        // Under the lock: nobody has been told of a later moment, so what was busy never becomes less.
        let ended = Instant::now();
        state.totals.bytes += copy.source.bytes as u64;
        state.totals.busy += ended - began;
        state.busy_since = None;
        drop(state);
        copy.ready.record();
        on_done(copy.ticket, CopyTimes { began, ended });
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    struct Fixture {
        host: Arc<Arena>,
        device: Arc<Arena>,
        stream: CopyStream,
        done: mpsc::Receiver<u64>,
    }

    /// Two arenas of 8 MiB; byte i of the host's is the number of its page.
    fn fixture(rate: Option<f64>) -> Fixture {
        let host = Arc::new(Arena::new("host", 8 << 20).unwrap());
        let device = Arc::new(Arena::new("device", 8 << 20).unwrap());
        let all = host.allocate_low(8 << 20).unwrap();
        // SAFETY: nothing else uses the arena yet.
        let bytes = unsafe { host.bytes_mut(all) };
        for (page, bytes) in bytes.chunks_mut(4096).enumerate() {
            bytes.fill((page % 251) as u8);
        }
        let (sender, done) = mpsc::channel();
        let stream = CopyStream::start(
            Arc::clone(&host),
            Arc::clone(&device),
            rate,
            Box::new(move |ticket, _| {
                let _ = sender.send(ticket);
            }),
        )
        .unwrap();
        Fixture {
            host,
            device,
            stream,
            done,
        }
    }

    fn span(page: usize, pages: usize) -> Span {
        Span {
            offset: page * 4096,
            bytes: pages * 4096,
        }
    }

    /// The first byte of a device page whose copy is over.
    fn page_value(device: &Arena, page: usize) -> u8 {
        // SAFETY: the tests look only at pages to which no copy is queued.
        let bytes = unsafe { device.bytes(span(page, 1)) };
        bytes[0]
    }

    #[test]
    fn copies_land_where_they_should_and_are_reported_in_order() {
        let Fixture {
            host,
            device,
            stream,
            done,
        } = fixture(None);
        let events: Vec<_> = (0..500u64)
            .map(|ticket| {
                let page = ticket as usize * 2;
                stream.copy(
                    ticket,
                    span(page, 2),
                    span(1998 - page, 2),
                    Event::recorded(),
                )
            })
            .collect();
        stream.drain();
        assert!(events.iter().all(Event::is_complete));
        assert_eq!(
            done.try_iter().collect::<Vec<_>>(),
            (0..500).collect::<Vec<_>>()
        );
        for page in (0..1000).step_by(2) {
            // SAFETY: the stream is drained.
            let (from, to) = unsafe {
                (
                    host.bytes(span(page, 2)),
                    device.bytes(span(1998 - page, 2)),
                )
            };
            assert!(from == to, "page {page}");
        }
        assert_eq!(stream.totals().bytes, 500 * 8192);
    }

    #[test]
    fn a_copy_waits_for_the_last_use_and_those_behind_it_wait_too() {
        let Fixture {
            device,
            stream,
            done,
            ..
        } = fixture(None);
        let last_use = Event::new();
        let first = stream.copy(1, span(5, 1), span(0, 1), last_use.clone());
        let second = stream.copy(2, span(6, 1), span(1, 1), Event::recorded());
        // Time for a stream that does not wait to be caught; one that waits passes however slow the machine is.
        for _ in 0..50 {
            assert!(!first.is_complete() && !second.is_complete());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(page_value(&device, 0), 0);
        assert_eq!(page_value(&device, 1), 0);
        last_use.record();
        second.wait();
        assert!(first.is_complete());
        assert_eq!((page_value(&device, 0), page_value(&device, 1)), (5, 6));
        assert_eq!((done.recv().unwrap(), done.recv().unwrap()), (1, 2));
    }

    #[test]
    fn the_event_comes_before_the_report_and_the_report_may_copy_on() {
        let host = Arc::new(Arena::new("host", 1 << 20).unwrap());
        let device = Arc::new(Arena::new("device", 1 << 20).unwrap());
        let stream: Arc<OnceStream> = Arc::default();
        let (sender, done) = mpsc::channel();
        let for_report = Arc::clone(&stream);
        let started = CopyStream::start(
            host,
            device,
            None,
            Box::new(move |ticket, _| {
                if ticket < 5 {
                    let stream = for_report.0.get().unwrap();
                    stream.copy(ticket + 1, span(0, 1), span(1, 1), Event::recorded());
                }
                sender.send(ticket).unwrap();
            }),
        )
        .unwrap();
        assert!(stream.0.set(started).is_ok());
        let handle = stream.0.get().unwrap();
        let ready = handle.copy(0, span(0, 1), span(1, 1), Event::recorded());
        assert_eq!(done.recv().unwrap(), 0);
        assert!(ready.is_complete());
        handle.drain();
        assert_eq!(done.try_iter().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    }

    #[derive(Default)]
    struct OnceStream(std::sync::OnceLock<CopyStream>);

    #[test]
    fn dropping_the_stream_waits_for_every_copy() {
        let Fixture {
            device,
            stream,
            done,
            ..
        } = fixture(Some(1e9));
        let ready = stream.copy(1, span(0, 1000), span(0, 1000), Event::recorded());
        stream.copy(2, span(7, 1), span(1000, 1), Event::recorded());
        drop(stream);
        assert!(ready.is_complete());
        assert_eq!(page_value(&device, 1000), 7);
        assert_eq!(done.iter().collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn the_link_is_never_faster_than_its_rate() {
        let rate = 400e6;
        let Fixture { stream, .. } = fixture(Some(rate));
        let start = Instant::now();
        let copies = 10;
        for ticket in 0..copies {
            stream.copy(ticket, span(0, 1000), span(0, 1000), Event::recorded());
        }
        stream.drain();
        let least = (copies * 1000 * 4096) as f64 / rate;
        assert!(start.elapsed().as_secs_f64() >= least);
        let totals = stream.totals();
        assert_eq!(totals.bytes, copies * 1000 * 4096);
        assert!(totals.busy_seconds() <= start.elapsed().as_secs_f64());
    }

    /// The pacing without a clock: what is due after given copies.
    #[test]
    fn pace_is_absolute_and_idle_time_is_not_made_up_for() {
        let start = Instant::now() - Duration::from_secs(1000);
        let mut pace = Pace {
            bytes_per_second: Some(1e6),
            free_at: start,
        };
        pace.take(1 << 20);
        pace.take(1_000_000);
        let due = pace.free_at.duration_since(start).as_secs_f64();
        assert!((due - 2.048576).abs() < 1e-6, "{due}");
        // A copy that was queued while the link was busy starts when the link is free.
        pace.start(start + Duration::from_secs(1));
        assert!((pace.free_at.duration_since(start).as_secs_f64() - due).abs() < 1e-9);
        // One that came later starts when it came.
        pace.start(start + Duration::from_secs(10));
        pace.take(1_000_000);
        assert_eq!(pace.free_at, start + Duration::from_secs(11));
    }

    #[test]
    #[should_panic(expected = "one length")]
    fn a_copy_between_spans_of_different_length_is_refused() {
        fixture(None)
            .stream
            .copy(0, span(0, 1), span(0, 2), Event::recorded());
    }
}
