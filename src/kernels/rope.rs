//! Rotary position embedding (<https://arxiv.org/abs/2104.09864>).
//!
//! Angles are computed once per step from positions, in f64, and serve every layer: position * frequency at position
//! 3000 needs more than the 24 bits of an f32 product to be good to 1e-4.

use std::sync::Mutex;

use super::ComputePool;
use crate::gguf::{RopeScaling, Yarn};

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Elements 2i and 2i + 1 (ggml's "normal": llama).
    Interleaved,
    /// Elements i and i + dimensions / 2 (ggml's "neox": qwen and most others).
    Halves,
}

/// What the angles of a model follow from.
#[derive(Clone, Copy, Debug)]
pub struct RopeSettings<'a> {
    /// Elements of each head that are rotated: even.
    pub dimensions: usize,
    /// Pair i turns by base^(-2i / dimensions) per position, unless scaled.
    pub base: f32,
    pub scaling: RopeScaling,
    /// What cosines and sines are multiplied by; 1 for a rotation.
    pub magnitude: f32,
    /// What the frequency of each pair is divided by, where the model has them (`rope_freqs.weight` and others).
    pub factors: Option<&'a [f32]>,
}

/// The inverse frequency of each pair: radians per position.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    frequencies: Vec<f64>,
    magnitude: f64,
}

impl RopeTable {
    /// # Panics
    /// When `dimensions` is odd or there is not one factor for each pair.
    pub fn new(settings: &RopeSettings<'_>) -> RopeTable {
        let &RopeSettings {
            dimensions,
            base,
            scaling,
            magnitude,
            factors,
        } = settings;
        assert!(dimensions.is_multiple_of(2), "{dimensions} rope dimensions");
        let pairs = dimensions / 2;
        if let Some(factors) = factors {
            assert_eq!(factors.len(), pairs, "rope factors for {pairs} pairs");
        }
        let base = f64::from(base);
        let ramp = match scaling {
            RopeScaling::Yarn(yarn) => Some(Ramp::new(&yarn, dimensions, base)),
            _ => None,
        };
        let frequencies = (0..pairs)
            .map(|pair| {
                let exponent = -2.0 * pair as f64 / dimensions as f64;
                let own = factors.map_or(1.0, |factors| f64::from(factors[pair]));
                match scaling {
                    RopeScaling::None => base.powf(exponent) / own,
                    RopeScaling::Linear { factor } | RopeScaling::LongRope { factor, .. } => {
                        base.powf(exponent) / (f64::from(factor) * own)
                    }
                    RopeScaling::Yarn(yarn) => {
                        let plain = base.powf(exponent) / own;
                        let stays = ramp.as_ref().map_or(0.0, |ramp| ramp.at(pair));
                        plain / f64::from(yarn.factor) * (1.0 - stays) + plain * stays
                    }
                }
            })
            .collect();
        RopeTable {
            frequencies,
            magnitude: f64::from(magnitude),
        }
    }

    /// The angles of tokens at these positions.
    pub fn angles(&self, positions: &[u32]) -> RopeAngles {
        let rotations = positions
            .iter()
            .flat_map(|position| {
                self.frequencies.iter().map(move |frequency| {
                    let (sin, cos) = (f64::from(*position) * frequency).sin_cos();
                    [(cos * self.magnitude) as f32, (sin * self.magnitude) as f32]
                })
            })
            .collect();
        RopeAngles {
            rotations,
            pairs: self.frequencies.len(),
            width: positions.len(),
        }
    }
}

/// Which frequencies YaRN leaves as they are (Peng et al., 2023, section 3.2): those of the pairs up to `first`, and none
/// from `last` on; between them ever less.
struct Ramp {
    first: f64,
    last: f64,
    share: f64,
}

impl Ramp {
    fn new(yarn: &Yarn, dimensions: usize, base: f64) -> Ramp {
        let dimensions = dimensions as f64;
        // The pair whose frequency turns so often within the original context.
        let pair_of = |turns: f32| {
            let wavelength = f64::from(yarn.original_context_length) / f64::from(turns);
            dimensions * (wavelength / (2.0 * std::f64::consts::PI)).ln() / (2.0 * base.ln())
        };
        Ramp {
            first: pair_of(yarn.beta_fast).floor().max(0.0),
            last: pair_of(yarn.beta_slow).ceil().min(dimensions - 1.0),
            share: f64::from(yarn.extrapolation),
        }
    }

    fn at(&self, pair: usize) -> f64 {
        // No division by zero where the ramp is a step.
        let width = (self.last - self.first).max(0.001);
        let passed = ((pair as f64 - self.first) / width).clamp(0.0, 1.0);
        (1.0 - passed) * self.share
    }
}

/// Cosine and sine of each token's angle for each pair.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeAngles {
    rotations: Vec<[f32; 2]>,
    pairs: usize,
    width: usize,
}

impl RopeAngles {
    /// Tokens.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Pairs of elements that are rotated in each head.
    pub fn pairs(&self) -> usize {
        self.pairs
    }

    /// `[width, pairs, 2]`: cosine and sine.
    pub fn rotations(&self) -> &[[f32; 2]] {
        &self.rotations
    }
}

/// Rotates every head of `x`, [width, heads, head_size], in place. Elements past the table's dimensions stay.
///
/// # Panics
/// When shapes do not agree.
pub fn rope(
    pool: &ComputePool,
    x: &mut [f32],
    heads: usize,
    head_size: usize,
    angles: &RopeAngles,
    pairs: RopePairs,
) {
    assert_eq!(
        x.len(),
        angles.width * heads * head_size,
        "rope over {} tokens of {heads} heads of {head_size}",
        angles.width
    );
    assert!(
        2 * angles.pairs <= head_size,
        "{} of {head_size} elements rotated",
        2 * angles.pairs
    );
    if x.is_empty() || angles.pairs == 0 {
        return;
    }
    // About ten microseconds of work for each chunk.
    let tokens_per_chunk = (16_384 / (heads * head_size)).max(1);
    // The lock of a chunk is taken once, by the thread that has it.
    let chunks: Vec<_> = x
        .chunks_mut(tokens_per_chunk * heads * head_size)
        .zip(angles.rotations.chunks(tokens_per_chunk * angles.pairs))
        .map(Mutex::new)
        .collect();
    pool.run(chunks.len(), &|index| {
        let Ok(mut chunk) = chunks[index].lock() else {
            return;
        };
        let (x, rotations) = &mut *chunk;
        let tokens = x.chunks_exact_mut(heads * head_size);
        for (token, rotations) in tokens.zip(rotations.chunks_exact(angles.pairs)) {
            for head in token.chunks_exact_mut(head_size) {
                match pairs {
                    RopePairs::Interleaved => rotate_interleaved(head, rotations),
                    RopePairs::Halves => rotate_halves(head, rotations),
                }
            }
        }
    });
}

fn rotate_interleaved(head: &mut [f32], rotations: &[[f32; 2]]) {
    for ([a, b], [cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(rotations) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

fn rotate_halves(head: &mut [f32], rotations: &[[f32; 2]]) {
    let (first, second) = head.split_at_mut(rotations.len());
    for ((a, b), [cos, sin]) in first.iter_mut().zip(second).zip(rotations) {
        (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rotation computed directly in f64.
    fn expected(a: f32, b: f32, angle: f64) -> (f64, f64) {
        let (a, b) = (f64::from(a), f64::from(b));
        let (sin, cos) = angle.sin_cos();
        (a * cos - b * sin, a * sin + b * cos)
    }

    /// Frequencies are compared by what they turn; `expected` gives that of a pair.
    fn check(
        settings: &RopeSettings<'_>,
        pairs: RopePairs,
        expected_frequency: impl Fn(usize) -> f64,
    ) {
        let (heads, head_size, dimensions) = (3, settings.dimensions + 2, settings.dimensions);
        let positions = [0, 1, 77, 3000];
        let x: Vec<f32> = (0..positions.len() * heads * head_size)
            .map(|i| (i as f32).sin())
            .collect();
        let table = RopeTable::new(settings);
        let pool = ComputePool::new(2);
        let mut ours = x.clone();
        rope(
            &pool,
            &mut ours,
            heads,
            head_size,
            &table.angles(&positions),
            pairs,
        );
        let magnitude = f64::from(settings.magnitude);
        for (t, position) in positions.into_iter().enumerate() {
            for h in 0..heads {
                let start = (t * heads + h) * head_size;
                for pair in 0..dimensions / 2 {
                    let (i, j) = match pairs {
                        RopePairs::Interleaved => (2 * pair, 2 * pair + 1),
                        RopePairs::Halves => (pair, pair + dimensions / 2),
                    };
                    let angle = f64::from(position) * expected_frequency(pair);
                    let (a, b) = expected(x[start + i], x[start + j], angle);
                    assert!((f64::from(ours[start + i]) - a * magnitude).abs() < 1e-6);
                    assert!((f64::from(ours[start + j]) - b * magnitude).abs() < 1e-6);
                }
                let end = start + head_size;
                assert_eq!(ours[end - 2..end], x[end - 2..end]);
            }
        }
    }

    const PLAIN: RopeSettings<'_> = RopeSettings {
        dimensions: 8,
        base: 10_000.0,
        scaling: RopeScaling::None,
        magnitude: 1.0,
        factors: None,
    };

    #[test]
    fn rotates_pairs_by_position_times_frequency() {
        let plain = |pair: usize| 10f64.powi(-(pair as i32));
        for pairs in [RopePairs::Interleaved, RopePairs::Halves] {
            check(&PLAIN, pairs, plain);
            let with_factors = RopeSettings {
                factors: Some(&[1.0, 2.0, 4.0, 8.0]),
                ..PLAIN
            };
            check(&with_factors, pairs, |pair| {
                plain(pair) / [1.0, 2.0, 4.0, 8.0][pair]
            });
            let linear = RopeSettings {
                scaling: RopeScaling::Linear { factor: 4.0 },
                ..PLAIN
            };
            check(&linear, pairs, |pair| plain(pair) / 4.0);
            let longrope = RopeSettings {
                scaling: RopeScaling::LongRope {
                    factor: 1.0,
                    original_context_length: 64,
                },
                magnitude: 1.19,
                ..with_factors
            };
            check(&longrope, pairs, |pair| {
                plain(pair) / [1.0, 2.0, 4.0, 8.0][pair]
            });
        }
    }

    /// Computed by hand for 16 dimensions, base 10000 and an original context of 4096. The pair that turns `b` times in
    /// it is 16 ln(4096 / (2 pi b)) / (2 ln 10000): 2.62 for 32 turns and 5.63 for one, so that pairs up to 2 stay,
    /// those from 6 on are divided by 8, and 3, 4 and 5 lie a quarter, half and three quarters on the way.
    #[test]
    fn yarn_divides_slow_frequencies_and_leaves_fast_ones() {
        let yarn = Yarn {
            factor: 8.0,
            original_context_length: 4096,
            extrapolation: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        let settings = |yarn: Yarn| RopeSettings {
            dimensions: 16,
            scaling: RopeScaling::Yarn(yarn),
            magnitude: 1.207_944_2,
            ..PLAIN
        };
        let plain = |pair: usize| 10f64.powf(-0.5 * pair as f64);
        let slowed = |stays: f64| (1.0 - stays) / 8.0 + stays;
        let stays = [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0];
        for pairs in [RopePairs::Interleaved, RopePairs::Halves] {
            check(&settings(yarn), pairs, |pair| {
                plain(pair) * slowed(stays[pair])
            });
            let half = Yarn {
                extrapolation: 0.5,
                ..yarn
            };
            check(&settings(half), pairs, |pair| {
                plain(pair) * slowed(stays[pair] / 2.0)
            });
            // The turns of the file move the ramp: 16 ln(4096 / (2 pi 4)) / (2 ln 10000) = 4.43 for 4 turns.
            let faster = Yarn {
                beta_fast: 4.0,
                ..yarn
            };
            let stays = [1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0];
            check(&settings(faster), pairs, |pair| {
                plain(pair) * slowed(stays[pair])
            });
            // Ends that have changed places: a step.
            let step = Yarn {
                beta_fast: 1.0,
                beta_slow: 32.0,
                ..yarn
            };
            let stays = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0];
            check(&settings(step), pairs, |pair| {
                plain(pair) * slowed(stays[pair])
            });
        }
    }
}
