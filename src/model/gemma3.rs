//! Gemma 3, text only.
//!
//! Gemma Team, "Gemma 3 Technical Report" (2025): a transformer as `llama.rs` has it, with norms before and after each
//! half of a layer, a norm of each head of queries and keys, GeGLU, embeddings scaled by the root of their length, and five
//! layers that see a sliding window for each that sees everything. Those have a rope base of their own. Tensor names are
//! those of llama.cpp's conversion, which stores 1 + w for the norms' weights.
//!
//! Shapes: `width` tokens in a step; values are f32, `[width, columns]`; a weight matrix is `[rows, columns]` and maps
//! `[width, columns]` to `[width, rows]`.

use super::dense::{Buffers, Ends, LayerMatrices, attention_shape};
use super::matrix::{Matrix, ModelError, Tensors};
use super::rope::rope_table;
use super::step::{Compute, Input, LayerCache, Norm, Rotation, Step, Values};
use super::{Batch, Model, StepError};
use crate::gguf::{Gguf, Hyperparameters, RopeScaling};
use crate::kernels::{RopePairs, RopeSettings, RopeTable};
use crate::kv_cache::KvStore;
use crate::memory::Region;
use crate::weights::Weights;

/// The layers of the model of 27 billion weights, whose queries are scaled by what its embedding has for each head, and not
/// by the length of a head.
const LAYERS_OF_27B: u32 = 62;

struct Layer {
    attention_norm: Values,
    /// Of each head, `[key length]`.
    query_norm: Values,
    key_norm: Values,
    post_attention_norm: Values,
    feed_forward_norm: Values,
    post_feed_forward_norm: Values,
    matrices: LayerMatrices,
    /// Which of the model's rope tables.
    table: usize,
}

/// A loaded model.
pub(super) struct Gemma3 {
    layers: Vec<Layer>,
    ends: Ends,
    /// Of layers that see everything, then of those with a window.
    tables: Vec<RopeTable>,
    /// What products of queries and keys are scaled by.
    scale: f32,
    rms_epsilon: f32,
    weights: Weights,
    kv: KvStore,
    compute: Compute,
}

impl Gemma3 {
    /// Brings norms and rope factors to where steps are computed.
    ///
    /// # Errors
    /// Names the tensor that is missing or has another shape.
    pub(super) fn new(
        gguf: &Gguf,
        hyperparameters: &Hyperparameters,
        weights: Weights,
        kv_region: Region,
        mut compute: Compute,
    ) -> Result<Gemma3, ModelError> {
        let small = weights.lease_small();
        let mut tensors = Tensors::new(gguf, weights.plan(), small, &mut compute);
        let hidden = u64::from(hyperparameters.embedding_length);
        let key_length = u64::from(hyperparameters.key_length);
        let mut layers = Vec::new();
        let mut kv_shapes = Vec::new();
        for layer in 0..hyperparameters.layers as usize {
            let window = hyperparameters
                .window
                .and_then(|window| window.of_layer(layer));
            let mut norm =
                |name: &str, length| tensors.vector(&format!("blk.{layer}.{name}.weight"), length);
            layers.push(Layer {
                attention_norm: norm("attn_norm", hidden)?,
                query_norm: norm("attn_q_norm", key_length)?,
                key_norm: norm("attn_k_norm", key_length)?,
                post_attention_norm: norm("post_attention_norm", hidden)?,
                feed_forward_norm: norm("ffn_norm", hidden)?,
                post_feed_forward_norm: norm("post_ffw_norm", hidden)?,
                matrices: LayerMatrices::load(&mut tensors, hyperparameters, layer)?,
                table: usize::from(window.is_some()),
            });
            kv_shapes.push(attention_shape(hyperparameters, layer, window));
        }
        let ends = Ends::load(&mut tensors, hyperparameters)?;
        let mut tables = vec![rope_table(
            &tensors,
            hyperparameters,
            weights.plan().context,
        )?];
        drop(tensors);
        if let Some(window) = hyperparameters.window {
            tables.push(RopeTable::new(&RopeSettings {
                dimensions: hyperparameters.rope_dimensions as usize,
                base: window.rope_base,
                scaling: RopeScaling::None,
                magnitude: 1.0,
                factors: None,
            }));
        }
        let kv = KvStore::new(kv_region, &weights.plan().kv, kv_shapes);
        Ok(Gemma3 {
            layers,
            ends,
            tables,
            scale: scale(hyperparameters),
            rms_epsilon: hyperparameters.rms_epsilon,
            kv,
            weights,
            compute,
        })
    }
}

/// Finite: no length is zero, and a file may have more heads than elements of an embedding.
fn scale(hyperparameters: &Hyperparameters) -> f32 {
    let heads = hyperparameters.head_count.first().copied().unwrap_or(1);
    let length = match hyperparameters.layers {
        LAYERS_OF_27B => hyperparameters.embedding_length as f32 / heads as f32,
        _ => hyperparameters.key_length as f32,
    };
    1.0 / length.sqrt()
}

impl Model for Gemma3 {
    fn vocabulary_size(&self) -> usize {
        self.ends.head.rows
    }

    fn forward(
        &mut self,
        batch: &Batch<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let Gemma3 {
            weights,
            kv,
            compute,
            layers,
            ..
        } = self;
        let (scale, epsilon) = (self.scale, self.rms_epsilon);
        let mut step = Step::begin(compute, weights, batch, &self.tables, cancelled)?;
        let width = step.width();
        let hidden = self.ends.embedding.columns;

        // Token ids to vectors.
        let x = step.embed(&self.ends.embedding)?;
        step.scale(&x, (hidden as f32).sqrt(), width * hidden)?;
        let h = step.values(width, hidden)?;
        let projected = step.values(width, hidden)?;
        let Buffers {
            query,
            key,
            value,
            attended,
            gate,
            up,
        } = Buffers::for_all(layers.iter().map(|layer| &layer.matrices), &mut step)?;
        // What the layer before adds to x: it is added where the sum is normalised.
        let mut delta = None;

        for (index, layer) in layers.iter().enumerate() {
            let matrices = &layer.matrices;
            let input = |values, matrix: &Matrix| Input {
                values,
                rows: width,
                columns: matrix.columns,
            };
            let norm = |weight| Norm {
                weight,
                epsilon,
                rows: width,
                columns: hidden,
            };
            let shape = *kv.shape(index);
            let head_norm = |weight, heads| Norm {
                weight,
                epsilon,
                rows: width * heads,
                columns: shape.key_length,
            };
            let rotation = |heads| Rotation {
                table: layer.table,
                pairs: RopePairs::Halves,
                heads,
                length: shape.key_length,
            };
            let cache = &mut LayerCache { kv, layer: index };

            // Attention: a token looks at itself and at what came before it in its sequence, or at the last of that.
            step.add_and_normalise(&x, delta, &norm(&layer.attention_norm), &h)?;
            let products = [
                (&matrices.query, &query),
                (&matrices.key, &key),
                (&matrices.value, &value),
            ];
            step.multiply(&input(&h, &matrices.query), products)?;
            step.normalise(&query, &head_norm(&layer.query_norm, shape.heads))?;
            step.normalise(&key, &head_norm(&layer.key_norm, shape.kv_heads))?;
            step.rope(&query, &rotation(shape.heads))?;
            step.rope(&key, &rotation(shape.kv_heads))?;
            step.store(cache, &key, &value)?;
            step.attend(cache, scale, &query, &attended)?;
            let products = [(&matrices.output, &projected)];
            step.multiply(&input(&attended, &matrices.output), products)?;
            step.normalise(&projected, &norm(&layer.post_attention_norm))?;

            // Feed-forward: down(gelu(gate x) * up x).
            let delta_of_attention = Some(&projected);
            step.add_and_normalise(&x, delta_of_attention, &norm(&layer.feed_forward_norm), &h)?;
            let products = [(&matrices.gate, &gate), (&matrices.up, &up)];
            step.multiply(&input(&h, &matrices.gate), products)?;
            step.gelu_mul(&gate, &up, width * matrices.gate.rows)?;
            let products = [(&matrices.down, &projected)];
            step.multiply(&input(&gate, &matrices.down), products)?;
            step.normalise(&projected, &norm(&layer.post_feed_forward_norm))?;
            delta = Some(&projected);
        }

        let logits = self.ends.logits(&mut step, &x, delta, epsilon)?;
        step.finish()?;
        Ok(logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::card::ShapeCard;

    /// 5376 elements of an embedding, and 32 heads of 128 each.
    #[test]
    fn queries_are_scaled_by_the_share_of_a_head_in_the_embedding_in_the_model_of_27b_alone() {
        let card = ShapeCard::parse(include_str!("../../models/gemma-3-27b.toml")).unwrap();
        let mut model = Hyperparameters::from_gguf(&card.index()).unwrap();
        assert_eq!(scale(&model), 1.0 / 168f32.sqrt());
        for layers in [26, 34, 48] {
            model.layers = layers;
            assert_eq!(scale(&model), 1.0 / 128f32.sqrt(), "{layers} layers");
        }
        // No published model, but a file may say so.
        model.layers = LAYERS_OF_27B;
        model.embedding_length = 16;
        assert_eq!(scale(&model), 1.0 / 0.5f32.sqrt());
    }
}
