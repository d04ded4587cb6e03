//! A model whose reads go through a reader that misbehaves as it is told.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use super::models::{RandomOptions, random};
use super::run::{self, Sequence, all_resident, settings};
use std::path::{Path, PathBuf};
use strata::kernels::ComputePool;
use strata::memory::{FaultControl, Faults, FaultyReader};
use strata::metrics::Metrics;
use strata::model::{Batch, LoadedModel, PlannedModel, StepError, places};
use strata::placement::{DeviceKind, ExecutorChoice, PlanRequest, Tier};
use strata::weights::{Loading, ModelFile, WeightsSettings};
use tempfile::TempDir;

pub(crate) const PROMPT: [u32; 7] = [5, 70, 200, 260, 9, 131, 77];

pub(crate) fn model() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faulty.gguf");
    let options = RandomOptions {
        layers: 4,
        width: 64,
        ffn: 256,
        ..RandomOptions::default()
    };
    random(&path, &options);
    (folder, path)
}

/// Placements under which weights, and embedding rows, are read in every step.
pub(crate) fn placements() -> Vec<(&'static str, PlanRequest)> {
    let cpu = PlanRequest {
        host_budget: 800 << 10,
        context: 64,
        parallel: 2,
        step_width: Some(16),
        slice_bytes: Some(64 << 10),
        map_file: false,
        ..all_resident()
    };
    let emulated = |executor| PlanRequest {
        device: DeviceKind::Emulated,
        device_budget: Some(800 << 10),
        host_budget: 512 << 10,
        executor,
        ..cpu.clone()
    };
    vec![
        (
            "emulated, device computes",
            emulated(ExecutorChoice::Device),
        ),
        ("emulated, host computes", emulated(ExecutorChoice::Host)),
        (
            "cpu, two entries",
            PlanRequest {
                ring_entries: Some(2),
                ..cpu.clone()
            },
        ),
        ("cpu", cpu),
    ]
}

/// A model and the faults of its reader.
pub(crate) struct Faulty {
    pub(crate) loaded: LoadedModel,
    pub(crate) control: FaultControl,
    metrics: Metrics,
}

/// Without faults so far.
pub(crate) fn load(
    path: &Path,
    request: &PlanRequest,
    seed: u64,
    settings: WeightsSettings,
) -> Faulty {
    load_with(path, request, seed, settings, |reader| reader)
}

/// The same through a reader that is changed first.
pub(crate) fn load_with(
    path: &Path,
    request: &PlanRequest,
    seed: u64,
    settings: WeightsSettings,
    change: impl FnOnce(FaultyReader) -> FaultyReader,
) -> Faulty {
    let planned = PlannedModel::open(path, request).unwrap();
    assert!(
        planned.plan.weight_home_bytes(Tier::Storage) > 0,
        "nothing streams"
    );
    let reader = FaultyReader::open(&places(&planned.gguf), seed, Faults::default()).unwrap();
    let reader = change(reader);
    let control = reader.control();
    let file = ModelFile::Through(Box::new(reader));
    let metrics = Metrics::new();
    let loading = Loading {
        settings,
        metrics: &metrics,
        progress: &|_| true,
    };
    let loaded = planned
        .load_from(file, ComputePool::new(2), &loading)
        .unwrap();
    Faulty {
        loaded,
        control,
        metrics,
    }
}

impl Faulty {
    /// Reads that were tried again.
    pub(crate) fn retries(&self, reason: &str) -> u64 {
        let retries = &self.metrics.read_retries_total;
        retries.with_label_values(&[reason]).get()
    }

    pub(crate) fn verified_bytes(&self) -> u64 {
        self.metrics.reads_verified_bytes_total.get()
    }
}

/// The bits of the logits after the prompt, computed afresh, or why not.
pub(crate) fn step(
    loaded: &mut LoadedModel,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<u32>, StepError> {
    let mut sequence = Sequence::new(0, 2);
    let batch = Batch {
        runs: vec![sequence.run(&PROMPT, true)],
    };
    let rows = loaded.model.forward(&batch, cancelled)?;
    Ok(rows[0].iter().map(|logit| logit.to_bits()).collect())
}

/// The logits that every placement must give.
pub(crate) fn reference(path: &Path) -> Vec<u32> {
    let mut resident = run::load(path, &all_resident(), settings());
    step(&mut resident, &|| false).unwrap()
}

#[track_caller]
pub(crate) fn assert_names_the_read(error: &StepError) {
    let StepError::Weights(message) = error else {
        panic!("{error:?}");
    };
    for part in ["faulty.gguf", "byte "] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    let groups = ["layer ", "token embedding", "output head", "norms"];
    assert!(
        groups.iter().any(|group| message.contains(group)),
        "{message}"
    );
}
