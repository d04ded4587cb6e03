//! From a configuration to an engine that loads its model, and what else serving needs.

use super::device::{Candidate, Device};
use super::memory_report::{HeldWhileServing, MemoryView};
use super::memory_watch::{MemoryWatch, warn_of_earlier_kills};
use super::progress::LoadingProgress;
use super::rates::{KnownRates, cache_directory};
use super::trace::begin_trace;
use super::{Usage, one_line};
use anyhow::{Context, bail};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use strata::api::MemoryReport;
use strata::config::{
    ChecksumSetting, ComputeThreads, Config, DeviceSetting, ExecutorSetting, KvTypeSetting,
    MemorySetting, ReaderSetting, VerifySetting, budgets, compute_threads, format_bytes,
    free_host_memory, machine_memory_bytes,
};
use strata::engine::{Engine, EngineHandle, EngineSettings, Progress};
use strata::gguf::{Gguf, Hyperparameters, unsplit_path};
use strata::inspect::Served;
use strata::kernels::ComputePool;
use strata::memory::{ReaderChoice, heap_live_bytes};
use strata::metrics::Metrics;
use strata::model::{self, LoadedModel, Model, PlannedModel, gpu_supports};
use strata::placement::{
    DeviceKind, ExecutorChoice, Gain, KvType, Plan, PlanRequest, Tier, best_changes,
};
use strata::tokenizer::{ChatTemplate, Tokenizer};
use strata::trace::TraceFile;
use strata::weights::{LoadProgress, Lookahead, VerifyShare, WeightsSettings};

/// A model that is loading.
pub(crate) struct Loading {
    pub(crate) engine: EngineHandle,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: ChatTemplate,
    pub(crate) metrics: Metrics,
    pub(crate) memory: MemoryReport,
    pub(crate) model_name: String,
    /// Tokens of a sequence.
    pub(crate) context: usize,
    /// What the model was trained on.
    pub(crate) model_context: usize,
    /// To be dropped after the engine has ended.
    pub(crate) trace: TraceFile,
    /// Until it is dropped.
    pub(crate) _memory_watch: MemoryWatch,
}

/// Reads everything but weights, makes the plan, and starts the engine, which allocates and loads on its thread.
pub(crate) fn load(config: &Config) -> anyhow::Result<Loading> {
    let path = model_path(config)?;
    let of_file = || path.display().to_string();
    let gguf = Gguf::open(path).with_context(of_file)?;
    let hyperparameters = model::hyperparameters(&gguf).with_context(of_file)?;
    // Nothing else runs yet: what becomes live meanwhile is what these hold.
    let live = [heap_live_bytes()];
    let tokenizer = Arc::new(Tokenizer::from_gguf(&gguf.metadata).with_context(of_file)?);
    let live = [live[0], heap_live_bytes()];
    let template = ChatTemplate::from_gguf(&gguf.metadata, &tokenizer).with_context(of_file)?;
    let held = HeldWhileServing {
        tokenizer: live[1].saturating_sub(live[0]) as u64,
        template: heap_live_bytes().saturating_sub(live[1]) as u64,
    };
    let candidate = Candidate {
        gguf: &gguf,
        hyperparameters: &hyperparameters,
    };
    let device = Device::to_use(config, candidate)?;
    let (mut planned, device) = plan_on(config, path, gguf, &hyperparameters, device)?;
    check_vocabulary(&tokenizer, &planned.hyperparameters).with_context(of_file)?;
    let plan = Arc::clone(&planned.plan);
    check_machine(&plan)?;
    warn_of_earlier_kills(&plan);
    for name in &plan.unused {
        tracing::warn!("tensor `{name}` is not used by this architecture");
    }
    let trained = planned.hyperparameters.context_length;
    if plan.context > trained {
        tracing::warn!(
            "the context of {} tokens is longer than the {trained} that the model was trained for; answers get worse beyond \
             them; give --context {trained}",
            plan.context
        );
    }
    device.log(config);
    tracing::info!("the plan:\n{}", plan.report());
    let trace = begin_trace(config)?;
    planned.trace = trace.handle();

    let metrics = Metrics::new();
    let end_of_generation: HashSet<u32> = tokenizer.end_of_generation().iter().copied().collect();
    let settings = EngineSettings {
        context: plan.context,
        parallel: plan.parallel as usize,
        step_width: plan.step_width as usize,
        queue_max: config.queue,
        page_tokens: plan.kv.page_tokens,
        kv_pages: plan.kv.pages,
        kv_tier: plan.kv.tier.name(),
        stalled_client_timeout: config.stall_timeout,
        tokens: tokenizer.vocabulary_size(),
        end_of_generation: Arc::new(end_of_generation),
    };
    let model_context = planned.hyperparameters.context_length as usize;
    let view = Arc::new(MemoryView {
        plan: Arc::clone(&plan),
        model: canonical_files(&planned.gguf),
        held,
        loaded: OnceLock::new(),
    });
    let make_model = {
        let (view, metrics) = (Arc::clone(&view), metrics.clone());
        let weights = weights_settings(config);
        let threads = compute_threads(config).map_err(|error| Usage(error.to_string()))?;
        let shown = LoadingProgress::new(config.log);
        move |progress: &Progress| {
            let on_progress = |now: LoadProgress| {
                progress.set(now.ratio());
                shown.hear(now);
                !progress.is_cancelled()
            };
            make_model(planned, weights, threads, &metrics, &view, &on_progress)
                .map_err(|error| one_line(&error))
        }
    };
    let memory_watch = MemoryWatch::start(Arc::clone(&view));
    let engine = Engine::start(make_model, settings, &metrics).context(
        "start the engine: the system gives no thread, or no memory for its stack; raise the limit (the control group's, \
         `ulimit -u`, `ulimit -v`)",
    )?;
    Ok(Loading {
        engine,
        tokenizer,
        template,
        metrics,
        memory: Arc::new(move || view.report()),
        model_name: config.served_name(&unsplit_path(path)),
        context: plan.context as usize,
        model_context,
        trace,
        _memory_watch: memory_watch,
    })
}

/// Every token needs a row of the embedding; rows beyond them are padding.
fn check_vocabulary(tokenizer: &Tokenizer, shape: &Hyperparameters) -> anyhow::Result<()> {
    if tokenizer.vocabulary_size() > shape.vocabulary_size as usize {
        bail!(
            "the vocabulary has {} tokens and `token_embd.weight` {} rows; the file is damaged",
            tokenizer.vocabulary_size(),
            shape.vocabulary_size
        );
    }
    Ok(())
}

/// Whether a model would be loaded here: every check that needs neither memory nor a device.
pub(super) fn served(gguf: &Gguf) -> Served {
    let check = || -> anyhow::Result<Hyperparameters> {
        let hyperparameters = model::check(gguf)?;
        let tokenizer = Tokenizer::from_gguf(&gguf.metadata)?;
        ChatTemplate::from_gguf(&gguf.metadata, &tokenizer)?;
        check_vocabulary(&tokenizer, &hyperparameters)?;
        Ok(hyperparameters)
    };
    match check() {
        Ok(hyperparameters) => Served::Yes {
            gpu: gpu_supports(gguf, &hyperparameters),
        },
        Err(error) => Served::No(format!("{error:#}")),
    }
}

/// The files of a model as the kernel names them.
fn canonical_files(gguf: &Gguf) -> Vec<PathBuf> {
    let paths = gguf.files.iter().map(|file| &file.path);
    let canonical = paths.map(|path| path.canonicalize().unwrap_or_else(|_| path.clone()));
    canonical.collect()
}

/// The plan for a device; where the device is `auto`'s GPU and has too little free for the model, that of the CPU.
fn plan_on(
    config: &Config,
    path: &Path,
    gguf: Gguf,
    hyperparameters: &Hyperparameters,
    device: Device,
) -> anyhow::Result<(PlannedModel, Device)> {
    let known = KnownRates::of(config, Some(path))?;
    let plan = |gguf, device: &Device| -> anyhow::Result<PlannedModel> {
        let request = plan_request(config, hyperparameters, device, &known)?;
        let of_file = || path.display().to_string();
        let mut planned = PlannedModel::of_index(gguf, &request).with_context(of_file)?;
        planned.gpu = device.gpu();
        Ok(planned)
    };
    let may_fall_back = device.gpu().is_some()
        && config.device == DeviceSetting::Auto
        && config.device_memory == MemorySetting::Auto;
    if !may_fall_back {
        return Ok((plan(gguf, &device)?, device));
    }
    match plan(gguf.clone(), &device) {
        Ok(planned) => Ok((planned, device)),
        Err(error) => {
            let cpu = Device::CpuBecause(format!("the GPU does not suffice: {error:#}"));
            Ok((plan(gguf, &cpu)?, cpu))
        }
    }
}

/// A budget that was given may exceed what this machine has; what the plan takes of it must not. Both tiers are RAM
/// where the device is emulated; what a GPU has was asked before.
pub(super) fn check_machine(plan: &Plan) -> anyhow::Result<()> {
    let mut needed = plan.arena_bytes(Tier::Host);
    if plan.device == DeviceKind::Emulated {
        needed = needed.saturating_add(plan.arena_bytes(Tier::Device));
    }
    if let Ok(has) = machine_memory_bytes()
        && needed > has
    {
        bail!(Usage(format!(
            "the plan takes {} of memory and this machine has {}; give a smaller --host-memory (or --device-memory), \
             --context or --parallel",
            format_bytes(needed),
            format_bytes(has)
        )));
    }
    if let Ok(free) = free_host_memory()
        && needed > free.bytes
    {
        tracing::warn!(
            "the plan takes {} of memory and {} are free ({}): the system may end this process or others; first give a smaller \
             --host-memory (of an emulated device, --device-memory), --context or --parallel",
            format_bytes(needed),
            format_bytes(free.bytes),
            free.limited_by
        );
    }
    Ok(())
}

/// Runs on the engine thread.
fn make_model(
    planned: PlannedModel,
    weights: WeightsSettings,
    threads: ComputeThreads,
    metrics: &Metrics,
    view: &MemoryView,
    progress: &dyn Fn(LoadProgress) -> bool,
) -> anyhow::Result<Box<dyn Model>> {
    let pool = compute_pool(&threads);
    let LoadedModel {
        model,
        reader,
        traffic,
        arenas,
    } = planned.load(
        pool.clone(),
        &strata::weights::Loading {
            settings: weights,
            metrics,
            progress,
        },
    )?;
    let (rung, reason) = match &reader {
        Some((rung, reason)) => (rung.name(), reason.as_str()),
        None => ("mapped", "the whole file fits the host budget"),
    };
    tracing::info!(reader = rung, reason, "the weights are in place");
    metrics
        .build_info
        .with_label_values(&[env!("CARGO_PKG_VERSION"), planned.plan.device.name(), rung])
        .set(1);
    pin_engine(&pool);
    // The file's index and metadata have served.
    drop(planned);
    view.set_loaded(rung, reason, traffic, arenas);
    Ok(model)
}

/// The pool that the settings ask for.
pub(super) fn compute_pool(threads: &ComputeThreads) -> ComputePool {
    match threads.cpus.as_slice() {
        [] => ComputePool::new(threads.count),
        cpus => ComputePool::pinned(cpus),
    }
}

/// Pins the calling thread too, where the pool's are. Not before the model is loaded: threads inherit the CPUs of the
/// one that starts them, and those that read and copy stay free.
pub(super) fn pin_engine(pool: &ComputePool) {
    if !pool.cpus().is_empty() {
        pool.pin_caller();
        // A CPU that was refused has a warning of its own.
        tracing::info!("the compute threads are pinned to CPUs {:?}", pool.cpus());
    }
}

/// What the plan is asked for.
pub(super) fn plan_request(
    config: &Config,
    hyperparameters: &Hyperparameters,
    device: &Device,
    known: &KnownRates,
) -> anyhow::Result<PlanRequest> {
    let tier = device.tier()?;
    let budgets = budgets(config, tier).map_err(|error| Usage(error.to_string()))?;
    let (rates, rates_card) = known.for_device(config, device);
    Ok(PlanRequest {
        device: device.kind(),
        device_budget: budgets.device,
        host_budget: budgets.host,
        context: config.context_for(hyperparameters.context_length),
        parallel: config.parallel,
        kv_type: match config.kv_type {
            KvTypeSetting::F16 => KvType::F16,
            KvTypeSetting::F32 => KvType::F32,
        },
        step_width: config.step_width,
        read_alignment: 4096,
        slice_bytes: config.slice,
        ring_entries: config.ring_entries,
        executor: match config.executor {
            ExecutorSetting::Auto => ExecutorChoice::Auto,
            ExecutorSetting::Device => ExecutorChoice::Device,
            ExecutorSetting::Host => ExecutorChoice::Host,
            ExecutorSetting::HostUpTo(width) => ExecutorChoice::HostUpTo(width),
        },
        map_file: !config.copy,
        rates,
        rates_card,
    })
}

pub(super) fn weights_settings(config: &Config) -> WeightsSettings {
    WeightsSettings {
        reader: match config.reader {
            ReaderSetting::Auto => ReaderChoice::Auto,
            ReaderSetting::IoUring => ReaderChoice::IoUring,
            ReaderSetting::Pread => ReaderChoice::Pread,
        },
        link_rate: Some(config.link_rate),
        lookahead: Lookahead::Ring,
        poison_released: false,
        verify_share: match config.verify_reads {
            VerifySetting::Auto => VerifyShare::Auto,
            VerifySetting::Share(share) => VerifyShare::Fixed(share),
        },
        checksums: match &config.checksum_directory {
            ChecksumSetting::Auto => cache_directory().map(|cache| cache.join("strata/checksums")),
            ChecksumSetting::Nowhere => None,
            ChecksumSetting::Directory(directory) => Some(directory.clone()),
        },
    }
}

pub(super) fn model_path(config: &Config) -> anyhow::Result<&Path> {
    let path: Option<&PathBuf> = config.model.as_ref();
    path.map(PathBuf::as_path).ok_or_else(|| {
        Usage("no model is given; name a GGUF file: `strata serve MODEL.gguf`".to_owned()).into()
    })
}

/// The plan of a shape card or a file (`model`), without loading anything, and what would make it faster. With a hardware
/// card it is made for that machine, as far as the settings do not say otherwise.
pub(super) fn plan_of(
    config: &Config,
    path: &Path,
    gguf: Gguf,
    model: Option<&Path>,
) -> anyhow::Result<(Arc<Plan>, Vec<Gain>)> {
    let of_file = || path.display().to_string();
    let hyperparameters = model::hyperparameters(&gguf).with_context(of_file)?;
    let candidate = Candidate {
        gguf: &gguf,
        hyperparameters: &hyperparameters,
    };
    let known = KnownRates::of(config, model)?;
    let config = &known.config_for_machine(config);
    let device = Device::to_plan_for(config, candidate)?;
    let request = plan_request(config, &hyperparameters, &device, &known)?;
    let planned = PlannedModel::of_index(gguf, &request).with_context(of_file)?;
    let gains = best_changes(&planned.gguf, &hyperparameters, &request, &planned.plan);
    Ok((planned.plan, gains))
}
