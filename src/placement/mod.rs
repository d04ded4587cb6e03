//! (index, budgets, rates) -> `Plan`. Pure: allocates no arena, reads no weights, asks no clock.
//!
//! The plan says, for every group of weights, where it rests (home) and who multiplies by it (executor), and splits
//! each tier once into weights, ring, KV and scratch. What cannot fit is refused here, before anything is allocated,
//! with what is short, by how much, and the first thing to change.

use std::fmt;
use std::ops::Range;

/// Where weights can rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// VRAM, or the arena that stands for it on the emulated device.
    Device,
    /// RAM.
    Host,
    /// The model file.
    Storage,
}

impl Tier {
    /// The value of the label `tier` in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Tier::Device => "device",
            Tier::Host => "host",
            Tier::Storage => "storage",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Who multiplies by a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Executor {
    Device,
    Host,
}

/// An index into `Plan::groups`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// What a group holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// Norms, biases and rope factors of all layers: one small group, always resident on each executor.
    Small,
    /// Rows of an untied token embedding: gathered by row, never streamed as a matrix.
    Embedding,
    /// The attention half of a layer, or a run of its row slices.
    Attention,
    /// The feed-forward half of a layer, or a run of its row slices.
    FeedForward,
    /// Rows of the output head. Where the head is tied, embedding rows are gathered from these groups too.
    Head,
}

/// Rows of one tensor inside a group.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Index into `Gguf::tensors`.
    pub tensor: usize,
    pub rows: Range<u64>,
    /// Bytes of these rows, and where they start in the file.
    pub file_offset: u64,
    pub bytes: u64,
    /// Where these rows start in the group's entry (a home or a ring entry).
    pub entry_offset: u64,
}

/// A contiguous read that brings part of a group into its entry. Offsets and lengths are multiples of the read
/// alignment, except that the last extent of a file may end past it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub file_offset: u64,
    pub bytes: u64,
    pub entry_offset: u64,
}

/// The unit of residency. Parts stand in the order in which a step uses them.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub kind: GroupKind,
    pub layer: Option<u32>,
    pub parts: Vec<Part>,
    pub extents: Vec<Extent>,
    /// Weight bytes: the sum over parts.
    pub weight_bytes: u64,
    /// What an entry takes in memory, and what is read from storage: the sum over extents.
    pub entry_bytes: u64,
}

/// Where a group rests and who multiplies by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residence {
    pub home: Tier,
    pub executor: Executor,
}
