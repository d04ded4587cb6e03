//! Puts virtual registers into rows, so that registers that are never needed at the same time share one.
//!
//! Compilers write each value to a register of its own, thousands in an unrolled kernel; a row is 128 bytes, and a
//! block's warps should stay in the processor's cache. Liveness, then a linear scan over the intervals from a register's
//! first to its last position. Lanes of a warp that are at different places do not disturb each other: a row's lanes are
//! independent, and what holds for each thread's own program holds for all of them.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

use super::lanes::{NONE, Register};
use super::lower::body::{Lowered, Virtual};
use super::program::{Fixed, Op, Role};

#[derive(Debug)]
pub(super) struct Allocation {
    /// Rows that are read only, and what they hold.
    pub(super) fixed: Vec<(Register, Fixed)>,
    pub(super) rows: usize,
    /// Rows that may be read before they are written.
    pub(super) poisoned: Vec<Register>,
}

/// Rewrites the code's registers to rows.
pub(super) fn allocate(lowered: &mut Lowered) -> Allocation {
    let blocks = blocks(lowered);
    let live = liveness(lowered, &blocks);
    let intervals = intervals(lowered, &blocks, &live);

    let mut rows_of = vec![NONE; lowered.registers.len()];
    let mut rows = 0u32;
    let mut fixed = Vec::new();
    for wide in [true, false] {
        for (register, info) in lowered.registers.iter().enumerate() {
            if let Some(value) = info.fixed.filter(|_| info.wide == wide) {
                rows_of[register] = rows;
                fixed.push((rows, value));
                rows += 1 + u32::from(wide);
            }
        }
    }
    for wide in [true, false] {
        rows = scan(lowered, &intervals, wide, rows, &mut rows_of);
    }
    let mut poisoned = Vec::new();
    if let Some(entry) = live.first() {
        for register in entry.at_start.iter() {
            let row = rows_of[register];
            poisoned.push(row);
            if lowered.registers[register].wide {
                poisoned.push(row + 1);
            }
        }
    }
    for instruction in &mut lowered.code {
        instruction
            .op
            .visit_registers(|register, _| *register = rows_of[*register as usize]);
    }
    Allocation {
        fixed,
        rows: rows as usize,
        poisoned,
    }
}

/// A run of instructions that are executed one after the other.
#[derive(Debug)]
struct Block {
    start: usize,
    end: usize,
    successors: Vec<usize>,
}

fn blocks(lowered: &Lowered) -> Vec<Block> {
    let code = &lowered.code;
    let mut starts = BTreeSet::from([0]);
    for (at, instruction) in code.iter().enumerate() {
        match &instruction.op {
            Op::Branch { target } => {
                starts.extend([*target as usize, at + 1]);
            }
            Op::BranchTable { targets, .. } => {
                starts.extend(targets.iter().map(|&target| target as usize));
                starts.insert(at + 1);
            }
            Op::Exit | Op::Trap => {
                starts.insert(at + 1);
            }
            _ => {}
        }
    }
    starts.retain(|&start| start < code.len());
    let starts: Vec<usize> = starts.into_iter().collect();
    let block_at = |position: u32| starts.partition_point(|&start| start <= position as usize) - 1;
    let ends = starts.iter().skip(1).copied().chain([code.len()]);
    starts
        .iter()
        .zip(ends)
        .enumerate()
        .map(|(index, (&start, end))| {
            let last = &code[end - 1];
            let (mut successors, ends_here): (Vec<usize>, bool) = match &last.op {
                Op::Branch { target } => (vec![block_at(*target)], true),
                Op::BranchTable { targets, .. } => (
                    targets.iter().map(|&target| block_at(target)).collect(),
                    true,
                ),
                Op::Exit | Op::Trap => (Vec::new(), true),
                _ => (Vec::new(), false),
            };
            if (!ends_here || last.guard != NONE) && index + 1 < starts.len() {
                successors.push(index + 1);
            }
            Block {
                start,
                end,
                successors,
            }
        })
        .collect()
}

/// A set of register numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Set(Vec<u64>);

impl Set {
    fn new(capacity: usize) -> Set {
        Set(vec![0; capacity.div_ceil(64)])
    }

    fn insert(&mut self, member: usize) {
        self.0[member / 64] |= 1 << (member % 64);
    }

    fn contains(&self, member: usize) -> bool {
        self.0[member / 64] >> (member % 64) & 1 != 0
    }

    fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(index, &word)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 != 0)
                .map(move |bit| index * 64 + bit)
        })
    }
}

/// The registers whose values are needed later.
#[derive(Debug)]
struct Live {
    at_start: Set,
    at_end: Set,
}

/// Whether a write leaves nothing of the value before. A guarded one does, except for a register whose reads have the
/// same guard.
fn replaces(guarded: bool, info: Virtual) -> bool {
    !guarded || info.temporary
}

fn liveness(lowered: &mut Lowered, blocks: &[Block]) -> Vec<Live> {
    let count = lowered.registers.len();
    let mut read_first = Vec::new();
    let mut replaced = Vec::new();
    for block in blocks {
        let (mut reads, mut writes) = (Set::new(count), Set::new(count));
        for instruction in &mut lowered.code[block.start..block.end] {
            let guarded = instruction.guard != NONE;
            instruction.op.visit_registers(|register, role| {
                let register = *register as usize;
                let info = lowered.registers[register];
                match role {
                    _ if info.fixed.is_some() => {}
                    Role::Read if !writes.contains(register) => reads.insert(register),
                    Role::Write if replaces(guarded, info) => writes.insert(register),
                    _ => {}
                }
            });
        }
        read_first.push(reads);
        replaced.push(writes);
    }
    let mut live: Vec<Live> = read_first
        .iter()
        .map(|reads| Live {
            at_start: reads.clone(),
            at_end: Set::new(count),
        })
        .collect();
    let mut changed = true;
    while changed {
        changed = false;
        for (index, block) in blocks.iter().enumerate().rev() {
            let mut at_end = Set::new(count);
            for &successor in &block.successors {
                for (word, &other) in at_end.0.iter_mut().zip(&live[successor].at_start.0) {
                    *word |= other;
                }
            }
            let mut at_start = read_first[index].clone();
            for ((word, &end), &gone) in
                at_start.0.iter_mut().zip(&at_end.0).zip(&replaced[index].0)
            {
                *word |= end & !gone;
            }
            if at_start != live[index].at_start || at_end != live[index].at_end {
                live[index] = Live { at_start, at_end };
                changed = true;
            }
        }
    }
    live
}

/// First and last position of a register: twice the instruction's number for a read, one more for a write.
type Interval = Option<(usize, usize)>;

fn intervals(lowered: &mut Lowered, blocks: &[Block], live: &[Live]) -> Vec<Interval> {
    let mut intervals: Vec<Interval> = vec![None; lowered.registers.len()];
    let mut extend = |register: usize, position: usize| {
        let (first, last) = intervals[register].unwrap_or((position, position));
        intervals[register] = Some((first.min(position), last.max(position)));
    };
    for (block, live) in blocks.iter().zip(live) {
        live.at_start
            .iter()
            .for_each(|register| extend(register, 2 * block.start));
        live.at_end
            .iter()
            .for_each(|register| extend(register, 2 * block.end));
        for (at, instruction) in lowered.code[block.start..block.end].iter_mut().enumerate() {
            let at = 2 * (block.start + at);
            instruction.op.visit_registers(|register, role| {
                extend(*register as usize, at + usize::from(role == Role::Write));
            });
        }
    }
    intervals
}

/// Gives rows from `rows` on to the registers of one width; the number of rows so far.
fn scan(
    lowered: &Lowered,
    intervals: &[Interval],
    wide: bool,
    mut rows: u32,
    rows_of: &mut [Register],
) -> u32 {
    let mut pending: Vec<(usize, usize, usize)> = intervals
        .iter()
        .enumerate()
        .filter(|(register, _)| {
            let info = lowered.registers[*register];
            info.wide == wide && info.fixed.is_none()
        })
        .filter_map(|(register, interval)| interval.map(|(first, last)| (first, last, register)))
        .collect();
    pending.sort_unstable();
    let mut occupied = BinaryHeap::new();
    let mut free = Vec::new();
    for (first, last, register) in pending {
        while let Some(&Reverse((end, row))) = occupied.peek() {
            if end >= first {
                break;
            }
            occupied.pop();
            free.push(row);
        }
        let row = free.pop().unwrap_or_else(|| {
            let row = rows;
            rows += 1 + u32::from(wide);
            row
        });
        rows_of[register] = row;
        occupied.push(Reverse((last, row)));
    }
    rows
}
