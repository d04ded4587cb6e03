//! The tensors that the hyper-parameters ask for, held against the file's table before anything is allocated: a file
//! that cannot be this model is refused at once, and not after tens of gigabytes were read.

use super::matrix::ModelError;
use crate::gguf::{Gguf, Hyperparameters};

/// # Errors
/// Names the first tensor that is missing or has another shape.
pub(super) fn check(gguf: &Gguf, shape: &Hyperparameters) -> Result<(), ModelError> {
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
    let layers = shape.head_count.iter().zip(&shape.head_count_kv);
    for (layer, ((&heads, &kv_heads), &inner)) in layers.zip(&shape.feed_forward_length).enumerate()
    {
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
        }
        for name in ["attn_norm", "ffn_norm"] {
            check(format!("blk.{layer}.{name}.weight"), &[hidden])?;
        }
    }
    Ok(())
}
