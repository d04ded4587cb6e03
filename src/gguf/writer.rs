//! Writes GGUF files: a header from metadata and tensor shapes, then the data of each tensor from a callback, so that a
//! file of any size is written in little memory.

use std::io::{self, Write};

use super::metadata::Metadata;
use super::reader::tensor_bytes;
use super::value::{Array, Value};
use super::{Gguf, GgufError, TensorInfo, TensorType};

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorShape {
    pub name: String,
    pub kind: TensorType,
    /// ggml order: the first dimension is the length of a row.
    pub dimensions: Vec<u64>,
}

impl TensorShape {
    pub fn new(
        name: impl Into<String>,
        kind: TensorType,
        dimensions: impl Into<Vec<u64>>,
    ) -> TensorShape {
        TensorShape {
            name: name.into(),
            kind,
            dimensions: dimensions.into(),
        }
    }
}

/// The first part of a file: everything before the data of the tensors, and where those will be.
#[derive(Clone, Debug)]
pub struct Header {
    /// Up to the first byte of the data section, padding included.
    bytes: Vec<u8>,
    index: Gguf,
}

impl Header {
    /// Lays out a file of this version (2 or 3). Tensors stand in the order given, each padded to the alignment that
    /// `general.alignment` gives (32 where it is absent). The result is read back, so what a reader would refuse is
    /// refused here, before anything is written.
    pub fn new(
        version: u32,
        metadata: &Metadata,
        tensors: &[TensorShape],
    ) -> Result<Header, GgufError> {
        let alignment = super::reader::alignment(metadata)?;
        let mut bytes = Vec::new();
        bytes.extend(super::reader::MAGIC);
        bytes.extend(version.to_le_bytes());
        bytes.extend((tensors.len() as u64).to_le_bytes());
        bytes.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata.iter() {
            put_string(&mut bytes, key);
            put_value(&mut bytes, value);
        }
        let mut offset: u64 = 0;
        for tensor in tensors {
            put_string(&mut bytes, &tensor.name);
            bytes.extend((tensor.dimensions.len() as u32).to_le_bytes());
            for dimension in &tensor.dimensions {
                bytes.extend(dimension.to_le_bytes());
            }
            bytes.extend(tensor.kind.code().to_le_bytes());
            bytes.extend(offset.to_le_bytes());
            let tensor_bytes = tensor_bytes(tensor.kind, &tensor.dimensions)
                .map_err(|problem| GgufError::tensor(&tensor.name, problem))?;
            offset = offset
                .checked_add(tensor_bytes)
                .and_then(|end| end.checked_next_multiple_of(alignment))
                .ok_or_else(|| GgufError::tensor(&tensor.name, "ends past 2^64 bytes"))?;
        }
        bytes.resize(bytes.len().next_multiple_of(alignment as usize), 0);
        let file_bytes = (bytes.len() as u64).saturating_add(offset);
        let index = Gguf::read(bytes.as_slice(), file_bytes)?;
        Ok(Header { bytes, index })
    }

    /// The index that a reader of the finished file will find.
    pub fn index(&self) -> &Gguf {
        &self.index
    }

    /// Writes the file: the header, then the bytes of each tensor, in order. `fill` is given the tensor's index and
    /// shape and writes exactly `bytes` bytes.
    pub fn write<W: Write>(
        &self,
        output: &mut W,
        mut fill: impl FnMut(usize, &TensorInfo, &mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        output.write_all(&self.bytes)?;
        for (index, tensor) in self.index.tensors.iter().enumerate() {
            let mut counted = Counted {
                output: &mut *output,
                bytes: 0,
            };
            fill(index, tensor, &mut counted)?;
            assert_eq!(
                counted.bytes, tensor.bytes,
                "bytes written for tensor {}",
                tensor.name
            );
            let padding = tensor.bytes.next_multiple_of(self.index.alignment) - tensor.bytes;
            io::copy(&mut io::Read::take(io::repeat(0), padding), output)?;
        }
        Ok(())
    }
}

/// Counts what passes through.
struct Counted<'a, W> {
    output: &'a mut W,
    bytes: u64,
}

impl<W: Write> Write for Counted<'_, W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let written = self.output.write(buffer)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.output.flush()
    }
}

fn put_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// The type code, then the value.
fn put_value(bytes: &mut Vec<u8>, value: &Value) {
    let code: u32 = match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    };
    bytes.extend(code.to_le_bytes());
    match value {
        Value::U8(value) => bytes.extend(value.to_le_bytes()),
        Value::I8(value) => bytes.extend(value.to_le_bytes()),
        Value::U16(value) => bytes.extend(value.to_le_bytes()),
        Value::I16(value) => bytes.extend(value.to_le_bytes()),
        Value::U32(value) => bytes.extend(value.to_le_bytes()),
        Value::I32(value) => bytes.extend(value.to_le_bytes()),
        Value::F32(value) => bytes.extend(value.to_le_bytes()),
        Value::Bool(value) => bytes.push(u8::from(*value)),
        Value::String(text) => put_string(bytes, text),
        Value::Array(array) => put_array(bytes, array),
        Value::U64(value) => bytes.extend(value.to_le_bytes()),
        Value::I64(value) => bytes.extend(value.to_le_bytes()),
        Value::F64(value) => bytes.extend(value.to_le_bytes()),
    }
}

/// The type code and the number of elements, then the elements.
fn put_array(bytes: &mut Vec<u8>, array: &Array) {
    let code: u32 = match array {
        Array::U8(_) => 0,
        Array::I8(_) => 1,
        Array::U16(_) => 2,
        Array::I16(_) => 3,
        Array::U32(_) => 4,
        Array::I32(_) => 5,
        Array::F32(_) => 6,
        Array::Bool(_) => 7,
        Array::String(_) => 8,
        Array::U64(_) => 10,
        Array::I64(_) => 11,
        Array::F64(_) => 12,
    };
    bytes.extend(code.to_le_bytes());
    bytes.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(items) => bytes.extend(items),
        Array::I8(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::U16(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::I16(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::U32(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::I32(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::F32(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::Bool(items) => bytes.extend(items.iter().map(|&item| u8::from(item))),
        Array::String(items) => items.iter().for_each(|item| put_string(bytes, item)),
        Array::U64(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::I64(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
        Array::F64(items) => bytes.extend(items.iter().flat_map(|item| item.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One key of every type.
    fn every_type() -> Metadata {
        let mut metadata = Metadata::new();
        let values: Vec<Value> = vec![
            8u8.into(),
            (-8i8).into(),
            16u16.into(),
            (-16i16).into(),
            32u32.into(),
            (-32i32).into(),
            0.5f32.into(),
            true.into(),
            "text ▁".into(),
            64u64.into(),
            (-64i64).into(),
            0.25f64.into(),
            vec![1u8, 2].into(),
            vec![-1i8, 2].into(),
            vec![1u16, 2].into(),
            vec![-1i16, 2].into(),
            vec![1u32, 2].into(),
            vec![-1i32, 2].into(),
            vec![1.5f32, 2.0].into(),
            vec![true, false].into(),
            vec!["a".to_owned(), String::new()].into(),
            vec![1u64, 2].into(),
            vec![-1i64, 2].into(),
            vec![1.5f64, 2.0].into(),
            Vec::<String>::new().into(),
        ];
        for (index, value) in values.into_iter().enumerate() {
            metadata.insert(format!("key.{index}"), value);
        }
        metadata
    }

    fn check_round_trip(version: u32, alignment: Option<u64>) {
        let mut metadata = every_type();
        if let Some(alignment) = alignment {
            metadata.insert("general.alignment", alignment);
        }
        let shapes: Vec<TensorShape> = TensorType::ALL
            .into_iter()
            .map(|kind| TensorShape::new(format!("{}.weight", kind.name()), kind, [256, 3]))
            .chain([TensorShape::new("odd", TensorType::F16, [3])])
            .collect();
        let header = Header::new(version, &metadata, &shapes).unwrap();
        let mut file = Vec::new();
        header
            .write(&mut file, |index, tensor, output| {
                // In pieces, as a streaming caller would.
                let bytes = vec![index as u8 + 1; tensor.bytes as usize];
                bytes
                    .chunks(100)
                    .try_for_each(|chunk| output.write_all(chunk))
            })
            .unwrap();

        let gguf = Gguf::parse(&file).unwrap();
        let alignment = alignment.unwrap_or(32);
        assert_eq!(
            (gguf.version, gguf.alignment, gguf.file_bytes),
            (version, alignment, file.len() as u64)
        );
        assert_eq!(gguf.metadata, metadata);
        assert_eq!(gguf.tensors, header.index().tensors);
        for (index, (tensor, shape)) in gguf.tensors.iter().zip(&shapes).enumerate() {
            assert_eq!((&tensor.name, tensor.kind), (&shape.name, shape.kind));
            assert_eq!(tensor.dimensions, shape.dimensions);
            let start = tensor.file_offset as usize;
            assert!(start.is_multiple_of(alignment as usize));
            let data = &file[start..start + tensor.bytes as usize];
            assert!(
                data.iter().all(|&byte| byte == index as u8 + 1),
                "{}",
                tensor.name
            );
            assert_eq!(gguf.tensor(&tensor.name).unwrap().0, index);
        }
    }

    #[test]
    fn what_is_written_is_read_back_in_each_version_and_alignment() {
        for version in [2, 3] {
            for alignment in [None, Some(1), Some(8), Some(64), Some(4096)] {
                check_round_trip(version, alignment);
            }
        }
    }

    #[test]
    fn a_shape_that_no_reader_accepts_is_refused_before_anything_is_written() {
        let refused = |shape: TensorShape| {
            Header::new(3, &Metadata::new(), &[shape])
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            refused(TensorShape::new("w", TensorType::Q4K, [100, 2])),
            "tensor `w`: has rows of 100 elements, which is not a multiple of the 256 of a Q4_K block"
        );
        assert_eq!(
            refused(TensorShape::new("w", TensorType::F32, [])),
            "tensor `w`: has no dimensions"
        );
        let twice = [(); 2].map(|()| TensorShape::new("w", TensorType::F32, [4]));
        assert_eq!(
            Header::new(3, &Metadata::new(), &twice)
                .unwrap_err()
                .to_string(),
            "tensor `w`: stands twice in the file"
        );
    }
}
