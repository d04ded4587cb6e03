//! What end-to-end tests share. Each test is a crate of its own and uses a part of this.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

pub mod models;
