//! The types of metadata values.

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
    pub(super) fn integer(&self) -> Option<i128> {
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
    pub(super) fn integers(&self) -> Option<Vec<i128>> {
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
