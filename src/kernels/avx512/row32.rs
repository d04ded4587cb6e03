//! One row of weights in blocks of 32 times a few tokens, eight blocks at a time.
//!
//! Formats of four bits a value keep value i and value i + 16 of a block in one byte. The lower nibbles of four blocks
//! make one vector and the upper ones another; `Activations` has the quants in that order (`quants_by_half`). So only
//! four lanes are left to be added for each block, and two tokens fill one vector with their sums.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

use std::arch::x86_64::*;

use super::super::activations::QuantisedRow;
use super::super::avx2::{for_each, sum_of_eight};
use super::super::blocks::Format32;
use super::super::streaming;
use super::parts::{bits, move_bits};

/// Pairs of tokens that share the unpacking of a row. In a pair's vector lanes 0 to 7 are blocks 0 to 7 of the first
/// token, 8 to 15 those of the second.
const PAIRS_MAX: usize = 2;

/// One row times N tokens, at most `2 * PAIRS_MAX`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
pub(super) fn row32<const F: u8, const N: usize>(
    row: &[u8],
    tokens: &[QuantisedRow<'_>; N],
) -> [f32; N] {
    const { assert!(N <= 2 * PAIRS_MAX) };
    let block_bytes = Format32::from_index(F).block_bytes();
    let blocks = row.len() / block_bytes;
    for token in tokens {
        // What the loops below read: whole groups of eight blocks.
        let padded = blocks.next_multiple_of(8);
        let quants = match Format32::from_index(F) {
            Format32::Q8_0 => token.quants,
            _ => token.quants_by_half,
        };
        assert!(quants.len() >= 32 * padded);
        assert!(token.scales.len() >= padded && token.sums32.len() >= padded);
        assert!(token.scaled_sums.len() >= padded);
    }
    let mut partial = [_mm512_setzero_ps(); PAIRS_MAX];
    let mut groups = row.chunks_exact(8 * block_bytes);
    let mut first = 0;
    for group in &mut groups {
        // SAFETY: eight blocks; the tokens were checked above.
        unsafe { add_group::<F, N, true>(group, 8, first, tokens, &mut partial) };
        first += 8;
    }
    let rest = groups.remainder();
    if !rest.is_empty() {
        let count = rest.len() / block_bytes;
        // SAFETY: `count` blocks; the tokens were checked above.
        unsafe { add_group::<F, N, false>(rest, count, first, tokens, &mut partial) };
    }
    std::array::from_fn(|n| {
        let pair = partial[n / 2];
        let half = if n % 2 == 0 {
            _mm512_castps512_ps256(pair)
        } else {
            _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(pair)))
        };
        sum_of_eight(half)
    })
}

/// Adds `count` blocks (eight where `FULL`), the first of which has index `first`, to the partial sums.
///
/// # Safety
/// `group` holds `count` blocks; the tokens have all that belongs to eight blocks from `first` on.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
unsafe fn add_group<const F: u8, const N: usize, const FULL: bool>(
    group: &[u8],
    count: usize,
    first: usize,
    tokens: &[QuantisedRow<'_>; N],
    partial: &mut [__m512; PAIRS_MAX],
) {
    let format = Format32::from_index(F);
    let block_bytes = format.block_bytes();
    // The compiler has to know, and to find one call of each: it inlines the function only then.
    let count = if FULL { 8 } else { count };
    assert_eq!(group.len(), count * block_bytes);
    streaming::ahead(group.as_ptr(), 8 * block_bytes);
    // SAFETY: `count` blocks are there.
    let (values, heads) = unsafe {
        let (values, starts) = values_of_eight::<F>(group.as_ptr(), count);
        let heads = match format {
            Format32::Q5_0 | Format32::Q5_1 => heads_of_starts(starts),
            _ => heads_of_eight::<F, FULL>(group.as_ptr(), count),
        };
        (values, heads)
    };
    let heads = _mm512_castps_pd(_mm512_cvtph_ps(heads));
    let scales = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b01_00_01_00>(heads, heads));
    let minimums = _mm512_castpd_ps(_mm512_shuffle_f64x2::<0b11_10_11_10>(heads, heads));
    let present = ((1u32 << count) - 1) as u16;
    let present = present | (present << 8);
    for pair in 0..N.div_ceil(2) {
        let a = &tokens[2 * pair];
        // Of a token without a neighbour, what is made of the second half is never looked at.
        let b = &tokens[(2 * pair + 1).min(N - 1)];
        // SAFETY: the caller's promise.
        unsafe {
            let products_of = |token: &QuantisedRow<'_>| {
                let quants = match format {
                    Format32::Q8_0 => token.quants,
                    _ => token.quants_by_half,
                };
                let quants = quants.as_ptr().add(32 * first);
                let mut products = [_mm512_setzero_si512(); 4];
                for i in 0..4 {
                    let quants = _mm512_loadu_si512(quants.add(64 * i).cast());
                    products[i] = _mm512_dpbusd_epi32(products[i], values[i], quants);
                }
                products
            };
            let two = |of: fn(&QuantisedRow<'_>) -> *const f32| {
                let (a, b) = (
                    _mm256_loadu_ps(of(a).add(first)),
                    _mm256_loadu_ps(of(b).add(first)),
                );
                let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
                _mm512_castpd_ps(_mm512_insertf64x4::<1>(_mm512_castpd256_pd512(a), b))
            };
            let products_of_a = products_of(a);
            let products_of_b = if 2 * pair + 1 == N {
                products_of_a
            } else {
                products_of(b)
            };
            let mut sums = match format {
                Format32::Q8_0 => totals_of_pairs(products_of_a, products_of_b),
                _ => totals_of_halves(products_of_a, products_of_b),
            };
            if format.offset() != 0 {
                let x_sums = _mm512_castps_si512(two(|token| token.sums32.as_ptr().cast()));
                let by = format.offset().trailing_zeros();
                let offsets = _mm512_sll_epi32(x_sums, _mm_cvtsi32_si128(by as i32));
                sums = _mm512_sub_epi32(sums, offsets);
            }
            let scale = _mm512_mul_ps(scales, two(|token| token.scales.as_ptr()));
            let sums = _mm512_cvtepi32_ps(sums);
            // What blocks that are not there would add is dropped: -0 + 0 would be another number.
            partial[pair] = _mm512_mask3_fmadd_ps(scale, sums, partial[pair], present);
            if format.has_minimum() {
                let x_scaled_sums = two(|token| token.scaled_sums.as_ptr());
                partial[pair] =
                    _mm512_mask3_fmadd_ps(minimums, x_scaled_sums, partial[pair], present);
            }
        }
    }
}

/// The unsigned values of `count` of eight blocks, the rest zero. Q8_0: two blocks in each vector. Others: the lower
/// halves of blocks 0 to 3, their upper halves, then those of blocks 4 to 7. With them, for formats of five bits, the
/// first 16 bytes of each of blocks 0 to 3, and of 4 to 7.
///
/// # Safety
/// `count` blocks lie at `start`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
unsafe fn values_of_eight<const F: u8>(
    start: *const u8,
    count: usize,
) -> ([__m512i; 4], [__m512i; 2]) {
    let format = Format32::from_index(F);
    let block_bytes = format.block_bytes();
    let mut values = [_mm512_setzero_si512(); 4];
    let mut starts = [_mm512_setzero_si512(); 2];
    if format == Format32::Q8_0 {
        for_each!(0 1 2 3, PAIR => {
            let block = |i: usize| match i < count {
                // SAFETY: the block is there.
                true => unsafe { _mm256_loadu_si256(start.add(i * block_bytes + 2).cast()) },
                false => _mm256_setzero_si256(),
            };
            let first = _mm512_castsi256_si512(block(2 * PAIR));
            let both = _mm512_inserti64x4::<1>(first, block(2 * PAIR + 1));
            // Adds 128 to the signed bytes.
            values[PAIR] = _mm512_xor_si512(both, _mm512_set1_epi8(-128));
        });
        return (values, starts);
    }
    // 16 bytes of each of four blocks, from byte `at` of a block on.
    let four = |first: usize, at: usize| {
        let part = |i: usize| match first + i < count {
            // SAFETY: the block is there, and has 16 bytes from `at` on.
            true => unsafe { _mm_loadu_si128(start.add((first + i) * block_bytes + at).cast()) },
            false => _mm_setzero_si128(),
        };
        let low = _mm512_inserti32x4::<1>(_mm512_castsi128_si512(part(0)), part(1));
        _mm512_inserti32x4::<3>(_mm512_inserti32x4::<2>(low, part(2)), part(3))
    };
    for_each!(0 1, HALF => {
        let bytes = four(4 * HALF, block_bytes - 16);
        let mut low = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
        let upper = const { bits(4, 4, 0) };
        let mut high = move_bits(bytes, upper, upper);
        if matches!(format, Format32::Q5_0 | Format32::Q5_1) {
            // The fifth bits are the four bytes before the quants: bit i belongs to value i.
            starts[HALF] = four(4 * HALF, 0);
            let at = (block_bytes - 20) as i64;
            let same = |byte: i64| 0x0101_0101_0101_0101 * (at + byte);
            let bit = _mm512_set1_epi64(0x8040_2010_0804_0201_u64 as i64);
            let add_bits = |values, byte: i64| {
                let order = _mm_set_epi64x(same(byte + 1), same(byte));
                let bits = _mm512_shuffle_epi8(starts[HALF], _mm512_broadcast_i32x4(order));
                let is_set = _mm512_test_epi8_mask(bits, bit);
                _mm512_mask_add_epi8(values, is_set, values, _mm512_set1_epi8(16))
            };
            low = add_bits(low, 0);
            high = add_bits(high, 2);
        }
        values[2 * HALF] = low;
        values[2 * HALF + 1] = high;
    });
    (values, starts)
}

/// What `heads_of_eight` gives, from the first 16 bytes of each of blocks 0 to 3, and of 4 to 7.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
fn heads_of_starts([low, high]: [__m512i; 2]) -> __m256i {
    let (low_order, high_order) = const { (head_order(16, 0), head_order(16, 4)) };
    pick_heads(low, high, &low_order, &high_order)
}

/// Heads of blocks 0 to 3 where `low_order` says that they lie in `low`, of blocks 4 to 7 likewise.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
fn pick_heads(low: __m512i, high: __m512i, low_order: &[u8; 64], high_order: &[u8; 64]) -> __m256i {
    // SAFETY: the arrays hold 64 bytes.
    let (low_order, high_order) = unsafe {
        (
            _mm512_loadu_si512(low_order.as_ptr().cast()),
            _mm512_loadu_si512(high_order.as_ptr().cast()),
        )
    };
    let heads = _mm512_permutexvar_epi8(low_order, low);
    // Bytes 8 to 15 and 24 to 31: blocks 4 to 7.
    let heads = _mm512_mask_permutexvar_epi8(heads, 0xff00_ff00, high_order, high);
    _mm512_castsi512_si256(heads)
}

/// The f16 scales of `count` of eight blocks, then the f16 minimums, where blocks have any.
///
/// # Safety
/// `count` blocks, eight where `FULL`, lie at `start`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
unsafe fn heads_of_eight<const F: u8, const FULL: bool>(start: *const u8, count: usize) -> __m256i {
    let format = Format32::from_index(F);
    let block_bytes = format.block_bytes();
    if FULL && matches!(format, Format32::Q4_0 | Format32::Q4_1) {
        // The heads of four blocks lie in 64 bytes.
        let (low, high) = const {
            let block_bytes = Format32::from_index(F).block_bytes();
            (head_order(block_bytes, 0), head_order(block_bytes, 4))
        };
        // SAFETY: eight blocks are more than 4 blocks and 64 bytes.
        let (low_bytes, high_bytes) = unsafe {
            (
                _mm512_loadu_si512(start.cast()),
                _mm512_loadu_si512(start.add(4 * block_bytes).cast()),
            )
        };
        return pick_heads(low_bytes, high_bytes, &low, &high);
    }
    let head = |block: usize| match block < count {
        // SAFETY: the block is there, and starts with the four bytes that are read.
        true => unsafe {
            start
                .add(block * block_bytes)
                .cast::<i32>()
                .read_unaligned()
        },
        false => 0,
    };
    let heads = _mm256_setr_epi32(
        head(0),
        head(1),
        head(4),
        head(5),
        head(2),
        head(3),
        head(6),
        head(7),
    );
    // In each half [scales | minimums] of four blocks, a 64-bit part each; blocks 0, 1, 4, 5 and 2, 3, 6, 7.
    let (even, odd) = (0x0d0c_0908_0504_0100, 0x0f0e_0b0a_0706_0302);
    let parts = _mm256_shuffle_epi8(heads, _mm256_setr_epi64x(even, odd, even, odd));
    // As 32-bit lanes: s01 s45 m01 m45, s23 s67 m23 m67.
    _mm256_permutevar8x32_epi32(parts, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
}

/// Where the bytes of four heads lie in 64 bytes that start with the first: scales in bytes 2 `first` on, minimums in
/// bytes 16 + 2 `first` on.
const fn head_order(block_bytes: usize, first: usize) -> [u8; 64] {
    let mut order = [0; 64];
    let mut block = 0;
    while block < 4 {
        let mut byte = 0;
        while byte < 2 {
            let at = (block * block_bytes + byte) as u8;
            order[2 * (first + block) + byte] = at;
            order[16 + 2 * (first + block) + byte] = at + 2;
            byte += 1;
        }
        block += 1;
    }
    order
}

/// Vectors 0 and 1 hold four products of each of blocks 0 to 3, 2 and 3 those of blocks 4 to 7: lane b of the result
/// is the sum of block b of `a`, lane 8 + b that of `b`.
#[target_feature(enable = "avx512f")]
#[inline]
fn totals_of_halves(a: [__m512i; 4], b: [__m512i; 4]) -> __m512i {
    let sums = |v: [__m512i; 4]| {
        let (low, high) = (_mm512_add_epi32(v[0], v[1]), _mm512_add_epi32(v[2], v[3]));
        // In quarter q: q, q + 4, q, q + 4.
        _mm512_add_epi32(
            _mm512_unpacklo_epi32(low, high),
            _mm512_unpackhi_epi32(low, high),
        )
    };
    let (a, b) = (sums(a), sums(b));
    // In quarter q: q, q + 4 of a, q, q + 4 of b.
    let both = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, both)
}

/// Vector i holds eight products of block 2 i, then eight of block 2 i + 1: lane b of the result is the sum of block b
/// of `a`, lane 8 + b that of `b`.
#[target_feature(enable = "avx512f")]
#[inline]
fn totals_of_pairs(a: [__m512i; 4], b: [__m512i; 4]) -> __m512i {
    let pair = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    // In each quarter 0, 2, 4, 6 (the lower half) or 1, 3, 5, 7.
    let quarters = |v: [__m512i; 4]| {
        let (low, high) = (pair(v[0], v[1]), pair(v[2], v[3]));
        _mm512_add_epi32(
            _mm512_unpacklo_epi64(low, high),
            _mm512_unpackhi_epi64(low, high),
        )
    };
    let (a, b) = (quarters(a), quarters(b));
    let both = _mm512_add_epi32(
        _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
    );
    let order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    _mm512_permutexvar_epi32(order, both)
}
