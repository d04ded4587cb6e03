//! What would make a model faster: changes of the budgets, the settings or the machine, each of which has been planned
//! and simulated.

use super::planner::{DeviceKind, PlanRequest, plan};
use super::{GIB, HumanBytes, MIB, Plan, Tier};
use crate::gguf::{Gguf, Hyperparameters};
use std::fmt;

/// A change that gains less than this share is not worth telling.
const WORTH_TELLING: f64 = 1.05;
/// Of several amounts of one change, the smallest that gains this share of what the best one gains is told.
const MOST_OF_THE_GAIN: f64 = 0.9;
/// The smallest amount of memory that is tried.
const MEMORY_TRIED_MIN: u64 = 256 * MIB;
/// Changes that are told.
const TOLD_MAX: usize = 3;

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// Bytes more.
    HostMemory(u64),
    DeviceMemory(u64),
    /// Tokens of a sequence, instead of what was asked for.
    Context(u32),
    /// Sequences at once.
    Parallel(u32),
    /// Times as fast.
    Storage(f64),
    Link(f64),
}

/// A change, and what it would bring.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gain {
    pub change: Change,
    /// Of one sequence, as `Plan::predictions` tells it for the plan as it is.
    pub tokens_per_second: f64,
}

impl fmt::Display for Change {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Change::HostMemory(bytes) => write!(formatter, "{} more RAM", HumanBytes(bytes)),
            Change::DeviceMemory(bytes) => {
                write!(formatter, "{} more device memory", HumanBytes(bytes))
            }
            Change::Context(tokens) => write!(formatter, "--context {tokens}"),
            Change::Parallel(sequences) => write!(formatter, "--parallel {sequences}"),
            Change::Storage(times) => write!(formatter, "storage {times} times as fast"),
            Change::Link(times) => write!(formatter, "a link {times} times as fast"),
        }
    }
}

impl fmt::Display for Gain {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {:.2}", self.change, self.tokens_per_second)
    }
}

impl Change {
    fn apply(self, request: &PlanRequest) -> PlanRequest {
        let mut changed = request.clone();
        match self {
            Change::HostMemory(more) => {
                changed.host_budget = changed.host_budget.saturating_add(more);
            }
            Change::DeviceMemory(more) => {
                let device = changed.device_budget.unwrap_or(0);
                changed.device_budget = Some(device.saturating_add(more));
            }
            Change::Context(tokens) => changed.context = tokens,
            Change::Parallel(sequences) => changed.parallel = sequences,
            Change::Storage(times) => changed.rates.storage_bytes_per_second *= times,
            Change::Link(times) => changed.rates.link_bytes_per_second *= times,
        }
        changed
    }
}

/// The changes that gain most for one sequence, the best first. `made` is the plan for `request`.
pub fn best_changes(
    gguf: &Gguf,
    hyperparameters: &Hyperparameters,
    request: &PlanRequest,
    made: &Plan,
) -> Vec<Gain> {
    let speed = |plan: &Plan| {
        let first = plan.predictions.first();
        first.map_or(0.0, |prediction| prediction.tokens_per_second)
    };
    let now = speed(made);
    let tried = |change: Change| -> Option<Gain> {
        let changed = PlanRequest {
            // Tuned for what is there; a search for each change would take a hundred times as long and change little.
            slice_bytes: request.slice_bytes.or(Some(made.slice_bytes)),
            step_width: request.step_width.or(Some(made.step_width)),
            ..change.apply(request)
        };
        let changed = plan(gguf, hyperparameters, &changed).ok()?;
        Some(Gain {
            change,
            tokens_per_second: speed(&changed),
        })
    };
    let mut best: Vec<Gain> = families(request, made)
        .into_iter()
        .filter_map(|family| {
            let gains: Vec<Gain> = family.into_iter().filter_map(tried).collect();
            let most = gains
                .iter()
                .map(|gain| gain.tokens_per_second)
                .fold(now, f64::max);
            let enough = now + MOST_OF_THE_GAIN * (most - now);
            gains.into_iter().find(|gain| {
                gain.tokens_per_second >= enough && gain.tokens_per_second > WORTH_TELLING * now
            })
        })
        .collect();
    best.sort_by(|one, other| other.tokens_per_second.total_cmp(&one.tokens_per_second));
    best.truncate(TOLD_MAX);
    best
}

/// Changes that might help, by kind, the smallest of each first.
fn families(request: &PlanRequest, made: &Plan) -> Vec<Vec<Change>> {
    let on_storage = made.weight_home_bytes(Tier::Storage);
    let off_device = on_storage.saturating_add(made.weight_home_bytes(Tier::Host));
    let mut families = Vec::new();
    if on_storage > 0 {
        families.push(amounts(on_storage).map(Change::HostMemory).collect());
        families.push(vec![Change::Storage(2.0)]);
    }
    if request.device != DeviceKind::Cpu && off_device > 0 {
        families.push(amounts(off_device).map(Change::DeviceMemory).collect());
        families.push(vec![Change::Link(2.0)]);
    }
    let lacks_memory = match request.device {
        DeviceKind::Cpu => on_storage > 0,
        DeviceKind::Emulated | DeviceKind::Cuda => off_device > 0,
    };
    if lacks_memory {
        let halves = |value: u32| {
            [value / 2, value / 4]
                .into_iter()
                .filter(|&value| value > 0)
        };
        let contexts = halves(request.context).filter(|&context| context >= 1024);
        families.push(contexts.map(Change::Context).collect());
        families.push(halves(request.parallel).map(Change::Parallel).collect());
    }
    families
}

/// Round amounts of memory, from an eighth of what rests where it should not to all of it and its ring.
fn amounts(missing: u64) -> impl Iterator<Item = u64> {
    let unit = (missing / 8)
        .next_power_of_two()
        .clamp(MEMORY_TRIED_MIN, 64 * GIB);
    let enough = missing.saturating_add(missing / 8);
    (0..6u32)
        .map(move |doubled| unit << doubled)
        .scan(false, move |past, amount| {
            let before = *past;
            *past = amount >= enough;
            (!before).then_some(amount)
        })
}
