//! The CUDA device: the bits of the host under every plan, the reference's log-probabilities, and the order of its streams.
//!
//! These tests need a device: a GPU, or the software GPU as libcuda.so.1 on LD_LIBRARY_PATH, which `make test` gives them.
//! Without one they say that they skip; where STRATA_REQUIRE_GPU is set, that is a failure.

#![cfg(feature = "cuda")]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/http.rs"]
mod client;
mod device;
mod golden;
mod hand_over;
#[path = "../support/models.rs"]
mod models;
mod opcodes;
mod order;
mod placements;
#[path = "../support/program.rs"]
mod program;
#[path = "../support/run.rs"]
mod run;
mod serving;
mod stalls;
#[path = "../support/trace.rs"]
mod trace;
mod tracing;
