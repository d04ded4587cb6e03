//! Products with F32, F16 and BF16 weights: activations stay f32.
//!
//! The order of the arithmetic: 32 partial sums by element index modulo 32, each a chain of fused multiply-adds; a row
//! whose length is no multiple of 32 continues with zeros. At the end partial sum i + 16 is added to i, then i + 8,
//! i + 4, i + 2 and i + 1.
#![expect(unsafe_code, reason = "several threads write to one buffer")]

use crate::gguf::TensorType;

use super::InstructionSet;
use super::activations::Activations;
use super::matmul::{MatrixView, Output};
use super::simd::{self, Lanes};

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
    let columns = weight.columns;
    for r in 0..weight.rows {
        let row = weight.row(r);
        let mut t = 0;
        // A row stays in the first-level cache while groups of four tokens are multiplied by it.
        while t + 4 <= x.width() {
            let tokens = &x.values()[t * columns..(t + 4) * columns];
            for (i, value) in dots::<L, E, BYTES, 4>(row, tokens, columns)
                .into_iter()
                .enumerate()
            {
                // SAFETY: r and t + i are in range.
                unsafe { out.set(t + i, r, value) };
            }
            t += 4;
        }
        while t < x.width() {
            let [value] = dots::<L, E, BYTES, 1>(row, x.row(t), columns);
            // SAFETY: r and t are in range.
            unsafe { out.set(t, r, value) };
            t += 1;
        }
    }
}

/// One row times N tokens of `columns` elements.
#[inline(always)]
fn dots<L: Lanes, E: Elements<BYTES>, const BYTES: usize, const N: usize>(
    row: &[u8],
    tokens: &[f32],
    columns: usize,
) -> [f32; N] {
    let mut values = [(&[][..], &[][..]); N];
    for (i, values) in values.iter_mut().enumerate() {
        *values = tokens[i * columns..(i + 1) * columns].as_chunks::<16>();
    }
    let mut even = [L::splat(0.0); N];
    let mut odd = [L::splat(0.0); N];
    let (units, rest) = row.as_chunks::<BYTES>();
    let (pairs, single) = units.as_chunks::<2>();
    for values in &values {
        // Lets the loop below go without bounds checks.
        assert!(values.0.len() >= 2 * pairs.len());
    }
    for (index, [first, second]) in pairs.iter().enumerate() {
        let (first, second) = (E::load::<L>(first), E::load::<L>(second));
        for i in 0..N {
            even[i] = first.mul_add(L::load(&values[i].0[2 * index]), even[i]);
            odd[i] = second.mul_add(L::load(&values[i].0[2 * index + 1]), odd[i]);
        }
    }
    if !columns.is_multiple_of(32) {
        let mut padded = [0u8; BYTES];
        padded[..rest.len()].copy_from_slice(rest);
        let padded = E::load::<L>(&padded);
        for i in 0..N {
            let mut remainder = [0.0; 16];
            remainder[..values[i].1.len()].copy_from_slice(values[i].1);
            let remainder = L::load(&remainder);
            let zero = L::splat(0.0);
            if let [first] = single {
                even[i] =
                    E::load::<L>(first).mul_add(L::load(&values[i].0[2 * pairs.len()]), even[i]);
                odd[i] = padded.mul_add(remainder, odd[i]);
            } else {
                even[i] = padded.mul_add(remainder, even[i]);
                odd[i] = zero.mul_add(zero, odd[i]);
            }
        }
    }
    let mut sums = [0.0; N];
    for i in 0..N {
        sums[i] = even[i].add(odd[i]).sum();
    }
    sums
}
