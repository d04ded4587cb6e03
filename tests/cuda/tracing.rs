//! The trace of a CUDA device: times come from its own streams.

use crate::device::device;
use crate::program::{Program, post, wait_until_ready};
use crate::run::root;
use crate::trace::{Way, Ways, read_complete};
use serde_json::json;

/// Between the device's clock and the host's: by as much as it takes to hear of an event, on a busy machine.
const CLOCKS_DIFFER_BY: u64 = 2_000_000;

/// Every step wants logits: where the host multiplies by the head, it does so in each.
fn traced(flags: &str) -> Ways {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let model = root().join("tests/data/tiny/llama.gguf");
    let common =
        "--device cuda:0 --context 64 --parallel 1 --step-width 8 --slice 64KiB --ring-entries 2";
    let mut all: Vec<&str> = common.split(' ').chain(flags.split(' ')).collect();
    all.extend(["--trace", path.to_str().unwrap()]);
    let mut program = Program::serve(&model, &all);
    let address = program.address();
    wait_until_ready(address);
    let body = json!({"prompt": [5, 70, 200, 260], "max_tokens": 6, "temperature": 0});
    post(address, "/v1/completions", &body).ok();
    program.terminate();
    assert_eq!(program.wait().code(), Some(0));
    read_complete(&path).check(CLOCKS_DIFFER_BY)
}

#[test]
fn reads_copies_and_kernels_of_each_group_come_in_that_order() {
    let Some(device) = device() else { return };
    drop(device);
    let ways = traced("--device-memory 400KiB --host-memory 240KiB --executor device");
    for way in [Way::ReadAndCopied, Way::Copied, Way::Resident] {
        assert!(ways.count("device", way) > 0, "{way:?}: {ways:?}");
    }
}

#[test]
fn what_the_host_multiplies_by_is_on_the_lane_of_the_cpu() {
    let Some(device) = device() else { return };
    drop(device);
    let ways = traced("--device-memory 320KiB --host-memory 280KiB --executor host");
    assert!(ways.count("device", Way::Resident) > 0, "{ways:?}");
    assert!(ways.count("CPU", Way::Resident) > 0, "{ways:?}");
    assert!(ways.count("CPU", Way::Read) > 0, "{ways:?}");
}
