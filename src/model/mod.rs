//! Forward passes, one file per architecture family, behind the one trait that the engine drives.
//!
//! The engine decides which tokens are computed in a step and which pages hold each sequence; a model reads and
//! writes those pages and returns logits. A model lives on the engine thread and never leaves it.

mod cuda;
mod dense;
mod gemma3;
mod gpu;
mod host;
mod llama;
mod load;
mod matrix;
mod rope;
mod shapes;
mod step;

pub use gpu::{Gpu, GpuError, gpu_supports};
pub use load::{LoadedModel, OpenError, PlannedModel, check, hyperparameters, places};
pub use matrix::ModelError;

use crate::kv_cache::{PageId, SequencePages};

/// One step's tokens: for each sequence a run of consecutive tokens.
#[derive(Clone, Debug)]
pub struct Batch<'a> {
    pub runs: Vec<Run<'a>>,
}

impl Batch<'_> {
    /// Tokens in the step.
    pub fn width(&self) -> usize {
        self.runs.iter().map(|run| run.tokens.len()).sum()
    }

    /// Whether a sequence has more than the one token that decoding gives it.
    pub fn has_prompt(&self) -> bool {
        self.runs.iter().any(|run| run.tokens.len() > 1)
    }
}

/// Consecutive tokens of one sequence. No page stands in two runs of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// At least one; every id is below the vocabulary's size.
    pub tokens: &'a [u32],
    /// The position of `tokens[0]`: how many tokens of this sequence are in its pages already.
    pub position: u32,
    /// Pages of this sequence, in order, covering `position + tokens.len()` tokens and no page more.
    pub pages: &'a [PageId],
    /// Which sequence it is of the plan's `parallel`: layers that see a window keep its last positions there. No two
    /// runs of a batch have one slot, and a sequence keeps its own.
    pub slot: u32,
    /// Whether logits are wanted for the last token of the run.
    pub wants_logits: bool,
}

impl<'a> Run<'a> {
    fn sequence(&self) -> SequencePages<'a> {
        SequencePages {
            pages: self.pages,
            slot: self.slot,
        }
    }
}

/// A loaded model.
pub trait Model {
    /// Length of every row of logits.
    fn vocabulary_size(&self) -> usize;

    /// Computes one step and writes keys and values of its tokens to their pages. Returns one row of logits per run
    /// that wants them, in order. `cancelled` turns true when nobody wants the step any more; it is asked between
    /// groups of weights, and costs little.
    ///
    /// # Errors
    ///
    /// The step failed, and what it wrote to the pages counts for nothing. The model stays usable: the next step
    /// comes with other requests.
    fn forward(
        &mut self,
        batch: &Batch<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<f32>>, StepError>;
}

/// Why a step failed. The text is for the log, not for clients.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StepError {
    /// A sentence that names file, offset and group.
    #[error("{0}")]
    Weights(String),
    #[error("the step was cancelled")]
    Cancelled,
    /// Arithmetic was refused or gave what it must not give.
    #[error("{0}")]
    Numeric(String),
    /// The device that computes does nothing any more: no later step can be better.
    #[error("{0}")]
    DeviceLost(String),
}
