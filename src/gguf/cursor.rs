//! Checked little-endian reads from the front of a file.
//!
//! A length or a count is compared with the bytes that are left before anything is allocated for it, so a header that
//! claims 2^60 strings costs an error and no memory.

use std::io::Read;

use super::error::GgufError;
use super::value::{Array, Value};

/// Bytes that the header (metadata and tensor table) may take. The largest vocabularies need about 20 MiB; without
/// a bound a sparse file of terabytes could demand as much memory.
pub(super) const HEADER_BYTES_MAX: u64 = 128 << 20;

pub(super) struct Cursor<R> {
    input: R,
    position: u64,
    file_bytes: u64,
}

impl<R: Read> Cursor<R> {
    pub(super) fn new(input: R, file_bytes: u64) -> Cursor<R> {
        Cursor {
            input,
            position: 0,
            file_bytes,
        }
    }

    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Bytes of the file after the position.
    pub(super) fn left(&self) -> u64 {
        self.file_bytes.saturating_sub(self.position)
    }

    /// Errors unless `bytes` more can be read. `place` names what is being read.
    fn check(&self, bytes: u64, place: &dyn Fn() -> String) -> Result<(), GgufError> {
        if bytes > self.left() {
            return Err(GgufError::Truncated {
                place: place(),
                position: self.position,
                needed: bytes,
                left: self.left(),
            });
        }
        if bytes > HEADER_BYTES_MAX.saturating_sub(self.position) {
            return Err(GgufError::Header(format!(
                "metadata and tensor table take more than {} MiB (at {})",
                HEADER_BYTES_MAX >> 20,
                place()
            )));
        }
        Ok(())
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), GgufError> {
        self.input
            .read_exact(buffer)
            .map_err(|error| GgufError::Read {
                position: self.position,
                error,
            })?;
        self.position += buffer.len() as u64;
        Ok(())
    }

    pub(super) fn take<const N: usize>(
        &mut self,
        place: &dyn Fn() -> String,
    ) -> Result<[u8; N], GgufError> {
        self.check(N as u64, place)?;
        let mut buffer = [0; N];
        self.fill(&mut buffer)?;
        Ok(buffer)
    }

    pub(super) fn u32(&mut self, place: &dyn Fn() -> String) -> Result<u32, GgufError> {
        self.take(place).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, place: &dyn Fn() -> String) -> Result<u64, GgufError> {
        self.take(place).map(u64::from_le_bytes)
    }

    fn bytes(&mut self, length: u64, place: &dyn Fn() -> String) -> Result<Vec<u8>, GgufError> {
        self.check(length, place)?;
        let mut buffer = vec![0; length as usize];
        self.fill(&mut buffer)?;
        Ok(buffer)
    }

    /// A length and that many bytes, of at most `bytes_max`. Not yet known to be UTF-8.
    pub(super) fn string_bytes(
        &mut self,
        bytes_max: u64,
        place: &dyn Fn() -> String,
    ) -> Result<Vec<u8>, GgufError> {
        let length = self.u64(place)?;
        if length > bytes_max {
            return Err(GgufError::Header(format!(
                "{} is {length} bytes long; at most {bytes_max} are allowed",
                place()
            )));
        }
        self.bytes(length, place)
    }

    /// The value of `key`, of the type that `code` stands for.
    pub(super) fn value(&mut self, key: &str, code: u32) -> Result<Value, GgufError> {
        let place = || format!("the value of key {}", super::error::quote(key));
        Ok(match code {
            0 => Value::U8(u8::from_le_bytes(self.take(&place)?)),
            1 => Value::I8(i8::from_le_bytes(self.take(&place)?)),
            2 => Value::U16(u16::from_le_bytes(self.take(&place)?)),
            3 => Value::I16(i16::from_le_bytes(self.take(&place)?)),
            4 => Value::U32(u32::from_le_bytes(self.take(&place)?)),
            5 => Value::I32(i32::from_le_bytes(self.take(&place)?)),
            6 => Value::F32(f32::from_le_bytes(self.take(&place)?)),
            7 => match self.take(&place)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => {
                    return Err(GgufError::key(
                        key,
                        format_args!("is a bool with the value {other}; 0 or 1 is expected"),
                    ));
                }
            },
            8 => {
                let bytes = self.string_bytes(u64::MAX, &place)?;
                Value::String(String::from_utf8(bytes).map_err(|error| {
                    GgufError::key(key, format_args!("is not UTF-8: {}", error.utf8_error()))
                })?)
            }
            9 => Value::Array(self.array(key, &place)?),
            10 => Value::U64(u64::from_le_bytes(self.take(&place)?)),
            11 => Value::I64(i64::from_le_bytes(self.take(&place)?)),
            12 => Value::F64(f64::from_le_bytes(self.take(&place)?)),
            other => {
                return Err(GgufError::key(
                    key,
                    format_args!("has the unknown value type {other}"),
                ));
            }
        })
    }

    fn array(&mut self, key: &str, place: &dyn Fn() -> String) -> Result<Array, GgufError> {
        let code = self.u32(place)?;
        let count = self.u64(place)?;
        Ok(match code {
            0 => Array::U8(self.numbers(count, u8::from_le_bytes, place)?),
            1 => Array::I8(self.numbers(count, i8::from_le_bytes, place)?),
            2 => Array::U16(self.numbers(count, u16::from_le_bytes, place)?),
            3 => Array::I16(self.numbers(count, i16::from_le_bytes, place)?),
            4 => Array::U32(self.numbers(count, u32::from_le_bytes, place)?),
            5 => Array::I32(self.numbers(count, i32::from_le_bytes, place)?),
            6 => Array::F32(self.numbers(count, f32::from_le_bytes, place)?),
            7 => {
                let bytes: Vec<u8> = self.numbers(count, u8::from_le_bytes, place)?;
                if let Some((index, byte)) = bytes.iter().enumerate().find(|&(_, &byte)| byte > 1) {
                    return Err(GgufError::key(
                        key,
                        format_args!(
                            "element {index} is a bool with the value {byte}; 0 or 1 is expected"
                        ),
                    ));
                }
                Array::Bool(bytes.into_iter().map(|byte| byte == 1).collect())
            }
            8 => Array::String(self.string_array(key, count, place)?),
            9 => {
                return Err(GgufError::key(
                    key,
                    "is an array of arrays, which no known model uses",
                ));
            }
            10 => Array::U64(self.numbers(count, u64::from_le_bytes, place)?),
            11 => Array::I64(self.numbers(count, i64::from_le_bytes, place)?),
            12 => Array::F64(self.numbers(count, f64::from_le_bytes, place)?),
            other => {
                return Err(GgufError::key(
                    key,
                    format_args!("is an array of the unknown value type {other}"),
                ));
            }
        })
    }

    fn numbers<T, const N: usize>(
        &mut self,
        count: u64,
        convert: impl Fn([u8; N]) -> T,
        place: &dyn Fn() -> String,
    ) -> Result<Vec<T>, GgufError> {
        // A product past 2^64 is past the end of any file too.
        let bytes = self.bytes(count.saturating_mul(N as u64), place)?;
        let (elements, _) = bytes.as_chunks::<N>();
        Ok(elements.iter().map(|&element| convert(element)).collect())
    }

    fn string_array(
        &mut self,
        key: &str,
        count: u64,
        place: &dyn Fn() -> String,
    ) -> Result<Vec<String>, GgufError> {
        const LENGTH_BYTES: u64 = 8;
        self.check(count.saturating_mul(LENGTH_BYTES), place)?;
        let mut strings = Vec::with_capacity(count as usize);
        for index in 0..count {
            let place = || format!("element {index} of key {}", super::error::quote(key));
            let bytes = self.string_bytes(u64::MAX, &place)?;
            strings.push(String::from_utf8(bytes).map_err(|error| {
                GgufError::key(
                    key,
                    format_args!("element {index} is not UTF-8: {}", error.utf8_error()),
                )
            })?);
        }
        Ok(strings)
    }
}
