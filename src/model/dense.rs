//! What the layers of dense models have in common: seven matrices, room for what these give, and the way from the last
//! layer to logits.

use super::StepError;
use super::matrix::{Matrix, ModelError, Tensors};
use super::step::{Input, Norm, Step, Values};
use crate::gguf::Hyperparameters;
use crate::kernels::AttentionShape;

/// The matrices of a layer, `[rows, columns]`. Those of the attention half have a bias where the file has one.
pub(super) struct LayerMatrices {
    pub(super) query: Matrix,
    pub(super) key: Matrix,
    pub(super) value: Matrix,
    pub(super) output: Matrix,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

impl LayerMatrices {
    /// Those of layer `layer`.
    ///
    /// # Errors
    /// Names the tensor that is missing or has another shape.
    pub(super) fn load(
        tensors: &mut Tensors<'_>,
        shape: &Hyperparameters,
        layer: usize,
    ) -> Result<LayerMatrices, ModelError> {
        let hidden = u64::from(shape.embedding_length);
        let heads = u64::from(shape.head_count[layer]);
        let kv_heads = u64::from(shape.head_count_kv[layer]);
        let inner = u64::from(shape.feed_forward_length[layer]);
        let (key, value) = (u64::from(shape.key_length), u64::from(shape.value_length));
        let mut linear = |name: &str, rows, columns| {
            tensors.linear(&format!("blk.{layer}.{name}"), rows, columns)
        };
        Ok(LayerMatrices {
            query: linear("attn_q", heads * key, hidden)?,
            key: linear("attn_k", kv_heads * key, hidden)?,
            value: linear("attn_v", kv_heads * value, hidden)?,
            output: linear("attn_output", hidden, heads * value)?,
            gate: linear("ffn_gate", inner, hidden)?,
            up: linear("ffn_up", inner, hidden)?,
            down: linear("ffn_down", hidden, inner)?,
        })
    }
}

/// The attention of layer `layer`, over all positions or the last `window` of them.
pub(super) fn attention_shape(
    shape: &Hyperparameters,
    layer: usize,
    window: Option<u32>,
) -> AttentionShape {
    AttentionShape {
        heads: shape.head_count[layer] as usize,
        kv_heads: shape.head_count_kv[layer] as usize,
        key_length: shape.key_length as usize,
        value_length: shape.value_length as usize,
        window,
    }
}

/// The embedding and the head, which is the embedding itself where it is tied.
pub(super) struct Ends {
    pub(super) embedding: Matrix,
    pub(super) head: Matrix,
    pub(super) output_norm: Values,
}

impl Ends {
    pub(super) fn load(
        tensors: &mut Tensors<'_>,
        shape: &Hyperparameters,
    ) -> Result<Ends, ModelError> {
        let hidden = u64::from(shape.embedding_length);
        let vocabulary = u64::from(shape.vocabulary_size);
        let embedding = tensors.matrix("token_embd.weight", vocabulary, hidden)?;
        let head = match shape.tied_head {
            true => embedding.clone(),
            false => tensors.matrix("output.weight", vocabulary, hidden)?,
        };
        Ok(Ends {
            embedding,
            head,
            output_norm: tensors.vector("output_norm.weight", hidden)?,
        })
    }

    /// Logits, for the tokens whose successor is wanted: of x + `delta`, both `[width, columns]`.
    pub(super) fn logits(
        &self,
        step: &mut Step<'_>,
        x: &Values,
        delta: Option<&Values>,
        epsilon: f32,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let wanted = step.wanted();
        if wanted == 0 {
            step.pass_by(&self.head)?;
            return Ok(Vec::new());
        }
        let columns = self.head.columns;
        let x = step.last_rows(x, columns)?;
        let delta = match delta {
            Some(delta) => Some(step.last_rows(delta, columns)?),
            None => None,
        };
        let h = step.values(wanted, columns)?;
        let norm = Norm {
            weight: &self.output_norm,
            epsilon,
            rows: wanted,
            columns,
        };
        step.add_and_normalise(&x, delta.as_ref(), &norm, &h)?;
        let input = Input {
            values: &h,
            rows: wanted,
            columns,
        };
        step.logits(&self.head, &input)
    }
}

/// What the products of a layer write, `[width, rows]` each: room for the largest layer, used by all of them in turn.
/// Attention is over where the feed-forward begins, so `gate` is the room of `query`, and `up` that of `attended`.
pub(super) struct Buffers {
    pub(super) query: Values,
    pub(super) key: Values,
    pub(super) value: Values,
    pub(super) attended: Values,
    pub(super) gate: Values,
    pub(super) up: Values,
}

impl Buffers {
    pub(super) fn for_all<'l>(
        layers: impl Iterator<Item = &'l LayerMatrices> + Clone,
        step: &mut Step<'_>,
    ) -> Result<Buffers, StepError> {
        let width = step.width();
        let mut room = |columns: fn(&LayerMatrices) -> usize| {
            step.values(width, layers.clone().map(columns).max().unwrap_or(0))
        };
        let query_or_gate = room(|layer| layer.query.rows.max(layer.gate.rows))?;
        let attended_or_up = room(|layer| layer.output.columns.max(layer.up.rows))?;
        Ok(Buffers {
            key: room(|layer| layer.key.rows)?,
            value: room(|layer| layer.value.rows)?,
            query: query_or_gate.clone(),
            gate: query_or_gate,
            attended: attended_or_up.clone(),
            up: attended_or_up,
        })
    }
}
