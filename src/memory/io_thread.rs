//! The I/O thread: takes tickets, cuts their pieces into requests, keeps many of them in flight, and reports a ticket
//! once, when nothing of it is in flight any more.
//!
//! Requests are issued in the order of tickets and complete in any order. A request that comes back short is resumed
//! from the last block boundary that it reached; one that was interrupted is tried again at once, and one that ended with
//! an error that may pass after a pause, in which the thread goes on with the others. What lasts fails its ticket, whose
//! requests that have not been issued are dropped and whose others are waited for, because the kernel writes to their
//! memory until they end.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::{Arena, Span};
use super::block_reader::{BlockRead, BlockReadDone, BlockReader, Buffer, Limits};
use super::files::{PlacedFile, file_at};
use super::{AbortOnPanic, FileIdentity, ReadRetries, TransferTotals};

/// How often in a row a request is tried again without progress: after a signal, a shortage, or a read that ended
/// inside its first block.
const RETRIES_MAX: u32 = 16;

/// Before the first try again when the kernel says that it lacks something just now; doubled for each further one, up to
/// `SHORTAGE_PAUSE_MAX`.
const SHORTAGE_PAUSE: Duration = Duration::from_micros(100);
const SHORTAGE_PAUSE_MAX: Duration = Duration::from_millis(10);

/// How often a request is tried again that the drive, or the way to it, has failed. Kernels try for long before they give
/// such an error, so what a few more tries do not mend is left to the next step.
pub(super) const ERROR_RETRIES_MAX: u32 = 3;

/// Before the first of them; `ERROR_PAUSE_GROWTH` times as long before each further one: 2, 10 and 50 ms. A computation
/// that waits for the group waits for these too.
const ERROR_PAUSE: Duration = Duration::from_millis(2);
const ERROR_PAUSE_GROWTH: u32 = 5;

/// Errors that say what the descriptor, the request or the permission is: the same request gets them again. A stale
/// handle wants another descriptor.
const LASTING: [i32; 14] = [
    libc::EBADF,
    libc::EFAULT,
    libc::EINVAL,
    libc::EISDIR,
    libc::ESPIPE,
    libc::EOVERFLOW,
    libc::EPERM,
    libc::EACCES,
    libc::ENOSYS,
    libc::EOPNOTSUPP,
    libc::ENXIO,
    libc::ENODEV,
    libc::ESTALE,
    libc::ENOENT,
];

/// A contiguous read from one file. Offset, length and address are multiples of the reader's block; bytes past the end of
/// the file (as it was when opened) need not arrive, and what the span held there may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadPiece {
    /// Among the offsets of all files (`files`).
    pub(super) file_offset: u64,
    pub(super) span: Span,
}

/// How a ticket ended. On success every byte of its pieces that the file has is in place; on failure any of them may be.
#[derive(Debug)]
pub(super) struct ReadDone {
    pub(super) ticket: u64,
    /// Bytes read.
    pub(super) result: Result<u64, ReadError>,
}

/// What to do about a read that the system refused.
fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        // io_uring's answer where a read has to wait and there is no thread that could.
        Some(libc::ECANCELED) => {
            "the system gives no thread for it: raise the limit on threads (the control group's, `ulimit -u`)"
        }
        _ => "test the drive and the file system",
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("open {file}: {source}", file = file.display())]
    Open { file: PathBuf, source: io::Error },
    #[error("io_uring was asked for and cannot be had: {source}")]
    IoUringRefused { source: io::Error },
    #[error(
        "start the I/O threads: {source}; raise the limit on threads (the control group's, `ulimit -u`)"
    )]
    Thread { source: io::Error },
    #[error(
        "read {file}: it ends at byte {offset} and had {bytes_at_open} bytes when it was opened; it shrank while it was \
         in use; restore it, or restart with the new one",
        file = file.display()
    )]
    Truncated {
        file: PathBuf,
        offset: u64,
        bytes_at_open: u64,
    },
    #[error(
        "read {file} at byte {offset}: {source}; {advice}",
        file = file.display(),
        advice = advice(source)
    )]
    Io {
        file: PathBuf,
        offset: u64,
        source: io::Error,
    },
    #[error(
        "read {file} at byte {offset}: {tries} times the drive or the memory returned other bytes than at first; if the \
         file was changed on purpose restart the server, otherwise test the drive and the memory",
        file = file.display()
    )]
    OtherBytes {
        file: PathBuf,
        /// Where what has one checksum begins.
        offset: u64,
        tries: u32,
    },
    #[error(
        "read {file} at byte {offset}: {tries} times other bytes than in an earlier run, although size, time and inode of \
         the file are those of then; if it was changed on purpose delete {checksums} and start again, otherwise test the \
         drive and the memory, or fetch the file anew",
        file = file.display(),
        checksums = checksums.display()
    )]
    OtherBytesThanBefore {
        file: PathBuf,
        offset: u64,
        tries: u32,
        /// The file that the earlier run left.
        checksums: PathBuf,
    },
    #[error("open {file} again: {source}", file = file.display())]
    Reopen { file: PathBuf, source: io::Error },
    #[error("the read was given up")]
    GivenUp,
}

/// What the handle and the thread share.
#[derive(Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    /// A ticket has ended.
    pub(super) changed: Condvar,
    totals: Mutex<Totals>,
}

#[derive(Default)]
pub(super) struct State {
    /// Given and not yet taken by the thread.
    pub(super) queue: VecDeque<(u64, Vec<ReadPiece>)>,
    /// Given and not yet reported: at least the length of `queue`.
    pub(super) outstanding: usize,
    pub(super) stop: bool,
    /// Tickets ever given: the next one's arrival number.
    pub(super) given: u64,
    /// Tickets with lower arrival numbers are wanted no more.
    pub(super) given_up: u64,
    pub(super) reopening: Reopening,
}

/// The way of a wish to open a file again.
#[derive(Default)]
pub(super) enum Reopening {
    #[default]
    No,
    /// Which file, and what it must be.
    Asked(usize, FileIdentity),
    Done(Result<(), ReadError>),
}

#[derive(Default)]
struct Totals {
    done: TransferTotals,
    retries: ReadRetries,
    /// Since when requests have been in flight without a gap.
    busy_since: Option<Instant>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_totals(&self) -> MutexGuard<'_, Totals> {
        self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn totals(&self) -> TransferTotals {
        let totals = self.lock_totals();
        let running = totals
            .busy_since
            .map_or(Duration::ZERO, |since| since.elapsed());
        TransferTotals {
            bytes: totals.done.bytes,
            busy: totals.done.busy + running,
        }
    }

    pub(super) fn retries(&self) -> ReadRetries {
        self.lock_totals().retries
    }
}

pub(super) struct IoThread {
    reader: Box<dyn BlockReader>,
    limits: Limits,
    arena: Arc<Arena>,
    shared: Arc<Shared>,
    on_done: Box<dyn Fn(ReadDone) + Send>,
    /// By arrival number: tickets may bear equal numbers.
    tickets: HashMap<u64, Ticket>,
    arrivals: u64,
    /// Tickets with lower arrival numbers have been given up.
    given_up: u64,
    /// Arrival numbers of tickets that have requests to issue, in order. Only the first has issued any.
    unissued: VecDeque<u64>,
    slots: Vec<Option<Request>>,
    free: Vec<u32>,
    /// Requests that are tried again later, in no order. They hold no slot, and count as in flight for their tickets.
    delayed: Vec<Delayed>,
}

struct Delayed {
    due: Instant,
    request: Request,
    buffer: Buffer,
}

struct Ticket {
    number: u64,
    /// What has not been issued yet.
    pieces: VecDeque<Run>,
    in_flight: u32,
    bytes: u64,
    error: Option<ReadError>,
}

/// A piece or the rest of one, cut at the end of its file.
struct Run {
    file: usize,
    /// Within this file, as in what comes of it.
    file_offset: u64,
    span: Span,
    /// Bytes that the file has of it: at most `span.bytes`.
    needed: usize,
}

/// A request in flight.
struct Request {
    arrival: u64,
    file: usize,
    file_offset: u64,
    needed: usize,
    /// Tries without progress that say nothing of the drive.
    retries: u32,
    /// Tries that the drive failed.
    failures: u32,
}

impl IoThread {
    pub(super) fn new(
        reader: Box<dyn BlockReader>,
        arena: Arc<Arena>,
        shared: Arc<Shared>,
        on_done: Box<dyn Fn(ReadDone) + Send>,
    ) -> IoThread {
        let limits = reader.limits();
        IoThread {
            limits,
            reader,
            arena,
            shared,
            on_done,
            tickets: HashMap::new(),
            arrivals: 0,
            given_up: 0,
            unissued: VecDeque::new(),
            slots: (0..limits.in_flight_max).map(|_| None).collect(),
            free: (0..limits.in_flight_max).rev().collect(),
            delayed: Vec::new(),
        }
    }

    /// Serves until it is told to stop and every ticket has been reported.
    pub(super) fn run(mut self) {
        let _guard = AbortOnPanic;
        let mut ended = Vec::new();
        loop {
            let stop = self.take_tickets();
            self.try_again();
            self.issue();
            self.note_busy();
            if self.tickets.is_empty() {
                self.reopen();
                let state = self.shared.lock();
                if stop && state.queue.is_empty() {
                    return;
                }
            }
            self.reader.wait(self.until_next_try(), &mut ended);
            for done in ended.drain(..) {
                self.complete(done);
            }
        }
    }

    /// Takes what was given since the last time, and gives up what nobody wants. True when the thread is to stop.
    fn take_tickets(&mut self) -> bool {
        let mut state = self.shared.lock();
        for (number, pieces) in state.queue.drain(..) {
            let pieces = pieces
                .into_iter()
                .filter_map(|piece| self.run_of(piece))
                .collect();
            let ticket = Ticket {
                number,
                pieces,
                in_flight: 0,
                bytes: 0,
                error: None,
            };
            self.tickets.insert(self.arrivals, ticket);
            self.unissued.push_back(self.arrivals);
            self.arrivals += 1;
        }
        let stop = state.stop;
        let given_up = if stop { u64::MAX } else { state.given_up };
        drop(state);
        if given_up > self.given_up {
            let unwanted = |(arrival, _): &(&u64, &mut Ticket)| **arrival < given_up;
            for (_, ticket) in self.tickets.iter_mut().filter(unwanted) {
                ticket.fail(ReadError::GivenUp);
            }
            self.given_up = given_up;
        }
        stop
    }

    /// A piece without what lies past the end of its file, or None where the file has nothing of it.
    fn run_of(&self, piece: ReadPiece) -> Option<Run> {
        let files = self.reader.files();
        let file = file_at(files, piece.file_offset);
        let PlacedFile { identity, base } = &files[file];
        let file_offset = piece.file_offset - base;
        let in_file = identity.bytes.saturating_sub(file_offset);
        let needed = usize::try_from(in_file)
            .unwrap_or(usize::MAX)
            .min(piece.span.bytes);
        let bytes = needed.next_multiple_of(self.limits.block_bytes as usize);
        (needed > 0).then(|| Run {
            file,
            file_offset,
            span: piece.span.part(0, bytes),
            needed,
        })
    }

    /// Issues requests, oldest ticket first, until the slots or the tickets are used up.
    fn issue(&mut self) {
        while let Some(&arrival) = self.unissued.front() {
            let Some(ticket) = self.tickets.get_mut(&arrival) else {
                unreachable!("ticket {arrival} is kept while it has requests to issue");
            };
            let Some(run) = ticket.pieces.front_mut() else {
                self.unissued.pop_front();
                self.report_if_over(arrival);
                continue;
            };
            let Some(slot) = self.free.pop() else {
                return;
            };
            let (request, span) = cut_request(run, arrival, &self.limits);
            if run.needed == 0 {
                ticket.pieces.pop_front();
            }
            ticket.in_flight += 1;
            self.submit(slot, request, Buffer::new(Arc::clone(&self.arena), span));
        }
    }

    /// Opens a file again where that was asked for. Nothing is in flight.
    fn reopen(&mut self) {
        let state = self.shared.lock();
        let Reopening::Asked(file, expected) = &state.reopening else {
            return;
        };
        let (file, expected) = (*file, expected.clone());
        drop(state);
        let result = self.reader.reopen(file, &expected);
        let result = result.map_err(|source| ReadError::Reopen {
            file: expected.path,
            source,
        });
        self.shared.lock().reopening = Reopening::Done(result);
        self.shared.changed.notify_all();
    }

    /// Submits the delayed requests that are due, while there are slots, and gives up those of tickets that have failed.
    fn try_again(&mut self) {
        if self.delayed.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut index = 0;
        while let Some(delayed) = self.delayed.get(index) {
            let arrival = delayed.request.arrival;
            let Some(ticket) = self.tickets.get_mut(&arrival) else {
                unreachable!("ticket {arrival} is kept while a request of it is delayed");
            };
            if ticket.error.is_some() {
                self.delayed.swap_remove(index);
                ticket.in_flight -= 1;
                self.report_if_over(arrival);
            } else if delayed.due <= now
                && let Some(slot) = self.free.pop()
            {
                let delayed = self.delayed.swap_remove(index);
                self.submit(slot, delayed.request, delayed.buffer);
            } else {
                index += 1;
            }
        }
    }

    /// How long a completion may be waited for: `None`: for ever, nothing could be submitted before one.
    fn until_next_try(&self) -> Option<Duration> {
        if self.free.is_empty() {
            return None;
        }
        let due = self.delayed.iter().map(|delayed| delayed.due).min()?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    fn submit(&mut self, slot: u32, request: Request, buffer: Buffer) {
        let read = BlockRead {
            slot,
            file: request.file,
            file_offset: request.file_offset,
            buffer,
        };
        self.slots[slot as usize] = Some(request);
        self.reader.submit(read);
    }

    /// A request has ended: it is done, resumed, tried again, or fails its ticket.
    fn complete(&mut self, done: BlockReadDone) {
        let BlockReadDone {
            slot,
            mut buffer,
            result,
        } = done;
        let Some(mut request) = self.slots[slot as usize].take() else {
            unreachable!("slot {slot} ends once");
        };
        let Some(ticket) = self.tickets.get_mut(&request.arrival) else {
            unreachable!("ticket {} is kept while it is in flight", request.arrival);
        };
        let mut arrived = |bytes: usize| {
            ticket.bytes += bytes as u64;
            self.shared.lock_totals().done.bytes += bytes as u64;
        };
        let failure = match result {
            Ok(bytes) if bytes >= request.needed => {
                arrived(bytes.min(buffer.span().bytes));
                None
            }
            Ok(bytes) => {
                let whole = bytes - bytes % self.limits.block_bytes as usize;
                let offset = request.file_offset + bytes as u64;
                arrived(whole);
                buffer.advance(whole);
                request.file_offset += whole as u64;
                request.needed -= whole;
                request.retries = if whole > 0 { 0 } else { request.retries + 1 };
                // At the end of a file a read gives 0 bytes, or the same part of a block however often it is tried.
                let ends_here = bytes == 0 || request.retries > RETRIES_MAX;
                if ticket.error.is_none() && !ends_here {
                    self.shared.lock_totals().retries.short_reads += 1;
                    return self.submit(slot, request, buffer);
                }
                let identity = &self.reader.files()[request.file].identity;
                Some(ReadError::Truncated {
                    file: identity.path.clone(),
                    offset,
                    bytes_at_open: identity.bytes,
                })
            }
            Err(source) => {
                let failures_before = request.failures;
                let pause = request.pause_after(&source);
                if let Some(pause) = pause.filter(|_| ticket.error.is_none()) {
                    if pause.is_zero() {
                        return self.submit(slot, request, buffer);
                    }
                    tracing::debug!(
                        %source,
                        offset = request.file_offset,
                        ?pause,
                        "a read failed and is tried again"
                    );
                    // A shortage says nothing of the drive.
                    if request.failures > failures_before {
                        self.shared.lock_totals().retries.errors += 1;
                    }
                    self.free.push(slot);
                    let due = Instant::now() + pause;
                    self.delayed.push(Delayed {
                        due,
                        request,
                        buffer,
                    });
                    return;
                }
                Some(ReadError::Io {
                    file: self.reader.files()[request.file].identity.path.clone(),
                    offset: request.file_offset,
                    source,
                })
            }
        };
        self.free.push(slot);
        ticket.in_flight -= 1;
        if let Some(failure) = failure {
            ticket.fail(failure);
        }
        self.report_if_over(request.arrival);
    }

    /// Reports a ticket that has nothing in flight and nothing to issue.
    fn report_if_over(&mut self, arrival: u64) {
        let over = |ticket: &Ticket| ticket.in_flight == 0 && ticket.pieces.is_empty();
        if !self.tickets.get(&arrival).is_some_and(over) {
            return;
        }
        let Some(ticket) = self.tickets.remove(&arrival) else {
            return;
        };
        if self.unissued.front() == Some(&arrival) {
            self.unissued.pop_front();
        }
        (self.on_done)(ReadDone {
            ticket: ticket.number,
            result: match ticket.error {
                Some(error) => Err(error),
                None => Ok(ticket.bytes),
            },
        });
        self.shared.lock().outstanding -= 1;
        self.shared.changed.notify_all();
    }

    /// Starts or stops the clock of the time with requests in flight.
    fn note_busy(&mut self) {
        let busy = self.free.len() < self.slots.len();
        let mut totals = self.shared.lock_totals();
        match (busy, totals.busy_since) {
            (true, None) => totals.busy_since = Some(Instant::now()),
            (false, Some(since)) => {
                totals.done.busy += since.elapsed();
                totals.busy_since = None;
            }
            _ => {}
        }
    }
}

impl Ticket {
    /// What of it was not issued never is. The first failure is the one to tell.
    fn fail(&mut self, failure: ReadError) {
        self.error.get_or_insert(failure);
        self.pieces.clear();
    }
}

impl Request {
    /// After an error: how long to wait before the request is tried again, or `None`: it has failed.
    fn pause_after(&mut self, error: &io::Error) -> Option<Duration> {
        let shortage = [libc::EAGAIN, libc::ENOMEM, libc::ENOBUFS].map(Some);
        if error.kind() == io::ErrorKind::Interrupted {
            self.retries += 1;
            (self.retries <= RETRIES_MAX).then_some(Duration::ZERO)
        } else if shortage.contains(&error.raw_os_error()) {
            self.retries += 1;
            let pause = SHORTAGE_PAUSE * (1 << (self.retries - 1).min(RETRIES_MAX));
            (self.retries <= RETRIES_MAX).then(|| pause.min(SHORTAGE_PAUSE_MAX))
        } else if error
            .raw_os_error()
            .is_some_and(|code| LASTING.contains(&code))
        {
            None
        } else {
            self.failures += 1;
            (self.failures <= ERROR_RETRIES_MAX)
                .then(|| ERROR_PAUSE * ERROR_PAUSE_GROWTH.pow(self.failures - 1))
        }
    }
}

/// Cuts the first request off a run: no longer than a request may be, and not across a border of registered memory.
fn cut_request(run: &mut Run, arrival: u64, limits: &Limits) -> (Request, Span) {
    let to_border = limits.border_bytes - run.span.offset % limits.border_bytes;
    let bytes = run.span.bytes.min(limits.request_bytes_max).min(to_border);
    let request = Request {
        arrival,
        file: run.file,
        file_offset: run.file_offset,
        needed: run.needed.min(bytes),
        retries: 0,
        failures: 0,
    };
    let span = run.span.part(0, bytes);
    run.span = run.span.part(bytes, run.span.bytes - bytes);
    run.file_offset += bytes as u64;
    run.needed -= request.needed;
    (request, span)
}

#[cfg(test)]
mod tests;
