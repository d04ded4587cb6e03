//! What `plan` says where nothing fits: what is short, by how much, and what to change.
//!
//! Advice is not computed beside the planner: every change that is advised has been laid out by it, and fits.

use super::layout::Layout;
use super::planner::{DeviceKind, PlanRequest, Problem};
use super::{HumanBytes, MIB, PAGE_TOKENS, Tier, TierSplit};
use std::fmt;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The request itself makes no sense.
    #[error("{what}: {why}")]
    Invalid { what: &'static str, why: String },
    #[error("{0}")]
    DoesNotFit(Box<Refusal>),
}

/// Budgets that cannot hold the least that a run needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// Tiers that are short; none where no budget would do (the KV cache has more pages than can be numbered).
    pub shortages: Vec<Shortage>,
    /// Each of these alone makes the request fit; the first is the first thing to change.
    pub advice: Vec<Advice>,
    context: u32,
    parallel: u32,
}

/// One tier that is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    pub tier: Tier,
    pub budget: u64,
    /// The least budget that this tier can run with.
    pub needed: u64,
    /// How that least budget would be split.
    pub split: TierSplit,
}

/// A change that makes a request fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    pub context: Option<u32>,
    pub parallel: Option<u32>,
    pub device_memory: Option<u64>,
    pub host_memory: Option<u64>,
}

impl Advice {
    /// The request with this change.
    pub fn apply(&self, request: &PlanRequest) -> PlanRequest {
        let mut changed = request.clone();
        changed.context = self.context.unwrap_or(changed.context);
        changed.parallel = self.parallel.unwrap_or(changed.parallel);
        changed.device_budget = self.device_memory.or(changed.device_budget);
        changed.host_budget = self.host_memory.unwrap_or(changed.host_budget);
        changed
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flags = [
            ("--context", self.context.map(|tokens| tokens.to_string())),
            (
                "--parallel",
                self.parallel.map(|sequences| sequences.to_string()),
            ),
            ("--device-memory", self.device_memory.map(HumanBytes::flag)),
            ("--host-memory", self.host_memory.map(HumanBytes::flag)),
        ];
        let mut separator = "";
        for (flag, value) in flags {
            if let Some(value) = value {
                write!(formatter, "{separator}{flag} {value}")?;
                separator = " ";
            }
        }
        Ok(())
    }
}

impl Shortage {
    pub fn short_by(&self) -> u64 {
        self.needed.saturating_sub(self.budget)
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage {
            tier,
            budget,
            needed,
            split,
        } = self;
        write!(
            formatter,
            "{tier} memory is short by {} ({} bytes): the budget is {} and at least {} is needed (KV cache {}, \
             scratch {}, weights {}, ring {})",
            HumanBytes(self.short_by()),
            self.short_by(),
            HumanBytes(*budget),
            HumanBytes(*needed),
            HumanBytes(split.kv),
            HumanBytes(split.scratch),
            HumanBytes(split.weights),
            HumanBytes(split.ring),
        )
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.shortages.is_empty() {
            write!(
                formatter,
                "a KV cache for {} sequences of {} tokens is larger than any memory",
                self.parallel, self.context
            )?;
        }
        let mut separator = "";
        for shortage in &self.shortages {
            write!(formatter, "{separator}{shortage}")?;
            separator = "; ";
        }
        let mut advice = self.advice.iter();
        if let Some(first) = advice.next() {
            write!(formatter, "; try {first}")?;
        }
        for other in advice {
            write!(formatter, ", or {other}")?;
        }
        Ok(())
    }
}

/// Budgets above this are never advised.
const MEMORY_MAX: u64 = 1 << 50;
/// A context below this is not worth advising.
const CONTEXT_WORTHWHILE: u32 = 512;
const CONTEXT_STEP: u32 = 256;

pub(super) fn explain(problem: &Problem<'_>, request: &PlanRequest) -> PlanError {
    let fits = |changed: &PlanRequest| problem.least_layout(changed);
    let memory = memory_needed(request, &fits);
    let mut advice = Vec::new();

    let context = largest(request.context, |context| {
        fits(&PlanRequest {
            context,
            ..request.clone()
        })
        .is_some()
    });
    let parallel = largest(request.parallel, |parallel| {
        fits(&PlanRequest {
            parallel,
            ..request.clone()
        })
        .is_some()
    });
    let mut try_smaller = |context: Option<u32>, parallel: Option<u32>| {
        let change = Advice {
            context: context.map(rounded_context),
            parallel,
            ..Advice::default()
        };
        let planned = fits(&change.apply(request)).is_some();
        if planned {
            advice.push(change);
        }
        planned
    };
    let mut smaller = false;
    if let Some(context) = context.filter(|&context| context >= CONTEXT_WORTHWHILE) {
        smaller |= try_smaller(Some(context), None);
    }
    if let Some(parallel) = parallel {
        smaller |= try_smaller(None, Some(parallel));
    }
    if !smaller {
        let both = largest(request.context, |context| {
            fits(&PlanRequest {
                context,
                parallel: 1,
                ..request.clone()
            })
            .is_some()
        });
        if let Some(context) = both.filter(|_| request.parallel > 1) {
            smaller |= try_smaller(Some(context), Some(1));
        }
        if let (Some(context), false) = (context, smaller) {
            try_smaller(Some(context), None);
        }
    }
    let shortages = match memory {
        Some((shortages, more)) => {
            advice.push(more);
            shortages
        }
        None => Vec::new(),
    };
    PlanError::DoesNotFit(Box::new(Refusal {
        shortages,
        advice,
        context: request.context,
        parallel: request.parallel,
    }))
}

/// A round figure at or below `context`.
fn rounded_context(context: u32) -> u32 {
    for step in [CONTEXT_STEP, PAGE_TOKENS] {
        if context >= step {
            return context / step * step;
        }
    }
    context
}

/// The largest value below `limit` that fits; `None` where 1 does not.
fn largest(limit: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    if limit <= 1 || !fits(1) {
        return None;
    }
    let (mut low, mut high) = (1, limit);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) {
            low = middle
        } else {
            high = middle
        }
    }
    Some(low)
}

/// What each tier lacks for the request as it is, and the budgets that would do.
fn memory_needed(
    request: &PlanRequest,
    fits: &impl Fn(&PlanRequest) -> Option<Layout>,
) -> Option<(Vec<Shortage>, Advice)> {
    let mut enough = request.clone();
    let mut shortages = Vec::new();
    let mut advice = Advice::default();

    if request.device != DeviceKind::Cpu {
        let with = |device: u64| PlanRequest {
            device_budget: Some(device),
            host_budget: u64::MAX,
            ..request.clone()
        };
        let budget = request.device_budget.unwrap_or(0);
        if fits(&with(budget)).is_none() {
            let needed = least(super::ARENA_ALIGNMENT, |bytes| fits(&with(bytes)).is_some())?;
            let rounded = least(MIB, |bytes| fits(&with(bytes)).is_some())?;
            shortages.push(Shortage {
                tier: Tier::Device,
                budget,
                needed,
                split: fits(&with(needed))?.split.device?,
            });
            advice.device_memory = Some(rounded);
            enough.device_budget = Some(rounded);
        }
    }
    if fits(&enough).is_none() {
        let with = |host: u64| PlanRequest {
            host_budget: host,
            ..enough.clone()
        };
        let needed = least(super::ARENA_ALIGNMENT, |bytes| fits(&with(bytes)).is_some())?;
        shortages.push(Shortage {
            tier: Tier::Host,
            budget: request.host_budget,
            needed,
            split: fits(&with(needed))?.split.host,
        });
        advice.host_memory = Some(least(MIB, |bytes| fits(&with(bytes)).is_some())?);
    }
    Some((shortages, advice))
}

/// The least multiple of `unit` that fits, found by halving; what it returns has been tried.
fn least(unit: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    let mut high = 1u64;
    while !fits(high * unit) {
        high *= 2;
        if high > MEMORY_MAX / unit {
            return None;
        }
    }
    let mut low = high / 2;
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle * unit) {
            high = middle
        } else {
            low = middle
        }
    }
    Some(high * unit)
}
