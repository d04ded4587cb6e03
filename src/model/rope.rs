//! From hyper-parameters and tensors to tables of rope angles.

use super::matrix::{ModelError, Tensors};
use crate::gguf::{Hyperparameters, RopeScaling};
use crate::kernels::{RopeSettings, RopeTable};

/// The table of layers that see everything, for sequences of at most `context` tokens.
///
/// # Errors
/// Names the tensor of factors that is missing, has another length or holds what divides no frequency.
pub(super) fn rope_table(
    tensors: &Tensors<'_>,
    shape: &Hyperparameters,
    context: u32,
) -> Result<RopeTable, ModelError> {
    let name = factors_name(&shape.rope_scaling, context);
    let pairs = u64::from(shape.rope_dimensions / 2);
    let factors = match tensors.optional_floats(name, pairs)? {
        None if matches!(shape.rope_scaling, RopeScaling::LongRope { .. }) => {
            return Err(ModelError::Missing(name.to_owned()));
        }
        factors => factors,
    };
    let mut all = factors.iter().flatten();
    if let Some(&value) = all.find(|factor| !factor.is_finite() || **factor <= 0.0) {
        return Err(ModelError::RopeFactor {
            name: name.to_owned(),
            value,
        });
    }
    Ok(RopeTable::new(&RopeSettings {
        dimensions: shape.rope_dimensions as usize,
        base: shape.rope_base,
        scaling: shape.rope_scaling,
        magnitude: shape.rope_magnitude,
        factors: factors.as_deref(),
    }))
}

/// The tensor with what frequencies are divided by.
fn factors_name(scaling: &RopeScaling, context: u32) -> &'static str {
    match scaling {
        RopeScaling::LongRope {
            original_context_length,
            ..
        } if context > *original_context_length => "rope_factors_long.weight",
        RopeScaling::LongRope { .. } => "rope_factors_short.weight",
        _ => "rope_freqs.weight",
    }
}
