//! A model is computed while its storage misbehaves: logits are equal to the bit to those without faults, or the step
//! fails with file, offset and group in the message, and the next step computes as if nothing had been.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/models.rs"]
mod models;
#[path = "support/run.rs"]
mod run;

use models::{RandomOptions, random};
use run::{Sequence, all_resident, settings};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;
use strata::kernels::ComputePool;
use strata::memory::{FaultControl, Faults, FaultyReader};
use strata::metrics::Metrics;
use strata::model::{Batch, LoadedModel, PlannedModel, StepError};
use strata::placement::{DeviceKind, ExecutorChoice, PlanRequest, Tier};
use strata::weights::{Loading, ModelFile};
use tempfile::TempDir;

const PROMPT: [u32; 7] = [5, 70, 200, 260, 9, 131, 77];

fn model() -> (TempDir, PathBuf) {
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
fn placements() -> Vec<(&'static str, PlanRequest)> {
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

/// Released ring entries are poisoned.
fn loading(metrics: &Metrics) -> Loading<'_> {
    Loading {
        settings: settings(),
        metrics,
        progress: &|_| true,
    }
}

fn load(path: &Path, request: &PlanRequest, seed: u64) -> (LoadedModel, FaultControl) {
    let planned = PlannedModel::open(path, request).unwrap();
    assert!(
        planned.plan.weight_home_bytes(Tier::Storage) > 0,
        "nothing streams"
    );
    let reader = FaultyReader::open(path, seed, Faults::default()).unwrap();
    let control = reader.control();
    let file = ModelFile::Through(Box::new(reader));
    let loaded = planned
        .load_from(file, ComputePool::new(2), &loading(&Metrics::new()))
        .unwrap();
    (loaded, control)
}

/// The bits of the logits after the prompt, computed afresh, or why not.
fn step(loaded: &mut LoadedModel, cancelled: &dyn Fn() -> bool) -> Result<Vec<u32>, StepError> {
    let mut sequence = Sequence::new(0, 2);
    let batch = Batch {
        runs: vec![sequence.run(&PROMPT, true)],
    };
    let rows = loaded.model.forward(&batch, cancelled)?;
    Ok(rows[0].iter().map(|logit| logit.to_bits()).collect())
}

/// The logits that every placement must give.
fn reference(path: &Path) -> Vec<u32> {
    let mut resident = run::load(path, &all_resident(), settings());
    step(&mut resident, &|| false).unwrap()
}

#[test]
fn short_reads_interruptions_and_reordering_change_nothing() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        for seed in 0..3 {
            let (mut loaded, control) = load(&path, &request, seed);
            control.set(Faults {
                short_reads: 0.4,
                interruptions: 0.2,
                reorder: true,
                ..Faults::default()
            });
            for _ in 0..4 {
                let logits = step(&mut loaded, &|| false).unwrap();
                assert!(logits == expected, "{name}, seed {seed}: other logits");
            }
        }
    }
}

#[test]
fn errors_fail_steps_by_name_and_the_next_step_is_right() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        for seed in 0..3 {
            let (mut loaded, control) = load(&path, &request, seed);
            let mut failures = 0;
            for _ in 0..12 {
                control.set(Faults {
                    errors: 0.03,
                    short_reads: 0.3,
                    reorder: true,
                    ..Faults::default()
                });
                match step(&mut loaded, &|| false) {
                    Ok(logits) => assert!(logits == expected, "{name}, seed {seed}"),
                    Err(error) => {
                        failures += 1;
                        assert_names_the_read(&error);
                        control.set(Faults::default());
                        let logits = step(&mut loaded, &|| false).unwrap();
                        assert!(logits == expected, "{name}, seed {seed}: after {error}");
                    }
                }
            }
            assert!(failures > 0, "{name}, seed {seed}: no step failed");
        }
    }
}

#[track_caller]
fn assert_names_the_read(error: &StepError) {
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

#[test]
fn a_place_that_cannot_be_read_fails_every_step_until_it_can() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let middle = std::fs::metadata(&path).unwrap().len() / 2;
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 1);
        // Wide enough to meet something that streams.
        let broken: Vec<u64> = (0..64).map(|i| middle + 4096 * i).collect();
        control.change(|faults| faults.broken = broken.clone());
        // What was read ahead is good.
        let _ = step(&mut loaded, &|| false);
        for _ in 0..5 {
            assert_names_the_read(&step(&mut loaded, &|| false).unwrap_err());
        }
        control.set(Faults::default());
        assert!(step(&mut loaded, &|| false).unwrap() == expected, "{name}");

        control.change(|faults| faults.broken_once = broken);
        let mut failures = 0;
        while let Err(error) = step(&mut loaded, &|| false) {
            assert_names_the_read(&error);
            failures += 1;
            assert!(
                failures <= 64,
                "{name}: an error that comes once comes again"
            );
        }
        control.set(Faults::default());
        assert!(step(&mut loaded, &|| false).unwrap() == expected, "{name}");

        control.change(|faults| faults.shrunk_to = Some(middle));
        let _ = step(&mut loaded, &|| false);
        let error = step(&mut loaded, &|| false).unwrap_err();
        assert!(error.to_string().contains("shrank"), "{error}");
        control.set(Faults::default());
        assert!(step(&mut loaded, &|| false).unwrap() == expected, "{name}");
    }
}

/// After a step, the next one's first groups are read ahead. A failure that nobody waits for is old when the next
/// request comes.
#[test]
fn a_failure_while_nobody_computes_does_not_fail_the_next_step() {
    let (_folder, path) = model();
    let expected = reference(&path);
    let everything = (0..std::fs::metadata(&path).unwrap().len()).step_by(512);
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 4);
        let leases = Cell::new(0);
        let count = || {
            leases.set(leases.get() + 1);
            false
        };
        assert!(step(&mut loaded, &count).unwrap() == expected, "{name}");
        let mut survived = 0;
        for _ in 0..20 {
            let asked = Cell::new(0);
            // Nothing can be read from the last lease on.
            let break_at_the_end = || {
                asked.set(asked.get() + 1);
                if asked.get() == leases.get() {
                    control.change(|faults| faults.broken = everything.clone().collect());
                }
                false
            };
            survived += u32::from(step(&mut loaded, &break_at_the_end).is_ok());
            while control.submitted() != control.completed() {
                std::thread::yield_now();
            }
            control.set(Faults::default());
            let logits = step(&mut loaded, &|| false);
            assert!(
                logits.as_ref() == Ok(&expected),
                "{name}: {:?}",
                logits.err()
            );
        }
        assert!(survived > 0, "{name}: no read failed between two steps");
    }
}

#[test]
fn cancelled_steps_leave_nothing_behind() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 2);
        control.set(Faults {
            short_reads: 0.3,
            reorder: true,
            // Reads are in flight when the step is given up.
            read_time: Duration::from_micros(50),
            ..Faults::default()
        });
        for leases in 0..40 {
            let asked = Cell::new(0);
            let cancelled = || {
                asked.set(asked.get() + 1);
                asked.get() > leases
            };
            match step(&mut loaded, &cancelled) {
                Err(error) => {
                    assert_eq!(error, StepError::Cancelled);
                    // Everything in flight has landed: memory that is used again is nobody else's.
                    assert_eq!(control.submitted(), control.completed(), "{name}, {leases}");
                }
                Ok(logits) => assert!(logits == expected, "{name}, {leases}"),
            }
            if leases % 5 == 0 {
                assert!(
                    step(&mut loaded, &|| false).unwrap() == expected,
                    "{name}, {leases}"
                );
            }
        }
    }
}

#[test]
fn flipped_bits_never_crash() {
    let (_folder, path) = model();
    let expected = reference(&path);
    for (name, request) in placements() {
        let (mut loaded, control) = load(&path, &request, 3);
        control.change(|faults| faults.flipped_bits = 0.8);
        for _ in 0..10 {
            match step(&mut loaded, &|| false) {
                Ok(_) | Err(StepError::Numeric(_)) => {}
                Err(error) => panic!("{name}: {error}"),
            }
        }
        control.set(Faults::default());
        // What was read ahead has wrong bits yet.
        let _ = step(&mut loaded, &|| false);
        assert!(step(&mut loaded, &|| false).unwrap() == expected, "{name}");
    }
}

/// A model that cannot be read while it is loaded says which group could not.
#[test]
fn errors_while_loading_name_the_group() {
    let (_folder, path) = model();
    let size = std::fs::metadata(&path).unwrap().len();
    for (name, request) in placements() {
        let planned = PlannedModel::open(&path, &request).unwrap();
        for broken in (0..size).step_by(64 << 10) {
            let faults = Faults {
                broken: (broken..broken + (64 << 10)).step_by(512).collect(),
                ..Faults::default()
            };
            let reader = FaultyReader::open(&path, broken, faults).unwrap();
            let file = ModelFile::Through(Box::new(reader));
            let loaded = planned.load_from(file, ComputePool::new(1), &loading(&Metrics::new()));
            if let Err(error) = loaded {
                let error = error.to_string();
                assert!(
                    error.contains("load ") && error.contains("faulty.gguf"),
                    "{name}: {error}"
                );
            }
        }
    }
}
