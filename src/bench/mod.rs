//! Measures the engine's step without a server: `strata bench`.
//!
//! The model, its plan and its compute pool are those that a server would run, and so is the batch of each step; what
//! is missing is HTTP, the queue and the tokenizer. Beside every figure stands the limit that it is to be held
//! against: the rate at which the same threads read plain memory, measured between the rounds.
//!
//! - `workload`: what a round computes, and how many bytes of weights that reads
//! - `rounds`: the steps themselves, over any `Model`
//! - `memory_rate`: how fast the pool's threads read memory
//!
//! All of it runs on the caller's thread, which is the engine thread of the pool and of the model.

mod memory_rate;
mod rounds;
mod workload;

pub use memory_rate::MemoryRate;
pub use rounds::{BenchError, Rounds, median};
pub use workload::{StepBytes, Workload};
