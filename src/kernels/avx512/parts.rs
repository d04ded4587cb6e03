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
pub(super) fn multiply_add_pairs(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
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
/// The unsigned values of a block of 256, in order.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
pub(in crate::kernels) fn values256<const F: u8>(block: &[u8]) -> [__m512i; 4] {
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
