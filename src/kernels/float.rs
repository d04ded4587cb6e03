//! Products with F32, F16 and BF16 weights: activations stay f32.
//!
//! The order of the arithmetic: 16 partial sums by element index modulo 16, each a chain of fused multiply-adds; a row
//! whose length is no multiple of 16 continues with zeros. At the end partial sum i + 8 is added to i, then i + 4,
//! i + 2 and i + 1.
#![expect(unsafe_code, reason = "several threads write to one buffer")]
#![expect(
    clippy::needless_range_loop,
    reason = "an index keeps several arrays in step"
)]

use crate::gguf::TensorType;

use super::InstructionSet;
use super::activations::Activations;
use super::matmul::{MatrixView, Output};
use super::simd::{self, Lanes};
use super::streaming;

/// Rows of float weights times all tokens.
pub(super) fn rows(set: InstructionSet, weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    match weight.kind {
        TensorType::F32 => rows_f32(set, weight, x, out),
        TensorType::F16 => rows_f16(set, weight, x, out),
        TensorType::BF16 => rows_bf16(set, weight, x, out),
        quantised => unreachable!("{} is not a float type", quantised.name()),
    }
}

simd::vectorised! {
    fn rows_f32(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) => rows_f32_on
}

simd::vectorised! {
    fn rows_f16(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) => rows_f16_on
}

simd::vectorised! {
    fn rows_bf16(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) => rows_bf16_on
}

#[inline(always)]
fn rows_f32_on<L: Lanes>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    rows_of::<L, F32, 64>(weight, x, out);
}

#[inline(always)]
fn rows_f16_on<L: Lanes>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    rows_of::<L, F16, 32>(weight, x, out);
}

#[inline(always)]
fn rows_bf16_on<L: Lanes>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    rows_of::<L, BF16, 32>(weight, x, out);
}

/// How sixteen elements of a float type are loaded from `BYTES` bytes.
trait Elements<const BYTES: usize> {
    fn load<L: Lanes>(bytes: &[u8; BYTES]) -> L;
}

struct F32;
struct F16;
struct BF16;

impl Elements<64> for F32 {
    #[inline(always)]
    fn load<L: Lanes>(bytes: &[u8; 64]) -> L {
        L::load_bytes(bytes)
    }
}

impl Elements<32> for F16 {
    #[inline(always)]
    fn load<L: Lanes>(bytes: &[u8; 32]) -> L {
        L::load_f16_bytes(bytes)
    }
}

impl Elements<32> for BF16 {
    #[inline(always)]
    fn load<L: Lanes>(bytes: &[u8; 32]) -> L {
        L::load_bf16_bytes(bytes)
    }
}

#[inline(always)]
fn rows_of<L: Lanes, E: Elements<BYTES>, const BYTES: usize>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    // A tile of rows and tokens reuses what it loads; its sums have to fit the registers.
    let (rows, width) = (weight.rows, x.width());
    if L::REGISTERS >= 16 && rows >= 4 && width >= 4 {
        tiles_of::<L, E, BYTES, 4>(weight, x, out);
    } else if rows >= 2 && width >= 2 {
        tiles_of::<L, E, BYTES, 2>(weight, x, out);
    } else {
        tiles_of::<L, E, BYTES, 1>(weight, x, out);
    }
}

/// Covers the product with square tiles. A tile that would reach past an edge is moved back inside: some elements are
/// then computed twice, to the same bits.
#[inline(always)]
fn tiles_of<L: Lanes, E: Elements<BYTES>, const BYTES: usize, const N: usize>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    for r in (0..weight.rows).step_by(N) {
        let r = r.min(weight.rows - N);
        for t in (0..x.width()).step_by(N) {
            tile::<L, E, BYTES, N>(weight, x, out, r, t.min(x.width() - N));
        }
    }
}

/// N rows from `first_row` times N tokens from `first_token`.
#[inline(always)]
fn tile<L: Lanes, E: Elements<BYTES>, const BYTES: usize, const N: usize>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
    first_row: usize,
    first_token: usize,
) {
    let vectors = weight.columns / 16;
    let mut rows = [&[][..]; N];
    let mut tokens = [&[][..]; N];
    for i in 0..N {
        // Of one length each, so that the loop below goes without bounds checks.
        rows[i] = &weight.row(first_row + i).as_chunks::<BYTES>().0[..vectors];
        tokens[i] = &x.row(first_token + i).as_chunks::<16>().0[..vectors];
    }
    let mut sums = [[L::splat(0.0); N]; N];
    for v in 0..vectors {
        let mut values = [L::splat(0.0); N];
        for i in 0..N {
            values[i] = L::load(&tokens[i][v]);
        }
        if N == 1 && (v * BYTES).is_multiple_of(64) {
            streaming::ahead(rows[0][v].as_ptr(), 64);
        }
        for r in 0..N {
            let weights = E::load::<L>(&rows[r][v]);
            for t in 0..N {
                sums[r][t] = weights.mul_add(values[t], sums[r][t]);
            }
        }
    }
    if !weight.columns.is_multiple_of(16) {
        for r in 0..N {
            let rest = weight.row(first_row + r).as_chunks::<BYTES>().1;
            let mut padded = [0; BYTES];
            padded[..rest.len()].copy_from_slice(rest);
            let weights = E::load::<L>(&padded);
            for t in 0..N {
                let rest = x.row(first_token + t).as_chunks::<16>().1;
                let mut padded = [0.0; 16];
                padded[..rest.len()].copy_from_slice(rest);
                sums[r][t] = weights.mul_add(L::load(&padded), sums[r][t]);
            }
        }
    }
    for r in 0..N {
        for t in 0..N {
            // SAFETY: the tile lies inside the rows and tokens at hand.
            unsafe { out.set(first_token + t, first_row + r, sums[r][t].sum()) };
        }
    }
}
