//! Measures the engine's step without a server, and what the parts of the machine reach: `strata bench`.
//!
//! The model, its plan and its compute pool are those that a server would run, and so is the batch of each step; what
//! is missing is HTTP, the queue and the tokenizer. Beside every figure stands the limit that it is to be held
//! against: the rate at which the same threads read plain memory, measured between the rounds.
//!
//! - `workload`: what a round computes, and how many bytes of weights that reads
//! - `rounds`: the steps themselves, over any `Model`
//! - `memory_rate`: how fast the pool's threads read memory
//!
//! The parts, each through the code that serves, so that a plan may be predicted from what they reach:
//!
//! - `storage_rate`: the reader, on each rung of its ladder
//! - `copy_rate`: the copy stream
//! - `product_rate`, `attention_rate`: the host's kernels
//! - `gpu_rate`: a GPU's link and kernels
//!
//! All of it runs on the caller's thread, which is the engine thread of the pool and of the model.

mod attention_rate;
mod copy_rate;
mod gpu_rate;
mod memory_rate;
mod product_rate;
mod rounds;
mod storage_rate;
mod workload;

pub use attention_rate::{ATTENTION_DEPTH, attention_rates};
pub use copy_rate::{CopyRate, CopyRateError};
pub use gpu_rate::{GpuRateError, GpuRates, gpu_rates};
pub use memory_rate::MemoryRate;
pub use product_rate::{OfType, ProductRates};
pub use rounds::{BenchError, Rounds, median};
pub use storage_rate::{ReadWay, ReadingRate, StorageRate, StorageRateError};
pub use workload::{StepBytes, Workload};
