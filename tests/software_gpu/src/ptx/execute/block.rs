//! The warps of one block: in turns, until all have exited; barriers are released between the turns.

use super::super::lanes::{LANES, NONE, lanes_of};
use super::super::program::{Barrier, Op, Reduction};
use super::warp::{State, Warp};
use super::{Machine, shuffle};
use crate::seam::{Fault, GlobalMemory};

/// Barriers of a block.
const BARRIERS: usize = 16;

/// Instructions of a warp, summed over a block, after which its loops are taken to have no end: minutes. Blocks run one
/// after another, so one that waits in a loop for another block has none.
const BLOCK_INSTRUCTIONS_MAX: u64 = if cfg!(test) { 1 << 26 } else { 1 << 34 };

impl<M: GlobalMemory> Machine<'_, M> {
    /// Runs the current block to its end.
    pub(super) fn run_block(&mut self, warps: &mut [Warp]) -> Result<(), Fault> {
        self.begin_block(warps);
        let mut order: Vec<usize> = (0..warps.len()).collect();
        if let Some(seed) = self.launch.block_order_seed {
            shuffle(&mut order, seed ^ u64::from(self.block[0]).rotate_left(32));
        }
        // Threads that have passed a `bar.arrive`, by barrier.
        let mut arrived = [0u32; BARRIERS];
        let limit = self.clock + BLOCK_INSTRUCTIONS_MAX;
        loop {
            if self.clock > limit {
                return Err(self.unfinished(warps));
            }
            let mut ran = false;
            for &index in &order {
                let warp = &mut warps[index];
                if warp.is_ready() {
                    self.run_warp(warp, &mut arrived)?;
                    ran = true;
                }
            }
            if warps.iter().all(|warp| warp.live == 0) {
                return Ok(());
            }
            if !ran && !self.release_barriers(warps, &mut arrived)? {
                return Err(self.stuck(warps));
            }
        }
    }

    /// Lets the threads at each barrier that is complete go on; whether there was one.
    fn release_barriers(
        &mut self,
        warps: &mut [Warp],
        arrived: &mut [u32; BARRIERS],
    ) -> Result<bool, Fault> {
        let mut released = false;
        for (id, arrived) in arrived.iter_mut().enumerate() {
            let waiting: u32 = warps
                .iter()
                .map(|warp| warp.waiting_at(id).count_ones())
                .sum();
            if waiting == 0 {
                continue;
            }
            let live: u32 = warps.iter().map(|warp| warp.live.count_ones()).sum();
            let expected = self.expected_threads(warps, id);
            if waiting + *arrived < expected.unwrap_or(live) {
                continue;
            }
            self.check_aligned(warps, id)?;
            self.release(warps, id);
            *arrived = 0;
            released = true;
            self.shared.next_epoch();
        }
        Ok(released)
    }

    fn barrier(&self, instruction: u32) -> Option<&Barrier> {
        match &self.kernel.code[instruction as usize].op {
            Op::Barrier(barrier) => Some(barrier),
            _ => None,
        }
    }

    /// How many threads a barrier waits for, where its instruction says so.
    fn expected_threads(&self, warps: &[Warp], id: usize) -> Option<u32> {
        warps.iter().find_map(|warp| {
            let group = warp
                .groups
                .iter()
                .find(|group| group.state == State::AtBarrier(id))?;
            let threads = self.barrier(group.instruction)?.threads;
            let lane = lanes_of(group.lanes).next()?;
            (threads != NONE).then(|| warp.lanes.narrow(threads)[lane])
        })
    }

    /// `bar.sync` is for whole warps: all lanes at the same instruction, none of them gone.
    fn check_aligned(&self, warps: &[Warp], id: usize) -> Result<(), Fault> {
        for warp in warps {
            let mut groups = warp
                .groups
                .iter()
                .filter(|group| group.state == State::AtBarrier(id));
            let Some(first) = groups.next() else { continue };
            if !self
                .barrier(first.instruction)
                .is_some_and(|barrier| barrier.aligned)
            {
                continue;
            }
            if let Some(other) = groups.find(|group| group.instruction != first.instruction) {
                let message = format!(
                    "the warp's lanes are divided between this barrier (lanes {:#010x}) and {} (lanes {:#010x})",
                    first.lanes,
                    self.kernel.describe(other.instruction as usize),
                    other.lanes
                );
                return Err(self.fault(warp.index, first.lanes, first.instruction, message));
            }
            let missing = warp.all & !warp.waiting_at(id);
            if missing != 0 {
                let gone = if missing & !warp.live != 0 {
                    "have exited"
                } else {
                    "are elsewhere"
                };
                let message = format!(
                    "a barrier that only lanes {:#010x} of warp {} have reached; lanes {missing:#010x} {gone}",
                    warp.waiting_at(id),
                    warp.index
                );
                return Err(self.fault(warp.index, first.lanes, first.instruction, message));
            }
        }
        Ok(())
    }

    fn release(&self, warps: &mut [Warp], id: usize) {
        // What the threads bring, for `bar.red`.
        let (mut threads, mut holding) = (0u32, 0u32);
        for warp in warps.iter() {
            for group in warp
                .groups
                .iter()
                .filter(|group| group.state == State::AtBarrier(id))
            {
                if let Some(reduction) = self
                    .barrier(group.instruction)
                    .and_then(|barrier| barrier.reduction)
                {
                    let values = warp.lanes.predicate(reduction.source, reduction.negated);
                    threads += group.lanes.count_ones();
                    holding += (values & group.lanes).count_ones();
                }
            }
        }
        for warp in warps.iter_mut() {
            for group in warp
                .groups
                .iter_mut()
                .filter(|group| group.state == State::AtBarrier(id))
            {
                if let Some(reduction) = self
                    .barrier(group.instruction)
                    .and_then(|barrier| barrier.reduction)
                {
                    let outcome = match reduction.kind {
                        Reduction::Count => {
                            for lane in lanes_of(group.lanes) {
                                warp.lanes.narrow_mut(reduction.d)[lane] = holding;
                            }
                            false
                        }
                        Reduction::And => holding == threads,
                        Reduction::Or => holding > 0,
                    };
                    warp.lanes.set_predicate(
                        reduction.p,
                        group.lanes,
                        if outcome { u32::MAX } else { 0 },
                    );
                }
                group.state = State::Ready;
                group.instruction += 1;
            }
        }
    }

    /// Everybody waits.
    fn stuck(&self, warps: &[Warp]) -> Fault {
        self.fault_of_all(warps, "nobody can go on")
    }

    fn unfinished(&self, warps: &[Warp]) -> Fault {
        let message =
            format!("the block does not end: {BLOCK_INSTRUCTIONS_MAX} instructions so far");
        self.fault_of_all(warps, &message)
    }

    /// A fault that tells where all warps are.
    fn fault_of_all(&self, warps: &[Warp], what: &str) -> Fault {
        let mut waiting = Vec::new();
        for warp in warps {
            for group in &warp.groups {
                waiting.push(format!(
                    "warp {} lanes {:#010x} at {}",
                    warp.index,
                    group.lanes,
                    self.kernel.describe(group.instruction as usize)
                ));
            }
            if warp.live == 0 {
                waiting.push(format!("warp {} has exited", warp.index));
            }
        }
        let all = waiting.len();
        waiting.truncate(8);
        if all > waiting.len() {
            waiting.push(format!("{} more", all - waiting.len()));
        }
        let first = warps
            .iter()
            .find_map(|warp| Some((warp, warp.groups.first()?)));
        let message = format!("{what}: {}", waiting.join("; "));
        match first {
            Some((warp, group)) => self.fault(warp.index, group.lanes, group.instruction, message),
            None => Fault(format!("kernel {}: {message}", self.kernel.name())),
        }
    }
}

/// The lanes that a warp of a block has.
pub(super) fn lanes_of_warp(index: usize, threads: usize) -> u32 {
    let count = (threads - index * LANES).min(LANES);
    u32::MAX >> (LANES - count)
}
