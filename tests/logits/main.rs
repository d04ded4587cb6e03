//! What a model computes: the reference's log-probabilities, and the same bits wherever its weights are and however its
//! storage behaves.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod faulty_storage;
mod golden;
#[path = "../support/models.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "each test crate uses a part of this module"
)]
mod models;
mod placements;
mod run;
#[path = "../support/synthesised.rs"]
mod synthesised;
