//! Arithmetic over borrowed memory: products with quantised weights, attention over KV pages, rotary embedding, norms
//! and gates, and the pool of threads that computes them. Called by the engine thread (through model); only the pool's threads run
//! beside it. Nothing here owns weights or pages, and weight bytes may lie at any address.
//!
//! # One order of arithmetic
//!
//! A token's result has the same bits at every width, in any company, for every cut into row slices and chunks, with
//! any number of threads and on every instruction set. So each weight type has one definition of its dot product, and
//! every loop computes exactly that:
//!
//! - **Blocks of 32** (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0). The input is quantised to 8 bits in blocks of 32 with an f32
//!   scale (see `activations`). Inside a block all is exact in integers: isum = sum of (value - offset) * quant. Block
//!   b adds to one of eight partial sums, p = partial[b mod 8]: p = fma(d_w * d_x, isum, p), and where the format has
//!   a minimum, p = fma(m, d_x * (sum of quants), p). At the end
//!   ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7)).
//! - **Blocks of 256** (Q2_K to Q6_K). The input is quantised in blocks of 256. isum also takes in the sub-blocks' integer
//!   scales, and msum is the sum of sub-block minimum * sum of quants. With p = partial[b mod 4]:
//!   p = fma(d_w * d_x, isum, p), p = fma(-(dmin * d_x), msum, p); at the end (p0 + p1) + (p2 + p3).
//! - **F32, F16, BF16**. See `float`; RMSNorm adds its squares in the same order. Attention: see `attention`.
//!
//! fma is rounded once, everywhere; d_w * d_x is rounded to f32 first. `portable` is the definition as code; tests hold
//! the others against it bit for bit.

mod activations;
mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx2_wide;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_wide;
mod blocks;
pub mod cuda;
mod elementwise;
mod float;
mod half_floats;
mod instruction_set;
mod matmul;
mod pool;
mod portable;
mod rope;
#[cfg(target_arch = "x86_64")]
mod row_loops;
mod simd;
mod streaming;

pub use activations::Activations;
pub use attention::{
    AttentionRun, AttentionShape, PAGE_TOKENS, PageView, PageViewMut, attention, store_kv,
};
pub use blocks::dequantise_row;
pub use elementwise::{add_rms_norm, gelu_mul, rms_norm, scale, silu_mul};
pub use instruction_set::InstructionSet;
pub use matmul::{MatrixView, OutputRows, Product, RowSlice, matmul, matmul_all};
pub use pool::ComputePool;
pub use rope::{RopeAngles, RopePairs, RopeSettings, RopeTable, rope};
pub use streaming::read_all;
