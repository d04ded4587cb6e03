//! The kernels of a CUDA device: the same arithmetic as the parent module's, over addresses in device memory.
//!
//! # The same bits
//!
//! Every kernel keeps to the one order of arithmetic that the parent module defines, with operations that IEEE 754
//! rounds (a GPU's are), so a device gives the bits that the host gives, at every width. Tests hold each kernel against
//! the host's, bit for bit.
//!
//! # Launches
//!
//! `build.rs` compiles each `.cu` file to PTX, which is part of the executable; `CudaKernels::load` hands it to the
//! driver, which compiles it for the card at hand. A launch only queues: it returns before the kernel runs, on the
//! stream that it is given, and a failure inside a kernel shows at a later call. So the memory that a launch names has
//! to stay what it is until the stream is past it; whoever launches orders that, with streams and events.
//!
//! All activations are f32, one row a token. Buffers of activations, quantised input and tables start at multiples of
//! 256 bytes; weights lie where their group rests, `DeviceMatrix` says how aligned.
//!
//! # For few tokens and for many
//!
//! Products of up to eight tokens are made for decoding, where the memory's rate is the limit: they read weights straight
//! into registers. Those of more tokens work on tiles of rows and tokens in shared memory, where unpacked weights serve
//! 16 or 32 tokens; there integer arithmetic is the limit. Attention is a block of threads for each token and KV head, or
//! for some neighbouring tokens of a prompt: enough to fill the device with prompts and with many sequences.
//! `long_attention` splits the work of few tokens further.
//!
//! Called by the engine thread (through model).
#![expect(unsafe_code, reason = "launches kernels over device addresses")]

mod attention;
mod elementwise;
mod long_attention;
mod module;
mod products;
mod rows;
#[cfg(all(test, feature = "cuda"))]
mod tests;

use std::sync::Arc;

use cudarc::driver::CudaContext;

use crate::memory::DeviceAddress;

pub use attention::{Attention, DevicePages, DeviceRuns, HEAD_LENGTH_MAX, PagePrecision, StoreKv};
pub use elementwise::{AddBias, AddRmsNorm, GateMul, Rope, Scale};
pub use long_attention::{LongAttention, long_attention_scratch_bytes};
pub use products::{DeviceMatrix, InputForm, MatrixProduct, QuantiseRows, quantised_input_bytes};
pub use rows::{DequantiseRows, GatherRows};

/// Why kernels cannot be loaded or launched.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    #[error(
        "this build has no CUDA kernels; cargo build --release --features cuda makes one that has"
    )]
    NotCompiledIn,
    #[error("load the kernels of {module}: {why}")]
    Load { module: &'static str, why: String },
    #[error("find the kernel {kernel}: {why}")]
    Find { kernel: String, why: String },
    #[error("launch the kernel {kernel}: {why}")]
    Launch { kernel: String, why: String },
    /// A file may align its tensors to less than the device's loads need.
    #[error("{what} lie at {address:#x}, and the device reads them in words of {alignment} bytes")]
    Unaligned {
        what: &'static str,
        address: u64,
        alignment: u64,
    },
}

/// All kernels, loaded into one context.
pub struct CudaKernels {
    products: products::Kernels,
    elementwise: elementwise::Kernels,
    attention: attention::Kernels,
    long_attention: long_attention::Kernels,
    rows: rows::Kernels,
}

impl CudaKernels {
    /// Whether this build has them: the feature `cuda` needs nvcc.
    pub const ARE_COMPILED_IN: bool = cfg!(feature = "cuda");

    /// Has the driver compile the kernels for the context's device: seconds at the first time, then the driver has them
    /// in its cache.
    ///
    /// # Errors
    /// The driver does not take them: it is older than CUDA 13.0, or the card is older than Turing. Or the build has none.
    pub fn load(context: &Arc<CudaContext>) -> Result<CudaKernels, KernelError> {
        if !CudaKernels::ARE_COMPILED_IN {
            return Err(KernelError::NotCompiledIn);
        }
        Ok(CudaKernels {
            products: products::Kernels::load(context)?,
            elementwise: elementwise::Kernels::load(context)?,
            attention: attention::Kernels::load(context)?,
            long_attention: long_attention::Kernels::load(context)?,
            rows: rows::Kernels::load(context)?,
        })
    }
}

impl std::fmt::Debug for CudaKernels {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("CudaKernels")
    }
}

/// A count as kernels take it.
///
/// # Panics
/// When it is no u32: no step has so many of anything.
fn count(value: usize) -> u32 {
    u32::try_from(value).unwrap_or_else(|_| panic!("{value} is more than a kernel counts"))
}
