//! Copies and kernels in every order that the streams allow give the same bits, and the software GPU, which knows what was
//! waited for, finds nothing wrong.

use crate::device::device;
use crate::placements::{KIB, Placement, assert_same, logits, on_device, open, prompt};
use crate::run::{all_resident, load, settings};
use std::path::Path;
use strata::placement::{PlanRequest, Tier};

/// Seeds of the scheduler.
const SEEDS: u64 = 200;

#[test]
fn two_hundred_orders() {
    let Some(device) = device() else { return };
    if device.software.is_none() {
        println!("skipped: a GPU chooses its order itself");
        return;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama.gguf");
    let reference = PlanRequest {
        context: 64,
        parallel: 1,
        step_width: Some(8),
        slice_bytes: Some(64 * KIB),
        ..all_resident()
    };
    let prompt = prompt(6, 256);
    let expected = logits(&mut load(&path, &reference, settings()), &prompt, 8, false);
    let placement = Placement {
        name: "three tiers",
        request: PlanRequest {
            ring_entries: Some(2),
            ..on_device(&reference, 330 * KIB, 330 * KIB)
        },
        homes: &[Tier::Device, Tier::Host, Tier::Storage],
    };
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
