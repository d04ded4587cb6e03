//! The architectures whose forward pass strata has, and the vectors that each of their layers needs beside its matrices.

/// The value of `general.architecture`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, Mistral, SmolLM and others of that shape.
    Llama,
    /// Qwen 2 and 2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen 3, dense: a norm of each head of queries and keys.
    Qwen3,
    /// Gemma 3, text: norms of heads, and of what each half of a layer gives.
    Gemma3,
}

/// A vector of each layer, by the end of its tensor's name.
#[derive(Clone, Copy, Debug)]
pub struct LayerVector {
    pub name: &'static str,
    length: Length,
}

#[derive(Clone, Copy, Debug)]
enum Length {
    Embedding,
    KeyHead,
    Queries,
    Keys,
    Values,
}

/// What the lengths of a layer's vectors follow from.
#[derive(Clone, Copy, Debug)]
pub struct LayerSizes {
    pub embedding_length: u32,
    pub head_count: u32,
    pub head_count_kv: u32,
    pub key_length: u32,
    pub value_length: u32,
}

impl LayerVector {
    const fn new(name: &'static str, length: Length) -> LayerVector {
        LayerVector { name, length }
    }

    /// How many it has.
    pub fn elements(&self, sizes: &LayerSizes) -> u64 {
        let rows = |heads: u32, length: u32| u64::from(heads) * u64::from(length);
        match self.length {
            Length::Embedding => u64::from(sizes.embedding_length),
            Length::KeyHead => u64::from(sizes.key_length),
            Length::Queries => rows(sizes.head_count, sizes.key_length),
            Length::Keys => rows(sizes.head_count_kv, sizes.key_length),
            Length::Values => rows(sizes.head_count_kv, sizes.value_length),
        }
    }
}

/// Of all architectures.
const NORMS: [LayerVector; 2] = [
    LayerVector::new("attn_norm.weight", Length::Embedding),
    LayerVector::new("ffn_norm.weight", Length::Embedding),
];
const BIASES: [LayerVector; 3] = [
    LayerVector::new("attn_q.bias", Length::Queries),
    LayerVector::new("attn_k.bias", Length::Keys),
    LayerVector::new("attn_v.bias", Length::Values),
];
const HEAD_NORMS: [LayerVector; 2] = [
    LayerVector::new("attn_q_norm.weight", Length::KeyHead),
    LayerVector::new("attn_k_norm.weight", Length::KeyHead),
];

const HEAD_AND_POST_NORMS: [LayerVector; 4] = [
    LayerVector::new("attn_q_norm.weight", Length::KeyHead),
    LayerVector::new("attn_k_norm.weight", Length::KeyHead),
    LayerVector::new("post_attention_norm.weight", Length::Embedding),
    LayerVector::new("post_ffw_norm.weight", Length::Embedding),
];

impl Architecture {
    pub const ALL: [Architecture; 4] = [
        Architecture::Llama,
        Architecture::Qwen2,
        Architecture::Qwen3,
        Architecture::Gemma3,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Architecture::Llama => "llama",
            Architecture::Qwen2 => "qwen2",
            Architecture::Qwen3 => "qwen3",
            Architecture::Gemma3 => "gemma3",
        }
    }

    pub fn from_name(name: &str) -> Option<Architecture> {
        Architecture::ALL
            .into_iter()
            .find(|architecture| architecture.name() == name)
    }

    /// The vectors without which a layer cannot be computed.
    pub fn layer_vectors(self) -> impl Iterator<Item = &'static LayerVector> {
        NORMS.iter().chain(self.added_vectors())
    }

    /// Those of them that a llama has not.
    pub const fn added_vectors(self) -> &'static [LayerVector] {
        match self {
            Architecture::Llama => &[],
            Architecture::Qwen2 => &BIASES,
            Architecture::Qwen3 => &HEAD_NORMS,
            Architecture::Gemma3 => &HEAD_AND_POST_NORMS,
        }
    }
}
