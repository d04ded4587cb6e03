//! Which streamed group is read, copied, ready or lent: the state machine behind `Weights`, with no I/O, no threads
//! and no clock in it, so that tests drive it on a virtual one.
//!
//! A step uses the streamed groups in plan order, and the next step uses them again, so a *position* counts uses from
//! the start of the process: position p stands for the group `order[p % order.len()]`. Positions enter the window in
//! order; a position that comes from storage takes a host entry when it enters, one that goes to the device takes a
//! device entry when its copy starts, also in order. Entries are therefore reserved in plan order, which rules out
//! deadlock: the oldest position never waits for an entry that a younger one holds. Reads may complete in any order.
//!
//! ```text
//! storage home, host executor      Reading -> Ready -> Leased
//! storage home, device executor    Reading -> Landed -> Copying -> Ready -> Leased
//! host home, device executor                  Landed -> Copying -> Ready -> Leased
//! ```
//!
//! Which groups stream, and which way, may change between two steps: positions then count on, in the new order.
//!
//! A device that orders copies before their users by itself lends a group while its copy is still under way: the
//! position is Ready at once, and what the copy reads from is *leaving* until the copy is over.

use crate::placement::{Executor, GroupId, Tier};
use std::collections::VecDeque;

/// A group that moves on every step, and the way that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Streamed {
    pub(crate) group: GroupId,
    /// `Storage`, or `Host` with executor `Device`.
    pub(crate) home: Tier,
    pub(crate) executor: Executor,
}

impl Streamed {
    fn is_read(self) -> bool {
        self.home == Tier::Storage
    }

    fn is_copied(self) -> bool {
        self.executor == Executor::Device
    }
}

/// What the owner has to start now. It reports back with `read_done` or `copy_done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Read {
        position: u64,
        group: GroupId,
        host_entry: usize,
    },
    Copy(StartCopy),
}

/// A copy to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StartCopy {
    pub(crate) position: u64,
    pub(crate) group: GroupId,
    /// `None`: from the group's home in host memory.
    pub(crate) host_entry: Option<usize>,
    pub(crate) device_entry: usize,
}

/// Where a ready group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    Host(usize),
    Device(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Reading,
    /// Its read failed between two steps and starts again.
    Again,
    /// In host memory, waits for a device entry.
    Landed,
    Copying,
    Ready,
    Leased,
    /// Used; waits until the older ones are.
    Released,
    Failed,
}

/// What `Pipeline::poll` says about the position that computation wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Poll {
    Pending,
    Ready(Entry),
    Failed,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    stage: Stage,
    host_entry: Option<usize>,
    device_entry: Option<usize>,
    /// Its read began before the present step: a failure says what was, not what is, and the read is tried again.
    stale: bool,
}

/// How far reads and copies run ahead of computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookahead {
    /// As far as there are ring entries, across the end of a step.
    Ring,
    /// Not at all: a group is fetched when computation asks for it. For comparison in tests and benches.
    None,
}

#[derive(Debug)]
pub(crate) struct Pipeline {
    order: Vec<Streamed>,
    /// The position from which `order` holds.
    base: u64,
    lookahead: Lookahead,
    /// Entries that nobody uses.
    host_free: Vec<usize>,
    device_free: Vec<usize>,
    /// Position of `window[0]`; older ones are released.
    first: u64,
    window: VecDeque<Slot>,
    /// Copies under way whose position is Ready already, and the host entry that each reads from (`None`: a home).
    leaving: VecDeque<(u64, Option<usize>)>,
    /// No more copies are given to a device than it has entries, so that computation which runs ahead of it is held up
    /// here, where it hears of a cancelled step and where the wait is counted.
    leaving_max: usize,
    /// The oldest position whose copy has not started, where it needs one.
    next_copy: u64,
    /// The position that computation leases next.
    consumer: u64,
    /// Computation waits for `consumer` (matters without lookahead).
    demanded: bool,
    /// Nothing new starts: a failed or cancelled step drains.
    stopped: bool,
}

impl Pipeline {
    pub(crate) fn new(
        order: Vec<Streamed>,
        host_entries: usize,
        device_entries: usize,
        lookahead: Lookahead,
    ) -> Pipeline {
        check(&order, host_entries, device_entries);
        Pipeline {
            order,
            base: 0,
            lookahead,
            host_free: (0..host_entries).rev().collect(),
            device_free: (0..device_entries).rev().collect(),
            first: 0,
            window: VecDeque::new(),
            leaving: VecDeque::new(),
            leaving_max: device_entries,
            next_copy: 0,
            consumer: 0,
            demanded: false,
            stopped: false,
        }
    }

    /// The streamed group that a position stands for.
    pub(crate) fn streamed(&self, position: u64) -> Streamed {
        self.order[((position - self.base) % self.order.len() as u64) as usize]
    }

    /// The position that computation leases next.
    pub(crate) fn consumer(&self) -> u64 {
        self.consumer
    }

    /// Starts what can start; the owner performs the actions in their order.
    pub(crate) fn pump(&mut self, actions: &mut Vec<Action>) {
        if self.stopped || self.order.is_empty() {
            return;
        }
        self.start_again(actions);
        self.start_copies(actions);
        while let Some(position) = self.next_admissible() {
            let streamed = self.streamed(position);
            let mut slot = Slot {
                stage: Stage::Landed,
                host_entry: None,
                device_entry: None,
                stale: false,
            };
            if streamed.is_read() {
                let Some(host_entry) = self.host_free.pop() else {
                    return;
                };
                slot.stage = Stage::Reading;
                slot.host_entry = Some(host_entry);
                actions.push(Action::Read {
                    position,
                    group: streamed.group,
                    host_entry,
                });
            }
            self.window.push_back(slot);
            self.start_copies(actions);
        }
    }

    /// The position that may enter the window now. The window holds at most one step, so that no group is in it twice
    /// (except where a step has fewer groups than three).
    fn next_admissible(&self) -> Option<u64> {
        let position = self.first + self.window.len() as u64;
        let limit = match self.lookahead {
            Lookahead::Ring => self.first + self.order.len().max(3) as u64,
            Lookahead::None => self.consumer + u64::from(self.demanded),
        };
        (position < limit).then_some(position)
    }

    fn start_again(&mut self, actions: &mut Vec<Action>) {
        for position in self.first..self.first + self.window.len() as u64 {
            let slot = self.slot_mut(position);
            if let (Stage::Again, Some(host_entry)) = (slot.stage, slot.host_entry) {
                slot.stage = Stage::Reading;
                actions.push(Action::Read {
                    position,
                    group: self.streamed(position).group,
                    host_entry,
                });
            }
        }
    }

    fn start_copies(&mut self, actions: &mut Vec<Action>) {
        let end = self.first + self.window.len() as u64;
        while self.next_copy < end {
            let position = self.next_copy;
            let streamed = self.streamed(position);
            if streamed.is_copied() {
                if self.slot(position).stage != Stage::Landed {
                    return;
                }
                if self.leaving.len() >= self.leaving_max {
                    return;
                }
                let Some(device_entry) = self.device_free.pop() else {
                    return;
                };
                let slot = self.slot_mut(position);
                slot.stage = Stage::Copying;
                slot.device_entry = Some(device_entry);
                let host_entry = slot.host_entry;
                actions.push(Action::Copy(StartCopy {
                    position,
                    group: streamed.group,
                    host_entry,
                    device_entry,
                }));
            }
            self.next_copy += 1;
        }
    }

    /// A read ended; says which host entry it went to, and whether its failure is one to report.
    pub(crate) fn read_done(&mut self, position: u64, succeeded: bool) -> (usize, bool) {
        let copied = self.streamed(position).is_copied();
        let slot = self.slot_mut(position);
        assert_eq!(slot.stage, Stage::Reading, "position {position}");
        slot.stage = match (succeeded, slot.stale, copied) {
            (true, _, true) => Stage::Landed,
            (true, _, false) => Stage::Ready,
            (false, true, _) => Stage::Again,
            (false, false, _) => Stage::Failed,
        };
        slot.stale = false;
        let Some(entry) = slot.host_entry else {
            unreachable!("position {position} was read into no entry");
        };
        (entry, slot.stage == Stage::Failed)
    }

    /// The device will run a copy, which was started, before whatever uses the group: it may be lent. Says where it goes.
    pub(crate) fn copy_ordered(&mut self, position: u64) -> usize {
        let slot = self.slot_mut(position);
        assert_eq!(slot.stage, Stage::Copying, "position {position}");
        slot.stage = Stage::Ready;
        let host_entry = slot.host_entry.take();
        let Some(device_entry) = slot.device_entry else {
            unreachable!("position {position} is copied to no entry");
        };
        self.leaving.push_back((position, host_entry));
        device_entry
    }

    /// A copy that `copy_ordered` was told of is over; says which host entry it came from, which is free again.
    pub(crate) fn copy_left(&mut self, position: u64) -> Option<usize> {
        let first = self.leaving.pop_front();
        let Some((first, host_entry)) = first else {
            unreachable!("position {position} is not being copied");
        };
        assert_eq!(first, position, "a copy stream copies in order");
        self.host_free.extend(host_entry);
        host_entry
    }

    /// A copy to the device ended; says which host entry it came from, which is free again, and where it went.
    pub(crate) fn copy_done(&mut self, position: u64) -> (Option<usize>, usize) {
        let slot = self.slot_mut(position);
        assert_eq!(slot.stage, Stage::Copying, "position {position}");
        slot.stage = Stage::Ready;
        let host_entry = slot.host_entry.take();
        let Some(device_entry) = slot.device_entry else {
            unreachable!("position {position} was copied to no entry");
        };
        self.host_free.extend(host_entry);
        (host_entry, device_entry)
    }

    /// What has become of the position that computation wants.
    pub(crate) fn poll(&self) -> Poll {
        let Some(slot) = self.window.get((self.consumer - self.first) as usize) else {
            return Poll::Pending;
        };
        match (slot.stage, slot.device_entry, slot.host_entry) {
            (Stage::Ready, Some(entry), _) => Poll::Ready(Entry::Device(entry)),
            (Stage::Ready, None, Some(entry)) => Poll::Ready(Entry::Host(entry)),
            (Stage::Failed, ..) => Poll::Failed,
            _ => Poll::Pending,
        }
    }

    /// Computation waits for the position at `consumer`.
    pub(crate) fn demand(&mut self) {
        self.demanded = true;
    }

    /// Lends the position at `consumer`, which is ready, and moves on.
    pub(crate) fn lease(&mut self) -> u64 {
        let position = self.consumer;
        let slot = self.slot_mut(position);
        assert_eq!(slot.stage, Stage::Ready, "position {position}");
        slot.stage = Stage::Leased;
        self.consumer += 1;
        self.demanded = false;
        position
    }

    /// Computation is done with a position: its entry may be used again.
    pub(crate) fn release(&mut self, position: u64) {
        let slot = self.slot_mut(position);
        assert_eq!(slot.stage, Stage::Leased, "position {position}");
        slot.stage = Stage::Released;
        let (host_entry, device_entry) = (slot.host_entry.take(), slot.device_entry.take());
        self.host_free.extend(host_entry);
        self.device_free.extend(device_entry);
        while let Some(Slot {
            stage: Stage::Released,
            ..
        }) = self.window.front()
        {
            self.window.pop_front();
            self.first += 1;
        }
    }

    /// The entry that a leased position uses.
    pub(crate) fn entry_of(&self, position: u64) -> Entry {
        let slot = self.slot(position);
        assert_eq!(slot.stage, Stage::Leased, "position {position}");
        match (slot.device_entry, slot.host_entry) {
            (Some(entry), _) => Entry::Device(entry),
            (None, Some(entry)) => Entry::Host(entry),
            (None, None) => unreachable!("position {position} is lent without an entry"),
        }
    }

    /// Between two steps.
    pub(crate) fn at_border(&self) -> bool {
        let length = self.order.len() as u64;
        self.order.is_empty() || (self.consumer - self.base).is_multiple_of(length)
    }

    /// Reads and copies under way.
    pub(crate) fn in_flight(&self) -> usize {
        let flying = |slot: &&Slot| matches!(slot.stage, Stage::Reading | Stage::Copying);
        self.window.iter().filter(flying).count() + self.leaving.len()
    }

    /// Starts nothing new until `resume`.
    pub(crate) fn stop(&mut self) {
        self.stopped = true;
    }

    /// A step begins. What failed since the last one, or fails yet, is read again: perhaps that was long ago.
    pub(crate) fn resume(&mut self) {
        self.stopped = false;
        for slot in &mut self.window {
            match slot.stage {
                Stage::Failed => slot.stage = Stage::Again,
                Stage::Reading => slot.stale = true,
                _ => {}
            }
        }
    }

    /// Forgets everything fetched and begins at the first group of a step. Nothing may be in flight or lent.
    pub(crate) fn restart(&mut self) {
        let busy =
            |slot: &Slot| matches!(slot.stage, Stage::Reading | Stage::Copying | Stage::Leased);
        assert!(
            !self.window.iter().any(busy),
            "restart while entries are in use: {:?}",
            self.window
        );
        assert!(
            self.leaving.is_empty(),
            "restart while copies read: {:?}",
            self.leaving
        );
        for slot in self.window.drain(..) {
            self.host_free.extend(slot.host_entry);
            self.device_free.extend(slot.device_entry);
        }
        self.base = self.consumer;
        self.first = self.consumer;
        self.next_copy = self.first;
        self.demanded = false;
    }

    /// The next steps use these groups. Between two steps, when everything fetched was forgotten.
    pub(crate) fn reorder(&mut self, order: Vec<Streamed>) {
        assert!(
            self.window.is_empty() && self.leaving.is_empty() && self.at_border(),
            "another order in the middle of a step: {:?}",
            self.window
        );
        check(&order, self.host_free.len(), self.device_free.len());
        self.order = order;
        self.base = self.consumer;
    }

    fn slot(&self, position: u64) -> &Slot {
        &self.window[(position - self.first) as usize]
    }

    fn slot_mut(&mut self, position: u64) -> &mut Slot {
        &mut self.window[(position - self.first) as usize]
    }
}

fn check(order: &[Streamed], host_entries: usize, device_entries: usize) {
    assert!(
        order.iter().all(|s| s.is_read() || s.is_copied()),
        "a group that rests where it is used does not stream"
    );
    assert!(
        host_entries > 0 || !order.iter().any(|s| s.is_read()),
        "groups stream from storage without a host ring"
    );
    assert!(
        device_entries > 0 || !order.iter().any(|s| s.is_copied()),
        "groups stream to the device without a device ring"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn order(count: u32, home: Tier, executor: Executor) -> Vec<Streamed> {
        (0..count)
            .map(|group| Streamed {
                group: GroupId(group),
                home,
                executor,
            })
            .collect()
    }

    /// A clock that jumps from event to event. One storage server and one link, each serving in order of arrival;
    /// reads take `read`, copies `copy`, and computing with a group takes `compute`.
    struct VirtualClock {
        read: u64,
        copy: u64,
        compute: u64,
        storage_free: u64,
        link_free: u64,
        /// (time, position, is a copy)
        events: BTreeSet<(u64, u64, bool)>,
    }

    impl VirtualClock {
        fn perform(&mut self, now: u64, pipeline: &mut Pipeline) {
            let mut actions = Vec::new();
            pipeline.pump(&mut actions);
            for action in actions {
                match action {
                    Action::Read { position, .. } => {
                        self.storage_free = self.storage_free.max(now) + self.read;
                        self.events.insert((self.storage_free, position, false));
                    }
                    Action::Copy(StartCopy { position, .. }) => {
                        self.link_free = self.link_free.max(now) + self.copy;
                        self.events.insert((self.link_free, position, true));
                    }
                }
            }
        }

        /// Handles events up to `until`.
        fn advance(&mut self, until: u64, pipeline: &mut Pipeline) {
            while let Some(&(time, position, is_copy)) = self.events.first() {
                if time > until {
                    return;
                }
                self.events.pop_first();
                if is_copy {
                    let _ = pipeline.copy_done(position);
                } else {
                    let _ = pipeline.read_done(position, true);
                }
                self.perform(time, pipeline);
            }
        }

        /// Time that `steps` steps take, one after the other.
        fn run(&mut self, pipeline: &mut Pipeline, steps: u64) -> u64 {
            let mut now = 0;
            self.perform(now, pipeline);
            for _ in 0..steps * pipeline.order.len() as u64 {
                pipeline.demand();
                self.perform(now, pipeline);
                while pipeline.poll() == Poll::Pending {
                    let next = self.events.first().expect("something is in flight").0;
                    self.advance(next, pipeline);
                    now = now.max(next);
                }
                let position = pipeline.lease();
                self.advance(now + self.compute, pipeline);
                now += self.compute;
                pipeline.release(position);
                self.perform(now, pipeline);
            }
            now
        }
    }

    fn seconds(
        order: Vec<Streamed>,
        entries: (usize, usize),
        lookahead: Lookahead,
        steps: u64,
    ) -> u64 {
        let mut pipeline = Pipeline::new(order, entries.0, entries.1, lookahead);
        let mut clock = VirtualClock {
            read: 10,
            copy: 10,
            compute: 10,
            storage_free: 0,
            link_free: 0,
            events: BTreeSet::new(),
        };
        clock.run(&mut pipeline, steps)
    }

    #[test]
    fn a_step_of_n_groups_takes_at_most_n_plus_ring_entries_delays() {
        for executor in [Executor::Host, Executor::Device] {
            for home in [Tier::Storage, Tier::Host] {
                if (home, executor) == (Tier::Host, Executor::Host) {
                    continue;
                }
                for entries in 2..5 {
                    for count in [1_u32, 2, 3, 10, 50] {
                        let order = order(count, home, executor);
                        let took = seconds(order, (entries, entries), Lookahead::Ring, 1);
                        let bound = (u64::from(count) + entries as u64) * 10;
                        assert!(
                            took <= bound,
                            "{count} groups from {home}, {entries} entries, {executor:?}: {took} > {bound}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn prefetch_runs_across_the_end_of_a_step() {
        let took = seconds(
            order(10, Tier::Storage, Executor::Device),
            (3, 3),
            Lookahead::Ring,
            20,
        );
        // The pipeline fills once, not at every step.
        assert!(took <= (20 * 10 + 6) * 10, "{took}");
    }

    #[test]
    fn without_lookahead_nothing_overlaps() {
        let took = seconds(
            order(10, Tier::Storage, Executor::Device),
            (3, 3),
            Lookahead::None,
            2,
        );
        assert_eq!(took, 2 * 10 * 30);
        let took = seconds(
            order(10, Tier::Storage, Executor::Host),
            (3, 3),
            Lookahead::None,
            2,
        );
        assert_eq!(took, 2 * 10 * 20);
    }

    #[test]
    fn reads_that_complete_in_any_order_are_lent_in_plan_order_and_no_entry_is_used_twice() {
        for seed in 0..200_u64 {
            let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            let mut next = move |bound: usize| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                (random % bound as u64) as usize
            };
            let kinds = [
                (Tier::Storage, Executor::Host),
                (Tier::Storage, Executor::Device),
                (Tier::Host, Executor::Device),
            ];
            let order: Vec<_> = (0..7)
                .map(|group| {
                    let (home, executor) = kinds[next(3)];
                    Streamed {
                        group: GroupId(group),
                        home,
                        executor,
                    }
                })
                .collect();
            let mut pipeline =
                Pipeline::new(order.clone(), 2 + next(3), 2 + next(2), Lookahead::Ring);
            let mut flying: Vec<Action> = Vec::new();
            let mut held = BTreeSet::new();
            for position in 0..100_u64 {
                loop {
                    let mut actions = Vec::new();
                    pipeline.pump(&mut actions);
                    for action in &actions {
                        let entry = match *action {
                            Action::Read { host_entry, .. } => (false, host_entry),
                            Action::Copy(StartCopy { device_entry, .. }) => (true, device_entry),
                        };
                        assert!(
                            held.insert(entry),
                            "entry {entry:?} is in use (seed {seed})"
                        );
                    }
                    flying.extend(actions);
                    if let Poll::Ready(_) = pipeline.poll() {
                        break;
                    }
                    assert!(!flying.is_empty(), "deadlock at {position} (seed {seed})");
                    match flying.swap_remove(next(flying.len())) {
                        Action::Read { position, .. } => {
                            pipeline.read_done(position, true);
                        }
                        Action::Copy(StartCopy {
                            position,
                            host_entry,
                            ..
                        }) => {
                            pipeline.copy_done(position);
                            if let Some(entry) = host_entry {
                                held.remove(&(false, entry));
                            }
                        }
                    }
                }
                let Poll::Ready(entry) = pipeline.poll() else {
                    unreachable!()
                };
                assert_eq!(pipeline.lease(), position);
                assert_eq!(
                    pipeline.streamed(position).group,
                    order[position as usize % order.len()].group
                );
                pipeline.release(position);
                held.remove(&match entry {
                    Entry::Host(entry) => (false, entry),
                    Entry::Device(entry) => (true, entry),
                });
            }
        }
    }

    /// A device that orders its own work lends at once what it copies: computation runs ahead as far as there are device
    /// entries, and a host entry is read into again only when the copy from it is over.
    #[test]
    fn an_ordered_copy_is_lent_at_once_and_its_source_is_kept_until_it_is_over() {
        let order = order(8, Tier::Storage, Executor::Device);
        let mut pipeline = Pipeline::new(order, 2, 2, Lookahead::Ring);
        let mut copies = VecDeque::new();
        let mut reading = BTreeSet::new();
        for position in 0..40_u64 {
            let mut started = true;
            while started {
                let mut actions = Vec::new();
                pipeline.pump(&mut actions);
                started = !actions.is_empty();
                for action in actions {
                    match action {
                        Action::Read {
                            position,
                            host_entry,
                            ..
                        } => {
                            let copied_from = copies.iter().any(|&(_, entry)| entry == host_entry);
                            assert!(!copied_from, "entry {host_entry} is refilled too early");
                            reading.insert(position);
                        }
                        Action::Copy(StartCopy {
                            position,
                            host_entry,
                            device_entry,
                            ..
                        }) => {
                            copies.push_back((position, host_entry.expect("read from storage")));
                            assert!(copies.len() <= 2, "more copies than device entries");
                            assert_eq!(pipeline.copy_ordered(position), device_entry);
                        }
                    }
                }
                if let Some(first) = reading.pop_first() {
                    pipeline.read_done(first, true);
                    started = true;
                } else if !matches!(pipeline.poll(), Poll::Ready(_)) {
                    // Only now: copies end as late as the ring allows.
                    let (first, entry) = copies.pop_front().expect("something is under way");
                    assert_eq!(pipeline.copy_left(first), Some(entry));
                    started = true;
                }
            }
            assert!(matches!(pipeline.poll(), Poll::Ready(Entry::Device(_))));
            assert_eq!(pipeline.lease(), position);
            pipeline.release(position);
        }
        assert!(!copies.is_empty(), "computation ran ahead of copies");
        pipeline.stop();
        let leaving = copies.len();
        assert_eq!(pipeline.in_flight(), leaving, "what reads must end first");
        for (position, _) in copies {
            pipeline.copy_left(position);
        }
        assert_eq!(pipeline.in_flight(), 0);
        pipeline.restart();
    }

    #[test]
    fn a_failed_read_fails_its_lease_and_a_restart_begins_at_the_first_group() {
        let mut pipeline = Pipeline::new(
            order(4, Tier::Storage, Executor::Host),
            2,
            0,
            Lookahead::Ring,
        );
        let mut actions = Vec::new();
        pipeline.pump(&mut actions);
        pipeline.read_done(0, true);
        pipeline.read_done(1, false);
        let position = pipeline.lease();
        assert_eq!(pipeline.poll(), Poll::Failed);
        pipeline.release(position);
        pipeline.pump(&mut actions);
        pipeline.stop();
        // The freed entry was taken for position 2: it has to land before the memory is used again.
        assert_eq!(pipeline.in_flight(), 1);
        pipeline.read_done(2, true);
        pipeline.restart();
        pipeline.resume();
        assert_eq!(pipeline.streamed(pipeline.consumer()).group, GroupId(0));
        actions.clear();
        pipeline.pump(&mut actions);
        assert_eq!(actions.len(), 2, "both entries are free again");
    }

    #[test]
    fn between_two_steps_another_order_begins_at_its_first_group() {
        let to_device = order(5, Tier::Host, Executor::Device);
        let mut pipeline = Pipeline::new(to_device.clone(), 2, 2, Lookahead::Ring);
        let mut clock = VirtualClock {
            read: 10,
            copy: 10,
            compute: 10,
            storage_free: 0,
            link_free: 0,
            events: BTreeSet::new(),
        };
        let on_host = order(3, Tier::Storage, Executor::Host);
        for next in [on_host, Vec::new(), to_device] {
            clock.run(&mut pipeline, 2);
            // The next step's groups are on their way: they land, and are forgotten.
            pipeline.stop();
            clock.advance(u64::MAX, &mut pipeline);
            assert_eq!(pipeline.in_flight(), 0);
            pipeline.restart();
            pipeline.reorder(next.clone());
            pipeline.resume();
            assert!(pipeline.at_border());
            if let Some(first) = next.first() {
                assert_eq!(pipeline.streamed(pipeline.consumer()), *first);
            }
        }
        clock.run(&mut pipeline, 2);
    }

    #[test]
    fn what_failed_before_a_step_is_read_again_once() {
        let order = order(4, Tier::Storage, Executor::Host);
        let mut pipeline = Pipeline::new(order, 2, 0, Lookahead::Ring);
        let mut actions = Vec::new();
        pipeline.pump(&mut actions);
        assert_eq!(actions.len(), 2);
        // One failure has come when the step begins, the other comes after.
        assert!(pipeline.read_done(0, false).1);
        pipeline.resume();
        assert!(!pipeline.read_done(1, false).1);
        actions.clear();
        pipeline.pump(&mut actions);
        assert_eq!(actions.len(), 2, "{actions:?}");
        pipeline.read_done(0, true);
        assert!(matches!(pipeline.poll(), Poll::Ready(_)));
        let position = pipeline.lease();
        pipeline.release(position);
        // Failing in the step itself is final.
        assert!(pipeline.read_done(1, false).1);
        assert_eq!(pipeline.poll(), Poll::Failed);
    }
}
