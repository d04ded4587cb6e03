//! Products with quantised weights on AVX2 (with FMA and F16C). One row at a time, walked in order; up to four tokens
//! share the unpacking of a block. Many tokens go to `avx2_wide`. The order of the arithmetic is the parent module's.
//!
//! Inside a block, unsigned values times signed quants go through `maddubs`: pairs of at most 63 * 127 * 2 fit 16 bits.
//! Q8_0 values are too large for that, so their magnitudes are multiplied with quants of their sign.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

mod parts;
mod row256;
mod row32;

use super::activations::Activations;
use super::avx2_wide;
use super::blocks::{Format32, Format256, for_format32, for_format256};
use super::matmul::{MatrixView, Output};
use row32::row32;
use row256::row256;

pub(super) use parts::{
    halves_to_floats, heads_to_floats, heads256, prefetch, scales256, sum_of_eight, sums_of_four,
    total_of_four,
};

/// Rows of weights in blocks of 32 times all tokens.
pub(super) fn rows_of_blocks32(
    format: Format32,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    // SAFETY: a pool has this instruction set only where the machine can run it.
    unsafe { for_format32!(format, rows32(weight, x, out)) }
}

/// Rows of weights in blocks of 256 times all tokens.
pub(super) fn rows_of_blocks256(
    format: Format256,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    // SAFETY: a pool has this instruction set only where the machine can run it.
    unsafe { for_format256!(format, rows256(weight, x, out)) }
}

/// Defines `$rows`: the tiles of the wide loops, then what they leave, row by row.
macro_rules! rows {
    ($rows:ident, $rows_of:ident, $row:ident, $blocks:ident) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $rows<const F: u8>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
            let done = avx2_wide::$rows::<F>(weight, x, out);
            let mut t = 0;
            while t < x.width() {
                t += match x.width() - t {
                    1 => $rows_of::<F, 1>(weight, x, out, done, t),
                    // Three tokens walk the rows twice: a chunk of rows is in a cache by then, and a loop for three
                    // would be used by no other width.
                    2 | 3 => $rows_of::<F, 2>(weight, x, out, done, t),
                    _ => $rows_of::<F, 4>(weight, x, out, done, t),
                };
            }
        }

        /// Rows from `done` on times N tokens from `t`; N.
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $rows_of<const F: u8, const N: usize>(
            weight: &MatrixView<'_>,
            x: &Activations<'_>,
            out: Output,
            done: usize,
            t: usize,
        ) -> usize {
            let tokens: [_; N] = std::array::from_fn(|n| x.$blocks().row(t + n));
            let rows = weight.bytes.chunks_exact(weight.row_bytes());
            for (r, row) in rows.enumerate().skip(done) {
                for (n, value) in $row::<F, N>(row, &tokens).into_iter().enumerate() {
                    // SAFETY: r and t + n are in range.
                    unsafe { out.set(t + n, r, value) };
                }
            }
            N
        }
    };
}

rows!(rows32, rows32_of, row32, blocks32);
rows!(rows256, rows256_of, row256, blocks256);
