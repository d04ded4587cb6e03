//! One row of weights in blocks of 256 times a few tokens, four blocks at a time.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]
#![expect(
    clippy::needless_range_loop,
    reason = "an index keeps several arrays in step"
)]

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::activations::QuantisedRow;
use super::super::blocks::Format256;
use super::super::streaming;
use super::parts::{
    for_each, scales_and_minimums, scales256, sums_of_four, total_of_four, zero_padded,
};

/// One row times N tokens.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) fn row256<const F: u8, const N: usize>(
    row: &[u8],
    tokens: &[QuantisedRow<'_>; N],
) -> [f32; N] {
    let format = Format256::from_index(F);
    let block_bytes = format.block_bytes();
    let blocks = row.len() / block_bytes;
    for token in tokens {
        // What the loops below read, whole groups of four blocks of all but the quants.
        let padded = blocks.next_multiple_of(4);
        assert!(token.quants.len() >= 256 * blocks && token.scales.len() >= padded);
        assert!(token.sums16.len() >= 16 * padded && token.sums_of_32.len() >= 8 * padded);
    }
    let mut partial = [_mm_setzero_ps(); N];
    for (index, group) in row.chunks(4 * block_bytes).enumerate() {
        let first = 4 * index;
        let count = group.len() / block_bytes;
        let padded;
        let start = if count == 4 {
            group.as_ptr()
        } else {
            padded = zero_padded::<{ 4 * Format256::BLOCK_BYTES_MAX }>(group);
            padded.as_ptr()
        };
        // SAFETY: four blocks lie at `start`; the tokens were checked above.
        let sums = unsafe {
            match format {
                Format256::Q4K | Format256::Q5K => {
                    four_blocks_of_32s::<F, N>(start, group.as_ptr(), count, tokens, first)
                }
                Format256::Q2K | Format256::Q3K | Format256::Q6K => {
                    four_blocks_of_16s::<F, N>(start, group.as_ptr(), count, tokens, first)
                }
            }
        };
        for (n, token) in tokens.iter().enumerate() {
            // SAFETY: four scales from `first` were checked above.
            let x_scales = unsafe { _mm_loadu_ps(token.scales.as_ptr().add(first)) };
            let total = _mm_cvtepi32_ps(sums.products[n]);
            let mut next = _mm_fmadd_ps(_mm_mul_ps(sums.scales, x_scales), total, partial[n]);
            if format.has_minimum() {
                let total = _mm_cvtepi32_ps(sums.minimum_products[n]);
                next = _mm_fnmadd_ps(_mm_mul_ps(sums.minimums, x_scales), total, next);
            }
            partial[n] = if count == 4 {
                next
            } else {
                // What blocks that are not there would add is dropped: -0 + 0 would be another number.
                let lanes = _mm_setr_epi32(0, 1, 2, 3);
                let present = _mm_cmpgt_epi32(_mm_set1_epi32(count as i32), lanes);
                _mm_blendv_ps(partial[n], next, _mm_castsi128_ps(present))
            };
        }
    }
    partial.map(|partial| total_of_four(partial))
}

/// Of four blocks of 256, one in each lane: their scales and minimums, and for each token the sums that these multiply.
struct FourBlocks<const N: usize> {
    scales: __m128,
    minimums: __m128,
    products: [__m128i; N],
    minimum_products: [__m128i; N],
}

/// Four blocks with sub-blocks of 32 (Q4_K, Q5_K).
///
/// What comes after the group is asked for relative to `ahead`, where the group lies in its row.
///
/// # Safety
/// Four blocks lie at `start`, `count` of them with quants in every token from block `first` on; the tokens have the
/// sums of all four.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn four_blocks_of_32s<const F: u8, const N: usize>(
    start: *const u8,
    ahead: *const u8,
    count: usize,
    tokens: &[QuantisedRow<'_>; N],
    first: usize,
) -> FourBlocks<N> {
    let format = Format256::from_index(F);
    let block_bytes = format.block_bytes();
    let (a, b, c, zero) = (0x0706_0504, 0x0b0a_0908, 0x0f0e_0d0c, -1);
    let twice = |v: [i32; 4]| _mm256_setr_epi32(v[0], v[1], v[2], v[3], v[0], v[1], v[2], v[3]);
    let mut heads = [_mm256_setzero_si256(); 2];
    let mut minimums = [_mm256_setzero_si256(); 2];
    // 32-bit lanes with a scale in each half, for a load that broadcasts: sub-blocks 0 to 3 of two blocks, then 4 to 7.
    let mut scales = [[0i32; 16]; 2];
    for pair in 0..2 {
        // SAFETY: a block starts with its f16 scale and minimum and 12 bytes of packed integers.
        unsafe {
            let head = |i: usize| _mm_loadu_si128(start.add(i * block_bytes).cast());
            heads[pair] = _mm256_set_m128i(head(2 * pair + 1), head(2 * pair));
        }
        // Six bits of each of 8 scales and 8 minimums: the packing is `get_scale_min_k4` of ggml-quants.c.
        let low = _mm256_shuffle_epi8(heads[pair], twice([a, c, b, c]));
        let low = _mm256_srlv_epi32(low, twice([0, 0, 0, 4]));
        let low = _mm256_and_si256(
            low,
            twice([0x3f3f_3f3f, 0x0f0f_0f0f, 0x3f3f_3f3f, 0x0f0f_0f0f]),
        );
        let high = _mm256_shuffle_epi8(heads[pair], twice([zero, a, zero, b]));
        let high = _mm256_and_si256(_mm256_srli_epi32::<2>(high), _mm256_set1_epi8(0x30));
        let bytes = _mm256_or_si256(low, high);
        minimums[pair] = _mm256_unpackhi_epi8(bytes, _mm256_setzero_si256());
        let words = _mm256_unpacklo_epi8(bytes, _mm256_setzero_si256());
        let to = scales[pair].as_mut_ptr();
        // SAFETY: the array holds 64 bytes.
        unsafe {
            _mm256_storeu_si256(to.cast(), _mm256_unpacklo_epi16(words, words));
            _mm256_storeu_si256(to.add(8).cast(), _mm256_unpackhi_epi16(words, words));
        }
    }
    let mut sums = [[_mm256_setzero_si256(); 4]; N];
    for_each!(0 1 2 3, I => {
        if I < count {
        let scales = scales[I / 2][4 * (I % 2)..].as_ptr();
        // SAFETY: as the caller promises; `scales` is followed by 12 values.
        unsafe {
            let block = start.add(I * block_bytes);
            streaming::ahead_of_block::<I, 4>(ahead, block_bytes);
            let quants = |n: usize, at: usize| {
                let at = 256 * (first + I) + at;
                _mm256_loadu_si256(tokens[n].quants.as_ptr().add(at).cast())
            };
            let fifth_bits = _mm256_loadu_si256(block.add(16).cast());
            for_each!(0 1 2 3, QUARTER => {
                let at = if format == Format256::Q4K { 16 } else { 48 } + 32 * QUARTER;
                let nibbles = _mm256_loadu_si256(block.add(at).cast());
                let mut low = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
                let mut high = _mm256_and_si256(_mm256_srli_epi16::<4>(nibbles), _mm256_set1_epi8(15));
                if format == Format256::Q5K {
                    low = _mm256_or_si256(low, bit_to_place::<{ 2 * QUARTER }, 4>(fifth_bits));
                    high = _mm256_or_si256(high, bit_to_place::<{ 2 * QUARTER + 1 }, 4>(fifth_bits));
                }
                let scale = |v: usize| broadcast(scales.add(8 * (v / 4) + v % 4));
                let (low_scale, high_scale) = (scale(2 * QUARTER), scale(2 * QUARTER + 1));
                for n in 0..N {
                    let low = _mm256_maddubs_epi16(low, quants(n, 64 * QUARTER));
                    let high = _mm256_maddubs_epi16(high, quants(n, 64 * QUARTER + 32));
                    let low = _mm256_madd_epi16(low, low_scale);
                    let high = _mm256_madd_epi16(high, high_scale);
                    sums[n][I] = _mm256_add_epi32(sums[n][I], _mm256_add_epi32(low, high));
                }
            });
        }
        }
    });
    let mut result = FourBlocks {
        scales: _mm_setzero_ps(),
        minimums: _mm_setzero_ps(),
        products: [_mm_setzero_si128(); N],
        minimum_products: [_mm_setzero_si128(); N],
    };
    // The first 32 bits of each block.
    let heads = _mm256_unpacklo_epi32(heads[0], heads[1]);
    let heads = _mm_unpacklo_epi32(
        _mm256_castsi256_si128(heads),
        _mm256_extracti128_si256::<1>(heads),
    );
    (result.scales, result.minimums) = scales_and_minimums(heads);
    for n in 0..N {
        result.products[n] = sums_of_four(sums[n]);
        let x_sums = tokens[n].sums_of_32[8 * first..8 * first + 32].as_ptr();
        // SAFETY: the slice holds 64 bytes.
        let x_sums = unsafe {
            [
                _mm256_loadu_si256(x_sums.cast()),
                _mm256_loadu_si256(x_sums.add(16).cast()),
            ]
        };
        // [0 | 1] and [2 | 3], then [0, 2 | 1, 3].
        let even = _mm256_madd_epi16(minimums[0], x_sums[0]);
        let odd = _mm256_madd_epi16(minimums[1], x_sums[1]);
        let pairs = _mm256_add_epi32(
            _mm256_unpacklo_epi32(even, odd),
            _mm256_unpackhi_epi32(even, odd),
        );
        let sums = _mm256_add_epi32(pairs, _mm256_shuffle_epi32::<0b01_00_11_10>(pairs));
        result.minimum_products[n] = _mm_unpacklo_epi32(
            _mm256_castsi256_si128(sums),
            _mm256_extracti128_si256::<1>(sums),
        );
    }
    result
}

/// The value at the address in every lane.
///
/// In assembly because the compiler sees what was stored there and makes two shuffles across lanes of it; a load that
/// broadcasts costs less than one.
///
/// # Safety
/// A value lies at the address.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn broadcast(value: *const i32) -> __m256i {
    let lanes;
    // SAFETY: the instruction reads the four bytes that the caller vouches for.
    unsafe {
        asm!(
            "vpbroadcastd {lanes}, dword ptr [{value}]",
            lanes = lateout(ymm_reg) lanes,
            value = in(reg) value,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    lanes
}

/// Bit `FROM` of every byte, moved to bit `TO`; the others zero.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn bit_to_place<const FROM: usize, const TO: usize>(bytes: __m256i) -> __m256i {
    let moved = if FROM <= TO {
        _mm256_sll_epi16(bytes, _mm_cvtsi32_si128((TO - FROM.min(TO)) as i32))
    } else {
        _mm256_srl_epi16(bytes, _mm_cvtsi32_si128((FROM - TO.min(FROM)) as i32))
    };
    _mm256_and_si256(moved, _mm256_set1_epi8(1 << TO))
}

/// Four blocks with sub-blocks of 16 (Q2_K, Q3_K, Q6_K).
///
/// # Safety
/// As for `four_blocks_of_32s`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn four_blocks_of_16s<const F: u8, const N: usize>(
    start: *const u8,
    ahead: *const u8,
    count: usize,
    tokens: &[QuantisedRow<'_>; N],
    first: usize,
) -> FourBlocks<N> {
    let format = Format256::from_index(F);
    let block_bytes = format.block_bytes();
    let mut sums = [[_mm256_setzero_si256(); 4]; N];
    let mut minimum_sums = [[_mm256_setzero_si256(); 4]; N];
    for_each!(0 1 2 3, I => {
        if I < count {
        // SAFETY: as the caller promises.
        unsafe {
            let block = start.add(I * block_bytes);
            streaming::ahead_of_block::<I, 4>(ahead, block_bytes);
            let bytes = std::slice::from_raw_parts(block, block_bytes);
            let (scales, minimums) = scales256::<F>(bytes);
            let quants = |n: usize, at: usize| {
                let at = 256 * (first + I) + at;
                _mm256_loadu_si256(tokens[n].quants.as_ptr().add(at).cast())
            };
            let mut block_sums = [_mm256_setzero_si256(); N];
            for n in 0..N {
                let x_sums = tokens[n].sums16.as_ptr().add(16 * (first + I));
                let x_sums = _mm256_loadu_si256(x_sums.cast());
                match format {
                    Format256::Q3K => {
                        let scaled = _mm256_slli_epi32::<2>(_mm256_madd_epi16(scales, x_sums));
                        block_sums[n] = _mm256_sub_epi32(block_sums[n], scaled);
                    }
                    Format256::Q6K => {
                        let scaled = _mm256_slli_epi32::<5>(_mm256_madd_epi16(scales, x_sums));
                        block_sums[n] = _mm256_sub_epi32(block_sums[n], scaled);
                    }
                    Format256::Q2K | Format256::Q4K | Format256::Q5K => {
                        minimum_sums[n][I] = _mm256_madd_epi16(minimums, x_sums);
                    }
                }
            }
            let halves = [
                _mm256_permute2x128_si256::<0x00>(scales, scales),
                _mm256_permute2x128_si256::<0x11>(scales, scales),
            ];
            for_each!(0 1 2 3 4 5 6 7, V => {
                let values = values_of_16s::<F, V>(block);
                // 16-bit lane 2 V for the lower half, 2 V + 1 for the upper.
                let lower = 0x0100 + 0x0202 * (2 * (V % 4)) as i16;
                let order = _mm256_set_m128i(_mm_set1_epi16(lower + 0x0202), _mm_set1_epi16(lower));
                let scales = _mm256_shuffle_epi8(halves[V / 4], order);
                for n in 0..N {
                    let products = _mm256_maddubs_epi16(values, quants(n, 32 * V));
                    let products = _mm256_madd_epi16(products, scales);
                    block_sums[n] = _mm256_add_epi32(block_sums[n], products);
                }
            });
            for n in 0..N {
                sums[n][I] = block_sums[n];
            }
        }
        }
    });
    let mut result = FourBlocks {
        scales: _mm_setzero_ps(),
        minimums: _mm_setzero_ps(),
        products: [_mm_setzero_si128(); N],
        minimum_products: [_mm_setzero_si128(); N],
    };
    // SAFETY: the last two (Q3_K, Q6_K) or four bytes of a block are its f16 scale and minimum.
    let heads = unsafe {
        let at = |i: usize| start.add((i + 1) * block_bytes);
        if format == Format256::Q2K {
            let head = |i: usize| at(i).sub(4).cast::<i32>().read_unaligned();
            _mm_setr_epi32(head(0), head(1), head(2), head(3))
        } else {
            let head = |i: usize| i32::from(at(i).sub(2).cast::<u16>().read_unaligned());
            _mm_setr_epi32(head(0), head(1), head(2), head(3))
        }
    };
    (result.scales, result.minimums) = scales_and_minimums(heads);
    for n in 0..N {
        result.products[n] = sums_of_four(sums[n]);
        if format.has_minimum() {
            result.minimum_products[n] = sums_of_four(minimum_sums[n]);
        }
    }
    result
}

/// Values 32 V to 32 V + 31 of a block with sub-blocks of 16.
///
/// # Safety
/// A block lies at the address.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn values_of_16s<const F: u8, const V: usize>(block: *const u8) -> __m256i {
    // SAFETY: all that is loaded lies inside the block.
    let load = |at: usize| unsafe { _mm256_loadu_si256(block.add(at).cast()) };
    let left = |bytes, by: usize| _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(by as i32));
    let right = |bytes, by: usize| _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(by as i32));
    let mask = |bytes, mask: i8| _mm256_and_si256(bytes, _mm256_set1_epi8(mask));
    match Format256::from_index(F) {
        Format256::Q2K => mask(right(load(16 + 32 * (V / 4)), 2 * (V % 4)), 3),
        Format256::Q3K => {
            let low = mask(right(load(32 + 32 * (V / 4)), 2 * (V % 4)), 3);
            _mm256_or_si256(low, bit_to_place::<V, 2>(load(0)))
        }
        Format256::Q6K => {
            let (half, quarter) = (V / 4, V % 4);
            let low = load(64 * half + 32 * (quarter % 2));
            let low = mask(right(low, 4 * (quarter / 2)), 15);
            let high = load(128 + 32 * half);
            let high = match quarter {
                0 => left(high, 4),
                1 => left(high, 2),
                2 => high,
                _ => right(high, 2),
            };
            _mm256_or_si256(low, mask(high, 0x30))
        }
        Format256::Q4K | Format256::Q5K => unreachable!("sub-blocks of 32"),
    }
}
