//! Metadata: the key-value pairs of a GGUF file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metadata {}
