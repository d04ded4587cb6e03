//! Streams and the order of work.
//!
//! A call puts an operation at the end of its stream, where it is *held*. It is *released* when the operations before it
//! in its stream and those it waits for are released; the GPU thread runs released operations one after another, in the
//! order of their release. So the order of work is decided here, by the calls and the seed alone: with seed 0 in the
//! order of the calls; else at random among the streams' first operations, now or only when somebody synchronises. If
//! nobody calls for a while, everything is released, so that work goes on for hosts that wait by other means.
//!
//! A link may be given a rate. A copy to the device then takes its time: it is done when that is over, one after another,
//! and meanwhile the GPU thread runs what does not wait for it. So which of two operations comes first is no longer the
//! seed's alone.
//!
//! The vector clocks are kept here too: an operation knows what its stream, the host and what it waits for know.
//!
//! The null stream (slot 0) is the legacy one: it waits for all blocking streams, and they for it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::clock::{Clock, HOST, Step};
use super::operation::{Label, Operation, Recording, StreamName, What, Work};
use super::schedule::Schedule;

/// When nobody has called for so long, held operations are released.
pub(super) const PATIENCE: Duration = Duration::from_millis(5);
/// A year.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// So many queries in a row may be answered with "not ready" although nothing but the seed holds the work back.
const UNREADY_ANSWERS_MAX: u32 = 3;
/// The slot of the null stream.
pub(super) const NULL_STREAM: usize = 0;

/// Whether a stream waits for the null stream, as `CU_STREAM_NON_BLOCKING` decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamKind {
    Blocking,
    NonBlocking,
}

pub(super) struct Stream {
    pub(super) name: StreamName,
    pub(super) kind: StreamKind,
    pub(super) priority: i32,
    held: VecDeque<Operation>,
    /// Operations so far: put into the stream, released, over.
    enqueued: u64,
    released: u64,
    over: u64,
    /// What its next operation will know, the host's knowledge aside.
    clock: Clock,
    destroyed: bool,
    unready_answers: u32,
}

struct Released {
    operation: Operation,
    /// When a copy over a link with a rate is over; none before it has begun.
    due: Option<Instant>,
}

/// What the GPU thread does next.
pub(super) enum Next {
    /// [`Queue::finish`] says that it is over.
    Run(Operation),
    /// Nothing before then: a copy is on the link.
    Until(Instant),
    /// Nothing is released.
    Nothing,
}

/// Operations that nobody has released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    Nothing,
    /// Some are held, for no longer than this unless somebody calls.
    For(Duration),
    /// All have just been released, because nobody has called for a while.
    NoLonger,
}

pub(super) struct Queue {
    streams: Vec<Stream>,
    /// Slots by the program's handles; the null stream has none.
    slots: HashMap<usize, usize>,
    released: VecDeque<Released>,
    /// Bytes per second of copies to the device; without a rate they take no time.
    link_rate: Option<f64>,
    /// When the last copy is over that has begun.
    link_free_at: Option<Instant>,
    /// The clock of the operation that the GPU thread has taken.
    running: Option<Clock>,
    /// What the host knows; its own time counts its calls.
    host: Clock,
    operations: u64,
    streams_created: u64,
    schedule: Schedule,
    last_call: Instant,
}

impl Queue {
    pub(super) fn new(seed: u64, link_rate: Option<f64>) -> Queue {
        Queue {
            streams: vec![Stream::new(StreamName(0), StreamKind::Blocking, 0)],
            slots: HashMap::new(),
            released: VecDeque::new(),
            link_rate,
            link_free_at: None,
            running: None,
            host: Clock::default(),
            operations: 0,
            streams_created: 0,
            schedule: Schedule::new(seed),
            last_call: Instant::now(),
        }
    }

    pub(super) fn set_seed(&mut self, seed: u64) {
        self.release_all();
        self.schedule = Schedule::new(seed);
    }

    /// From now on copies to the device take their time at this rate, those that have begun anew.
    pub(super) fn set_link_rate(&mut self, bytes_per_second: Option<f64>) {
        self.link_rate = bytes_per_second;
        self.link_free_at = None;
        self.released
            .iter_mut()
            .for_each(|released| released.due = None);
    }

    /// A number for the order of a kernel's blocks; none with seed 0.
    pub(super) fn block_order_seed(&mut self) -> Option<u64> {
        self.schedule.block_order_seed()
    }

    pub(super) fn host(&self) -> &Clock {
        &self.host
    }

    /// The host's next step, for what it does itself.
    pub(super) fn host_step(&mut self) -> Step {
        self.last_call = Instant::now();
        let step = Step {
            actor: HOST,
            time: self.host.time(HOST) + 1,
        };
        self.host.reach(step);
        step
    }

    /// The host has synchronised with whatever has this clock. Returns what it knows now.
    pub(super) fn join_host(&mut self, clock: &Clock) -> Clock {
        self.host.join(clock);
        self.host.clone()
    }

    pub(super) fn create_stream(&mut self, handle: usize, kind: StreamKind, priority: i32) {
        self.streams_created += 1;
        let mut stream = Stream::new(StreamName(self.streams_created), kind, priority);
        // A destroyed stream's place may be had once the host knows of all its work, as the new stream then does too.
        let free = (1..self.streams.len()).find(|slot| {
            let old = &self.streams[*slot];
            old.destroyed && old.over == old.enqueued && self.host.time(slot + 1) >= old.enqueued
        });
        let slot = match free {
            Some(slot) => {
                let old = &self.streams[slot];
                (stream.enqueued, stream.released, stream.over) =
                    (old.enqueued, old.released, old.over);
                self.streams[slot] = stream;
                slot
            }
            None => {
                self.streams.push(stream);
                self.streams.len() - 1
            }
        };
        self.slots.insert(handle, slot);
    }

    /// Takes a stream's handle away; what it holds still runs. False where there is no such stream.
    pub(super) fn destroy_stream(&mut self, handle: usize) -> bool {
        let Some(slot) = self.slots.remove(&handle) else {
            return false;
        };
        self.streams[slot].destroyed = true;
        true
    }

    pub(super) fn slot(&self, handle: usize) -> Option<usize> {
        self.slots.get(&handle).copied()
    }

    pub(super) fn stream(&self, slot: usize) -> &Stream {
        &self.streams[slot]
    }

    /// Puts an operation at the end of a stream, behind the recording of an event where one is given. `work` is told the
    /// operation's step, clock and label.
    pub(super) fn enqueue(
        &mut self,
        slot: usize,
        what: What,
        behind: Option<&Recording>,
        work: impl FnOnce(Step, &Clock, &Arc<Label>) -> Work,
    ) -> Step {
        self.host_step();
        let mut clock = self.streams[slot].clock.clone();
        clock.join(&self.host);
        let mut after = Vec::new();
        for (other, stream) in self.streams.iter().enumerate() {
            let legacy = match (slot, other) {
                (NULL_STREAM, NULL_STREAM) => false,
                (NULL_STREAM, _) => stream.kind == StreamKind::Blocking,
                (_, NULL_STREAM) => self.streams[slot].kind == StreamKind::Blocking,
                _ => false,
            };
            if legacy && stream.enqueued > 0 {
                clock.join(&stream.clock);
                after.push(Step {
                    actor: other + 1,
                    time: stream.enqueued,
                });
            }
        }
        if let Some(recording) = behind {
            clock.join(&recording.clock);
            after.push(recording.step);
        }
        self.operations += 1;
        let stream = &mut self.streams[slot];
        stream.enqueued += 1;
        let step = Step {
            actor: slot + 1,
            time: stream.enqueued,
        };
        clock.reach(step);
        stream.clock = clock.clone();
        let label = Arc::new(Label {
            what,
            number: self.operations,
            stream: stream.name,
        });
        let work = work(step, &clock, &label);
        stream.held.push_back(Operation {
            step,
            after,
            clock,
            label,
            work,
        });
        self.release_some();
        step
    }

    /// The last step that was put into a stream, and what whoever waits for it then knows.
    pub(super) fn last(&self, slot: usize) -> (Step, Clock) {
        let stream = &self.streams[slot];
        (
            Step {
                actor: slot + 1,
                time: stream.enqueued,
            },
            stream.clock.clone(),
        )
    }

    pub(super) fn is_over(&self, step: Step) -> bool {
        self.streams[step.actor - 1].over >= step.time
    }

    /// The last step of each stream, and what whoever waits for all of them knows.
    pub(super) fn everything(&self) -> (Vec<Step>, Clock) {
        let mut clock = Clock::default();
        self.streams
            .iter()
            .for_each(|stream| clock.join(&stream.clock));
        let last = |(slot, stream): (usize, &Stream)| Step {
            actor: slot + 1,
            time: stream.enqueued,
        };
        (self.streams.iter().enumerate().map(last).collect(), clock)
    }

    /// Whether a query that found a step not over shall wait for it: if it was released, the seed has decided that it is
    /// over by now; if it was not, the seed may hold it back, but not for ever.
    pub(super) fn query_waits(&mut self, step: Step) -> bool {
        self.last_call = Instant::now();
        if self.schedule.is_in_order() || self.link_rate.is_some() {
            return false;
        }
        let stream = &mut self.streams[step.actor - 1];
        if stream.released >= step.time {
            return true;
        }
        stream.unready_answers += 1;
        stream.unready_answers > UNREADY_ANSWERS_MAX
    }

    /// Releases a step with all that it needs, and some others.
    pub(super) fn release_until(&mut self, step: Step) {
        self.last_call = Instant::now();
        while !self.is_released(step) {
            if self.schedule.wanders() && self.release_any() {
                continue;
            }
            let slot = self.first_needed(step);
            self.release(slot);
        }
    }

    pub(super) fn release_all(&mut self) {
        while self.release_any() {}
    }

    /// If operations are held and nobody has called for a while: releases them.
    pub(super) fn release_overdue(&mut self) -> Held {
        if self.streams.iter().all(|stream| stream.held.is_empty()) {
            return Held::Nothing;
        }
        let waited = self.last_call.elapsed();
        if waited < PATIENCE {
            return Held::For(PATIENCE - waited);
        }
        self.release_all();
        Held::NoLonger
    }

    /// The next operation to run: the first that was released and waits for none that is on the link. A copy begins when
    /// it is looked at here, so not before what was released before it and can run.
    pub(super) fn take(&mut self, now: Instant) -> Next {
        let mut until: Option<Instant> = None;
        for index in 0..self.released.len() {
            let Released { operation, due } = &self.released[index];
            if !self.can_run(operation) {
                continue;
            }
            let due = due.or_else(|| self.begin_copy(operation, now));
            match due {
                Some(due) if due > now => {
                    self.released[index].due = Some(due);
                    self.link_free_at = self.link_free_at.max(Some(due));
                    until = Some(until.map_or(due, |until| until.min(due)));
                }
                _ => {
                    let Some(Released { operation, .. }) = self.released.remove(index) else {
                        unreachable!("the operation was there");
                    };
                    self.running = Some(operation.clock.clone());
                    return Next::Run(operation);
                }
            }
        }
        until.map_or(Next::Nothing, Next::Until)
    }

    /// When a copy is over that begins now, behind those that have begun; none for what does not go over the link.
    fn begin_copy(&self, operation: &Operation, now: Instant) -> Option<Instant> {
        let Work::ToDevice { bytes, .. } = operation.work else {
            return None;
        };
        let time = Duration::try_from_secs_f64(bytes as f64 / self.link_rate?);
        let begins = self.link_free_at.map_or(now, |free_at| free_at.max(now));
        // What is longer than clocks go is for ever.
        begins
            .checked_add(time.unwrap_or(FOREVER))
            .or(Some(now + FOREVER))
    }

    /// Whether what a released operation waits for is over.
    fn can_run(&self, operation: &Operation) -> bool {
        let Step { actor, time } = operation.step;
        self.streams[actor - 1].over + 1 == time
            && operation.after.iter().all(|step| self.is_over(*step))
    }

    pub(super) fn finish(&mut self, step: Step) {
        self.streams[step.actor - 1].over = step.time;
        self.running = None;
    }

    /// What everything that still comes knows: steps that it has reached conflict with nothing any more.
    pub(super) fn settled(&self) -> Clock {
        let mut settled = self.host.clone();
        let held = self.streams.iter().flat_map(|stream| &stream.held);
        let clocks = held
            .chain(self.released.iter().map(|released| &released.operation))
            .map(|operation| &operation.clock)
            .chain(&self.running);
        clocks.for_each(|clock| settled.meet(clock));
        settled
    }

    fn is_released(&self, step: Step) -> bool {
        self.streams[step.actor - 1].released >= step.time
    }

    /// Whether a stream's first held operation could be released.
    fn is_ready(&self, slot: usize) -> bool {
        let first = self.streams[slot].held.front();
        first.is_some_and(|operation| operation.after.iter().all(|step| self.is_released(*step)))
    }

    fn release(&mut self, slot: usize) {
        let stream = &mut self.streams[slot];
        if let Some(operation) = stream.held.pop_front() {
            stream.released = operation.step.time;
            stream.unready_answers = 0;
            self.released.push_back(Released {
                operation,
                due: None,
            });
        }
    }

    fn release_any(&mut self) -> bool {
        self.release_one_of(|_, _| true)
    }

    fn release_one_of(&mut self, may_go: impl Fn(&Schedule, usize) -> bool) -> bool {
        let may_go = |slot: &usize| self.is_ready(*slot) && may_go(&self.schedule, *slot);
        let ready: Vec<usize> = (0..self.streams.len()).filter(may_go).collect();
        if ready.is_empty() {
            return false;
        }
        let slot = ready[self.schedule.choose(ready.len())];
        self.release(slot);
        true
    }

    /// After a call: as many as the schedule wants.
    fn release_some(&mut self) {
        for _ in 0..self.schedule.releases_after_call() {
            if !self.release_one_of(Schedule::goes_early) {
                break;
            }
        }
    }

    /// The stream whose first held operation is ready and needed by an unreleased step.
    fn first_needed(&self, step: Step) -> usize {
        let mut slot = step.actor - 1;
        loop {
            let first = self.streams[slot].held.front();
            let missing = first.and_then(|operation| {
                operation
                    .after
                    .iter()
                    .find(|step| !self.is_released(**step))
            });
            match missing {
                // What an operation waits for was put into its stream before it, so this ends.
                Some(step) => slot = step.actor - 1,
                None => return slot,
            }
        }
    }
}

impl Stream {
    fn new(name: StreamName, kind: StreamKind, priority: i32) -> Stream {
        Stream {
            name,
            kind,
            priority,
            held: VecDeque::new(),
            enqueued: 0,
            released: 0,
            over: 0,
            clock: Clock::default(),
            destroyed: false,
            unready_answers: 0,
        }
    }
}

#[cfg(test)]
#[path = "tests/queue.rs"]
mod tests;
