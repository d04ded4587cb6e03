//! Shape cards: a model described without its weights (models/*.toml), and the index that its file would have. A plan
//! can be made from a card, and `synth` writes a file from one.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::error::quote;
use super::mixture::{Mixture, ModelShape};
use super::reader::open_without_waiting;
use super::{
    Architecture, Gguf, GgufError, Header, Hyperparameters, LayerSizes, Metadata, TensorShape,
    TensorType,
};

/// No card is near this long; more is some other file.
const CARD_BYTES_MAX: u64 = 1 << 20;
/// More layers and a larger vocabulary than any known model, and little enough that an index of them is small.
const LAYERS_MAX: u32 = 4096;
const VOCABULARY_MAX: u32 = 1 << 24;

/// The shape of a model, checked: the file that it describes is one that strata would load.
#[derive(Clone, Debug)]
pub struct ShapeCard {
    fields: Fields,
    header: Header,
}

#[derive(Debug, thiserror::Error)]
pub enum CardError {
    #[error("cannot read the shape card {}: {error}", path.display())]
    Read {
        path: PathBuf,
        error: std::io::Error,
    },

    #[error("shape card, line {line}: {problem}")]
    Syntax { line: usize, problem: String },

    #[error("shape card: {0}")]
    Shape(String),

    /// The file that the card describes would be refused; the message names the key or tensor of that file.
    #[error("the card describes a model that cannot be loaded: {0}")]
    Model(GgufError),
}

/// The keys of a card.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    name: String,
    architecture: String,
    layers: u32,
    embedding_length: u32,
    feed_forward_length: u32,
    head_count: u32,
    head_count_kv: u32,
    key_length: Option<u32>,
    value_length: Option<u32>,
    vocabulary_size: u32,
    context_length: u32,
    rms_epsilon: f32,
    tied_head: bool,
    /// How many positions most layers of a `gemma3` see.
    sliding_window: Option<u32>,
    quantisation: Mixture,
    rope: Rope,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rope {
    base: f32,
    dimensions: Option<u32>,
    /// Positions are divided by this.
    linear: Option<f32>,
    llama3: Option<Llama3>,
    yarn: Option<Yarn>,
}

/// YaRN, with the defaults of its paper: <https://arxiv.org/abs/2309.00071>.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Yarn {
    factor: f32,
    original_context_length: u32,
}

/// The scaling of Llama 3.1 and later: <https://arxiv.org/abs/2407.21783>, section 3.2, in the form of its configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Llama3 {
    factor: f32,
    low_frequency_factor: f32,
    high_frequency_factor: f32,
    original_context_length: u32,
}

impl ShapeCard {
    pub fn open(path: &Path) -> Result<ShapeCard, CardError> {
        ShapeCard::parse(&read_card(path)?)
    }

    pub fn parse(text: &str) -> Result<ShapeCard, CardError> {
        let fields: Fields = toml::from_str(text).map_err(|error| syntax_error(text, &error))?;
        fields.check()?;
        let header =
            Header::new(3, &fields.metadata(), &fields.tensors()).map_err(CardError::Model)?;
        Hyperparameters::from_gguf(header.index()).map_err(CardError::Model)?;
        Ok(ShapeCard { fields, header })
    }

    /// The index of the file that the card describes. It has no vocabulary, so a file with one has the same tensors at
    /// offsets that are larger by the vocabulary's size.
    pub fn index(&self) -> Gguf {
        self.header.index().clone()
    }

    pub fn name(&self) -> &str {
        &self.fields.name
    }

    pub fn vocabulary_size(&self) -> u32 {
        self.fields.vocabulary_size
    }

    /// The model's keys: all but those of the vocabulary.
    pub fn metadata(&self) -> Metadata {
        self.fields.metadata()
    }

    /// The tensors in the order of the file.
    pub fn tensors(&self) -> Vec<TensorShape> {
        self.fields.tensors()
    }

    /// The content of `rope_freqs.weight`, where the model has it: what each inverse frequency is divided by.
    pub fn rope_factors(&self) -> Option<Vec<f32>> {
        let llama3 = self.fields.rope.llama3.as_ref()?;
        let dimensions = self.fields.rope_dimensions();
        Some(llama3.factors(self.fields.rope.base, dimensions))
    }
}

/// Whether a path names a card, and not a model's file.
pub fn is_card(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "toml")
}

/// The text of a card: a regular file of no more than a card's size.
pub fn read_card(path: &Path) -> Result<String, CardError> {
    let read = || {
        let file = open_without_waiting(path)?;
        let attributes = file.metadata()?;
        if !attributes.is_file() {
            return Err(std::io::Error::other("it is not a regular file"));
        }
        let bytes = attributes.len();
        if bytes > CARD_BYTES_MAX {
            return Err(std::io::Error::other(format!(
                "it has {bytes} bytes; a card has at most {CARD_BYTES_MAX}"
            )));
        }
        std::io::read_to_string(file.take(CARD_BYTES_MAX))
    };
    read().map_err(|error| CardError::Read {
        path: path.to_owned(),
        error,
    })
}

/// Where a card's text is not what its keys ask for: the line, and the key that stands there.
pub fn syntax_error(text: &str, error: &toml::de::Error) -> CardError {
    let start = error.span().map_or(0, |span| span.start);
    let before = text.get(..start).unwrap_or_default();
    let number = before.matches('\n').count();
    let line = text.lines().nth(number).unwrap_or_default();
    let mut problem = error.message().replace('\n', " ");
    // A key that is missing is told with the table that lacks it, which begins with some other key.
    let is_missing = problem.starts_with("missing field");
    if let Some((key, _)) = line.split_once('=').filter(|_| !is_missing) {
        let key = quote(key.trim());
        if !problem.contains(&key) {
            problem.push_str(&format!(" (in {key})"));
        }
    }
    CardError::Syntax {
        line: number + 1,
        problem,
    }
}

impl Fields {
    /// What would make the index too large to build, or is not a question of the file that results.
    fn check(&self) -> Result<(), CardError> {
        let wrong = |problem: String| Err(CardError::Shape(problem));
        if Architecture::from_name(&self.architecture).is_none() {
            let known = Architecture::ALL.map(Architecture::name).join(", ");
            return wrong(format!(
                "`architecture` is `{}`; cards of these are supported: {known}",
                self.architecture.escape_debug()
            ));
        }
        for (key, value, max) in [
            ("layers", self.layers, LAYERS_MAX),
            ("vocabulary_size", self.vocabulary_size, VOCABULARY_MAX),
            ("head_count", self.head_count, u32::MAX),
            ("head_count_kv", self.head_count_kv, u32::MAX),
        ] {
            if value == 0 || value > max {
                return wrong(format!(
                    "`{key}` is {value}; a value of 1 to {max} is expected"
                ));
            }
        }
        let scalings = [
            self.rope.linear.is_some(),
            self.rope.llama3.is_some(),
            self.rope.yarn.is_some(),
        ];
        if scalings.into_iter().filter(|&is_there| is_there).count() > 1 {
            return wrong(
                "`rope.linear`, `rope.llama3` and `rope.yarn` exclude each other".to_owned(),
            );
        }
        if self.sliding_window.is_some() && self.architecture != Architecture::Gemma3.name() {
            return wrong("`sliding_window` is for models of `gemma3`".to_owned());
        }
        if let Some(llama3) = &self.rope.llama3 {
            llama3.check()?;
            if self.rope_dimensions() > 1 << 16 {
                return wrong(format!(
                    "heads of {} elements are too large",
                    self.rope_dimensions()
                ));
            }
        }
        Ok(())
    }

    fn key_length(&self) -> u32 {
        self.key_length
            .unwrap_or(self.embedding_length / self.head_count)
    }

    fn value_length(&self) -> u32 {
        self.value_length
            .unwrap_or(self.embedding_length / self.head_count)
    }

    fn rope_dimensions(&self) -> u32 {
        self.rope.dimensions.unwrap_or(self.key_length())
    }

    fn metadata(&self) -> Metadata {
        let mut metadata = Metadata::new();
        metadata.insert("general.architecture", self.architecture.as_str());
        metadata.insert("general.type", "model");
        metadata.insert("general.name", self.name.as_str());
        let mut insert = |suffix: &str, value: super::Value| {
            metadata.insert(format!("{}.{suffix}", self.architecture), value);
        };
        insert("block_count", self.layers.into());
        insert("context_length", self.context_length.into());
        insert("embedding_length", self.embedding_length.into());
        insert("feed_forward_length", self.feed_forward_length.into());
        insert("attention.head_count", self.head_count.into());
        insert("attention.head_count_kv", self.head_count_kv.into());
        if let Some(length) = self.key_length {
            insert("attention.key_length", length.into());
        }
        if let Some(length) = self.value_length {
            insert("attention.value_length", length.into());
        }
        insert("attention.layer_norm_rms_epsilon", self.rms_epsilon.into());
        insert("rope.freq_base", self.rope.base.into());
        insert("rope.dimension_count", self.rope_dimensions().into());
        if let Some(factor) = self.rope.linear {
            insert("rope.scaling.type", "linear".into());
            insert("rope.scaling.factor", factor.into());
        }
        if let Some(yarn) = &self.rope.yarn {
            insert("rope.scaling.type", "yarn".into());
            insert("rope.scaling.factor", yarn.factor.into());
            insert(
                "rope.scaling.original_context_length",
                yarn.original_context_length.into(),
            );
        }
        if let Some(window) = self.sliding_window {
            insert("attention.sliding_window", window.into());
        }
        insert("vocab_size", self.vocabulary_size.into());
        metadata.insert("general.file_type", self.quantisation.file_type());
        metadata.insert("general.quantization_version", 2u32);
        metadata
    }

    fn tensors(&self) -> Vec<TensorShape> {
        let shape = ModelShape {
            layers: self.layers,
            grouped_queries: self.head_count / self.head_count_kv,
            experts: 0,
            tied_head: self.tied_head,
        };
        let width = u64::from(self.embedding_length);
        let feed_forward = u64::from(self.feed_forward_length);
        let rows = |heads: u32, length: u32| u64::from(heads) * u64::from(length);
        let query_rows = rows(self.head_count, self.key_length());
        let key_rows = rows(self.head_count_kv, self.key_length());
        let value_rows = rows(self.head_count_kv, self.value_length());
        let output_columns = rows(self.head_count, self.value_length());
        let vocabulary = u64::from(self.vocabulary_size);

        let matrix = |name: &str, columns: u64, rows: u64| {
            let dimensions = [columns, rows];
            let kind = match self.quantisation.choose(name, &dimensions, shape) {
                Some(choice) => choice.kind,
                None => TensorType::F32,
            };
            TensorShape::new(name, kind, dimensions)
        };
        let vector = |name: &str, length: u64| TensorShape::new(name, TensorType::F32, [length]);
        let sizes = LayerSizes {
            embedding_length: self.embedding_length,
            head_count: self.head_count,
            head_count_kv: self.head_count_kv,
            key_length: self.key_length(),
            value_length: self.value_length(),
        };
        let architecture = Architecture::from_name(&self.architecture);
        let added = architecture.map_or(&[][..], Architecture::added_vectors);
        let mut tensors = Vec::new();
        if self.rope.llama3.is_some() {
            tensors.push(vector(
                "rope_freqs.weight",
                u64::from(self.rope_dimensions() / 2),
            ));
        }
        tensors.push(matrix("token_embd.weight", width, vocabulary));
        for layer in 0..self.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            tensors.push(vector(&name("attn_norm"), width));
            for (part, columns, rows) in [
                ("attn_q", width, query_rows),
                ("attn_k", width, key_rows),
                ("attn_v", width, value_rows),
                ("attn_output", output_columns, width),
            ] {
                tensors.push(matrix(&name(part), columns, rows));
            }
            for added in added {
                let name = format!("blk.{layer}.{}", added.name);
                tensors.push(vector(&name, added.elements(&sizes)));
            }
            tensors.push(vector(&name("ffn_norm"), width));
            for (part, columns, rows) in [
                ("ffn_gate", width, feed_forward),
                ("ffn_up", width, feed_forward),
                ("ffn_down", feed_forward, width),
            ] {
                tensors.push(matrix(&name(part), columns, rows));
            }
        }
        tensors.push(vector("output_norm.weight", width));
        if !self.tied_head {
            tensors.push(matrix("output.weight", width, vocabulary));
        }
        tensors
    }
}

impl Llama3 {
    fn check(&self) -> Result<(), CardError> {
        for (key, value) in [
            ("factor", self.factor),
            ("low_frequency_factor", self.low_frequency_factor),
            ("high_frequency_factor", self.high_frequency_factor),
            (
                "original_context_length",
                self.original_context_length as f32,
            ),
        ] {
            if !value.is_finite() || value <= 0.0 {
                return Err(CardError::Shape(format!(
                    "`rope.llama3.{key}` is {value}; a finite value above zero is expected"
                )));
            }
        }
        if self.high_frequency_factor <= self.low_frequency_factor {
            return Err(CardError::Shape(
                "`rope.llama3.high_frequency_factor` must exceed `low_frequency_factor`".to_owned(),
            ));
        }
        Ok(())
    }

    /// One factor per pair of rotated elements: 1 for wavelengths well inside the original context, `factor` for those
    /// that exceed it, and a blend between.
    fn factors(&self, base: f32, dimensions: u32) -> Vec<f32> {
        let context = f64::from(self.original_context_length);
        let low = f64::from(self.low_frequency_factor);
        let high = f64::from(self.high_frequency_factor);
        let factor = f64::from(self.factor);
        (0..dimensions / 2)
            .map(|pair| {
                let exponent = f64::from(2 * pair) / f64::from(dimensions);
                let wavelength = 2.0 * std::f64::consts::PI * f64::from(base).powf(exponent);
                let turns = context / wavelength;
                let divisor = if turns > high {
                    1.0
                } else if turns < low {
                    factor
                } else {
                    let smooth = (turns - low) / (high - low);
                    1.0 / ((1.0 - smooth) / factor + smooth)
                };
                divisor as f32
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn card(file: &str) -> ShapeCard {
        ShapeCard::open(
            &Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("models")
                .join(file),
        )
        .unwrap()
    }

    /// Tensors by type, parameters, and GiB of weights to two digits.
    fn summary(card: &ShapeCard) -> (BTreeMap<&'static str, usize>, u64, String) {
        let index = card.index();
        let mut kinds = BTreeMap::new();
        for tensor in &index.tensors {
            *kinds.entry(tensor.kind.name()).or_default() += 1;
        }
        let parameters = index
            .tensors
            .iter()
            .filter(|tensor| tensor.name != "rope_freqs.weight")
            .map(|tensor| tensor.rows() * tensor.columns())
            .sum();
        let bytes: u64 = index.tensors.iter().map(|tensor| tensor.bytes).sum();
        (
            kinds,
            parameters,
            format!("{:.2}", bytes as f64 / (1u64 << 30) as f64),
        )
    }

    /// The figures that llama.cpp prints for the published files: tensors of each type, parameters and size.
    #[test]
    fn cards_have_the_size_of_the_published_files() {
        let (kinds, parameters, gib) = summary(&card("tinyllama-1.1b.toml"));
        assert_eq!(
            kinds,
            BTreeMap::from([("F32", 45), ("Q4_K", 135), ("Q6_K", 21)])
        );
        assert_eq!((parameters, gib.as_str()), (1_100_048_384, "0.62"));

        let (kinds, parameters, gib) = summary(&card("llama-3.1-8b.toml"));
        assert_eq!(
            kinds,
            BTreeMap::from([("F32", 66), ("Q4_K", 193), ("Q6_K", 33)])
        );
        assert_eq!((parameters, gib.as_str()), (8_030_261_248, "4.58"));

        let (kinds, parameters, gib) = summary(&card("llama-3.3-70b.toml"));
        assert_eq!(
            kinds,
            BTreeMap::from([("F32", 162), ("Q4_K", 441), ("Q5_K", 40), ("Q6_K", 81)])
        );
        assert_eq!((parameters, gib.as_str()), (70_553_706_496, "39.59"));

        let (kinds, parameters, gib) = summary(&card("smollm2-135m.toml"));
        assert_eq!(
            kinds,
            BTreeMap::from([
                ("F32", 61),
                ("Q4_K", 16),
                ("Q5_0", 166),
                ("Q6_K", 14),
                ("Q8_0", 15)
            ])
        );
        assert_eq!((parameters, gib.as_str()), (134_515_008, "0.10"));
    }

    /// The sizes of the published checkpoints, and the vectors that tell the architectures apart.
    #[test]
    fn cards_of_other_architectures_have_the_published_parameters() {
        for (file, expected, vector, length) in [
            ("qwen2.5-7b.toml", 7_615_616_512, "attn_k.bias", 512),
            ("qwen3-8b.toml", 8_190_735_360, "attn_q_norm.weight", 128),
            (
                "gemma-3-27b.toml",
                27_009_346_304,
                "post_ffw_norm.weight",
                5376,
            ),
        ] {
            let card = card(file);
            let (_, parameters, _) = summary(&card);
            assert_eq!(parameters, expected, "{file}");
            let index = card.index();
            let (_, tensor) = index.tensor(&format!("blk.3.{vector}")).unwrap();
            assert_eq!(tensor.dimensions, [length], "{file}, {vector}");
        }
        let parameters = Hyperparameters::from_gguf(&card("gemma-3-27b.toml").index()).unwrap();
        let window = parameters.window.unwrap();
        assert_eq!((window.positions, window.of_layer(61)), (1024, Some(1024)));
        assert_eq!((window.of_layer(59), parameters.key_length), (None, 128));
    }

    #[test]
    fn a_card_may_stretch_its_context_by_yarn() {
        let text = format!("{CARD}yarn = {{ factor = 4.0, original_context_length = 128 }}\n");
        let index = ShapeCard::parse(&text).unwrap().index();
        let parameters = Hyperparameters::from_gguf(&index).unwrap();
        let super::super::RopeScaling::Yarn(yarn) = parameters.rope_scaling else {
            panic!("{parameters:?}");
        };
        assert_eq!((yarn.factor, yarn.original_context_length), (4.0, 128));
    }

    /// Values that llama.cpp's converter writes into rope_freqs.weight of Llama 3.1 8B.
    #[test]
    fn llama3_factors_are_one_then_a_blend_then_the_factor() {
        let factors = card("llama-3.1-8b.toml").rope_factors().unwrap();
        assert_eq!(factors.len(), 64);
        assert!(factors[..29].iter().all(|&factor| factor == 1.0));
        assert!(
            factors[29..35].windows(2).all(|pair| pair[0] < pair[1]),
            "{factors:?}"
        );
        assert!(factors[35..].iter().all(|&factor| factor == 8.0));
    }

    const CARD: &str = "name = 'x'\narchitecture = 'llama'\nlayers = 2\nembedding_length = 64\nfeed_forward_length = 96\n\
        head_count = 4\nhead_count_kv = 2\nvocabulary_size = 288\ncontext_length = 512\nrms_epsilon = 1e-5\ntied_head = true\n\
        quantisation = 'q8_0'\n[rope]\nbase = 10000.0\n";

    #[test]
    fn the_index_of_a_card_is_that_of_a_loadable_model() {
        let mut text = CARD.replace("'q8_0'", "'f32'");
        text.push_str("linear = 4.0\n");
        let index = ShapeCard::parse(&text).unwrap().index();
        let parameters = Hyperparameters::from_gguf(&index).unwrap();
        assert_eq!(
            parameters.rope_scaling,
            super::super::RopeScaling::Linear { factor: 4.0 }
        );
        assert_eq!((parameters.key_length, parameters.tied_head), (16, true));
        let (_, tensor) = index.tensor("blk.1.ffn_down.weight").unwrap();
        assert_eq!(
            (tensor.columns(), tensor.rows(), tensor.bytes),
            (96, 64, 96 * 64 * 4)
        );
    }

    #[test]
    fn a_wrong_card_names_the_line_or_the_key() {
        let check = |from: &str, to: &str, says: &str| {
            let text = CARD.replace(from, to);
            assert_ne!(text, CARD);
            let error = ShapeCard::parse(&text).unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        };
        check(
            "layers = 2",
            "layers = 2\nlayer = 3",
            "line 4: unknown field `layer`",
        );
        check("layers = 2\n", "", "missing field `layers`");
        check("layers = 2", "layers = 'two'", "line 3: invalid type");
        check("layers = 2", "layers = 99999999999", "(in `layers`)");
        check("layers = 2", "layers = 0", "`layers` is 0");
        check("layers = 2", "layers = 4000000000", "1 to 4096");
        check("head_count = 4", "head_count = 0", "`head_count` is 0");
        check(
            "head_count_kv = 2",
            "head_count_kv = 3",
            "`llama.attention.head_count_kv`",
        );
        check("'llama'", "'qwen9'", "`architecture` is `qwen9`");
        check("'q8_0'", "'q9_9'", "unknown variant `q9_9`");
        check(
            "rms_epsilon = 1e-5",
            "rms_epsilon = nan",
            "layer_norm_rms_epsilon",
        );
        check(
            "embedding_length = 64",
            "embedding_length = 0",
            "dimension of zero",
        );
        check("base = 10000.0", "base = 0.0", "`llama.rope.freq_base`");
        check(
            "base = 10000.0",
            "base = 1e4\ntheta = 2",
            "unknown field `theta`",
        );
        let both = "base = 1e4\nlinear = 2.0\nllama3 = { factor = 8.0, low_frequency_factor = 1.0, \
            high_frequency_factor = 4.0, original_context_length = 8192 }";
        check("base = 10000.0", both, "exclude each other");
        check(
            "layers = 2",
            "layers = 2\nsliding_window = 7",
            "is for models of `gemma3`",
        );
        let yarn = "base = 1e4\nyarn = { factor = 4.0, original_context_length = 0 }";
        check("base = 10000.0", yarn, "original_context_length");
    }
}
