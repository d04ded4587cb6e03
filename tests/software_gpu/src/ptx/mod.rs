//! PTX: parsed once into a compact program, executed on the CPU a warp at a time.
//!
//! [`Module::parse`] reads the text (`lexer`, `parser`, `declarations`) and lowers each kernel (`lower`) to
//! instructions whose operands are rows of 32 lanes (`lanes`, `alu`, `program`); the many virtual registers of compiler
//! output share few rows (`allocation`). [`run`] executes a grid, block after block (`execute`). What is not understood
//! is an error when the text is parsed, never a wrong result later. Follows the PTX ISA 9.0,
//! <https://docs.nvidia.com/cuda/parallel-thread-execution/>.
//!
//! Deliberately absent: matrix instructions, asynchronous copies, textures and surfaces, clusters, `match`, video
//! instructions, rounding in a direction for f64. Approximate functions are computed as exactly as f32 allows, where the
//! hardware is a few units of the last place off. Warps take turns and blocks run one after another, so what a weak order
//! of memory or two blocks at once would do wrong does not show, except by another order of blocks.
//!
//! Everything here is called from one thread at a time; a [`Module`] and its kernels may be sent between threads.

mod allocation;
mod alu;
mod declarations;
mod execute;
mod float;
mod lanes;
mod lexer;
mod lower;
mod parser;
mod program;
mod syntax;
#[cfg(test)]
mod tests;
mod types;

use std::collections::BTreeSet;
use std::sync::Arc;

pub use execute::run;
pub use program::{Kernel, Parameter};

/// A text that is not PTX, or that asks for something this interpreter does not do.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}line {line}: {message}", kernel.as_ref().map(|name| format!("kernel {name}, ")).unwrap_or_default())]
pub struct PtxError {
    pub kernel: Option<String>,
    pub line: u32,
    pub message: String,
}

impl PtxError {
    fn new(line: u32, message: impl Into<String>) -> PtxError {
        PtxError {
            kernel: None,
            line,
            message: message.into(),
        }
    }

    fn in_kernel(mut self, name: &str) -> PtxError {
        self.kernel.get_or_insert_with(|| name.to_owned());
        self
    }
}

/// The kernels of one PTX text.
#[derive(Debug)]
pub struct Module {
    kernels: Vec<Arc<Kernel>>,
}

impl Module {
    /// Parses a whole text. An opcode, modifier or directive that is not known is an error.
    pub fn parse(text: &str) -> Result<Module, PtxError> {
        let source = parser::parse(text)?;
        let kernels = lower::lower(&source, text)?;
        Ok(Module {
            kernels: kernels.into_iter().map(Arc::new).collect(),
        })
    }

    pub fn kernel(&self, name: &str) -> Option<Arc<Kernel>> {
        self.kernels
            .iter()
            .find(|kernel| kernel.name() == name)
            .cloned()
    }

    /// The kernels in the order of the text.
    pub fn kernels(&self) -> &[Arc<Kernel>] {
        &self.kernels
    }

    /// The opcodes with their modifiers that a text uses, known or not; empty where it does not parse.
    pub fn opcodes(text: &str) -> BTreeSet<String> {
        let Ok(source) = parser::parse(text) else {
            return BTreeSet::new();
        };
        let statements = source.entries.iter().flat_map(|entry| &entry.body);
        statements
            .filter_map(|statement| match statement {
                syntax::Statement::Instruction(instruction) => Some(instruction.opcode.to_owned()),
                _ => None,
            })
            .collect()
    }
}
