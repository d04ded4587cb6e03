//! What the lanes of a warp tell each other: shuffles, votes, reductions and the warp's own barrier.
//!
//! Each names the lanes that take part. It is done when all of those that have not exited are there; the lanes of one
//! instruction may belong to several such sets.

use super::super::lanes::{FULL, LANES, lanes_of, store};
use super::super::program::{Op, Shuffle, ShuffleMode, Vote};
use super::Machine;
use super::warp::{State, Warp};
use crate::seam::{Fault, GlobalMemory};

impl<M: GlobalMemory> Machine<'_, M> {
    /// Does an operation for those sets of lanes that are complete; the lanes of these.
    pub(super) fn exchange(
        &self,
        warp: &mut Warp,
        op: &Op,
        mask: u32,
        at: u32,
    ) -> Result<u32, Fault> {
        let members = match op {
            Op::WarpBarrier { members } | Op::Vote { members, .. } | Op::Reduce { members, .. } => {
                *members
            }
            Op::Shuffle(shuffle) => shuffle.members,
            _ => return Ok(mask),
        };
        let members = *warp.lanes.narrow(members);
        if mask == FULL && members == [FULL; LANES] && !matches!(op, Op::WarpBarrier { .. }) {
            exchange_among(warp, op, mask);
            return Ok(mask);
        }
        let mut rest = mask;
        let mut done = 0;
        while let Some(first) = lanes_of(rest).next() {
            let set = members[first];
            let here = lanes_of(rest)
                .filter(|&lane| members[lane] == set)
                .fold(0u32, |here, lane| here | 1 << lane);
            rest &= !here;
            if here & !set != 0 {
                let message =
                    format!("a lane that is not among the members {set:#010x} that it names");
                return Err(self.fault(warp.index, here & !set, at, message));
            }
            let missing = set & warp.live & !here;
            if let Op::WarpBarrier { .. } = op {
                if self.pass_warp_barrier(warp, missing) {
                    done |= here;
                }
            } else if missing == 0 {
                exchange_among(warp, op, here);
                done |= here;
            }
        }
        Ok(done)
    }

    /// Lanes may meet at different barriers of the warp: lets those that wait go on if they are all that is missing.
    fn pass_warp_barrier(&self, warp: &mut Warp, missing: u32) -> bool {
        let waits = |instruction: u32| {
            matches!(
                self.kernel.code[instruction as usize].op,
                Op::WarpBarrier { .. }
            )
        };
        let waiting = warp
            .groups
            .iter()
            .filter(|group| group.state == State::AtExchange && waits(group.instruction))
            .fold(0, |lanes, group| lanes | group.lanes);
        if missing & !waiting != 0 {
            return false;
        }
        let mut released = Vec::new();
        for group in &mut warp.groups {
            if group.state == State::AtExchange && waits(group.instruction) {
                let lanes = group.lanes & missing;
                group.lanes &= !lanes;
                released.push((group.instruction + 1, lanes));
            }
        }
        warp.groups.retain(|group| group.lanes != 0);
        for (instruction, lanes) in released {
            warp.put(instruction, lanes, State::Ready);
        }
        true
    }
}

fn exchange_among(warp: &mut Warp, op: &Op, here: u32) {
    match op {
        Op::Shuffle(shuffle) => shuffle_among(warp, shuffle, here),
        Op::Vote {
            kind,
            source,
            negated,
            d,
            p,
            ..
        } => {
            let votes = warp.lanes.predicate(*source, *negated) & here;
            let outcome = match kind {
                Vote::All => votes == here,
                Vote::Any => votes != 0,
                Vote::Uniform => votes == here || votes == 0,
                Vote::Ballot => {
                    for lane in lanes_of(here) {
                        warp.lanes.narrow_mut(*d)[lane] = votes;
                    }
                    return;
                }
            };
            warp.lanes
                .set_predicate(*p, here, if outcome { u32::MAX } else { 0 });
        }
        Op::Reduce { run, d, a, .. } => {
            let row = *warp.lanes.narrow(*a);
            let total = lanes_of(here)
                .map(|lane| row[lane])
                .reduce(run)
                .unwrap_or(0);
            for lane in lanes_of(here) {
                warp.lanes.narrow_mut(*d)[lane] = total;
            }
        }
        _ => {}
    }
}

/// Butterflies over the whole warp, as sums over it use them: lane ^ offset, all in range.
fn butterfly(warp: &mut Warp, shuffle: &Shuffle, offset: u32) -> bool {
    fn swapped<const OFFSET: usize>(values: &[u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|lane| values[lane ^ OFFSET])
    }
    let values = warp.lanes.narrow(shuffle.a);
    let results = match offset {
        1 => swapped::<1>(values),
        2 => swapped::<2>(values),
        4 => swapped::<4>(values),
        8 => swapped::<8>(values),
        16 => swapped::<16>(values),
        _ => return false,
    };
    store(&mut warp.lanes, shuffle.d, FULL, &results);
    warp.lanes.set_predicate(shuffle.p, FULL, FULL);
    true
}

/// A source lane that does not take part gives poison: PTX leaves its value undefined.
fn shuffle_among(warp: &mut Warp, shuffle: &Shuffle, here: u32) {
    let values = *warp.lanes.narrow(shuffle.a);
    let offsets = *warp.lanes.narrow(shuffle.lane);
    let clamps = *warp.lanes.narrow(shuffle.clamp);
    let offset = offsets[0];
    let whole = here == FULL && clamps == [31; LANES] && offsets == [offset; LANES];
    if whole && shuffle.mode == ShuffleMode::Butterfly && butterfly(warp, shuffle, offset) {
        return;
    }
    let mut results = [u32::MAX; LANES];
    let mut in_range = 0u32;
    for lane in 0..LANES {
        let (own, offset, clamp) = (lane as i32, (offsets[lane] & 31) as i32, clamps[lane]);
        let segment = (clamp >> 8 & 31) as i32;
        let most = own & segment | (clamp & 31) as i32 & !segment;
        let (source, valid) = match shuffle.mode {
            ShuffleMode::Up => (own - offset, own - offset >= most),
            ShuffleMode::Down => (own + offset, own + offset <= most),
            ShuffleMode::Butterfly => (own ^ offset, (own ^ offset) <= most),
            ShuffleMode::Index => {
                let source = own & segment | offset & !segment;
                (source, source <= most)
            }
        };
        let source = if valid { source & 31 } else { own };
        in_range |= u32::from(valid) << lane;
        if here >> source & 1 != 0 {
            results[lane] = values[source as usize];
        }
    }
    store(&mut warp.lanes, shuffle.d, here, &results);
    warp.lanes.set_predicate(shuffle.p, here, in_range);
}
