//! Which neighbours merge next: a queue of candidates, the best first.
//!
//! Most candidates are there before the first merge, and in a long run of one letter the new ones come in the order in
//! which they will be wanted. So what is there is sorted at once, which costs next to nothing where it is in order, and
//! only what is added since lies in a heap, where its order against the sorted ones matters. When the sorted ones are used
//! up, what the heap holds is sorted in their place.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Neighbours that may merge. Ordered by `key`, then from left to right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    /// Lower ones merge first.
    pub(super) key: u32,
    /// The place of the left neighbour.
    pub(super) left: u32,
    /// By which the owner of the queue sees whether both are still what they were.
    pub(super) pair: [u32; 2],
}

#[derive(Default)]
pub(super) struct MergeQueue {
    sorted: Vec<Candidate>,
    /// Of the sorted ones.
    taken: usize,
    fresh: BinaryHeap<Reverse<Candidate>>,
    /// Candidates so far: the work, which tests hold against a bound.
    pub(super) pushes: u64,
}

impl MergeQueue {
    pub(super) fn clear(&mut self) {
        self.sorted.clear();
        self.taken = 0;
        self.fresh.clear();
    }

    /// Adds a candidate before the first is taken; [`MergeQueue::sort`] follows.
    pub(super) fn seed(&mut self, candidate: Candidate) {
        self.pushes += 1;
        self.sorted.push(candidate);
    }

    pub(super) fn sort(&mut self) {
        self.sorted.sort_unstable();
    }

    pub(super) fn push(&mut self, candidate: Candidate) {
        self.pushes += 1;
        self.fresh.push(Reverse(candidate));
    }

    pub(super) fn pop(&mut self) -> Option<Candidate> {
        if self.taken == self.sorted.len() {
            self.sorted.clear();
            self.taken = 0;
            let fresh = self.fresh.drain();
            self.sorted
                .extend(fresh.map(|Reverse(candidate)| candidate));
            self.sort();
        }
        let next = *self.sorted.get(self.taken)?;
        match self.fresh.peek() {
            Some(Reverse(fresh)) if *fresh < next => self.fresh.pop().map(|Reverse(fresh)| fresh),
            _ => {
                self.taken += 1;
                Some(next)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};

    /// Against a plain heap, with what comes in between.
    #[test]
    fn candidates_come_in_order_whenever_they_were_added() {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(5);
        let mut queue = MergeQueue::default();
        for _ in 0..200 {
            queue.clear();
            let mut heap = BinaryHeap::new();
            let mut candidate = || Candidate {
                key: random.random_range(0..20),
                left: random.random_range(0..20),
                pair: [0; 2],
            };
            let count = candidate().key;
            for _ in 0..count {
                let seeded = candidate();
                queue.seed(seeded);
                heap.push(Reverse(seeded));
            }
            queue.sort();
            let mut added = 0;
            while let Some(Reverse(expected)) = heap.pop() {
                assert_eq!(queue.pop(), Some(expected));
                for _ in 0..candidate().key / 8 {
                    if added < 60 {
                        added += 1;
                        let fresh = candidate();
                        queue.push(fresh);
                        heap.push(Reverse(fresh));
                    }
                }
            }
            assert_eq!(queue.pop(), None);
        }
    }
}
