//! What the loops over rows are made of: scales of blocks, sums across lanes. Those of AVX-512 use it too.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

use std::arch::x86_64::*;

use super::super::blocks::Format256;

/// The body once for each index, known to the compiler: shifts and offsets become constants.
macro_rules! for_each {
    ($($value:literal)*, $index:ident => $body:block) => {
        $({
            const $index: usize = $value;
            $body
        })*
    };
}
pub(in crate::kernels) use for_each;

/// The 16 scales and the 16 minimums of a block of 256.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::kernels) fn scales256<const F: u8>(block: &[u8]) -> (__m256i, __m256i) {
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
            // Four bits of scales 0 to 7 in the lower nibbles of 8 bytes, of 8 to 15 in the upper; then two bits each.
            let low = load(96 - 8);
            let low = _mm_srlv_epi32(_mm_unpackhi_epi64(low, low), _mm_setr_epi32(0, 0, 4, 4));
            let high = _mm_srlv_epi32(_mm_set1_epi32(word(104) as i32), _mm_setr_epi32(0, 2, 4, 6));
            let high = _mm_slli_epi32::<4>(_mm_and_si128(high, _mm_set1_epi8(3)));
            let scales = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)), high);
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

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::kernels) fn halves_to_floats(halves: &[u16; 8]) -> __m256 {
    // SAFETY: the array holds 16 bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().cast())) }
}

/// Four f16 pairs of scale (low) and minimum as floats.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::kernels) fn scales_and_minimums(heads: __m128i) -> (__m128, __m128) {
    let floats = _mm256_cvtph_ps(heads);
    let (low, high) = (
        _mm256_castps256_ps128(floats),
        _mm256_extractf128_ps::<1>(floats),
    );
    (
        _mm_shuffle_ps::<0b10_00_10_00>(low, high),
        _mm_shuffle_ps::<0b11_01_11_01>(low, high),
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
pub(super) fn transpose_add(v: [__m256i; 4]) -> __m256i {
    let pair = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (a, b) = (pair(v[0], v[1]), pair(v[2], v[3]));
    _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
}

/// The eight partial sums in their fixed order.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(in crate::kernels) fn sum_of_eight(partial: __m256) -> f32 {
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

/// The last blocks of a row, with zeros behind them.
#[cold]
pub(in crate::kernels) fn zero_padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut padded = [0; N];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}
