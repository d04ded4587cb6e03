//! Products with quantised weights on AVX2 (with FMA and F16C). One row at a time, walked in order; up to four tokens
//! share the unpacking of a block. The order of the arithmetic is the parent module's.
//!
//! Inside a block, unsigned values times signed quants go through `maddubs`: pairs of at most 63 * 127 * 2 fit 16 bits.
//! Q8_0 values are too large for that, so their magnitudes are multiplied with quants of their sign.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

use std::arch::x86_64::*;

use super::activations::{Activations, QuantisedRow};
use super::avx2_wide;
use super::blocks::{Format32, Format256};
use super::matmul::{MatrixView, Output};

/// Rows of weights in blocks of 32 times all tokens.
pub(super) fn rows_of_blocks32(
    format: Format32,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    // SAFETY: a pool has this instruction set only where the machine can run it.
    unsafe {
        match format {
            Format32::Q4_0 => rows32::<{ Format32::Q4_0 as u8 }>(weight, x, out),
            Format32::Q4_1 => rows32::<{ Format32::Q4_1 as u8 }>(weight, x, out),
            Format32::Q5_0 => rows32::<{ Format32::Q5_0 as u8 }>(weight, x, out),
            Format32::Q5_1 => rows32::<{ Format32::Q5_1 as u8 }>(weight, x, out),
            Format32::Q8_0 => rows32::<{ Format32::Q8_0 as u8 }>(weight, x, out),
        }
    }
}

/// Rows of weights in blocks of 256 times all tokens.
pub(super) fn rows_of_blocks256(
    format: Format256,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    // SAFETY: a pool has this instruction set only where the machine can run it.
    unsafe {
        match format {
            Format256::Q2K => rows256::<{ Format256::Q2K as u8 }>(weight, x, out),
            Format256::Q3K => rows256::<{ Format256::Q3K as u8 }>(weight, x, out),
            Format256::Q4K => rows256::<{ Format256::Q4K as u8 }>(weight, x, out),
            Format256::Q5K => rows256::<{ Format256::Q5K as u8 }>(weight, x, out),
            Format256::Q6K => rows256::<{ Format256::Q6K as u8 }>(weight, x, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn rows32<const F: u8>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    let done = avx2_wide::rows32::<F>(weight, x, out);
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

#[target_feature(enable = "avx2,fma,f16c")]
fn rows256<const F: u8>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    let done = avx2_wide::rows256::<F>(weight, x, out);
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
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tokens32<const F: u8, const N: usize>(
    row: &[u8],
    x: &Activations<'_>,
    out: Output,
    r: usize,
    t: usize,
) {
    let format = Format32::from_index(F);
    let block_bytes = format.block_bytes();
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
#[target_feature(enable = "avx2,fma,f16c")]
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
    let mut values = [_mm256_setzero_si256(); 8];
    let mut scales = [0u16; 8];
    let mut minimums = [0u16; 8];
    prefetch(group.as_ptr(), 8 * block_bytes);
    for (i, block) in group.chunks_exact(block_bytes).enumerate() {
        scales[i] = u16::from_le_bytes([block[0], block[1]]);
        minimums[i] = u16::from_le_bytes([block[2], block[3]]);
        values[i] = values32::<F>(block);
    }
    let scales = halves_to_floats(&scales);
    let minimums = halves_to_floats(&minimums);
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let present = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes);
    for (token, partial) in tokens.iter().zip(partial) {
        let quants = token.quants[32 * first..32 * first + 256].as_ptr();
        let mut products = [_mm256_setzero_si256(); 8];
        for (i, product) in products.iter_mut().enumerate() {
            // SAFETY: the slice above holds eight blocks.
            let quants = unsafe { _mm256_loadu_si256(quants.add(32 * i).cast()) };
            let pairs = if format == Format32::Q8_0 {
                let signed = _mm256_sign_epi8(quants, values[i]);
                _mm256_maddubs_epi16(_mm256_abs_epi8(values[i]), signed)
            } else {
                _mm256_maddubs_epi16(values[i], quants)
            };
            *product = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
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
        // Q8_0 values are signed here: the offset is already subtracted.
        if format.offset() != 0 && format != Format32::Q8_0 {
            let offset = _mm256_set1_epi32(format.offset());
            sums = _mm256_sub_epi32(sums, _mm256_mullo_epi32(x_sums, offset));
        }
        let scale = _mm256_mul_ps(scales, x_scales);
        let mut next = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums), *partial);
        if format.has_minimum() {
            next = _mm256_fmadd_ps(minimums, x_scaled_sums, next);
        }
        *partial = if count == 8 {
            next
        } else {
            _mm256_blendv_ps(*partial, next, _mm256_castsi256_ps(present))
        };
    }
}

/// The values of a block of 32: unsigned, but signed for Q8_0.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn values32<const F: u8>(block: &[u8]) -> __m256i {
    let format = Format32::from_index(F);
    let start = format.block_bytes() - if format == Format32::Q8_0 { 32 } else { 16 };
    let quants = block[start..].as_ptr();
    // SAFETY: the block's last 32 (Q8_0) or 16 bytes are its quants.
    unsafe {
        if format == Format32::Q8_0 {
            return _mm256_loadu_si256(quants.cast());
        }
        let bytes = _mm_loadu_si128(quants.cast());
        let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
        let nibbles = _mm256_and_si256(both, _mm256_set1_epi8(15));
        if !matches!(format, Format32::Q5_0 | Format32::Q5_1) {
            return nibbles;
        }
        let at = start - 4;
        let bits = i32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
        // Byte i gets the byte of `bits` that has bit i, then is compared with that bit set.
        let spread = _mm256_shuffle_epi8(
            _mm256_set1_epi32(bits),
            _mm256_setr_epi64x(
                0,
                0x0101_0101_0101_0101,
                0x0202_0202_0202_0202,
                0x0303_0303_0303_0303,
            ),
        );
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        _mm256_or_si256(nibbles, _mm256_and_si256(is_set, _mm256_set1_epi8(16)))
    }
}

/// One row times N tokens from `t`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tokens256<const F: u8, const N: usize>(
    row: &[u8],
    x: &Activations<'_>,
    out: Output,
    r: usize,
    t: usize,
) {
    let format = Format256::from_index(F);
    let block_bytes = format.block_bytes();
    let mut tokens = [x.blocks256().row(t); N];
    for (n, token) in tokens.iter_mut().enumerate().skip(1) {
        *token = x.blocks256().row(t + n);
    }
    let mut partial = [_mm_setzero_ps(); N];
    for (index, group) in row.chunks(4 * block_bytes).enumerate() {
        let first = 4 * index;
        let mut sums = [[_mm256_setzero_si256(); 4]; N];
        let mut minimum_sums = [[_mm256_setzero_si256(); 4]; N];
        let mut heads = [[0u16; 2]; 4];
        prefetch(group.as_ptr(), 4 * block_bytes);
        for (i, block) in group.chunks_exact(block_bytes).enumerate() {
            heads[i] = heads256::<F>(block);
            let (scales, minimums) = scales256::<F>(block);
            for (n, token) in tokens.iter().enumerate() {
                let sums16 = token.sums16[16 * (first + i)..16 * (first + i) + 16].as_ptr();
                // SAFETY: the slice holds 16 values.
                let sums16 = unsafe { _mm256_loadu_si256(sums16.cast()) };
                if format.has_minimum() {
                    minimum_sums[n][i] = _mm256_madd_epi16(minimums, sums16);
                } else {
                    let offset = _mm256_set1_epi32(-format.offset());
                    let scaled = _mm256_madd_epi16(scales, sums16);
                    sums[n][i] = _mm256_mullo_epi32(scaled, offset);
                }
            }
            for v in 0..8 {
                let values = values256::<F>(block, v);
                let scales = broadcast_pair(scales, v);
                for (n, token) in tokens.iter().enumerate() {
                    let at = 256 * (first + i) + 32 * v;
                    let quants = token.quants[at..at + 32].as_ptr();
                    // SAFETY: the slice holds 32 bytes.
                    let quants = unsafe { _mm256_loadu_si256(quants.cast()) };
                    let pairs = _mm256_maddubs_epi16(values, quants);
                    let products = _mm256_madd_epi16(pairs, scales);
                    sums[n][i] = _mm256_add_epi32(sums[n][i], products);
                }
            }
        }
        let count = group.len() / block_bytes;
        let (scales, minimums) = heads_to_floats(heads);
        for (n, token) in tokens.iter().enumerate() {
            let x_scales = token.scales[first..first + 4].as_ptr();
            // SAFETY: the slice holds four values.
            let x_scales = unsafe { _mm_loadu_ps(x_scales) };
            let sums = _mm_cvtepi32_ps(sums_of_four(sums[n]));
            let mut next = _mm_fmadd_ps(_mm_mul_ps(scales, x_scales), sums, partial[n]);
            if format.has_minimum() {
                let sums = _mm_cvtepi32_ps(sums_of_four(minimum_sums[n]));
                next = _mm_fnmadd_ps(_mm_mul_ps(minimums, x_scales), sums, next);
            }
            let lanes = _mm_setr_epi32(0, 1, 2, 3);
            let present = _mm_cmpgt_epi32(_mm_set1_epi32(count as i32), lanes);
            partial[n] = _mm_blendv_ps(partial[n], next, _mm_castsi128_ps(present));
        }
    }
    for (n, partial) in partial.into_iter().enumerate() {
        // SAFETY: r and t + n are in range.
        unsafe { out.set(t + n, r, total_of_four(partial)) };
    }
}

/// Values 32 v to 32 v + 31 of a block of 256.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn values256<const F: u8>(block: &[u8], v: usize) -> __m256i {
    let load = |at: usize| {
        let bytes = block[at..at + 32].as_ptr();
        // SAFETY: the slice holds 32 bytes.
        unsafe { _mm256_loadu_si256(bytes.cast()) }
    };
    let shift = |bytes, by: usize| _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(by as i32));
    let mask = |bytes, mask: i8| _mm256_and_si256(bytes, _mm256_set1_epi8(mask));
    match Format256::from_index(F) {
        Format256::Q2K => mask(shift(load(16 + 32 * (v / 4)), 2 * (v % 4)), 3),
        Format256::Q3K => {
            let low = mask(shift(load(32 + 32 * (v / 4)), 2 * (v % 4)), 3);
            let high = mask(shift(load(0), v), 1);
            _mm256_or_si256(low, _mm256_slli_epi16::<2>(high))
        }
        Format256::Q4K => mask(shift(load(16 + 32 * (v / 2)), 4 * (v % 2)), 15),
        Format256::Q5K => {
            let low = mask(shift(load(48 + 32 * (v / 2)), 4 * (v % 2)), 15);
            let high = mask(shift(load(16), v), 1);
            _mm256_or_si256(low, _mm256_slli_epi16::<4>(high))
        }
        Format256::Q6K => {
            let (half, quarter) = (v / 4, v % 4);
            let low = load(64 * half + 32 * (quarter % 2));
            let low = mask(shift(low, 4 * (quarter / 2)), 15);
            let high = mask(shift(load(128 + 32 * half), 2 * quarter), 3);
            _mm256_or_si256(low, _mm256_slli_epi16::<4>(high))
        }
    }
}

/// The 16 scales and the 16 minimums of a block of 256.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn scales256<const F: u8>(block: &[u8]) -> (__m256i, __m256i) {
    let zero = _mm256_setzero_si256();
    let load = |at: usize| {
        let bytes = block[at..at + 16].as_ptr();
        // SAFETY: the slice holds 16 bytes.
        unsafe { _mm_loadu_si128(bytes.cast()) }
    };
    let word =
        |at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    match Format256::from_index(F) {
        Format256::Q2K => {
            let bytes = load(0);
            let mask = _mm_set1_epi8(15);
            (
                _mm256_cvtepu8_epi16(_mm_and_si128(bytes, mask)),
                _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(bytes), mask)),
            )
        }
        Format256::Q3K => {
            let (a, b, c) = (word(96), word(100), word(104));
            let (low, high) = (0x0f0f_0f0f, 0x0303_0303);
            let scales = _mm_setr_epi32(
                ((a & low) | ((c & high) << 4)) as i32,
                ((b & low) | (((c >> 2) & high) << 4)) as i32,
                (((a >> 4) & low) | (((c >> 4) & high) << 4)) as i32,
                (((b >> 4) & low) | (((c >> 6) & high) << 4)) as i32,
            );
            let scales = _mm_sub_epi8(scales, _mm_set1_epi8(32));
            (_mm256_cvtepi8_epi16(scales), zero)
        }
        Format256::Q4K | Format256::Q5K => {
            let (a, b, c) = (word(4), word(8), word(12));
            let (six, four, two) = (0x3f3f_3f3f, 0x0f0f_0f0f, 0x0303_0303);
            let both = _mm_setr_epi32(
                (a & six) as i32,
                ((c & four) | (((a >> 6) & two) << 4)) as i32,
                (b & six) as i32,
                (((c >> 4) & four) | (((b >> 6) & two) << 4)) as i32,
            );
            // Each sub-block of 32 counts as two of 16.
            (
                _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(both, both)),
                _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(both, both)),
            )
        }
        Format256::Q6K => (_mm256_cvtepi8_epi16(load(192)), zero),
    }
}

/// The f16 scale and minimum of a block of 256.
#[inline(always)]
pub(super) fn heads256<const F: u8>(block: &[u8]) -> [u16; 2] {
    let half = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    match Format256::from_index(F) {
        Format256::Q2K => [half(80), half(82)],
        Format256::Q3K => [half(108), 0],
        Format256::Q4K | Format256::Q5K => [half(0), half(2)],
        Format256::Q6K => [half(208), 0],
    }
}

/// The scales and the minimums of four blocks, from their f16.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn heads_to_floats(heads: [[u16; 2]; 4]) -> (__m128, __m128) {
    let halves: [u16; 8] = std::array::from_fn(|i| heads[i % 4][i / 4]);
    let floats = halves_to_floats(&halves);
    (
        _mm256_castps256_ps128(floats),
        _mm256_extractf128_ps::<1>(floats),
    )
}

/// 16-bit lane 2 v of `scales` in the lower eight lanes, lane 2 v + 1 in the upper eight.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn broadcast_pair(scales: __m256i, v: usize) -> __m256i {
    let half = if v < 4 {
        _mm256_permute2x128_si256::<0x00>(scales, scales)
    } else {
        _mm256_permute2x128_si256::<0x11>(scales, scales)
    };
    let bytes = (
        0x0100 + 0x0202 * (2 * (v % 4)) as i16,
        0x0100 + 0x0202 * (2 * (v % 4) + 1) as i16,
    );
    let lower = _mm_set1_epi16(bytes.0);
    let upper = _mm_set1_epi16(bytes.1);
    _mm256_shuffle_epi8(half, _mm256_set_m128i(upper, lower))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn halves_to_floats(halves: &[u16; 8]) -> __m256 {
    // SAFETY: the array holds 16 bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().cast())) }
}

/// Lane i is the sum of vector i.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sums_of_eight(v: [__m256i; 8]) -> __m256i {
    let first = transpose_add([v[0], v[1], v[2], v[3]]);
    let second = transpose_add([v[4], v[5], v[6], v[7]]);
    _mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(first, second),
        _mm256_permute2x128_si256::<0x31>(first, second),
    )
}

/// Lane i is the sum of vector i.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn sums_of_four(v: [__m256i; 4]) -> __m128i {
    let both = transpose_add(v);
    _mm_add_epi32(
        _mm256_castsi256_si128(both),
        _mm256_extracti128_si256::<1>(both),
    )
}

/// Lane i of each half is the sum of that half of vector i.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn transpose_add(v: [__m256i; 4]) -> __m256i {
    let pair = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (a, b) = (pair(v[0], v[1]), pair(v[2], v[3]));
    _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
}

/// The eight partial sums in their fixed order.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn sum_of_eight(partial: __m256) -> f32 {
    let four = _mm_add_ps(
        _mm256_castps256_ps128(partial),
        _mm256_extractf128_ps::<1>(partial),
    );
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
}

/// The four partial sums in their fixed order.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn total_of_four(partial: __m128) -> f32 {
    let two = _mm_add_ps(partial, _mm_shuffle_ps::<0b10_11_00_01>(partial, partial));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehl_ps(two, two)))
}

/// Asks for the memory ahead of the next `bytes` bytes: soon needed to the first-level cache, later needed to the
/// second. Weights are walked in order, but the processor's own prefetcher stops at each 4 KiB page.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn prefetch(at: *const u8, bytes: usize) {
    const NEAR: usize = 1536;
    const FAR: usize = 16 << 10;
    for line in (0..bytes).step_by(64) {
        // Prefetching an address that is not mapped does nothing, so the end of the weights needs no care.
        _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(NEAR + line).cast());
        _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(FAR + line).cast());
    }
}
