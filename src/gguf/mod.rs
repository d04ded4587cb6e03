//! GGUF files: bytes -> tensor index and metadata. Reads no weights.
//!
//! A model is one file, or the shards of a split one, which `shards` joins to one index.
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

mod architecture;
pub mod card;
mod cursor;
mod error;
mod hyperparameters;
mod metadata;
mod mixture;
mod new_file;
mod reader;
mod rope;
mod shard_name;
mod shards;
mod tensor_type;
mod value;
mod writer;

#[cfg(test)]
mod hostile_tests;

use std::collections::HashMap;
use std::path::PathBuf;

pub use architecture::{Architecture, LayerSizes, LayerVector};
pub use error::GgufError;
pub use hyperparameters::{Hyperparameters, SlidingWindow};
pub use metadata::Metadata;
pub use mixture::{Choice, Mixture, ModelShape};
pub use new_file::{Destination, NewFile, NewFileError, check_space, folder_of};
pub(crate) use new_file::{check_is_file, is_at, open_locked, put_in_place};
pub use rope::{RopeScaling, Yarn};
pub use shard_name::{ShardName, unsplit_path};
pub(crate) use shards::refuse_alone;
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
    /// From the start of the model: of its file, or, of a split one, the file's base and the offset in it. The bytes
    /// `file_offset..file_offset + bytes` lie inside one file.
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

/// A tensor of a type that strata does not compute with. A file with one can be looked at, not loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct ForeignTensor {
    pub name: String,
    /// ggml's name of the type, or its code where that is not known either.
    pub kind: String,
    /// As in `TensorInfo`.
    pub dimensions: Vec<u64>,
    /// As in `TensorInfo`.
    pub file_offset: u64,
    /// What the file has for it, padding included: up to the next tensor, or to its end.
    pub bytes: u64,
}

/// A file of a model, and its place among them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexedFile {
    /// Empty where the index was not read from a file.
    pub path: PathBuf,
    pub bytes: u64,
    /// What is added to offsets in this file: 0 for the first. Files do not overlap, and between two lies a gap of more
    /// than any alignment.
    pub base: u64,
}

impl IndexedFile {
    /// Where the file ends among all of them.
    pub fn end(&self) -> u64 {
        self.base.saturating_add(self.bytes)
    }
}

/// The index of a model: of one GGUF file, or of all its shards.
#[derive(Clone, Debug)]
pub struct Gguf {
    /// 2 or 3.
    pub version: u32,
    /// Each tensor's data start at a multiple of this, counted from the start of the data section: a power of two.
    pub alignment: u64,
    pub metadata: Metadata,
    /// In the order of the file's table, shard after shard. Names are unique; data do not overlap.
    pub tensors: Vec<TensorInfo>,
    /// Empty, other than in what `Gguf::open_to_show` returns.
    pub foreign: Vec<ForeignTensor>,
    /// At least one; the shards of a split model in their order.
    pub files: Vec<IndexedFile>,
    /// Of all files together.
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
        foreign: Vec<ForeignTensor>,
        files: Vec<IndexedFile>,
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
            foreign,
            // Bases are sums of these that did not overflow.
            file_bytes: files.iter().map(|file| file.bytes).sum(),
            files,
            index,
        }
    }

    /// An error that names the first tensor of a type that strata does not compute with, if there is one.
    pub fn refuse_foreign(&self) -> Result<(), GgufError> {
        match self.foreign.first() {
            None => Ok(()),
            Some(tensor) => Err(GgufError::UnsupportedTensorType {
                name: tensor.name.clone(),
                kind: tensor.kind.clone(),
            }),
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
