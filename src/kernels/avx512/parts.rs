//! What the loops over rows are made of: unpacked values, sums across lanes.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::blocks::Format256;

/// sum + the products of two 16-bit numbers in each 32-bit lane.
///
/// In assembly because the compiler makes two instructions of the intrinsic.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
pub(in crate::kernels) fn multiply_add_pairs(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!(
            "vpdpwssd {sum}, {a}, {b}",
            sum = inout(zmm_reg) sum,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Lane 4 n + b is the sum of vector b of token n.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn totals(v: [[__m512i; 4]; 4]) -> __m512i {
    let pair = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    // Each quarter has a part of each of the token's sums.
    let quarters = v.map(|[a, b, c, d]| {
        let (a, b) = (pair(a, b), pair(c, d));
        _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b))
    });
    let halves = |a, b| {
        _mm512_add_epi32(
            _mm512_shuffle_i32x4::<0b01_00_01_00>(a, b),
            _mm512_shuffle_i32x4::<0b11_10_11_10>(a, b),
        )
    };
    let (a, b) = (
        halves(quarters[0], quarters[1]),
        halves(quarters[2], quarters[3]),
    );
    _mm512_add_epi32(
        _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b),
    )
}

/// A matrix for `move_bits`: bits `from`, `from + 1`, ... of a byte go to bits `to`, `to + 1`, ..., `count` of them;
/// the others become zero.
pub(super) const fn bits(count: usize, from: usize, to: usize) -> i64 {
    let mut matrix = 0;
    let mut i = 0;
    while i < count {
        // Row 7 - t of a matrix, its byte 7 - t, selects the bits that bit t is the sum of.
        matrix |= 1 << (8 * (7 - (to + i)) + from + i);
        i += 1;
    }
    matrix
}

/// Moves bits inside bytes: those of the lower 32 bytes by one matrix, those of the upper 32 by another.
#[target_feature(enable = "avx512f,avx512bw,gfni")]
#[inline]
pub(super) fn move_bits(bytes: __m512i, lower: i64, upper: i64) -> __m512i {
    let matrices = _mm512_setr_epi64(lower, lower, lower, lower, upper, upper, upper, upper);
    _mm512_gf2p8affine_epi64_epi8::<0>(bytes, matrices)
}

/// Values 64 V to 64 V + 63 of a block of 256, unsigned, in order.
///
/// # Safety
/// A block lies at the address.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni")]
#[inline]
pub(super) unsafe fn values256<const F: u8, const V: usize>(block: *const u8) -> __m512i {
    // SAFETY: all that is loaded lies inside the block.
    let (twice, whole) = unsafe {
        (
            // 32 bytes in both halves.
            |at: usize| _mm512_broadcast_i64x4(_mm256_loadu_si256(block.add(at).cast())),
            |at: usize| _mm512_loadu_si512(block.add(at).cast()),
        )
    };
    let half = V / 2;
    match Format256::from_index(F) {
        Format256::Q2K => move_bits(
            twice(16 + 32 * half),
            const { bits(2, 4 * (V % 2), 0) },
            const { bits(2, 4 * (V % 2) + 2, 0) },
        ),
        Format256::Q3K => {
            let low = move_bits(
                twice(32 + 32 * half),
                const { bits(2, 4 * (V % 2), 0) },
                const { bits(2, 4 * (V % 2) + 2, 0) },
            );
            let high = move_bits(
                twice(0),
                const { bits(1, 2 * V, 2) },
                const { bits(1, 2 * V + 1, 2) },
            );
            _mm512_or_si512(low, high)
        }
        Format256::Q4K => nibbles(twice(16 + 32 * V)),
        Format256::Q5K => {
            let high = move_bits(
                twice(16),
                const { bits(1, 2 * V, 4) },
                const { bits(1, 2 * V + 1, 4) },
            );
            _mm512_or_si512(nibbles(twice(48 + 32 * V)), high)
        }
        Format256::Q6K => {
            let nibble = const { bits(4, 4 * (V % 2), 0) };
            let low = move_bits(whole(64 * half), nibble, nibble);
            let high = move_bits(
                twice(128 + 32 * half),
                const { bits(2, 4 * (V % 2), 4) },
                const { bits(2, 4 * (V % 2) + 2, 4) },
            );
            _mm512_or_si512(low, high)
        }
    }
}

/// The lower nibbles of the lower 32 bytes, the upper ones of the upper 32.
#[target_feature(enable = "avx512f,avx512bw,gfni")]
#[inline]
fn nibbles(bytes: __m512i) -> __m512i {
    move_bits(bytes, const { bits(4, 0, 0) }, const { bits(4, 4, 0) })
}
