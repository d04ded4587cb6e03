//! `strata bench` computes what it says, counts the bytes that a step reads, and gives rates: how high they are decides
//! nothing here.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod http;
#[path = "support/models.rs"]
mod models;
#[path = "support/process.rs"]
mod process;

use models::{RandomOptions, random};
use process::{run, strata};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/tiny")
        .join(name)
}

#[track_caller]
fn bench(arguments: &[&str], model: &Path) -> Value {
    let (kind, flags) = arguments.split_first().unwrap();
    let outcome = run(strata()
        .args(["bench", kind])
        .arg(model)
        .args(flags)
        .arg("--json"));
    serde_json::from_str(outcome.success()).unwrap()
}

/// What `strata inspect` says of a file's matrices: bytes of the layers', of the head, and of a row of the embedding.
fn matrices(model: &Path) -> [u64; 3] {
    let outcome = run(strata().arg("inspect").arg(model).arg("--json"));
    let report: Value = serde_json::from_str(outcome.success()).unwrap();
    let tensors = report["tensors"].as_array().unwrap();
    let bytes = |tensor: &Value| tensor["bytes"].as_u64().unwrap();
    let named = |name: &str| tensors.iter().find(|tensor| tensor["name"] == name);
    let in_layers = tensors.iter().filter(|tensor| {
        let is_matrix = tensor["dimensions"].as_array().unwrap().len() == 2;
        is_matrix && tensor["name"].as_str().unwrap().starts_with("blk.")
    });
    let embedding = named("token_embd.weight").unwrap();
    let rows = embedding["dimensions"][1].as_u64().unwrap();
    [
        in_layers.map(bytes).sum(),
        bytes(named("output.weight").unwrap_or(embedding)),
        bytes(embedding) / rows,
    ]
}

#[track_caller]
fn check_rates(report: &Value, rounds: usize) {
    let all = report["tokens_per_second_rounds"].as_array().unwrap();
    assert_eq!(all.len(), rounds, "{report}");
    let number = |value: &Value| value.as_f64().unwrap();
    let mut numbers: Vec<f64> = all.iter().map(number).collect();
    numbers.extend(
        [
            "tokens_per_second",
            "ram_read_bytes_per_second",
            "ram_fraction",
        ]
        .map(|key| number(&report[key])),
    );
    assert!(
        numbers.iter().all(|n| n.is_finite() && *n > 0.0),
        "{report}"
    );
    let median = number(&report["tokens_per_second"]);
    let rates = &numbers[..rounds];
    assert!(
        rates.iter().any(|rate| *rate <= median) && rates.iter().any(|rate| *rate >= median),
        "{report}"
    );
}

#[test]
fn both_kinds_count_what_they_compute() {
    for model in [tiny("llama.gguf"), tiny("llama-tied.gguf")] {
        let [layers, head, row] = matrices(&model);
        let report = bench(&["decode", "--tokens", "4", "--rounds", "2"], &model);
        for (key, value) in [
            ("kind", Value::from("decode")),
            ("model", Value::from(model.to_str().unwrap())),
            ("device", Value::from("cpu")),
            ("sequences", Value::from(1)),
            ("tokens", Value::from(4)),
            ("depth", Value::from(0)),
            ("steps_per_round", Value::from(4)),
            ("bytes_per_step", Value::from(layers + head + row)),
        ] {
            assert_eq!(report[key], value, "{key} in {report}");
        }
        check_rates(&report, 2);

        let flags = ["decode", "--sequences", "3", "--depth", "50"];
        let more = ["--tokens", "2", "--threads", "1", "--rounds", "3"];
        let report = bench(&[&flags[..], &more].concat(), &model);
        for (key, value) in [
            ("sequences", 3),
            ("tokens", 2),
            ("depth", 50),
            ("threads", 1),
            ("steps_per_round", 2),
            ("bytes_per_step", layers + head + 3 * row),
        ] {
            assert_eq!(report[key], value, "{key} in {report}");
        }
        check_rates(&report, 3);

        // One step, then the same prompt in three.
        let report = bench(&["prompt", "--tokens", "40", "--rounds", "1"], &model);
        assert_eq!(report["kind"], "prompt");
        assert_eq!(report["tokens"], 40);
        assert_eq!(report["steps_per_round"], 1);
        assert_eq!(report["bytes_per_step"], layers + head + 40 * row);
        check_rates(&report, 1);
        let flags = ["prompt", "--tokens", "40", "--step-width", "16"];
        let report = bench(&[&flags[..], &["--rounds", "1"]].concat(), &model);
        assert_eq!(report["steps_per_round"], 3);
        let round = 3 * layers + head + 40 * row;
        assert_eq!(report["bytes_per_step"], round / 3);
    }
}

#[test]
fn every_device_and_placement_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    random(&model, &RandomOptions::default());
    let [layers, head, row] = matrices(&model);
    let flags = ["decode", "--tokens", "3", "--rounds", "1"];
    for (device, more) in [
        ("cpu", &["--copy"][..]),
        ("cpu", &["--kv-type", "f32", "--reader", "pread", "--copy"]),
        ("emulated", &["--device", "emulated"]),
        (
            "emulated",
            &["--device", "emulated", "--executor", "device"],
        ),
    ] {
        let report = bench(&[&flags[..], more].concat(), &model);
        assert_eq!(report["device"], device);
        assert_eq!(report["bytes_per_step"], layers + head + row, "{more:?}");
        check_rates(&report, 1);
    }
}

#[test]
fn the_report_for_people_says_the_same() {
    let model = tiny("llama.gguf");
    let outcome = run(strata()
        .args(["bench", "decode"])
        .arg(&model)
        .args(["--tokens", "2", "--rounds", "1"]));
    let text = outcome.success();
    for part in ["decode, 1 sequence, 2 tokens", "tokens/s", "GB/s", "cpu, "] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(outcome.stderr, "");
}

#[test]
fn what_cannot_be_measured_is_refused_in_one_line() {
    let model = tiny("llama.gguf");
    for (kind, flags, code, parts) in [
        ("decode", &["--context", "63"][..], 2, &["--depth"][..]),
        ("decode", &["--parallel", "2"], 2, &["--sequences"]),
        (
            "decode",
            &["--sequences", "9", "--step-width", "8"],
            2,
            &["9 sequences", "8 tokens wide", "--step-width"],
        ),
        (
            "decode",
            &["--depth", "1048576", "--host-memory", "64MiB"],
            1,
            &["host-memory"],
        ),
        (
            "prompt",
            &["--tokens", "1048576", "--host-memory", "64MiB"],
            1,
            &["host-memory"],
        ),
    ] {
        let outcome = run(strata().args(["bench", kind]).arg(&model).args(flags));
        outcome.refusal(code, parts);
    }
    run(strata().args(["bench", "decode"])).refusal(2, &["MODEL.gguf"]);
    run(strata().args(["bench", "decode", "/nonexistent.gguf"])).refusal(1, &["nonexistent.gguf"]);
    for flags in [
        &["--tokens", "0"][..],
        &["--rounds", "0"],
        &["--sequences", "0"],
        &["--sequences", "1025"],
        &["--depth", "-1"],
        &["--tokens", "1e9"],
    ] {
        let outcome = run(strata().args(["bench", "decode"]).arg(&model).args(flags));
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.stderr);
        assert!(outcome.stderr.contains(flags[0]), "{}", outcome.stderr);
    }
}
