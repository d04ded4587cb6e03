//! The step simulator: how long a steady-state step takes, and what binds it.
//!
//! Four servers, each of which takes its jobs in plan order: storage reads, link copies, and computation on either
//! executor (one group at a time: the layers are a chain). A read waits for a free entry of the host ring, a copy for
//! its bytes and for a free entry of the device ring, a computation for its weights. A host entry is free again when
//! its copy or its computation is over, a device entry when its computation is. Because every queue is first in,
//! first out and rings are used in plan order, each job's start is the latest of a few earlier ends: one pass in plan
//! order visits the same events as a simulation with an event queue.
//!
//! Several steps run one after the other, prefetch runs across the border between them, and the last is timed.

use super::plan::{residence_at, uses_device_ring, uses_host_ring};
use super::{Executor, Group, GroupKind, Plan, Rates, Residence};

/// The widths that every plan predicts.
pub(super) const PREDICTED_WIDTHS: [u32; 4] = [1, 8, 64, 512];

/// Steps simulated: the rings fill in the first, so the last is steady.
const STEPS: usize = 3;

/// What a step spends most of its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    Storage,
    Link,
    Device,
    /// The host's kernels, or the RAM that they and the link share.
    HostCompute,
}

impl Bound {
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Storage => "storage",
            Bound::Link => "link",
            Bound::Device => "device",
            Bound::HostCompute => "host compute",
        }
    }
}

/// A steady-state step of `width` tokens, by weights alone: attention over the KV cache and sampling come on top.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    pub width: u32,
    pub step_seconds: f64,
    pub tokens_per_second: f64,
    pub bound: Bound,
    /// How long each resource is busy within the step.
    pub storage_seconds: f64,
    pub link_seconds: f64,
    pub device_seconds: f64,
    pub host_seconds: f64,
}

/// What one group asks of each server.
#[derive(Clone, Copy, Debug)]
struct Job {
    read_seconds: Option<f64>,
    copy_seconds: Option<f64>,
    compute_seconds: f64,
    executor: Executor,
}

/// Entries of a ring, each with the time at which it is free again.
struct Entries {
    free_at: Vec<f64>,
    next: usize,
}

impl Entries {
    fn new(entries: u32) -> Entries {
        Entries {
            // A ring that nothing passes through has no entries and is never asked.
            free_at: vec![0.0; entries.max(1) as usize],
            next: 0,
        }
    }

    /// The entry that comes next, and when it may be filled.
    fn reserve(&mut self) -> (usize, f64) {
        let entry = self.next;
        self.next = (entry + 1) % self.free_at.len();
        (entry, self.free_at[entry])
    }

    fn release(&mut self, entry: usize, at: f64) {
        self.free_at[entry] = at;
    }
}

/// The end of each of `steps` steps over `jobs`.
fn step_ends(jobs: &[Job], host_entries: u32, device_entries: u32, steps: usize) -> Vec<f64> {
    let mut host_ring = Entries::new(host_entries);
    let mut device_ring = Entries::new(device_entries);
    let (mut storage_free, mut link_free, mut compute_free) = (0.0f64, 0.0f64, 0.0f64);
    let mut ends = Vec::with_capacity(steps);
    for _ in 0..steps {
        for job in jobs {
            let mut ready = 0.0;
            let mut host_entry = None;
            if let Some(read) = job.read_seconds {
                let (entry, free_at) = host_ring.reserve();
                storage_free = free_at.max(storage_free) + read;
                ready = storage_free;
                host_entry = Some(entry);
            }
            let mut device_entry = None;
            if let Some(copy) = job.copy_seconds {
                let (entry, free_at) = device_ring.reserve();
                link_free = free_at.max(link_free).max(ready) + copy;
                ready = link_free;
                device_entry = Some(entry);
                if let Some(entry) = host_entry.take() {
                    host_ring.release(entry, ready);
                }
            }
            compute_free = compute_free.max(ready) + job.compute_seconds;
            if let Some(entry) = host_entry {
                host_ring.release(entry, compute_free);
            }
            if let Some(entry) = device_entry {
                device_ring.release(entry, compute_free);
            }
        }
        ends.push(compute_free);
    }
    ends
}

fn timed_step(jobs: &[Job], host_entries: u32, device_entries: u32) -> f64 {
    let ends = step_ends(jobs, host_entries, device_entries, STEPS);
    ends[STEPS - 1] - ends[STEPS - 2]
}

/// What the simulator needs of a plan; the planner compares candidates that are not plans yet.
#[derive(Clone, Copy)]
pub(super) struct Scenario<'a> {
    pub(super) groups: &'a [Group],
    pub(super) residences: &'a [Residence],
    pub(super) elements: &'a [u64],
    pub(super) rates: &'a Rates,
    pub(super) host_width_max: u32,
    pub(super) host_entries: u32,
    pub(super) device_entries: u32,
    pub(super) parallel: u32,
}

impl Scenario<'_> {
    fn job(&self, index: usize, width: u32) -> Job {
        let (group, residence) = (&self.groups[index], self.residence(index, width));
        // The head sees one row of each sequence, whatever the width.
        let rows = match group.kind {
            GroupKind::Head => width.min(self.parallel),
            _ => width,
        };
        let rates = self.rates;
        let (bytes_rate, flops_rate) = match residence.executor {
            Executor::Device => (
                rates.device_memory_bytes_per_second,
                rates.device_flops_per_second,
            ),
            Executor::Host => (
                rates.host_kernel_bytes_per_second,
                rates.host_flops_per_second,
            ),
        };
        let flops = 2.0 * self.elements[index] as f64 * f64::from(rows);
        let bytes = group.entry_bytes as f64;
        Job {
            read_seconds: uses_host_ring(group, residence)
                .then(|| bytes / rates.storage_bytes_per_second),
            copy_seconds: uses_device_ring(group, residence)
                .then(|| bytes / rates.link_bytes_per_second),
            compute_seconds: (group.weight_bytes as f64 / bytes_rate).max(flops / flops_rate),
            executor: residence.executor,
        }
    }

    fn residence(&self, index: usize, width: u32) -> Residence {
        residence_at(self.residences[index], width, self.host_width_max)
    }

    pub(super) fn predict(&self, width: u32) -> Prediction {
        let width = width.max(1);
        let streamable = (0..self.groups.len()).filter(|&index| self.groups[index].is_streamable());
        let jobs: Vec<Job> = streamable
            .clone()
            .map(|index| self.job(index, width))
            .collect();
        let chain_seconds = timed_step(&jobs, self.host_entries, self.device_entries);

        // Every byte that is not on the device leaves RAM once, for the link or for the host's kernels.
        let from_ram = |index: usize| match self.residences[index] {
            residence if residence.home == super::Tier::Device => 0.0,
            _ => self.groups[index].weight_bytes as f64,
        };
        let ram_seconds = total(streamable.map(from_ram)) / self.rates.host_memory_bytes_per_second;

        let compute_of = |executor: Executor| -> f64 {
            let of_executor = jobs.iter().filter(|job| job.executor == executor);
            total(of_executor.map(|job| job.compute_seconds))
        };
        let storage_seconds = total(jobs.iter().filter_map(|job| job.read_seconds));
        let link_seconds = total(jobs.iter().filter_map(|job| job.copy_seconds));
        let device_seconds = compute_of(Executor::Device);
        let host_seconds = compute_of(Executor::Host).max(ram_seconds);

        // Where two are equally busy, computation is named: it is what cannot be hidden.
        let mut bound = Bound::HostCompute;
        let mut busiest: f64 = host_seconds;
        for (candidate, seconds) in [
            (Bound::Device, device_seconds),
            (Bound::Link, link_seconds),
            (Bound::Storage, storage_seconds),
        ] {
            if seconds > busiest {
                (bound, busiest) = (candidate, seconds);
            }
        }
        let step_seconds = chain_seconds.max(ram_seconds);
        Prediction {
            width,
            step_seconds,
            tokens_per_second: if step_seconds > 0.0 {
                f64::from(width) / step_seconds
            } else {
                0.0
            },
            bound,
            storage_seconds,
            link_seconds,
            device_seconds,
            host_seconds,
        }
    }
}

/// `Iterator::sum` of no floats is -0.0, which reports would show.
fn total(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, |sum, number| sum + number)
}

pub(super) fn predict(plan: &Plan, width: u32) -> Prediction {
    let scenario = Scenario {
        groups: &plan.groups,
        residences: &plan.residences,
        elements: &plan.elements,
        rates: &plan.rates,
        host_width_max: plan.host_width_max,
        host_entries: plan.host_ring.entries,
        device_entries: plan.device_ring.entries,
        parallel: plan.parallel,
    };
    scenario.predict(width)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: f64 = 1e-9;

    fn job(read: f64, copy: f64, compute: f64) -> Job {
        let present = |seconds: f64| (seconds > 0.0).then_some(seconds);
        Job {
            read_seconds: present(read),
            copy_seconds: present(copy),
            compute_seconds: compute,
            executor: Executor::Host,
        }
    }

    /// Seconds of one group: (read, copy, compute).
    type Seconds = (f64, f64, f64);

    /// Groups; entries of the host's and the device's ring; the steady step worked out by hand.
    #[test]
    fn steps_take_what_they_take_by_hand() {
        let cases: &[(&str, &[Seconds], u32, u32, f64)] = &[
            ("nothing", &[], 0, 0, 0.0),
            ("resident", &[(0.0, 0.0, 2.0), (0.0, 0.0, 3.0)], 0, 0, 5.0),
            (
                "reads and computation overlap",
                &[(1.0, 0.0, 1.0); 4],
                2,
                0,
                4.0,
            ),
            ("storage binds", &[(3.0, 0.0, 1.0); 4], 2, 0, 12.0),
            ("computation binds", &[(1.0, 0.0, 3.0); 4], 2, 0, 12.0),
            (
                "one entry: nothing overlaps",
                &[(1.0, 0.0, 1.0); 4],
                1,
                0,
                8.0,
            ),
            ("the link binds", &[(0.0, 2.0, 1.0); 3], 0, 2, 6.0),
            ("three stages overlap", &[(1.0, 1.0, 1.0); 5], 2, 2, 5.0),
            // With one entry on the device, the copy waits for the computation before it.
            ("one device entry", &[(1.0, 1.0, 1.0); 5], 2, 1, 10.0),
            // With one entry on the host, the read waits for the copy before it.
            ("one host entry", &[(1.0, 1.0, 1.0); 5], 1, 2, 10.0),
            // 4 s of reading hide behind 4 s of resident computation only when there is room to read ahead: with two
            // entries of 1 s each, two reads hide and two do not.
            (
                "a contiguous tail does not hide in a short ring",
                &[
                    (0.0, 0.0, 4.0),
                    (1.0, 0.0, 0.0),
                    (1.0, 0.0, 0.0),
                    (1.0, 0.0, 0.0),
                    (1.0, 0.0, 0.0),
                ],
                2,
                0,
                6.0,
            ),
            (
                "the same spread evenly hides",
                &[
                    (1.0, 0.0, 0.0),
                    (0.0, 0.0, 1.0),
                    (1.0, 0.0, 0.0),
                    (0.0, 0.0, 1.0),
                    (1.0, 0.0, 0.0),
                    (0.0, 0.0, 1.0),
                    (1.0, 0.0, 0.0),
                    (0.0, 0.0, 1.0),
                ],
                2,
                0,
                4.0,
            ),
        ];
        for (name, jobs, host_entries, device_entries, expected) in cases {
            let jobs: Vec<Job> = jobs.iter().map(|&(r, c, x)| job(r, c, x)).collect();
            let seconds = timed_step(&jobs, *host_entries, *device_entries);
            assert!(
                (seconds - expected).abs() < TOLERANCE,
                "{name}: {seconds}, by hand {expected}"
            );
        }
    }

    #[test]
    fn the_first_step_takes_at_most_one_delay_for_each_group_and_entry() {
        for groups in 1..20 {
            for entries in 2..6 {
                let jobs = vec![job(1.0, 0.0, 1.0); groups];
                let first = step_ends(&jobs, entries, 0, 1)[0];
                let bound = groups as f64 + f64::from(entries);
                assert!(
                    first <= bound,
                    "{groups} groups, {entries} entries: {first}"
                );
            }
        }
    }

    #[test]
    fn more_entries_are_never_slower() {
        // Any mix will do; this one has every combination of stages.
        let jobs: Vec<Job> = (0..60)
            .map(|index| {
                let read = if index % 3 == 0 { 1.5 } else { 0.0 };
                let copy = if index % 2 == 0 { 0.5 } else { 0.0 };
                job(read, copy, 0.25 + f64::from(index % 7) / 8.0)
            })
            .collect();
        for host in 1..6 {
            for device in 1..6 {
                let end = |host, device| step_ends(&jobs, host, device, STEPS)[STEPS - 1];
                let here = end(host, device);
                assert!(end(host + 1, device) <= here + TOLERANCE);
                assert!(end(host, device + 1) <= here + TOLERANCE);
            }
        }
    }
}
