//! `plan`: splits each tier's budget once into weights, ring, KV and scratch, and gives every group a home.
//!
//! What claims come first: KV, scratch and the small group are fixed by the request; a ring exists only where
//! something streams; homes take the rest. Ring, slice and scratch sizes depend on the homes and the homes on what those
//! leave, so the planner tries layouts from the one that needs least beside homes to the one that needs most, takes the
//! first that holds together, and then shrinks what it reserved to what that layout needs. Where something streams, `tuning`
//! looks for a faster one from there.

use super::groups::{Catalogue, SliceRule};
use super::homes::Strategy;
use super::layout::{
    Candidate, DEVICE_RING_ENTRIES, HOST_RING_ENTRIES, Layout, RING_ENTRIES_MIN, Reserve, Split,
};
use super::refusal::{self, PlanError};
use super::scenario::{LayerAttention, PREDICTED_WIDTHS, Scenario, attention};
use super::scratch::{self, InputForms, ScratchNeeds};
use super::tuning::{crossover, host_entries};
use super::{
    ARENA_ALIGNMENT, GatherBuffer, Group, HumanBytes, KvSplit, KvType, PAGE_TOKENS, Plan, Rates,
    Ring, Tier, TierSplit, WindowPages, round_up,
};
use crate::gguf::{Gguf, Hyperparameters, TensorInfo};
use std::cell::RefCell;
use std::rc::Rc;

/// What stands for the device tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// There is none: the host computes.
    Cpu,
    /// A host arena behind a queue thread that copies at a given rate.
    Emulated,
    /// A GPU: its memory holds pages and activations too, and its kernels compute.
    Cuda,
}

impl DeviceKind {
    pub const fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Emulated => "emulated",
            DeviceKind::Cuda => "cuda",
        }
    }
}

/// Who multiplies by groups that do not rest on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExecutorChoice {
    /// On a GPU `HostUpTo` the width from which copying is the faster, by the rates, less what the link moves meanwhile. On
    /// the emulated device `Device`:
    /// it exists to exercise that path.
    #[default]
    Auto,
    /// They are streamed to the device.
    Device,
    /// The host, from where they rest, or from its ring.
    Host,
    /// The host in steps of up to so many tokens; in wider ones they are streamed to the device.
    HostUpTo(u32),
}

/// What a plan is made for.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanRequest {
    pub device: DeviceKind,
    /// Bytes. Needed unless the device is `Cpu`.
    pub device_budget: Option<u64>,
    /// Bytes.
    pub host_budget: u64,
    /// Tokens of each sequence.
    pub context: u32,
    /// Sequences at once.
    pub parallel: u32,
    pub kv_type: KvType,
    /// Tokens in the widest step; `None`: chosen.
    pub step_width: Option<u32>,
    /// The storage's logical block: a power of two, at most 1 MiB.
    pub read_alignment: u64,
    /// Bytes of the largest group; rounded down to whole read blocks. `None`: chosen.
    pub slice_bytes: Option<u64>,
    /// Groups that either ring holds; at least 2. `None`: 4 on the host and 3 on the device, fewer where they do not fit.
    pub ring_entries: Option<u32>,
    pub executor: ExecutorChoice,
    /// Whether the file may be mapped instead of read where all of it fits the host's budget on `Cpu`.
    pub map_file: bool,
    pub rates: Rates,
    /// The name of the hardware card that `rates` are from; `None`: they are assumed.
    pub rates_card: Option<String>,
}

const STEP_WIDTH_MAX: u32 = 512;
/// Width that a plan keeps even where its scratch takes more than its share of the budget.
pub(super) const STEP_WIDTH_KEPT: u32 = 16;
/// Scratch takes at most one part in this many of a budget.
const SCRATCH_SHARE: u64 = 8;
const SLICE_BYTES_MAX: u64 = 128 << 20;
const SLICE_BYTES_MIN: u64 = 256 << 10;
/// More groups than this are not planned: each takes a few hundred bytes, and time for each of the layouts that are
/// tried. A file of 1 TiB keeps to it in slices of half the largest size; a size that a few numbers in a damaged file
/// or a card claim may not.
pub(super) const GROUPS_MAX: u64 = 1 << 14;
/// A ring takes at most one part in this many of what KV, scratch and the small group leave.
const RING_SHARE: u64 = 4;
/// The same for the order in which kinds of groups get homes on a device.
const WORTH_ANOTHER_STRATEGY: f64 = 0.95;
const READ_ALIGNMENT_MAX: u64 = 1 << 20;

/// Makes the plan, or says what is short, by how much, and the first thing to change.
pub fn plan(
    gguf: &Gguf,
    hyperparameters: &Hyperparameters,
    request: &PlanRequest,
) -> Result<Plan, PlanError> {
    plan_tensors(&gguf.tensors, hyperparameters, request)
}

/// The tensor table is all that a plan needs of a file.
pub(super) fn plan_tensors(
    tensors: &[TensorInfo],
    hyperparameters: &Hyperparameters,
    request: &PlanRequest,
) -> Result<Plan, PlanError> {
    check(request)?;
    let problem = Problem::new(tensors, hyperparameters, request);
    problem.check_pieces(request)?;
    match problem.layout(request) {
        Some(layout) => Ok(problem.finish(request, layout)),
        None => Err(refusal::explain(&problem, request)),
    }
}

fn check(request: &PlanRequest) -> Result<(), PlanError> {
    let invalid = |what: &'static str, why: String| Err(PlanError::Invalid { what, why });
    if request.context == 0 {
        return invalid("context", "0 tokens: at least 1 is needed".into());
    }
    if request.parallel == 0 {
        return invalid("parallel", "0 sequences: at least 1 is needed".into());
    }
    if !request.read_alignment.is_power_of_two() || request.read_alignment > READ_ALIGNMENT_MAX {
        return invalid(
            "read alignment",
            format!(
                "{}: must be a power of two and at most {READ_ALIGNMENT_MAX}",
                request.read_alignment
            ),
        );
    }
    if request.device != DeviceKind::Cpu && request.device_budget.is_none() {
        let device = request.device.name();
        return invalid(
            "device memory",
            format!("no budget for the device `{device}`"),
        );
    }
    match request.rates.check() {
        Ok(()) => Ok(()),
        Err(error) => invalid("rates", error.to_string()),
    }
}

/// One model, the rates, and everything about them that does not depend on budgets.
pub(super) struct Problem<'a> {
    pub(super) tensors: &'a [TensorInfo],
    pub(super) hyperparameters: &'a Hyperparameters,
    pub(super) catalogue: Catalogue,
    pub(super) read_alignment: u64,
    pub(super) small_bytes: u64,
    pub(super) input_forms: InputForms,
    /// All tensors of the file, used or not.
    pub(super) file_weight_bytes: u64,
    /// Tensors that groups hold.
    pub(super) used_weight_bytes: u64,
    /// The smallest slice size that keeps to `GROUPS_MAX`, where the request names none.
    pub(super) slice_bytes_min: u64,
    pub(super) attention: Vec<LayerAttention>,
    /// See `crossover`, by the request's rates: it is asked for again and again, and takes a walk through all tensors.
    crossover: u32,
    /// The groups of the last slice size: neighbouring layouts mostly ask for the same.
    pub(super) last_groups: RefCell<Option<(u64, Rc<Vec<Group>>)>>,
}

impl<'a> Problem<'a> {
    pub(super) fn new(
        tensors: &'a [TensorInfo],
        hyperparameters: &'a Hyperparameters,
        request: &PlanRequest,
    ) -> Problem<'a> {
        let catalogue = Catalogue::new(tensors, hyperparameters.layers, hyperparameters.tied_head);
        let small = catalogue.small_group(tensors, request.read_alignment);
        let file_weight_bytes = tensors
            .iter()
            .fold(0u64, |sum, tensor| sum.saturating_add(tensor.bytes));
        let unit = request.read_alignment.max(ARENA_ALIGNMENT);
        let mut slice_bytes_min = SLICE_BYTES_MIN.max(unit);
        let pieces = |slice_bytes| {
            let rule = SliceRule {
                slice_bytes,
                read_alignment: request.read_alignment,
            };
            catalogue.pieces(tensors, rule)
        };
        while slice_bytes_min < SLICE_BYTES_MAX && pieces(slice_bytes_min) > GROUPS_MAX {
            slice_bytes_min *= 2;
        }
        let used_weight_bytes = catalogue.weight_bytes(tensors);
        Problem {
            used_weight_bytes,
            slice_bytes_min,
            attention: attention(hyperparameters, request.kv_type.element_bytes()),
            crossover: crossover(tensors, &request.rates),
            tensors,
            hyperparameters,
            catalogue,
            read_alignment: request.read_alignment,
            small_bytes: small.map_or(0, |group| group.home_bytes()),
            input_forms: InputForms::of(tensors),
            file_weight_bytes,
            last_groups: RefCell::new(None),
        }
    }

    /// Refuses weights that even the largest slices, or those that the request names, cut into too many groups: found
    /// by division, before anything is cut.
    fn check_pieces(&self, request: &PlanRequest) -> Result<(), PlanError> {
        let unit = self.read_alignment.max(ARENA_ALIGNMENT);
        let (what, slice_bytes) = match request.slice_bytes {
            Some(bytes) => ("slice", (bytes / unit * unit).max(unit)),
            None => ("weights", self.slice_bytes_min),
        };
        let rule = SliceRule {
            slice_bytes,
            read_alignment: self.read_alignment,
        };
        let pieces = self.catalogue.pieces(self.tensors, rule);
        if pieces <= GROUPS_MAX {
            return Ok(());
        }
        let advice = match request.slice_bytes {
            Some(_) => "give a larger --slice, or auto",
            None => "no model is this large: the shape or the file is damaged",
        };
        Err(PlanError::Invalid {
            what,
            why: format!(
                "{} of weights in slices of {} are {pieces} groups, and at most {GROUPS_MAX} are planned; {advice}",
                HumanBytes(self.used_weight_bytes),
                HumanBytes(slice_bytes),
            ),
        })
    }

    /// Pages of the KV cache for steps of up to `width` tokens; `None` where they cannot be numbered.
    fn kv(&self, request: &PlanRequest, width: u32) -> Option<KvSplit> {
        let shape = self.hyperparameters;
        let page_bytes = |with_window: bool| {
            shape
                .kv_elements(with_window)
                .saturating_mul(request.kv_type.element_bytes())
                .saturating_mul(u64::from(PAGE_TOKENS))
        };
        let window = shape.window.map(|window| {
            // Before the step's first token, and the step; neither starts with a page.
            let positions = (window.positions - 1).saturating_add(width);
            WindowPages {
                sequences: request.parallel,
                pages_of_sequence: (positions.div_ceil(PAGE_TOKENS) + 1)
                    .min(request.context.div_ceil(PAGE_TOKENS)),
                page_bytes: page_bytes(true),
            }
        });
        let window_pages = window.map_or(0, |window| {
            u64::from(window.sequences) * u64::from(window.pages_of_sequence)
        });
        u32::try_from(window_pages).ok()?;
        Some(KvSplit {
            tier: match request.device {
                DeviceKind::Cpu => Tier::Host,
                DeviceKind::Emulated | DeviceKind::Cuda => Tier::Device,
            },
            kind: request.kv_type,
            page_tokens: PAGE_TOKENS,
            pages: u32::try_from(pages(request)).ok()?,
            page_bytes: page_bytes(false),
            window,
        })
    }

    /// The best layout for a request; `None` where none fits.
    pub(super) fn layout(&self, request: &PlanRequest) -> Option<Layout> {
        let first = match request.step_width {
            Some(width) => self.layout_at(request, width.max(1))?,
            None => self.widest_layout(request)?,
        };
        if first.rings() == 0 {
            return Some(first);
        }
        let mut layout = self.tuned(request, first);
        self.use_link_in_narrow_steps(request, &mut layout);
        Some(layout)
    }

    /// The widest step whose scratch keeps to its share, or the width that is kept anyway; narrower where that does not
    /// fit.
    fn widest_layout(&self, request: &PlanRequest) -> Option<Layout> {
        let tokens = u64::from(request.context) * u64::from(request.parallel);
        let mut width = STEP_WIDTH_MAX;
        while width > 1 && u64::from(width / 2) >= tokens {
            width /= 2;
        }
        while width > STEP_WIDTH_KEPT && !self.scratch_keeps_to_share(request, width) {
            width /= 2;
        }
        loop {
            if let Some(layout) = self.layout_at(request, width) {
                return Some(layout);
            }
            if width == 1 {
                return None;
            }
            width /= 2;
        }
    }

    fn scratch_keeps_to_share(&self, request: &PlanRequest, width: u32) -> bool {
        // Rows of the embedding are gathered from storage only where not everything can rest in memory.
        let memory = request
            .host_budget
            .saturating_add(request.device_budget.unwrap_or(0));
        let needs = ScratchNeeds {
            step_width: width,
            gather: if self.file_weight_bytes >= memory {
                self.gather_buffer(width)
            } else {
                GatherBuffer::default()
            },
            staging_bytes: 0,
            host_width_max: self.host_width_max(request),
            embedding_row_bytes: self.embedding_row_bytes(),
            small_bytes: self.small_bytes,
            forms: self.input_forms,
        };
        let items = scratch::items(self.hyperparameters, request, pages(request), needs);
        let keeps = |tier, budget: u64| scratch::total(&items, tier) <= budget / SCRATCH_SHARE;
        let on_device = request.device == DeviceKind::Cpu
            || keeps(Tier::Device, request.device_budget.unwrap_or(0));
        on_device && keeps(Tier::Host, request.host_budget)
    }

    /// The widest step in which the host multiplies by what does not rest on the device: 0 for none, `u32::MAX` for all.
    pub(super) fn host_width_max(&self, request: &PlanRequest) -> u32 {
        match (request.device, request.executor) {
            (DeviceKind::Cpu, _)
            | (_, ExecutorChoice::Device)
            | (DeviceKind::Emulated, ExecutorChoice::Auto) => 0,
            (_, ExecutorChoice::Host) => u32::MAX,
            (_, ExecutorChoice::HostUpTo(width)) => width,
            (DeviceKind::Cuda, ExecutorChoice::Auto) => self.crossover,
        }
    }

    /// Bytes of a stored row of the token embedding.
    fn embedding_row_bytes(&self) -> u64 {
        self.catalogue
            .embedding_rows()
            .map_or(0, |index| self.tensors[index].row_bytes())
    }

    /// A slot for each row of a step, wide enough for the aligned read around any row.
    pub(super) fn gather_buffer(&self, width: u32) -> GatherBuffer {
        let Some(index) = self.catalogue.embedding_rows() else {
            return GatherBuffer::default();
        };
        // A row that starts at the last byte of a block reaches furthest.
        let reach = self.tensors[index]
            .row_bytes()
            .saturating_add(self.read_alignment - 1);
        GatherBuffer {
            rows: width,
            row_bytes: round_up(reach, self.read_alignment),
        }
    }

    pub(super) fn split(
        &self,
        request: &PlanRequest,
        kv: KvSplit,
        width: u32,
        reserve: Reserve,
        small_bytes: u64,
    ) -> Split {
        let needs = ScratchNeeds {
            step_width: width,
            gather: reserve.gather,
            staging_bytes: reserve.staging_bytes,
            host_width_max: self.host_width_max(request),
            embedding_row_bytes: self.embedding_row_bytes(),
            small_bytes: self.small_bytes,
            forms: self.input_forms,
        };
        let scratch = scratch::items(self.hyperparameters, request, pages(request), needs);
        let kv_bytes = round_up(kv.bytes(), ARENA_ALIGNMENT);
        let tier = |tier, budget, ring: Ring| TierSplit {
            budget,
            // The small group rests on each executor; with a device, the host's copy is also what the device's is
            // loaded from.
            weights: small_bytes,
            ring: ring.bytes(),
            kv: if kv.tier == tier { kv_bytes } else { 0 },
            scratch: scratch::total(&scratch, tier),
        };
        Split {
            device: (request.device != DeviceKind::Cpu).then(|| {
                let budget = request.device_budget.unwrap_or(0);
                tier(Tier::Device, budget, reserve.device_ring)
            }),
            host: tier(Tier::Host, request.host_budget, reserve.host_ring),
            scratch,
            reserve,
        }
    }

    /// The slice size where the request names none: rings of the usual number of entries keep to their share of every
    /// tier that may have one.
    fn slice_bytes(&self, request: &PlanRequest, split: &Split) -> u64 {
        let unit = self.read_alignment.max(ARENA_ALIGNMENT);
        if let Some(bytes) = request.slice_bytes {
            return (bytes / unit * unit).max(unit);
        }
        let share = |left: u64, entries: u32| left / RING_SHARE / u64::from(entries);
        let entries = |usual| request.ring_entries.unwrap_or(usual).max(RING_ENTRIES_MIN);
        let mut bytes = share(split.host.free(), entries(HOST_RING_ENTRIES));
        if let Some(device) = split.device
            && self.host_width_max(request) < u32::MAX
        {
            bytes = bytes.min(share(device.free(), entries(DEVICE_RING_ENTRIES)));
        }
        (bytes / unit * unit).clamp(self.slice_bytes_min, SLICE_BYTES_MAX)
    }

    fn groups(&self, slice_bytes: u64) -> Rc<Vec<Group>> {
        if let Some((bytes, groups)) = &*self.last_groups.borrow()
            && *bytes == slice_bytes
        {
            return Rc::clone(groups);
        }
        let rule = SliceRule {
            slice_bytes,
            read_alignment: self.read_alignment,
        };
        let groups = Rc::new(self.catalogue.groups(self.tensors, rule));
        *self.last_groups.borrow_mut() = Some((slice_bytes, Rc::clone(&groups)));
        groups
    }

    /// Whether the file itself may be the homes: by its bytes alone, without the borders of groups.
    fn may_be_mapped(&self, request: &PlanRequest, bare: &Split) -> bool {
        let mut mapped = bare.clone();
        mapped.host.weights = self.used_weight_bytes;
        request.map_file && request.device == DeviceKind::Cpu && mapped.fits()
    }

    /// One step width, with its slice size and groups; `None` where what is fixed does not fit already.
    fn candidate<'b>(
        &'b self,
        request: &'b PlanRequest,
        width: u32,
        slice_bytes: Option<u64>,
    ) -> Option<Candidate<'b>> {
        let kv = self.kv(request, width)?;
        let bare = self.split(request, kv, width, Reserve::default(), self.small_bytes);
        // A mapped small group takes less than a resident one.
        if !bare.fits() && !self.may_be_mapped(request, &bare) {
            return None;
        }
        let usual = self.slice_bytes(request, &bare);
        let (slice_bytes, host_entries) = match slice_bytes.filter(|&bytes| bytes < usual) {
            Some(bytes) => (bytes, host_entries(bytes, request.host_budget)),
            None => (usual, HOST_RING_ENTRIES),
        };
        Some(Candidate {
            problem: self,
            request,
            kv,
            width,
            slice_bytes,
            host_entries,
            groups: self.groups(slice_bytes),
        })
    }

    /// The best layout for one step width, in slices of the usual size; `None` where none fits.
    fn layout_at(&self, request: &PlanRequest, width: u32) -> Option<Layout> {
        let (_, layout) = self.layout_with(request, width, None)?;
        Some(layout)
    }

    /// The best layout for one step width and slice size, and what it costs.
    pub(super) fn layout_with(
        &self,
        request: &PlanRequest,
        width: u32,
        slice_bytes: Option<u64>,
    ) -> Option<(f64, Layout)> {
        let candidate = self.candidate(request, width, slice_bytes)?;
        if let Some(layout) = candidate.mapped() {
            return Some((0.0, layout));
        }
        let mut best: Option<(f64, Layout)> = None;
        for &strategy in strategies(request.device) {
            let Some(layout) = candidate.with_strategy(strategy) else {
                continue;
            };
            let cost = self.scenario(request, &layout).cost(layout.step_width);
            // An earlier strategy gives way only to one that is clearly faster.
            if best
                .as_ref()
                .is_none_or(|(least, _)| cost < WORTH_ANOTHER_STRATEGY * least)
            {
                best = Some((cost, layout));
            }
        }
        best
    }

    /// The layout that asks for least, in the narrowest steps where no width is asked for: there is a plan exactly where
    /// there is this one.
    pub(super) fn least_layout(&self, request: &PlanRequest) -> Option<Layout> {
        let width = request.step_width.unwrap_or(1).max(1);
        let candidate = self.candidate(request, width, None)?;
        let first = strategies(request.device)[0];
        candidate
            .mapped()
            .or_else(|| candidate.with_strategy(first))
    }

    pub(super) fn scenario<'b>(
        &'b self,
        request: &'b PlanRequest,
        layout: &'b Layout,
    ) -> Scenario<'b> {
        Scenario {
            device: request.device,
            groups: &layout.groups,
            residences: &layout.residences,
            products: &layout.products,
            attention: &self.attention,
            rates: &request.rates,
            host_width_max: self.host_width_max(request),
            host_entries: layout.split.reserve.host_ring.entries,
            device_entries: layout.split.reserve.device_ring.entries,
            context: request.context,
            parallel: request.parallel,
            device_bytes: layout
                .split
                .device
                .as_ref()
                .map_or(0, TierSplit::without_kv),
            host_bytes: layout.split.host.without_kv(),
        }
    }

    fn finish(&self, request: &PlanRequest, layout: Layout) -> Plan {
        let scenario = self.scenario(request, &layout);
        let predictions = PREDICTED_WIDTHS
            .iter()
            .map(|&width| scenario.predict(width, scenario.usual_depth()))
            .collect();
        let Split {
            device,
            host,
            scratch,
            reserve,
        } = layout.split;
        Plan {
            groups: Rc::unwrap_or_clone(layout.groups),
            residences: layout.residences,
            device: request.device,
            mapped: layout.mapped,
            tied_head: self.hyperparameters.tied_head,
            host_width_max: self.host_width_max(request),
            slice_bytes: layout.slice_bytes,
            read_alignment: request.read_alignment,
            device_split: device,
            host_split: host,
            host_ring: reserve.host_ring,
            device_ring: reserve.device_ring,
            staging_bytes: reserve.staging_bytes,
            crossing_bytes: scratch
                .iter()
                .filter(|item| item.name == scratch::CROSSING)
                .map(|item| item.bytes)
                .sum(),
            kv: layout.kv,
            gather: reserve.gather,
            context: request.context,
            parallel: request.parallel,
            step_width: layout.step_width,
            scratch,
            unused: self.catalogue.unused.clone(),
            rates: request.rates.clone(),
            rates_card: request.rates_card.clone(),
            predictions,
            products: layout.products,
            attention: self.attention.clone(),
        }
    }
}

/// Pages for all positions of all sequences, in layers that see them all.
fn pages(request: &PlanRequest) -> u64 {
    u64::from(request.context.div_ceil(PAGE_TOKENS)) * u64::from(request.parallel)
}

/// Ways to share out homes, the one to prefer first.
fn strategies(device: DeviceKind) -> &'static [Strategy] {
    match device {
        DeviceKind::Cpu => &[Strategy::Even],
        DeviceKind::Emulated | DeviceKind::Cuda => &[
            Strategy::AttentionThenFeedForward,
            Strategy::AttentionThenRest,
            Strategy::Even,
        ],
    }
}
