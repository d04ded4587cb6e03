//! A lease: a borrowed, ready-to-use group. Dropping it lets its ring entry be used again.

use super::spans::Began;
use super::{GatheredRows, Weights};
use crate::memory::{CudaDevice, DeviceAddress, Event, ReadError, Region};
use crate::placement::{Executor, GroupId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a step could not have its weights.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    #[error("read {group}: {source}")]
    Read {
        group: String,
        #[source]
        source: ReadError,
    },
    #[error("the step was cancelled")]
    Cancelled,
}

enum Bytes {
    Mapped,
    Resident(Arc<Region>),
    /// `None` only while the lease is dropped.
    Streamed {
        position: u64,
        region: Option<Region>,
        executor: Executor,
    },
}

/// A group that computation may read until the lease is dropped.
pub struct Lease<'w> {
    pub(super) weights: &'w Weights,
    group: GroupId,
    bytes: Bytes,
    /// For the trace.
    pub(super) began: Began,
}

impl<'w> Lease<'w> {
    pub(super) fn mapped(weights: &'w Weights, group: GroupId) -> Lease<'w> {
        Lease {
            weights,
            group,
            bytes: Bytes::Mapped,
            began: Began::Untraced,
        }
    }

    pub(super) fn resident(weights: &'w Weights, group: GroupId, region: Arc<Region>) -> Lease<'w> {
        Lease {
            weights,
            group,
            bytes: Bytes::Resident(region),
            began: Began::Untraced,
        }
    }

    pub(super) fn streamed(
        weights: &'w Weights,
        group: GroupId,
        position: u64,
        region: Region,
        executor: Executor,
    ) -> Lease<'w> {
        Lease {
            weights,
            group,
            bytes: Bytes::Streamed {
                position,
                region: Some(region),
                executor,
            },
            began: Began::Untraced,
        }
    }

    pub fn group(&self) -> GroupId {
        self.group
    }

    /// Where the group is in an arena; `None` in mapped mode.
    fn region(&self) -> Option<&Region> {
        match &self.bytes {
            Bytes::Mapped => None,
            Bytes::Resident(region) => Some(region),
            Bytes::Streamed { region, .. } => match region {
                Some(region) => Some(region),
                None => unreachable!("the lease is being dropped"),
            },
        }
    }

    /// The CUDA device that the group is on.
    pub(super) fn cuda(&self) -> Option<&CudaDevice> {
        self.region()?.cuda().map(AsRef::as_ref)
    }

    /// Address and length of what the lease covers in an arena; `None` in mapped mode.
    pub(super) fn addresses(&self) -> Option<(u64, usize)> {
        let region = self.region()?;
        Some((region.address(), region.bytes_total()))
    }

    /// The bytes of one part of the group, as they stand in the file.
    ///
    /// # Panics
    /// When the group is on a CUDA device: the host cannot reach it.
    pub fn part(&self, index: usize) -> &[u8] {
        let part = &self.weights.plan.groups[self.group.0 as usize].parts[index];
        match (self.region(), &self.weights.mapped) {
            (Some(region), _) => {
                let start = part.entry_offset;
                &region.bytes()[start as usize..(start + part.bytes) as usize]
            }
            (None, Some(mapped)) => mapped.bytes(part.file_offset, part.bytes),
            (None, None) => unreachable!("a mapped home without a mapping"),
        }
    }

    /// The address of one part of the group on the CUDA device that it is on, for kernels that are launched before the
    /// lease is dropped; `None`: the host computes with `part`.
    pub fn device_part(&self, index: usize) -> Option<DeviceAddress> {
        let region = self.region()?;
        region.cuda()?;
        let part = &self.weights.plan.groups[self.group.0 as usize].parts[index];
        Some(region.device_address(part.entry_offset as usize, part.bytes as usize))
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        self.end_span();
        let Bytes::Streamed {
            position,
            region,
            executor,
        } = &mut self.bytes
        else {
            return;
        };
        let Some(mut region) = region.take() else {
            return;
        };
        if self.weights.poison_released {
            region.poison();
        }
        // Where the host computes, that is over when the lease is dropped. A CUDA device is done with the group when it
        // has done what it was given until now.
        let last_use = region
            .cuda()
            .map_or_else(Event::recorded, |device| CudaDevice::record_compute(device));
        self.weights
            .shared
            .give_back(*position, region, *executor, last_use);
    }
}

/// Bytes of weights that are held at a time, where they are several groups: a streamed one among them keeps its ring
/// entry until the computation with all of them is over.
const HELD_BYTES_MAX: u64 = 32 << 20;

/// One step's walk through the groups, in plan order. Holds one lease at a time, and those of groups behind it that rest
/// in memory.
pub struct Pass<'w> {
    weights: &'w Weights,
    width: u32,
    cancelled: &'w dyn Fn() -> bool,
    /// In plan order. Only the first may be of a streamed group.
    held: Vec<Lease<'w>>,
    began: Instant,
    /// Until then.
    stalled: Duration,
    finished: bool,
}

impl<'w> Pass<'w> {
    pub(super) fn new(
        weights: &'w Weights,
        width: u32,
        cancelled: &'w dyn Fn() -> bool,
    ) -> Pass<'w> {
        Pass {
            weights,
            width,
            cancelled,
            held: Vec::new(),
            began: Instant::now(),
            stalled: weights.stalled(),
            finished: false,
        }
    }

    /// Whether the host multiplies by `group` in this step.
    pub fn is_for_host(&self, group: GroupId) -> bool {
        let residence = self.weights.plan.residence_at(group, self.width);
        residence.executor == Executor::Host
    }

    /// The lease of `group`: the last one held, or the next one, for which those held are given back.
    pub fn lease(&mut self, group: GroupId) -> Result<&Lease<'w>, LeaseError> {
        match self.held.last() {
            Some(last) if last.group() == group => self.keep_last(),
            _ => {
                self.give_back();
                if (self.cancelled)() {
                    return Err(LeaseError::Cancelled);
                }
                let lease = self.weights.lease(group, self.width, self.cancelled)?;
                self.held.push(lease);
            }
        }
        Ok(self.held(group))
    }

    /// Leases `group`, the next one, beside what is held: if it rests in memory and not too much is held. Whether the step
    /// is still wanted was asked with the first of them, a moment ago.
    pub fn also_lease(&mut self, group: GroupId) -> Result<bool, LeaseError> {
        let bytes_of = |group: GroupId| self.weights.plan.groups[group.0 as usize].entry_bytes;
        let held: u64 = self.held.iter().map(|lease| bytes_of(lease.group())).sum();
        if held + bytes_of(group) > HELD_BYTES_MAX || !self.weights.rests(group, self.width) {
            return Ok(false);
        }
        let lease = self.weights.lease(group, self.width, self.cancelled)?;
        self.held.push(lease);
        Ok(true)
    }

    /// One of the leases that are held.
    ///
    /// # Panics
    /// When `group` is not leased.
    pub fn held(&self, group: GroupId) -> &Lease<'w> {
        let lease = self.held.iter().find(|lease| lease.group() == group);
        lease.unwrap_or_else(|| panic!("group {} is not leased", group.0))
    }

    /// Gives all but the last lease back: what was computed with them is over.
    pub fn keep_last(&mut self) {
        self.give_back_first(self.held.len().saturating_sub(1));
    }

    /// Gives the first `count` leases back.
    fn give_back_first(&mut self, count: usize) {
        self.weights.divide_span(&mut self.held, count);
        self.held.drain(..count);
    }

    /// The embedding rows of `ids`. Ids must be below the number of rows.
    pub fn gather_rows(&self, ids: &[u32]) -> Result<GatheredRows, LeaseError> {
        self.weights.gather_rows(ids, self.cancelled)
    }

    /// Gives back what is held. Before the end of a device's step is waited for: computation with a group ends with its
    /// lease.
    pub fn give_back(&mut self) {
        self.give_back_first(self.held.len());
    }

    /// The step used every group, and a device is done with it. Its sequences held `depth` positions before it.
    pub fn finish(mut self, depth: u32) {
        self.give_back();
        assert!(
            self.weights.shared.at_border(),
            "a step ended before it had used every streamed group"
        );
        self.finished = true;
        self.weights.take_device_times();
        self.weights
            .step_finished(self.width, depth, self.began, self.stalled);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.give_back();
        if !self.finished {
            self.weights.take_device_times();
            self.weights.shared.abandon();
            self.weights.shared.publish(&self.weights.metrics);
        }
    }
}
