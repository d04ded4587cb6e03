//! GGUF files: bytes -> tensor index and metadata. Reads no weights.
//!
//! The file is mapped, everything needed is copied out, and the mapping is dropped before `Gguf::open` returns: a
//! file that changes later cannot reach into the index. Every length, count, offset, alignment and type is checked
//! before use, because files are hostile; errors name the key or the tensor.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod metadata;
mod tensor_type;

pub use metadata::Metadata;
pub use tensor_type::TensorType;

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
    pub version: u32,
    pub alignment: u64,
    pub metadata: Metadata,
    pub tensors: Vec<TensorInfo>,
    pub file_bytes: u64,
}
