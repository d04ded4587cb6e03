//! The tensors that the hyper-parameters ask for, held against the file's table before anything is allocated: a file
//! that cannot be this model is refused at once, and not after tens of gigabytes were read.

use super::matrix::ModelError;
use crate::gguf::{Architecture, Gguf, Hyperparameters, LayerSizes, RopeScaling};

/// # Errors
/// Names the first tensor that is missing or has another shape.
pub(super) fn check(
    gguf: &Gguf,
    architecture: Architecture,
    shape: &Hyperparameters,
) -> Result<(), ModelError> {
    let check = |name: String, dimensions: &[u64]| match gguf.tensor(&name) {
        None => Err(ModelError::Missing(name)),
        Some((_, tensor)) if tensor.dimensions == dimensions => Ok(()),
        Some((_, tensor)) => Err(ModelError::Shape {
            found: tensor.dimensions.clone(),
            expected: dimensions.to_vec(),
            name,
        }),
    };
    let hidden = u64::from(shape.embedding_length);
    let (key, value) = (u64::from(shape.key_length), u64::from(shape.value_length));
    check("output_norm.weight".to_owned(), &[hidden])?;
    let pairs = u64::from(shape.rope_dimensions / 2);
    match shape.rope_scaling {
        RopeScaling::LongRope { .. } => {
            for length in ["long", "short"] {
                check(format!("rope_factors_{length}.weight"), &[pairs])?;
            }
        }
        _ if gguf.tensor("rope_freqs.weight").is_some() => {
            check("rope_freqs.weight".to_owned(), &[pairs])?;
        }
        _ => {}
    }
    let layers = shape.head_count.iter().zip(&shape.head_count_kv);
    for (layer, ((&heads, &kv_heads), &inner)) in layers.zip(&shape.feed_forward_length).enumerate()
    {
        let sizes = LayerSizes {
            embedding_length: shape.embedding_length,
            head_count: heads,
            head_count_kv: kv_heads,
            key_length: shape.key_length,
            value_length: shape.value_length,
        };
        let (heads, kv_heads, inner) = (u64::from(heads), u64::from(kv_heads), u64::from(inner));
        for (name, columns, rows) in [
            ("attn_q", hidden, heads * key),
            ("attn_k", hidden, kv_heads * key),
            ("attn_v", hidden, kv_heads * value),
            ("attn_output", heads * value, hidden),
            ("ffn_gate", hidden, inner),
            ("ffn_up", hidden, inner),
            ("ffn_down", inner, hidden),
        ] {
            check(format!("blk.{layer}.{name}.weight"), &[columns, rows])?;
            let bias = format!("blk.{layer}.{name}.bias");
            if gguf.tensor(&bias).is_some() {
                check(bias, &[rows])?;
            }
        }
        for vector in architecture.layer_vectors() {
            let name = format!("blk.{layer}.{}", vector.name);
            check(name, &[vector.elements(&sizes)])?;
        }
    }
    Ok(())
}
