//! (index, budgets, rates) -> `Plan`. Pure: allocates no arena, reads no weights, asks no clock.
//!
//! The plan says, for every group of weights, where it rests (home) and who multiplies by it (executor), and splits
//! each tier once into weights, ring, KV and scratch. What cannot fit is refused here, before anything is allocated,
//! with what is short, by how much, and the first thing to change.
//!
//! Called by `weights` (which carries a plan out), by `main` (which prints one) and by the engine (which compares a
//! step with its prediction). A `Plan` is plain data: any thread may read it.
//!
//! - `groups`: tensor index -> groups in the order in which a step uses them
//! - `planner`: `plan`: the split of each tier, by `layout` for each width and slice size, which `tuning` looks for;
//!   `homes`: which groups rest where; `scratch`: the scratch formula
//! - `refusal`: what `plan` says where nothing fits, with advice that was tried
//! - `rates`, `scenario`, `simulate`, `forecast`: how fast a step will be, and how fast it could be; `changes`: what would
//!   make it faster
//! - `report`: the plan as a table and as JSON

mod changes;
mod forecast;
mod groups;
mod homes;
mod layout;
mod plan;
mod planner;
mod rates;
mod refusal;
mod report;
mod scenario;
mod scratch;
mod simulate;
mod tuning;

#[cfg(test)]
mod plan_tests;
#[cfg(test)]
mod prediction_tests;
#[cfg(test)]
mod refusal_tests;
#[cfg(test)]
mod shapes;

pub use changes::{Change, Gain, best_changes};
pub use forecast::Forecast;
pub use plan::{GatherBuffer, KvSplit, KvType, Plan, Ring, TierSplit, WindowPages};
pub use planner::{DeviceKind, ExecutorChoice, PlanRequest, plan};
pub use rates::{AttentionRates, HardwareCard, Measured, ProductRate, Rates, RatesError};
pub use refusal::{Advice, PlanError, Refusal, Shortage};
pub use report::{report_gains, report_gains_json};
pub use scenario::{Bound, PREDICTED_PROMPT, Prediction};
pub use scratch::{SPLIT_ATTENTION_POSITIONS_MIN, SPLIT_ATTENTION_TOKENS_MAX, ScratchItem};

use std::fmt;
use std::ops::Range;

/// Every allocation in an arena starts on such a boundary and is rounded up to it.
pub const ARENA_ALIGNMENT: u64 = 4096;

/// Tokens in a page of the KV cache.
pub const PAGE_TOKENS: u32 = 32;

/// `value` rounded up to a multiple of `alignment`; saturates, so that absurd sizes stay absurd and are refused.
fn round_up(value: u64, alignment: u64) -> u64 {
    value
        .checked_next_multiple_of(alignment)
        .unwrap_or(u64::MAX)
}

/// A size as people read it.
struct HumanBytes(u64);

const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
const KIB: u64 = 1 << 10;

impl HumanBytes {
    /// Exactly, as the command line takes it.
    fn flag(bytes: u64) -> String {
        if bytes.is_multiple_of(MIB) {
            format!("{}MiB", bytes / MIB)
        } else {
            bytes.to_string()
        }
    }
}

impl fmt::Display for HumanBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            GIB.. => write!(formatter, "{:.1} GiB", bytes / GIB as f64),
            MIB.. => write!(formatter, "{:.1} MiB", bytes / MIB as f64),
            KIB.. => write!(formatter, "{:.1} KiB", bytes / KIB as f64),
            _ => write!(formatter, "{} B", self.0),
        }
    }
}

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

impl Executor {
    /// The executor's name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Executor::Device => "device",
            Executor::Host => "host",
        }
    }
}

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

impl GroupKind {
    /// Every kind, in the order in which a step uses them.
    pub const ALL: [GroupKind; 5] = [
        GroupKind::Small,
        GroupKind::Embedding,
        GroupKind::Attention,
        GroupKind::FeedForward,
        GroupKind::Head,
    ];

    /// The kind's name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            GroupKind::Small => "small",
            GroupKind::Embedding => "embedding",
            GroupKind::Attention => "attention",
            GroupKind::FeedForward => "feed-forward",
            GroupKind::Head => "head",
        }
    }
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

impl Group {
    /// What a home for this group takes of an arena.
    pub fn home_bytes(&self) -> u64 {
        round_up(self.entry_bytes, ARENA_ALIGNMENT)
    }

    /// Whether a step uses the whole group, so that it passes through a ring where it does not rest with its
    /// executor. The small group is always resident; rows of an untied embedding are gathered one by one.
    pub fn is_streamable(&self) -> bool {
        matches!(
            self.kind,
            GroupKind::Attention | GroupKind::FeedForward | GroupKind::Head
        )
    }
}

/// Where a group rests and who multiplies by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residence {
    pub home: Tier,
    pub executor: Executor,
    /// Who does so in steps of up to `Plan::host_width_max` tokens, where that may be another: the host has most of the
    /// groups that do not rest on the device then, and those that the link moves meanwhile stay the device's.
    pub narrow: Executor,
}
