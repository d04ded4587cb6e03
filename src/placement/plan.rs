//! The plan: plain data, and the sums that others ask of it.

use super::planner::DeviceKind;
use super::scenario::{LayerAttention, Prediction, Product, Scenario};
use super::{
    ARENA_ALIGNMENT, Executor, Group, GroupId, Rates, Residence, ScratchItem, Tier, round_up,
};

/// For every group its home and executor, the size of every part of every arena, and the predicted step time.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// In the order in which a step uses them: Small, Embedding.., per layer Attention.. FeedForward.., Head...
    pub groups: Vec<Group>,
    /// One for each group.
    pub residences: Vec<Residence>,
    pub device: DeviceKind,
    /// Homes on the host are the mapped file itself: no copy, no rings, parts at their `file_offset`.
    pub mapped: bool,
    pub tied_head: bool,
    /// The widest step in which `Residence::narrow` says who multiplies by groups that do not rest on the device; in wider
    /// ones `Residence::executor` does. 0: no step is so narrow; `u32::MAX`: all are.
    pub host_width_max: u32,
    /// No group's entry is larger, except one of a single slice of 32 rows, the small group and mapped ones.
    pub slice_bytes: u64,
    pub read_alignment: u64,
    /// `None` without a device tier.
    pub device_split: Option<TierSplit>,
    pub host_split: TierSplit,
    /// What groups in storage pass through. It exists where a streamable group rests in storage; then an entry
    /// holds any group that rests on the device too, so that loading can go through it.
    pub host_ring: Ring,
    /// What groups that the device multiplies by, and that do not rest there, pass through.
    pub device_ring: Ring,
    /// Part of the host's scratch: where device homes are loaded through when there is no host ring (else 0).
    pub staging_bytes: u64,
    /// Part of the host's scratch: page-locked memory for the small things that cross the link with a step (else 0).
    pub crossing_bytes: u64,
    pub kv: KvSplit,
    pub gather: GatherBuffer,
    pub context: u32,
    pub parallel: u32,
    /// Tokens in the widest step; scratch is sized for it.
    pub step_width: u32,
    /// The items of `scratch` in both splits.
    pub scratch: Vec<ScratchItem>,
    /// Tensors of the file that no group holds.
    pub unused: Vec<String>,
    pub rates: Rates,
    /// The hardware card that `rates` are from; `None`: they are assumed.
    pub rates_card: Option<String>,
    /// For widths 1, 8, 64 and 512.
    pub predictions: Vec<Prediction>,
    /// The products of each group.
    pub(super) products: Vec<Vec<Product>>,
    /// Of each layer.
    pub(super) attention: Vec<LayerAttention>,
}

/// One tier's budget, split once. Weights, ring, kv and scratch are whole multiples of `ARENA_ALIGNMENT`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierSplit {
    /// Bytes that the plan may use.
    pub budget: u64,
    /// Bytes of homes on this tier; on the host of a machine with a device also the small group, which rests on both.
    pub weights: u64,
    /// Bytes of all entries of this tier's ring.
    pub ring: u64,
    /// Bytes of all pages of the KV cache.
    pub kv: u64,
    /// Bytes of everything else that a step needs: the items of `Plan::scratch` on this tier.
    pub scratch: u64,
}

impl TierSplit {
    /// Everything that the plan puts on this tier.
    pub fn claimed(&self) -> u64 {
        self.weights
            .saturating_add(self.ring)
            .saturating_add(self.kv)
            .saturating_add(self.scratch)
    }

    /// What weights, their ring and scratch may use.
    pub(super) fn without_kv(&self) -> u64 {
        self.budget.saturating_sub(self.kv)
    }

    /// What of the budget the plan leaves alone.
    pub fn free(&self) -> u64 {
        self.budget.saturating_sub(self.claimed())
    }
}

/// Entries of one size, used in plan order. No entries: there is no such ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ring {
    /// How many groups may be in it at once.
    pub entries: u32,
    /// Bytes of each entry. At least the largest entry that passes through; a multiple of `ARENA_ALIGNMENT`.
    pub entry_bytes: u64,
}

impl Ring {
    pub fn bytes(&self) -> u64 {
        u64::from(self.entries).saturating_mul(self.entry_bytes)
    }
}

/// What keys and values are stored as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvType {
    #[default]
    F16,
    /// Twice the bytes; for comparisons with references that do not round.
    F32,
}

impl KvType {
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
        }
    }

    /// Of an element.
    pub const fn element_bytes(self) -> u64 {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
}

/// The KV cache: pages of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSplit {
    pub tier: Tier,
    pub kind: KvType,
    pub page_tokens: u32,
    /// Pages of the layers that see everything: all layers, but for those of `window`.
    pub pages: u32,
    pub page_bytes: u64,
    pub window: Option<WindowPages>,
}

impl KvSplit {
    /// Of all pages.
    pub fn bytes(&self) -> u64 {
        let window = self.window.map_or(0, |window| window.bytes());
        u64::from(self.pages)
            .saturating_mul(self.page_bytes)
            .saturating_add(window)
    }
}

/// Pages of the layers that see a window. Each sequence has some of its own, which its positions use in turn: what has
/// left the window is written over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPages {
    pub sequences: u32,
    /// Enough for the window of the first token of the widest step, and for the step.
    pub pages_of_sequence: u32,
    pub page_bytes: u64,
}

impl WindowPages {
    /// Page `index` of a sequence, among the pages of all.
    pub fn page(&self, slot: u32, index: usize) -> u32 {
        let own = self.pages_of_sequence;
        slot * own + (index % own as usize) as u32
    }

    fn bytes(&self) -> u64 {
        let pages = u64::from(self.sequences) * u64::from(self.pages_of_sequence);
        pages.saturating_mul(self.page_bytes)
    }
}

/// Where embedding rows that rest in storage land: a slot for each row of a step, wide enough for the aligned read
/// that covers the row wherever it starts. No rows: none rests in storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GatherBuffer {
    pub rows: u32,
    pub row_bytes: u64,
}

impl GatherBuffer {
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows).saturating_mul(self.row_bytes)
    }
}

impl Plan {
    pub fn group(&self, id: GroupId) -> &Group {
        &self.groups[id.0 as usize]
    }

    pub fn residence(&self, id: GroupId) -> Residence {
        self.residences[id.0 as usize]
    }

    /// Whether steps of `width` tokens have the executors of `Residence::narrow`.
    pub fn is_narrow(&self, width: u32) -> bool {
        width <= self.host_width_max
    }

    /// Where a group rests, and who multiplies by it in steps of `width` tokens.
    pub fn residence_at(&self, id: GroupId, width: u32) -> Residence {
        residence_at(self.residence(id), width, self.host_width_max)
    }

    /// All groups with their residences, in the order of use.
    pub fn iter(&self) -> impl Iterator<Item = (GroupId, &Group, Residence)> {
        let both = self.groups.iter().zip(&self.residences);
        (0u32..)
            .zip(both)
            .map(|(id, (group, &residence))| (GroupId(id), group, residence))
    }

    /// Groups that pass through the host ring in every step, in order.
    pub fn streamed_from_storage(&self) -> impl Iterator<Item = GroupId> {
        self.iter()
            .filter(|(_, group, residence)| uses_host_ring(group, *residence))
            .map(|(id, _, _)| id)
    }

    /// Groups that pass through the device ring in steps that are not narrow, in order. (Of a narrow one some of them do.)
    pub fn streamed_over_link(&self) -> impl Iterator<Item = GroupId> {
        self.iter()
            .filter(|(_, group, residence)| uses_device_ring(group, *residence))
            .map(|(id, _, _)| id)
    }

    /// Weight bytes that rest on a tier between uses; every group counts once.
    pub fn weight_home_bytes(&self, tier: Tier) -> u64 {
        self.iter()
            .filter(|(_, _, residence)| residence.home == tier)
            .map(|(_, group, _)| group.weight_bytes)
            .sum()
    }

    /// Bytes that a step reads from storage, alignment included. Embedding rows (a few KiB a token) are not counted.
    pub fn storage_bytes_per_step(&self) -> u64 {
        self.streamed_from_storage()
            .map(|id| self.group(id).entry_bytes)
            .sum()
    }

    /// Bytes of weights that a step moves to the device, where it is wider than `host_width_max`.
    pub fn link_bytes_per_step(&self) -> u64 {
        self.streamed_over_link()
            .map(|id| self.group(id).entry_bytes)
            .sum()
    }

    /// What a tier's arena holds: homes, ring and KV, and on the host the buffers that reads land in and what crosses the
    /// link to a CUDA device. The rest of scratch is activations, which are in the arena of a CUDA device and in none
    /// otherwise.
    pub fn arena_bytes(&self, tier: Tier) -> u64 {
        let split = match tier {
            Tier::Device => self.device_split.unwrap_or_default(),
            Tier::Host => self.host_split,
            Tier::Storage => TierSplit::default(),
        };
        let weights = if self.mapped { 0 } else { split.weights };
        let scratch = match tier {
            Tier::Host => {
                round_up(self.gather.bytes(), ARENA_ALIGNMENT)
                    + round_up(self.staging_bytes, ARENA_ALIGNMENT)
                    + round_up(self.crossing_bytes, ARENA_ALIGNMENT)
            }
            Tier::Device if self.device == DeviceKind::Cuda => split.scratch,
            Tier::Device | Tier::Storage => 0,
        };
        weights + split.ring + split.kv + scratch
    }

    /// The time of a steady-state step of `width` tokens in sequences that hold `depth` positions already.
    pub fn predict(&self, width: u32, depth: u32) -> Prediction {
        Scenario::of(self).predict(width, depth)
    }

    /// Seconds until the first token of an answer to a prompt of so many tokens, and the physical limit of them.
    pub fn first_token_seconds(&self, prompt: u32) -> (f64, f64) {
        Scenario::of(self).first_token_seconds(prompt, self.step_width)
    }
}

/// A residence in steps of `width` tokens.
pub(super) fn residence_at(residence: Residence, width: u32, host_width_max: u32) -> Residence {
    let executor = match residence.home {
        Tier::Host | Tier::Storage if width <= host_width_max => residence.narrow,
        _ => residence.executor,
    };
    Residence {
        executor,
        ..residence
    }
}

/// Whether a group passes through the host ring in every step.
pub(super) fn uses_host_ring(group: &Group, residence: Residence) -> bool {
    group.is_streamable() && residence.home == Tier::Storage
}

/// Whether a group with this residence, which is that of a step, passes through the device ring in it.
pub(super) fn uses_device_ring(group: &Group, residence: Residence) -> bool {
    group.is_streamable()
        && residence.executor == Executor::Device
        && residence.home != Tier::Device
}
