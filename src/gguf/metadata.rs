//! Metadata: the key-value pairs of a GGUF file, in the order of the file, with typed access.
//!
//! Writers disagree about integer widths (the format says u64 for counts by convention and u32 exists), so an integer
//! of any width is accepted where its value fits. A missing key is `None`; a value of the wrong type or out of range is
//! an error that names the key.

use std::collections::HashMap;

use super::error::GgufError;
use super::value::{Array, Value};

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
