//! `--trace`: what a step does, as a file in Chrome's trace event format, under several placements and however it ends.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod client;
#[path = "support/program.rs"]
mod program;
#[path = "support/trace.rs"]
mod trace;

use program::{Program, eventually, post, wait_until_ready};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;
use trace::{Trace, Way, parse, read_complete};

const TOKENS: usize = 6;

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama.gguf")
}

fn place() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    (folder, path)
}

fn serve(path: &Path, flags: &str) -> Program {
    let common = "--context 64 --parallel 1 --step-width 8 --slice 64KiB --ring-entries 2";
    let mut all: Vec<&str> = common.split(' ').chain(flags.split(' ')).collect();
    all.extend(["--trace", path.to_str().unwrap()]);
    Program::serve(&model(), &all)
}

fn ask(program: &mut Program) {
    let address = program.address();
    wait_until_ready(address);
    let body = json!({"prompt": [5, 70, 200, 260, 9, 131, 77, 8, 14, 21, 3], "max_tokens": TOKENS, "temperature": 0});
    post(address, "/v1/completions", &body).ok();
}

/// Serves, asks, and ends as an operator would.
fn traced(flags: &str) -> Trace {
    let (_folder, path) = place();
    let mut program = serve(&path, flags);
    ask(&mut program);
    program.terminate();
    assert_eq!(program.wait().code(), Some(0));
    read_complete(&path)
}

#[test]
fn three_tiers_on_the_emulated_device() {
    let trace = traced(
        "--device emulated --device-memory 320KiB --host-memory 224KiB --executor device --link-rate 200MB/s",
    );
    let ways = trace.check(0);
    for way in [Way::ReadAndCopied, Way::Copied, Way::Resident] {
        assert!(ways.count("device", way) > 0, "{way:?}: {ways:?}");
    }
    // Two steps of the prompt, and one for each token but the first.
    let widths: Vec<u64> = trace
        .of("step")
        .iter()
        .map(|step| step.arguments["width"].as_u64().unwrap())
        .collect();
    assert_eq!(widths.iter().sum::<u64>(), 11 + TOKENS as u64 - 1);
    assert_eq!(widths[0], 8);
    // The link is slow: computation waits, for groups that are named.
    let waits = trace.of("wait");
    assert!(!waits.is_empty());
    assert!(waits.iter().all(|wait| wait.name.starts_with("wait for ")));
    for name in ["layer 0 attention", "layer 1 feed-forward", "output head"] {
        let computations = trace.of("computation");
        assert!(computations.iter().any(|span| span.name == name), "{name}");
    }
    // 49664 bytes at 200 MB/s take 248 us; less is left where the thread that copies was woken late.
    let copies = trace.of("copy");
    let longest = copies.iter().map(|span| span.ended - span.began).max();
    assert!(longest > Some(200_000), "{copies:?}");
}

#[test]
fn both_executors_on_the_emulated_device() {
    let ways =
        traced("--device emulated --device-memory 160KiB --host-memory 320KiB --executor host")
            .check(0);
    assert!(ways.count("device", Way::Resident) > 0, "{ways:?}");
    assert!(ways.count("CPU", Way::Resident) > 0, "{ways:?}");
    assert!(ways.count("CPU", Way::Read) > 0, "{ways:?}");
}

#[test]
fn the_cpu_with_weights_on_storage_and_with_a_mapped_file() {
    let ways = traced("--device cpu --host-memory 288KiB --copy").check(0);
    assert!(ways.count("CPU", Way::Read) > 0, "{ways:?}");
    let ways = traced("--device cpu --host-memory 64MiB").check(0);
    assert!(ways.count("CPU", Way::Resident) > 3, "{ways:?}");
}

#[test]
fn a_killed_server_leaves_what_viewers_open() {
    let (_folder, path) = place();
    let mut program = serve(&path, "--device cpu --host-memory 288KiB --copy");
    ask(&mut program);
    let text = || std::fs::read_to_string(&path).unwrap();
    eventually("the steps are in the file", || {
        parse(&text()).of("step").len() >= TOKENS
    });
    drop(program);
    assert!(!text().ends_with("]\n"));
    parse(&text()).check(0);
}

#[test]
fn generate_and_bench_trace_too() {
    for command in [
        &["generate", "-p", "hello", "-n", "4"][..],
        &["bench", "decode", "--tokens", "2", "--rounds", "1"],
    ] {
        let (_folder, path) = place();
        let output = Command::new(env!("CARGO_BIN_EXE_strata"))
            .args(command)
            .arg(model())
            .args(["--device", "cpu", "--host-memory", "64MiB"])
            .env("STRATA_TRACE", &path)
            .env("STRATA_RATES", "none")
            .env("STRATA_CHECKSUM_DIRECTORY", "none")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(output.status.success(), "{command:?}: {output:?}");
        let ways = read_complete(&path).check(0);
        assert!(ways.count("CPU", Way::Resident) > 3, "{ways:?}");
    }
}

#[test]
fn a_file_that_cannot_be_a_trace_is_refused_at_the_start() {
    let (folder, path) = place();
    std::fs::write(&path, "precious").unwrap();
    let nowhere = folder.path().join("no/where.json");
    for (path, code, part) in [
        (path.as_path(), 2, "is not a trace"),
        (&nowhere, 1, "No such file"),
        (folder.path(), 1, "Is a directory"),
        (Path::new("/dev/full"), 1, "No space left"),
    ] {
        let mut program = serve(path, "--device cpu --log error");
        assert_eq!(program.wait().code(), Some(code), "{}", path.display());
        let log = program.whole_log();
        assert_eq!(log.lines().count(), 1, "{log}");
        assert!(
            log.starts_with("strata: ") && log.contains(part) && log.contains("trace"),
            "{log}"
        );
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

/// A pipe that nobody reads stands for a disk: it takes 64 KiB, and no more.
#[test]
fn a_disk_that_fills_up_ends_the_trace_and_not_the_server() {
    let (_folder, path) = place();
    let made = Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(made.success());
    let mut program = serve(&path, "--device cpu --host-memory 64MiB");
    let address = program.address();
    wait_until_ready(address);
    let ask = || {
        let body = json!({"prompt": [5, 70, 200], "max_tokens": 40, "temperature": 0});
        post(address, "/v1/completions", &body).ok()
    };
    let first = ask();
    let warning = program.line_with("tracing stops");
    assert!(
        warning.contains("WARN") && warning.contains("trace.json"),
        "{warning}"
    );
    assert_eq!(ask()["choices"], first["choices"]);
    program.terminate();
    assert_eq!(program.wait().code(), Some(0));
}
