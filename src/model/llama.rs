//! The llama family: llama 2 and 3, Mistral, SmolLM, and Qwen 2 and 3.
//!
//! Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023), with grouped-query attention
//! (Ainslie et al., 2023), rotary positions (Su et al., 2021), SwiGLU (Shazeer, 2020) and pre-normalisation by RMSNorm
//! (Zhang and Sennrich, 2019). Qwen 2 (Yang et al., "Qwen2 Technical Report", 2024) adds biases to queries, keys and
//! values; Qwen 3 ("Qwen3 Technical Report", 2025) has none, and an RMSNorm of each head of queries and keys. Tensor names
//! and rotary conventions are those of llama.cpp's conversion.
//!
//! Shapes: `width` tokens in a step; values are f32, `[width, columns]`; a weight matrix is `[rows, columns]` and maps
//! `[width, columns]` to `[width, rows]`.

use super::dense::{Buffers, Ends, LayerMatrices, attention_shape};
use super::matrix::{Matrix, ModelError, Tensors};
use super::rope::rope_table;
use super::step::{Compute, Input, LayerCache, Norm, Rotation, Step, Values};
use super::{Batch, Model, StepError};
use crate::gguf::{Architecture, Gguf, Hyperparameters};
use crate::kernels::{RopePairs, RopeTable};
use crate::kv_cache::KvStore;
use crate::memory::Region;
use crate::weights::Weights;

struct Layer {
    attention_norm: Values,
    /// Of each head of queries and keys, `[key length]`: Qwen 3.
    head_norms: Option<[Values; 2]>,
    feed_forward_norm: Values,
    matrices: LayerMatrices,
}

/// A loaded model of the family.
pub(super) struct Llama {
    layers: Vec<Layer>,
    ends: Ends,
    rope: RopeTable,
    pairs: RopePairs,
    rms_epsilon: f32,
    weights: Weights,
    kv: KvStore,
    compute: Compute,
}

impl Llama {
    /// Brings norms, biases and rope factors to where steps are computed.
    ///
    /// # Errors
    /// Names the tensor that is missing or has another shape.
    pub(super) fn new(
        gguf: &Gguf,
        architecture: Architecture,
        hyperparameters: &Hyperparameters,
        weights: Weights,
        kv_region: Region,
        mut compute: Compute,
    ) -> Result<Llama, ModelError> {
        let small = weights.lease_small();
        let mut tensors = Tensors::new(gguf, weights.plan(), small, &mut compute);
        let hidden = u64::from(hyperparameters.embedding_length);
        let key_length = u64::from(hyperparameters.key_length);
        let mut layers = Vec::new();
        let mut kv_shapes = Vec::new();
        for layer in 0..hyperparameters.layers as usize {
            let name = |name: &str| format!("blk.{layer}.{name}.weight");
            let head_norms = match architecture {
                Architecture::Qwen3 => Some([
                    tensors.vector(&name("attn_q_norm"), key_length)?,
                    tensors.vector(&name("attn_k_norm"), key_length)?,
                ]),
                _ => None,
            };
            layers.push(Layer {
                attention_norm: tensors.vector(&name("attn_norm"), hidden)?,
                head_norms,
                feed_forward_norm: tensors.vector(&name("ffn_norm"), hidden)?,
                matrices: LayerMatrices::load(&mut tensors, hyperparameters, layer)?,
            });
            kv_shapes.push(attention_shape(hyperparameters, layer, None));
        }
        let ends = Ends::load(&mut tensors, hyperparameters)?;
        let rope = rope_table(&tensors, hyperparameters, weights.plan().context)?;
        drop(tensors);
        let kv = KvStore::new(kv_region, &weights.plan().kv, kv_shapes);
        Ok(Llama {
            layers,
            ends,
            rope,
            pairs: match architecture {
                Architecture::Llama => RopePairs::Interleaved,
                _ => RopePairs::Halves,
            },
            rms_epsilon: hyperparameters.rms_epsilon,
            kv,
            weights,
            compute,
        })
    }
}

impl Model for Llama {
    fn vocabulary_size(&self) -> usize {
        self.ends.head.rows
    }

    fn forward(
        &mut self,
        batch: &Batch<'_>,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let Llama {
            weights,
            kv,
            compute,
            layers,
            ..
        } = self;
        let epsilon = self.rms_epsilon;
        let tables = std::slice::from_ref(&self.rope);
        let mut step = Step::begin(compute, weights, batch, tables, cancelled)?;
        let width = step.width();
        let hidden = self.ends.embedding.columns;

        // Token ids to vectors.
        let x = step.embed(&self.ends.embedding)?;
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
                table: 0,
                pairs: self.pairs,
                heads,
                length: shape.key_length,
            };
            let cache = &mut LayerCache { kv, layer: index };

            // Attention: a token looks at itself and at what came before it in its sequence.
            step.add_and_normalise(&x, delta, &norm(&layer.attention_norm), &h)?;
            let products = [
                (&matrices.query, &query),
                (&matrices.key, &key),
                (&matrices.value, &value),
            ];
            step.multiply(&input(&h, &matrices.query), products)?;
            if let Some([of_queries, of_keys]) = &layer.head_norms {
                step.normalise(&query, &head_norm(of_queries, shape.heads))?;
                step.normalise(&key, &head_norm(of_keys, shape.kv_heads))?;
            }
            step.rope(&query, &rotation(shape.heads))?;
            step.rope(&key, &rotation(shape.kv_heads))?;
            step.store(cache, &key, &value)?;
            step.attend(cache, shape.scale(), &query, &attended)?;
            let products = [(&matrices.output, &projected)];
            step.multiply(&input(&attended, &matrices.output), products)?;

            // Feed-forward: down(silu(gate x) * up x).
            let delta_of_attention = Some(&projected);
            step.add_and_normalise(&x, delta_of_attention, &norm(&layer.feed_forward_norm), &h)?;
            let products = [(&matrices.gate, &gate), (&matrices.up, &up)];
            step.multiply(&input(&h, &matrices.gate), products)?;
            step.silu_mul(&gate, &up, width * matrices.gate.rows)?;
            let products = [(&matrices.down, &projected)];
            step.multiply(&input(&gate, &matrices.down), products)?;
            delta = Some(&projected);
        }

        let logits = self.ends.logits(&mut step, &x, delta, epsilon)?;
        step.finish()?;
        Ok(logits)
    }
}
