//! Runs a model step by step, below the engine: what the golden and the equality tests share.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use std::path::{Path, PathBuf};
use strata::kernels::{ComputePool, InstructionSet};
use strata::kv_cache::PageId;
use strata::memory::ReaderChoice;
use strata::metrics::Metrics;
use strata::model::{Batch, LoadedModel, PlannedModel, Run};
use strata::placement::{DeviceKind, ExecutorChoice, KvType, PlanRequest, Rates, Tier};
use strata::weights::{Loading, Lookahead, VerifyShare, WeightsSettings};

/// Tokens in a page of the KV cache.
const PAGE_TOKENS: usize = 32;

pub(crate) const MIB: u64 = 1 << 20;

/// Everything rests in memory: the reference that other placements are compared with.
pub(crate) fn all_resident() -> PlanRequest {
    PlanRequest {
        device: DeviceKind::Cpu,
        device_budget: None,
        host_budget: 8 << 30,
        context: 1024,
        parallel: 2,
        kv_type: KvType::F16,
        step_width: Some(512),
        read_alignment: 4096,
        slice_bytes: None,
        ring_entries: None,
        executor: ExecutorChoice::Auto,
        map_file: true,
        rates: Rates::default(),
        rates_card: None,
    }
}

/// Released ring space is poisoned, so that a use after release shows in the logits.
pub(crate) fn settings() -> WeightsSettings {
    WeightsSettings {
        reader: ReaderChoice::Auto,
        link_rate: None,
        lookahead: Lookahead::Ring,
        poison_released: true,
        verify_share: VerifyShare::Fixed(1.0),
        checksums: None,
    }
}

pub(crate) fn load(path: &Path, request: &PlanRequest, settings: WeightsSettings) -> LoadedModel {
    load_on(ComputePool::new(2), path, request, settings)
}

/// A pool for each instruction set that this machine has, slowest first.
pub(crate) fn pools() -> impl Iterator<Item = ComputePool> {
    let sets = InstructionSet::ALL.into_iter();
    let available = sets.filter(|set| set.is_available());
    available.map(|set| ComputePool::with_instruction_set(2, set))
}

pub(crate) fn load_on(
    pool: ComputePool,
    path: &Path,
    request: &PlanRequest,
    settings: WeightsSettings,
) -> LoadedModel {
    let planned = PlannedModel::open(path, request).unwrap();
    let metrics = Metrics::new();
    let loading = Loading {
        settings,
        metrics: &metrics,
        progress: &|_| true,
    };
    planned.load(pool, &loading).unwrap()
}

/// A sequence that has pages of its own, the first of which is `first_page`. Of two in a batch one has the first of all.
pub(crate) struct Sequence {
    pages: Vec<PageId>,
    pub(crate) tokens: Vec<u32>,
}

impl Sequence {
    pub(crate) fn new(first_page: u32, pages: u32) -> Sequence {
        Sequence {
            pages: (first_page..first_page + pages).map(PageId).collect(),
            tokens: Vec::new(),
        }
    }

    /// The run of these next tokens, which are counted as computed.
    pub(crate) fn run<'a>(&'a mut self, tokens: &'a [u32], wants_logits: bool) -> Run<'a> {
        let position = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        let pages = self.tokens.len().div_ceil(PAGE_TOKENS);
        Run {
            tokens,
            position: position as u32,
            pages: &self.pages[..pages],
            slot: u32::from(self.pages[0].0 > 0),
            wants_logits,
        }
    }

    /// Computes these tokens in one step and gives the logits of the last.
    pub(crate) fn step(&mut self, loaded: &mut LoadedModel, tokens: &[u32]) -> Vec<f32> {
        let batch = Batch {
            runs: vec![self.run(tokens, true)],
        };
        loaded.model.forward(&batch, &|| false).unwrap().remove(0)
    }
}

/// The smallest budgets, of the device and of the host beside it, with which something rests on each tier. `request` makes
/// a request of them.
pub(crate) fn smallest_budgets(
    path: &Path,
    request: impl Fn(u64, u64) -> PlanRequest,
) -> (u64, u64) {
    const STEP: u64 = 16 << 10;
    let rests_on = |tiers: &[Tier], device: u64, host: u64| {
        let planned = PlannedModel::open(path, &request(device, host));
        planned.is_ok_and(|planned| {
            // More than the small group, which rests on the device always.
            let homes = planned
                .plan
                .residences
                .iter()
                .map(|residence| residence.home);
            let count = |tier| homes.clone().filter(|home| *home == tier).count();
            tiers.iter().all(|&tier| count(tier) > 1)
        })
    };
    let budgets = || (1..400).map(|steps| steps * STEP);
    let device = budgets().find(|&device| rests_on(&[Tier::Device], device, 1 << 30));
    let device = device.expect("a budget of the device");
    let all = [Tier::Device, Tier::Host, Tier::Storage];
    let host = budgets().find(|&host| rests_on(&all, device, host));
    (device, host.expect("a budget of the host"))
}

/// log softmax, in f64.
pub(crate) fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = logits.iter().map(|&l| f64::from(l) - f64::from(largest));
    let sum: f64 = shifted.clone().map(f64::exp).sum();
    shifted.map(|l| l - sum.ln()).collect()
}

/// The repository, where the test runs: it may have been built elsewhere.
pub(crate) fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR");
    here.map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from)
}

/// SmolLM2-135M-Instruct.
pub(crate) fn smollm2() -> PathBuf {
    fetched("STRATA_TEST_SMOLLM2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// Gemma 3 270M.
pub(crate) fn gemma3() -> PathBuf {
    fetched("STRATA_TEST_GEMMA3", "gemma3-270m-q4_k_m.gguf")
}

/// A model that `make test-models` fetches, unless the variable names another place.
fn fetched(variable: &str, file: &str) -> PathBuf {
    let path = match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => root().join("models").join(file),
    };
    assert!(
        path.is_file(),
        "{} is missing: run `make test-models`, which fetches it",
        path.display()
    );
    path
}
