//! Quantisation mixtures: which type each tensor of a model gets under a name such as Q4_K_M. The rules are those of
//! llama.cpp's `llama_tensor_get_type` (src/llama-quant.cpp) for models without an importance matrix, so
//! that a card's file has the size of the published one, and a file that is quantised here the types of theirs.

use serde::Deserialize;

use super::{Gguf, GgufError, TensorType};

/// A name that files are published under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Mixture {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3KS,
    Q3KM,
    Q3KL,
    Q4KS,
    Q4KM,
    Q5KS,
    Q5KM,
    Q6K,
}

/// The matrices whose place in the model decides their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// The output head, or the embedding of a model without one.
    Head,
    AttentionKey,
    /// Values, or a matrix that has them in it.
    AttentionValue,
    AttentionOutput,
    FeedForwardDown,
    /// The embedding of a model with a head, attn_q, ffn_gate, ffn_up and whatever else.
    Other,
}

/// What of the model's shape the rules ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    pub layers: u32,
    /// Query heads per key-value head.
    pub grouped_queries: u32,
    /// Experts of a layer; 0 where the model is dense.
    pub experts: u32,
    /// The output head is the token embedding.
    pub tied_head: bool,
}

/// What a mixture gives a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub kind: TensorType,
    /// The type that the mixture has for this place in the model, where the rows are no whole number of its blocks and
    /// `kind` stands for it.
    pub instead_of: Option<TensorType>,
}

/// llama.cpp takes a model of this many layers for the 70B one and gives its small attn_v more bits.
const LAYERS_OF_70B: u32 = 80;
/// The number of experts for which the rules give attention more bits: those of Mixtral.
const EXPERTS_OF_MIXTRAL: u32 = 8;

impl TryFrom<String> for Mixture {
    type Error = String;

    fn try_from(name: String) -> Result<Mixture, String> {
        Mixture::from_name(&name).ok_or_else(|| {
            let names: Vec<&str> = Mixture::ALL.into_iter().map(Mixture::name).collect();
            format!(
                "unknown variant `{}`, expected one of {}",
                name.escape_debug(),
                names.join(", ")
            )
        })
    }
}

impl ModelShape {
    /// The shape that a file's metadata give. What is missing counts as in a dense model whose heads are all alike.
    ///
    /// # Errors
    /// A key of the shape is of the wrong type, or zero where it must not be.
    pub fn of(gguf: &Gguf) -> Result<ModelShape, GgufError> {
        let architecture = gguf.architecture()?;
        let key = |suffix: &str| format!("{architecture}.{suffix}");
        let layers = gguf.metadata.u32(&key("block_count"))?.unwrap_or(0);
        // One value for all layers, or one for each: llama.cpp asks for that of the first.
        let first = |suffix: &str| -> Result<Option<u32>, GgufError> {
            let key = key(suffix);
            match gguf.metadata.get(&key) {
                Some(super::Value::Array(_)) => {
                    let values = gguf.metadata.i64s(&key)?.unwrap_or_default();
                    let first = values.first().copied().unwrap_or(0);
                    Ok(u32::try_from(first).ok())
                }
                _ => gguf.metadata.u32(&key),
            }
        };
        let heads = first("attention.head_count")?.unwrap_or(1);
        let heads_kv = first("attention.head_count_kv")?.unwrap_or(heads);
        Ok(ModelShape {
            layers,
            grouped_queries: heads.checked_div(heads_kv).unwrap_or(1),
            experts: gguf.metadata.u32(&key("expert_count"))?.unwrap_or(0),
            tied_head: gguf.tensor(HEAD).is_none(),
        })
    }
}

const HEAD: &str = "output.weight";
const EMBEDDINGS: [&str; 2] = ["token_embd.weight", "per_layer_token_embd.weight"];

/// Parts of names of small matrices that stay as they are: the rules of llama.cpp's `tensor_allows_quantization` for
/// language models. Of RWKV's time mixing some matrices are large; there all stay.
const KEPT: [&str; 14] = [
    "_norm.weight",
    "ffn_gate_inp.weight",
    "ffn_gate_tid2eid.weight",
    "indexer.k_proj.weight",
    "indexer.q_proj.weight",
    "altup",
    "laurel",
    "per_layer_model_proj",
    "position_embd.weight",
    "token_types.weight",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "time_mix_",
    "attn_rel_b.weight",
];

impl Mixture {
    pub const ALL: [Mixture; 17] = [
        Mixture::F32,
        Mixture::F16,
        Mixture::BF16,
        Mixture::Q8_0,
        Mixture::Q6K,
        Mixture::Q5KM,
        Mixture::Q5KS,
        Mixture::Q5_1,
        Mixture::Q5_0,
        Mixture::Q4KM,
        Mixture::Q4KS,
        Mixture::Q4_1,
        Mixture::Q4_0,
        Mixture::Q3KL,
        Mixture::Q3KM,
        Mixture::Q3KS,
        Mixture::Q2K,
    ];

    /// The name as cards and commands write it.
    pub const fn name(self) -> &'static str {
        match self {
            Mixture::F32 => "f32",
            Mixture::F16 => "f16",
            Mixture::BF16 => "bf16",
            Mixture::Q4_0 => "q4_0",
            Mixture::Q4_1 => "q4_1",
            Mixture::Q5_0 => "q5_0",
            Mixture::Q5_1 => "q5_1",
            Mixture::Q8_0 => "q8_0",
            Mixture::Q2K => "q2_k",
            Mixture::Q3KS => "q3_k_s",
            Mixture::Q3KM => "q3_k_m",
            Mixture::Q3KL => "q3_k_l",
            Mixture::Q4KS => "q4_k_s",
            Mixture::Q4KM => "q4_k_m",
            Mixture::Q5KS => "q5_k_s",
            Mixture::Q5KM => "q5_k_m",
            Mixture::Q6K => "q6_k",
        }
    }

    /// The mixture of a name, in whichever case.
    pub fn from_name(name: &str) -> Option<Mixture> {
        Mixture::ALL
            .into_iter()
            .find(|mixture| mixture.name().eq_ignore_ascii_case(name))
    }

    /// What a tensor gets; `None`: it stays as it is (vectors, norms and the small matrices that decide much).
    /// `dimensions` are in ggml's order.
    pub fn choose(self, name: &str, dimensions: &[u64], shape: ModelShape) -> Option<Choice> {
        // A dimension of one at the end does not make a vector a matrix.
        let is_matrix = dimensions.iter().skip(1).any(|&dimension| dimension > 1);
        if !is_matrix || !name.ends_with("weight") || KEPT.iter().any(|part| name.contains(part)) {
            return None;
        }
        let columns = dimensions.first().copied().unwrap_or(1);
        let layer = layer_of(name).unwrap_or(0);
        Some(self.choice(role_of(name, shape), layer, columns, shape))
    }

    /// The value of `general.file_type` (`enum llama_ftype`).
    pub const fn file_type(self) -> u32 {
        match self {
            Mixture::F32 => 0,
            Mixture::F16 => 1,
            Mixture::Q4_0 => 2,
            Mixture::Q4_1 => 3,
            Mixture::Q8_0 => 7,
            Mixture::Q5_0 => 8,
            Mixture::Q5_1 => 9,
            Mixture::Q2K => 10,
            Mixture::Q3KS => 11,
            Mixture::Q3KM => 12,
            Mixture::Q3KL => 13,
            Mixture::Q4KS => 14,
            Mixture::Q4KM => 15,
            Mixture::Q5KS => 16,
            Mixture::Q5KM => 17,
            Mixture::Q6K => 18,
            Mixture::BF16 => 32,
        }
    }

    /// The type of most tensors.
    pub const fn base(self) -> TensorType {
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
            Mixture::Q3KS | Mixture::Q3KM | Mixture::Q3KL => TensorType::Q3K,
            Mixture::Q4KS | Mixture::Q4KM => TensorType::Q4K,
            Mixture::Q5KS | Mixture::Q5KM => TensorType::Q5K,
            Mixture::Q6K => TensorType::Q6K,
        }
    }

    /// What a matrix of layer `layer` (any value where the role stands outside the layers) with rows of `columns`
    /// elements gets.
    pub(super) fn choice(self, role: Role, layer: u32, columns: u64, shape: ModelShape) -> Choice {
        use TensorType::{F32, Q3K, Q4K, Q5K, Q6K, Q8_0};
        let base = self.base();
        let as_wanted = |kind| Choice {
            kind,
            instead_of: None,
        };
        if matches!(base, F32 | TensorType::F16 | TensorType::BF16) {
            return as_wanted(base);
        }
        let more_bits = use_more_bits(layer, shape.layers);
        let is_mixtral = shape.experts == EXPERTS_OF_MIXTRAL;
        let wanted = match role {
            Role::Head if !columns.is_multiple_of(base.block_elements() as u64) => Q8_0,
            Role::Head if base != Q8_0 => Q6K,
            Role::AttentionKey | Role::AttentionValue if is_mixtral => Q8_0,
            Role::AttentionValue => {
                let kind = match self {
                    Mixture::Q2K if shape.grouped_queries >= 4 => Q4K,
                    Mixture::Q2K => Q3K,
                    Mixture::Q3KM if layer < 2 => Q5K,
                    Mixture::Q3KM => Q4K,
                    Mixture::Q3KL => Q5K,
                    Mixture::Q4KM | Mixture::Q5KM if more_bits => Q6K,
                    Mixture::Q4KS if layer < 4 => Q5K,
                    _ => base,
                };
                let is_70b = shape.layers == LAYERS_OF_70B && shape.grouped_queries > 1;
                if is_70b && matches!(kind, Q3K | Q4K) {
                    Q5K
                } else {
                    kind
                }
            }
            Role::FeedForwardDown => match self {
                Mixture::Q2K => Q3K,
                Mixture::Q3KM if layer < shape.layers / 16 => Q5K,
                Mixture::Q3KM => Q4K,
                Mixture::Q3KL => Q5K,
                Mixture::Q4KM | Mixture::Q5KM if more_bits => Q6K,
                Mixture::Q4KS if layer < shape.layers / 8 => Q5K,
                _ => base,
            },
            Role::AttentionOutput if is_mixtral => match self {
                Mixture::Q2K | Mixture::Q3KS | Mixture::Q3KM | Mixture::Q4KS | Mixture::Q4KM => Q5K,
                _ => base,
            },
            Role::AttentionOutput => match self {
                Mixture::Q2K => Q3K,
                Mixture::Q3KM => Q4K,
                Mixture::Q3KL => Q5K,
                _ => base,
            },
            Role::Head | Role::AttentionKey | Role::Other => base,
        };
        match for_columns(wanted, columns) {
            kind if kind == wanted => as_wanted(kind),
            kind => Choice {
                kind,
                instead_of: Some(wanted),
            },
        }
    }
}

/// What llama.cpp finds in a tensor's name.
fn role_of(name: &str, shape: ModelShape) -> Role {
    if name == HEAD || (shape.tied_head && EMBEDDINGS.contains(&name)) {
        return Role::Head;
    }
    let roles = [
        ("attn_qkv.weight", Role::AttentionValue),
        ("attn_kv_b.weight", Role::AttentionValue),
        ("attn_v.weight", Role::AttentionValue),
        ("attn_k.weight", Role::AttentionKey),
        ("attn_output.weight", Role::AttentionOutput),
        ("ffn_down", Role::FeedForwardDown),
    ];
    let found = roles.into_iter().find(|(part, _)| name.contains(part));
    found.map_or(Role::Other, |(_, role)| role)
}

/// The number in `blk.N.`
fn layer_of(name: &str) -> Option<u32> {
    let (number, _) = name.strip_prefix("blk.")?.split_once('.')?;
    number.parse().ok()
}

/// The first and last eighth of the layers, and every third between them.
const fn use_more_bits(layer: u32, layers: u32) -> bool {
    // Layers of a file may be any number.
    let (layer, layers) = (layer as u64, layers as u64);
    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2
}

/// What stands for a type whose blocks do not divide the rows. (Before 2026 llama.cpp took IQ4_NL for Q2_K and Q3_K, which
/// has the size of Q4_0.)
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

#[cfg(test)]
mod tests {
    use super::*;
    use TensorType::{Q3K, Q4_0, Q4K, Q5_0, Q5K, Q6K, Q8_0};

    const LLAMA_8B: ModelShape = ModelShape {
        layers: 32,
        grouped_queries: 4,
        experts: 0,
        tied_head: false,
    };

    #[track_caller]
    fn check(mixture: Mixture, shape: ModelShape, cases: &[(&str, [u64; 2], TensorType)]) {
        for (name, dimensions, wanted) in cases {
            let choice = mixture.choose(name, dimensions, shape).unwrap();
            assert_eq!(choice.kind, *wanted, "{} {name}", mixture.name());
        }
    }

    #[test]
    fn the_matrices_that_decide_most_get_more_bits() {
        check(
            Mixture::Q4KM,
            LLAMA_8B,
            &[
                ("output.weight", [4096, 128_256], Q6K),
                ("token_embd.weight", [4096, 128_256], Q4K),
                ("blk.0.attn_v.weight", [4096, 1024], Q6K),
                ("blk.4.attn_v.weight", [4096, 1024], Q4K),
                ("blk.6.ffn_down.weight", [14_336, 4096], Q6K),
                ("blk.31.ffn_down.weight", [14_336, 4096], Q6K),
                ("blk.0.attn_q.weight", [4096, 4096], Q4K),
                ("blk.0.attn_qkv.weight", [4096, 6144], Q6K),
                // No such layer: no arithmetic on it may fail.
                ("blk.4294967295.ffn_down.weight", [4096, 4096], Q6K),
            ],
        );
        let tied = ModelShape {
            tied_head: true,
            ..LLAMA_8B
        };
        check(
            Mixture::Q4KM,
            tied,
            &[("token_embd.weight", [4096, 9], Q6K)],
        );
        check(
            Mixture::Q8_0,
            tied,
            &[("token_embd.weight", [4096, 9], Q8_0)],
        );
        let seventy = ModelShape {
            layers: 80,
            ..LLAMA_8B
        };
        check(
            Mixture::Q4KM,
            seventy,
            &[("blk.11.attn_v.weight", [8192, 1024], Q5K)],
        );
        let mixtral = ModelShape {
            experts: 8,
            ..LLAMA_8B
        };
        check(
            Mixture::Q4KM,
            mixtral,
            &[
                ("blk.4.attn_v.weight", [4096, 1024], Q8_0),
                ("blk.4.attn_k.weight", [4096, 1024], Q8_0),
                ("blk.4.attn_output.weight", [4096, 4096], Q5K),
            ],
        );
        check(
            Mixture::Q3KL,
            LLAMA_8B,
            &[
                ("blk.9.attn_output.weight", [4096, 4096], Q5K),
                ("blk.9.ffn_up.weight", [4096, 4096], Q3K),
            ],
        );
    }

    #[test]
    fn rows_that_are_no_whole_number_of_blocks_get_a_type_of_about_that_size() {
        let choose = |mixture: Mixture, name: &str, columns: u64| {
            mixture.choose(name, &[columns, 64], LLAMA_8B).unwrap()
        };
        for (mixture, columns, kind, instead_of) in [
            (Mixture::Q4KM, 576, Q5_0, Some(Q4K)),
            (Mixture::Q4KM, 512, Q4K, None),
            (Mixture::Q2K, 576, Q4_0, Some(TensorType::Q2K)),
            (Mixture::Q4KM, 100, TensorType::F16, Some(Q4K)),
            (Mixture::Q8_0, 100, TensorType::F16, Some(Q8_0)),
        ] {
            assert_eq!(
                choose(mixture, "blk.9.attn_q.weight", columns),
                Choice { kind, instead_of },
                "{} of {columns}",
                mixture.name()
            );
        }
    }

    #[test]
    fn vectors_norms_and_what_decides_much_stay_as_they_are() {
        for (name, dimensions) in [
            ("blk.0.attn_norm.weight", vec![64]),
            ("blk.0.attn_q.weight", vec![64]),
            ("blk.0.attn_q.weight", vec![64, 1, 1]),
            ("blk.0.attn_q.bias", vec![64, 64]),
            ("blk.0.attn_q_norm.weight", vec![64, 64]),
            ("blk.0.ffn_gate_inp.weight", vec![64, 8]),
            ("rope_freqs.weight", vec![64]),
        ] {
            assert_eq!(
                Mixture::Q4KM.choose(name, &dimensions, LLAMA_8B),
                None,
                "{name}"
            );
        }
    }

    #[test]
    fn every_mixture_has_a_name_that_leads_back_to_it() {
        for mixture in Mixture::ALL {
            assert_eq!(Mixture::from_name(mixture.name()), Some(mixture));
            assert_eq!(
                Mixture::from_name(&mixture.name().to_uppercase()),
                Some(mixture)
            );
        }
        assert_eq!(Mixture::from_name("q9"), None);
    }
}
