//! How fast the host multiplies by weights of each type, at widths from one token to many: through the products that a
//! model uses, the 8-bit form of the input included, over more weights than a cache holds.

use super::rounds::median;
use crate::gguf::TensorType;
use crate::kernels::{Activations, ComputePool, MatrixView, OutputRows, matmul};
use crate::memory::{Arena, MemoryError, Region};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of every matrix: those of a model of 7 or 8 billion weights.
pub(super) const COLUMNS: usize = 4096;
/// Of a matrix where that takes no longer than is to be spent.
pub(super) const ROWS_MAX: usize = 8192;
/// Below this a product is shorter than a model's, and giving it to the threads counts too much.
const ROWS_MIN: usize = 1024;
/// Matrices that are walked in turn, at least.
const MATRICES_MIN: usize = 4;
/// Products that are timed, at least.
const SAMPLES_MIN: usize = 3;

/// Weights: bytes that are ordinary numbers in every type.
pub struct ProductRates {
    weights: Region,
    /// The matrix that comes next, counted in bytes: one after the other, whatever their size.
    next: usize,
}

/// The products with weights of one type, at widths that ascend.
pub struct OfType<'a> {
    weights: &'a Region,
    next: &'a mut usize,
    pool: &'a ComputePool,
    kind: TensorType,
    /// Seconds for a byte of weights and each token, at the width before: what the next takes at most, about.
    seconds_per_byte_and_token: Option<f64>,
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

    pub fn of<'a>(&'a mut self, kind: TensorType, pool: &'a ComputePool) -> OfType<'a> {
        OfType {
            weights: &self.weights,
            next: &mut self.next,
            pool,
            kind,
            seconds_per_byte_and_token: None,
        }
    }
}

impl OfType<'_> {
    /// Bytes of weights per second at this width, measured for about `time`. `None`: so many tokens would take much
    /// longer.
    pub fn measure(&mut self, width: u32, time: Duration) -> Option<f64> {
        let tokens = width as usize;
        let row_bytes = self.kind.row_bytes(COLUMNS as u64)? as usize;
        let all = self.weights.bytes();
        let rows_of_all = all.len() / row_bytes;
        let mut rows = (rows_of_all / MATRICES_MIN).min(ROWS_MAX);
        if let Some(each) = self.seconds_per_byte_and_token {
            let seconds = |rows: usize| each * (rows * row_bytes * tokens) as f64;
            while rows >= 2 * ROWS_MIN && seconds(rows) > time.as_secs_f64() / SAMPLES_MIN as f64 {
                rows /= 2;
            }
            if seconds(rows) > 2.0 * time.as_secs_f64() {
                return None;
            }
        }
        if rows == 0 {
            return None;
        }
        let x: Vec<f32> = (0..tokens * COLUMNS)
            .map(|i| (i % 17) as f32 - 8.0)
            .collect();
        let mut data = vec![0.0; tokens * rows];
        let bytes = rows * row_bytes;
        let mut product = || {
            if *self.next + bytes > all.len() {
                *self.next = 0;
            }
            let weight = &all[*self.next..][..bytes];
            *self.next += bytes;
            let weight = MatrixView::new(self.kind, rows, COLUMNS, weight);
            let began = Instant::now();
            // As a step does: each product's input is new.
            let x = Activations::new(&x, tokens, COLUMNS);
            let mut out = OutputRows {
                data: &mut data,
                stride: rows,
                first_column: 0,
            };
            matmul(self.pool, &weight, &x, &mut out);
            black_box(out.data.as_ptr());
            began.elapsed().as_secs_f64()
        };
        let began = Instant::now();
        // The first pays for the pages of its output. It counts where there is time for no other.
        let mut samples = vec![product()];
        let mut is_first = true;
        while began.elapsed() < time || (samples.len() < SAMPLES_MIN && began.elapsed() < 2 * time)
        {
            let seconds = product();
            if std::mem::take(&mut is_first) {
                samples.clear();
            }
            samples.push(seconds);
        }
        let seconds = median(&samples).max(f64::MIN_POSITIVE);
        self.seconds_per_byte_and_token = Some(seconds / (bytes * tokens) as f64);
        Some(bytes as f64 / seconds)
    }
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
            let mut of_type = products.of(kind, &pool);
            for width in [1, 3, 16] {
                let rate = of_type.measure(width, Duration::from_micros(300));
                assert!(
                    rate.is_none_or(|rate| rate.is_finite() && rate > 0.0),
                    "{kind:?} at {width}: {rate:?}"
                );
                assert!(width > 1 || rate.is_some(), "{kind:?}");
            }
        }
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
