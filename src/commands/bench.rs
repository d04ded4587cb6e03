//! `strata bench decode` and `prompt`: the engine's step, measured without a server.

use super::Usage;
use super::bench_rates::bench_rates;
use super::device::{Candidate, Device};
use super::files::{print, print_json};
use super::load::{
    check_machine, compute_pool, model_path, pin_engine, plan_request, weights_settings,
};
use super::progress::LoadingProgress;
use super::rates::KnownRates;
use super::trace::begin_trace;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;
use strata::bench::{MemoryRate, Rounds, StepBytes, Workload, median};
use strata::cli::{
    BenchArguments, BenchDecodeArguments, BenchKind, BenchPromptArguments, BenchReportArguments,
    Settings,
};
use strata::config::{Config, compute_threads, free_host_memory};
use strata::gguf::Gguf;
use strata::metrics::Metrics;
use strata::model::{self, PlannedModel};
use strata::placement::{DeviceKind, Plan, Tier};
use strata::weights::{LoadProgress, Loading};

/// Tokens are random ones; this seed gives the same in every run.
const SEED: u64 = 1;

/// Plain memory that the threads read between rounds: more than most caches hold, less where less is free, and never so
/// little that a cache's rate is taken for the memory's.
const PLAIN_BYTES: u64 = 512 << 20;
const PLAIN_BYTES_MIN: u64 = 64 << 20;

/// The settings, with the sequences that the workload asks for, and its context unless a longer one is given.
pub(crate) fn bench_config(arguments: &BenchArguments) -> anyhow::Result<Config> {
    let (settings, model, workload): (&Settings<false>, _, _) = match &arguments.kind {
        BenchKind::Decode(decode) => (&decode.settings, &decode.model, decoding(decode)),
        BenchKind::Prompt(prompt) => (&prompt.settings, &prompt.model, of_prompt(prompt)),
        BenchKind::Rates(rates) => return Ok(rates.settings.config(rates.model.clone())?),
    };
    if settings.has_flag("parallel") {
        bail!(Usage(
            "a bench takes no --parallel: give --sequences to `bench decode`".to_owned()
        ));
    }
    let mut config = settings.config(model.clone())?;
    // A sequence of one position is none.
    let positions = workload.positions().max(2);
    config.context = match config.context.filter(|_| settings.has_flag("context")) {
        Some(context) if context < positions => bail!(Usage(format!(
            "--context {context} is less than --depth and --tokens together, {positions}; leave it out, or give more"
        ))),
        Some(context) => Some(context),
        None => Some(positions),
    };
    config.parallel = workload.sequences();
    Ok(config)
}

const fn decoding(arguments: &BenchDecodeArguments) -> Workload {
    Workload::Decode {
        sequences: arguments.sequences,
        tokens: arguments.tokens,
        depth: arguments.depth,
    }
}

const fn of_prompt(arguments: &BenchPromptArguments) -> Workload {
    Workload::Prompt {
        tokens: arguments.tokens,
    }
}

pub(crate) fn bench(config: &Config, arguments: &BenchArguments) -> anyhow::Result<()> {
    match &arguments.kind {
        BenchKind::Decode(decode) => bench_steps(config, decoding(decode), decode.report),
        BenchKind::Prompt(prompt) => bench_steps(config, of_prompt(prompt), prompt.report),
        BenchKind::Rates(rates) => bench_rates(config, rates),
    }
}

/// Loads the model as a server does, on this thread in place of the engine's, and measures.
fn bench_steps(
    config: &Config,
    workload: Workload,
    report: BenchReportArguments,
) -> anyhow::Result<()> {
    let BenchReportArguments { rounds, json } = report;
    let path = model_path(config)?;
    let threads = compute_threads(config).map_err(|error| Usage(error.to_string()))?;
    let of_file = || path.display().to_string();
    let gguf = Gguf::open(path).with_context(of_file)?;
    let hyperparameters = model::hyperparameters(&gguf).with_context(of_file)?;
    let candidate = Candidate {
        gguf: &gguf,
        hyperparameters: &hyperparameters,
    };
    let device = Device::to_use(config, candidate)?;
    let known = KnownRates::of(config, Some(path))?;
    let request = plan_request(config, &hyperparameters, &device, &known)?;
    // A plan that does not fit is refused with advice, which may be to make the context smaller.
    let mut planned = PlannedModel::of_index(gguf, &request).with_context(|| {
        format!(
            "{} (--context is --depth and --tokens together here, unless given)",
            path.display()
        )
    })?;
    planned.gpu = device.gpu();
    let plan = Arc::clone(&planned.plan);
    check_machine(&plan)?;
    let step_width = plan.step_width;
    if workload.sequences() > step_width {
        bail!(Usage(format!(
            "{} sequences do not go into one step of the plan, which is {step_width} tokens wide; give a larger \
             --step-width, or fewer --sequences",
            workload.sequences()
        )));
    }
    device.log(config);
    tracing::info!("the plan:\n{}", plan.report());
    let bytes = StepBytes::of(&planned.gguf, &plan);
    // Completed when everything below is gone.
    let trace = begin_trace(config)?;
    planned.trace = trace.handle();

    // What the engine's thread does too: data parallelism of libraries runs inline.
    let _inline = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .use_current_thread()
        .build()
        .context("start the engine")?;
    let pool = compute_pool(&threads);
    let metrics = Metrics::new();
    let shown = LoadingProgress::new(config.log);
    let loaded_bytes = Cell::new(0);
    let on_progress = |now: LoadProgress| {
        shown.hear(now);
        loaded_bytes.set(now.loaded_bytes);
        true
    };
    let loading = Loading {
        settings: weights_settings(config),
        metrics: &metrics,
        progress: &on_progress,
    };
    let began = Instant::now();
    let loaded = planned.load(pool.clone(), &loading);
    let mut loaded = loaded.context("load the model")?;
    let load = Load {
        bytes: loaded_bytes.get(),
        seconds: began.elapsed().as_secs_f64(),
    };
    drop(planned);
    pin_engine(&pool);

    let mut memory = MemoryRate::new(plain_bytes())?;
    let mut runs = Rounds::new(loaded.model.as_mut(), workload, step_width, SEED);
    if let (Some(window), Some(pages)) = (hyperparameters.window, plan.kv.window) {
        runs = runs.with_window(window.positions, pages);
    }
    runs.fill_cache()?;
    runs.round()?;
    // What streams is fetched ahead: in a pause before a round the rings would fill in time that no round counts.
    let pauses = plan.host_ring.entries == 0 && plan.device_ring.entries == 0;
    let mut moved = Moved::default();
    let mut seconds = Vec::new();
    for _ in 0..rounds {
        if pauses {
            memory.measure(&pool);
        }
        runs.fill_cache()?;
        let before = Moved::so_far(&metrics);
        seconds.push(runs.round()?.as_secs_f64().max(f64::MIN_POSITIVE));
        moved = moved.plus(Moved::so_far(&metrics).since(before));
    }
    memory.measure(&pool);
    let report = Report {
        workload,
        model: of_file(),
        threads: pool.threads(),
        instruction_set: pool.instruction_set().name(),
        device: plan.device.name(),
        steps: workload.steps(step_width),
        round_bytes: bytes.of_round(workload, step_width),
        seconds,
        predicted: predicted(&plan, workload),
        rates: plan.rates_card.clone(),
        load,
        moved,
        plan: &plan,
        ram_rate: (plan.device != DeviceKind::Cuda).then(|| memory.bytes_per_second()),
    };
    match json {
        true => print_json(&report.json()),
        false => print(&report.text()),
    }
}

/// What the plan says of a round, from the rates that it was made with: fixed before the first step.
fn predicted(plan: &Plan, workload: Workload) -> Predicted {
    let (seconds, limit_seconds) = match workload {
        Workload::Decode {
            sequences,
            tokens,
            depth,
        } => {
            let prediction = plan.predict(sequences, depth + tokens / 2);
            let of_round = |step: f64| step * f64::from(tokens);
            (
                of_round(prediction.step_seconds),
                of_round(prediction.limit_seconds),
            )
        }
        Workload::Prompt { tokens } => plan.first_token_seconds(tokens),
    };
    Predicted {
        seconds,
        limit_seconds,
    }
}

/// Of a round.
struct Predicted {
    seconds: f64,
    /// What no plan gets below with the same budgets and rates.
    limit_seconds: f64,
}

/// Half of what is free where that is little: the rounds must not make the system swap.
fn plain_bytes() -> usize {
    let free = free_host_memory().map_or(PLAIN_BYTES_MIN, |free| free.bytes / 2);
    free.clamp(PLAIN_BYTES_MIN, PLAIN_BYTES) as usize
}

/// What went from tier to tier while steps were computed, and how long computation waited for it.
#[derive(Clone, Copy, Default)]
struct Moved {
    storage_bytes: u64,
    /// While at least one read was under way.
    storage_seconds: f64,
    link_bytes: u64,
    link_seconds: f64,
    stall_seconds: f64,
}

impl Moved {
    /// As of the end of the last step.
    fn so_far(metrics: &Metrics) -> Moved {
        let bytes = |labels: &[&str]| metrics.transfer_bytes_total.with_label_values(labels).get();
        let seconds = |labels: &[&str]| {
            let seconds = &metrics.transfer_seconds_total;
            seconds.with_label_values(labels).get()
        };
        let stalled = |tier: Tier| {
            let seconds = &metrics.weight_stall_seconds_total;
            seconds.with_label_values(&[tier.name()]).get()
        };
        let (storage, host, device) =
            (Tier::Storage.name(), Tier::Host.name(), Tier::Device.name());
        Moved {
            storage_bytes: bytes(&[storage, host]),
            storage_seconds: seconds(&[storage, host]),
            link_bytes: bytes(&[host, device]),
            link_seconds: seconds(&[host, device]),
            stall_seconds: stalled(Tier::Storage) + stalled(Tier::Host),
        }
    }

    fn since(self, before: Moved) -> Moved {
        Moved {
            storage_bytes: self.storage_bytes - before.storage_bytes,
            storage_seconds: self.storage_seconds - before.storage_seconds,
            link_bytes: self.link_bytes - before.link_bytes,
            link_seconds: self.link_seconds - before.link_seconds,
            stall_seconds: self.stall_seconds - before.stall_seconds,
        }
    }

    fn plus(self, more: Moved) -> Moved {
        Moved {
            storage_bytes: self.storage_bytes + more.storage_bytes,
            storage_seconds: self.storage_seconds + more.storage_seconds,
            link_bytes: self.link_bytes + more.link_bytes,
            link_seconds: self.link_seconds + more.link_seconds,
            stall_seconds: self.stall_seconds + more.stall_seconds,
        }
    }

    fn json(self, steps: u32) -> Value {
        let steps = f64::from(steps.max(1));
        json!({
            "storage_bytes": self.storage_bytes as f64 / steps,
            "storage_busy_seconds": self.storage_seconds / steps,
            "link_bytes": self.link_bytes as f64 / steps,
            "link_busy_seconds": self.link_seconds / steps,
            "stall_seconds": self.stall_seconds / steps,
        })
    }
}

/// Bringing home what rests in memory: taking the memory, reading, copying.
struct Load {
    bytes: u64,
    seconds: f64,
}

struct Report<'a> {
    workload: Workload,
    model: String,
    threads: usize,
    instruction_set: &'static str,
    device: &'static str,
    /// Of a round, as the next.
    steps: u32,
    round_bytes: u64,
    /// Of each round.
    seconds: Vec<f64>,
    predicted: Predicted,
    /// Where the rates of the prediction are from; `None`: they are assumed.
    rates: Option<String>,
    load: Load,
    /// In all rounds.
    moved: Moved,
    plan: &'a Plan,
    /// Bytes per second; `None` where it bounds nothing: a GPU computes.
    ram_rate: Option<f64>,
}

impl Report<'_> {
    /// Tokens of all sequences, in each round.
    fn rates(&self) -> Vec<f64> {
        let tokens = f64::from(self.workload.sequences()) * f64::from(self.workload.tokens());
        self.seconds
            .iter()
            .map(|seconds| tokens / seconds)
            .collect()
    }

    /// Rounded where the chunks of a prompt are unequal.
    fn bytes_per_step(&self) -> u64 {
        self.round_bytes / u64::from(self.steps.max(1))
    }

    /// The share of one step in a figure of a round.
    fn of_step(&self, round: f64) -> f64 {
        round / f64::from(self.steps.max(1))
    }

    /// Rounds per second: the median.
    fn round_rate(&self) -> f64 {
        let rates: Vec<f64> = self.seconds.iter().map(|seconds| 1.0 / seconds).collect();
        median(&rates)
    }

    /// Bytes of weights per second.
    fn weight_rate(&self) -> f64 {
        self.round_bytes as f64 * self.round_rate()
    }

    /// The share of the memory's rate at which weights are read.
    fn ram_fraction(&self) -> Option<f64> {
        let rate = self.ram_rate.filter(|rate| *rate > 0.0)?;
        Some(self.weight_rate() / rate)
    }

    fn json(&self) -> Value {
        let rates = self.rates();
        json!({
            "kind": self.workload.name(),
            "model": self.model,
            "threads": self.threads,
            "instruction_set": self.instruction_set,
            "device": self.device,
            "sequences": self.workload.sequences(),
            "tokens": self.workload.tokens(),
            "depth": self.workload.depth(),
            "tokens_per_second": median(&rates),
            "tokens_per_second_rounds": rates,
            "steps_per_round": self.steps,
            "step_width": self.plan.step_width,
            "bytes_per_step": self.bytes_per_step(),
            "step_seconds": self.of_step(1.0 / self.round_rate()),
            "predicted_step_seconds": self.of_step(self.predicted.seconds),
            "predicted_limit_step_seconds": self.of_step(self.predicted.limit_seconds),
            "predicted_from": self.rates.as_deref().unwrap_or("assumed rates"),
            "load": {"bytes": self.load.bytes, "seconds": self.load.seconds},
            "moved_per_step": self.moved.json(self.steps * self.seconds.len() as u32),
            "memory": self.plan.memory_json(),
            "ram_read_bytes_per_second": self.ram_rate,
            "ram_fraction": self.ram_fraction(),
        })
    }

    fn text(&self) -> String {
        let rates = self.rates();
        let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
        let most = rates.iter().copied().fold(0.0, f64::max);
        let what = match self.workload {
            Workload::Decode {
                sequences,
                tokens,
                depth,
            } => format!(
                "decode, {sequences} sequence{}, {tokens} tokens each from position {depth}",
                if sequences == 1 { "" } else { "s" }
            ),
            Workload::Prompt { tokens } => {
                format!(
                    "prompt of {tokens} tokens, {} to a step",
                    tokens.div_ceil(self.steps.max(1))
                )
            }
        };
        let beside = match (self.ram_rate, self.ram_fraction()) {
            (Some(rate), Some(fraction)) => format!(
                "{:10.2} GB/s is how fast the same threads read plain memory: the weights are read at {:.0} % of it\n",
                rate / 1e9,
                100.0 * fraction,
            ),
            _ => String::new(),
        };
        format!(
            "{}\n{}, {} thread{}, {}\n{what}\n\
             {:10.2} tokens/s, median of {} rounds ({least:.2} to {most:.2})\n\
             {:10.3} ms a step; predicted {:.3} ms, the limit is {:.3} ms (rates: {})\n\
             {:10.2} GB/s of weights: {:.1} MB a step\n{beside}",
            self.model,
            self.device,
            self.threads,
            if self.threads == 1 { "" } else { "s" },
            self.instruction_set,
            median(&rates),
            rates.len(),
            1e3 * self.of_step(1.0 / self.round_rate()),
            1e3 * self.of_step(self.predicted.seconds),
            1e3 * self.of_step(self.predicted.limit_seconds),
            self.rates.as_deref().unwrap_or("assumed"),
            self.weight_rate() / 1e9,
            self.bytes_per_step() as f64 / 1e6,
        )
    }
}
