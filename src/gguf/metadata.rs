//! Metadata: the key-value pairs of a GGUF file, in the order of the file, with typed access.
//!
//! Writers disagree about integer widths (the format says u64 for counts by convention and u32 exists), so an integer
//! of any width is accepted where its value fits. A missing key is `None`; a value of the wrong type or out of range is
//! an error that names the key.

use std::collections::HashMap;

use super::error::GgufError;

/// The value of one key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array value: one type for all elements. Arrays of arrays are refused when a file is read.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

impl Value {
    /// The type as error messages write it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::F32(_) => "f32",
            Value::Bool(_) => "bool",
            Value::String(_) => "string",
            Value::Array(array) => array.type_name(),
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F64(_) => "f64",
        }
    }

    /// The value of an integer of any width.
    fn integer(&self) -> Option<i128> {
        match *self {
            Value::U8(value) => Some(value.into()),
            Value::I8(value) => Some(value.into()),
            Value::U16(value) => Some(value.into()),
            Value::I16(value) => Some(value.into()),
            Value::U32(value) => Some(value.into()),
            Value::I32(value) => Some(value.into()),
            Value::U64(value) => Some(value.into()),
            Value::I64(value) => Some(value.into()),
            Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::String(_) | Value::Array(_) => {
                None
            }
        }
    }
}

impl Array {
    pub fn len(&self) -> usize {
        match self {
            Array::U8(items) => items.len(),
            Array::I8(items) => items.len(),
            Array::U16(items) => items.len(),
            Array::I16(items) => items.len(),
            Array::U32(items) => items.len(),
            Array::I32(items) => items.len(),
            Array::F32(items) => items.len(),
            Array::Bool(items) => items.len(),
            Array::String(items) => items.len(),
            Array::U64(items) => items.len(),
            Array::I64(items) => items.len(),
            Array::F64(items) => items.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The type as error messages write it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "array of u8",
            Array::I8(_) => "array of i8",
            Array::U16(_) => "array of u16",
            Array::I16(_) => "array of i16",
            Array::U32(_) => "array of u32",
            Array::I32(_) => "array of i32",
            Array::F32(_) => "array of f32",
            Array::Bool(_) => "array of bool",
            Array::String(_) => "array of strings",
            Array::U64(_) => "array of u64",
            Array::I64(_) => "array of i64",
            Array::F64(_) => "array of f64",
        }
    }

    /// The elements of an array of integers of any width; `None` for other types.
    fn integers(&self) -> Option<Vec<i128>> {
        fn widen<T: Copy + Into<i128>>(items: &[T]) -> Option<Vec<i128>> {
            Some(items.iter().map(|&item| item.into()).collect())
        }
        match self {
            Array::U8(items) => widen(items),
            Array::I8(items) => widen(items),
            Array::U16(items) => widen(items),
            Array::I16(items) => widen(items),
            Array::U32(items) => widen(items),
            Array::I32(items) => widen(items),
            Array::U64(items) => widen(items),
            Array::I64(items) => widen(items),
            Array::F32(_) | Array::F64(_) | Array::Bool(_) | Array::String(_) => None,
        }
    }
}

macro_rules! value_from {
    ($($rust:ty => $variant:ident),* $(,)?) => { $(
        impl From<$rust> for Value {
            fn from(value: $rust) -> Value {
                Value::$variant(value)
            }
        }
        impl From<Vec<$rust>> for Value {
            fn from(items: Vec<$rust>) -> Value {
                Value::Array(Array::$variant(items))
            }
        }
    )* };
}

value_from! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, bool => Bool, String => String,
    u64 => U64, i64 => I64, f64 => F64,
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::String(text.to_owned())
    }
}

/// The key-value pairs of a file. Keys are unique and keep the order in which they were added.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    /// Key -> index into `entries`.
    index: HashMap<String, usize>,
}

impl PartialEq for Metadata {
    fn eq(&self, other: &Metadata) -> bool {
        self.entries == other.entries
    }
}

impl Metadata {
    pub fn new() -> Metadata {
        Metadata::default()
    }

    /// Sets a key; a key that is already there keeps its place and its old value is returned.
    pub fn insert(&mut self, key: impl Into<String>, value: impl Into<Value>) -> Option<Value> {
        let (key, value) = (key.into(), value.into());
        if let Some(entry) = self
            .index
            .get(&key)
            .and_then(|&index| self.entries.get_mut(index))
        {
            return Some(std::mem::replace(&mut entry.1, value));
        }
        self.index.insert(key.clone(), self.entries.len());
        self.entries.push((key, value));
        None
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        let &index = self.index.get(key)?;
        self.entries.get(index).map(|(_, value)| value)
    }

    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// The pairs in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn string(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(key, "a string", other)),
        }
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(wrong_type(key, "a bool", other)),
        }
    }

    /// An integer of any width whose value fits.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.integer(key, u64::MAX)
    }

    /// An integer of any width whose value fits.
    pub fn u32(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.integer(key, u32::MAX)
    }

    fn integer<T: TryFrom<i128> + std::fmt::Display>(
        &self,
        key: &str,
        max: T,
    ) -> Result<Option<T>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let Some(integer) = value.integer() else {
            return Err(wrong_type(key, "an integer", value));
        };
        match T::try_from(integer) {
            Ok(integer) => Ok(Some(integer)),
            Err(_) => Err(out_of_range(key, integer, max)),
        }
    }

    /// A float of either width. Not checked to be finite.
    pub fn f32(&self, key: &str) -> Result<Option<f32>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F32(value)) => Ok(Some(*value)),
            Some(Value::F64(value)) => Ok(Some(*value as f32)),
            Some(other) => Err(wrong_type(key, "a float", other)),
        }
    }

    pub fn strings(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::String(items))) => Ok(Some(items)),
            Some(other) => Err(wrong_type(key, "an array of strings", other)),
        }
    }

    /// Floats of either width. Not checked to be finite.
    pub fn f32s(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::F32(items))) => Ok(Some(items.clone())),
            Some(Value::Array(Array::F64(items))) => {
                Ok(Some(items.iter().map(|&item| item as f32).collect()))
            }
            Some(other) => Err(wrong_type(key, "an array of floats", other)),
        }
    }

    /// Integers of any width whose values fit.
    pub fn i64s(&self, key: &str) -> Result<Option<Vec<i64>>, GgufError> {
        self.integers(key, i64::MAX)
    }

    fn integers<T: TryFrom<i128> + std::fmt::Display + Copy>(
        &self,
        key: &str,
        max: T,
    ) -> Result<Option<Vec<T>>, GgufError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let Value::Array(array) = value else {
            return Err(wrong_type(key, "an array of integers", value));
        };
        let Some(integers) = array.integers() else {
            return Err(wrong_type(key, "an array of integers", value));
        };
        integers
            .into_iter()
            .enumerate()
            .map(|(index, integer)| {
                T::try_from(integer).map_err(|_| {
                    GgufError::key(
                        key,
                        format_args!("element {index} is {integer}; at most {max} is allowed"),
                    )
                })
            })
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// One value per layer: a scalar that holds for all layers, or an array of exactly `layers` values.
    pub fn per_layer_u32(&self, key: &str, layers: u32) -> Result<Option<Vec<u32>>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(array)) if array.len() != layers as usize => Err(GgufError::key(
                key,
                format_args!(
                    "holds {} values and the model has {layers} layers",
                    array.len()
                ),
            )),
            Some(Value::Array(_)) => self.integers(key, u32::MAX),
            Some(_) => Ok(self.u32(key)?.map(|value| vec![value; layers as usize])),
        }
    }

    pub fn require_string(&self, key: &str) -> Result<&str, GgufError> {
        self.string(key)?.ok_or_else(|| missing(key))
    }

    pub fn require_bool(&self, key: &str) -> Result<bool, GgufError> {
        self.bool(key)?.ok_or_else(|| missing(key))
    }

    pub fn require_u64(&self, key: &str) -> Result<u64, GgufError> {
        self.u64(key)?.ok_or_else(|| missing(key))
    }

    pub fn require_u32(&self, key: &str) -> Result<u32, GgufError> {
        self.u32(key)?.ok_or_else(|| missing(key))
    }

    pub fn require_f32(&self, key: &str) -> Result<f32, GgufError> {
        self.f32(key)?.ok_or_else(|| missing(key))
    }

    pub fn require_strings(&self, key: &str) -> Result<&[String], GgufError> {
        self.strings(key)?.ok_or_else(|| missing(key))
    }

    pub fn require_f32s(&self, key: &str) -> Result<Vec<f32>, GgufError> {
        self.f32s(key)?.ok_or_else(|| missing(key))
    }

    pub fn require_i64s(&self, key: &str) -> Result<Vec<i64>, GgufError> {
        self.i64s(key)?.ok_or_else(|| missing(key))
    }

    pub fn require_per_layer_u32(&self, key: &str, layers: u32) -> Result<Vec<u32>, GgufError> {
        self.per_layer_u32(key, layers)?.ok_or_else(|| missing(key))
    }
}

fn missing(key: &str) -> GgufError {
    GgufError::MissingKey {
        key: key.to_owned(),
    }
}

fn wrong_type(key: &str, wanted: &str, found: &Value) -> GgufError {
    GgufError::key(
        key,
        format_args!("is of type {}; {wanted} is expected", found.type_name()),
    )
}

fn out_of_range(key: &str, value: i128, max: impl std::fmt::Display) -> GgufError {
    GgufError::key(
        key,
        format_args!("is {value}; a value of 0 to {max} is expected"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata(value: impl Into<Value>) -> Metadata {
        let mut metadata = Metadata::new();
        metadata.insert("k", value);
        metadata
    }

    #[test]
    fn integers_of_any_width_are_read_where_the_value_fits() {
        let seven: [Value; 8] = [
            7u8.into(),
            7i8.into(),
            7u16.into(),
            7i16.into(),
            7u32.into(),
            7i32.into(),
            7u64.into(),
            7i64.into(),
        ];
        for value in seven {
            let metadata = metadata(value.clone());
            assert_eq!(metadata.u32("k").unwrap(), Some(7), "{value:?}");
            assert_eq!(metadata.u64("k").unwrap(), Some(7), "{value:?}");
            assert_eq!(metadata.per_layer_u32("k", 2).unwrap(), Some(vec![7, 7]));
        }
        let arrays: [Value; 4] = [
            vec![1i32, 2].into(),
            vec![1u8, 2].into(),
            vec![1u64, 2].into(),
            vec![1i16, 2].into(),
        ];
        for value in arrays {
            let metadata = metadata(value.clone());
            assert_eq!(metadata.i64s("k").unwrap(), Some(vec![1, 2]), "{value:?}");
            assert_eq!(metadata.per_layer_u32("k", 2).unwrap(), Some(vec![1, 2]));
        }
    }

    #[test]
    fn a_value_of_the_wrong_type_or_range_names_the_key() {
        fn check<T: std::fmt::Debug>(result: Result<T, GgufError>, text: &str) {
            assert_eq!(result.unwrap_err().to_string(), text);
        }
        check(
            metadata(-1i32).u32("k"),
            "key `k`: is -1; a value of 0 to 4294967295 is expected",
        );
        check(
            metadata(1u64 << 32).u32("k"),
            "key `k`: is 4294967296; a value of 0 to 4294967295 is expected",
        );
        check(
            metadata("two").u32("k"),
            "key `k`: is of type string; an integer is expected",
        );
        check(
            metadata(1.0f32).u64("k"),
            "key `k`: is of type f32; an integer is expected",
        );
        check(
            metadata(1u32).string("k"),
            "key `k`: is of type u32; a string is expected",
        );
        check(
            metadata(1u8).bool("k"),
            "key `k`: is of type u8; a bool is expected",
        );
        check(
            metadata(vec![1u32]).strings("k"),
            "key `k`: is of type array of u32; an array of strings is expected",
        );
        check(
            metadata(vec![0.5f32]).i64s("k"),
            "key `k`: is of type array of f32; an array of integers is expected",
        );
        check(
            metadata(vec![u64::MAX]).i64s("k"),
            "key `k`: element 0 is 18446744073709551615; at most 9223372036854775807 is allowed",
        );
        check(
            metadata(vec![1u32, 2, 3]).per_layer_u32("k", 2),
            "key `k`: holds 3 values and the model has 2 layers",
        );
        check(
            metadata(1u32).require_u32("llama.block_count"),
            "missing key `llama.block_count`",
        );
    }

    #[test]
    fn keys_keep_their_order_and_a_second_insert_replaces_in_place() {
        let mut metadata = Metadata::new();
        for (key, value) in [("b", 1u32), ("a", 2), ("c", 3)] {
            assert_eq!(metadata.insert(key, value), None);
        }
        assert_eq!(metadata.insert("a", 9u32), Some(Value::U32(2)));
        let keys: Vec<_> = metadata.iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["b", "a", "c"]);
        assert_eq!(metadata.u32("a").unwrap(), Some(9));
        assert_eq!(metadata.u32("absent").unwrap(), None);
    }
}
