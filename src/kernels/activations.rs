//! The input of a product: rows of f32, and the 8-bit forms that quantised weights are multiplied with.
//!
//! Each row is quantised on its own, so a token's result does not depend on its company. The 8-bit form of a block is
//! d = largest magnitude / 127 and q = x * (1 / d) rounded to nearest, ties to even; a block whose d would be
//! subnormal counts as zero. All in f32, one definition for every instruction set.
#![expect(unsafe_code, reason = "several threads write to one buffer")]

use std::sync::OnceLock;

use crate::gguf::TensorType;

#[cfg(target_arch = "x86_64")]
use super::avx512_wide::Panels;
use super::blocks::{Storage, storage};
use super::simd::{self, Lanes};
use super::{ComputePool, InstructionSet};

/// `width` rows of `columns` elements. The 8-bit forms are made when a product first needs them and kept, so that
/// products over q, k, v and all row slices share them.
pub struct Activations<'a> {
    values: &'a [f32],
    width: usize,
    columns: usize,
    blocks32: OnceLock<Quantised>,
    blocks256: OnceLock<Quantised>,
    /// The tokens as the tiles of AVX-512 read them, for each format that was multiplied with them.
    #[cfg(target_arch = "x86_64")]
    panels: Panels,
}

/// Rows of 8-bit blocks. A row's quants are padded with zeros to a multiple of 256 and its blocks likewise, so that
/// loops may load whole vectors; a stride of an odd number of cache lines keeps rows from sharing cache sets.
pub(super) struct Quantised {
    quants: Vec<i8>,
    /// Where the first row starts: at a cache line, so that no vector that is loaded lies in two.
    quants_start: usize,
    pub(super) quants_stride: usize,
    /// Blocks of 32 on AVX-512: the quants once more, of each four blocks the first halves, then the second halves, for
    /// the rows that tiles leave. They start and follow one another as those of `quants` do. Others: unused.
    quants_by_half: Vec<i8>,
    by_half_start: usize,
    /// One for each block.
    pub(super) scales: Vec<f32>,
    /// Blocks of 32: the block's sum. Blocks of 256: unused.
    pub(super) sums32: Vec<i32>,
    /// Blocks of 32: scale * sum, what a block's minimum is multiplied with. Blocks of 256: unused.
    pub(super) scaled_sums: Vec<f32>,
    /// Blocks of 256: the sums of each 16 elements, 16 for a block. Blocks of 32: unused.
    pub(super) sums16: Vec<i16>,
    /// Blocks of 256: the sums of each 32 elements, 8 for a block. Blocks of 32: unused.
    pub(super) sums_of_32: Vec<i16>,
    /// Blocks in a row, padded.
    pub(super) blocks_stride: usize,
}

/// One row of `Quantised`.
#[derive(Clone, Copy)]
pub(super) struct QuantisedRow<'a> {
    pub(super) quants: &'a [i8],
    pub(super) quants_by_half: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) sums32: &'a [i32],
    pub(super) scaled_sums: &'a [f32],
    pub(super) sums16: &'a [i16],
    pub(super) sums_of_32: &'a [i16],
}

impl Quantised {
    pub(super) fn row(&self, t: usize) -> QuantisedRow<'_> {
        let blocks = t * self.blocks_stride..(t + 1) * self.blocks_stride;
        let of = |range: &std::ops::Range<usize>, unit: usize| range.start * unit..range.end * unit;
        let quants = t * self.quants_stride..(t + 1) * self.quants_stride;
        QuantisedRow {
            quants: &self.quants[self.quants_start..][quants.clone()],
            quants_by_half: self
                .quants_by_half
                .get(self.by_half_start..)
                .and_then(|all| all.get(quants))
                .unwrap_or(&[]),
            scales: &self.scales[blocks.clone()],
            sums32: self.sums32.get(blocks.clone()).unwrap_or(&[]),
            scaled_sums: self.scaled_sums.get(blocks.clone()).unwrap_or(&[]),
            sums16: self.sums16.get(of(&blocks, 16)).unwrap_or(&[]),
            sums_of_32: self.sums_of_32.get(of(&blocks, 8)).unwrap_or(&[]),
        }
    }
}

impl<'a> Activations<'a> {
    /// # Panics
    /// When `values` is not `width * columns` long.
    pub fn new(values: &'a [f32], width: usize, columns: usize) -> Activations<'a> {
        assert_eq!(
            Some(values.len()),
            width.checked_mul(columns),
            "activations of {width} rows of {columns}"
        );
        Activations {
            values,
            width,
            columns,
            blocks32: OnceLock::new(),
            blocks256: OnceLock::new(),
            #[cfg(target_arch = "x86_64")]
            panels: Panels::default(),
        }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Makes the forms that weights of this type need, in parallel: 8-bit blocks and, for many tokens on AVX-512, what
    /// tiles read (`avx512_wide`). `matmul` calls it; calling it before only moves the time. All pools that use one
    /// input have one instruction set.
    ///
    /// # Panics
    /// When a row is not a whole number of the type's blocks.
    pub fn prepare(&self, kind: TensorType, pool: &ComputePool) {
        match storage(kind) {
            Storage::F32 | Storage::F16 | Storage::BF16 => {}
            Storage::Blocks32(_) => {
                self.blocks32.get_or_init(|| self.quantise::<32>(pool));
            }
            Storage::Blocks256(_) => {
                self.blocks256.get_or_init(|| self.quantise::<256>(pool));
            }
        }
        #[cfg(target_arch = "x86_64")]
        self.panels.prepare(kind, self, pool);
    }

    pub(super) fn row(&self, t: usize) -> &[f32] {
        &self.values[t * self.columns..(t + 1) * self.columns]
    }

    pub(super) fn blocks32(&self) -> &Quantised {
        self.blocks32.get().expect("activations were prepared")
    }

    pub(super) fn blocks256(&self) -> &Quantised {
        self.blocks256.get().expect("activations were prepared")
    }

    /// What the wide loops of AVX-512 read in place of the rows.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn panels(&self) -> &Panels {
        &self.panels
    }

    fn quantise<const BLOCK: usize>(&self, pool: &ComputePool) -> Quantised {
        assert!(
            self.columns.is_multiple_of(BLOCK),
            "{} columns in blocks of {BLOCK}",
            self.columns
        );
        let blocks = self.columns / BLOCK;
        // Loops take eight blocks of 32, or four of 256, at a time.
        let blocks_stride = blocks.next_multiple_of(if BLOCK == 32 { 8 } else { 4 });
        let lines = self.columns.next_multiple_of(256) / 64;
        let quants_stride = (lines + 1) * 64;
        let (short, long) = if BLOCK == 32 { (1, 0) } else { (0, 16) };
        let count = self.width * blocks_stride;
        let by_half = usize::from(BLOCK == 32 && pool.instruction_set() == InstructionSet::Avx512);
        // Where the values fit memory as floats, their quants and what belongs to them do too.
        let quants = vec![0; self.width * quants_stride + 63];
        let quants_start = quants.as_ptr().align_offset(64);
        let quants_by_half = vec![0; (self.width * quants_stride + 63) * by_half];
        let by_half_start = quants_by_half.as_ptr().align_offset(64) * by_half;
        let mut quantised = Quantised {
            quants,
            quants_start,
            quants_stride,
            quants_by_half,
            by_half_start,
            scales: vec![0.0; count],
            sums32: vec![0; count * short],
            scaled_sums: vec![0.0; count * short],
            sums16: vec![0; count * long],
            sums_of_32: vec![0; count * long / 2],
            blocks_stride,
        };
        let rows = Rows {
            quants: quantised.quants[quants_start..].as_mut_ptr(),
            quants_by_half: quantised.quants_by_half[by_half_start..].as_mut_ptr(),
            scales: quantised.scales.as_mut_ptr(),
            sums32: quantised.sums32.as_mut_ptr(),
            scaled_sums: quantised.scaled_sums.as_mut_ptr(),
            sums16: quantised.sums16.as_mut_ptr(),
            sums_of_32: quantised.sums_of_32.as_mut_ptr(),
        };
        // A few thousand elements take about a microsecond: not worth another thread's attention.
        let rows_per_chunk = (4096 / self.columns.max(1)).max(1);
        pool.run(self.width.div_ceil(rows_per_chunk), &|chunk| {
            let rows = &rows;
            let first = chunk * rows_per_chunk;
            for t in first..(first + rows_per_chunk).min(self.width) {
                // SAFETY: the vectors hold `width` rows of these lengths and outlive the run; each row is written by
                // the one chunk that contains it.
                let mut out = unsafe {
                    let at = t * blocks_stride;
                    RowMut {
                        quants: slice(rows.quants, t * quants_stride, self.columns),
                        quants_by_half: slice(
                            rows.quants_by_half,
                            t * quants_stride * by_half,
                            self.columns.next_multiple_of(128) * by_half,
                        ),
                        scales: slice(rows.scales, at, blocks),
                        sums32: slice(rows.sums32, at * short, blocks * short),
                        scaled_sums: slice(rows.scaled_sums, at * short, blocks * short),
                        sums16: slice(rows.sums16, at * long, blocks * long),
                        sums_of_32: slice(rows.sums_of_32, at * long / 2, blocks * long / 2),
                    }
                };
                quantise_row::<BLOCK>(pool.instruction_set(), self.row(t), &mut out);
            }
        });
        quantised
    }
}

struct Rows {
    quants: *mut i8,
    quants_by_half: *mut i8,
    scales: *mut f32,
    sums32: *mut i32,
    scaled_sums: *mut f32,
    sums16: *mut i16,
    sums_of_32: *mut i16,
}

// SAFETY: the pointers are used for disjoint rows only.
unsafe impl Sync for Rows {}

/// # Safety
/// `at..at + len` lies inside the allocation and no other reference to it exists.
unsafe fn slice<'a, T>(start: *mut T, at: usize, len: usize) -> &'a mut [T] {
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(start.add(at), len) }
}

struct RowMut<'a> {
    quants: &'a mut [i8],
    quants_by_half: &'a mut [i8],
    scales: &'a mut [f32],
    sums32: &'a mut [i32],
    scaled_sums: &'a mut [f32],
    sums16: &'a mut [i16],
    sums_of_32: &'a mut [i16],
}

simd::vectorised! {
    /// The same code for each set: only the vectors that the compiler makes of it differ.
    fn quantise_row<const BLOCK: usize>(values: &[f32], out: &mut RowMut<'_>) => quantise_row_on
}

#[inline(always)]
fn quantise_row_on<L: Lanes, const BLOCK: usize>(values: &[f32], out: &mut RowMut<'_>) {
    let blocks = values.as_chunks::<BLOCK>().0.iter();
    let quants = out.quants.as_chunks_mut::<BLOCK>().0.iter_mut();
    for (index, (values, quants)) in blocks.zip(quants).enumerate() {
        let scale = quantise_block(values, quants);
        out.scales[index] = scale;
        if BLOCK == 32 {
            let sum: i32 = quants.iter().map(|quant| i32::from(*quant)).sum();
            out.sums32[index] = sum;
            out.scaled_sums[index] = scale * sum as f32;
            if let Some(four) = out
                .quants_by_half
                .as_chunks_mut::<128>()
                .0
                .get_mut(index / 4)
            {
                let at = 16 * (index % 4);
                four[at..at + 16].copy_from_slice(&quants[..16]);
                four[64 + at..64 + at + 16].copy_from_slice(&quants[16..]);
            }
        } else {
            let sums = &mut out.sums16[16 * index..16 * index + 16];
            for (sum, quants) in sums.iter_mut().zip(quants.as_chunks::<16>().0) {
                *sum = quants.iter().map(|quant| i16::from(*quant)).sum();
            }
            let pairs = sums.as_chunks::<2>().0.iter();
            for (sum, [a, b]) in out.sums_of_32[8 * index..8 * index + 8]
                .iter_mut()
                .zip(pairs)
            {
                *sum = a + b;
            }
        }
    }
}

#[inline(always)]
fn quantise_block<const BLOCK: usize>(values: &[f32; BLOCK], quants: &mut [i8; BLOCK]) -> f32 {
    // The bits of a magnitude compare as integers, a NaN above all others: it is found, not lost.
    let largest = values
        .iter()
        .map(|value| (value.to_bits() & 0x7fff_ffff) as i32)
        .fold(0, i32::max);
    let scale = f32::from_bits(largest as u32) / 127.0;
    if scale < f32::MIN_POSITIVE || !scale.is_finite() {
        *quants = [0; BLOCK];
        // An infinity or a NaN makes every result that uses the block a NaN.
        return if scale.is_finite() { 0.0 } else { f32::NAN };
    }
    let inverse = 1.0 / scale;
    for (quant, value) in quants.iter_mut().zip(values) {
        // Adding 1.5 * 2^23 leaves no fraction bits, so the sum is rounded to an integer, ties to even, and its low
        // byte is that integer in two's complement.
        *quant = (value * inverse + 12_582_912.0).to_bits() as i8;
    }
    scale
}
