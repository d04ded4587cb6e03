//! The KV cache: which pages exist, who holds them, and in what order they make up a sequence.
//!
//! The engine owns the bookkeeping and is its only caller; it runs on the engine thread and takes no locks. The bytes
//! of the pages belong to an arena: page `n` is its `n`th equal part. Layers that see a window have pages of their own
//! there, a fixed number for each sequence: nobody takes or gives those back.

mod pages;
mod store;

pub use pages::{BlockTable, OutOfPages, PageId, PagePool};
pub use store::{KvStore, SequencePages};
