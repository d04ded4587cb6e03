//! Products with quantised weights on AVX-512 (with VBMI and VNNI), for few tokens: one row at a time, walked in order;
//! up to four tokens share the unpacking of a block. Many tokens go to `avx512_wide`. The order of the arithmetic is
//! the parent module's.
//!
//! At width 1 the limit is how many cache misses are in flight, so memory is asked for well ahead (`avx2::prefetch`).
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

use std::arch::x86_64::*;

use super::activations::{Activations, QuantisedRow};
use super::avx2::{
    heads_to_floats, heads256, prefetch, scales256, sum_of_eight, sums_of_four, total_of_four,
};
use super::avx512_wide;
use super::blocks::{Format32, Format256, for_format32, for_format256};
use super::matmul::{MatrixView, Output};

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

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
fn rows32<const F: u8>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    let done = avx512_wide::rows32::<F>(weight, x, out);
    let rows = weight.bytes.chunks_exact(weight.row_bytes());
    for (r, row) in rows.enumerate().skip(done) {
        let mut t = 0;
        while t < x.width() {
            match x.width() - t {
                1 => tokens32::<F, 1>(row, x, out, r, t),
                2 => tokens32::<F, 2>(row, x, out, r, t),
                3 => tokens32::<F, 3>(row, x, out, r, t),
                _ => tokens32::<F, 4>(row, x, out, r, t),
            }
            t += 4;
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
fn rows256<const F: u8>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    let done = avx512_wide::rows256::<F>(weight, x, out);
    let rows = weight.bytes.chunks_exact(weight.row_bytes());
    for (r, row) in rows.enumerate().skip(done) {
        let mut t = 0;
        while t < x.width() {
            match x.width() - t {
                1 => tokens256::<F, 1>(row, x, out, r, t),
                2 => tokens256::<F, 2>(row, x, out, r, t),
                3 => tokens256::<F, 3>(row, x, out, r, t),
                _ => tokens256::<F, 4>(row, x, out, r, t),
            }
            t += 4;
        }
    }
}

/// One row times N tokens from `t`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn tokens32<const F: u8, const N: usize>(
    row: &[u8],
    x: &Activations<'_>,
    out: Output,
    r: usize,
    t: usize,
) {
    let block_bytes = Format32::from_index(F).block_bytes();
    let mut tokens = [x.blocks32().row(t); N];
    for (n, token) in tokens.iter_mut().enumerate().skip(1) {
        *token = x.blocks32().row(t + n);
    }
    let mut partial = [_mm256_setzero_ps(); N];
    let mut groups = row.chunks_exact(8 * block_bytes);
    let mut first = 0;
    for group in &mut groups {
        group32::<F, N, true>(group, 8, first, &tokens, &mut partial);
        first += 8;
    }
    let rest = groups.remainder();
    if !rest.is_empty() {
        group32::<F, N, false>(rest, rest.len() / block_bytes, first, &tokens, &mut partial);
    }
    for (n, partial) in partial.into_iter().enumerate() {
        // SAFETY: r and t + n are in range.
        unsafe { out.set(t + n, r, sum_of_eight(partial)) };
    }
}

/// Adds `count` blocks (all eight, or the last of a row), the first of which has index `first`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn group32<const F: u8, const N: usize, const FULL: bool>(
    group: &[u8],
    count: usize,
    first: usize,
    tokens: &[QuantisedRow<'_>; N],
    partial: &mut [__m256; N],
) {
    let format = Format32::from_index(F);
    let block_bytes = format.block_bytes();
    // The compiler has to know, and to find one call of each: it inlines the function only then.
    let count = if FULL { 8 } else { count };
    assert_eq!(group.len(), count * block_bytes);
    prefetch(group.as_ptr(), 8 * block_bytes);
    let mut values = [_mm512_setzero_si512(); 4];
    for (i, values) in values.iter_mut().enumerate() {
        if 2 * i < count {
            let pair = &group[2 * i * block_bytes..];
            *values = values_of_two::<F>(pair, (count - 2 * i).min(2));
        }
    }
    let present = ((1u32 << count) - 1) as u8;
    let offsets = _mm256_mullo_epi32(
        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
        _mm256_set1_epi32(block_bytes as i32),
    );
    // SAFETY: each block that is present starts with the four bytes gathered.
    let heads = unsafe {
        let zero = _mm256_setzero_si256();
        _mm256_mmask_i32gather_epi32::<1>(zero, present, offsets, group.as_ptr().cast())
    };
    let scales = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(heads));
    let minimums = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(_mm256_srli_epi32::<16>(heads)));
    for (token, partial) in tokens.iter().zip(partial) {
        let quants = token.quants[32 * first..32 * first + 256].as_ptr();
        let mut products = [_mm512_setzero_si512(); 4];
        for (i, product) in products.iter_mut().enumerate() {
            // SAFETY: the slice above holds eight blocks.
            let quants = unsafe { _mm512_loadu_si512(quants.add(64 * i).cast()) };
            *product = _mm512_dpbusd_epi32(*product, values[i], quants);
        }
        let mut sums = sums_of_eight(products);
        let eight = first..first + 8;
        // SAFETY: each slice holds eight values.
        let (x_scales, x_sums, x_scaled_sums) = unsafe {
            (
                _mm256_loadu_ps(token.scales[eight.clone()].as_ptr()),
                _mm256_loadu_si256(token.sums32[eight.clone()].as_ptr().cast()),
                _mm256_loadu_ps(token.scaled_sums[eight].as_ptr()),
            )
        };
        sums = match format {
            Format32::Q4_0 => _mm256_sub_epi32(sums, _mm256_slli_epi32::<3>(x_sums)),
            Format32::Q5_0 => _mm256_sub_epi32(sums, _mm256_slli_epi32::<4>(x_sums)),
            Format32::Q8_0 => _mm256_sub_epi32(sums, _mm256_slli_epi32::<7>(x_sums)),
            Format32::Q4_1 | Format32::Q5_1 => sums,
        };
        let scale = _mm256_mul_ps(scales, x_scales);
        let sums = _mm256_cvtepi32_ps(sums);
        *partial = _mm256_mask3_fmadd_ps(scale, sums, *partial, present);
        if format.has_minimum() {
            *partial = _mm256_mask3_fmadd_ps(minimums, x_scaled_sums, *partial, present);
        }
    }
}

/// The unsigned values of two blocks of 32 (`count` 2) or of one, the rest zero.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
pub(super) fn values_of_two<const F: u8>(blocks: &[u8], count: usize) -> __m512i {
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

/// Vector i holds the products of blocks 2 i and 2 i + 1; lane b of the result is the sum of block b.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn sums_of_eight(v: [__m512i; 4]) -> __m256i {
    // Each quarter: [pair 0, pair 1, pair 2, pair 3]; two quarters for the first blocks of the pairs, two for the second.
    let pair = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (a, b) = (pair(v[0], v[1]), pair(v[2], v[3]));
    let quarters = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let order = |a, b| _mm256_setr_epi32(a, b, a + 1, b + 1, a + 2, b + 2, a + 3, b + 3);
    let upper = _mm512_castsi256_si512(order(4, 12));
    let lower = _mm512_castsi256_si512(order(0, 8));
    _mm256_add_epi32(
        _mm512_castsi512_si256(_mm512_permutexvar_epi32(lower, quarters)),
        _mm512_castsi512_si256(_mm512_permutexvar_epi32(upper, quarters)),
    )
}

/// One row times N tokens from `t`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn tokens256<const F: u8, const N: usize>(
    row: &[u8],
    x: &Activations<'_>,
    out: Output,
    r: usize,
    t: usize,
) {
    let block_bytes = Format256::from_index(F).block_bytes();
    let mut tokens = [x.blocks256().row(t); N];
    for (n, token) in tokens.iter_mut().enumerate().skip(1) {
        *token = x.blocks256().row(t + n);
    }
    let mut partial = [_mm_setzero_ps(); N];
    let mut groups = row.chunks_exact(4 * block_bytes);
    let mut first = 0;
    for group in &mut groups {
        group256::<F, N, true>(group, 4, first, &tokens, &mut partial);
        first += 4;
    }
    let rest = groups.remainder();
    if !rest.is_empty() {
        group256::<F, N, false>(rest, rest.len() / block_bytes, first, &tokens, &mut partial);
    }
    for (n, partial) in partial.into_iter().enumerate() {
        // SAFETY: r and t + n are in range.
        unsafe { out.set(t + n, r, total_of_four(partial)) };
    }
}

/// Adds `count` blocks (all four, or the last of a row), the first of which has index `first`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn group256<const F: u8, const N: usize, const FULL: bool>(
    group: &[u8],
    count: usize,
    first: usize,
    tokens: &[QuantisedRow<'_>; N],
    partial: &mut [__m128; N],
) {
    let format = Format256::from_index(F);
    let block_bytes = format.block_bytes();
    // The compiler has to know, and to find one call of each: it inlines the function only then.
    let count = if FULL { 4 } else { count };
    assert_eq!(group.len(), count * block_bytes);
    let mut sums = [[_mm256_setzero_si256(); 4]; N];
    let mut minimum_sums = [[_mm256_setzero_si256(); 4]; N];
    let mut heads = [[0u16; 2]; 4];
    for i in 0..4 {
        if i >= count {
            break;
        }
        let block = &group[i * block_bytes..(i + 1) * block_bytes];
        prefetch(block.as_ptr(), block_bytes);
        heads[i] = heads256::<F>(block);
        let (scales, minimums) = scales256::<F>(block);
        let values: [__m512i; 4] = values256::<F>(block);
        let wide_scales = _mm512_castsi256_si512(scales);
        for (n, token) in tokens.iter().enumerate() {
            let quants = token.quants[256 * (first + i)..256 * (first + i) + 256].as_ptr();
            let mut total = _mm512_setzero_si512();
            for (v, values) in values.iter().enumerate() {
                // SAFETY: the slice holds 256 bytes.
                let quants = unsafe { _mm512_loadu_si512(quants.add(64 * v).cast()) };
                let pairs = _mm512_maddubs_epi16(*values, quants);
                let scales = _mm512_permutexvar_epi16(four_scales(v), wide_scales);
                total = _mm512_dpwssd_epi32(total, pairs, scales);
            }
            let sums16 = token.sums16[16 * (first + i)..16 * (first + i) + 16].as_ptr();
            // SAFETY: the slice holds 16 values.
            let sums16 = unsafe { _mm256_loadu_si256(sums16.cast()) };
            let halves = _mm256_add_epi32(
                _mm512_castsi512_si256(total),
                _mm512_extracti64x4_epi64::<1>(total),
            );
            sums[n][i] = match format {
                Format256::Q3K => {
                    let offset = _mm256_slli_epi32::<2>(_mm256_madd_epi16(scales, sums16));
                    _mm256_sub_epi32(halves, offset)
                }
                Format256::Q6K => {
                    let offset = _mm256_slli_epi32::<5>(_mm256_madd_epi16(scales, sums16));
                    _mm256_sub_epi32(halves, offset)
                }
                Format256::Q2K | Format256::Q4K | Format256::Q5K => halves,
            };
            if format.has_minimum() {
                minimum_sums[n][i] = _mm256_madd_epi16(minimums, sums16);
            }
        }
    }
    let present = ((1u32 << count) - 1) as u8;
    let (scales, minimums) = heads_to_floats(heads);
    for (n, token) in tokens.iter().enumerate() {
        let x_scales = token.scales[first..first + 4].as_ptr();
        // SAFETY: the slice holds four values.
        let x_scales = unsafe { _mm_loadu_ps(x_scales) };
        let sums = _mm_cvtepi32_ps(sums_of_four(sums[n]));
        let scale = _mm_mul_ps(scales, x_scales);
        partial[n] = _mm_mask3_fmadd_ps(scale, sums, partial[n], present);
        if format.has_minimum() {
            let sums = _mm_cvtepi32_ps(sums_of_four(minimum_sums[n]));
            let scale = _mm_mul_ps(minimums, x_scales);
            partial[n] = _mm_mask3_fnmadd_ps(scale, sums, partial[n], present);
        }
    }
}

/// Which of 16 scales each of 32 16-bit lanes needs, for values 64 v to 64 v + 63 (two values a lane).
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn four_scales(v: usize) -> __m512i {
    let scale = |j: usize| 0x0001_0001_0001_0001 * (4 * v + j) as i64;
    _mm512_setr_epi64(
        scale(0),
        scale(0),
        scale(1),
        scale(1),
        scale(2),
        scale(2),
        scale(3),
        scale(3),
    )
}

/// The unsigned values of a block of 256, in order.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
pub(super) fn values256<const F: u8>(block: &[u8]) -> [__m512i; 4] {
    // 32 bytes in both halves.
    let twice = |at: usize| {
        let bytes = block[at..at + 32].as_ptr();
        // SAFETY: the slice holds 32 bytes.
        _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(bytes.cast()) })
    };
    let whole = |at: usize| {
        let bytes = block[at..at + 64].as_ptr();
        // SAFETY: the slice holds 64 bytes.
        unsafe { _mm512_loadu_si512(bytes.cast()) }
    };
    // Shifts for the lower and the upper half.
    let shifts = |lower: i64, upper: i64| {
        _mm512_setr_epi64(lower, lower, lower, lower, upper, upper, upper, upper)
    };
    let mask = |bytes, mask: i8| _mm512_and_si512(bytes, _mm512_set1_epi8(mask));
    // Bit 2 v of 32 bytes for the lower half, bit 2 v + 1 for the upper.
    let bit = |bytes, v: usize| {
        let lower = 0x0101_0101_0101_0101_i64 << (2 * v);
        _mm512_test_epi8_mask(bytes, shifts(lower, lower << 1))
    };
    let mut values = [_mm512_setzero_si512(); 4];
    for (v, values) in values.iter_mut().enumerate() {
        let (half, odd) = (v / 2, v % 2);
        *values = match Format256::from_index(F) {
            Format256::Q2K => {
                let by = 4 * odd as i64;
                mask(
                    _mm512_srlv_epi64(twice(16 + 32 * half), shifts(by, by + 2)),
                    3,
                )
            }
            Format256::Q3K => {
                let by = 4 * odd as i64;
                let low = mask(
                    _mm512_srlv_epi64(twice(32 + 32 * half), shifts(by, by + 2)),
                    3,
                );
                _mm512_mask_add_epi8(low, bit(twice(0), v), low, _mm512_set1_epi8(4))
            }
            Format256::Q4K => mask(_mm512_srlv_epi64(twice(16 + 32 * v), shifts(0, 4)), 15),
            Format256::Q5K => {
                let low = mask(_mm512_srlv_epi64(twice(48 + 32 * v), shifts(0, 4)), 15);
                _mm512_mask_add_epi8(low, bit(twice(16), v), low, _mm512_set1_epi8(16))
            }
            Format256::Q6K => {
                let low = whole(64 * half);
                let high = twice(128 + 32 * half);
                let (low, high) = if odd == 0 {
                    (low, _mm512_sllv_epi64(high, shifts(4, 2)))
                } else {
                    (
                        _mm512_srli_epi16::<4>(low),
                        _mm512_srlv_epi64(high, shifts(0, 2)),
                    )
                };
                _mm512_or_si512(mask(low, 15), mask(high, 0x30))
            }
        };
    }
    values
}
