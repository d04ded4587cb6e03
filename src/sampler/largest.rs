//! The few largest of many logits, without sorting the many.

/// A token that may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) id: u32,
    pub(super) logit: f32,
}

/// Largest logit first, lowest id first among equals.
pub(super) fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}

/// Fills `kept` with the `count` largest logits, largest first, lowest id first among equals. Minus infinity is never
/// kept, so there may be fewer. The logits hold no NaN.
///
/// One pass of comparisons with the smallest that can still matter; what passes is collected, and the collection is
/// halved by selection when it is full. For 40 of 128 thousand that touches a few hundred candidates.
pub(super) fn keep_largest(logits: &[f32], count: usize, kept: &mut Vec<Candidate>) {
    kept.clear();
    if count == 0 {
        return;
    }
    let full = count.saturating_mul(2).max(64);
    let mut floor = f32::NEG_INFINITY;
    for (id, &logit) in logits.iter().enumerate() {
        // Ids ascend, so an equal of the floor comes too late.
        if logit > floor {
            kept.push(Candidate {
                id: id as u32,
                logit,
            });
            if kept.len() >= full {
                kept.select_nth_unstable_by(count - 1, by_rank);
                kept.truncate(count);
                floor = kept[count - 1].logit;
            }
        }
    }
    if kept.len() > count {
        kept.select_nth_unstable_by(count - 1, by_rank);
        kept.truncate(count);
    }
    kept.sort_unstable_by(by_rank);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::ChaCha12Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    #[test]
    fn equals_a_full_sort() {
        let mut random = ChaCha12Rng::seed_from_u64(7);
        for length in [1_usize, 2, 63, 64, 65, 500, 5000] {
            // Few distinct values, so that ties cross every border.
            let logits: Vec<f32> = (0..length)
                .map(|_| (random.next_u32() % 50) as f32 - 25.0)
                .collect();
            let mut sorted: Vec<Candidate> = logits
                .iter()
                .enumerate()
                .map(|(id, &logit)| Candidate {
                    id: id as u32,
                    logit,
                })
                .collect();
            sorted.sort_by(by_rank);
            for count in [1, 2, 31, 32, 33, 64, 100, 499, 4999, 10_000] {
                let mut kept = Vec::new();
                keep_largest(&logits, count, &mut kept);
                assert_eq!(
                    kept,
                    sorted[..count.min(length)],
                    "{count} of {length} logits"
                );
            }
        }
    }

    #[test]
    fn masked_tokens_are_never_kept() {
        let logits = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 2.0];
        let mut kept = Vec::new();
        keep_largest(&logits, 4, &mut kept);
        assert_eq!(kept.iter().map(|c| c.id).collect::<Vec<_>>(), [3, 1]);
    }
}
