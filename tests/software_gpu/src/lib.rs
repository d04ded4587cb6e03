//! A CUDA driver (`libcuda.so.1`) for machines without a GPU: everything a program asks of it, kernels included, is
//! executed on the CPU, and much that a GPU lets pass in silence is an error here.
//!
//! Two parts that meet in [`seam`]: [`driver`] owns memory, streams, events and the order in which work is done and
//! exports the driver's C functions; [`ptx`] parses PTX text and executes its kernels. The crate is for tests: it is
//! built as a shared library that stands before the real one in the loader's path, and is never shipped.

pub mod driver;
pub mod ptx;
pub mod seam;
