//! What a model would take, before anything is allocated: weights, KV cache and activations to serve it, or parameters,
//! gradients, the optimiser's state and saved inputs to train it. Each figure carries the formula that it came from.
//!
//! - `subject`: what is estimated: a shape card, a GGUF file's index, a card of a perceptron, or a number of parameters
//! - `inference`: what serving takes; the activations are those of `placement`'s plan
//! - `training`: what a training step takes on one device; `techniques`: what would change it
//! - `report`: both as text and as JSON
//!
//! Pure: files are read by the caller. Sums are made in 128 bits, from sizes that were bounded before, so they cannot
//! overflow; a figure that exceeds 64 bits is an error.

mod inference;
mod report;
mod subject;
mod techniques;
mod training;

#[cfg(test)]
mod tests;

pub use inference::{Inference, InferenceRequest, KvCache, KvWindow, QuantisedSize, inference};
pub use report::{inference_json, inference_report, training_json, training_report};
pub use subject::{Subject, SubjectKind, Transformer};
pub use techniques::{Technique, techniques};
pub use training::{
    Optimizer, Parallelism, Precision, Training, TrainingRequest, pipeline_efficiency, training,
};

use crate::gguf::GgufError;
use crate::gguf::card::CardError;
use crate::placement::PlanError;

/// Bytes, and where they come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Figure {
    pub name: &'static str,
    /// With the numbers of this model in it, where they are few.
    pub formula: String,
    pub bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum EstimateError {
    #[error(transparent)]
    Card(#[from] CardError),

    #[error(transparent)]
    Model(#[from] GgufError),

    #[error(transparent)]
    Plan(#[from] PlanError),

    /// A key of a card that only this module reads.
    #[error("card: {0}")]
    Key(String),

    /// A flag whose value cannot be.
    #[error("--{flag} is {value}; {why}")]
    Setting {
        flag: &'static str,
        value: u64,
        why: String,
    },

    #[error("{what} would take more than 2^64 bytes; give smaller sizes or a smaller --batch")]
    TooLarge { what: &'static str },
}

impl Figure {
    fn new(
        name: &'static str,
        formula: impl Into<String>,
        bytes: u128,
    ) -> Result<Figure, EstimateError> {
        Ok(Figure {
            name,
            formula: formula.into(),
            bytes: in_64_bits(name, bytes)?,
        })
    }
}

fn in_64_bits(what: &'static str, bytes: u128) -> Result<u64, EstimateError> {
    u64::try_from(bytes).map_err(|_| EstimateError::TooLarge { what })
}

/// The sum of figures.
fn total(figures: &[Figure]) -> Result<u64, EstimateError> {
    let sum = figures.iter().map(|figure| u128::from(figure.bytes)).sum();
    in_64_bits("all of it", sum)
}

/// A size as estimates print it: in MiB up to 10 GiB, so that what models of nearly the same size take can be compared.
pub fn binary_size(bytes: u64) -> String {
    const KIB: f64 = 1024.0;
    const MIB: f64 = KIB * KIB;
    const GIB: f64 = MIB * KIB;
    let size = bytes as f64;
    if size >= 10.0 * GIB {
        format!("{:.1} GiB", size / GIB)
    } else if size >= 0.1 * MIB {
        format!("{:.1} MiB", size / MIB)
    } else if size >= KIB {
        format!("{:.1} KiB", size / KIB)
    } else {
        format!("{bytes} B")
    }
}
