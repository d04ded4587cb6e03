//! The llama family: llama 2 and 3, Mistral, SmolLM.
//!
//! Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023), with grouped-query attention
//! (Ainslie et al., 2023), rotary positions (Su et al., 2021), SwiGLU (Shazeer, 2020) and pre-normalisation by RMSNorm
//! (Zhang and Sennrich, 2019). Tensor names and the interleaved rotary convention are those of llama.cpp's conversion.
//!
//! Shapes: `width` tokens in a step; activations are f32 tensors `[width, columns]`; a weight matrix is
//! `[rows, columns]` and maps `[width, columns]` to `[width, rows]`.

use super::activations::{add_and_normalise, with_values, with_values_mut, zeros};
use super::matrix::{Matrix, ModelError, Tensors, dequantise, multiply, pass_by};
use super::{Batch, Model, Run, StepError};
use crate::gguf::{Gguf, Hyperparameters, RopeScaling};
use crate::kernels::{
    Activations, AttentionRun, AttentionShape, ComputePool, PAGE_TOKENS, PageView, RopePairs,
    RopeTable, attention, rope, silu_mul, store_kv,
};
use crate::kv_cache::KvStore;
use crate::memory::Region;
use crate::weights::Weights;
use candle_core::{Device, Tensor};

struct Layer {
    attention_norm: Tensor,
    query: Matrix,
    key: Matrix,
    value: Matrix,
    output: Matrix,
    feed_forward_norm: Tensor,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

/// A loaded model of the family.
pub(super) struct Llama {
    layers: Vec<Layer>,
    output_norm: Tensor,
    /// The token embedding itself where the head is tied.
    head: Matrix,
    embedding: Matrix,
    rope: RopeTable,
    rms_epsilon: f32,
    weights: Weights,
    kv: KvStore,
    pool: ComputePool,
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
        pool: ComputePool,
    ) -> Result<Llama, ModelError> {
        let tensors = Tensors::new(gguf, weights.plan());
        let small = weights.lease_small()?;
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
            let norm = |name: &str| tensors.vector(&small, &format!("blk.{layer}.{name}"), hidden);
            let matrix = |name: &str, rows, columns| {
                let bias =
                    tensors.optional_floats(&small, &format!("blk.{layer}.{name}.bias"), rows)?;
                tensors.matrix(&format!("blk.{layer}.{name}.weight"), rows, columns, bias)
            };
            layers.push(Layer {
                attention_norm: norm("attn_norm.weight")?,
                query: matrix("attn_q", heads * key_length, hidden)?,
                key: matrix("attn_k", kv_heads * key_length, hidden)?,
                value: matrix("attn_v", kv_heads * value_length, hidden)?,
                output: matrix("attn_output", hidden, heads * value_length)?,
                feed_forward_norm: norm("ffn_norm.weight")?,
                gate: matrix("ffn_gate", inner, hidden)?,
                up: matrix("ffn_up", inner, hidden)?,
                down: matrix("ffn_down", hidden, inner)?,
            });
            kv_shapes.push(AttentionShape {
                heads: heads as usize,
                kv_heads: kv_heads as usize,
                key_length: key_length as usize,
                value_length: value_length as usize,
                window: None,
            });
        }
        let embedding = tensors.matrix("token_embd.weight", vocabulary, hidden, None)?;
        let head = match hyperparameters.tied_head {
            true => embedding.clone(),
            false => tensors.matrix("output.weight", vocabulary, hidden, None)?,
        };
        let output_norm = tensors.vector(&small, "output_norm.weight", hidden)?;
        let factors = tensors.optional_floats(
            &small,
            "rope_freqs.weight",
            u64::from(hyperparameters.rope_dimensions / 2),
        )?;
        drop(small);
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
            pool,
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
            weights, kv, pool, ..
        } = self;
        let positions = positions(batch);
        let width = positions.len();
        let angles = self.rope.angles(&positions);
        let epsilon = self.rms_epsilon;
        let mut pass = weights.pass(cancelled);

        // Token ids to vectors.
        let tokens: Vec<u32> = batch
            .runs
            .iter()
            .flat_map(|run| run.tokens)
            .copied()
            .collect();
        let x = dequantise(&self.embedding, &pass.gather_rows(&tokens)?)?;
        let hidden = self.embedding.columns;
        let h = zeros(width, hidden)?;
        let projected = zeros(width, hidden)?;
        // What the layer before adds to x: it is added where the sum is normalised.
        let mut delta = None;
        let mut buffers = Buffers::default();

        for (index, layer) in self.layers.iter().enumerate() {
            // Attention: a token looks at itself and at what came before it in its sequence.
            add_and_normalise(pool, &x, delta, &layer.attention_norm, epsilon, &h)?;
            let shape = *kv.shape(index);
            let query = sized(&mut buffers.query, width * layer.query.rows);
            let key = sized(&mut buffers.key, width * layer.key.rows);
            let value = sized(&mut buffers.value, width * layer.value.rows);
            with_values(&h, |h| {
                let h = Activations::new(h, width, hidden);
                let products = [
                    (&layer.query, &mut *query),
                    (&layer.key, &mut *key),
                    (&layer.value, &mut *value),
                ];
                multiply(&mut pass, pool, &h, products)
            })?;
            let pairs = RopePairs::Interleaved;
            rope(pool, query, shape.heads, shape.key_length, &angles, pairs);
            rope(pool, key, shape.kv_heads, shape.key_length, &angles, pairs);
            store(kv, index, batch, key, value);
            let attended = sized(&mut buffers.attended, width * layer.output.columns);
            attend(pool, kv, index, batch, query, attended);
            with_values_mut(&projected, |projected| {
                let attended = Activations::new(attended, width, layer.output.columns);
                multiply(&mut pass, pool, &attended, [(&layer.output, projected)])
            })?;

            // Feed-forward: down(silu(gate x) * up x).
            let delta_of_attention = Some(&projected);
            let norm = &layer.feed_forward_norm;
            add_and_normalise(pool, &x, delta_of_attention, norm, epsilon, &h)?;
            let gate = sized(&mut buffers.gate, width * layer.gate.rows);
            let up = sized(&mut buffers.up, width * layer.up.rows);
            with_values(&h, |h| {
                let h = Activations::new(h, width, hidden);
                let products = [(&layer.gate, &mut *gate), (&layer.up, &mut *up)];
                multiply(&mut pass, pool, &h, products)
            })?;
            silu_mul(pool, gate, up);
            with_values_mut(&projected, |projected| {
                let inner = Activations::new(gate, width, layer.down.columns);
                multiply(&mut pass, pool, &inner, [(&layer.down, projected)])
            })?;
            delta = Some(&projected);
        }

        // Logits, for the tokens whose successor is wanted.
        let wanted = last_tokens(batch);
        let mut logits = Vec::new();
        if wanted.is_empty() {
            pass_by(&mut pass, &self.head)?;
        } else {
            let rows = Tensor::new(wanted.as_slice(), &Device::Cpu)?;
            let x = x.index_select(&rows, 0)?;
            let projected = projected.index_select(&rows, 0)?;
            let h = zeros(wanted.len(), hidden)?;
            let delta = delta.map(|_| &projected);
            add_and_normalise(pool, &x, delta, &self.output_norm, epsilon, &h)?;
            let mut all = vec![0.0; wanted.len() * self.head.rows];
            with_values(&h, |h| {
                let h = Activations::new(h, wanted.len(), self.head.columns);
                multiply(&mut pass, pool, &h, [(&self.head, &mut *all)])
            })?;
            logits = rows_of(all, self.head.rows);
        }
        pass.finish();
        Ok(logits)
    }
}

/// What the products of a layer write, `[width, rows]` each: of one size in all layers, or of few, and so made once a
/// step.
#[derive(Default)]
struct Buffers {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// The buffer with `length` values, of which none is to be read before it is written.
fn sized(buffer: &mut Vec<f32>, length: usize) -> &mut [f32] {
    if buffer.capacity() < length {
        // Not a byte more than the plan counts: growing would double it, and hold the old one meanwhile.
        *buffer = Vec::new();
        buffer.reserve_exact(length);
    }
    buffer.resize(length, 0.0);
    buffer
}

/// Rows of their own; a single row is handed on without a copy.
fn rows_of(all: Vec<f32>, length: usize) -> Vec<Vec<f32>> {
    if all.len() == length {
        return vec![all];
    }
    all.chunks_exact(length).map(<[f32]>::to_vec).collect()
}

// As the plan's scratch counts them.
const _: () = assert!(size_of::<PageView<'_>>() == 24 && size_of::<AttentionRun<'_>>() == 24);

/// The position of every token of the step.
fn positions(batch: &Batch<'_>) -> Vec<u32> {
    let of_run = |run: &Run<'_>| run.position..run.position + run.tokens.len() as u32;
    batch.runs.iter().flat_map(of_run).collect()
}

/// Where in the step the last token of each run is that wants logits.
fn last_tokens(batch: &Batch<'_>) -> Vec<u32> {
    let mut end = 0;
    let mut wanted = Vec::new();
    for run in &batch.runs {
        end += run.tokens.len() as u32;
        if run.wants_logits {
            wanted.push(end - 1);
        }
    }
    wanted
}

/// Writes keys and values of the step's tokens to their pages: attention reads them from there, at the precision of
/// the pages, like all that came before.
fn store(kv: &mut KvStore, layer: usize, batch: &Batch<'_>, key: &[f32], value: &[f32]) {
    let shape = *kv.shape(layer);
    let keys = key.chunks_exact(shape.kv_heads * shape.key_length);
    let values = value.chunks_exact(shape.kv_heads * shape.value_length);
    let places = batch.runs.iter().flat_map(|run| {
        let of_token = move |position: usize| (run.pages[position / PAGE_TOKENS], position);
        (run.position as usize..run.position as usize + run.tokens.len()).map(of_token)
    });
    for ((page, position), (key, value)) in places.zip(keys.zip(values)) {
        let page = kv.page_mut(layer, page);
        store_kv(&shape, page, position % PAGE_TOKENS, key, value);
    }
}

/// Attention of every token of the step, to `out`: `[width, heads * value length]`.
fn attend(
    pool: &ComputePool,
    kv: &KvStore,
    layer: usize,
    batch: &Batch<'_>,
    query: &[f32],
    out: &mut [f32],
) {
    let shape = kv.shape(layer);
    let pages_of = |run: &Run<'_>| run.pages.iter().map(|&page| kv.page(layer, page)).collect();
    let pages: Vec<Vec<PageView<'_>>> = batch.runs.iter().map(pages_of).collect();
    let runs: Vec<AttentionRun<'_>> = batch
        .runs
        .iter()
        .zip(&pages)
        .map(|(run, pages)| AttentionRun {
            pages,
            position: run.position,
            tokens: run.tokens.len() as u32,
        })
        .collect();
    let scale = 1.0 / (shape.key_length as f32).sqrt();
    attention(pool, shape, scale, query, &runs, out);
}
