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
    /// `[tokens, COLUMNS]` for the most tokens so far: what fewer have is the begin of it.
    input: Vec<f32>,
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
    out: Vec<f32>,
    /// What its products may take of a round.
    seconds: f64,
    /// Of each round: seconds of a product with `ROWS` rows.
    rounds: Vec<f64>,
}

/// Where the time of a product goes, in seconds.
#[derive(Clone, Copy)]
struct Timing {
    /// Making the forms of the input that the weights need.
    input: f64,
    /// Multiplying by a row of weights.
    row: f64,
}

impl Timing {
    /// With so many rows.
    fn seconds(self, rows: usize) -> f64 {
        self.input + self.row * rows as f64
    }

    /// With so many times the tokens: all is done for each of them, or less.
    fn times(self, factor: f64) -> Timing {
        Timing {
            input: factor * self.input,
            row: factor * self.row,
        }
    }
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
        Ok(ProductRates {
            weights,
            next: 0,
            input: Vec::new(),
        })
    }

    /// Begins with a type, at widths that ascend, whose rounds are to take about `round`: one product of each. The widths
    /// from one on that would take much longer are left out, but for the first.
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
        let Some(&first) = widths.first() else {
            return of_type;
        };
        let rows_max = self.rows_max(kind);
        // Few rows, for nothing is known yet.
        let mut before = AtWidth::new(first, ROWS_MIN.min(rows_max), 0.0);
        let mut timing = self.best_of_two(kind, &mut before, pool);
        for (&width, seconds) in widths.iter().zip(parts_of_round(widths, round)) {
            let expected = timing.times(f64::from(width) / before.tokens as f64);
            let least = of_type.widths.is_empty().then_some(before.rows);
            let Some(rows) = rows(rows_max, expected, seconds).or(least) else {
                break;
            };
            let mut at = AtWidth::new(width, rows, seconds);
            timing = self.best_of_two(kind, &mut at, pool);
            before.tokens = at.tokens;
            of_type.widths.push(at);
        }
        of_type
    }

    /// Times products of all widths in turn: what slows the machine for a while slows them all alike, and what a plan needs
    /// is which of them is the better. One figure a round of each, whether many products fit into its part or one.
    pub fn round(&mut self, of_type: &mut OfType, pool: &ComputePool) {
        for at in &mut of_type.widths {
            let began = Instant::now();
            let mut products = Vec::new();
            // Another one would often be beyond its part.
            while products.is_empty() || began.elapsed().as_secs_f64() < at.seconds / 2.0 {
                products.push(self.product(of_type.kind, at, pool).seconds(ROWS));
            }
            at.rounds.push(usual_seconds(&products));
        }
    }

    /// The most rows of a matrix.
    fn rows_max(&self, kind: TensorType) -> usize {
        let row_bytes = kind.row_bytes(COLUMNS as u64).unwrap_or(u64::MAX);
        let in_all = self.weights.bytes().len() as u64 / row_bytes;
        (in_all as usize / MATRICES_MIN).min(ROWS)
    }

    /// Of a width that is new: the first product also pays for the pages of its output, and either may be interrupted.
    fn best_of_two(&mut self, kind: TensorType, at: &mut AtWidth, pool: &ComputePool) -> Timing {
        let [first, second] = [(); 2].map(|()| self.product(kind, at, pool));
        match first.seconds(at.rows) < second.seconds(at.rows) {
            true => first,
            false => second,
        }
    }

    /// Times one product.
    fn product(&mut self, kind: TensorType, at: &mut AtWidth, pool: &ComputePool) -> Timing {
        let all = self.weights.bytes();
        let bytes = kind.row_bytes(COLUMNS as u64).unwrap_or(0) as usize * at.rows;
        if self.next + bytes > all.len() {
            self.next = 0;
        }
        let weight = MatrixView::new(kind, at.rows, COLUMNS, &all[self.next..][..bytes]);
        self.next += bytes;
        let values = at.tokens * COLUMNS;
        for index in self.input.len()..values {
            self.input.push((index % 17) as f32 - 8.0);
        }
        let began = Instant::now();
        // As a step does: each product's input is new.
        let x = Activations::new(&self.input[..values], at.tokens, COLUMNS);
        x.prepare(kind, pool);
        let input = began.elapsed();
        let mut out = OutputRows {
            data: &mut at.out,
            stride: at.rows,
            first_column: 0,
        };
        matmul(pool, &weight, &x, &mut out);
        black_box(out.data.as_ptr());
        let products = began.elapsed() - input;
        Timing {
            input: input.as_secs_f64(),
            row: products.as_secs_f64() / at.rows.max(1) as f64,
        }
    }
}

impl AtWidth {
    fn new(width: u32, rows: usize, seconds: f64) -> AtWidth {
        let tokens = width as usize;
        AtWidth {
            tokens,
            rows,
            out: vec![0.0; tokens * rows],
            seconds,
            rounds: Vec::new(),
        }
    }
}

impl OfType {
    /// Bytes of weights per second at each of the widths that were not left out. Before the first round there are none.
    pub fn rates(&self) -> Vec<f64> {
        let bytes = self.kind.row_bytes(COLUMNS as u64).unwrap_or(0) as f64 * ROWS as f64;
        let measured = self.widths.iter().filter(|at| !at.rounds.is_empty());
        measured
            .map(|at| bytes / usual_seconds(&at.rounds).max(f64::MIN_POSITIVE))
            .collect()
    }
}

/// The rows of a matrix whose product is expected to take no longer than `seconds`. `None`: it would take much longer.
fn rows(rows_max: usize, expected: Timing, seconds: f64) -> Option<usize> {
    let mut rows = rows_max;
    while rows >= 2 * ROWS_MIN && expected.seconds(rows) > seconds {
        rows /= 2;
    }
    (rows > 0 && expected.seconds(rows) <= OVERRUN_MAX * seconds).then_some(rows)
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
            for (round, most) in [(Duration::from_millis(5), 3), (Duration::from_nanos(1), 1)] {
                let mut of_type = products.of(kind, &[1, 3, 16], &pool, round);
                products.round(&mut of_type, &pool);
                let rates = of_type.rates();
                // The first is there however slow the machine is.
                assert!((1..=most).contains(&rates.len()), "{kind:?}: {rates:?}");
                assert!(
                    rates.iter().all(|rate| rate.is_finite() && *rate > 0.0),
                    "{kind:?}: {rates:?}"
                );
            }
        }
    }

    #[test]
    fn what_takes_too_long_gets_fewer_rows_and_then_none() {
        let rows = |input, seconds| rows(7000, Timing { input, row: 1.0 }, seconds);
        assert_eq!(rows(0.0, 7000.0), Some(7000));
        assert_eq!(rows(1.0, 7000.0), Some(3500));
        assert_eq!(rows(0.0, 3000.0), Some(1750));
        assert_eq!(rows(0.0, 1750.0 / OVERRUN_MAX), Some(1750));
        assert_eq!(rows(1.0, 1750.0 / OVERRUN_MAX), None);
    }

    #[test]
    fn short_matrices_stand_for_long_ones() {
        let timing = Timing {
            input: 8.0,
            row: 2.0,
        };
        assert_eq!(timing.seconds(3), 14.0);
        assert_eq!(timing.times(2.0).seconds(3), 28.0);
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
