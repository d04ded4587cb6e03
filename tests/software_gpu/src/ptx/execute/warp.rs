//! One warp: which of its lanes go on, and the loop over instructions.
//!
//! Lanes that are at the same instruction are one group. The ready group at the lowest instruction runs, until it has
//! come to where another group waits (then they are one), has divided, or cannot go on. Compilers put what comes together
//! again behind what divides, so the lowest first brings lanes together early.

use super::super::alu::call;
use super::super::lanes::{Lanes, NONE, lanes_of};
use super::super::program::{Kernel, Op};
use super::Machine;
use super::block::lanes_of_warp;
use crate::seam::{Fault, GlobalMemory};

/// After so many instructions another warp has its turn, so that one may wait in a loop for what another writes.
const TURN: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Ready,
    /// Waits for lanes of its warp.
    AtExchange,
    AtBarrier(usize),
}

/// Lanes that are at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) instruction: u32,
    pub(super) lanes: u32,
    pub(super) state: State,
}

#[derive(Debug)]
pub(super) struct Warp {
    pub(super) index: usize,
    pub(super) lanes: Lanes,
    /// The lanes it has: not all in the last warp of a block.
    pub(super) all: u32,
    /// Those that have not exited.
    pub(super) live: u32,
    pub(super) groups: Vec<Group>,
}

/// Why a group stops.
enum Stop {
    /// Its lanes are in the warp's groups again.
    Returned,
    TurnOver,
}

impl Warp {
    pub(super) fn new(kernel: &Kernel, index: usize, threads: usize) -> Warp {
        Warp {
            index,
            lanes: Lanes::new(kernel.rows, kernel.predicates),
            all: lanes_of_warp(index, threads),
            live: 0,
            groups: Vec::new(),
        }
    }

    pub(super) fn begin_block(&mut self) {
        self.live = self.all;
        self.groups.clear();
        self.put(0, self.all, State::Ready);
    }

    pub(super) fn is_ready(&self) -> bool {
        self.groups.iter().any(|group| group.state == State::Ready)
    }

    /// The lanes that wait at a barrier.
    pub(super) fn waiting_at(&self, id: usize) -> u32 {
        let waiting = self
            .groups
            .iter()
            .filter(|group| group.state == State::AtBarrier(id));
        waiting.fold(0, |lanes, group| lanes | group.lanes)
    }

    pub(super) fn put(&mut self, instruction: u32, lanes: u32, state: State) {
        if lanes != 0 {
            self.groups.push(Group {
                instruction,
                lanes,
                state,
            });
        }
    }

    /// Takes the ready lanes at the lowest instruction out of the groups, with those that wait there for them.
    fn take_lowest(&mut self) -> Option<(u32, u32)> {
        let ready = self
            .groups
            .iter()
            .filter(|group| group.state == State::Ready);
        let lowest = ready.map(|group| group.instruction).min()?;
        let mut lanes = 0;
        self.groups.retain(|group| {
            let joins = group.instruction == lowest && !matches!(group.state, State::AtBarrier(_));
            if joins {
                lanes |= group.lanes;
            }
            !joins
        });
        Some((lowest, lanes))
    }

    fn exit(&mut self, lanes: u32) {
        self.live &= !lanes;
        // Those who wait may have waited for these.
        for group in &mut self.groups {
            if group.state == State::AtExchange {
                group.state = State::Ready;
            }
        }
    }
}

impl<M: GlobalMemory> Machine<'_, M> {
    /// Runs a warp until none of its lanes can go on, or its turn is over.
    pub(super) fn run_warp(&mut self, warp: &mut Warp, arrived: &mut [u32]) -> Result<(), Fault> {
        let end = self.clock + TURN;
        while let Some((instruction, lanes)) = warp.take_lowest() {
            if let Stop::TurnOver = self.run_group(warp, instruction, lanes, end, arrived)? {
                break;
            }
        }
        Ok(())
    }

    fn run_group(
        &mut self,
        warp: &mut Warp,
        mut at: u32,
        active: u32,
        end: u64,
        arrived: &mut [u32],
    ) -> Result<Stop, Fault> {
        let kernel = self.kernel;
        // Where another group is met.
        let meeting = warp
            .groups
            .iter()
            .map(|group| group.instruction)
            .filter(|&other| other > at)
            .min()
            .unwrap_or(NONE);
        loop {
            let instruction = &kernel.code[at as usize];
            let mask = if instruction.guard == NONE {
                active
            } else {
                active
                    & warp
                        .lanes
                        .predicate(instruction.guard, instruction.guard_negated)
            };
            self.clock += 1;
            if mask == 0 {
                at += 1;
                if at >= meeting {
                    warp.put(at, active, State::Ready);
                    return Ok(Stop::Returned);
                }
                continue;
            }
            let mut next = at + 1;
            match &instruction.op {
                Op::Alu { run, slots } => call(*run, &mut warp.lanes, slots, mask),
                Op::Predicates { run, d, a, b } => {
                    let bits = run(
                        warp.lanes.predicate(*a, false),
                        warp.lanes.predicate(*b, false),
                    );
                    warp.lanes.set_predicate(*d, mask, bits);
                }
                Op::Load(transfer) => self.load(warp, transfer, mask, at)?,
                Op::Store(transfer) => self.store(warp, transfer, mask, at)?,
                Op::Atomic(atomic) => self.atomic(warp, atomic, mask, at)?,
                Op::Branch { target } => {
                    if mask != active {
                        warp.put(next, active & !mask, State::Ready);
                        warp.put(*target, mask, State::Ready);
                        return Ok(Stop::Returned);
                    }
                    next = *target;
                    if self.clock >= end {
                        warp.put(next, active, State::Ready);
                        return Ok(Stop::TurnOver);
                    }
                    if !warp.groups.is_empty() {
                        warp.put(next, active, State::Ready);
                        return Ok(Stop::Returned);
                    }
                }
                Op::BranchTable { index, targets } => {
                    for lane in lanes_of(mask) {
                        let index = warp.lanes.narrow(*index)[lane] as usize;
                        let Some(&target) = targets.get(index) else {
                            let message =
                                format!("entry {index} of a table of {} targets", targets.len());
                            return Err(self.fault(warp.index, 1 << lane, at, message));
                        };
                        warp.put(target, 1 << lane, State::Ready);
                    }
                    warp.put(next, active & !mask, State::Ready);
                    return Ok(Stop::Returned);
                }
                Op::Exit => {
                    warp.exit(mask);
                    if mask == active {
                        return Ok(Stop::Returned);
                    }
                    warp.put(next, active & !mask, State::Ready);
                    return Ok(Stop::Returned);
                }
                Op::Trap => return Err(self.fault(warp.index, mask, at, "the kernel gives up")),
                Op::Barrier(barrier) => {
                    let lane = lanes_of(mask).next().unwrap_or(0);
                    let id = warp.lanes.narrow(barrier.id)[lane] as usize;
                    let Some(arrived) = arrived.get_mut(id) else {
                        return Err(self.fault(
                            warp.index,
                            mask,
                            at,
                            format!("barrier {id} does not exist"),
                        ));
                    };
                    if barrier.waits {
                        warp.put(at, mask, State::AtBarrier(id));
                        warp.put(next, active & !mask, State::Ready);
                        return Ok(Stop::Returned);
                    }
                    *arrived += mask.count_ones();
                }
                Op::WarpBarrier { .. } | Op::Shuffle(_) | Op::Vote { .. } | Op::Reduce { .. } => {
                    let done = self.exchange(warp, &instruction.op, mask, at)?;
                    if done != mask {
                        warp.put(at, mask & !done, State::AtExchange);
                        warp.put(next, active & !mask | done, State::Ready);
                        return Ok(Stop::Returned);
                    }
                }
                Op::ActiveMask { d } => {
                    for lane in lanes_of(mask) {
                        warp.lanes.narrow_mut(*d)[lane] = mask;
                    }
                }
                Op::Clock { d, wide } => {
                    for lane in lanes_of(mask) {
                        if *wide {
                            warp.lanes.wide_mut(*d)[lane] = self.clock;
                        } else {
                            warp.lanes.narrow_mut(*d)[lane] = self.clock as u32;
                        }
                    }
                }
            }
            at = next;
            if at >= meeting {
                warp.put(at, active, State::Ready);
                return Ok(Stop::Returned);
            }
        }
    }
}
