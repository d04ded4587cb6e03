//! Faster layouts: from one that holds together to the one that the simulation finds fastest, by slice size, step width and
//! who multiplies in narrow steps.

use super::homes;
use super::layout::{HOST_RING_ENTRIES, Layout};
use super::planner::{DeviceKind, ExecutorChoice, PlanRequest, Problem, STEP_WIDTH_KEPT};
use super::{Executor, Rates, Tier};
use crate::gguf::TensorInfo;
use std::collections::BTreeMap;

/// The smallest slices that are tried, and those that make a larger model this many groups: each takes time to simulate.
const SLICE_BYTES_TRIED_MIN: u64 = 4 << 20;
const GROUPS_TRIED_MAX: u64 = 2048;
/// How much of the host ring is to be ahead of the group that is computed: a drive reaches its rate with some sixteen
/// megabytes under way, and computation is to find something while the drive pauses. It takes the place of weights, and so
/// is a small part of the memory at most.
const READ_AHEAD_BYTES: u64 = 56 << 20;
const READ_AHEAD_SHARE: u64 = 24;
/// The parts of what does not rest on the device, of which some are moved over the link in narrow steps.
const LINK_SHARES: u64 = 16;
/// A layout gives way only to one that costs less than this share of it.
const WORTH_CHANGING: f64 = 0.99;
/// The same for steps of half the width, with which a prompt reads what streams twice as often. That hides behind the
/// computation as long as nothing disturbs it, so the gain has to be larger than the error of the rates that promise it.
const WORTH_NARROWING: f64 = 0.9;
/// Above the widest step: so wide a one is the device's.
const CROSSOVER_MAX: u32 = 1 << 16;

impl Problem<'_> {
    /// What streams costs time by its bytes, and rings, scratch and pages of windows take the place of weights: smaller
    /// slices, and then narrower steps, as long as the simulation finds that they are worth it.
    pub(super) fn tuned(&self, request: &PlanRequest, first: Layout) -> Layout {
        let mut best = (self.scenario(request, &first).cost(first.step_width), first);
        let try_layout = |best: &mut (f64, Layout), width, slice_bytes, worth| {
            if let Some((cost, layout)) = self.layout_with(request, width, slice_bytes)
                && cost < worth * best.0
            {
                *best = (cost, layout);
            }
        };
        let slices = |layout: &Layout| -> Vec<u64> {
            let halves =
                std::iter::successors(Some(layout.slice_bytes / 2), |bytes| Some(bytes / 2));
            let least = SLICE_BYTES_TRIED_MIN
                .max(self.slice_bytes_min)
                .max(self.used_weight_bytes / GROUPS_TRIED_MAX);
            match request.slice_bytes {
                Some(_) => Vec::new(),
                None => halves.take_while(|&bytes| bytes >= least).collect(),
            }
        };
        for slice_bytes in slices(&best.1) {
            let width = best.1.step_width;
            try_layout(&mut best, width, Some(slice_bytes), WORTH_CHANGING);
        }
        if request.step_width.is_none() {
            let widths =
                std::iter::successors(Some(best.1.step_width / 2), |width| Some(width / 2));
            for width in widths.take_while(|&width| width >= STEP_WIDTH_KEPT) {
                let slice_bytes = Some(best.1.slice_bytes);
                try_layout(&mut best, width, slice_bytes, WORTH_NARROWING);
            }
        }
        best.1
    }

    /// Where a GPU shares a narrow step with the host: the link would be idle then, and so it moves as much of what does
    /// not rest on the device as makes the step shorter.
    pub(super) fn use_link_in_narrow_steps(&self, request: &PlanRequest, layout: &mut Layout) {
        let shares_steps = request.device == DeviceKind::Cuda
            && request.executor == ExecutorChoice::Auto
            && self.host_width_max(request) > 0;
        if !shares_steps {
            return;
        }
        let depth = self.scenario(request, layout).usual_depth();
        let seconds = |layout: &Layout| {
            let prediction = self.scenario(request, layout).predict(1, depth);
            prediction.step_seconds
        };
        let candidates: Vec<usize> = (0..layout.groups.len())
            .filter(|&index| {
                layout.groups[index].is_streamable()
                    && layout.residences[index].home != Tier::Device
            })
            .collect();
        let bytes_of = |&index: &usize| layout.groups[index].home_bytes();
        let bytes: u64 = candidates.iter().map(bytes_of).sum();
        let mut best = (seconds(layout), layout.residences.clone());
        for share in 1..LINK_SHARES {
            let mut left = bytes / LINK_SHARES * share;
            let moved = homes::spread(&layout.groups, &candidates, &mut left);
            for &index in &candidates {
                layout.residences[index].narrow = Executor::Host;
            }
            for &index in &moved {
                layout.residences[index].narrow = Executor::Device;
            }
            let now = seconds(layout);
            if now < WORTH_CHANGING * best.0 {
                best = (now, layout.residences.clone());
            }
        }
        layout.residences = best.1;
    }
}

/// The width up to which the host is done with all matrices before the link has moved them. The device, which is the
/// faster at computing, hides behind the link.
pub(super) fn crossover(tensors: &[TensorInfo], rates: &Rates) -> u32 {
    let mut of_types: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.dimensions.len() > 1) {
        let rows: u64 = tensor.dimensions[1..].iter().product();
        let (bytes, elements) = of_types.entry(tensor.kind.name()).or_default();
        *bytes += tensor.bytes as f64;
        *elements += tensor.columns() as f64 * rows as f64;
    }
    let bytes: f64 = of_types.values().map(|(bytes, _)| bytes).sum();
    let link_seconds = bytes / rates.link_bytes_per_second;
    let is_for_host = |width: u32| {
        let seconds = of_types.iter().map(|(kind, &(bytes, elements))| {
            rates.host_product_seconds(kind, bytes, elements, width)
        });
        seconds.sum::<f64>() <= link_seconds
    };
    let (mut host, mut device) = (0, CROSSOVER_MAX);
    while device - host > 1 {
        let width = host + (device - host) / 2;
        match is_for_host(width) {
            true => host = width,
            false => device = width,
        }
    }
    host
}

/// Entries of the host ring for slices that are smaller than usual.
pub(super) fn host_entries(slice_bytes: u64, host_budget: u64) -> u32 {
    let ahead = READ_AHEAD_BYTES
        .min(host_budget / READ_AHEAD_SHARE)
        .div_ceil(slice_bytes) as u32;
    HOST_RING_ENTRIES.max(ahead + 1)
}
