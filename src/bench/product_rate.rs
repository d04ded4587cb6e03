//! How fast the host multiplies by weights of each type, at widths from one token to many: through the products that a
//! model uses, the 8-bit form of the input included, over more weights than a cache holds.

use super::rounds::usual_seconds;
use crate::gguf::TensorType;
use crate::kernels::{Activations, ComputePool, MatrixView, OutputRows, matmul};
use crate::memory::{Arena, MemoryError, Region};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of every matrix: those of a model of 7 or 8 billion weights.
pub(super) const COLUMNS: usize = 4096;
/// Of the matrices that rates are told of: as many for each column of an input as in such a model on average, so that
/// making the input's 8-bit form counts as much as it does there. Shorter ones stand for them where there is no time.
pub(super) const ROWS: usize = 8192;
/// Below this a product is shorter than a model's, and giving it to the threads counts too much.
const ROWS_MIN: usize = 1024;
/// Matrices that are walked in turn, at least.
const MATRICES_MIN: usize = 4;
/// A width whose product would take so many times its part of a round is left out.
const OVERRUN_MAX: f64 = 4.0;

/// Weights: bytes that are ordinary numbers in every type.
pub struct ProductRates {
    weights: Region,
    /// The matrix that comes next, counted in bytes: one after the other, whatever their size.
    next: usize,
}

/// The products of one weight type, at some widths.
pub struct OfType {
    kind: TensorType,
    widths: Vec<AtWidth>,
}

/// What is timed at one width, and how long it took.
struct AtWidth {
    tokens: usize,
    rows: usize,
    x: Vec<f32>,
    out: Vec<f32>,
    /// What its products may take of a round.
    seconds: f64,
    /// Seconds of a product with `ROWS` rows.
    samples: Vec<f64>,
    /// The only sample is the first product, which also paid for the pages of its output.
    is_cold: bool,
}

impl ProductRates {
    /// Takes `bytes` of memory, in huge pages where the kernel gives them, as weights lie.
    ///
    /// # Errors
    /// The system does not give so much.
    pub fn new(bytes: usize) -> Result<ProductRates, MemoryError> {
        let arena = Arc::new(Arena::new("host", bytes)?);
        let mut weights = Region::allocate_low(&arena, bytes)?;
        fill(weights.bytes_mut());
        Ok(ProductRates { weights, next: 0 })
    }

    /// Begins with a type, at widths that ascend, whose rounds are to take about `round`: one product of each. The widths
    /// from one on that would take much longer are left out.
    pub fn of(
        &mut self,
        kind: TensorType,
        widths: &[u32],
        pool: &ComputePool,
        round: Duration,
    ) -> OfType {
        let mut of_type = OfType {
            kind,
            widths: Vec::new(),
        };
        // For a row and a token, at the width before: what the next takes at most, about.
        let mut seconds_per_row = None;
        for (&width, seconds) in widths.iter().zip(parts_of_round(widths, round)) {
            let tokens = width as usize;
            let expected = seconds_per_row.map(|of_one| of_one * tokens as f64);
            let Some(rows) = self.rows(kind, expected, seconds) else {
                break;
            };
            let mut at = AtWidth {
                tokens,
                rows,
                x: (0..tokens * COLUMNS)
                    .map(|i| (i % 17) as f32 - 8.0)
                    .collect(),
                out: vec![0.0; tokens * rows],
                seconds,
                samples: Vec::new(),
                is_cold: true,
            };
            let first = self.product(kind, &mut at, pool);
            at.samples.push(first);
            seconds_per_row = Some(first / (ROWS * tokens) as f64);
            of_type.widths.push(at);
        }
        of_type
    }

    /// Times products of all widths in turn: what slows the machine for a while slows them all alike, and what a plan needs
    /// is which of them is the better.
    pub fn round(&mut self, of_type: &mut OfType, pool: &ComputePool) {
        for at in &mut of_type.widths {
            let began = Instant::now();
            loop {
                let seconds = self.product(of_type.kind, at, pool);
                if std::mem::take(&mut at.is_cold) {
                    at.samples.clear();
                }
                at.samples.push(seconds);
                // Another one would often be beyond it.
                if began.elapsed().as_secs_f64() > at.seconds / 2.0 {
                    break;
                }
            }
        }
    }

    /// The rows of a matrix whose product takes no longer than `seconds`, of which each row is expected to take so many.
    /// `None`: it would take much longer.
    fn rows(&self, kind: TensorType, expected_of_row: Option<f64>, seconds: f64) -> Option<usize> {
        let row_bytes = kind.row_bytes(COLUMNS as u64)? as usize;
        let mut rows = (self.weights.bytes().len() / row_bytes / MATRICES_MIN).min(ROWS);
        if let Some(of_row) = expected_of_row {
            while rows >= 2 * ROWS_MIN && of_row * rows as f64 > seconds {
                rows /= 2;
            }
            if of_row * rows as f64 > OVERRUN_MAX * seconds {
                return None;
            }
        }
        (rows > 0).then_some(rows)
    }

    /// Times one product: the seconds that one with `ROWS` rows takes, of which making the input is the same.
    fn product(&mut self, kind: TensorType, at: &mut AtWidth, pool: &ComputePool) -> f64 {
        let all = self.weights.bytes();
        let bytes = kind.row_bytes(COLUMNS as u64).unwrap_or(0) as usize * at.rows;
        if self.next + bytes > all.len() {
            self.next = 0;
        }
        let weight = MatrixView::new(kind, at.rows, COLUMNS, &all[self.next..][..bytes]);
        self.next += bytes;
        let began = Instant::now();
        // As a step does: each product's input is new.
        let x = Activations::new(&at.x, at.tokens, COLUMNS);
        let input = began.elapsed();
        let mut out = OutputRows {
            data: &mut at.out,
            stride: at.rows,
            first_column: 0,
        };
        matmul(pool, &weight, &x, &mut out);
        black_box(out.data.as_ptr());
        let products = began.elapsed() - input;
        input.as_secs_f64() + products.as_secs_f64() * (ROWS as f64 / at.rows as f64)
    }
}

impl OfType {
    /// Bytes of weights per second at each of the widths, of those that were not left out.
    pub fn rates(&self) -> Vec<f64> {
        let bytes = self.kind.row_bytes(COLUMNS as u64).unwrap_or(0) as f64 * ROWS as f64;
        let rate = |at: &AtWidth| bytes / usual_seconds(&at.samples).max(f64::MIN_POSITIVE);
        self.widths.iter().map(rate).collect()
    }
}

/// What a round has for each width: in proportion to it, and something for the narrow ones, which wait for memory.
fn parts_of_round(widths: &[u32], round: Duration) -> Vec<f64> {
    let tokens: f64 = widths.iter().map(|&width| f64::from(width)).sum();
    let share = |&width: &u32| {
        let narrow = 1.0 / widths.len() as f64;
        (f64::from(width) / tokens + narrow) / 2.0
    };
    let share = widths.iter().map(share);
    share.map(|share| round.as_secs_f64() * share).collect()
}

/// Ordinary numbers wherever a block has its scale, and as floats.
pub(super) fn fill(bytes: &mut [u8]) {
    let mut filled = bytes.len().min(13 << 10);
    for (index, byte) in bytes[..filled].iter_mut().enumerate() {
        *byte = 0x30 + (index % 13) as u8;
    }
    // From here on by copies: one byte after the other would take a second for each gigabyte.
    while filled < bytes.len() {
        let (done, rest) = bytes.split_at_mut(filled);
        let length = done.len().min(rest.len());
        rest[..length].copy_from_slice(&done[..length]);
        filled += length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_and_width_gives_a_rate_or_takes_too_long() {
        let pool = ComputePool::new(2);
        let mut products = ProductRates::new(8 << 20).unwrap();
        for kind in TensorType::ALL {
            let mut of_type = products.of(kind, &[1, 3, 16], &pool, Duration::from_millis(1));
            products.round(&mut of_type, &pool);
            let rates = of_type.rates();
            assert!((1..=3).contains(&rates.len()), "{kind:?}: {rates:?}");
            assert!(
                rates.iter().all(|rate| rate.is_finite() && *rate > 0.0),
                "{kind:?}: {rates:?}"
            );
        }
    }

    #[test]
    fn what_takes_too_long_gets_fewer_rows_and_then_none() {
        let products = ProductRates::new(64 << 20).unwrap();
        let rows = |of_row, seconds| products.rows(TensorType::Q4_0, Some(of_row), seconds);
        let most = (64 << 20) / (4096 / 32 * 18) / MATRICES_MIN;
        assert!((ROWS_MIN..ROWS).contains(&most));
        assert_eq!(products.rows(TensorType::Q4_0, None, 0.0), Some(most));
        assert_eq!(rows(1.0, most as f64), Some(most));
        assert_eq!(rows(1.0, (most - 1) as f64), Some(most / 2));
        assert_eq!(rows(1.0, 1e3), Some(most / 4));
        assert_eq!(rows(1.0, 1e2), None);
    }

    #[test]
    fn a_round_is_shared_out_whole() {
        let seconds = parts_of_round(&[1, 64, 512], Duration::from_secs(2));
        assert!((seconds.iter().sum::<f64>() - 2.0).abs() < 1e-9);
        assert!(seconds.is_sorted(), "{seconds:?}");
    }

    #[test]
    fn all_bytes_are_filled_alike() {
        let mut bytes = vec![0; 40_000];
        fill(&mut bytes);
        let expected = |index: usize| 0x30 + (index % 13) as u8;
        assert!(
            bytes
                .iter()
                .enumerate()
                .all(|(i, &byte)| byte == expected(i))
        );
        fill(&mut bytes[..5]);
        fill(&mut []);
    }
}
