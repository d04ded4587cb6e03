//! One row of weights in blocks of 256 times a few tokens, four blocks at a time.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

use std::arch::x86_64::*;

use super::super::activations::QuantisedRow;
use super::super::avx2::{for_each, scales_and_minimums, scales256, zero_padded};
use super::super::blocks::Format256;
use super::super::streaming;
use super::parts::{multiply_add_pairs, totals, values256};

/// Tokens that share the unpacking of a row: their sums of four blocks fill one vector.
const TOKENS_MAX: usize = 4;

/// One row times N tokens, at most `TOKENS_MAX`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
pub(super) fn row256<const F: u8, const N: usize>(
    row: &[u8],
    tokens: &[QuantisedRow<'_>; N],
) -> [f32; N] {
    const { assert!(N <= TOKENS_MAX) };
    let format = Format256::from_index(F);
    let block_bytes = format.block_bytes();
    let blocks = row.len() / block_bytes;
    for token in tokens {
        // What the loops below read, whole groups of four blocks of all but the quants.
        let padded = blocks.next_multiple_of(4);
        assert!(token.quants.len() >= 256 * blocks && token.scales.len() >= padded);
        assert!(token.sums16.len() >= 16 * padded && token.sums_of_32.len() >= 8 * padded);
    }
    // Lane 4 n + b: token n, blocks b, b + 4, b + 8, ...
    let mut partial = _mm512_setzero_ps();
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
        // What blocks that are not there would add is dropped: -0 + 0 would be another number.
        let present = ((1u16 << count) - 1) * 0x1111;
        let mut x_scales = [_mm_setzero_ps(); TOKENS_MAX];
        for n in 0..N {
            // SAFETY: four scales from `first` were checked above.
            x_scales[n] = unsafe { _mm_loadu_ps(tokens[n].scales.as_ptr().add(first)) };
        }
        let x_scales = side_by_side(x_scales);
        let scale = _mm512_mul_ps(_mm512_broadcast_f32x4(sums.scales), x_scales);
        let products = _mm512_cvtepi32_ps(sums.products);
        partial = _mm512_mask3_fmadd_ps(scale, products, partial, present);
        if format.has_minimum() {
            let scale = _mm512_mul_ps(_mm512_broadcast_f32x4(sums.minimums), x_scales);
            let products = _mm512_cvtepi32_ps(sums.minimum_products);
            partial = _mm512_mask3_fnmadd_ps(scale, products, partial, present);
        }
    }
    // The fixed order: (p0 + p1) + (p2 + p3).
    let twos = _mm512_add_ps(partial, _mm512_permute_ps::<0b10_11_00_01>(partial));
    let fours = _mm512_add_ps(twos, _mm512_permute_ps::<0b01_00_11_10>(twos));
    let mut lanes = [0.0; 16];
    // SAFETY: the array holds 16 values.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), fours) };
    std::array::from_fn(|n| lanes[4 * n])
}

#[target_feature(enable = "avx512f")]
#[inline]
fn side_by_side(v: [__m128; 4]) -> __m512 {
    let low = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(v[0]), v[1]);
    _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(low, v[2]), v[3])
}

/// Of four blocks of 256: their scales and minimums, and the sums that these multiply, lane 4 n + b for token n and
/// block b.
struct FourBlocks {
    scales: __m128,
    minimums: __m128,
    products: __m512i,
    minimum_products: __m512i,
}

/// Four blocks with sub-blocks of 32 (Q4_K, Q5_K).
///
/// What comes after the group is asked for relative to `ahead`, where the group lies in its row.
///
/// # Safety
/// Four blocks lie at `start`, `count` of them with quants in every token from block `first` on; the tokens have the
/// sums of all four.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
unsafe fn four_blocks_of_32s<const F: u8, const N: usize>(
    start: *const u8,
    ahead: *const u8,
    count: usize,
    tokens: &[QuantisedRow<'_>; N],
    first: usize,
) -> FourBlocks {
    let block_bytes = Format256::from_index(F).block_bytes();
    // SAFETY: a block starts with its f16 scale and minimum and 12 bytes of packed integers.
    let heads = unsafe {
        let head = |i: usize| _mm_loadu_si128(start.add(i * block_bytes).cast());
        let low = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(head(0)), head(1));
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(low, head(2)), head(3))
    };
    // Six bits of each of 8 scales and 8 minimums: the packing is `get_scale_min_k4` of ggml-quants.c.
    let each = |a: i32, b: i32, c: i32, d: i32| _mm512_broadcast_i32x4(_mm_setr_epi32(a, b, c, d));
    let (a, b, c) = (0x0706_0504, 0x0b0a_0908, 0x0f0e_0d0c);
    let low = _mm512_shuffle_epi8(heads, each(a, c, b, c));
    let low = _mm512_srlv_epi32(low, each(0, 0, 0, 4));
    let low = _mm512_and_si512(
        low,
        each(0x3f3f_3f3f, 0x0f0f_0f0f, 0x3f3f_3f3f, 0x0f0f_0f0f),
    );
    let high = _mm512_shuffle_epi8(heads, each(-1, a, -1, b));
    let high = _mm512_and_si512(_mm512_srli_epi32::<2>(high), _mm512_set1_epi8(0x30));
    let bytes = _mm512_or_si512(low, high);
    // Eight 16-bit numbers of each block.
    let scales = _mm512_unpacklo_epi8(bytes, _mm512_setzero_si512());
    let minimums = _mm512_unpackhi_epi8(bytes, _mm512_setzero_si512());
    let mut sums = [[_mm512_setzero_si512(); 4]; TOKENS_MAX];
    for_each!(0 1 2 3, I => {
        if I < count {
            let block = start.wrapping_add(I * block_bytes);
            streaming::ahead_of_block::<I, 4>(ahead, block_bytes);
            for_each!(0 1 2 3, V => {
                // One scale for the values of each half.
                let one = |j: i64| 0x0001_0001_0001_0001 * j;
                let (x, y) = (one((8 * I + 2 * V) as i64), one((8 * I + 2 * V + 1) as i64));
                let index = _mm512_setr_epi64(x, x, x, x, y, y, y, y);
                let scales = _mm512_permutexvar_epi16(index, scales);
                // SAFETY: the block is there.
                let values = unsafe { values256::<F, V>(block) };
                for n in 0..N {
                    // SAFETY: the token has this block's quants.
                    let quants = unsafe {
                        let at = 256 * (first + I) + 64 * V;
                        _mm512_loadu_si512(tokens[n].quants.as_ptr().add(at).cast())
                    };
                    let pairs = _mm512_maddubs_epi16(values, quants);
                    sums[n][I] = multiply_add_pairs(sums[n][I], pairs, scales);
                }
            });
        }
    });
    // The first 32 bits of each block.
    let index = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    let heads = _mm512_castsi512_si128(_mm512_permutexvar_epi32(index, heads));
    let (scales, block_minimums) = scales_and_minimums(heads);
    let mut minimum_sums = [_mm512_setzero_si512(); TOKENS_MAX];
    for n in 0..N {
        // SAFETY: the token has 32 sums from here on.
        let x_sums =
            unsafe { _mm512_loadu_si512(tokens[n].sums_of_32.as_ptr().add(8 * first).cast()) };
        minimum_sums[n] = _mm512_madd_epi16(minimums, x_sums);
    }
    FourBlocks {
        scales,
        minimums: block_minimums,
        products: totals(sums),
        minimum_products: totals_of_blocks(minimum_sums),
    }
}

/// Quarter b of vector n has the four numbers of block b and token n: lane 4 n + b of the result is their sum.
#[target_feature(enable = "avx512f")]
#[inline]
fn totals_of_blocks(v: [__m512i; 4]) -> __m512i {
    let pair = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (a, b) = (pair(v[0], v[1]), pair(v[2], v[3]));
    let by_block = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let index = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(index, by_block)
}

/// Four blocks with sub-blocks of 16 (Q2_K, Q3_K, Q6_K).
///
/// # Safety
/// As for `four_blocks_of_32s`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
unsafe fn four_blocks_of_16s<const F: u8, const N: usize>(
    start: *const u8,
    ahead: *const u8,
    count: usize,
    tokens: &[QuantisedRow<'_>; N],
    first: usize,
) -> FourBlocks {
    let format = Format256::from_index(F);
    let block_bytes = format.block_bytes();
    let mut sums = [[_mm512_setzero_si512(); 4]; TOKENS_MAX];
    let mut minimum_sums = [[_mm512_setzero_si512(); 4]; TOKENS_MAX];
    for_each!(0 1 2 3, I => {
        if I < count {
            // SAFETY: as the caller promises.
            let block = unsafe { std::slice::from_raw_parts(start.add(I * block_bytes), block_bytes) };
            streaming::ahead_of_block::<I, 4>(ahead, block_bytes);
            let (scales, minimums) = scales256::<F>(block);
            let block = block.as_ptr();
            let of_sums = match format {
                Format256::Q3K => _mm256_slli_epi16::<2>(scales),
                Format256::Q6K => _mm256_slli_epi16::<5>(scales),
                Format256::Q2K | Format256::Q4K | Format256::Q5K => minimums,
            };
            for n in 0..N {
                // SAFETY: the token has 16 sums from here on.
                let x_sums = unsafe {
                    _mm256_loadu_si256(tokens[n].sums16.as_ptr().add(16 * (first + I)).cast())
                };
                let products = _mm256_madd_epi16(of_sums, x_sums);
                if format.has_minimum() {
                    minimum_sums[n][I] = _mm512_zextsi256_si512(products);
                } else {
                    let products = _mm256_sub_epi32(_mm256_setzero_si256(), products);
                    sums[n][I] = _mm512_zextsi256_si512(products);
                }
            }
            let scales = _mm512_castsi256_si512(scales);
            for_each!(0 1 2 3, V => {
                // One scale for the values of each quarter.
                let one = |j: i64| 0x0001_0001_0001_0001 * j;
                let [w, x, y, z] = [0, 1, 2, 3].map(|j| one(4 * V as i64 + j));
                let index = _mm512_setr_epi64(w, w, x, x, y, y, z, z);
                let scales = _mm512_permutexvar_epi16(index, scales);
                // SAFETY: the block is there.
                let values = unsafe { values256::<F, V>(block) };
                for n in 0..N {
                    // SAFETY: the token has this block's quants.
                    let quants = unsafe {
                        let at = 256 * (first + I) + 64 * V;
                        _mm512_loadu_si512(tokens[n].quants.as_ptr().add(at).cast())
                    };
                    let pairs = _mm512_maddubs_epi16(values, quants);
                    sums[n][I] = multiply_add_pairs(sums[n][I], pairs, scales);
                }
            });
        }
    });
    // SAFETY: the last two (Q3_K, Q6_K) or four bytes of a block are its f16 scale and minimum.
    let heads = unsafe {
        let at = |i: usize| start.add((i + 1) * block_bytes);
        if format.has_minimum() {
            let head = |i: usize| at(i).sub(4).cast::<i32>().read_unaligned();
            _mm_setr_epi32(head(0), head(1), head(2), head(3))
        } else {
            let head = |i: usize| i32::from(at(i).sub(2).cast::<u16>().read_unaligned());
            _mm_setr_epi32(head(0), head(1), head(2), head(3))
        }
    };
    let (scales, minimums) = scales_and_minimums(heads);
    let minimum_products = if format.has_minimum() {
        totals(minimum_sums)
    } else {
        _mm512_setzero_si512()
    };
    FourBlocks {
        scales,
        minimums,
        products: totals(sums),
        minimum_products,
    }
}
