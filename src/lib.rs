//! strata serves language models that are larger than the GPU: weights in VRAM, RAM and NVMe, moved ahead of the
//! computation. The modules stand in dependency order; ARCHITECTURE.md has the map and the import table that
//! `tests/architecture.rs` holds against the `use` lines.

pub mod gguf;
pub mod inspect;
pub mod metrics;
pub mod pull;
pub mod synth;
pub mod trace;

pub mod placement;

pub mod estimate;

pub mod memory;

pub mod kernels;
pub mod kv_cache;
pub mod tokenizer;
pub mod weights;

pub mod model;
pub mod quantise;
pub mod sampler;

pub mod bench;
pub mod config;
pub mod engine;

pub mod api;
pub mod cli;
