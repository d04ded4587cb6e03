//! The KV cache: which pages exist, who holds them, and in what order they make up a sequence.
//!
//! The engine owns the bookkeeping and is its only caller; it runs on the engine thread and takes no locks. The bytes
//! of the pages belong to an arena, which begins with them: page `n` is the `n`th of equal parts. Behind them are the pages
//! of layers that see a window, of another size and a fixed number for each sequence: nobody takes or gives those back.

mod pages;
mod store;

pub use pages::{BlockTable, OutOfPages, PageId, PagePool};
pub use store::{KvStore, SequencePages};
