//! Which groups rest where.
//!
//! Access is cyclic: a step uses every group once, in order, and then the next step does. So no group deserves a home
//! more than another of its size, and what counts is that those that are streamed lie evenly through the step: then two or
//! three ring entries overlap all transfer with computation, while a contiguous run of streamed groups would need a
//! buffer as large as the run.

use super::{Group, GroupKind, Tier};

/// How homes on the device are shared out where they do not suffice for all groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    /// Attention first, then feed-forward, then the head; each spread evenly where it does not fit whole.
    AttentionThenFeedForward,
    /// Attention first, then feed-forward and head as one sequence.
    AttentionThenRest,
    /// All as one sequence.
    Even,
}

/// Bytes left for the homes of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capacity {
    /// `None` without a device tier.
    pub(super) device: Option<u64>,
    pub(super) host: u64,
}

/// A home for every group. Those of the small group are accounted for by the caller.
pub(super) fn choose(groups: &[Group], capacity: Capacity, strategy: Strategy) -> Vec<Tier> {
    let mut homes = vec![Tier::Storage; groups.len()];
    let of_kinds = |kinds: &[GroupKind]| -> Vec<usize> {
        (0..groups.len())
            .filter(|&index| kinds.contains(&groups[index].kind))
            .collect()
    };
    for index in of_kinds(&[GroupKind::Small]) {
        homes[index] = match capacity.device {
            Some(_) => Tier::Device,
            None => Tier::Host,
        };
    }

    if let Some(mut left) = capacity.device {
        use GroupKind::{Attention, FeedForward, Head};
        let rounds: &[&[GroupKind]] = match strategy {
            Strategy::AttentionThenFeedForward => &[&[Attention], &[FeedForward], &[Head]],
            Strategy::AttentionThenRest => &[&[Attention], &[FeedForward, Head]],
            Strategy::Even => &[&[Attention, FeedForward, Head]],
        };
        for kinds in rounds {
            for index in spread(groups, &of_kinds(kinds), &mut left) {
                homes[index] = Tier::Device;
            }
        }
    }

    let mut left = capacity.host;
    let streamable = of_kinds(&[
        GroupKind::Attention,
        GroupKind::FeedForward,
        GroupKind::Head,
    ]);
    let homeless: Vec<usize> = streamable
        .into_iter()
        .filter(|&index| homes[index] == Tier::Storage)
        .collect();
    let chosen = spread(groups, &homeless, &mut left);
    for &index in &chosen {
        homes[index] = Tier::Host;
    }
    // A row of an embedding in storage costs one short read a token, any other group in storage costs its whole size
    // a step: so the embedding comes last.
    if chosen.len() == homeless.len() {
        for index in spread(groups, &of_kinds(&[GroupKind::Embedding]), &mut left) {
            homes[index] = Tier::Host;
        }
    }
    homes
}

/// Chooses from `candidates` (in order) those that get a home within `left` bytes, evenly by cumulative bytes, and
/// takes their bytes from `left`. What is left over is less than the smallest that was not chosen.
pub(super) fn spread(groups: &[Group], candidates: &[usize], left: &mut u64) -> Vec<usize> {
    let bytes_of = |index: usize| groups[index].home_bytes();
    let total: u128 = candidates.iter().map(|&i| u128::from(bytes_of(i))).sum();
    let capacity = u128::from(*left);
    if total <= capacity {
        *left = (capacity - total) as u64;
        return candidates.to_vec();
    }
    // Bresenham: the chosen never run ahead of their share of what has passed. Here total > capacity, so the share of
    // the whole is at most `left`.
    let (mut passed, mut used) = (0u128, 0u128);
    let (mut chosen, mut rest) = (Vec::new(), Vec::new());
    for &index in candidates {
        let bytes = u128::from(bytes_of(index));
        passed += bytes;
        if ahead_of_share(used + bytes, total, capacity, passed) {
            rest.push(index);
        } else {
            used += bytes;
            chosen.push(index);
        }
    }
    *left -= used as u64;
    rest.sort_by_key(|&index| (std::cmp::Reverse(bytes_of(index)), index));
    for index in rest {
        if bytes_of(index) <= *left {
            *left -= bytes_of(index);
            chosen.push(index);
        }
    }
    chosen.sort_unstable();
    chosen
}

/// used / passed > capacity / total, as products: all four are sums of sizes in one file, so that none overflows; absurd
/// ones saturate.
fn ahead_of_share(used: u128, total: u128, capacity: u128, passed: u128) -> bool {
    used.saturating_mul(total) > capacity.saturating_mul(passed)
}
