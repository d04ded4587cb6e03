//! `strata`: the program that starts anywhere and computes on the CPU. Where a GPU is asked for and can be there it hands
//! over to `strata-cuda` (`main_cuda.rs`), which is the same but for its kernels.

mod commands;

use std::process::ExitCode;
use strata::memory::CountingHeap;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// This program opens none, and so has no kernels linked into it.
const OPEN_GPU: Option<commands::OpenGpu> = None;

fn main() -> ExitCode {
    commands::main()
}
