//! Log-probabilities of the model's own distribution: before temperature and filters, as OpenAI reports them.

use super::largest::keep_largest;
use super::{SampleError, Scratch, largest_logit};

/// What is reported with one token. Natural logarithms.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbabilities {
    pub chosen: f32,
    /// The most probable tokens, most probable first; lowest id first among equals.
    pub top: Vec<(u32, f32)>,
}

/// Log-softmax of `logits` at `chosen` and at the `top` most probable tokens.
///
/// # Errors
///
/// As [`super::Sampler::sample`].
pub fn log_probabilities(
    logits: &[f32],
    chosen: u32,
    top: usize,
    scratch: &mut Scratch,
) -> Result<LogProbabilities, SampleError> {
    let max = f64::from(largest_logit(logits)?);
    let sum: f64 = logits.iter().map(|v| (f64::from(*v) - max).exp()).sum();
    let log_sum = max + sum.ln();
    let at = |logit: f32| (f64::from(logit) - log_sum) as f32;
    scratch.reserve(logits.len());
    keep_largest(logits, top.min(logits.len()), &mut scratch.candidates);
    Ok(LogProbabilities {
        chosen: at(logits[chosen as usize]),
        top: scratch
            .candidates
            .iter()
            .map(|c| (c.id, at(c.logit)))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(logits: &[f32], chosen: u32, top: usize, expected: (f32, &[(u32, f32)])) {
        let found = log_probabilities(logits, chosen, top, &mut Scratch::default()).unwrap();
        // A logit of -1000 is known to 6e-5 only.
        let close = |a: f32, b: f32| (a - b).abs() <= 1e-4;
        assert!(close(found.chosen, expected.0), "{found:?} for {logits:?}");
        assert_eq!(found.top.len(), expected.1.len(), "{found:?}");
        for (a, b) in found.top.iter().zip(expected.1) {
            assert!(a.0 == b.0 && close(a.1, b.1), "{found:?} for {logits:?}");
        }
    }

    #[test]
    fn known_distributions() {
        let ln = f32::ln;
        for offset in [0.0, 80.0, -1000.0] {
            let logits = [0.25, 0.125, 0.5, 0.125].map(|p: f32| p.ln() + offset);
            let top = [(2, ln(0.5)), (0, ln(0.25)), (1, ln(0.125))];
            check(&logits, 1, 3, (ln(0.125), &top));
        }
        check(&[1.0; 4], 3, 2, (ln(0.25), &[(0, ln(0.25)), (1, ln(0.25))]));
        check(&[1.0, 1.0], 0, 9, (ln(0.5), &[(0, ln(0.5)), (1, ln(0.5))]));
        check(&[5.0], 0, 0, (0.0, &[]));
        // e^-10000 is 0 in any float, and its logarithm is not.
        check(&[0.0, 1e4], 0, 2, (-1e4, &[(1, 0.0), (0, -1e4)]));
    }

    #[test]
    fn a_nan_is_an_error() {
        let found = log_probabilities(&[0.0, f32::NAN], 0, 1, &mut Scratch::default());
        assert!(matches!(found, Err(SampleError::NotFinite { id: 1, .. })));
    }
}
