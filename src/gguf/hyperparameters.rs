//! Hyper-parameters: what the metadata of a llama-like file say about the model's shape, validated once, so that no
//! user of them meets a zero, a misfit or a wild size.

use super::Gguf;
use super::error::GgufError;

const LAYERS_MAX: u32 = 4096;
/// No size that the metadata give may exceed this; products of three of them still fit 128 bits, and two fit 64.
const SIZE_MAX: u32 = 1 << 31;
const ROPE_BASE_DEFAULT: f32 = 10_000.0;

/// The shape of a model of the llama family.
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
    /// Rows of `token_embd.weight`.
    pub vocabulary_size: u32,
    /// The output head is the token embedding: there is no `output.weight`.
    pub tied_head: bool,
}

/// How positions are stretched beyond the context of the first training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions are divided by the factor.
    Linear {
        factor: f32,
    },
}

impl Hyperparameters {
    /// Elements of the keys and values of one token, all layers.
    pub fn kv_elements(&self) -> u64 {
        let heads: u64 = self.head_count_kv.iter().copied().map(u64::from).sum();
        heads.saturating_mul(u64::from(self.key_length) + u64::from(self.value_length))
    }

    /// Reads the keys `{architecture}.*` and the shape of `token_embd.weight`.
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
        let (rope_dimensions, rope_base) = keys.rope(key_length)?;
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
            rope_dimensions,
            rope_base,
            rope_scaling: keys.rope_scaling()?,
            vocabulary_size,
            tied_head,
            architecture,
        })
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
struct Keys<'a> {
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

    fn error(&self, suffix: &str, problem: std::fmt::Arguments<'_>) -> GgufError {
        GgufError::key(&self.name(suffix), problem)
    }

    fn check_size(&self, suffix: &str, value: u32, max: u32) -> Result<u32, GgufError> {
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
    fn positive(&self, suffix: &str) -> Result<Option<f32>, GgufError> {
        let value = self.gguf.metadata.f32(&self.name(suffix))?;
        match value {
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

    fn rope(&self, key_length: u32) -> Result<(u32, f32), GgufError> {
        const DIMENSIONS: &str = "rope.dimension_count";
        let dimensions = self
            .gguf
            .metadata
            .u32(&self.name(DIMENSIONS))?
            .unwrap_or(key_length);
        if dimensions == 0 || !dimensions.is_multiple_of(2) || dimensions > key_length {
            return Err(self.error(
                DIMENSIONS,
                format_args!("is {dimensions}; an even number of 2 to {key_length}, the elements of a head, is expected"),
            ));
        }
        let base = self
            .positive("rope.freq_base")?
            .unwrap_or(ROPE_BASE_DEFAULT);
        Ok((dimensions, base))
    }

    /// The factor of linear scaling also stands in files without a type, and under an old key.
    fn rope_scaling(&self) -> Result<RopeScaling, GgufError> {
        const TYPE: &str = "rope.scaling.type";
        const FACTOR: &str = "rope.scaling.factor";
        const OLD_FACTOR: &str = "rope.scale_linear";
        match self.gguf.metadata.string(&self.name(TYPE))? {
            None | Some("linear") => {}
            Some("none") => return Ok(RopeScaling::None),
            Some(other) => {
                return Err(self.error(
                    TYPE,
                    format_args!(
                        "is {}, which is not supported; strata knows `none` and `linear`",
                        super::error::quote(other)
                    ),
                ));
            }
        }
        let factor = match self.scaling_factor(FACTOR)? {
            Some(factor) => Some(factor),
            None => self.scaling_factor(OLD_FACTOR)?,
        };
        Ok(match factor {
            None => RopeScaling::None,
            Some(factor) => RopeScaling::Linear { factor },
        })
    }

    /// Zero and one both mean that nothing is scaled.
    fn scaling_factor(&self, suffix: &str) -> Result<Option<f32>, GgufError> {
        if self.gguf.metadata.f32(&self.name(suffix))? == Some(0.0) {
            return Ok(None);
        }
        Ok(self.positive(suffix)?.filter(|&factor| factor != 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Value;
    use super::super::hostile_tests::valid_file;
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
        check(
            "llama.rope.scaling.type",
            "yarn".into(),
            "`yarn`, which is not supported",
        );
        check("llama.rope.scaling.factor", f32::INFINITY.into(), "finite");
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
    fn linear_rope_scaling_is_read_under_its_new_and_its_old_key() {
        use RopeScaling::{Linear, None};
        for (pairs, scaling) in [
            (&[][..], None),
            (&[("scaling.factor", 4.0f32)][..], Linear { factor: 4.0 }),
            (&[("scale_linear", 4.0)], Linear { factor: 4.0 }),
            (
                &[("scaling.factor", 2.0), ("scale_linear", 4.0)],
                Linear { factor: 2.0 },
            ),
            (&[("scaling.factor", 0.0)], None),
            (&[("scaling.factor", 1.0)], None),
        ] {
            let file = valid_file(|metadata| {
                for &(key, value) in pairs {
                    metadata.insert(format!("llama.rope.{key}"), value);
                }
            });
            let gguf = Gguf::parse(&file).unwrap();
            assert_eq!(
                Hyperparameters::from_gguf(&gguf).unwrap().rope_scaling,
                scaling,
                "{pairs:?}"
            );
        }
    }
}
