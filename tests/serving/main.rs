//! The real server in bad company: a model file that is damaged while it is served, more clients than there is room
//! for, clients that leave, and requests that are almost right.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod damaged_file;
#[path = "../support/http.rs"]
mod http;
mod many_clients;
#[path = "../support/models.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    reason = "each test crate uses a part of this module"
)]
mod models;
mod mutated_requests;
#[path = "../support/process.rs"]
mod process;
