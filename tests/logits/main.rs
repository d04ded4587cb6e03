//! What a model computes: the reference's log-probabilities, and the same bits wherever its weights are.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod files;
mod golden;
#[path = "../support/models.rs"]
mod models;
mod placements;
mod reference;
#[path = "../support/run.rs"]
mod run;
#[path = "../support/synthesised.rs"]
mod synthesised;
