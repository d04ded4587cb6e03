//! Rotary position embedding (<https://arxiv.org/abs/2104.09864>).
//!
//! Angles are computed once per step from positions, in f64, and serve every layer: position * frequency at position
//! 3000 needs more than the 24 bits of an f32 product to be good to 1e-4.

use std::sync::Mutex;

use super::ComputePool;

/// Which elements of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Elements 2i and 2i + 1 (ggml's "normal": llama).
    Interleaved,
    /// Elements i and i + dimensions / 2 (ggml's "neox": qwen and most others).
    Halves,
}

/// The inverse frequency of each pair: radians per position.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    frequencies: Vec<f64>,
}

impl RopeTable {
    /// `dimensions` elements of each head are rotated, pair i by base^(-2i / dimensions) per position, slowed by
    /// `linear_factor` (1 for none) and by the model's factor for the pair where it has them (`rope_freqs.weight`).
    ///
    /// # Panics
    /// When `dimensions` is odd or there is not one factor for each pair.
    pub fn new(
        dimensions: usize,
        base: f32,
        linear_factor: f32,
        factors: Option<&[f32]>,
    ) -> RopeTable {
        assert!(dimensions.is_multiple_of(2), "{dimensions} rope dimensions");
        let pairs = dimensions / 2;
        if let Some(factors) = factors {
            assert_eq!(factors.len(), pairs, "rope factors for {pairs} pairs");
        }
        let frequencies = (0..pairs)
            .map(|pair| {
                let exponent = -2.0 * pair as f64 / dimensions as f64;
                let factor = factors.map_or(1.0, |factors| f64::from(factors[pair]));
                f64::from(base).powf(exponent) / (f64::from(linear_factor) * factor)
            })
            .collect();
        RopeTable { frequencies }
    }

    /// Elements of each head that are rotated.
    pub fn dimensions(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The angles of tokens at these positions.
    pub fn angles(&self, positions: &[u32]) -> RopeAngles {
        let rotations = positions
            .iter()
            .flat_map(|position| {
                self.frequencies.iter().map(move |frequency| {
                    let (sin, cos) = (f64::from(*position) * frequency).sin_cos();
                    [cos as f32, sin as f32]
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

    fn check(pairs: RopePairs, factors: Option<&[f32]>, linear_factor: f32) {
        let (heads, head_size, dimensions) = (3, 10, 8);
        let positions = [0, 1, 77, 3000];
        let x: Vec<f32> = (0..positions.len() * heads * head_size)
            .map(|i| (i as f32).sin())
            .collect();
        let table = RopeTable::new(dimensions, 10_000.0, linear_factor, factors);
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
        for (t, position) in positions.into_iter().enumerate() {
            for h in 0..heads {
                let start = (t * heads + h) * head_size;
                for pair in 0..dimensions / 2 {
                    let (i, j) = match pairs {
                        RopePairs::Interleaved => (2 * pair, 2 * pair + 1),
                        RopePairs::Halves => (pair, pair + dimensions / 2),
                    };
                    let frequency = 10_000f64.powf(-2.0 * pair as f64 / dimensions as f64)
                        / f64::from(linear_factor)
                        / factors.map_or(1.0, |factors| f64::from(factors[pair]));
                    let (a, b) =
                        expected(x[start + i], x[start + j], f64::from(position) * frequency);
                    assert!((f64::from(ours[start + i]) - a).abs() < 1e-6);
                    assert!((f64::from(ours[start + j]) - b).abs() < 1e-6);
                }
                assert_eq!(ours[start + 8..start + 10], x[start + 8..start + 10]);
            }
        }
    }

    #[test]
    fn rotates_pairs_by_position_times_frequency() {
        for pairs in [RopePairs::Interleaved, RopePairs::Halves] {
            check(pairs, None, 1.0);
            check(pairs, Some(&[1.0, 2.0, 4.0, 8.0]), 1.0);
            check(pairs, None, 4.0);
        }
    }
}
