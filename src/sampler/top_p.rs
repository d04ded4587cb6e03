//! The smallest set of most probable tokens that has a given share of the probability, without sorting them.

use super::exp_below;
use super::largest::{Candidate, by_rank};

/// Classes of candidates by their distance from the largest logit: 1/32 of a nat each. Below the last border lies
/// less than e^-31 of the largest probability per token, all in one class.
const CLASSES: usize = 1024;
const CLASSES_PER_NAT: f64 = 32.0;

fn class_of(candidate: &Candidate, max: f32) -> usize {
    let distance = (f64::from(max) - f64::from(candidate.logit)) * CLASSES_PER_NAT;
    (distance as usize).min(CLASSES - 1)
}

/// Keeps the fewest candidates that have `top_p` of the probability of all of them together: the most probable ones,
/// and of equals the lowest ids. At least one is kept. `max` is the largest logit among them.
///
/// Classes are summed from the most probable down; only the class in which the sum passes `top_p` is sorted. A flat
/// distribution, where the set is a good part of the vocabulary, costs no more than a steep one.
/// `at_border` is scratch.
pub(super) fn keep_top_p(
    candidates: &mut Vec<Candidate>,
    top_p: f32,
    max: f32,
    at_border: &mut Vec<Candidate>,
) {
    let mut classes = [0.0_f64; CLASSES];
    for candidate in &*candidates {
        classes[class_of(candidate, max)] += exp_below(candidate.logit, max);
    }
    let mut wanted = f64::from(top_p) * classes.iter().sum::<f64>();
    let Some(border) = classes.iter().position(|class| {
        let passes = *class > 0.0 && *class >= wanted;
        if !passes {
            wanted -= class;
        }
        passes
    }) else {
        // Rounding, when top_p is nearly 1.
        return;
    };
    at_border.clear();
    candidates.retain(|candidate| {
        let class = class_of(candidate, max);
        if class == border {
            at_border.push(*candidate);
        }
        class < border
    });
    at_border.sort_unstable_by(by_rank);
    for &candidate in &*at_border {
        candidates.push(candidate);
        wanted -= exp_below(candidate.logit, max);
        if wanted <= 0.0 {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::ChaCha12Rng;
    use rand_chacha::rand_core::{Rng, SeedableRng};

    /// Sort, sum, cut.
    fn reference(mut candidates: Vec<Candidate>, top_p: f32, max: f32) -> Vec<Candidate> {
        candidates.sort_by(by_rank);
        let total: f64 = candidates.iter().map(|c| exp_below(c.logit, max)).sum();
        let mut reached = 0.0;
        let kept = candidates.iter().position(|c| {
            reached += exp_below(c.logit, max);
            reached >= f64::from(top_p) * total
        });
        candidates.truncate(kept.map_or(candidates.len(), |index| index + 1));
        candidates
    }

    #[test]
    fn equals_sort_and_cut() {
        let mut random = ChaCha12Rng::seed_from_u64(3);
        for spread in [0.001, 1.0, 5.0, 100.0] {
            for length in [1_u32, 2, 100, 5000] {
                let candidates: Vec<Candidate> = (0..length)
                    .map(|id| Candidate {
                        id,
                        logit: (random.next_u32() >> 8) as f32 / (1 << 24) as f32 * spread - 7.0,
                    })
                    .collect();
                let max = candidates.iter().map(|c| c.logit).fold(-100.0, f32::max);
                for top_p in [1e-30, 0.123, 0.5, 0.877, 0.99, 0.999_99] {
                    let mut kept = candidates.clone();
                    keep_top_p(&mut kept, top_p, max, &mut Vec::new());
                    kept.sort_by(by_rank);
                    let expected = reference(candidates.clone(), top_p, max);
                    assert_eq!(kept, expected, "{top_p} of {length} over {spread}");
                }
            }
        }
    }

    #[test]
    fn of_equals_the_lowest_ids_stay() {
        let mut kept: Vec<Candidate> = (0..10_000).map(|id| Candidate { id, logit: 0.5 }).collect();
        keep_top_p(&mut kept, 0.5, 0.5, &mut Vec::new());
        let ids: Vec<u32> = kept.iter().map(|c| c.id).collect();
        assert_eq!(ids, (0..5000).collect::<Vec<u32>>());
    }
}
