//! One row of weights in blocks of 32 times a few tokens, eight blocks at a time.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

use std::arch::x86_64::*;

use super::super::activations::QuantisedRow;
use super::super::blocks::Format32;
use super::super::streaming;
use super::parts::{for_each, sum_of_eight, transpose_add};

/// One row times N tokens.
#[target_feature(enable = "avx2,fma,f16c")]
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
        partial = group32::<F, N, true>(group, 8, first, tokens, partial);
        first += 8;
    }
    let rest = groups.remainder();
    if !rest.is_empty() {
        let count = rest.len() / block_bytes;
        let next = group32::<F, N, false>(rest, count, first, tokens, partial);
        // What blocks that are not there would add is dropped: -0 + 0 would be another number.
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let present = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes);
        for (partial, next) in partial.iter_mut().zip(next) {
            *partial = _mm256_blendv_ps(*partial, next, _mm256_castsi256_ps(present));
        }
    }
    partial.map(|partial| sum_of_eight(partial))
}

/// Adds `count` blocks (eight where `FULL`), the first of which has index `first`, to the partial sums.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn group32<const F: u8, const N: usize, const FULL: bool>(
    group: &[u8],
    count: usize,
    first: usize,
    tokens: &[QuantisedRow<'_>; N],
    mut partial: [__m256; N],
) -> [__m256; N] {
    let format = Format32::from_index(F);
    let block_bytes = format.block_bytes();
    let count = if FULL { 8 } else { count };
    assert_eq!(group.len(), count * block_bytes);
    let start = group.as_ptr();
    streaming::ahead(start, 8 * block_bytes);
    let mut values = [_mm256_setzero_si256(); 8];
    for_each!(0 1 2 3 4 5 6 7, BLOCK => {
        if BLOCK < count {
            // SAFETY: the block is there.
            values[BLOCK] = unsafe { values32::<F>(start.add(BLOCK * block_bytes)) };
        }
    });
    let head = |block: usize| {
        if block < count {
            // SAFETY: the block is there, and starts with the four bytes that are read.
            unsafe {
                start
                    .add(block * block_bytes)
                    .cast::<i32>()
                    .read_unaligned()
            }
        } else {
            0
        }
    };
    // Scale and minimum (or, where there is none, two bytes of quants) of four blocks each.
    let low = _mm256_cvtph_ps(_mm_setr_epi32(head(0), head(1), head(4), head(5)));
    let high = _mm256_cvtph_ps(_mm_setr_epi32(head(2), head(3), head(6), head(7)));
    let scales = _mm256_shuffle_ps::<0b10_00_10_00>(low, high);
    let minimums = _mm256_shuffle_ps::<0b11_01_11_01>(low, high);
    for (n, token) in tokens.iter().enumerate() {
        let quants = token.quants[32 * first..32 * first + 256].as_ptr();
        let mut products = [_mm256_setzero_si256(); 8];
        for_each!(0 1 2 3 4 5 6 7, BLOCK => {
            // SAFETY: the slice holds eight blocks.
            let quants = unsafe { _mm256_loadu_si256(quants.add(32 * BLOCK).cast()) };
            products[BLOCK] = if format == Format32::Q8_0 {
                let magnitudes = _mm256_abs_epi8(values[BLOCK]);
                _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(quants, values[BLOCK]))
            } else {
                _mm256_maddubs_epi16(values[BLOCK], quants)
            };
        });
        let mut sums = sums_of_products::<F>(products);
        let eight = first..first + 8;
        // SAFETY: each slice holds eight values.
        unsafe {
            // Q8_0 values are signed here: the offset is already subtracted.
            let shift = match format {
                Format32::Q4_0 => 3,
                Format32::Q5_0 => 4,
                Format32::Q4_1 | Format32::Q5_1 | Format32::Q8_0 => 0,
            };
            if shift != 0 {
                let x_sums = _mm256_loadu_si256(token.sums32[eight.clone()].as_ptr().cast());
                sums = _mm256_sub_epi32(sums, _mm256_sll_epi32(x_sums, _mm_cvtsi32_si128(shift)));
            }
            let scale = _mm256_mul_ps(
                scales,
                _mm256_loadu_ps(token.scales[eight.clone()].as_ptr()),
            );
            partial[n] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums), partial[n]);
            if format.has_minimum() {
                let x_scaled_sums = _mm256_loadu_ps(token.scaled_sums[eight].as_ptr());
                partial[n] = _mm256_fmadd_ps(minimums, x_scaled_sums, partial[n]);
            }
        }
    }
    partial
}

/// The values of a block of 32: unsigned, but signed for Q8_0.
///
/// # Safety
/// A block lies at the address.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn values32<const F: u8>(block: *const u8) -> __m256i {
    let format = Format32::from_index(F);
    // SAFETY: the block's last 32 (Q8_0) or 16 bytes are its quants, the four before them the fifth bits of Q5.
    unsafe {
        if format == Format32::Q8_0 {
            return _mm256_loadu_si256(block.add(2).cast());
        }
        let start = format.block_bytes() - 16;
        let twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(block.add(start).cast()));
        let shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
        let nibbles = _mm256_and_si256(_mm256_srlv_epi32(twice, shifts), _mm256_set1_epi8(15));
        if !matches!(format, Format32::Q5_0 | Format32::Q5_1) {
            return nibbles;
        }
        let bits = block.add(start - 4).cast::<i32>().read_unaligned();
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

/// 32-bit lane i is the sum of the sixteen 16-bit lanes of vector i: what `maddubs` made of block i of format F.
///
/// Adding goes on in 16 bits as long as that cannot overflow: a sum of two products is at most 2 * 15 * 127 (Q4),
/// 2 * 31 * 127 (Q5) or 2 * 128 * 127 (Q8_0).
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sums_of_products<const F: u8>(v: [__m256i; 8]) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    if let Format32::Q8_0 = Format32::from_index(F) {
        let first = transpose_add([v[0], v[1], v[2], v[3]].map(|v| _mm256_madd_epi16(v, ones)));
        let second = transpose_add([v[4], v[5], v[6], v[7]].map(|v| _mm256_madd_epi16(v, ones)));
        return _mm256_add_epi32(
            _mm256_permute2x128_si256::<0x20>(first, second),
            _mm256_permute2x128_si256::<0x31>(first, second),
        );
    }
    // Halves: [0 | 4], [1 | 5], [2 | 6], [3 | 7]; sums of two.
    let halves = |a, b| {
        _mm256_add_epi16(
            _mm256_permute2x128_si256::<0x20>(a, b),
            _mm256_permute2x128_si256::<0x31>(a, b),
        )
    };
    // Quarters: [0, 1 | 4, 5], [2, 3 | 6, 7]; sums of four.
    let quarters =
        |a, b| _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    let low = quarters(halves(v[0], v[4]), halves(v[1], v[5]));
    let high = quarters(halves(v[2], v[6]), halves(v[3], v[7]));
    let eighths = |low, high| {
        let (low, high) = (_mm256_castsi256_ps(low), _mm256_castsi256_ps(high));
        (
            _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(low, high)),
            _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(low, high)),
        )
    };
    match Format32::from_index(F) {
        Format32::Q4_0 | Format32::Q4_1 => {
            // Eight such products fit: 30480.
            let (even, odd) = eighths(low, high);
            _mm256_madd_epi16(_mm256_add_epi16(even, odd), ones)
        }
        Format32::Q5_0 | Format32::Q5_1 | Format32::Q8_0 => {
            // Four fit: 31496.
            let (even, odd) = eighths(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
            _mm256_add_epi32(even, odd)
        }
    }
}
