//! One step width and slice size: what is set aside on each tier, who rests where beside it, and whether that holds
//! together.

use super::homes::Capacity;
use super::homes::{self, Strategy};
use super::plan::{uses_device_ring, uses_host_ring};
use super::planner::{DeviceKind, PlanRequest, Problem};
use super::scenario::{Product, products};
use super::{
    Executor, GatherBuffer, Group, GroupKind, KvSplit, Residence, Ring, ScratchItem, Tier,
    TierSplit,
};
use std::rc::Rc;

pub(super) const HOST_RING_ENTRIES: u32 = 4;
pub(super) const DEVICE_RING_ENTRIES: u32 = 3;
pub(super) const RING_ENTRIES_MIN: u32 = 2;
/// Rounds of giving what a layout reserved and does not need back to homes.
const SHRINK_ROUNDS: usize = 4;

/// A candidate plan: who rests where and how each tier is split.
pub(super) struct Layout {
    pub(super) groups: Rc<Vec<Group>>,
    pub(super) residences: Vec<Residence>,
    /// Of each group.
    pub(super) products: Vec<Vec<Product>>,
    pub(super) mapped: bool,
    pub(super) slice_bytes: u64,
    pub(super) step_width: u32,
    pub(super) kv: KvSplit,
    pub(super) split: Split,
}

/// What is set aside on each tier before homes are given out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reserve {
    pub(super) host_ring: Ring,
    pub(super) device_ring: Ring,
    pub(super) gather: GatherBuffer,
    pub(super) staging_bytes: u64,
}

impl Reserve {
    /// Whether what `needed` asks for has been set aside.
    fn covers(&self, needed: &Reserve) -> bool {
        let ring = |have: Ring, need: Ring| {
            need.entries == 0
                || (have.entries >= need.entries && have.entry_bytes >= need.entry_bytes)
        };
        ring(self.host_ring, needed.host_ring)
            && ring(self.device_ring, needed.device_ring)
            && self.gather.bytes() >= needed.gather.bytes()
            && self.staging_bytes >= needed.staging_bytes
    }
}

/// The budgets, split.
#[derive(Clone, Debug)]
pub(super) struct Split {
    pub(super) device: Option<TierSplit>,
    pub(super) host: TierSplit,
    pub(super) scratch: Vec<ScratchItem>,
    pub(super) reserve: Reserve,
}

impl Split {
    pub(super) fn fits(&self) -> bool {
        // Sums saturate: what reaches the largest number has no size, and fits nowhere.
        let within =
            |split: &TierSplit| split.claimed() <= split.budget && split.claimed() < u64::MAX;
        within(&self.host) && self.device.as_ref().is_none_or(within)
    }

    /// What is left for homes.
    fn capacity(&self) -> Capacity {
        Capacity {
            device: self.device.map(|split| split.free()),
            host: self.host.free(),
        }
    }
}

impl Layout {
    /// How many rings there are: the fewer the better.
    pub(super) fn rings(&self) -> u32 {
        let reserve = &self.split.reserve;
        u32::from(reserve.host_ring.entries > 0) + u32::from(reserve.device_ring.entries > 0)
    }
}

/// One step width and slice size.
pub(super) struct Candidate<'a> {
    pub(super) problem: &'a Problem<'a>,
    pub(super) request: &'a PlanRequest,
    pub(super) kv: KvSplit,
    pub(super) width: u32,
    pub(super) slice_bytes: u64,
    /// Of the host ring, where no number is asked for and so many fit.
    pub(super) host_entries: u32,
    pub(super) groups: Rc<Vec<Group>>,
}

impl Candidate<'_> {
    fn split(&self, reserve: Reserve) -> Split {
        let small = self.problem.small_bytes;
        self.problem
            .split(self.request, self.kv, self.width, reserve, small)
    }

    /// All of the file's weights as they are in the file, where they fit.
    pub(super) fn mapped(&self) -> Option<Layout> {
        if !self.request.map_file || self.request.device != DeviceKind::Cpu {
            return None;
        }
        let mut split =
            self.problem
                .split(self.request, self.kv, self.width, Reserve::default(), 0);
        split.host.weights = self
            .groups
            .iter()
            .fold(0u64, |sum, group| sum.saturating_add(group.home_bytes()));
        let residence = Residence {
            home: Tier::Host,
            executor: Executor::Host,
            narrow: Executor::Host,
        };
        let residences = vec![residence; self.groups.len()];
        split.fits().then(|| self.layout(residences, split, true))
    }

    fn layout(&self, residences: Vec<Residence>, split: Split, mapped: bool) -> Layout {
        let tensors = self.problem.tensors;
        let of_groups = self.groups.iter();
        Layout {
            products: of_groups.map(|group| products(group, tensors)).collect(),
            groups: Rc::clone(&self.groups),
            residences,
            mapped,
            slice_bytes: self.slice_bytes,
            step_width: self.width,
            kv: self.kv,
            split,
        }
    }

    /// The first layout that holds together, from the one that reserves least to the one that reserves most.
    pub(super) fn with_strategy(&self, strategy: Strategy) -> Option<Layout> {
        let streams_to_device =
            self.request.device != DeviceKind::Cpu && !self.host_always_multiplies();
        // (device ring, host ring)
        let rings: &[(bool, bool)] = if streams_to_device {
            &[(false, false), (true, false), (true, true)]
        } else {
            &[(false, false), (false, true)]
        };
        for &(device_ring, host_ring) in rings {
            // Only rings have entries to do with fewer of.
            let fewest = if device_ring || host_ring {
                RING_ENTRIES_MIN
            } else {
                self.host_entries
            };
            let mut tried: Vec<Reserve> = Vec::new();
            for entries_max in (fewest..=self.host_entries).rev() {
                for gather in [false, true] {
                    let reserve = self.reserve(device_ring, host_ring, gather, entries_max);
                    // Fewer entries are the same where a number was asked for, or where there are no more anyway.
                    if tried.contains(&reserve) {
                        continue;
                    }
                    tried.push(reserve);
                    if let Some(layout) = self.settle(strategy, reserve) {
                        return Some(layout);
                    }
                }
            }
        }
        None
    }

    /// What to set aside before it is known which groups will stream.
    fn reserve(
        &self,
        device_ring: bool,
        host_ring: bool,
        gather: bool,
        entries_max: u32,
    ) -> Reserve {
        let streamable = self.groups.iter().filter(|group| group.is_streamable());
        let entry_bytes = streamable.map(Group::home_bytes).max().unwrap_or(0);
        let ring = |exists: bool, usual: u32| {
            if !exists {
                return Ring::default();
            }
            Ring {
                entries: self.entries(usual, entries_max),
                entry_bytes,
            }
        };
        let stages = self.request.device != DeviceKind::Cpu && !host_ring;
        Reserve {
            host_ring: ring(host_ring, self.host_entries),
            device_ring: ring(device_ring, DEVICE_RING_ENTRIES),
            gather: if gather {
                self.problem.gather_buffer(self.width)
            } else {
                GatherBuffer::default()
            },
            staging_bytes: if stages { entry_bytes } else { 0 },
        }
    }

    fn entries(&self, usual: u32, entries_max: u32) -> u32 {
        match self.request.ring_entries {
            Some(entries) => entries.max(RING_ENTRIES_MIN),
            None => usual.min(entries_max),
        }
    }

    /// Gives out homes beside `reserve`, then shrinks the reserve to what that needs and gives what it frees to homes
    /// too, as long as that holds together.
    fn settle(&self, strategy: Strategy, reserve: Reserve) -> Option<Layout> {
        let (mut residences, mut needed) = self.give_homes(strategy, reserve)?;
        for _ in 0..SHRINK_ROUNDS {
            let Some((again, needed_again)) = self.give_homes(strategy, needed) else {
                break;
            };
            let settled = needed_again == needed;
            (residences, needed) = (again, needed_again);
            if settled {
                break;
            }
        }
        let mut split = self.split(needed);
        for (group, residence) in self.groups.iter().zip(&residences) {
            // The small group is in both splits already.
            let weights = match (group.kind, residence.home, &mut split.device) {
                (GroupKind::Small, _, _) | (_, Tier::Storage, _) | (_, Tier::Device, None) => {
                    continue;
                }
                (_, Tier::Device, Some(device)) => &mut device.weights,
                (_, Tier::Host, _) => &mut split.host.weights,
            };
            *weights = weights.saturating_add(group.home_bytes());
        }
        debug_assert!(split.fits(), "homes beyond the budget: {split:?}");
        Some(self.layout(residences, split, false))
    }

    /// Homes beside `reserve` and what they need set aside; `None` where that is more than `reserve`.
    fn give_homes(
        &self,
        strategy: Strategy,
        reserve: Reserve,
    ) -> Option<(Vec<Residence>, Reserve)> {
        let split = self.split(reserve);
        if !split.fits() {
            return None;
        }
        let homes = homes::choose(&self.groups, split.capacity(), strategy);
        let residences: Vec<Residence> = self
            .groups
            .iter()
            .zip(homes)
            .map(|(group, home)| Residence {
                home,
                executor: self.executor(group, home),
                narrow: match home {
                    Tier::Device => Executor::Device,
                    Tier::Host | Tier::Storage => Executor::Host,
                },
            })
            .collect();
        let needed = self.needed(&residences, reserve);
        reserve.covers(&needed).then_some((residences, needed))
    }

    /// By groups that do not rest on the device.
    fn host_always_multiplies(&self) -> bool {
        self.problem.host_width_max(self.request) == u32::MAX
    }

    /// In wide steps.
    fn executor(&self, group: &Group, home: Tier) -> Executor {
        match (self.request.device, home) {
            (DeviceKind::Cpu, _) => Executor::Host,
            (_, Tier::Device) => Executor::Device,
            // Rows are gathered where they rest.
            _ if group.kind == GroupKind::Embedding => Executor::Host,
            _ if self.host_always_multiplies() => Executor::Host,
            _ => Executor::Device,
        }
    }

    /// What these residences need set aside, with as many entries as `reserve` has.
    fn needed(&self, residences: &[Residence], reserve: Reserve) -> Reserve {
        let largest = |uses: &dyn Fn(&Group, Residence) -> bool| {
            let both = self.groups.iter().zip(residences);
            let used = both.filter(|(group, residence)| uses(group, **residence));
            used.map(|(group, _)| group.home_bytes()).max()
        };
        let on_device =
            largest(&|group, residence| group.is_streamable() && residence.home == Tier::Device);
        let from_storage = largest(&uses_host_ring);
        let ring = |largest: Option<u64>, entries: u32| match largest {
            Some(entry_bytes) => Ring {
                // A ring that was not reserved has no entries yet: any number shows that it is missing.
                entries: entries.max(RING_ENTRIES_MIN),
                entry_bytes,
            },
            None => Ring::default(),
        };
        let kind_gathered = if self.problem.hyperparameters.tied_head {
            GroupKind::Head
        } else {
            GroupKind::Embedding
        };
        let gathers = self
            .groups
            .iter()
            .zip(residences)
            .any(|(group, residence)| {
                group.kind == kind_gathered && residence.home == Tier::Storage
            });
        Reserve {
            // Device homes are loaded through the host ring where there is one.
            host_ring: ring(
                from_storage.map(|bytes| bytes.max(on_device.unwrap_or(0))),
                reserve.host_ring.entries,
            ),
            device_ring: ring(largest(&uses_device_ring), reserve.device_ring.entries),
            gather: if gathers {
                self.problem.gather_buffer(self.width)
            } else {
                GatherBuffer::default()
            },
            staging_bytes: match from_storage {
                Some(_) => 0,
                None => on_device.unwrap_or(0),
            },
        }
    }
}
