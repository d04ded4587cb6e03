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
    /// here, where it hears of a cancelled step.
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

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped
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
mod tests;
