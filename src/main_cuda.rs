//! `strata-cuda`: `strata` with the kernels of a GPU, to which that hands over.

mod commands;

use std::process::ExitCode;
use strata::memory::CountingHeap;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// See `main.rs`.
const OPENS_GPUS: bool = true;

fn main() -> ExitCode {
    commands::main()
}
