//! Loading has many small groups under way at once, to the host and through it to a device, so that the drive and not the
//! program is what it waits for. Reads are held back until enough of them have been given.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/models.rs"]
mod models;
#[path = "support/run.rs"]
mod run;

use models::{RandomOptions, random};
use run::{all_resident, settings};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use strata::kernels::ComputePool;
use strata::memory::{FaultControl, Faults, FaultyReader, Limits};
use strata::metrics::Metrics;
use strata::model::{PlannedModel, places};
use strata::placement::{DeviceKind, ExecutorChoice, GroupKind, Plan, PlanRequest, Tier};
use strata::weights::{LoadProgress, Loading, ModelFile};

/// Only a broken program takes so long.
const FOREVER: Duration = Duration::from_secs(120);

/// More slots than groups have extents, and requests longer than extents: each extent is one read.
const LIMITS: Limits = Limits {
    block_bytes: 512,
    in_flight_max: 512,
    request_bytes_max: 1 << 20,
    border_bytes: 1 << 30,
};

fn request() -> PlanRequest {
    PlanRequest {
        map_file: false,
        context: 64,
        step_width: Some(8),
        slice_bytes: Some(64 << 10),
        ..all_resident()
    }
}

/// Reads that bring each group with this home, the small one only to the host: a device's is loaded by itself.
fn reads_of(plan: &Plan, home: Tier) -> Vec<u64> {
    let groups = plan.groups.iter().zip(&plan.residences);
    groups
        .filter(|(_, residence)| residence.home == home)
        .filter(|(group, _)| home == Tier::Host || group.kind != GroupKind::Small)
        .map(|(group, _)| group.extents.len() as u64)
        .collect()
}

/// How many more reads were given than `before`: as soon as there are so many, or when it has taken for ever.
fn reads_given(control: &FaultControl, before: u64, wanted: u64) -> u64 {
    let began = Instant::now();
    while control.submitted() < before + wanted && began.elapsed() < FOREVER {
        std::thread::sleep(Duration::from_millis(2));
    }
    control.submitted() - before
}

/// Loads, and holds all reads back from the moment that progress is told of at least `loaded` bytes, until `wanted` reads
/// more have been given.
fn check(planned: &PlannedModel, loaded: u64, wanted: u64) {
    let reader = FaultyReader::open(&places(&planned.gguf), 1, Faults::default()).unwrap();
    let reader = reader.with_limits(LIMITS);
    let control = reader.control();
    let (hold, held) = mpsc::channel::<u64>();
    let watch = std::thread::spawn({
        let control = control.clone();
        move || {
            let given = reads_given(&control, held.recv().unwrap(), wanted);
            control.set(Faults::default());
            given
        }
    });
    let heard = RefCell::new(Vec::new());
    let on_progress = |now: LoadProgress| {
        let is_first = heard
            .borrow()
            .iter()
            .all(|then: &LoadProgress| then.loaded_bytes < loaded);
        if is_first && now.loaded_bytes >= loaded {
            control.change(|faults| faults.held = true);
            hold.send(control.submitted()).unwrap();
        }
        heard.borrow_mut().push(now);
        true
    };
    let metrics = Metrics::new();
    let loading = Loading {
        settings: settings(),
        metrics: &metrics,
        progress: &on_progress,
    };
    let file = ModelFile::Through(Box::new(reader));
    planned
        .load_from(file, ComputePool::new(1), &loading)
        .unwrap();
    let given = watch.join().unwrap();
    assert!(
        given >= wanted,
        "{given} reads were under way, not {wanted}"
    );

    // Before the first byte, and then group by group to the end.
    let heard = heard.into_inner();
    let total = heard[0].total_bytes;
    assert!(total > 0 && heard[0].loaded_bytes == 0);
    assert!(heard.iter().all(|now| now.total_bytes == total));
    assert!(heard.is_sorted_by(|a, b| a.loaded_bytes < b.loaded_bytes));
    assert_eq!(heard.last().unwrap().ratio(), 1.0);
}

fn model(folder: &Path) -> PathBuf {
    let path = folder.join("model.gguf");
    let options = RandomOptions {
        layers: 4,
        width: 128,
        ffn: 512,
        ..RandomOptions::default()
    };
    random(&path, &options);
    path
}

#[test]
fn to_the_host_all_small_groups_are_read_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let planned = PlannedModel::open(&path, &request()).unwrap();
    let reads = reads_of(&planned.plan, Tier::Host);
    assert!(reads.len() > 16, "{reads:?}");
    check(&planned, 0, reads.iter().sum());
}

/// There is no ring, for nothing streams: one region is set aside for loading. Homes of the host serve beside it.
#[test]
fn to_a_device_groups_pass_through_homes_that_are_loaded_later() {
    let folder = tempfile::tempdir().unwrap();
    let path = model(folder.path());
    let request = PlanRequest {
        device: DeviceKind::Emulated,
        device_budget: Some(1 << 20),
        executor: ExecutorChoice::Host,
        ..request()
    };
    let planned = PlannedModel::open(&path, &request).unwrap();
    let plan = &planned.plan;
    assert!(plan.host_ring.entries == 0 && plan.staging_bytes > 0);
    let reads = reads_of(plan, Tier::Device);
    assert!(reads.len() > 8, "{reads:?}");
    check(&planned, 1, reads[..4].iter().sum());
}
