//! `strata`: the program that starts anywhere and computes on the CPU. Where a GPU is asked for and can be there it hands
//! over to `strata-cuda` (`main_cuda.rs`), which is the same but for its kernels.

mod commands;

use std::process::ExitCode;
use strata::memory::CountingHeap;

#[global_allocator]
static HEAP: CountingHeap = CountingHeap;

/// Whether this program opens GPUs itself. What only one that does would call is not linked into the other.
const OPENS_GPUS: bool = false;

fn main() -> ExitCode {
    commands::main()
}
