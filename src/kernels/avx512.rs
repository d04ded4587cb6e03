//! Products with quantised weights on AVX-512 (with VBMI, VNNI and GFNI). One row at a time, walked in order; up to four
//! tokens share the unpacking of a block. Many tokens go to `avx512_wide`. The order of the arithmetic is the parent module's.
//!
//! At width 1 the limit is how many cache misses are in flight, so memory is asked for well ahead (`streaming::ahead`).
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]

mod parts;
mod row256;
mod row32;

use super::row_loops::row_loops;
use row32::row32;
use row256::row256;

pub(super) use parts::multiply_add_pairs;

row_loops!(
    "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni,gfni",
    avx512_wide
);
