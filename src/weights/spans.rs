//! What the trace is told of computation: a span from lease to drop for each group, on the lane of its executor.
//!
//! On a CUDA device a lease ends long before its group has been computed with: `device_times` has the span then.

use super::{Lease, Weights};
use crate::gguf::Gguf;
use crate::memory::{CudaDevice, Moment};
use crate::placement::{DeviceKind, Executor, Plan};
use crate::trace::{Computer, GroupLabel, Trace};
use std::time::Instant;

/// How computation with a group began.
#[derive(Debug, Default)]
pub(super) enum Began {
    #[default]
    Untraced,
    OnHost(Instant, Computer),
    /// It has ended too.
    Told(Instant, Instant, Computer),
    OnDevice(Moment),
}

impl Weights {
    /// From now on tells `trace` what is read, copied and computed with, and what computation waits for. Before the first
    /// step only: nothing streams yet.
    pub fn set_trace(&mut self, trace: Trace, gguf: &Gguf) {
        if !trace.is_on() {
            return;
        }
        trace.name_groups(labels(gguf, &self.plan));
        if let Some(device) = self.cuda() {
            device.start_clock();
        }
        self.shared.set_trace(trace.clone());
        self.trace = trace;
    }

    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    pub(super) fn cuda(&self) -> Option<&CudaDevice> {
        let arena = self.arenas.device.as_ref()?;
        arena.cuda().map(AsRef::as_ref)
    }

    /// Before a pass, when the compute stream is done with the one before.
    pub(super) fn adjust_clock(&self) {
        if self.trace.is_on()
            && let Some(device) = self.cuda()
        {
            device.adjust_clock();
        }
    }

    fn begin_span(&self, lease: &Lease<'_>, executor: Executor) -> Began {
        let Some(now) = self.trace.now() else {
            return Began::Untraced;
        };
        let computer = match executor {
            Executor::Device => Computer::Device,
            Executor::Host => Computer::Cpu,
        };
        match (self.plan.device, executor) {
            (DeviceKind::Cuda, Executor::Device) => lease
                .cuda()
                .and_then(CudaDevice::compute_moment)
                .map_or(Began::Untraced, Began::OnDevice),
            // The host has a lease while it waits for the device's part too: `Lease::host_computes` tells when it computes.
            (DeviceKind::Cuda, Executor::Host) => Began::Untraced,
            (DeviceKind::Cpu | DeviceKind::Emulated, _) => Began::OnHost(now, computer),
        }
    }

    /// Of groups that the host computed with at the same time, each gets a part of that time by its bytes. The first
    /// `ended_count` have ended.
    pub(super) fn divide_span(&self, leases: &mut [Lease<'_>], ended_count: usize) {
        let (Some(ended), true) = (self.trace.now(), leases.len() > 1) else {
            return;
        };
        let bytes_of = |lease: &Lease<'_>| self.plan.groups[lease.group().0 as usize].entry_bytes;
        let total: u64 = leases.iter().map(bytes_of).sum();
        let Some(Began::OnHost(first, _)) = leases.first().map(|lease| &lease.began) else {
            return;
        };
        let (mut began, taken) = (*first, ended.saturating_duration_since(*first));
        for (index, lease) in leases.iter_mut().enumerate() {
            let share = bytes_of(lease) as f64 / total.max(1) as f64;
            let until = began + taken.mul_f64(share);
            if let Began::OnHost(_, computer) = lease.began {
                lease.began = match index < ended_count {
                    true => Began::Told(began, until, computer),
                    false => Began::OnHost(began, computer),
                };
            }
            began = until;
        }
    }

    fn end_span(&self, lease: &Lease<'_>, began: Began) {
        let (group, trace) = (lease.group(), self.trace());
        match began {
            Began::Untraced => {}
            Began::OnHost(began, computer) => {
                trace.computed(computer, group.0, began, Instant::now());
            }
            Began::Told(began, ended, computer) => {
                trace.computed(computer, group.0, began, ended);
            }
            Began::OnDevice(began) => {
                if let Some(ended) = lease.cuda().and_then(CudaDevice::compute_moment) {
                    self.device_times.computed(group, began, ended);
                }
            }
        }
    }
}

impl<'w> Lease<'w> {
    /// Computation with the group begins, on this executor.
    pub(super) fn begun(mut self, executor: Executor) -> Lease<'w> {
        self.began = self.weights.begin_span(&self, executor);
        self
    }

    /// It has ended: the lease is being dropped.
    pub(super) fn end_span(&mut self) {
        let began = std::mem::take(&mut self.began);
        self.weights.end_span(self, began);
    }

    /// The host computes with the group beside a CUDA device, until what is returned is dropped.
    pub fn host_computes(&self) -> HostComputation<'_> {
        HostComputation {
            lease: self,
            began: self.weights.trace.now(),
        }
    }
}

/// A computation of the host beside a CUDA device.
pub struct HostComputation<'l> {
    lease: &'l Lease<'l>,
    began: Option<Instant>,
}

impl Drop for HostComputation<'_> {
    fn drop(&mut self) {
        if let Some(began) = self.began {
            let began = Began::OnHost(began, Computer::Cpu);
            self.lease.weights.end_span(self.lease, began);
        }
    }
}

fn labels(gguf: &Gguf, plan: &Plan) -> Vec<GroupLabel> {
    let label = |index: usize| {
        let group = &plan.groups[index];
        let rows = group.parts.iter().map(|part| {
            let name = &gguf.tensors[part.tensor].name;
            format!("{name} {} to {}", part.rows.start, part.rows.end)
        });
        GroupLabel {
            name: super::group_title(group),
            rows: rows.collect::<Vec<_>>().join(", "),
            read_bytes: group.extents.iter().map(|extent| extent.bytes).sum(),
            copied_bytes: group.entry_bytes,
            weight_bytes: group.parts.iter().map(|part| part.bytes).sum(),
        }
    };
    (0..plan.groups.len()).map(label).collect()
}
