//! Products with quantised weights on AVX2 (with FMA and F16C). One row at a time, walked in order; up to four tokens
//! share the unpacking of a block. Many tokens go to `avx2_wide`. The order of the arithmetic is the parent module's.
//!
//! Inside a block, unsigned values times signed quants go through `maddubs`: pairs of at most 63 * 127 * 2 fit 16 bits.
//! Q8_0 values are too large for that, so their magnitudes are multiplied with quants of their sign.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

mod parts;
mod row256;
mod row32;

use super::row_loops::row_loops;
use row32::row32;
use row256::row256;

pub(super) use parts::{
    for_each, halves_to_floats, scales_and_minimums, scales256, sum_of_eight, zero_padded,
};

row_loops!("avx2,fma,f16c", avx2_wide);
