//! What the engine thread, the I/O thread and the copy thread share: the pipeline, the ring entries that nobody owns
//! at the moment, and the way to start the next read or copy. A CUDA copy is given to its stream by whoever starts it.
//!
//! Lock order: one mutex, `state`. Starting a read or a copy is a push onto a queue whose bound exceeds everything
//! that can be outstanding, so nobody blocks while holding it; but for a CUDA copy from memory that could not be locked to its
//! pages, which the driver may make its caller wait for.

use super::pipeline::{Action, Entry, Pipeline, Poll, StartCopy, Streamed};
use super::verify::Verifier;
use super::{Home, streams};
use crate::memory::{
    Event, FileIdentity, Ordered, ReadError, ReadRetries, Region, RegionCopied, RegionCopies,
    RegionPiece, RegionRead, RegionReader, Rung, TransferTotals, logical_block_bytes,
};
use crate::metrics::Metrics;
use crate::placement::{Executor, Group, GroupId, Plan};
use crate::trace::{Reads, Trace};
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The width that fetching is for before the first step, which is a prompt.
pub(super) const FIRST_WIDTH: u32 = u32::MAX;

/// Between two looks for whether a step is still wanted, while it waits for a group.
const CANCEL_LOOK_PAUSE: Duration = Duration::from_millis(10);

/// Tickets of reads and copies that someone waits for in person, apart from the pipeline's positions.
const DIRECT: u64 = 1 << 63;

/// The ways that bytes move. Dropped by the owner of `Weights`, never by a callback: dropping joins the threads.
pub(super) struct Links {
    // Dropped first: then nothing more comes to the verifier.
    pub(super) reader: RegionReader,
    /// Where reads are verified.
    pub(super) _verifier: Option<Verifier>,
    /// Where there is a device.
    pub(super) stream: Option<RegionCopies>,
}

/// A device ring entry at rest.
struct DeviceEntry {
    region: Region,
    /// Completed when the last use of the entry's bytes is over; the next copy waits for it.
    last_use: Event,
    /// Completed when the entry holds its group; on a device that orders its own work, perhaps later.
    ready: Event,
}

impl DeviceEntry {
    fn idle(region: Region, last_use: Event) -> DeviceEntry {
        DeviceEntry {
            region,
            last_use,
            ready: Event::recorded(),
        }
    }
}

struct State {
    pipeline: Pipeline,
    /// The pipeline's order is that of narrow steps (`Plan::is_narrow`).
    is_narrow: bool,
    host_entries: Vec<Option<Region>>,
    device_entries: Vec<Option<DeviceEntry>>,
    failures: HashMap<u64, ReadError>,
    reads_landed: HashMap<u64, RegionRead>,
    copies_landed: HashMap<u64, RegionCopied>,
    next_direct: u64,
    /// Which groups direct reads bring; rows are in none.
    direct_groups: HashMap<u64, GroupId>,
    links: Option<Links>,
    /// What the metrics already hold.
    published: Published,
    trace: Trace,
    traced_reads: Reads,
}

#[derive(Default)]
struct Published {
    read: TransferTotals,
    copied: TransferTotals,
    retries: ReadRetries,
}

pub(super) struct Shared {
    plan: Arc<Plan>,
    /// Set once, when the resident groups are loaded; nothing streams before.
    homes: OnceLock<Vec<Home>>,
    state: Mutex<State>,
    /// Notified whenever something lands.
    landed: Condvar,
}

/// A streamed group that computation may use now.
pub(super) struct Taken {
    pub(super) position: u64,
    pub(super) region: Region,
    /// What a device's computation has to wait for.
    pub(super) ready: Event,
    /// `Some` where computation had to wait.
    pub(super) waited: Option<Duration>,
}

impl Shared {
    pub(super) fn new(
        plan: Arc<Plan>,
        pipeline: Pipeline,
        host_entries: Vec<Region>,
        device_entries: Vec<Region>,
    ) -> Shared {
        let at_rest = |region| Some(DeviceEntry::idle(region, Event::recorded()));
        Shared {
            plan: Arc::clone(&plan),
            homes: OnceLock::new(),
            state: Mutex::new(State {
                is_narrow: plan.is_narrow(FIRST_WIDTH),
                pipeline,
                host_entries: host_entries.into_iter().map(Some).collect(),
                device_entries: device_entries.into_iter().map(at_rest).collect(),
                failures: HashMap::new(),
                reads_landed: HashMap::new(),
                copies_landed: HashMap::new(),
                next_direct: DIRECT,
                direct_groups: HashMap::new(),
                links: None,
                published: Published::default(),
                trace: Trace::off(),
                traced_reads: Reads::default(),
            }),
            landed: Condvar::new(),
        }
    }

    /// A panic while the lock is held is a bug that the engine reports; the state is consistent between statements
    /// that matter, and what remains is to drain and drop.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.landed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Until something lands, or it is time to ask whether the step is still wanted.
    fn wait_briefly<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let landed = self.landed.wait_timeout(state, CANCEL_LOOK_PAUSE);
        landed.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Performs what the pipeline wants started.
    fn start(&self, state: &mut State) {
        if let Some(homes) = self.homes.get() {
            state.start(&self.plan, homes);
        }
    }

    /// Every resident group is loaded: streaming may begin.
    pub(super) fn set_homes(&self, homes: Vec<Home>) {
        let first = self.homes.set(homes).is_ok();
        assert!(first, "homes are set once");
    }

    pub(super) fn homes(&self) -> &[Home] {
        self.homes.get().map_or(&[], Vec::as_slice)
    }

    pub(super) fn set_trace(&self, trace: Trace) {
        let mut state = self.lock();
        state.traced_reads = trace.reads();
        state.trace = trace;
    }

    pub(super) fn connect(&self, links: Links) {
        self.lock().links = Some(links);
    }

    /// Ends the I/O and copy threads after what is in flight has landed. Called by the owner only.
    pub(super) fn disconnect(&self) {
        let mut state = self.lock();
        state.pipeline.stop();
        let links = state.links.take();
        drop(state);
        drop(links);
    }

    pub(super) fn reader_rung(&self) -> Option<(Rung, String)> {
        let state = self.lock();
        let reader = &state.links.as_ref()?.reader;
        Some((reader.rung(), reader.rung_reason().to_owned()))
    }

    pub(super) fn group(&self, group: GroupId) -> &Group {
        &self.plan.groups[group.0 as usize]
    }

    /// On the verifier's thread: the I/O thread is done with a read, which is verified next. Says which group it brings.
    pub(super) fn arrived(&self, done: &RegionRead) -> Option<GroupId> {
        let mut state = self.lock();
        if done.ticket >= DIRECT {
            return state.direct_groups.get(&done.ticket).copied();
        }
        let group = state.pipeline.streamed(done.ticket).group;
        let failed = done.result.is_err();
        state.traced_reads.ended(done.ticket, group.0, failed);
        Some(group)
    }

    /// Reads a group again under the same ticket; gives it back where nobody wants it any more.
    pub(super) fn read_again(&self, done: RegionRead, group: GroupId) -> Result<(), RegionRead> {
        let mut state = self.lock();
        if done.ticket < DIRECT {
            if state.pipeline.is_stopped() {
                return Err(done);
            }
            state.traced_reads.given(done.ticket);
        }
        let Some(links) = &state.links else {
            return Err(done);
        };
        let pieces = pieces(self.group(group));
        links.reader.read(done.ticket, done.region, &pieces);
        Ok(())
    }

    /// Reads of one of the files go on from what is at its path now, which must be `expected`. Nothing is in flight.
    pub(super) fn reopen(
        &self,
        file: usize,
        expected: FileIdentity,
        alignment: u64,
    ) -> Result<(), ReadError> {
        if u64::from(logical_block_bytes(&expected.path)) > alignment {
            return Err(ReadError::Reopen {
                file: expected.path,
                source: std::io::Error::other(
                    "it lies on a drive with larger blocks; restart the server",
                ),
            });
        }
        let state = self.lock();
        state.links().reader.reopen(file, expected)
    }

    /// A read ended. On the I/O thread, or on the verifier's where reads are verified.
    pub(super) fn read_done(&self, done: RegionRead) {
        let mut state = self.lock();
        if done.ticket >= DIRECT {
            state.direct_groups.remove(&done.ticket);
            state.reads_landed.insert(done.ticket, done);
        } else {
            let succeeded = done.result.is_ok();
            let group = state.pipeline.streamed(done.ticket).group;
            state.traced_reads.ended(done.ticket, group.0, !succeeded);
            let (entry, failed) = state.pipeline.read_done(done.ticket, succeeded);
            state.host_entries[entry] = Some(done.region);
            match done.result {
                Err(error) if failed => {
                    state.failures.insert(done.ticket, error);
                }
                // Of a step that was abandoned.
                Err(ReadError::GivenUp) => {}
                Err(error) => tracing::warn!(%error, "a read between two steps failed; again"),
                Ok(_) => {}
            }
            self.start(&mut state);
        }
        drop(state);
        self.landed.notify_all();
    }

    /// On the copy thread: a copy ended.
    pub(super) fn copy_done(&self, done: RegionCopied) {
        let mut state = self.lock();
        if done.ticket >= DIRECT {
            state.copies_landed.insert(done.ticket, done);
        } else {
            let group = state.pipeline.streamed(done.ticket).group;
            let (began, ended) = (done.times.began, done.times.ended);
            state.trace.copied(group.0, began, ended);
            let host_entry = match done.destination {
                Some(region) => {
                    let (host_entry, device_entry) = state.pipeline.copy_done(done.ticket);
                    let entry = DeviceEntry::idle(region, Event::recorded());
                    state.device_entries[device_entry] = Some(entry);
                    host_entry
                }
                None => state.pipeline.copy_left(done.ticket),
            };
            if let Some(entry) = host_entry {
                // The copy was the only owner of a ring entry; a home stays shared.
                state.host_entries[entry] = Arc::into_inner(done.source);
            }
            self.start(&mut state);
        }
        drop(state);
        self.landed.notify_all();
    }

    /// Takes the next streamed group, which must be `group`, waiting until it is there. `None`: the step was cancelled.
    pub(super) fn take(
        &self,
        group: GroupId,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Taken>, ReadError> {
        let mut state = self.lock();
        let expected = state.pipeline.streamed(state.pipeline.consumer()).group;
        assert_eq!(
            group, expected,
            "groups are leased in plan order, every one of them"
        );
        state.pipeline.demand();
        self.start(&mut state);
        let began = Instant::now();
        let mut waited = false;
        loop {
            let taken = match state.pipeline.poll() {
                Poll::Ready(Entry::Host(entry)) => {
                    let region = state.host_entries[entry].take();
                    region.map(|region| (region, Event::recorded()))
                }
                Poll::Ready(Entry::Device(entry)) => {
                    let entry = state.device_entries[entry].take();
                    entry.map(|entry| (entry.region, entry.ready))
                }
                Poll::Failed => {
                    let position = state.pipeline.consumer();
                    let error = state.failures.remove(&position);
                    let Some(error) = error else {
                        unreachable!("position {position} failed without an error");
                    };
                    return Err(error);
                }
                Poll::Pending => {
                    if cancelled() {
                        return Ok(None);
                    }
                    waited = true;
                    state = self.wait_briefly(state);
                    continue;
                }
            };
            let Some((region, ready)) = taken else {
                unreachable!("a ready entry is at rest");
            };
            return Ok(Some(Taken {
                position: state.pipeline.lease(),
                region,
                ready,
                waited: waited.then(|| began.elapsed()),
            }));
        }
    }

    /// Computation is done with a lease: its entry goes back to the ring.
    pub(super) fn give_back(
        &self,
        position: u64,
        region: Region,
        executor: Executor,
        last_use: Event,
    ) {
        let mut state = self.lock();
        let entry = state.pipeline.entry_of(position);
        match (entry, executor) {
            (Entry::Device(entry), Executor::Device) => {
                state.device_entries[entry] = Some(DeviceEntry::idle(region, last_use));
            }
            (Entry::Host(entry), Executor::Host) => state.host_entries[entry] = Some(region),
            (entry, executor) => unreachable!("{executor:?} used {entry:?}"),
        }
        state.pipeline.release(position);
        self.start(&mut state);
    }

    /// Abandons a step: nothing new starts, of reads only the requests land that the drive has already, and everything
    /// fetched is forgotten. Nothing is fetched until the next step asks: a file that cannot be read is not read in a loop.
    /// No lease may be held, and nobody may wait for a direct read.
    pub(super) fn abandon(&self) {
        let mut state = self.lock();
        state.pipeline.stop();
        if let Some(links) = &state.links {
            links.reader.give_up();
        }
        let mut state = self.drain(state);
        state.failures.clear();
        state.pipeline.restart();
    }

    /// Starts nothing new and waits for what is in flight.
    fn drain<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.pipeline.stop();
        while state.pipeline.in_flight() > 0 {
            state = self.wait(state);
        }
        state
    }

    /// Before a step of `width` tokens: fetching goes on. Where another executor is to have what was fetched for the last
    /// one, it is forgotten, and fetching begins afresh, when what is under way has landed: `Some` is that wait, if there is one.
    pub(super) fn resume(&self, width: u32) -> Option<Duration> {
        let mut state = self.lock();
        let is_narrow = self.plan.is_narrow(width);
        let mut waited = None;
        if is_narrow != state.is_narrow {
            let began = Instant::now();
            let is_idle = state.pipeline.in_flight() == 0;
            state = self.drain(state);
            waited = (!is_idle).then(|| began.elapsed());
            state.pipeline.restart();
            state.pipeline.reorder(streamed(&self.plan, width));
            state.is_narrow = is_narrow;
        }
        state.failures.clear();
        state.pipeline.resume();
        self.start(&mut state);
        waited
    }

    /// Whether every streamed group of a step has been leased, none of the next.
    pub(super) fn at_border(&self) -> bool {
        self.lock().pipeline.at_border()
    }

    /// Reads into `region` and waits for it. Where the step is cancelled meanwhile, everything that was asked for is given
    /// up, this read and those of groups: the step has to be abandoned.
    pub(super) fn read_now(
        &self,
        region: Region,
        pieces: &[RegionPiece],
        cancelled: &dyn Fn() -> bool,
    ) -> (Region, Result<u64, ReadError>, Duration) {
        let began = Instant::now();
        let ticket = self.begin_read(region, pieces);
        let mut given_up = false;
        let mut state = self.lock();
        let done = loop {
            if let Some(done) = state.reads_landed.remove(&ticket) {
                break done;
            }
            if !given_up && cancelled() {
                given_up = true;
                state.links().reader.give_up();
            }
            state = self.wait_briefly(state);
        };
        let result = match given_up {
            true => Err(ReadError::GivenUp),
            false => done.result,
        };
        (done.region, result, began.elapsed())
    }

    /// Starts a read that `wait_read` waits for, and that its caller verifies.
    fn begin_read(&self, region: Region, pieces: &[RegionPiece]) -> u64 {
        let mut state = self.lock();
        let ticket = state.direct_ticket();
        state.links().reader.read(ticket, region, pieces);
        ticket
    }

    /// Starts the read of a group that `wait_read` waits for.
    pub(super) fn begin_group_read(&self, region: Region, group: GroupId) -> u64 {
        let mut state = self.lock();
        let ticket = state.direct_ticket();
        state.direct_groups.insert(ticket, group);
        let pieces = pieces(self.group(group));
        state.links().reader.read(ticket, region, &pieces);
        ticket
    }

    pub(super) fn wait_read(&self, ticket: u64) -> RegionRead {
        let mut state = self.lock();
        loop {
            if let Some(done) = state.reads_landed.remove(&ticket) {
                return done;
            }
            state = self.wait(state);
        }
    }

    /// Starts a copy to the device that `wait_copy` waits for.
    pub(super) fn begin_copy(&self, source: Region, destination: Region, bytes: usize) -> u64 {
        let mut state = self.lock();
        let ticket = state.direct_ticket();
        let Some(stream) = &state.links().stream else {
            unreachable!("a copy without a device");
        };
        stream.copy(
            ticket,
            Arc::new(source),
            destination,
            bytes,
            Event::recorded(),
        );
        ticket
    }

    pub(super) fn wait_copy(&self, ticket: u64) -> RegionCopied {
        let mut state = self.lock();
        loop {
            if let Some(done) = state.copies_landed.remove(&ticket) {
                return done;
            }
            state = self.wait(state);
        }
    }

    /// While nothing streams yet: lends the host ring's entries to the loader.
    pub(super) fn borrow_host_entries(&self) -> Vec<Region> {
        let mut state = self.lock();
        let entries: Option<Vec<Region>> =
            state.host_entries.iter_mut().map(Option::take).collect();
        let Some(entries) = entries else {
            unreachable!("the ring is in use while the model is loaded");
        };
        entries
    }

    pub(super) fn return_host_entries(&self, entries: Vec<Region>) {
        self.lock().host_entries = entries.into_iter().map(Some).collect();
    }

    /// Adds what has moved since the last call to the metrics.
    pub(super) fn publish(&self, metrics: &Metrics) {
        let mut state = self.lock();
        let Some(links) = &state.links else {
            return;
        };
        let read = links.reader.totals();
        let copied = links
            .stream
            .as_ref()
            .map(RegionCopies::totals)
            .unwrap_or_default();
        let retries = links.reader.retries();
        let Published {
            read: read_before,
            copied: copied_before,
            retries: retries_before,
        } = std::mem::take(&mut state.published);
        for (from, to, now, before) in [
            ("storage", "host", read, read_before),
            ("host", "device", copied, copied_before),
        ] {
            let labels = [from, to];
            metrics
                .transfer_bytes_total
                .with_label_values(&labels)
                .inc_by(now.bytes - before.bytes);
            metrics
                .transfer_seconds_total
                .with_label_values(&labels)
                .inc_by((now.busy - before.busy).as_secs_f64());
        }
        let again = |reason: &str, now: u64, before: u64| {
            metrics
                .read_retries_total
                .with_label_values(&[reason])
                .inc_by(now - before);
            now - before
        };
        again("short", retries.short_reads, retries_before.short_reads);
        let errors = again("error", retries.errors, retries_before.errors);
        if errors > 0 {
            tracing::warn!(errors, "reads failed and were tried again");
        }
        state.published = Published {
            read,
            copied,
            retries,
        };
    }
}

impl State {
    fn links(&self) -> &Links {
        let Some(links) = &self.links else {
            unreachable!("the links live as long as the weights");
        };
        links
    }

    fn direct_ticket(&mut self) -> u64 {
        self.next_direct += 1;
        self.next_direct
    }

    /// Performs what the pipeline wants started.
    fn start(&mut self, plan: &Plan, homes: &[Home]) {
        if self.links.is_none() {
            return;
        }
        let mut actions = Vec::new();
        self.pipeline.pump(&mut actions);
        for action in actions {
            match action {
                Action::Read {
                    position,
                    group,
                    host_entry,
                } => {
                    let Some(region) = self.host_entries[host_entry].take() else {
                        unreachable!("host entry {host_entry} is free but not at rest");
                    };
                    let pieces = pieces(&plan.groups[group.0 as usize]);
                    self.traced_reads.given(position);
                    self.links().reader.read(position, region, &pieces);
                }
                Action::Copy(copy) => self.start_copy(plan, homes, copy),
            }
        }
    }

    fn start_copy(&mut self, plan: &Plan, homes: &[Home], copy: StartCopy) {
        let group = copy.group.0 as usize;
        let source = match (copy.host_entry, &homes[group]) {
            (Some(entry), _) => self.host_entries[entry].take().map(Arc::new),
            (None, Home::Resident(region)) => Some(Arc::clone(region)),
            (None, _) => None,
        };
        let destination = self.device_entries[copy.device_entry].take();
        let (Some(source), Some(destination)) = (source, destination) else {
            unreachable!("{copy:?} starts from or to an entry in use");
        };
        let Some(stream) = &self.links().stream else {
            unreachable!("the plan copies to a device that is not there");
        };
        let ordered = stream.copy_in_order(
            copy.position,
            source,
            destination.region,
            plan.groups[group].entry_bytes as usize,
            destination.last_use,
        );
        if let Some(Ordered { destination, ready }) = ordered {
            let entry = self.pipeline.copy_ordered(copy.position);
            self.device_entries[entry] = Some(DeviceEntry {
                region: destination,
                // The copy waits for the use before it; the next copy comes after this one on the same stream.
                last_use: Event::recorded(),
                ready,
            });
        }
    }
}

/// The reads that bring a group into an entry.
pub(super) fn pieces(group: &Group) -> Vec<RegionPiece> {
    let piece = |extent: &crate::placement::Extent| RegionPiece {
        file_offset: extent.file_offset,
        offset: extent.entry_offset as usize,
        bytes: extent.bytes as usize,
    };
    group.extents.iter().map(piece).collect()
}

/// The groups that stream in steps of `width` tokens, in plan order.
pub(super) fn streamed(plan: &Plan, width: u32) -> Vec<Streamed> {
    plan.iter()
        .filter(|(_, group, _)| group.is_streamable())
        .map(|(group, _, _)| (group, plan.residence_at(group, width)))
        .filter(|(_, residence)| streams(*residence))
        .map(|(group, residence)| Streamed {
            group,
            home: residence.home,
            executor: residence.executor,
        })
        .collect()
}
