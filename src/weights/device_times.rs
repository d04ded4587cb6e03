//! How long a CUDA device waited for groups, and when it computed with them, by its own clock.
//!
//! The engine thread runs ahead of the device: a wait that it puts into the compute stream has not begun when the lease is
//! there, and one that held up the thread need not have held up the device. So a moment of the compute stream stands
//! before each wait and behind it. The first is recorded before the group is asked for, when the stream has been given
//! everything before it: what passes until the second, in which the stream has nothing to do, is what the device waited,
//! for the link or, where nothing could be copied yet, for the drive.
//!
//! Moments are asked for their times when the stream has passed them: at each lease, and for the last ones at the end of
//! the step, when it is done. Nobody waits for them.

use super::Weights;
use crate::memory::{CudaDevice, Moment};
use crate::placement::{Executor, GroupId, Tier};
use crate::trace::Computer;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::time::Instant;

/// What the compute stream was given and has perhaps not done yet, in its order: no more than the leases of a step and of
/// one before it that was given up, for a step begins when the stream is done with the last. Lives on the engine thread.
#[derive(Debug, Default)]
pub(super) struct DeviceTimes {
    pending: RefCell<VecDeque<Pending>>,
    /// The end of the last span that the trace was told: two that meet do not overlap, however exact the clocks are.
    told_until: Cell<Option<Instant>>,
}

#[derive(Debug)]
struct Pending {
    what: What,
    group: GroupId,
    began: Moment,
    ended: Moment,
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// For a group with this home.
    Wait(Tier),
    /// Where a trace is on.
    Computation,
}

impl DeviceTimes {
    pub(super) fn waited(&self, group: GroupId, home: Tier, began: Moment, ended: Moment) {
        self.push(What::Wait(home), group, began, ended);
    }

    pub(super) fn computed(&self, group: GroupId, began: Moment, ended: Moment) {
        self.push(What::Computation, group, began, ended);
    }

    fn push(&self, what: What, group: GroupId, began: Moment, ended: Moment) {
        self.pending.borrow_mut().push_back(Pending {
            what,
            group,
            began,
            ended,
        });
    }
}

impl Weights {
    /// Before a group is asked for that `executor` computes with: where that is a CUDA device, what it was given is done.
    pub(super) fn begin_device_wait(&self, executor: Executor) -> Option<Moment> {
        match executor {
            Executor::Device => self.cuda()?.compute_moment(),
            Executor::Host => None,
        }
    }

    /// When the stream has been told to wait for the group.
    pub(super) fn end_device_wait(&self, group: GroupId, home: Tier, began: Moment) {
        if let Some(ended) = self.cuda().and_then(CudaDevice::compute_moment) {
            self.device_times.waited(group, home, began, ended);
        }
    }

    /// Counts the waits that a CUDA device has come past, and tells the trace of them and of what it has computed.
    pub(super) fn take_device_times(&self) {
        let Some(device) = self.cuda() else { return };
        let mut pending = self.device_times.pending.borrow_mut();
        while let Some(first) = pending.front() {
            let Some(time) = device.time_between(&first.began, &first.ended) else {
                return;
            };
            if let What::Wait(home) = first.what {
                self.count_stall(home, time);
            }
            if self.trace().is_on()
                && let Some(began) = device.time_of(&first.began)
            {
                let until = self.device_times.told_until.get();
                let began = until.map_or(began, |until| began.max(until));
                let (group, ended) = (first.group.0, began + time);
                self.device_times.told_until.set(Some(ended));
                match first.what {
                    What::Wait(home) => {
                        self.trace().device_waited(group, home.name(), began, ended);
                    }
                    What::Computation => {
                        self.trace().computed(Computer::Device, group, began, ended);
                    }
                }
            }
            pending.pop_front();
        }
    }
}
