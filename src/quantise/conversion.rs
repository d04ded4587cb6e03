//! What a quantised file will be: its types, its metadata, its index.

use super::{FLOAT_BYTES, QuantiseError};
use crate::gguf::{
    Choice, Gguf, Header, Metadata, Mixture, ModelShape, TensorShape, TensorType, refuse_alone,
};
use std::collections::BTreeMap;

/// Of all block formats as they are today (`GGML_QNT_VERSION`).
const QUANTISATION_VERSION: u32 = 2;
const SPLIT_KEYS: &str = "split.";

/// A file that is to be made from another.
#[derive(Clone, Debug)]
pub struct Conversion {
    input: Gguf,
    header: Header,
    choices: Vec<Option<Choice>>,
}

impl Conversion {
    /// What becomes of a model under the name of a mixture.
    ///
    /// # Errors
    /// The input is one shard of a split model without the others, or its metadata do not say what the mixture asks for.
    pub fn new(input: Gguf, mixture: Mixture) -> Result<Conversion, QuantiseError> {
        refuse_alone(&input)?;
        let shape = ModelShape::of(&input)?;
        let choices: Vec<Option<Choice>> = (input.tensors.iter())
            .map(|tensor| mixture.choose(&tensor.name, &tensor.dimensions, shape))
            .collect();
        let tensors: Vec<TensorShape> = (input.tensors.iter())
            .zip(&choices)
            .map(|(tensor, choice)| {
                let kind = choice.map_or(tensor.kind, |choice| choice.kind);
                TensorShape::new(&tensor.name, kind, tensor.dimensions.clone())
            })
            .collect();
        let mut metadata = Metadata::new();
        for (key, value) in input.metadata.iter() {
            if !key.starts_with(SPLIT_KEYS) {
                metadata.insert(key, value.clone());
            }
        }
        metadata.insert("general.file_type", mixture.file_type());
        metadata.insert("general.quantization_version", QUANTISATION_VERSION);
        let header = Header::new(3, &metadata, &tensors).map_err(QuantiseError::Layout)?;
        Ok(Conversion {
            input,
            header,
            choices,
        })
    }

    pub fn input(&self) -> &Gguf {
        &self.input
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    /// All weights, each as the four bytes of an f32.
    pub fn float_bytes(&self) -> u64 {
        let elements = (self.input.tensors.iter())
            .map(|tensor| tensor.columns().saturating_mul(tensor.rows()));
        elements
            .fold(0u64, u64::saturating_add)
            .saturating_mul(FLOAT_BYTES)
    }

    /// What a user should know before it is written, a line each.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        let mut again: BTreeMap<&str, usize> = BTreeMap::new();
        let mut replaced: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for (tensor, choice) in self.input.tensors.iter().zip(&self.choices) {
            let Some(choice) = choice else { continue };
            let is_quantised = tensor.kind.block_elements() > 1;
            if is_quantised && choice.kind != tensor.kind {
                *again.entry(tensor.kind.name()).or_default() += 1;
            }
            if let Some(wanted) = choice.instead_of {
                *replaced
                    .entry((wanted.name(), choice.kind.name()))
                    .or_default() += 1;
            }
        }
        if !again.is_empty() {
            let kinds: Vec<String> = (again.iter())
                .map(|(kind, count)| format!("{count} x {kind}"))
                .collect();
            remarks.push(format!(
                "{} tensors are quantised already ({}): what they lost does not come back, and a second loss is added; take a \
                 file in F16, BF16 or F32",
                again.values().sum::<usize>(),
                kinds.join(", ")
            ));
        }
        if !replaced.is_empty() {
            let matrices = self.choices.iter().flatten().count();
            let kinds: Vec<String> = (replaced.iter())
                .map(|((wanted, kind), count)| format!("{count} x {kind} for {wanted}"))
                .collect();
            remarks.push(format!(
                "{} of {matrices} matrices have rows that are no whole number of blocks and get another type of about the size: {}",
                replaced.values().sum::<usize>(),
                kinds.join(", ")
            ));
        }
        remarks
    }

    /// Tensors of each type in the new file.
    pub fn kinds(&self) -> BTreeMap<TensorType, usize> {
        let mut kinds = BTreeMap::new();
        for tensor in &self.header.index().tensors {
            *kinds.entry(tensor.kind).or_default() += 1;
        }
        kinds
    }
}
