//! `/memory`: where every byte is, as JSON.

use super::process_memory::{Landmarks, Resident};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use strata::memory::{heap_live_bytes, heap_peak_bytes, restart_heap_peak};
use strata::placement::{DeviceKind, Plan, Tier, TierSplit};
use strata::weights::{Arenas, ReadsSoFar, Traffic};

/// What the report is made of. `main` makes it, the engine thread completes it, HTTP threads read it.
pub(crate) struct MemoryView {
    pub(crate) plan: Arc<Plan>,
    /// The files as the kernel names them.
    pub(crate) model: Vec<PathBuf>,
    pub(crate) held: HeldWhileServing,
    pub(crate) loaded: OnceLock<Loaded>,
}

/// Bytes of the heap that are in use for as long as the server is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeldWhileServing {
    pub(crate) tokenizer: u64,
    pub(crate) template: u64,
}

/// Known once the weights are in place.
pub(crate) struct Loaded {
    rung: String,
    reason: String,
    traffic: Box<dyn Fn() -> Traffic + Send + Sync>,
    arenas: Arenas,
    /// What of the heap was in use before the first step.
    heap_at_rest: u64,
}

/// What the process holds in RAM, for a warning.
#[derive(Clone, Debug)]
pub(super) struct Holding {
    pub(super) resident: u64,
    /// What the plan takes of RAM, in arenas and outside.
    pub(super) planned: u64,
    /// What is outside the arenas, by item; nothing before there are arenas to tell it from.
    pub(super) outside: Vec<(&'static str, u64)>,
}

impl MemoryView {
    /// Called on the engine thread, before the first step.
    pub(crate) fn set_loaded(
        &self,
        rung: &str,
        reason: &str,
        traffic: Box<dyn Fn() -> Traffic + Send + Sync>,
        arenas: Arenas,
    ) {
        let loaded = Loaded {
            rung: rung.to_owned(),
            reason: reason.to_owned(),
            traffic,
            arenas,
            heap_at_rest: heap_live_bytes() as u64,
        };
        restart_heap_peak();
        let first = self.loaded.set(loaded).is_ok();
        assert!(first, "a process loads one model");
    }

    pub(crate) fn report(&self) -> Value {
        let plan = &self.plan;
        let loaded = self.loaded.get();
        let traffic = loaded.map(|loaded| (loaded.traffic)()).unwrap_or_default();
        let by_home = |values: [f64; 3]| {
            json!({
                "device": values[Tier::Device as usize],
                "host": values[Tier::Host as usize],
                "storage": values[Tier::Storage as usize],
            })
        };
        let leases = traffic.leases;
        let resident = self.resident();
        let mut tiers = Vec::new();
        if let Some(split) = plan.device_split {
            // A GPU's memory is not this process's, and all of an arena is taken from it at once.
            let on_gpu = loaded.and_then(|loaded| {
                let device = loaded.arenas.device.as_ref()?;
                device.cuda().map(|_| device.bytes_total() as u64)
            });
            let resident = on_gpu.unwrap_or(resident.device_arena);
            tiers.push(tier(plan, Tier::Device, split, resident));
        }
        let item = |(what, bytes): (&str, u64)| json!({"what": what, "bytes": bytes});
        let overhead: Vec<Value> = self.overhead(&resident).into_iter().map(item).collect();
        let host = resident.host_arena + resident.model;
        tiers.push(tier(plan, Tier::Host, plan.host_split, host));
        tiers.push(json!({
            "tier": Tier::Storage.name(),
            "home_bytes": plan.weight_home_bytes(Tier::Storage),
        }));
        json!({
            "device": plan.device.name(),
            "mapped": plan.mapped,
            "page_locked_bytes": loaded.map(|loaded| loaded.arenas.host.page_locked_bytes()),
            "reader": loaded.map(|loaded| json!({"rung": loaded.rung, "reason": loaded.reason})),
            "tiers": tiers,
            "per_step": {
                "storage_read_bytes": plan.storage_bytes_per_step(),
                "link_bytes": plan.link_bytes_per_step(),
            },
            "steps": traffic.steps,
            "leases": {
                "device": leases[Tier::Device as usize],
                "host": leases[Tier::Host as usize],
                "storage": leases[Tier::Storage as usize],
            },
            "stall_seconds": by_home(traffic.stall_seconds),
            "reads": reads(&traffic.reads),
            "overhead": overhead,
            "heap": self.heap(),
            "process": {
                "rss_bytes": resident.total(),
                "peak_rss_bytes": peak_rss_bytes(),
            },
            "plan": plan.report_json(),
        })
    }

    fn resident(&self) -> Resident {
        let arenas = self.loaded.get().map(|loaded| &loaded.arenas);
        Resident::now(&Landmarks {
            host_arena: arenas.map_or(0..0, |arenas| arenas.host.addresses()),
            device_arena: arenas
                .and_then(|arenas| arenas.device.as_ref())
                .map_or(0..0, |arena| arena.addresses()),
            model: &self.model,
        })
    }

    /// What the process holds outside the arenas, by item: with what is resident of the tiers, all of its RSS. The
    /// scratch of the plan that is not in arenas (activations) is part of it, although the budgets have room for it.
    fn overhead(&self, resident: &Resident) -> Vec<(&'static str, u64)> {
        let live = heap_live_bytes() as u64;
        let loaded = self.loaded.get();
        let at_rest = loaded.map_or(live, |loaded| loaded.heap_at_rest).min(live);
        // What is in use need not be resident (it may not have been written to yet): no item takes more than is left.
        let mut left = resident.anonymous;
        let mut of_heap = |bytes: u64| {
            let taken = bytes.min(left);
            left -= taken;
            taken
        };
        let HeldWhileServing {
            tokenizer,
            template,
        } = self.held;
        let mut items = vec![
            ("program and libraries", resident.program),
            ("tokenizer and vocabulary", of_heap(tokenizer)),
            ("chat template", of_heap(template)),
            (
                "plan, metrics and other state of the server",
                of_heap(at_rest.saturating_sub(tokenizer + template)),
            ),
            (
                "activations, requests and connections",
                of_heap(live - at_rest),
            ),
        ];
        items.push((
            "stacks of threads, and what the allocator holds and nobody uses",
            left + resident.main_stack,
        ));
        items.push(("queues shared with the kernel", resident.kernel));
        items
    }

    pub(super) fn holding(&self) -> Holding {
        let resident = self.resident();
        let plan = &self.plan;
        let of_device = plan
            .device_split
            .filter(|_| plan.device == DeviceKind::Emulated);
        let planned = plan.host_split.claimed();
        Holding {
            resident: resident.total(),
            planned: planned.saturating_add(of_device.map_or(0, |split| split.claimed())),
            outside: match self.loaded.get() {
                Some(_) => self.overhead(&resident),
                None => Vec::new(),
            },
        }
    }

    /// The heap in use, beside the scratch that the plan has outside of arenas.
    fn heap(&self) -> Value {
        let plan = &self.plan;
        let splits = [
            (Tier::Host, Some(plan.host_split)),
            (Tier::Device, plan.device_split),
        ];
        let scratch = splits.into_iter().map(|(tier, split)| {
            let claimed = split.map_or(0, |split| split.claimed());
            let mapped = match (plan.mapped, split) {
                (true, Some(split)) => split.weights,
                _ => 0,
            };
            claimed.saturating_sub(mapped + plan.arena_bytes(tier))
        });
        json!({
            "live_bytes": heap_live_bytes(),
            "at_rest_bytes": self.loaded.get().map(|loaded| loaded.heap_at_rest),
            "peak_while_serving_bytes": heap_peak_bytes(),
            "scratch_planned_bytes": scratch.sum::<u64>(),
        })
    }
}

fn reads(reads: &ReadsSoFar) -> Value {
    let [error, short, checksum] = reads.retries;
    json!({
        "verified_share": reads.verified_share,
        "verified_groups": reads.verified_groups,
        "verified_bytes": reads.verified_bytes,
        "retries": {"error": error, "short": short, "checksum": checksum},
    })
}

fn tier(plan: &Plan, tier: Tier, split: TierSplit, resident: u64) -> Value {
    json!({
        "tier": tier.name(),
        "budget_bytes": split.budget,
        "weights_bytes": split.weights,
        "ring_bytes": split.ring,
        "kv_bytes": split.kv,
        "scratch_bytes": split.scratch,
        "free_bytes": split.free(),
        "home_bytes": plan.weight_home_bytes(tier),
        "arena_bytes": plan.arena_bytes(tier),
        "resident_bytes": resident,
    })
}

/// The most that the process has held so far; 0 where the kernel does not tell.
fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap_or_default();
    let kib = line.split_whitespace().next().unwrap_or_default();
    kib.parse::<u64>().map_or(0, |kib| kib * 1024)
}
