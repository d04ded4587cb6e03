//! The plan as people and programs read it.

use super::{
    Executor, Gain, Group, GroupId, GroupKind, HumanBytes, PREDICTED_PROMPT, Plan, Residence, Tier,
    TierSplit,
};
use serde_json::{Value, json};
use std::fmt::Write;

const TIERS: [Tier; 3] = [Tier::Device, Tier::Host, Tier::Storage];

impl Plan {
    /// The plan as a table.
    pub fn report(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_report(&mut text);
        text
    }

    fn write_report(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "device {}, context {} x {} sequences, steps of up to {} tokens, slices of up to {}",
            self.device.name(),
            self.context,
            self.parallel,
            self.step_width,
            HumanBytes(self.slice_bytes),
        )?;
        if self.mapped {
            writeln!(text, "weights are mapped from the file, not copied")?;
        }

        writeln!(
            text,
            "\n{:<9}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}",
            "memory", "budget", "weights", "ring", "kv", "scratch", "free"
        )?;
        for (tier, split) in self.splits() {
            let sizes = [
                split.budget,
                split.weights,
                split.ring,
                split.kv,
                split.scratch,
                split.free(),
            ];
            write!(text, "{:<9}", tier.name())?;
            for bytes in sizes {
                write!(text, "{:>12}", HumanBytes(bytes).to_string())?;
            }
            writeln!(text)?;
        }

        writeln!(
            text,
            "\n{:<14}{:<9}{:>7}{:>12}  layers",
            "weights", "home", "groups", "bytes"
        )?;
        for kind in GroupKind::ALL {
            for tier in TIERS {
                let of_both = |group: &Group, residence: Residence| {
                    group.kind == kind && residence.home == tier
                };
                let found: Vec<&Group> = self
                    .iter()
                    .filter(|(_, group, residence)| of_both(group, *residence))
                    .map(|(_, group, _)| group)
                    .collect();
                if found.is_empty() {
                    continue;
                }
                let bytes: u64 = found.iter().map(|group| group.weight_bytes).sum();
                let layers = ranges(found.iter().filter_map(|group| group.layer));
                let line = format!(
                    "{:<14}{:<9}{:>7}{:>12}  {layers}",
                    kind.name(),
                    tier.name(),
                    found.len(),
                    HumanBytes(bytes).to_string(),
                );
                writeln!(text, "{}", line.trim_end())?;
            }
        }
        for tier in TIERS {
            let bytes = self.weight_home_bytes(tier);
            if bytes > 0 {
                writeln!(
                    text,
                    "{:<14}{:<9}{:>7}{:>12}",
                    "all",
                    tier.name(),
                    self.residences.iter().filter(|r| r.home == tier).count(),
                    HumanBytes(bytes).to_string()
                )?;
            }
        }

        writeln!(
            text,
            "\na step reads {} from storage and moves {} to the device",
            HumanBytes(self.storage_bytes_per_step()),
            HumanBytes(self.link_bytes_per_step()),
        )?;
        if (1..u32::MAX).contains(&self.host_width_max) {
            let is_moved = |(_, group, residence): &(GroupId, &Group, Residence)| {
                group.is_streamable()
                    && residence.home != Tier::Device
                    && residence.narrow == Executor::Device
            };
            let moved = self.iter().filter(is_moved);
            let moved: u64 = moved.map(|(_, group, _)| group.entry_bytes).sum();
            writeln!(
                text,
                "steps of up to {} tokens move {} of that; by the rest of what does not rest there the CPU multiplies",
                self.host_width_max,
                HumanBytes(moved),
            )?;
        }
        for (name, ring) in [("host", self.host_ring), ("device", self.device_ring)] {
            if ring.entries > 0 {
                writeln!(
                    text,
                    "{name} ring: {} entries of {}",
                    ring.entries,
                    HumanBytes(ring.entry_bytes)
                )?;
            }
        }

        match &self.rates_card {
            Some(card) => writeln!(text, "rates: from {card}")?,
            None => writeln!(text, "rates: assumed")?,
        }
        self.write_predictions(text)?;
        if !self.unused.is_empty() {
            writeln!(
                text,
                "\n{} tensors of the file are not used: {}",
                self.unused.len(),
                shortened(self.unused.join(", "))
            )?;
        }
        Ok(())
    }

    /// How fast, beside how fast no plan would be faster.
    fn write_predictions(&self, text: &mut String) -> std::fmt::Result {
        let depth = self.predictions.first().map_or(0, |first| first.depth);
        writeln!(
            text,
            "\n{:<9}{:>12}{:>12}{:>12}  bound by   (after {depth} positions)",
            "width", "step", "tokens/s", "limit"
        )?;
        for prediction in &self.predictions {
            let step = format!("{:.1} ms", prediction.step_seconds * 1000.0);
            let note = if prediction.width > self.step_width {
                " (wider than a step of this plan)"
            } else {
                ""
            };
            writeln!(
                text,
                "{:<9}{step:>12}{:>12}{:>12}  {}{note}",
                prediction.width,
                figures(prediction.tokens_per_second),
                figures(prediction.limit_tokens_per_second()),
                prediction.bound.name(),
            )?;
        }
        let prompt = PREDICTED_PROMPT.min(self.context);
        let (seconds, limit) = self.first_token_seconds(prompt);
        writeln!(
            text,
            "a prompt of {prompt} tokens: its answer begins after {seconds:.1} s; the limit is {limit:.1} s"
        )
    }

    /// What every tier's budget is spent on.
    pub fn memory_json(&self) -> Value {
        let split = |split: TierSplit| {
            json!({
                "budget_bytes": split.budget,
                "weights_bytes": split.weights,
                "ring_bytes": split.ring,
                "kv_bytes": split.kv,
                "scratch_bytes": split.scratch,
                "free_bytes": split.free(),
            })
        };
        let of_tier = |(tier, of_tier): (Tier, TierSplit)| (tier.name().to_owned(), split(of_tier));
        Value::Object(self.splits().map(of_tier).collect())
    }

    /// The plan with every group, for programs.
    pub fn report_json(&self) -> Value {
        let mut homes = serde_json::Map::new();
        for tier in TIERS {
            homes.insert(tier.name().to_owned(), json!(self.weight_home_bytes(tier)));
        }
        let ring =
            |ring: super::Ring| json!({"entries": ring.entries, "entry_bytes": ring.entry_bytes});
        let groups: Vec<Value> = self
            .iter()
            .map(|(_, group, residence)| {
                json!({
                    "kind": group.kind.name(),
                    "layer": group.layer,
                    "home": residence.home.name(),
                    "executor": residence.executor.name(),
                    "narrow_executor": (self.host_width_max > 0).then(|| residence.narrow.name()),
                    "bytes": group.weight_bytes,
                    "entry_bytes": group.entry_bytes,
                })
            })
            .collect();
        let scratch: Vec<Value> = self
            .scratch
            .iter()
            .map(|item| json!({"tier": item.tier.name(), "name": item.name, "bytes": item.bytes}))
            .collect();
        let predictions: Vec<Value> = self
            .predictions
            .iter()
            .map(|prediction| {
                json!({
                    "width": prediction.width,
                    "step_seconds": prediction.step_seconds,
                    "depth": prediction.depth,
                    "tokens_per_second": prediction.tokens_per_second,
                    "limit_seconds": prediction.limit_seconds,
                    "limit_tokens_per_second": prediction.limit_tokens_per_second(),
                    "bound": prediction.bound.name(),
                    "busy_seconds": {
                        "storage": prediction.storage_seconds,
                        "link": prediction.link_seconds,
                        "device": prediction.device_seconds,
                        "host": prediction.host_seconds,
                    },
                })
            })
            .collect();
        let prompt = PREDICTED_PROMPT.min(self.context);
        let (first_token, first_token_limit) = self.first_token_seconds(prompt);
        json!({
            "first_token": {
                "prompt_tokens": prompt,
                "seconds": first_token,
                "limit_seconds": first_token_limit,
            },
            "device": self.device.name(),
            "mapped": self.mapped,
            "context": self.context,
            "parallel": self.parallel,
            "step_width": self.step_width,
            "slice_bytes": self.slice_bytes,
            "memory": self.memory_json(),
            "weight_home_bytes": homes,
            "host_ring": ring(self.host_ring),
            "device_ring": ring(self.device_ring),
            "kv": {
                "tier": self.kv.tier.name(),
                "page_tokens": self.kv.page_tokens,
                "pages": self.kv.pages,
                "type": self.kv.kind.name(),
                "page_bytes": self.kv.page_bytes,
                "window": self.kv.window.map(|window| json!({
                    "sequences": window.sequences,
                    "pages_of_sequence": window.pages_of_sequence,
                    "page_bytes": window.page_bytes,
                })),
            },
            "scratch": scratch,
            "storage_bytes_per_step": self.storage_bytes_per_step(),
            "link_bytes_per_step": self.link_bytes_per_step(),
            "host_width_max": self.host_width_max,
            "rates_card": self.rates_card,
            "predictions": predictions,
            "unused_tensors": self.unused,
            "groups": groups,
        })
    }

    fn splits(&self) -> impl Iterator<Item = (Tier, TierSplit)> {
        let device = self.device_split.map(|split| (Tier::Device, split));
        device
            .into_iter()
            .chain(std::iter::once((Tier::Host, self.host_split)))
    }
}

/// What would make a plan faster, as lines below its report.
pub fn report_gains(plan: &Plan, gains: &[Gain]) -> String {
    let now = plan.predictions.first();
    let now = figures(now.map_or(0.0, |first| first.tokens_per_second));
    if gains.is_empty() {
        return format!(
            "\n{now} tokens/s for one sequence; nothing that was tried of memory, storage and link gains 5 %\n"
        );
    }
    let mut text = format!("\n{now} tokens/s for one sequence; more of them with\n");
    for gain in gains {
        text.push_str(&format!("  {gain}\n"));
    }
    text
}

/// The same for programs.
pub fn report_gains_json(gains: &[Gain]) -> Value {
    let gains = gains.iter().map(|gain| {
        json!({
            "change": gain.change.to_string(),
            "tokens_per_second": gain.tokens_per_second,
        })
    });
    Value::Array(gains.collect())
}

/// Three figures, however large or small the number.
fn figures(number: f64) -> String {
    match number {
        0.0..10.0 => format!("{number:.2}"),
        10.0..100.0 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

/// Ascending numbers as ranges: `0-3, 5, 7-9`.
fn ranges(numbers: impl Iterator<Item = u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if number == *last || Some(number) == last.checked_add(1) => {
                *last = number;
            }
            _ => runs.push((number, number)),
        }
    }
    let shown: Vec<String> = runs
        .iter()
        .map(|&(first, last)| {
            if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            }
        })
        .collect();
    shortened(shown.join(", "))
}

/// Cut at a comma where it would not fit a line.
fn shortened(list: String) -> String {
    const CHARACTERS_MAX: usize = 60;
    let Some((end, _)) = list.char_indices().nth(CHARACTERS_MAX) else {
        return list;
    };
    let end = list[..end].rfind(", ").unwrap_or(end);
    format!("{}, ...", &list[..end])
}
