//! Hyper-parameters: what the metadata of a llama-like file say about the model's shape, validated once, so that no
//! user of them meets a zero, a misfit or a wild size.

use super::error::GgufError;
use super::rope::RopeScaling;
use super::{Architecture, Gguf};

const LAYERS_MAX: u32 = 4096;
/// No size that the metadata give may exceed this; products of three of them still fit 128 bits, and two fit 64.
pub(super) const SIZE_MAX: u32 = 1 << 31;

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Hyperparameters {
    /// The value of `general.architecture`, which is also the prefix of the model's keys.
    pub architecture: String,
    pub layers: u32,
    /// Tokens of a sequence that the model was trained for.
    pub context_length: u32,
    pub embedding_length: u32,
    /// One value per layer, like the two that follow.
    pub feed_forward_length: Vec<u32>,
    pub head_count: Vec<u32>,
    /// Each divides the layer's `head_count`.
    pub head_count_kv: Vec<u32>,
    /// Elements of one head of queries and keys.
    pub key_length: u32,
    /// Elements of one head of values.
    pub value_length: u32,
    pub rms_epsilon: f32,
    /// Elements of a head that are rotated: even, at most `key_length`.
    pub rope_dimensions: u32,
    pub rope_base: f32,
    pub rope_scaling: RopeScaling,
    /// What cosines and sines are multiplied by: 1, but where long contexts get a sharper attention.
    pub rope_magnitude: f32,
    /// Where some layers see the last positions only.
    pub window: Option<SlidingWindow>,
    /// Rows of `token_embd.weight`.
    pub vocabulary_size: u32,
    /// The output head is the token embedding: there is no `output.weight`.
    pub tied_head: bool,
}

/// Layers that see the last positions only, between layers that see all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlidingWindow {
    /// How many positions a token sees, its own included: at least 1.
    pub positions: u32,
    /// Every so many-th layer sees all: at least 1.
    pub period: u32,
    /// The rope base of the layers with a window; their positions are not scaled.
    pub rope_base: f32,
}

impl SlidingWindow {
    /// How many positions a token sees in layer `layer`, counted from 0; `None` for all.
    pub fn of_layer(&self, layer: usize) -> Option<u32> {
        let sees_all = (layer as u64 + 1).is_multiple_of(u64::from(self.period));
        (!sees_all).then_some(self.positions)
    }
}

impl Hyperparameters {
    /// Elements of the keys and values of one token in the layers with a window, or in those that see all positions.
    pub fn kv_elements(&self, with_window: bool) -> u64 {
        let has_window = |layer| self.window.is_some_and(|it| it.of_layer(layer).is_some());
        let layers = self.head_count_kv.iter().enumerate();
        let heads = layers.filter(|&(layer, _)| has_window(layer) == with_window);
        let heads: u64 = heads.map(|(_, &heads)| u64::from(heads)).sum();
        heads.saturating_mul(u64::from(self.key_length) + u64::from(self.value_length))
    }

    /// Reads the keys `{architecture}.*` and the shape of `token_embd.weight`.
    ///
    /// # Errors
    /// Names the key that is missing, of another type or out of range.
    pub fn from_gguf(gguf: &Gguf) -> Result<Hyperparameters, GgufError> {
        let architecture = gguf.architecture()?.to_owned();
        super::shards::refuse_alone(gguf)?;
        let keys = Keys {
            gguf,
            architecture: &architecture,
        };
        let layers = keys.size("block_count", LAYERS_MAX)?;
        let context_length = keys.size("context_length", SIZE_MAX)?;
        let embedding_length = keys.size("embedding_length", SIZE_MAX)?;
        let feed_forward_length = keys
            .per_layer("feed_forward_length", layers)?
            .ok_or_else(|| keys.missing("feed_forward_length"))?;
        let head_count = keys
            .per_layer("attention.head_count", layers)?
            .ok_or_else(|| keys.missing("attention.head_count"))?;
        let head_count_kv = keys
            .per_layer("attention.head_count_kv", layers)?
            .unwrap_or_else(|| head_count.clone());
        for (layer, (heads, kv_heads)) in head_count.iter().zip(&head_count_kv).enumerate() {
            if !heads.is_multiple_of(*kv_heads) {
                return Err(keys.error(
                    "attention.head_count_kv",
                    format_args!(
                        "is {kv_heads} in layer {layer}, which does not divide its {heads} heads"
                    ),
                ));
            }
        }
        let heads = head_count.first().copied().unwrap_or(1);
        let key_length = keys.head_length("attention.key_length", embedding_length, heads)?;
        let value_length = keys.head_length("attention.value_length", embedding_length, heads)?;
        let rope = keys.rope(key_length, context_length)?;
        let window = match Architecture::from_name(&architecture) {
            Some(Architecture::Gemma3) => {
                keys.refuse_soft_caps()?;
                keys.window()?
            }
            _ => None,
        };
        let (vocabulary_size, tied_head) = vocabulary(gguf, embedding_length)?;
        Ok(Hyperparameters {
            layers,
            context_length,
            embedding_length,
            feed_forward_length,
            head_count,
            head_count_kv,
            key_length,
            value_length,
            rms_epsilon: keys.rms_epsilon()?,
            rope_dimensions: rope.dimensions,
            rope_base: rope.base,
            rope_scaling: rope.scaling,
            rope_magnitude: rope.magnitude,
            window,
            vocabulary_size,
            tied_head,
            architecture,
        })
    }

    /// How many kinds of layers there are: those that see everything, and those with a window. Each has a table of rope
    /// angles and a table of pages of its own in a step.
    pub fn layer_kinds(&self) -> u32 {
        1 + u32::from(self.window.is_some())
    }
}

/// Rows of the token embedding, and whether it is the output head as well.
fn vocabulary(gguf: &Gguf, embedding_length: u32) -> Result<(u32, bool), GgufError> {
    const EMBEDDING: &str = "token_embd.weight";
    const HEAD: &str = "output.weight";
    let rows_of = |name: &str| -> Result<Option<u32>, GgufError> {
        let Some((_, tensor)) = gguf.tensor(name) else {
            return Ok(None);
        };
        if tensor.dimensions.len() != 2 || tensor.columns() != u64::from(embedding_length) {
            return Err(GgufError::tensor(
                name,
                format_args!(
                    "has the dimensions {:?}; [{embedding_length}, vocabulary size] are expected",
                    tensor.dimensions
                ),
            ));
        }
        match u32::try_from(tensor.rows()) {
            Ok(rows) if rows <= SIZE_MAX => Ok(Some(rows)),
            _ => Err(GgufError::tensor(
                name,
                format_args!("has {} rows; at most {SIZE_MAX} are allowed", tensor.rows()),
            )),
        }
    };
    let rows = rows_of(EMBEDDING)?.ok_or_else(|| GgufError::MissingTensor {
        name: EMBEDDING.to_owned(),
    })?;
    match rows_of(HEAD)? {
        None => Ok((rows, true)),
        Some(head_rows) if head_rows == rows => Ok((rows, false)),
        Some(head_rows) => Err(GgufError::tensor(
            HEAD,
            format_args!("has {head_rows} rows and `{EMBEDDING}` has {rows}"),
        )),
    }
}

/// The keys of one architecture.
pub(super) struct Keys<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
}

impl Keys<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.architecture)
    }

    fn missing(&self, suffix: &str) -> GgufError {
        GgufError::MissingKey {
            key: self.name(suffix),
        }
    }

    pub(super) fn error(&self, suffix: &str, problem: std::fmt::Arguments<'_>) -> GgufError {
        GgufError::key(&self.name(suffix), problem)
    }

    pub(super) fn u32(&self, suffix: &str) -> Result<Option<u32>, GgufError> {
        self.gguf.metadata.u32(&self.name(suffix))
    }

    pub(super) fn f32(&self, suffix: &str) -> Result<Option<f32>, GgufError> {
        self.gguf.metadata.f32(&self.name(suffix))
    }

    pub(super) fn string(&self, suffix: &str) -> Result<Option<&str>, GgufError> {
        self.gguf.metadata.string(&self.name(suffix))
    }

    pub(super) fn check_size(&self, suffix: &str, value: u32, max: u32) -> Result<u32, GgufError> {
        if value == 0 || value > max {
            return Err(self.error(
                suffix,
                format_args!("is {value}; a value of 1 to {max} is expected"),
            ));
        }
        Ok(value)
    }

    fn size(&self, suffix: &str, max: u32) -> Result<u32, GgufError> {
        let value = self.gguf.metadata.require_u32(&self.name(suffix))?;
        self.check_size(suffix, value, max)
    }

    fn per_layer(&self, suffix: &str, layers: u32) -> Result<Option<Vec<u32>>, GgufError> {
        let values = self
            .gguf
            .metadata
            .per_layer_u32(&self.name(suffix), layers)?;
        for &value in values.iter().flatten() {
            self.check_size(suffix, value, SIZE_MAX)?;
        }
        Ok(values)
    }

    fn head_length(
        &self,
        suffix: &str,
        embedding_length: u32,
        heads: u32,
    ) -> Result<u32, GgufError> {
        if let Some(value) = self.gguf.metadata.u32(&self.name(suffix))? {
            return self.check_size(suffix, value, SIZE_MAX);
        }
        if !embedding_length.is_multiple_of(heads) {
            return Err(self.error(
                "attention.head_count",
                format_args!(
                    "is {heads}, which does not divide the embedding length {embedding_length}, and `{}` is missing",
                    self.name(suffix)
                ),
            ));
        }
        Ok(embedding_length / heads)
    }

    /// A float that is finite and more than zero.
    pub(super) fn positive(&self, suffix: &str) -> Result<Option<f32>, GgufError> {
        match self.f32(suffix)? {
            Some(value) if !value.is_finite() || value <= 0.0 => Err(self.error(
                suffix,
                format_args!("is {value}; a finite value above zero is expected"),
            )),
            other => Ok(other),
        }
    }

    fn rms_epsilon(&self) -> Result<f32, GgufError> {
        const EPSILON: &str = "attention.layer_norm_rms_epsilon";
        let epsilon = self
            .positive(EPSILON)?
            .ok_or_else(|| self.missing(EPSILON))?;
        if epsilon >= 1.0 {
            return Err(self.error(
                EPSILON,
                format_args!("is {epsilon}; a value below 1 is expected"),
            ));
        }
        Ok(epsilon)
    }

    /// A float that is finite, and zero or more.
    pub(super) fn not_negative(&self, suffix: &str) -> Result<Option<f32>, GgufError> {
        match self.f32(suffix)? {
            Some(value) if !value.is_finite() || value < 0.0 => Err(self.error(
                suffix,
                format_args!("is {value}; a finite value of zero or more is expected"),
            )),
            other => Ok(other),
        }
    }

    /// Of a model whose layers see a window, but for every sixth, unless the file says otherwise.
    fn window(&self) -> Result<Option<SlidingWindow>, GgufError> {
        const WINDOW: &str = "attention.sliding_window";
        const PERIOD: &str = "attention.sliding_window_pattern";
        const PERIOD_DEFAULT: u32 = 6;
        const ROPE_BASE_DEFAULT: f32 = 10_000.0;
        // A window of none is no window, as in llama.cpp.
        let Some(positions) = self.u32(WINDOW)?.filter(|&positions| positions > 0) else {
            return Ok(None);
        };
        let period = self.u32(PERIOD)?.unwrap_or(PERIOD_DEFAULT);
        Ok(Some(SlidingWindow {
            positions: self.check_size(WINDOW, positions, SIZE_MAX)?,
            period: self.check_size(PERIOD, period, LAYERS_MAX)?,
            rope_base: self
                .positive("rope.freq_base_swa")?
                .unwrap_or(ROPE_BASE_DEFAULT),
        }))
    }

    /// Gemma 2 bounds logits and scores by a hyperbolic tangent. Gemma 3 does not, and nothing here would compute it.
    fn refuse_soft_caps(&self) -> Result<(), GgufError> {
        for suffix in ["attn_logit_softcapping", "final_logit_softcapping"] {
            if let Some(cap) = self.f32(suffix)?
                && cap != 0.0
            {
                return Err(self.error(
                    suffix,
                    format_args!("is {cap}; bounded logits are not supported"),
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::hostile_tests::valid_file;
    use super::super::{Header, Metadata, TensorShape, Value};
    use super::*;

    #[track_caller]
    fn check_hyperparameters(key: &str, value: impl Into<Value>, says: &str) {
        let value = value.into();
        let gguf = Gguf::parse(&valid_file(|metadata| {
            metadata.insert(key, value);
        }))
        .unwrap();
        let error = Hyperparameters::from_gguf(&gguf).unwrap_err().to_string();
        assert!(
            error.contains(&format!("`{key}`")) && error.contains(says),
            "{error}"
        );
    }

    #[test]
    fn hyperparameters_that_make_no_model_name_the_key() {
        let check = check_hyperparameters;
        check("general.architecture", 7u32.into(), "is of type u32");
        check("split.count", "two".into(), "is of type string");
        check("split.count", 3000u16.into(), "at most 256 files");
        check("llama.block_count", Value::from("x"), "is of type string");
        check("llama.block_count", 0u32.into(), "1 to 4096");
        check("llama.block_count", 4097u32.into(), "1 to 4096");
        check("llama.block_count", (-1i32).into(), "is -1");
        check(
            "llama.context_length",
            (1u64 << 40).into(),
            "is 1099511627776",
        );
        check("llama.embedding_length", u32::MAX.into(), "1 to 2147483648");
        check(
            "llama.feed_forward_length",
            vec![16u32].into(),
            "holds 1 values and the model has 2 layers",
        );
        check(
            "llama.attention.head_count_kv",
            vec![2i32, 2, 2].into(),
            "holds 3 values",
        );
        check(
            "llama.attention.head_count_kv",
            vec![2i32, 0].into(),
            "is 0",
        );
        check(
            "llama.attention.head_count_kv",
            3u32.into(),
            "does not divide",
        );
        check(
            "llama.attention.head_count",
            6u32.into(),
            "does not divide the embedding length",
        );
        check(
            "llama.attention.layer_norm_rms_epsilon",
            f32::NAN.into(),
            "finite",
        );
        check(
            "llama.attention.layer_norm_rms_epsilon",
            2.0f32.into(),
            "below 1",
        );
        check("llama.rope.dimension_count", 3u32.into(), "an even number");
        check("llama.rope.dimension_count", 4u32.into(), "2 to 2");
        check("llama.rope.freq_base", 0.0f32.into(), "above zero");
    }

    #[test]
    fn counts_may_be_scalars_or_one_per_layer_in_any_width() {
        let read = |key: &str, value: Value| {
            let gguf = Gguf::parse(&valid_file(|metadata| {
                metadata.insert(key, value);
            }));
            Hyperparameters::from_gguf(&gguf.unwrap()).unwrap()
        };
        let scalar = read("llama.attention.head_count_kv", 2u32.into());
        assert_eq!(
            (scalar.key_length, scalar.vocabulary_size, scalar.tied_head),
            (2, 2, true)
        );
        for value in [
            2u64.into(),
            2i8.into(),
            vec![2i32, 2].into(),
            vec![2u32, 2].into(),
        ] {
            assert_eq!(read("llama.attention.head_count_kv", value), scalar);
        }
        let differing = read("llama.attention.head_count_kv", vec![2i32, 1].into());
        assert_eq!(differing.head_count_kv, [2, 1]);
        assert_eq!(read("llama.block_count", 2u64.into()), scalar);
    }

    #[test]
    fn the_window_of_gemma3_is_read_and_checked() {
        let read = |key: &str, value: Value| {
            let mut file = Metadata::new();
            let llama = Gguf::parse(&valid_file(|_| {})).unwrap();
            for (name, known) in llama.metadata.iter() {
                file.insert(name.replace("llama.", "gemma3."), known.clone());
            }
            file.insert("general.architecture", "gemma3");
            file.insert("gemma3.attention.sliding_window", 4u32);
            file.insert(format!("gemma3.{key}"), value);
            let tensors: Vec<TensorShape> = llama
                .tensors
                .iter()
                .map(|tensor| {
                    TensorShape::new(&*tensor.name, tensor.kind, tensor.dimensions.clone())
                })
                .collect();
            let header = Header::new(3, &file, &tensors).unwrap();
            Hyperparameters::from_gguf(header.index())
        };
        let window = read("attention.sliding_window", 7u32.into())
            .unwrap()
            .window
            .unwrap();
        assert_eq!(
            window,
            SlidingWindow {
                positions: 7,
                period: 6,
                rope_base: 10_000.0
            }
        );
        let seen: Vec<Option<u32>> = (0..13).map(|layer| window.of_layer(layer)).collect();
        let all: Vec<usize> = (0..13).filter(|&layer| seen[layer].is_none()).collect();
        assert_eq!((all, seen[0]), (vec![5, 11], Some(7)));

        let check = |key: &str, value: Value, says: &str| {
            let error = read(key, value).unwrap_err().to_string();
            assert!(
                error.contains(&format!("`gemma3.{key}`")) && error.contains(says),
                "{error}"
            );
        };
        let no_window = read("attention.sliding_window", 0u32.into()).unwrap();
        assert_eq!((no_window.window, no_window.kv_elements(true)), (None, 0));
        check(
            "attention.sliding_window",
            u32::MAX.into(),
            "1 to 2147483648",
        );
        check("attention.sliding_window_pattern", 0u32.into(), "is 0");
        check("rope.freq_base_swa", 0.0f32.into(), "above zero");
        check("final_logit_softcapping", 30.0f32.into(), "not supported");
        check("attn_logit_softcapping", 50.0f32.into(), "not supported");
    }
}
