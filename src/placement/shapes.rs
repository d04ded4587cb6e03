//! Test support: indexes of models by shape, with no file behind them.

use super::{DeviceKind, ExecutorChoice, KvType, PlanRequest, Rates};
use crate::gguf::{Hyperparameters, RopeScaling, SlidingWindow, TensorInfo, TensorType};

/// What a llama-like model is made of.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) layers: u32,
    pub(super) embedding: u32,
    pub(super) feed_forward: u32,
    pub(super) heads: u32,
    pub(super) heads_kv: u32,
    pub(super) vocabulary: u32,
    pub(super) matrices: TensorType,
    pub(super) head: TensorType,
    pub(super) tied: bool,
    pub(super) window: Option<SlidingWindow>,
}

impl Shape {
    /// SmolLM2-135M as it is published in Q4_1.
    pub(super) fn smollm2() -> Shape {
        Shape {
            layers: 30,
            embedding: 576,
            feed_forward: 1536,
            heads: 9,
            heads_kv: 3,
            vocabulary: 49152,
            matrices: TensorType::Q4_1,
            head: TensorType::Q8_0,
            tied: true,
            window: None,
        }
    }

    /// The same with a window of so many positions in five layers of six.
    pub(super) fn with_window(positions: u32) -> Shape {
        Shape {
            window: Some(SlidingWindow {
                positions,
                period: 6,
                rope_base: 10_000.0,
            }),
            ..Shape::smollm2()
        }
    }

    /// A few kilobytes.
    pub(super) fn tiny() -> Shape {
        Shape {
            layers: 2,
            embedding: 64,
            feed_forward: 96,
            heads: 4,
            heads_kv: 2,
            vocabulary: 288,
            matrices: TensorType::F32,
            head: TensorType::F32,
            tied: false,
            window: None,
        }
    }

    pub(super) fn index(&self) -> (Vec<TensorInfo>, Hyperparameters) {
        let head_length = self.embedding / self.heads;
        let kv_rows = self.heads_kv * head_length;
        let mut table = TensorTable::default();
        let (embedding, feed_forward) = (u64::from(self.embedding), u64::from(self.feed_forward));
        let vocabulary = u64::from(self.vocabulary);
        table.add("token_embd.weight", self.head, &[embedding, vocabulary]);
        for layer in 0..self.layers {
            let mut add = |name: &str, kind, dimensions: &[u64]| {
                table.add(&format!("blk.{layer}.{name}.weight"), kind, dimensions);
            };
            add("attn_norm", TensorType::F32, &[embedding]);
            add("ffn_down", self.matrices, &[feed_forward, embedding]);
            add("ffn_gate", self.matrices, &[embedding, feed_forward]);
            add("ffn_up", self.matrices, &[embedding, feed_forward]);
            add("ffn_norm", TensorType::F32, &[embedding]);
            add("attn_k", self.matrices, &[embedding, u64::from(kv_rows)]);
            add("attn_output", self.matrices, &[embedding, embedding]);
            add("attn_q", self.matrices, &[embedding, embedding]);
            add("attn_v", self.matrices, &[embedding, u64::from(kv_rows)]);
        }
        table.add("output_norm.weight", TensorType::F32, &[embedding]);
        if !self.tied {
            table.add("output.weight", self.head, &[embedding, vocabulary]);
        }
        let per_layer = |value: u32| vec![value; self.layers as usize];
        let hyperparameters = Hyperparameters {
            architecture: "llama".to_owned(),
            layers: self.layers,
            context_length: 8192,
            embedding_length: self.embedding,
            feed_forward_length: per_layer(self.feed_forward),
            head_count: per_layer(self.heads),
            head_count_kv: per_layer(self.heads_kv),
            key_length: head_length,
            value_length: head_length,
            rms_epsilon: 1e-5,
            rope_dimensions: head_length,
            rope_base: 10_000.0,
            rope_scaling: RopeScaling::None,
            rope_magnitude: 1.0,
            window: self.window,
            vocabulary_size: self.vocabulary,
            tied_head: self.tied,
        };
        (table.tensors, hyperparameters)
    }
}

/// A tensor table with offsets as in a file: data from 123456 on, tensors aligned to 32 bytes.
#[derive(Default)]
pub(super) struct TensorTable {
    pub(super) tensors: Vec<TensorInfo>,
}

impl TensorTable {
    pub(super) fn add(&mut self, name: &str, kind: TensorType, dimensions: &[u64]) {
        let end = self.tensors.last().map_or(123_456, |last| {
            (last.file_offset + last.bytes).next_multiple_of(32)
        });
        let rows: u64 = dimensions[1..].iter().product();
        self.tensors.push(TensorInfo {
            name: name.to_owned(),
            kind,
            dimensions: dimensions.to_vec(),
            file_offset: end,
            bytes: kind.row_bytes(dimensions[0]).unwrap() * rows,
        });
    }
}

/// A request with nothing special about it.
pub(super) fn request(device_budget: Option<u64>, host_budget: u64) -> PlanRequest {
    PlanRequest {
        device: match device_budget {
            Some(_) => DeviceKind::Emulated,
            None => DeviceKind::Cpu,
        },
        device_budget,
        host_budget,
        context: 512,
        parallel: 1,
        kv_type: KvType::F16,
        step_width: None,
        read_alignment: 4096,
        slice_bytes: None,
        ring_entries: None,
        executor: ExecutorChoice::Auto,
        map_file: false,
        rates: Rates::default(),
        rates_card: None,
    }
}
