//! `strata bench`: the engine's step, measured without a server.

use super::Usage;
use super::device::{Candidate, Device};
use super::files::print;
use super::load::{
    check_machine, compute_pool, model_path, pin_engine, plan_request, weights_settings,
};
use super::progress::LoadingProgress;
use super::trace::begin_trace;
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::sync::Arc;
use strata::bench::{MemoryRate, Rounds, StepBytes, Workload, median};
use strata::cli::{BenchArguments, BenchKind, BenchReportArguments, Settings};
use strata::config::{Config, compute_threads, free_host_memory};
use strata::gguf::Gguf;
use strata::metrics::Metrics;
use strata::model::{self, PlannedModel};
use strata::placement::DeviceKind;
use strata::weights::{LoadProgress, Loading};

/// Tokens are random ones; this seed gives the same in every run.
const SEED: u64 = 1;

/// Plain memory that the threads read between rounds: more than most caches hold, less where less is free, and never so
/// little that a cache's rate is taken for the memory's.
const PLAIN_BYTES: u64 = 512 << 20;
const PLAIN_BYTES_MIN: u64 = 64 << 20;

/// The settings, with the context and the sequences that the workload asks for.
pub(crate) fn bench_config(arguments: &BenchArguments) -> anyhow::Result<Config> {
    let (settings, model): (&Settings<false>, _) = match &arguments.kind {
        BenchKind::Decode(decode) => (&decode.settings, &decode.model),
        BenchKind::Prompt(prompt) => (&prompt.settings, &prompt.model),
    };
    for (key, instead) in [
        ("context", "it is what --depth and --tokens ask for"),
        ("parallel", "give --sequences to `bench decode`"),
    ] {
        if settings.has_flag(key) {
            bail!(Usage(format!("a bench takes no --{key}: {instead}")));
        }
    }
    let workload = workload(arguments);
    let mut config = settings.config(model.clone())?;
    // A sequence of one position is none.
    config.context = Some(workload.positions().max(2));
    config.parallel = workload.sequences();
    Ok(config)
}

fn workload(arguments: &BenchArguments) -> Workload {
    match &arguments.kind {
        BenchKind::Decode(decode) => Workload::Decode {
            sequences: decode.sequences,
            tokens: decode.tokens,
            depth: decode.depth,
        },
        BenchKind::Prompt(prompt) => Workload::Prompt {
            tokens: prompt.tokens,
        },
    }
}

/// Loads the model as a server does, on this thread in place of the engine's, and measures.
pub(crate) fn bench(config: &Config, arguments: &BenchArguments) -> anyhow::Result<()> {
    let workload = workload(arguments);
    let BenchReportArguments { rounds, json } = match &arguments.kind {
        BenchKind::Decode(decode) => decode.report,
        BenchKind::Prompt(prompt) => prompt.report,
    };
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
    let request = plan_request(config, &hyperparameters, &device)?;
    // A plan that does not fit is refused with advice, which may be to make the context smaller.
    let mut planned = PlannedModel::for_file(path, gguf, &request).with_context(|| {
        format!(
            "{} (--context is --depth and --tokens together here)",
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
    let on_progress = |now: LoadProgress| {
        shown.hear(now);
        true
    };
    let loading = Loading {
        settings: weights_settings(config),
        metrics: &metrics,
        progress: &on_progress,
    };
    let loaded = planned.load(pool.clone(), &loading);
    let mut loaded = loaded.context("load the model")?;
    drop(planned);
    pin_engine(&pool);

    let mut memory = MemoryRate::new(plain_bytes())?;
    let mut runs = Rounds::new(loaded.model.as_mut(), workload, step_width, SEED);
    runs.fill_cache()?;
    runs.round()?;
    memory.measure(&pool);
    let mut seconds = Vec::new();
    for _ in 0..rounds {
        seconds.push(runs.round()?.as_secs_f64().max(f64::MIN_POSITIVE));
        memory.measure(&pool);
    }
    let report = Report {
        workload,
        model: of_file(),
        threads: pool.threads(),
        instruction_set: pool.instruction_set().name(),
        device: plan.device.name(),
        steps: workload.steps(step_width),
        round_bytes: bytes.of_round(workload, step_width),
        seconds,
        ram_rate: (plan.device != DeviceKind::Cuda).then(|| memory.bytes_per_second()),
    };
    match json {
        true => print(&format!("{:#}\n", report.json())),
        false => print(&report.text()),
    }
}

/// Half of what is free where that is little: the rounds must not make the system swap.
fn plain_bytes() -> usize {
    let free = free_host_memory().map_or(PLAIN_BYTES_MIN, |free| free.bytes / 2);
    free.clamp(PLAIN_BYTES_MIN, PLAIN_BYTES) as usize
}

struct Report {
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
    /// Bytes per second; `None` where it bounds nothing: a GPU computes.
    ram_rate: Option<f64>,
}

impl Report {
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
            "bytes_per_step": self.bytes_per_step(),
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
             {:10.3} ms a step\n\
             {:10.2} GB/s of weights: {:.1} MB a step\n{beside}",
            self.model,
            self.device,
            self.threads,
            if self.threads == 1 { "" } else { "s" },
            self.instruction_set,
            median(&rates),
            rates.len(),
            1e3 / (self.round_rate() * f64::from(self.steps.max(1))),
            self.weight_rate() / 1e9,
            self.bytes_per_step() as f64 / 1e6,
        )
    }
}
