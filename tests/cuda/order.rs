//! Copies and kernels in every order that the streams allow give the same bits, and the software GPU, which knows what was
//! waited for, finds nothing wrong.

use crate::device::{Device, Wait, device};
use crate::placements::{KIB, Placement, assert_same, logits, on_device, open, prompt};
use crate::run::{Sequence, all_resident, load, root, settings, smallest_budgets};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use strata::model::{Batch, LoadedModel};
use strata::placement::{ExecutorChoice, PlanRequest, Tier};

/// Seeds of the scheduler.
const SEEDS: u64 = 200;
/// Of those, as many as are tried until a wait that is missing shows.
const SEEDS_TO_FIND: u64 = 40;
/// Of a dozen waits of a kind: without that for a copy whose source is filled again with the same bytes, nothing is wrong.
const MISSED_MAX: usize = 2;
/// What reports say that name both sides.
const OF_ORDER: [&str; 2] = ["nothing orders the two", "changed too early"];

/// The tiny model on three tiers, so that every step reads, copies and reuses entries.
fn on_three_tiers() -> (PathBuf, PlanRequest, Placement) {
    let path = root().join("tests/data/tiny/llama.gguf");
    let reference = PlanRequest {
        context: 64,
        parallel: 1,
        step_width: Some(8),
        slice_bytes: Some(64 * KIB),
        executor: ExecutorChoice::Device,
        ..all_resident()
    };
    let (device, host) =
        smallest_budgets(&path, |device, host| on_device(&reference, device, host));
    let placement = Placement {
        name: "three tiers",
        request: PlanRequest {
            ring_entries: Some(2),
            ..on_device(&reference, device, host)
        },
        homes: &[Tier::Device, Tier::Host, Tier::Storage],
    };
    (path, reference, placement)
}

#[test]
fn two_hundred_orders() {
    let Some(device) = device() else { return };
    if device.software.is_none() {
        println!("skipped: a GPU chooses its order itself");
        return;
    }
    let (path, reference, placement) = on_three_tiers();
    let prompt = prompt(6, 256);
    let expected = logits(&mut load(&path, &reference, settings()), &prompt, 8, false);
    for seed in 1..=SEEDS {
        device.set_seed(seed);
        let mut loaded = open(&device, &path, &placement);
        let ours = logits(&mut loaded, &prompt, 4, false);
        drop(loaded);
        let what = format!("seed {seed}");
        device.assert_nothing_reported(&what);
        assert_same(&expected, &ours, &what);
    }
    device.set_seed(0);
}

/// Takes waits away one by one, and gives for each what was reported under some seed.
fn reports_without(device: &Device, wait: Wait, numbers: std::ops::Range<u64>) -> Vec<Vec<String>> {
    let Some(software) = &device.software else {
        return Vec::new();
    };
    let (path, _, placement) = on_three_tiers();
    let prompt = prompt(6, 256);
    let mut found = Vec::new();
    for number in numbers {
        let mut reports = Vec::new();
        for seed in 1..=SEEDS_TO_FIND {
            device.set_seed(seed);
            let mut loaded = open(device, &path, &placement);
            software.leave_out(wait, number);
            // A report is a failure of the device, as a fault is on a GPU.
            let outcome = catch_unwind(AssertUnwindSafe(|| logits(&mut loaded, &prompt, 4, false)));
            let to_come = software.leave_out(wait, 0);
            assert!(outcome.is_err() || to_come == 0, "wait {number} never came");
            reports = device.reports();
            // What is dropped while the device answers with failures is reported too, and forgotten.
            drop(loaded);
            drop(device.reports());
            let _ = device.gpu.device.synchronise();
            if !reports.is_empty() {
                break;
            }
        }
        found.push(reports);
    }
    device.set_seed(0);
    found
}

#[test]
fn a_wait_that_is_left_out_is_found() {
    let Some(device) = device() else { return };
    if device.software.is_none() {
        println!("skipped: a GPU lets such things pass");
        return;
    }
    for wait in [Wait::Stream, Wait::Host] {
        let found = reports_without(&device, wait, 1..13);
        println!("{wait:?}: {found:#?}");
        let without = found.iter().filter(|reports| reports.is_empty()).count();
        assert!(without <= MISSED_MAX, "{wait:?}: {without} were not found");
        for reports in found.iter().filter(|reports| !reports.is_empty()) {
            let is_of_order = |report: &String| OF_ORDER.iter().any(|words| report.contains(words));
            assert!(reports.iter().any(is_of_order), "{wait:?}: {reports:#?}");
        }
    }
}

/// A copy or a launch that the driver has no memory for fails the step that needs it, or the loading, and nothing else: no
/// answer is made of what never arrived.
#[test]
fn what_is_refused_once_fails_one_step() {
    let Some(device) = device() else { return };
    let Some(software) = &device.software else {
        println!("skipped: a GPU's driver refuses when it likes");
        return;
    };
    let (path, reference, placement) = on_three_tiers();
    let tokens = prompt(3, 256);
    let step = |loaded: &mut LoadedModel| {
        let mut sequence = Sequence::new(0, 1);
        let batch = Batch {
            runs: vec![sequence.run(&tokens, true)],
        };
        let rows = loaded.model.forward(&batch, &|| false);
        rows.map(|rows| {
            rows[0]
                .iter()
                .map(|logit| logit.to_bits())
                .collect::<Vec<u32>>()
        })
    };
    let expected = step(&mut load(&path, &reference, settings())).unwrap();
    let mut loaded = open(&device, &path, &placement);
    for refused in [Wait::Copy, Wait::Launch] {
        let mut failures = 0;
        for number in 1..40 {
            software.leave_out(refused, number);
            for _ in 0..4 {
                match step(&mut loaded) {
                    Ok(ours) => assert!(ours == expected, "{refused:?} {number}"),
                    Err(error) => {
                        assert!(error.to_string().contains("OUT_OF_MEMORY"), "{error}");
                        failures += 1;
                    }
                }
            }
            software.leave_out(refused, 0);
            // A copy between two steps may have been the one.
            let _ = step(&mut loaded);
            assert!(
                step(&mut loaded).unwrap() == expected,
                "after {refused:?} {number}"
            );
            device.assert_nothing_reported(&format!("{refused:?} {number}"));
        }
        assert!(failures > 10, "{failures} failures");
    }
}
