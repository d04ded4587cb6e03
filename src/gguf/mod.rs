//! GGUF files: bytes -> tensor index and metadata. Reads no weights.
//!
//! The header is read through a buffer and the file is closed before `Gguf::open` returns: a file that changes later
//! cannot reach into the index, and one that shrinks meanwhile gives an error (a mapping would give SIGBUS). Every
//! length, count, offset, alignment and type is checked before use, because files are hostile; errors name the key or
//! the tensor.
//!
//! Called by every part that needs a tensor's place or a key's value, on any thread; nothing here changes after it has
//! been read.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

#![deny(clippy::indexing_slicing)]

pub mod card;
mod cursor;
mod error;
mod hyperparameters;
mod metadata;
mod mixture;
mod new_file;
mod reader;
mod tensor_type;
mod value;
mod writer;

#[cfg(test)]
mod hostile_tests;

use std::collections::HashMap;

pub use error::GgufError;
pub use hyperparameters::{Hyperparameters, RopeScaling};
pub use metadata::Metadata;
pub use mixture::{Choice, Mixture, ModelShape};
pub use new_file::{NewFile, NewFileError};
pub use tensor_type::TensorType;
pub use value::{Array, Value};
pub use writer::{Header, TensorShape};

/// One tensor of the file: where its bytes are and what shape they have.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    pub name: String,
    pub kind: TensorType,
    /// ggml order: the first dimension is the length of a row.
    pub dimensions: Vec<u64>,
    /// From the start of the file. The bytes `file_offset..file_offset + bytes` lie inside the file.
    pub file_offset: u64,
    pub bytes: u64,
}

impl TensorInfo {
    /// Elements in a row: the inner dimension of a product with this matrix.
    pub fn columns(&self) -> u64 {
        self.dimensions.first().copied().unwrap_or(1)
    }

    /// Rows: the product of all dimensions but the first (checked when the file is read).
    pub fn rows(&self) -> u64 {
        self.dimensions.iter().skip(1).product()
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        self.bytes / self.rows()
    }
}

/// The index of one GGUF file.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// 2 or 3.
    pub version: u32,
    /// Each tensor's data start at a multiple of this, counted from the start of the data section: a power of two.
    pub alignment: u64,
    pub metadata: Metadata,
    /// In the order of the file's table. Names are unique; data do not overlap.
    pub tensors: Vec<TensorInfo>,
    pub file_bytes: u64,
    /// Name -> index into `tensors`.
    index: HashMap<String, usize>,
}

impl Gguf {
    fn new(
        version: u32,
        alignment: u64,
        metadata: Metadata,
        tensors: Vec<TensorInfo>,
        file_bytes: u64,
    ) -> Gguf {
        let index = tensors
            .iter()
            .enumerate()
            .map(|(index, tensor)| (tensor.name.clone(), index))
            .collect();
        Gguf {
            version,
            alignment,
            metadata,
            tensors,
            file_bytes,
            index,
        }
    }

    /// A tensor by name, with its index into `tensors`.
    pub fn tensor(&self, name: &str) -> Option<(usize, &TensorInfo)> {
        let &index = self.index.get(name)?;
        Some((index, self.tensors.get(index)?))
    }

    /// The value of `general.architecture`.
    pub fn architecture(&self) -> Result<&str, GgufError> {
        self.metadata.require_string("general.architecture")
    }
}
