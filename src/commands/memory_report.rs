//! `/memory`: where every byte is, as JSON.

use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};
use strata::placement::{Plan, Tier, TierSplit};
use strata::weights::Traffic;

/// What the report is made of. `main` makes it, the engine thread completes it, HTTP threads read it.
pub(crate) struct MemoryView {
    pub(crate) plan: Arc<Plan>,
    pub(crate) tokenizer_bytes: usize,
    pub(crate) loaded: OnceLock<Loaded>,
}

/// Known once the weights are in place.
pub(crate) struct Loaded {
    rung: String,
    reason: String,
    traffic: Box<dyn Fn() -> Traffic + Send + Sync>,
}

impl MemoryView {
    pub(crate) fn set_loaded(
        &self,
        rung: &str,
        reason: &str,
        traffic: Box<dyn Fn() -> Traffic + Send + Sync>,
    ) {
        let loaded = Loaded {
            rung: rung.to_owned(),
            reason: reason.to_owned(),
            traffic,
        };
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
        let mut tiers = Vec::new();
        if let Some(split) = plan.device_split {
            tiers.push(tier(plan, Tier::Device, split));
        }
        tiers.push(tier(plan, Tier::Host, plan.host_split));
        tiers.push(json!({
            "tier": Tier::Storage.name(),
            "home_bytes": plan.weight_home_bytes(Tier::Storage),
        }));
        let process = Process::now();
        json!({
            "device": plan.device.name(),
            "mapped": plan.mapped,
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
            "overhead": self.overhead(process),
            "process": {
                "rss_bytes": process.rss,
                "peak_rss_bytes": process.peak_rss,
            },
            "plan": plan.report_json(),
        })
    }

    /// What the process holds beyond its budgets, by item. The last is the difference between what the operating
    /// system counts and everything that strata accounts for.
    fn overhead(&self, process: Process) -> Value {
        let budgets: u64 = [Some(self.plan.host_split), self.plan.device_split]
            .into_iter()
            .flatten()
            .map(|split| split.claimed())
            .sum();
        let tokenizer = self.tokenizer_bytes as u64;
        let rest = process.anonymous.saturating_sub(budgets + tokenizer);
        let mut items = vec![
            json!({"what": "tokenizer and vocabulary", "bytes": tokenizer}),
            json!({"what": "allocator, HTTP, stacks and everything else on the heap beyond the plan", "bytes": rest}),
        ];
        if !self.plan.mapped {
            items.push(json!({"what": "program and libraries", "bytes": process.file}));
        }
        Value::Array(items)
    }
}

fn tier(plan: &Plan, tier: Tier, split: TierSplit) -> Value {
    json!({
        "tier": tier.name(),
        "budget_bytes": split.budget,
        "weights_bytes": split.weights,
        "ring_bytes": split.ring,
        "kv_bytes": split.kv,
        "scratch_bytes": split.scratch,
        "free_bytes": split.free(),
        "home_bytes": plan.weight_home_bytes(tier),
    })
}

/// What the operating system says of this process, in bytes; 0 where it does not.
#[derive(Clone, Copy, Default)]
struct Process {
    rss: u64,
    peak_rss: u64,
    anonymous: u64,
    file: u64,
}

impl Process {
    fn now() -> Process {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bytes = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            let kib: u64 = line
                .trim_start_matches(':')
                .split_whitespace()
                .next()?
                .parse()
                .ok()?;
            Some(kib * 1024)
        };
        Process {
            rss: bytes("VmRSS").unwrap_or(0),
            peak_rss: bytes("VmHWM").unwrap_or(0),
            anonymous: bytes("RssAnon").unwrap_or(0),
            file: bytes("RssFile").unwrap_or(0),
        }
    }
}
