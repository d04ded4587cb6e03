//! What is estimated. A card is one of three: the shape of a llama model (`gguf::card`), a perceptron (`[mlp]`), or no more
//! than a number of parameters.

use super::{EstimateError, in_64_bits};
use crate::gguf::card::{CardError, ShapeCard, syntax_error};
use crate::gguf::{Gguf, Hyperparameters, ModelShape};
use serde::Deserialize;

/// More layers than any perceptron has.
const LAYERS_MAX: usize = 4096;
/// No layer is wider. Products of two still fit 64 bits.
const WIDTH_MAX: i64 = 1 << 31;
/// A billion times a billion: no model has so many, and 16 bytes for each still fit 64 bits.
const PARAMETERS_MAX: i64 = 1_000_000_000_000_000_000;

/// A model whose needs are estimated.
#[derive(Clone, Debug)]
pub struct Subject {
    pub name: String,
    /// Numbers that training changes.
    pub parameters: u64,
    pub kind: SubjectKind,
    /// In the order of a forward pass; empty where only the number of parameters is known.
    pub(super) layers: Vec<Layer>,
}

#[derive(Clone, Debug)]
pub enum SubjectKind {
    /// A model that strata can plan for.
    Transformer(Box<Transformer>),
    /// Fully connected layers: the widths from input to output.
    Perceptron { widths: Vec<u64> },
    /// The shape is not known.
    Parameters,
}

/// A shape card's model, or a file's.
#[derive(Clone, Debug)]
pub struct Transformer {
    pub(super) gguf: Gguf,
    pub(super) shape: Hyperparameters,
    pub(super) rules: ModelShape,
}

impl Transformer {
    /// The tensors and metadata, with no file behind them where they are from a card.
    pub fn index(&self) -> &Gguf {
        &self.gguf
    }

    /// Tokens of a sequence that the model was trained for.
    pub fn context_length(&self) -> u32 {
        self.shape.context_length
    }
}

/// What may be cut from the next one for checkpoints and pipeline stages. Numbers of elements, for one position of one
/// sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Layer {
    pub(super) parameters: u64,
    /// What comes into the layer, which a checkpoint keeps.
    pub(super) input: u64,
    /// Everything that its backward pass reads, the input included.
    pub(super) saved: u64,
}

/// A card that only this module reads.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SimpleCard {
    name: Option<String>,
    parameters: Option<i64>,
    mlp: Option<Perceptron>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Perceptron {
    layers: Vec<i64>,
    #[serde(default = "yes")]
    bias: bool,
}

fn yes() -> bool {
    true
}

impl Subject {
    /// What a card's text describes. `[mlp]` and `parameters` make it a card of this module; every other one is a shape
    /// card.
    pub fn from_card(text: &str) -> Result<Subject, EstimateError> {
        let table: toml::Table =
            toml::from_str(text).map_err(|error| syntax_error(text, &error))?;
        if !table.contains_key("mlp") && !table.contains_key("parameters") {
            let card = ShapeCard::parse(text)?;
            return Subject::from_index(card.name().to_owned(), card.index());
        }
        let card: SimpleCard = toml::from_str(text).map_err(|error| syntax_error(text, &error))?;
        match (card.parameters, card.mlp) {
            (Some(_), Some(_)) => Err(EstimateError::Key(
                "`parameters` and `[mlp]` exclude each other: the number follows from the layers"
                    .to_owned(),
            )),
            (Some(parameters), None) => {
                let parameters = within("parameters", parameters, PARAMETERS_MAX)?;
                Ok(Subject {
                    name: card.name.unwrap_or_else(|| "a model".to_owned()),
                    parameters,
                    kind: SubjectKind::Parameters,
                    layers: Vec::new(),
                })
            }
            (None, Some(perceptron)) => perceptron.subject(card.name),
            (None, None) => Err(EstimateError::Card(CardError::Shape(
                "neither `parameters` nor `[mlp]` is given".to_owned(),
            ))),
        }
    }

    /// A file's model.
    pub fn from_index(name: String, gguf: Gguf) -> Result<Subject, EstimateError> {
        let shape = Hyperparameters::from_gguf(&gguf)?;
        let rules = ModelShape::of(&gguf)?;
        let layers = layers_of(&gguf, &shape);
        let parameters = (layers.iter())
            .map(|layer| u128::from(layer.parameters))
            .sum();
        let parameters = in_64_bits("the parameters", parameters)?;
        Ok(Subject {
            name,
            parameters,
            layers,
            kind: SubjectKind::Transformer(Box::new(Transformer { gguf, shape, rules })),
        })
    }
}

fn within(key: &str, value: i64, max: i64) -> Result<u64, EstimateError> {
    match u64::try_from(value) {
        Ok(number) if (1..=max).contains(&value) => Ok(number),
        _ => Err(EstimateError::Key(format!(
            "`{key}` is {value}; a value of 1 to {max} is expected"
        ))),
    }
}

impl Perceptron {
    fn subject(self, name: Option<String>) -> Result<Subject, EstimateError> {
        if !(2..=LAYERS_MAX).contains(&self.layers.len()) {
            return Err(EstimateError::Key(format!(
                "`mlp.layers` has {} widths; 2 to {LAYERS_MAX} are expected, from input to output",
                self.layers.len()
            )));
        }
        let mut widths = Vec::with_capacity(self.layers.len());
        for (index, &width) in self.layers.iter().enumerate() {
            widths.push(within(&format!("mlp.layers[{index}]"), width, WIDTH_MAX)?);
        }
        let layers: Vec<Layer> = widths
            .windows(2)
            .filter_map(|pair| <[u64; 2]>::try_from(pair).ok())
            .map(|[input, output]| Layer {
                parameters: input * output + if self.bias { output } else { 0 },
                input,
                saved: input,
            })
            .collect();
        let parameters: u128 = layers
            .iter()
            .map(|layer| u128::from(layer.parameters))
            .sum();
        let parameters = u64::try_from(parameters)
            .ok()
            .filter(|&parameters| parameters <= PARAMETERS_MAX as u64)
            .ok_or_else(|| {
                EstimateError::Key(format!(
                    "`mlp.layers` makes {parameters} parameters; at most {PARAMETERS_MAX} are expected"
                ))
            })?;
        Ok(Subject {
            name: name.unwrap_or_else(|| "a perceptron".to_owned()),
            parameters,
            layers,
            kind: SubjectKind::Perceptron { widths },
        })
    }
}

/// The layers of a transformer: the embedding stands with the first, norm and head are one more.
///
/// What a layer saves for each position, where attention is computed as in Dao et al. 2022 (FlashAttention), which keeps a
/// sum for each head in place of the scores: the inputs of both norms and what they give (4 E), queries, keys and values
/// (q + k + v), attention's output (o) and sums (one for each head), gate and up (2 F) and their product (F). The head:
/// the norm's input and output (2 E) and the logits (V).
fn layers_of(gguf: &Gguf, shape: &Hyperparameters) -> Vec<Layer> {
    let embedding = u64::from(shape.embedding_length);
    let at = |values: &[u32], layer: usize| u64::from(values.get(layer).copied().unwrap_or(0));
    let length = |heads: u64, length: u32| heads * u64::from(length);
    let mut layers: Vec<Layer> = (0..shape.layers as usize)
        .map(|layer| {
            let heads = at(&shape.head_count, layer);
            let heads_kv = at(&shape.head_count_kv, layer);
            let attention = length(heads, shape.key_length)
                + length(heads_kv, shape.key_length)
                + length(heads_kv, shape.value_length)
                + length(heads, shape.value_length);
            Layer {
                parameters: 0,
                input: embedding,
                saved: 4 * embedding
                    + attention
                    + heads
                    + 3 * at(&shape.feed_forward_length, layer),
            }
        })
        .collect();
    layers.push(Layer {
        parameters: 0,
        input: embedding,
        saved: 2 * embedding + u64::from(shape.vocabulary_size),
    });
    let head = layers.len() - 1;
    for tensor in &gguf.tensors {
        let parts = (tensor.name.strip_prefix("blk.")).and_then(|name| name.split_once('.'));
        let layer = match tensor.name.as_str() {
            // Computed from the card's or the file's numbers, and not trained.
            "rope_freqs.weight" => continue,
            "token_embd.weight" => 0,
            _ => parts
                .and_then(|(number, _)| number.parse().ok())
                .filter(|&layer| layer < head)
                .unwrap_or(head),
        };
        if let Some(layer) = layers.get_mut(layer) {
            let elements = tensor.columns().saturating_mul(tensor.rows());
            layer.parameters = layer.parameters.saturating_add(elements);
        }
    }
    layers
}
