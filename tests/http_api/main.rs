//! The HTTP API over real sockets: the real router, tokenizer and engine, and a model that says what a test wants.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod admission;
mod chat;
#[path = "../support/http.rs"]
mod client;
mod completions;
mod malformed;
mod model;
mod operations;
mod security;
mod server;
mod streaming;
