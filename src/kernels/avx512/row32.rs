//! One row of weights in blocks of 32 times a few tokens, eight blocks at a time.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

use std::arch::x86_64::*;

use super::super::activations::QuantisedRow;
use super::super::avx2::sum_of_eight;
use super::super::blocks::Format32;
use super::super::streaming;

/// One row times N tokens.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
pub(super) fn row32<const F: u8, const N: usize>(
    row: &[u8],
    tokens: &[QuantisedRow<'_>; N],
) -> [f32; N] {
    let block_bytes = Format32::from_index(F).block_bytes();
    let mut partial = [_mm256_setzero_ps(); N];
    let mut groups = row.chunks_exact(8 * block_bytes);
    let mut first = 0;
    for group in &mut groups {
        group32::<F, N, true>(group, 8, first, tokens, &mut partial);
        first += 8;
    }
    let rest = groups.remainder();
    if !rest.is_empty() {
        group32::<F, N, false>(rest, rest.len() / block_bytes, first, tokens, &mut partial);
    }
    partial.map(|partial| sum_of_eight(partial))
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
    streaming::ahead(group.as_ptr(), 8 * block_bytes);
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
pub(in crate::kernels) fn values_of_two<const F: u8>(blocks: &[u8], count: usize) -> __m512i {
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
