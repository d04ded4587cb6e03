//! The I/O thread: takes tickets, cuts their pieces into requests, keeps many of them in flight, and reports a ticket
//! once, when nothing of it is in flight any more.
//!
//! Requests are issued in the order of tickets and complete in any order. A request that comes back short is resumed
//! from the last block boundary that it reached; one that was interrupted is tried again; any other failure fails its
//! ticket, whose requests that have not been issued are dropped and whose others are waited for, because the kernel
//! writes to their memory until they end.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::arena::{Arena, Span};
use super::block_reader::{BlockRead, BlockReadDone, BlockReader, Buffer, Limits};
use super::{AbortOnPanic, TransferTotals};

/// How often in a row a request is tried again without progress: after a signal, a shortage, or a read that ended
/// inside its first block.
const RETRIES_MAX: u32 = 16;

/// Before the first try again when the kernel says that it lacks something just now; doubled for each further one, up to
/// `RETRY_PAUSE_MAX`.
const RETRY_PAUSE: Duration = Duration::from_micros(100);
const RETRY_PAUSE_MAX: Duration = Duration::from_millis(10);

/// A contiguous read. Offset, length and address are multiples of the reader's block; bytes past the end of the file (as
/// it was when opened) need not arrive, and what the span held there may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadPiece {
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

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("open {file}: {source}", file = file.display())]
    Open { file: PathBuf, source: io::Error },
    #[error("io_uring was asked for and cannot be had: {source}")]
    IoUringRefused { source: io::Error },
    #[error("start the I/O threads: {source}")]
    Thread { source: io::Error },
    #[error(
        "read {file}: it ends at byte {offset} and had {bytes_at_open} bytes when it was opened; it shrank while it was \
         in use",
        file = file.display()
    )]
    Truncated {
        file: PathBuf,
        offset: u64,
        bytes_at_open: u64,
    },
    #[error("read {file} at byte {offset}: {source}", file = file.display())]
    Io {
        file: PathBuf,
        offset: u64,
        source: io::Error,
    },
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
}

#[derive(Default)]
struct Totals {
    done: TransferTotals,
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
}

pub(super) struct IoThread {
    reader: Box<dyn BlockReader>,
    limits: Limits,
    file_bytes: u64,
    arena: Arc<Arena>,
    shared: Arc<Shared>,
    on_done: Box<dyn Fn(ReadDone) + Send>,
    /// By arrival number: tickets may bear equal numbers.
    tickets: HashMap<u64, Ticket>,
    arrivals: u64,
    /// Arrival numbers of tickets that have requests to issue, in order. Only the first has issued any.
    unissued: VecDeque<u64>,
    slots: Vec<Option<Request>>,
    free: Vec<u32>,
}

struct Ticket {
    number: u64,
    /// What has not been issued yet.
    pieces: VecDeque<Run>,
    in_flight: u32,
    bytes: u64,
    error: Option<ReadError>,
}

/// A piece or the rest of one, cut at the end of the file.
struct Run {
    file_offset: u64,
    span: Span,
    /// Bytes that the file has of it: at most `span.bytes`.
    needed: usize,
}

/// A request in flight.
struct Request {
    arrival: u64,
    file_offset: u64,
    needed: usize,
    retries: u32,
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
            file_bytes: reader.file().bytes,
            reader,
            arena,
            shared,
            on_done,
            tickets: HashMap::new(),
            arrivals: 0,
            unissued: VecDeque::new(),
            slots: (0..limits.in_flight_max).map(|_| None).collect(),
            free: (0..limits.in_flight_max).rev().collect(),
        }
    }

    /// Serves until it is told to stop and every ticket has been reported.
    pub(super) fn run(mut self) {
        let _guard = AbortOnPanic;
        let mut ended = Vec::new();
        loop {
            let stop = self.take_tickets();
            self.issue();
            self.note_busy();
            if self.tickets.is_empty() {
                let state = self.shared.lock();
                if stop && state.queue.is_empty() {
                    return;
                }
            }
            self.reader.wait(&mut ended);
            for done in ended.drain(..) {
                self.complete(done);
            }
        }
    }

    /// Takes what was given since the last time. True when the thread is to stop.
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
        state.stop
    }

    /// A piece without what lies past the end of the file, or None where the file has nothing of it.
    fn run_of(&self, piece: ReadPiece) -> Option<Run> {
        let in_file = self.file_bytes.saturating_sub(piece.file_offset);
        let needed = usize::try_from(in_file)
            .unwrap_or(usize::MAX)
            .min(piece.span.bytes);
        let bytes = needed.next_multiple_of(self.limits.block_bytes as usize);
        (needed > 0).then(|| Run {
            file_offset: piece.file_offset,
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

    fn submit(&mut self, slot: u32, request: Request, buffer: Buffer) {
        let read = BlockRead {
            slot,
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
                    return self.submit(slot, request, buffer);
                }
                Some(ReadError::Truncated {
                    file: self.reader.file().path.clone(),
                    offset,
                    bytes_at_open: self.file_bytes,
                })
            }
            Err(source) => {
                request.retries += 1;
                let passes = matches!(
                    source.kind(),
                    io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
                );
                if passes && ticket.error.is_none() && request.retries <= RETRIES_MAX {
                    if source.kind() == io::ErrorKind::WouldBlock {
                        let pause = RETRY_PAUSE * (1 << (request.retries - 1));
                        std::thread::sleep(pause.min(RETRY_PAUSE_MAX));
                    }
                    return self.submit(slot, request, buffer);
                }
                Some(ReadError::Io {
                    file: self.reader.file().path.clone(),
                    offset: request.file_offset,
                    source,
                })
            }
        };
        self.free.push(slot);
        ticket.in_flight -= 1;
        if let Some(failure) = failure {
            // The first failure is the one to tell.
            ticket.error.get_or_insert(failure);
            ticket.pieces.clear();
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

/// Cuts the first request off a run: no longer than a request may be, and not across a border of registered memory.
fn cut_request(run: &mut Run, arrival: u64, limits: &Limits) -> (Request, Span) {
    let to_border = limits.border_bytes - run.span.offset % limits.border_bytes;
    let bytes = run.span.bytes.min(limits.request_bytes_max).min(to_border);
    let request = Request {
        arrival,
        file_offset: run.file_offset,
        needed: run.needed.min(bytes),
        retries: 0,
    };
    let span = run.span.part(0, bytes);
    run.span = run.span.part(bytes, run.span.bytes - bytes);
    run.file_offset += bytes as u64;
    run.needed -= request.needed;
    (request, span)
}

#[cfg(test)]
mod tests;
