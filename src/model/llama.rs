//! The llama family: llama 2 and 3, Mistral, SmolLM.
//!
//! Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023), with grouped-query attention
//! (Ainslie et al., 2023), rotary positions (Su et al., 2021), SwiGLU (Shazeer, 2020) and pre-normalisation by RMSNorm
//! (Zhang and Sennrich, 2019). Tensor names and the interleaved rotary convention are those of llama.cpp's conversion.
//!
//! Shapes: `width` tokens in a step; values are f32, `[width, columns]`; a weight matrix is `[rows, columns]` and maps
//! `[width, columns]` to `[width, rows]`.

use super::matrix::{Matrix, ModelError, Tensors};
use super::step::{Compute, Input, LayerCache, Norm, Step, Values};
use super::{Batch, Model, StepError};
use crate::gguf::{Gguf, Hyperparameters, RopeScaling};
use crate::kernels::{AttentionShape, RopePairs, RopeTable};
use crate::kv_cache::KvStore;
use crate::memory::Region;
use crate::weights::Weights;

struct Layer {
    attention_norm: Values,
    query: Matrix,
    key: Matrix,
    value: Matrix,
    output: Matrix,
    feed_forward_norm: Values,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

/// A loaded model of the family.
pub(super) struct Llama {
    layers: Vec<Layer>,
    output_norm: Values,
    /// The token embedding itself where the head is tied.
    head: Matrix,
    embedding: Matrix,
    rope: RopeTable,
    rms_epsilon: f32,
    weights: Weights,
    kv: KvStore,
    compute: Compute,
}

impl Llama {
    /// Checks that every tensor is there in the shape that the hyper-parameters ask for.
    ///
    /// # Errors
    /// Names the tensor that is missing or has another shape.
    pub(super) fn new(
        gguf: &Gguf,
        hyperparameters: &Hyperparameters,
        weights: Weights,
        kv_region: Region,
        mut compute: Compute,
    ) -> Result<Llama, ModelError> {
        let small = weights.lease_small();
        let mut tensors = Tensors::new(gguf, weights.plan(), small, &mut compute);
        let hidden = u64::from(hyperparameters.embedding_length);
        let vocabulary = u64::from(hyperparameters.vocabulary_size);
        let key_length = u64::from(hyperparameters.key_length);
        let value_length = u64::from(hyperparameters.value_length);
        let mut layers = Vec::new();
        let mut kv_shapes = Vec::new();
        for layer in 0..hyperparameters.layers as usize {
            let heads = u64::from(hyperparameters.head_count[layer]);
            let kv_heads = u64::from(hyperparameters.head_count_kv[layer]);
            let inner = u64::from(hyperparameters.feed_forward_length[layer]);
            let name = |name: &str| format!("blk.{layer}.{name}");
            layers.push(Layer {
                attention_norm: tensors.vector(&name("attn_norm.weight"), hidden)?,
                query: tensors.linear(&name("attn_q"), heads * key_length, hidden)?,
                key: tensors.linear(&name("attn_k"), kv_heads * key_length, hidden)?,
                value: tensors.linear(&name("attn_v"), kv_heads * value_length, hidden)?,
                output: tensors.linear(&name("attn_output"), hidden, heads * value_length)?,
                feed_forward_norm: tensors.vector(&name("ffn_norm.weight"), hidden)?,
                gate: tensors.linear(&name("ffn_gate"), inner, hidden)?,
                up: tensors.linear(&name("ffn_up"), inner, hidden)?,
                down: tensors.linear(&name("ffn_down"), hidden, inner)?,
            });
            kv_shapes.push(AttentionShape {
                heads: heads as usize,
                kv_heads: kv_heads as usize,
                key_length: key_length as usize,
                value_length: value_length as usize,
                window: None,
            });
        }
        let embedding = tensors.matrix("token_embd.weight", vocabulary, hidden)?;
        let head = match hyperparameters.tied_head {
            true => embedding.clone(),
            false => tensors.matrix("output.weight", vocabulary, hidden)?,
        };
        let output_norm = tensors.vector("output_norm.weight", hidden)?;
        let factors = tensors.optional_floats(
            "rope_freqs.weight",
            u64::from(hyperparameters.rope_dimensions / 2),
        )?;
        drop(tensors);
        let rope = RopeTable::new(
            hyperparameters.rope_dimensions as usize,
            hyperparameters.rope_base,
            match hyperparameters.rope_scaling {
                RopeScaling::None => 1.0,
                RopeScaling::Linear { factor } => factor,
            },
            factors.as_deref(),
        );
        let pages = weights.plan().kv.pages as usize;
        let kv_type = weights.plan().kv.kind;
        Ok(Llama {
            layers,
            output_norm,
            head,
            embedding,
            rope,
            rms_epsilon: hyperparameters.rms_epsilon,
            weights,
            kv: KvStore::new(kv_region, kv_type, kv_shapes, pages),
            compute,
        })
    }
}

impl Model for Llama {
    fn vocabulary_size(&self) -> usize {
        self.head.rows
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
        let mut step = Step::begin(compute, weights, batch, &self.rope, cancelled)?;
        let width = step.width();
        let hidden = self.embedding.columns;

        // Token ids to vectors.
        let x = step.embed(&self.embedding)?;
        let h = step.values(width, hidden)?;
        let projected = step.values(width, hidden)?;
        let Buffers {
            query,
            key,
            value,
            attended,
            gate,
            up,
        } = Buffers::for_all(layers, &mut step)?;
        // What the layer before adds to x: it is added where the sum is normalised.
        let mut delta = None;

        for (index, layer) in layers.iter().enumerate() {
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
            let cache = &mut LayerCache { kv, layer: index };

            // Attention: a token looks at itself and at what came before it in its sequence.
            step.add_and_normalise(&x, delta, &norm(&layer.attention_norm), &h)?;
            let products = [
                (&layer.query, &query),
                (&layer.key, &key),
                (&layer.value, &value),
            ];
            step.multiply(&input(&h, &layer.query), products)?;
            let pairs = RopePairs::Interleaved;
            step.rope(&query, shape.heads, shape.key_length, pairs)?;
            step.rope(&key, shape.kv_heads, shape.key_length, pairs)?;
            step.store(cache, &key, &value)?;
            step.attend(cache, &query, &attended)?;
            let products = [(&layer.output, &projected)];
            step.multiply(&input(&attended, &layer.output), products)?;

            // Feed-forward: down(silu(gate x) * up x).
            let delta_of_attention = Some(&projected);
            step.add_and_normalise(&x, delta_of_attention, &norm(&layer.feed_forward_norm), &h)?;
            let products = [(&layer.gate, &gate), (&layer.up, &up)];
            step.multiply(&input(&h, &layer.gate), products)?;
            step.silu_mul(&gate, &up, width * layer.gate.rows)?;
            step.multiply(&input(&gate, &layer.down), [(&layer.down, &projected)])?;
            delta = Some(&projected);
        }

        // Logits, for the tokens whose successor is wanted.
        let wanted = step.wanted();
        let mut logits = Vec::new();
        if wanted == 0 {
            step.pass_by(&self.head)?;
        } else {
            let x = step.last_rows(&x, hidden)?;
            let projected = match delta {
                Some(_) => Some(step.last_rows(&projected, hidden)?),
                None => None,
            };
            let h = step.values(wanted, hidden)?;
            let norm = Norm {
                weight: &self.output_norm,
                epsilon,
                rows: wanted,
                columns: hidden,
            };
            step.add_and_normalise(&x, projected.as_ref(), &norm, &h)?;
            let input = Input {
                values: &h,
                rows: wanted,
                columns: self.head.columns,
            };
            logits = step.logits(&self.head, &input)?;
        }
        step.finish()?;
        Ok(logits)
    }
}

/// What the products of a layer write, `[width, rows]` each: room for the largest layer, used by all of them in turn.
struct Buffers {
    query: Values,
    key: Values,
    value: Values,
    attended: Values,
    gate: Values,
    up: Values,
}

impl Buffers {
    fn for_all(layers: &[Layer], step: &mut Step<'_>) -> Result<Buffers, StepError> {
        let width = step.width();
        let mut room = |columns: fn(&Layer) -> usize| {
            step.values(width, layers.iter().map(columns).max().unwrap_or(0))
        };
        Ok(Buffers {
            query: room(|layer| layer.query.rows)?,
            key: room(|layer| layer.key.rows)?,
            value: room(|layer| layer.value.rows)?,
            attended: room(|layer| layer.output.columns)?,
            gate: room(|layer| layer.gate.rows)?,
            up: room(|layer| layer.up.rows)?,
        })
    }
}
