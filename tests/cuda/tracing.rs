//! The trace of a CUDA device: times come from its own streams.

use crate::device::device;
use crate::program::{Page, Program, post, wait_until_ready};
use crate::run::root;
use crate::trace::{Span, Trace, Way, read_complete};
use serde_json::json;
use std::collections::BTreeSet;

/// Between the device's clock and the host's: by as much as it takes to hear of an event, on a busy machine.
const CLOCKS_DIFFER_BY: u64 = 2_000_000;

/// What was traced, and how long the metrics say that computation waited for what rests on the host. Every step wants
/// logits: where the host multiplies by the head, it does so in each.
fn traced(flags: &str, variables: &[(&str, &str)]) -> (Trace, f64) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let model = root().join("tests/data/tiny/llama.gguf");
    let common =
        "--device cuda:0 --context 64 --parallel 1 --step-width 8 --slice 64KiB --ring-entries 2";
    let mut all: Vec<&str> = common.split(' ').chain(flags.split(' ')).collect();
    all.extend(["--trace", path.to_str().unwrap()]);
    let mut program = Program::serve_with(&model, &all, variables);
    let address = program.address();
    wait_until_ready(address);
    let body = json!({"prompt": [5, 70, 200, 260], "max_tokens": 6, "temperature": 0});
    post(address, "/v1/completions", &body).ok();
    let stalled = Page::of(address).value(r#"strata_weight_stall_seconds_total{from="host"}"#);
    program.terminate();
    assert_eq!(program.wait().code(), Some(0));
    (read_complete(&path), stalled)
}

#[test]
fn reads_copies_and_kernels_of_each_group_come_in_that_order() {
    let Some(device) = device() else { return };
    drop(device);
    let flags = "--device-memory 400KiB --host-memory 240KiB --executor device";
    let (trace, _) = traced(flags, &[]);
    let ways = trace.check(CLOCKS_DIFFER_BY);
    for way in [Way::ReadAndCopied, Way::Copied, Way::Resident] {
        assert!(ways.count("device", way) > 0, "{way:?}: {ways:?}");
    }
}

#[test]
fn what_the_host_multiplies_by_is_on_the_lane_of_the_cpu() {
    let Some(device) = device() else { return };
    drop(device);
    let flags = "--device-memory 320KiB --host-memory 256KiB --executor host";
    let (trace, _) = traced(flags, &[]);
    let ways = trace.check(CLOCKS_DIFFER_BY);
    assert!(ways.count("device", Way::Resident) > 0, "{ways:?}");
    assert!(ways.count("CPU", Way::Resident) > 0, "{ways:?}");
    assert!(ways.count("CPU", Way::Read) > 0, "{ways:?}");
}

#[test]
fn the_device_waits_until_the_copy_is_there_and_the_metrics_count_the_same() {
    let Some(device) = device() else { return };
    drop(device);
    // A GPU has a link of its own.
    let slow = [("SOFTWARE_GPU_LINK_RATE", "4MiB")];
    let (trace, stalled) = traced(
        "--device-memory 400KiB --host-memory 4MiB --executor device",
        &slow,
    );
    let ways = trace.check(CLOCKS_DIFFER_BY);
    let streamed = ways.count("device", Way::Copied);
    assert!(streamed > 0, "{ways:?}");
    let waits = trace.of("wait");
    let of_device: Vec<_> = waits.iter().filter(|wait| wait.lane == "device").collect();
    let steps = trace.of("step").len();
    assert_eq!(of_device.len(), streamed * steps);
    let groups: BTreeSet<u64> = of_device.iter().map(|wait| wait.group()).collect();
    let copies = trace.of("copy");
    for group in groups {
        let copies = copies.iter().filter(|copy| copy.group() == group);
        let waits = of_device.iter().filter(|wait| wait.group() == group);
        let pairs: Vec<_> = copies.zip(waits).collect();
        assert_eq!(pairs.len(), steps);
        for (copy, wait) in pairs {
            assert_eq!(wait.arguments["home"], "host");
            assert!(
                copy.ended <= wait.ended + CLOCKS_DIFFER_BY,
                "{copy:?}, {wait:?}"
            );
        }
    }
    let waited = of_device.iter().map(|wait| wait.ended - wait.began);
    let waited = waited.sum::<u64>() as f64 / 1e9;
    let difference = (waited - stalled).abs();
    assert!(
        waited > 0.0 && difference < 1e-5,
        "{waited} in the trace, {stalled} in the metrics"
    );
}

/// The device goes on with what is there, and the host multiplies by its part of the head.
#[test]
fn device_and_host_compute_while_a_copy_is_on_the_link() {
    let Some(device) = device() else { return };
    if device.software.is_none() {
        println!("skipped: a GPU's link is too fast for groups this small");
        return;
    }
    drop(device);
    // A group takes a tenth of a second.
    let slow = [("SOFTWARE_GPU_LINK_RATE", "512KiB")];
    for (executor, lane) in [("device", "device"), ("auto", "CPU")] {
        let flags = format!("--device-memory 400KiB --host-memory 4MiB --executor {executor}");
        let (trace, _) = traced(&flags, &slow);
        trace.check(CLOCKS_DIFFER_BY);
        let copies = trace.of("copy");
        let lies_within_a_copy = |span: &&Span| {
            let contains = |copy: &&Span| copy.began <= span.began && span.ended <= copy.ended;
            copies.iter().any(contains)
        };
        let computations = trace.of("computation");
        let mut on_lane = computations.iter().filter(|span| span.lane == lane);
        assert!(
            on_lane.any(lies_within_a_copy),
            "{copies:#?} and {computations:#?}"
        );
    }
}
