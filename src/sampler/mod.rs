//! Token choice: one [`Sampler`] per request, driven by the engine thread with that request's logits.
//!
//! The order is llama.cpp's: `top_k`, then `top_p` on what is left, then `min_p`, then temperature, then one draw. So
//! the filters judge the model's own distribution and the temperature acts among what they kept. Temperature 0 takes
//! the most probable token, the lowest id among equals, and draws nothing.
//!
//! A choice depends on the logits, the parameters, and how many draws the request has made; on nothing else.

mod largest;
mod log_probabilities;
mod parameters;
mod top_p;

pub use log_probabilities::{LogProbabilities, log_probabilities};
pub use parameters::SamplingParameters;

use largest::{Candidate, keep_largest};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use top_p::keep_top_p;

/// Why no token can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// NaN or plus infinity. Minus infinity is allowed: a masked token.
    #[error("the logit of token {id} is {value}")]
    NotFinite { id: usize, value: f32 },
    #[error("no token has a finite logit")]
    NoCandidate,
}

/// Buffers as long as the vocabulary, shared by all requests of an engine.
#[derive(Debug, Default)]
pub struct Scratch {
    candidates: Vec<Candidate>,
    /// Those of the class that top_p ends in.
    border: Vec<Candidate>,
    weights: Vec<f64>,
}

impl Scratch {
    /// Makes every buffer as long as the vocabulary, once: growing by doubling would take up to twice that.
    fn reserve(&mut self, vocabulary: usize) {
        fn reserve<T>(buffer: &mut Vec<T>, length: usize) {
            buffer.reserve_exact(length.saturating_sub(buffer.len()));
        }
        reserve(&mut self.candidates, vocabulary);
        reserve(&mut self.border, vocabulary);
        reserve(&mut self.weights, vocabulary);
    }
}

/// Chooses the tokens of one request.
#[derive(Debug)]
pub struct Sampler {
    parameters: SamplingParameters,
    random: ChaCha12Rng,
}

impl Sampler {
    pub fn new(parameters: &SamplingParameters) -> Sampler {
        Sampler {
            parameters: parameters.clone(),
            random: ChaCha12Rng::seed_from_u64(parameters.seed),
        }
    }

    /// Chooses a token: an index into `logits`.
    ///
    /// # Errors
    ///
    /// The logits hold a NaN or plus infinity, or nothing but minus infinity.
    pub fn sample(&mut self, logits: &[f32], scratch: &mut Scratch) -> Result<u32, SampleError> {
        let max = largest_logit(logits)?;
        if self.parameters.temperature <= 0.0 {
            return Ok(first_equal(logits, max));
        }
        scratch.reserve(logits.len());
        filter(&self.parameters, logits, max, scratch);
        let temperature = f64::from(self.parameters.temperature);
        // The difference is at most 0, so no temperature overflows: a tiny one gives exp(-huge) = 0 to all but the
        // most probable.
        scratch.weights.clear();
        scratch.weights.extend(
            scratch
                .candidates
                .iter()
                .map(|c| ((f64::from(c.logit) - f64::from(max)) / temperature).exp()),
        );
        let drawn = draw(&scratch.weights, unit_interval(&mut self.random));
        Ok(scratch.candidates[drawn].id)
    }
}

/// The largest logit, after checking all of them.
fn largest_logit(logits: &[f32]) -> Result<f32, SampleError> {
    // One pass without branches; the culprit is looked for only when there is one.
    let mut max = f32::NEG_INFINITY;
    let mut bad = false;
    for &value in logits {
        bad |= value.is_nan() | (value == f32::INFINITY);
        max = if value > max { value } else { max };
    }
    if bad {
        let found = logits
            .iter()
            .position(|v| v.is_nan() || *v == f32::INFINITY);
        let id = found.unwrap_or_default();
        let value = logits[id];
        return Err(SampleError::NotFinite { id, value });
    }
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NoCandidate);
    }
    Ok(max)
}

fn first_equal(logits: &[f32], max: f32) -> u32 {
    logits.iter().position(|v| *v == max).unwrap_or_default() as u32
}

/// Leaves in `candidates` what `top_k`, `top_p` and `min_p` keep: at least the most probable token.
fn filter(parameters: &SamplingParameters, logits: &[f32], max: f32, scratch: &mut Scratch) {
    let Scratch {
        candidates, border, ..
    } = scratch;
    if parameters.top_k > 0 && parameters.top_k < logits.len() {
        keep_largest(logits, parameters.top_k, candidates);
    } else {
        candidates.clear();
        let all = logits.iter().enumerate();
        candidates.extend(all.filter(|(_, logit)| **logit > f32::NEG_INFINITY).map(
            |(id, &logit)| Candidate {
                id: id as u32,
                logit,
            },
        ));
    }
    if parameters.top_p < 1.0 {
        keep_top_p(candidates, parameters.top_p, max, border);
    }
    if parameters.min_p > 0.0 {
        // p >= min_p * p_max, in logarithms.
        let floor = f64::from(parameters.min_p).ln();
        candidates.retain(|c| f64::from(c.logit) - f64::from(max) >= floor);
    }
}

/// The probability of a logit up to a factor, in (0, 1]; 0 for a masked token.
fn exp_below(logit: f32, max: f32) -> f64 {
    (f64::from(logit) - f64::from(max)).exp()
}

/// The index at which the running sum of `weights` passes `at` (in [0, 1)) of the whole.
fn draw(weights: &[f64], at: f64) -> usize {
    let mut left = at * weights.iter().sum::<f64>();
    let mut last = 0;
    for (index, weight) in weights.iter().enumerate() {
        if *weight > 0.0 {
            last = index;
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
    }
    // When rounding eats the end of the sum, the last token that can be drawn is drawn.
    last
}

/// Uniform in [0, 1), of 53 bits.
fn unit_interval(random: &mut ChaCha12Rng) -> f64 {
    (random.next_u64() >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

#[cfg(test)]
mod tests;
