//! Products with quantised weights on AVX-512 for many tokens. The order of the arithmetic is the parent module's.
//!
//! A tile of 32 rows is unpacked 256 columns at a time into a scratch that stays in the first-level cache, transposed
//! so that a vector holds four consecutive values of each of 16 rows. Each vector is then multiplied with four
//! broadcast quants of up to six tokens: `vpdpbusd` does 64 multiplications and no sum across lanes is ever needed. The
//! partial sums of a panel of tokens wait in memory between blocks.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]
#![expect(
    clippy::needless_range_loop,
    reason = "an index keeps several arrays in step"
)]

use std::arch::x86_64::*;

use super::activations::{Activations, QuantisedRow};
use super::avx2::{heads256, scales256};
use super::avx512::values256;
use super::blocks::{Format32, Format256};
use super::matmul::{MatrixView, Output};

/// Rows of a tile: two vectors of 16.
const TILE_ROWS: usize = 32;
/// Fewer tokens than this do not repay the transposition.
const WIDTH_MIN: usize = 17;
/// Tokens whose partial sums are kept at once: 128 KiB at most, half of a small second-level cache.
const PANEL_TOKENS: usize = 128;
/// Tokens that share a loaded vector of weights; bounded by the 32 registers.
const TILE_TOKENS: usize = 6;

/// Four consecutive values of 16 rows, for 64 fours, for each half of a tile.
type Values = [[__m512i; 64]; 2];

/// Multiplies whole tiles where there are tokens enough; how many rows were done.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn rows32<const F: u8>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) -> usize {
    if x.width() < WIDTH_MIN {
        return 0;
    }
    let blocks = weight.columns / 32;
    let mut scratch = Scratch32::empty();
    let mut partial = vec![[[[0.0f32; 16]; 2]; 8]; x.width().min(PANEL_TOKENS)];
    let row_bytes = weight.row_bytes();
    for (tile, rows) in weight.bytes.chunks_exact(TILE_ROWS * row_bytes).enumerate() {
        for first_token in (0..x.width()).step_by(PANEL_TOKENS) {
            let tokens = (x.width() - first_token).min(PANEL_TOKENS);
            partial.fill([[[0.0; 16]; 2]; 8]);
            for first_block in (0..blocks).step_by(8) {
                let count = (blocks - first_block).min(8);
                scratch.fill::<F>(rows, row_bytes, first_block, count);
                let mut t = 0;
                while t < tokens {
                    let partial = &mut partial[t..tokens];
                    let token = first_token + t;
                    t += TILE_TOKENS;
                    match partial.len() {
                        1 => tile32::<F, 1>(&scratch, x, token, first_block, count, partial),
                        2 => tile32::<F, 2>(&scratch, x, token, first_block, count, partial),
                        3 => tile32::<F, 3>(&scratch, x, token, first_block, count, partial),
                        4 => tile32::<F, 4>(&scratch, x, token, first_block, count, partial),
                        5 => tile32::<F, 5>(&scratch, x, token, first_block, count, partial),
                        _ => tile32::<F, 6>(&scratch, x, token, first_block, count, partial),
                    }
                }
            }
            for (t, partial) in partial[..tokens].iter().enumerate() {
                for half in 0..2 {
                    let p = |b: usize| load(&partial[b][half]);
                    let even = _mm512_add_ps(_mm512_add_ps(p(0), p(4)), _mm512_add_ps(p(2), p(6)));
                    let odd = _mm512_add_ps(_mm512_add_ps(p(1), p(5)), _mm512_add_ps(p(3), p(7)));
                    let at = out
                        .token(first_token + t)
                        .wrapping_add(tile * TILE_ROWS + 16 * half);
                    // SAFETY: 16 rows of the tile at hand, for a token that is there.
                    unsafe { _mm512_storeu_ps(at, _mm512_add_ps(even, odd)) };
                }
            }
        }
    }
    weight.rows / TILE_ROWS * TILE_ROWS
}

/// Multiplies whole tiles where there are tokens enough; how many rows were done.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn rows256<const F: u8>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) -> usize {
    if x.width() < WIDTH_MIN {
        return 0;
    }
    let blocks = weight.columns / 256;
    let mut scratch = Scratch256::empty();
    let mut partial = vec![[[[0.0f32; 16]; 2]; 4]; x.width().min(PANEL_TOKENS)];
    let row_bytes = weight.row_bytes();
    for (tile, rows) in weight.bytes.chunks_exact(TILE_ROWS * row_bytes).enumerate() {
        for first_token in (0..x.width()).step_by(PANEL_TOKENS) {
            let tokens = (x.width() - first_token).min(PANEL_TOKENS);
            partial.fill([[[0.0; 16]; 2]; 4]);
            for block in 0..blocks {
                scratch.fill::<F>(rows, row_bytes, block);
                let mut t = 0;
                while t < tokens {
                    let partial = &mut partial[t..tokens];
                    let token = first_token + t;
                    t += TILE_TOKENS;
                    match partial.len() {
                        1 => tile256::<F, 1>(&scratch, x, token, block, partial),
                        2 => tile256::<F, 2>(&scratch, x, token, block, partial),
                        3 => tile256::<F, 3>(&scratch, x, token, block, partial),
                        4 => tile256::<F, 4>(&scratch, x, token, block, partial),
                        5 => tile256::<F, 5>(&scratch, x, token, block, partial),
                        _ => tile256::<F, 6>(&scratch, x, token, block, partial),
                    }
                }
            }
            for (t, partial) in partial[..tokens].iter().enumerate() {
                for half in 0..2 {
                    let p = |b: usize| load(&partial[b][half]);
                    let sum = _mm512_add_ps(_mm512_add_ps(p(0), p(1)), _mm512_add_ps(p(2), p(3)));
                    let at = out
                        .token(first_token + t)
                        .wrapping_add(tile * TILE_ROWS + 16 * half);
                    // SAFETY: 16 rows of the tile at hand, for a token that is there.
                    unsafe { _mm512_storeu_ps(at, sum) };
                }
            }
        }
    }
    weight.rows / TILE_ROWS * TILE_ROWS
}

/// Eight blocks of 32 of each row of a tile, unpacked: for each half of the tile, rows side by side.
struct Scratch32 {
    values: Values,
    scales: [[__m512; 8]; 2],
    minimums: [[__m512; 8]; 2],
}

impl Scratch32 {
    #[target_feature(enable = "avx512f")]
    fn empty() -> Scratch32 {
        Scratch32 {
            values: [[_mm512_setzero_si512(); 64]; 2],
            scales: [[_mm512_setzero_ps(); 8]; 2],
            minimums: [[_mm512_setzero_ps(); 8]; 2],
        }
    }

    /// Unpacks `count` blocks from `first_block` on of each of the tile's rows.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    fn fill<const F: u8>(
        &mut self,
        rows: &[u8],
        row_bytes: usize,
        first_block: usize,
        count: usize,
    ) {
        let format = Format32::from_index(F);
        let block_bytes = format.block_bytes();
        for half in 0..2 {
            let mut values = [[_mm512_setzero_si512(); 16]; 4];
            let mut scales = [[0u16; 16]; 8];
            let mut minimums = [[0u16; 16]; 8];
            for r in 0..16 {
                let row = &rows[(16 * half + r) * row_bytes..(16 * half + r + 1) * row_bytes];
                let start = first_block * block_bytes;
                let group = &row[start..start + count * block_bytes];
                prefetch_row(group);
                for (b, block) in group.chunks_exact(block_bytes).enumerate() {
                    scales[b][r] = u16::from_le_bytes([block[0], block[1]]);
                    minimums[b][r] = u16::from_le_bytes([block[2], block[3]]);
                }
                for (i, values) in values.iter_mut().enumerate() {
                    if 2 * i < count {
                        let pair = &group[2 * i * block_bytes..];
                        values[r] = values_of_two::<F>(pair, (count - 2 * i).min(2));
                    }
                }
            }
            for (i, values) in values.iter().enumerate() {
                let columns = transpose(values);
                self.values[half][16 * i..16 * i + 16].copy_from_slice(&columns);
            }
            for b in 0..8 {
                self.scales[half][b] = halves_to_floats(&scales[b]);
                self.minimums[half][b] = halves_to_floats(&minimums[b]);
            }
        }
    }
}

/// A tile times C tokens from `token`, over the blocks in the scratch.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
fn tile32<const F: u8, const C: usize>(
    scratch: &Scratch32,
    x: &Activations<'_>,
    token: usize,
    first_block: usize,
    count: usize,
    partial: &mut [[[[f32; 16]; 2]; 8]],
) {
    let format = Format32::from_index(F);
    let tokens = rows_of::<C>(token, x.blocks32());
    for b in 0..count {
        let block = first_block + b;
        let mut sums = [[_mm512_setzero_si512(); C]; 2];
        if format.offset() != 0 {
            for c in 0..C {
                let offset = _mm512_set1_epi32(-format.offset() * tokens[c].sums32[block]);
                sums[0][c] = offset;
                sums[1][c] = offset;
            }
        }
        let mut quants = [tokens[0].quants.as_chunks::<4>().0; C];
        for c in 0..C {
            quants[c] = &tokens[c].quants.as_chunks::<4>().0[8 * block..8 * block + 8];
        }
        for k in 0..8 {
            let lower = scratch.values[0][8 * b + k];
            let upper = scratch.values[1][8 * b + k];
            for c in 0..C {
                let four = broadcast(&quants[c][k]);
                sums[0][c] = _mm512_dpbusd_epi32(sums[0][c], lower, four);
                sums[1][c] = _mm512_dpbusd_epi32(sums[1][c], upper, four);
            }
        }
        for c in 0..C {
            let x_scale = _mm512_set1_ps(tokens[c].scales[block]);
            let x_scaled_sum = _mm512_set1_ps(tokens[c].scaled_sums[block]);
            for half in 0..2 {
                let scale = _mm512_mul_ps(scratch.scales[half][b], x_scale);
                let to = &mut partial[c][b][half];
                let mut next = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums[half][c]), load(to));
                if format.has_minimum() {
                    next = _mm512_fmadd_ps(scratch.minimums[half][b], x_scaled_sum, next);
                }
                store(to, next);
            }
        }
    }
}

/// One block of 256 of each row of a tile, unpacked: for each half of the tile, rows side by side.
struct Scratch256 {
    values: Values,
    /// Integer scales of the sub-blocks of 16.
    scales: [[__m512i; 16]; 2],
    /// What the sums of quants are multiplied with, two sub-blocks in one lane: the minimums, or, where a format
    /// subtracts an offset from its values, -offset * scale.
    of_sums: [[__m512i; 8]; 2],
    scale: [__m512; 2],
    minimum: [__m512; 2],
}

impl Scratch256 {
    #[target_feature(enable = "avx512f")]
    fn empty() -> Scratch256 {
        Scratch256 {
            values: [[_mm512_setzero_si512(); 64]; 2],
            scales: [[_mm512_setzero_si512(); 16]; 2],
            of_sums: [[_mm512_setzero_si512(); 8]; 2],
            scale: [_mm512_setzero_ps(); 2],
            minimum: [_mm512_setzero_ps(); 2],
        }
    }

    /// Unpacks one block of each of the tile's rows.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    fn fill<const F: u8>(&mut self, rows: &[u8], row_bytes: usize, block: usize) {
        let format = Format256::from_index(F);
        let block_bytes = format.block_bytes();
        for half in 0..2 {
            let mut values = [[_mm512_setzero_si512(); 16]; 4];
            let mut row_scales = [_mm512_setzero_si512(); 16];
            let mut row_of_sums = [_mm512_setzero_si512(); 16];
            let mut scale = [0u16; 16];
            let mut minimum = [0u16; 16];
            for r in 0..16 {
                let row = &rows[(16 * half + r) * row_bytes..(16 * half + r + 1) * row_bytes];
                let block = &row[block * block_bytes..(block + 1) * block_bytes];
                prefetch_row(block);
                [scale[r], minimum[r]] = heads256::<F>(block);
                let (scales, minimums) = scales256::<F>(block);
                row_scales[r] = _mm512_cvtepi16_epi32(scales);
                let of_sums = if format.has_minimum() {
                    minimums
                } else {
                    _mm256_mullo_epi16(scales, _mm256_set1_epi16(-format.offset() as i16))
                };
                row_of_sums[r] = _mm512_castsi256_si512(of_sums);
                for (values, of_row) in values.iter_mut().zip(values256::<F>(block)) {
                    values[r] = of_row;
                }
            }
            for (i, values) in values.iter().enumerate() {
                let columns = transpose(values);
                self.values[half][16 * i..16 * i + 16].copy_from_slice(&columns);
            }
            self.scales[half] = transpose(&row_scales);
            self.of_sums[half].copy_from_slice(&transpose(&row_of_sums)[..8]);
            self.scale[half] = halves_to_floats(&scale);
            self.minimum[half] = halves_to_floats(&minimum);
        }
    }
}

/// A tile times C tokens from `token`, over the block in the scratch.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
fn tile256<const F: u8, const C: usize>(
    scratch: &Scratch256,
    x: &Activations<'_>,
    token: usize,
    block: usize,
    partial: &mut [[[[f32; 16]; 2]; 4]],
) {
    let format = Format256::from_index(F);
    let tokens = rows_of::<C>(token, x.blocks256());
    // Formats with sub-blocks of 32 have each scale twice.
    let sub_block = if matches!(format, Format256::Q4K | Format256::Q5K) {
        32
    } else {
        16
    };
    let mut quants = [tokens[0].quants.as_chunks::<4>().0; C];
    let mut x_sums = [tokens[0].sums16.as_chunks::<2>().0; C];
    for c in 0..C {
        quants[c] = &tokens[c].quants.as_chunks::<4>().0[64 * block..64 * block + 64];
        x_sums[c] = &tokens[c].sums16.as_chunks::<2>().0[8 * block..8 * block + 8];
    }
    let mut of_sums = [[_mm512_setzero_si512(); C]; 2];
    for pair in 0..8 {
        for c in 0..C {
            let two = broadcast_sums(&x_sums[c][pair]);
            for half in 0..2 {
                let factors = scratch.of_sums[half][pair];
                of_sums[half][c] = _mm512_dpwssd_epi32(of_sums[half][c], factors, two);
            }
        }
    }
    let mut sums = [[_mm512_setzero_si512(); C]; 2];
    if !format.has_minimum() {
        sums = of_sums;
    }
    for j in 0..256 / sub_block {
        let mut products = [[_mm512_setzero_si512(); C]; 2];
        for k in sub_block / 4 * j..sub_block / 4 * (j + 1) {
            let lower = scratch.values[0][k];
            let upper = scratch.values[1][k];
            for c in 0..C {
                let four = broadcast(&quants[c][k]);
                products[0][c] = _mm512_dpbusd_epi32(products[0][c], lower, four);
                products[1][c] = _mm512_dpbusd_epi32(products[1][c], upper, four);
            }
        }
        for half in 0..2 {
            let scale = scratch.scales[half][sub_block / 16 * j];
            for c in 0..C {
                let scaled = _mm512_mullo_epi32(products[half][c], scale);
                sums[half][c] = _mm512_add_epi32(sums[half][c], scaled);
            }
        }
    }
    for c in 0..C {
        let x_scale = _mm512_set1_ps(tokens[c].scales[block]);
        for half in 0..2 {
            let to = &mut partial[c][block % 4][half];
            let scale = _mm512_mul_ps(scratch.scale[half], x_scale);
            let mut next = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums[half][c]), load(to));
            if format.has_minimum() {
                let minimum = _mm512_mul_ps(scratch.minimum[half], x_scale);
                next = _mm512_fnmadd_ps(minimum, _mm512_cvtepi32_ps(of_sums[half][c]), next);
            }
            store(to, next);
        }
    }
}

#[inline(always)]
fn rows_of<const C: usize>(
    token: usize,
    quantised: &super::activations::Quantised,
) -> [QuantisedRow<'_>; C] {
    std::array::from_fn(|c| quantised.row(token + c))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn broadcast(four: &[i8; 4]) -> __m512i {
    let bytes = [four[0] as u8, four[1] as u8, four[2] as u8, four[3] as u8];
    _mm512_set1_epi32(i32::from_le_bytes(bytes))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn broadcast_sums(two: &[i16; 2]) -> __m512i {
    let (low, high) = (two[0] as u16, two[1] as u16);
    _mm512_set1_epi32((u32::from(low) | (u32::from(high) << 16)) as i32)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load(from: &[f32; 16]) -> __m512 {
    // SAFETY: the array holds 16 values.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store(to: &mut [f32; 16], value: __m512) {
    // SAFETY: the array holds 16 values.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn halves_to_floats(halves: &[u16; 16]) -> __m512 {
    // SAFETY: the array holds 32 bytes.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(halves.as_ptr().cast())) }
}

/// Asks for what the tile needs of this row a few blocks later. The processor follows far fewer streams than 32.
#[target_feature(enable = "avx512f")]
#[inline]
fn prefetch_row(bytes: &[u8]) {
    const AHEAD: usize = 1024;
    for line in (0..bytes.len()).step_by(64) {
        // Prefetching an address that is not mapped does nothing, so the end of the weights needs no care.
        _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(AHEAD + line).cast());
    }
}

/// Lane r of vector c becomes lane c of vector r.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(rows: &[__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    // Quarter q of fours[4 g + c]: column 4 q + c of rows 4 g to 4 g + 3.
    let mut fours = [_mm512_setzero_si512(); 16];
    for g in 0..4 {
        fours[4 * g] = _mm512_unpacklo_epi64(pairs[4 * g], pairs[4 * g + 2]);
        fours[4 * g + 1] = _mm512_unpackhi_epi64(pairs[4 * g], pairs[4 * g + 2]);
        fours[4 * g + 2] = _mm512_unpacklo_epi64(pairs[4 * g + 1], pairs[4 * g + 3]);
        fours[4 * g + 3] = _mm512_unpackhi_epi64(pairs[4 * g + 1], pairs[4 * g + 3]);
    }
    let mut columns = [_mm512_setzero_si512(); 16];
    for c in 0..4 {
        let even = _mm512_shuffle_i32x4::<0x88>(fours[c], fours[4 + c]);
        let odd = _mm512_shuffle_i32x4::<0xdd>(fours[c], fours[4 + c]);
        let upper_even = _mm512_shuffle_i32x4::<0x88>(fours[8 + c], fours[12 + c]);
        let upper_odd = _mm512_shuffle_i32x4::<0xdd>(fours[8 + c], fours[12 + c]);
        columns[c] = _mm512_shuffle_i32x4::<0x88>(even, upper_even);
        columns[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd, upper_odd);
        columns[8 + c] = _mm512_shuffle_i32x4::<0xdd>(even, upper_even);
        columns[12 + c] = _mm512_shuffle_i32x4::<0xdd>(odd, upper_odd);
    }
    columns
}
/// The unsigned values of two blocks of 32 (`count` 2) or of one, the rest zero.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn values_of_two<const F: u8>(blocks: &[u8], count: usize) -> __m512i {
    let format = Format32::from_index(F);
    let block_bytes = format.block_bytes();
    assert!(blocks.len() >= count * block_bytes);
    let start = blocks.as_ptr();
    if format == Format32::Q8_0 {
        // SAFETY: `count` blocks are there.
        let signed = unsafe {
            let first = _mm256_loadu_si256(start.add(2).cast());
            let second = if count == 2 {
                _mm256_loadu_si256(start.add(36).cast())
            } else {
                _mm256_setzero_si256()
            };
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second)
        };
        return _mm512_xor_si512(signed, _mm512_set1_epi8(-128));
    }
    let present = (1u64 << (count * block_bytes)) - 1;
    // SAFETY: only bytes of the blocks that are there are loaded.
    let bytes = unsafe { _mm512_maskz_loadu_epi8(present, start.cast()) };
    // Each block's 16 quants twice: for the lower and for the upper nibbles.
    let quants = (block_bytes - 16) as i64;
    let ascending = |from: i64| {
        let bytes: i64 = 0x0706_0504_0302_0100;
        (
            bytes + from * 0x0101_0101_0101_0101,
            bytes + (from + 8) * 0x0101_0101_0101_0101,
        )
    };
    let (a, b) = ascending(quants);
    let (c, d) = ascending(quants + block_bytes as i64);
    let index = _mm512_setr_epi64(a, b, a, b, c, d, c, d);
    let quants = _mm512_permutexvar_epi8(index, bytes);
    let shifts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
    let nibbles = _mm512_and_si512(_mm512_srlv_epi64(quants, shifts), _mm512_set1_epi8(15));
    if !matches!(format, Format32::Q5_0 | Format32::Q5_1) {
        return nibbles;
    }
    let bits = |block: usize| {
        let at = block * block_bytes + block_bytes - 20;
        let bits = blocks[at..].first_chunk::<4>();
        bits.map_or(0, |bits| u64::from(u32::from_le_bytes(*bits)))
    };
    let fifth = if count == 2 {
        bits(0) | (bits(1) << 32)
    } else {
        bits(0)
    };
    _mm512_mask_add_epi8(nibbles, fifth, nibbles, _mm512_set1_epi8(16))
}
