//! `strata-cuda`: `strata` with the kernels of a GPU, to which that hands over.

mod commands;

use std::process::ExitCode;
use strata::memory::CountingHeap;
use strata::model::Gpu;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// Brings the kernels with it.
const OPEN_GPU: Option<commands::OpenGpu> = Some(Gpu::open);

fn main() -> ExitCode {
    commands::main()
}
