//! Budgets that are too small: the message says what is short and by how much, and doing the first thing that it
//! advises helps.

use super::models::{RandomOptions, random};
use super::process::{Outcome, run, strata};
use std::path::Path;

fn generate(model: &Path, flags: &[String]) -> Outcome {
    run(strata()
        .arg("generate")
        .arg(model)
        .args(["-p", "the hen", "-n", "3", "--log", "error"])
        .args(flags))
}

/// The flags of every advice in the message, first things first.
fn advice(line: &str) -> Vec<Vec<String>> {
    let (_, advice) = line
        .split_once("; try ")
        .unwrap_or_else(|| panic!("no advice in {line}"));
    let flags = |advice: &str| advice.split(' ').map(str::to_owned).collect();
    advice.split(", or ").map(flags).collect()
}

/// The given flags with those of the advice in place of theirs.
fn followed(flags: &[&str], advice: &[String]) -> Vec<String> {
    let mut all: Vec<(String, String)> = flags
        .chunks(2)
        .map(|pair| (pair[0].to_owned(), pair[1].to_owned()))
        .collect();
    for pair in advice.chunks(2) {
        all.retain(|(flag, _)| *flag != pair[0]);
        all.push((pair[0].clone(), pair[1].clone()));
    }
    all.into_iter()
        .flat_map(|(flag, value)| [flag, value])
        .collect()
}

#[test]
fn following_the_advice_of_a_refusal_helps() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    random(
        &model,
        &RandomOptions {
            layers: 3,
            width: 128,
            ffn: 256,
            context: 1 << 20,
            ..RandomOptions::default()
        },
    );
    for (flags, parts) in [
        (
            &["--host-memory", "4096"][..],
            &["host memory is short"][..],
        ),
        (
            &["--host-memory", "2MiB", "--context", "100000"],
            &["host memory is short", "--context"],
        ),
        (
            &[
                "--host-memory",
                "8MiB",
                "--context",
                "1024",
                "--parallel",
                "500",
            ],
            &["host memory is short", "--parallel"],
        ),
        (
            &[
                "--device",
                "emulated",
                "--device-memory",
                "4096",
                "--host-memory",
                "4096",
            ],
            &["device memory is short", "host memory is short"],
        ),
        (
            &[
                "--device",
                "emulated",
                "--device-memory",
                "64KiB",
                "--host-memory",
                "1GiB",
            ],
            &["device memory is short"],
        ),
        (
            &[
                "--device",
                "emulated",
                "--device-memory",
                "1GiB",
                "--host-memory",
                "4096",
            ],
            &["host memory is short"],
        ),
        (
            &[
                "--host-memory",
                "1MiB",
                "--ring-entries",
                "256",
                "--slice",
                "4GiB",
            ],
            &["host memory is short"],
        ),
        (
            &["--host-memory", "1MiB", "--step-width", "8192"],
            &["host memory is short", "scratch"],
        ),
    ] {
        let given: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        let outcome = generate(&model, &given);
        let line = outcome.refusal(1, parts);
        assert!(
            line.contains("short by") && line.contains(" bytes)"),
            "{line}"
        );
        let advised = advice(line);
        assert!(!advised.is_empty());
        for advice in advised {
            let flags = followed(flags, &advice);
            let outcome = generate(&model, &flags);
            assert!(outcome.status.success(), "{flags:?}: {}", outcome.stderr);
        }
    }
}

/// A budget may be larger than the machine, to try plans for another one; what a plan takes here may not.
#[test]
fn a_plan_larger_than_the_machine_is_not_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    random(&model, &RandomOptions::default());
    let flags = [
        "--host-memory",
        "1000TiB",
        "--context",
        "16777216",
        "--parallel",
        "1024",
    ];
    let flags = flags.map(str::to_owned);
    generate(&model, &flags).refusal(2, &["this machine has", "--host-memory"]);
    run(strata().arg("plan").arg(&model).args(&flags)).success();
    let modest = ["--host-memory", "1000TiB"].map(str::to_owned);
    generate(&model, &modest).success();
}
