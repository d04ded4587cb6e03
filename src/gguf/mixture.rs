//! Quantisation mixtures: which type each tensor of a model gets under a name such as Q4_K_M. The rules are those of
//! llama.cpp's `llama_tensor_get_type` (src/llama-quant.cpp) for dense llama models without an importance matrix, so
//! that a card's file has the size of the published one.

use serde::Deserialize;

use super::TensorType;

/// A name that files are published under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub(super) enum Mixture {
    #[serde(rename = "f32")]
    F32,
    #[serde(rename = "f16")]
    F16,
    #[serde(rename = "bf16")]
    BF16,
    #[serde(rename = "q4_0")]
    Q4_0,
    #[serde(rename = "q4_1")]
    Q4_1,
    #[serde(rename = "q5_0")]
    Q5_0,
    #[serde(rename = "q5_1")]
    Q5_1,
    #[serde(rename = "q8_0")]
    Q8_0,
    #[serde(rename = "q2_k")]
    Q2K,
    #[serde(rename = "q3_k_m")]
    Q3KM,
    #[serde(rename = "q4_k_s")]
    Q4KS,
    #[serde(rename = "q4_k_m")]
    Q4KM,
    #[serde(rename = "q5_k_m")]
    Q5KM,
    #[serde(rename = "q6_k")]
    Q6K,
}

/// The matrices whose place in the model decides their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Embedding,
    /// The output head, or the embedding of a model without one.
    Head,
    AttentionValue,
    AttentionOutput,
    FeedForwardDown,
    /// attn_q, attn_k, ffn_gate and ffn_up.
    Other,
}

/// What of the model's shape the rules ask for.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelShape {
    pub(super) layers: u32,
    /// Query heads per key-value head.
    pub(super) grouped_queries: u32,
}

/// llama.cpp takes a llama model of this many layers for the 70B one and gives its small attn_v more bits.
const LAYERS_OF_70B: u32 = 80;

impl Mixture {
    /// The value of `general.file_type` (`enum llama_ftype`).
    pub(super) const fn file_type(self) -> u32 {
        match self {
            Mixture::F32 => 0,
            Mixture::F16 => 1,
            Mixture::Q4_0 => 2,
            Mixture::Q4_1 => 3,
            Mixture::Q8_0 => 7,
            Mixture::Q5_0 => 8,
            Mixture::Q5_1 => 9,
            Mixture::Q2K => 10,
            Mixture::Q3KM => 12,
            Mixture::Q4KS => 14,
            Mixture::Q4KM => 15,
            Mixture::Q5KM => 17,
            Mixture::Q6K => 18,
            Mixture::BF16 => 32,
        }
    }

    /// The type of most tensors.
    const fn base(self) -> TensorType {
        match self {
            Mixture::F32 => TensorType::F32,
            Mixture::F16 => TensorType::F16,
            Mixture::BF16 => TensorType::BF16,
            Mixture::Q4_0 => TensorType::Q4_0,
            Mixture::Q4_1 => TensorType::Q4_1,
            Mixture::Q5_0 => TensorType::Q5_0,
            Mixture::Q5_1 => TensorType::Q5_1,
            Mixture::Q8_0 => TensorType::Q8_0,
            Mixture::Q2K => TensorType::Q2K,
            Mixture::Q3KM => TensorType::Q3K,
            Mixture::Q4KS | Mixture::Q4KM => TensorType::Q4K,
            Mixture::Q5KM => TensorType::Q5K,
            Mixture::Q6K => TensorType::Q6K,
        }
    }

    /// The type of a matrix of layer `layer` (any value where the role stands outside the layers) with rows of
    /// `columns` elements.
    pub(super) fn tensor_type(
        self,
        role: Role,
        layer: u32,
        columns: u64,
        shape: ModelShape,
    ) -> TensorType {
        use TensorType::{F32, Q3K, Q4K, Q5K, Q6K, Q8_0};
        let base = self.base();
        if matches!(base, F32 | TensorType::F16 | TensorType::BF16) {
            return base;
        }
        let more_bits = use_more_bits(layer, shape.layers);
        let kind = match role {
            Role::Head if !columns.is_multiple_of(base.block_elements() as u64) => Q8_0,
            Role::Head if base != Q8_0 => Q6K,
            Role::AttentionValue => {
                let kind = match self {
                    Mixture::Q2K if shape.grouped_queries >= 4 => Q4K,
                    Mixture::Q2K => Q3K,
                    Mixture::Q3KM if layer < 2 => Q5K,
                    Mixture::Q3KM => Q4K,
                    Mixture::Q4KM | Mixture::Q5KM if more_bits => Q6K,
                    Mixture::Q4KS if layer < 4 => Q5K,
                    _ => base,
                };
                if shape.layers == LAYERS_OF_70B && matches!(kind, Q3K | Q4K) {
                    Q5K
                } else {
                    kind
                }
            }
            Role::FeedForwardDown => match self {
                Mixture::Q2K => Q3K,
                Mixture::Q3KM if layer < shape.layers / 16 => Q5K,
                Mixture::Q3KM => Q4K,
                Mixture::Q4KM | Mixture::Q5KM if more_bits => Q6K,
                Mixture::Q4KS if layer < shape.layers / 8 => Q5K,
                _ => base,
            },
            Role::AttentionOutput => match self {
                Mixture::Q2K => Q3K,
                Mixture::Q3KM => Q4K,
                _ => base,
            },
            Role::Head | Role::Embedding | Role::Other => base,
        };
        for_columns(kind, columns)
    }
}

/// The first and last eighth of the layers, and every third between them.
const fn use_more_bits(layer: u32, layers: u32) -> bool {
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// What stands for a type whose blocks do not divide the rows. llama.cpp takes IQ4_NL for Q2_K and Q3_K; Q4_0 has the
/// same size.
const fn for_columns(kind: TensorType, columns: u64) -> TensorType {
    let kind = if columns.is_multiple_of(kind.block_elements() as u64) {
        kind
    } else {
        match kind {
            TensorType::Q2K | TensorType::Q3K => TensorType::Q4_0,
            TensorType::Q4K => TensorType::Q5_0,
            TensorType::Q5K => TensorType::Q5_1,
            TensorType::Q6K => TensorType::Q8_0,
            other => other,
        }
    };
    if columns.is_multiple_of(kind.block_elements() as u64) {
        kind
    } else {
        TensorType::F16
    }
}
