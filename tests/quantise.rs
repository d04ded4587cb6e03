//! `strata quantise` leaves a whole file or none, in little memory; `strata estimate` says what a model would take.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod http;
#[path = "support/models.rs"]
mod models;
#[path = "support/process.rs"]
mod process;
#[path = "support/split.rs"]
mod split;

use models::{RandomOptions, random};
use process::{Guard, Outcome, run, strata};
use split::{Dealt, split};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use strata::gguf::card::ShapeCard;
use strata::gguf::{Destination, Gguf, TensorType};
use strata::synth::synthesise;
use tempfile::TempDir;

/// A model of rows of whole large blocks.
fn small(folder: &Path, kind: TensorType) -> PathBuf {
    let path = folder.join("in.gguf");
    let options = RandomOptions {
        width: 256,
        ffn: 512,
        kind,
        ..RandomOptions::default()
    };
    random(&path, &options);
    path
}

/// 128 MiB of F32, which take a while.
fn large(folder: &Path) -> PathBuf {
    let card = "name = 'large'\narchitecture = 'llama'\nlayers = 2\nembedding_length = 1024\nfeed_forward_length = 4096\n\
        head_count = 8\nhead_count_kv = 8\nvocabulary_size = 512\ncontext_length = 512\nrms_epsilon = 1e-5\ntied_head = true\n\
        quantisation = 'f32'\n[rope]\nbase = 10000.0\n";
    let path = folder.join("in.gguf");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let vocabulary = Gguf::open(&root.join("tests/data/tiny/llama.gguf")).unwrap();
    let card = ShapeCard::parse(card).unwrap();
    synthesise(&card, &vocabulary, Destination::new(&path), 1, |_, _| true).unwrap();
    path
}

fn quantise(input: &Path, output: &Path, more: &[&str]) -> Command {
    let mut command = strata();
    command.arg("quantise").args([input, output]).args(more);
    command
}

fn folder() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_written_is_a_model_that_answers() {
    let folder = folder();
    let input = small(folder.path(), TensorType::F16);
    let output = folder.path().join("out.gguf");
    for (name, kind) in [
        ("q4_k_m", TensorType::Q4K),
        ("Q8_0", TensorType::Q8_0),
        ("q5_k", TensorType::Q5K),
        ("bf16", TensorType::BF16),
    ] {
        let done = run(&mut quantise(&input, &output, &["--type", name, "--force"]));
        done.success();
        assert!(done.stderr.contains("strata: wrote"), "{}", done.stderr);
        let after = Gguf::open(&output).unwrap();
        assert_eq!(after.tensor("blk.0.attn_q.weight").unwrap().1.kind, kind);
        let mut generate = strata();
        generate.arg("generate").arg(&output);
        run(generate.args(["-p", "the", "-n", "2", "--log", "error"])).success();
    }
    let again = folder.path().join("again.gguf");
    let mut american = strata();
    american.arg("quantize").args([&output, &again]);
    run(american.args(["--type", "q4_0"])).success();
    assert_eq!(
        names_in(folder.path()),
        ["again.gguf", "in.gguf", "out.gguf"]
    );
}

/// Shards are read as the file that they were.
#[test]
fn a_model_in_several_files_becomes_one() {
    let folder = folder();
    let input = small(folder.path(), TensorType::F16);
    let (whole, joined) = (
        folder.path().join("whole.gguf"),
        folder.path().join("joined.gguf"),
    );
    run(&mut quantise(&input, &whole, &["--type", "q4_k_m"])).success();
    for shard in split(&input, 3, Dealt::InRuns) {
        run(&mut quantise(
            &shard,
            &joined,
            &["--type", "q4_k_m", "--force"],
        ))
        .success();
        assert!(std::fs::read(&whole).unwrap() == std::fs::read(&joined).unwrap());
        let onto_another = input.with_file_name("in-00002-of-00003.gguf");
        let refused = run(&mut quantise(
            &shard,
            &onto_another,
            &["--type", "q8_0", "--force"],
        ));
        assert_eq!(refused.status.code(), Some(2), "{}", refused.stderr);
        assert!(
            refused.stderr.contains("input itself"),
            "{}",
            refused.stderr
        );
    }
}

#[test]
fn a_second_loss_is_warned_of() {
    let folder = folder();
    let input = small(folder.path(), TensorType::Q8_0);
    let output = folder.path().join("out.gguf");
    let done = run(&mut quantise(&input, &output, &["--type", "q4_0"]));
    done.success();
    assert!(
        done.stderr.contains("are quantised already"),
        "{}",
        done.stderr
    );
}

#[test]
fn what_would_be_lost_is_not_written_over() {
    let folder = folder();
    let input = small(folder.path(), TensorType::F16);
    let before = std::fs::read(&input).unwrap();
    let at = |name: &str| folder.path().join(name);
    let refused = |output: &Path, more: &[&str], parts: &[&str]| {
        let outcome = run(&mut quantise(&input, output, more));
        outcome.refusal(2, parts);
    };
    refused(
        &input,
        &["--type", "q8_0", "--force"],
        &["is the input itself"],
    );
    std::os::unix::fs::symlink("in.gguf", at("link.gguf")).unwrap();
    refused(
        &at("link.gguf"),
        &["--type", "q8_0", "--force"],
        &["is the input itself"],
    );
    std::fs::hard_link(&input, at("hard.gguf")).unwrap();
    refused(
        &at("hard.gguf"),
        &["--type", "q8_0", "--force"],
        &["is the input itself"],
    );
    std::fs::hard_link(&input, at("name.gguf.partial")).unwrap();
    refused(
        &at("name.gguf"),
        &["--type", "q8_0"],
        &["name.gguf.partial first, which is the input"],
    );
    std::fs::write(at("there.gguf"), "old").unwrap();
    refused(
        &at("there.gguf"),
        &["--type", "q8_0"],
        &["there.gguf is there already", "--force"],
    );
    refused(
        &at("new.gguf"),
        &["--type", "q9\n"],
        &["`q9\\n` is not known", "q4_k_m"],
    );
    assert_eq!(std::fs::read(at("there.gguf")).unwrap(), b"old");
    assert!(!at("new.gguf").exists());

    let failed = |input: &Path, output: &Path, parts: &[&str]| {
        let outcome = run(&mut quantise(input, output, &["--type", "q8_0"]));
        outcome.refusal(1, parts);
    };
    failed(
        &at("absent.gguf"),
        &at("new.gguf"),
        &["absent.gguf", "No such file"],
    );
    failed(
        &input,
        &at("absent/new.gguf"),
        &["cannot write", "No such file"],
    );
    failed(&input, Path::new("/dev/null"), &["a directory or a device"]);
    std::fs::write(at("cut.gguf"), &before[..before.len() - 100]).unwrap();
    failed(
        &at("cut.gguf"),
        &at("new.gguf"),
        &["cut.gguf", "past the end of the file"],
    );
    assert!(!at("new.gguf").exists());
    assert!(std::fs::read(&input).unwrap() == before);
}

/// How a run ends that gets a signal while it writes. One whose file has its name before the signal comes does not count.
fn signalled(input: &Path, output: &Path, signal: &str) -> ExitStatus {
    for _ in 0..20 {
        let mut child = started(input, output);
        let id = child.0.id().to_string();
        let sent = Command::new("kill").args(["-s", signal, &id]).status();
        assert!(sent.unwrap().success());
        let status = child.wait();
        if !output.exists() {
            return status;
        }
        Gguf::open(output).unwrap();
        std::fs::remove_file(output).unwrap();
    }
    panic!("{signal} stops no run before its file has its name");
}

/// Starts a run that takes a while and waits until it writes.
fn started(input: &Path, output: &Path) -> Guard {
    let mut command = quantise(input, output, &["--type", "q4_k_m", "--threads", "1"]);
    let child = Guard(command.stderr(Stdio::null()).spawn().unwrap());
    let partial = output.with_file_name("out.gguf.partial");
    let began = Instant::now();
    // Of one that has its name by now nothing partial is left.
    while !std::fs::metadata(&partial).is_ok_and(|file| file.len() > 0) && !output.exists() {
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "nothing is written"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

#[test]
fn what_is_killed_or_interrupted_leaves_no_half_file() {
    let folder = folder();
    let input = large(folder.path());
    let output = folder.path().join("out.gguf");
    for signal in ["INT", "TERM"] {
        let status = signalled(&input, &output, signal);
        assert_eq!(status.code(), Some(1), "{signal}");
        assert_eq!(names_in(folder.path()), ["in.gguf"], "{signal}");
    }
    let status = signalled(&input, &output, "KILL");
    assert_eq!(status.code(), None);
    // Nobody could remove what it had written so far; the next run writes over it.
    assert_eq!(names_in(folder.path()), ["in.gguf", "out.gguf.partial"]);

    let mut child = Guard(
        quantise(&input, &output, &["--type", "q8_0", "--threads", "2"])
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let mut peak = 0;
    let status = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status;
        }
        let path = format!("/proc/{}/status", child.0.id());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0));
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success());
    assert_eq!(names_in(folder.path()), ["in.gguf", "out.gguf"]);
    // 16 MiB for each of two threads, and the program.
    assert!(
        (1..64 << 10).contains(&peak),
        "{peak} KiB for a file of 128 MiB"
    );
}

#[test]
fn without_space_nothing_is_left() {
    let folder = folder();
    let input = small(folder.path(), TensorType::F16);
    let output = folder.path().join("out.gguf");
    // Blocks of 512 or 1024 bytes: less than the file takes, by either.
    let script = "ulimit -f 64; exec \"$0\" quantise \"$1\" \"$2\" --type f32";
    let mut limited = Command::new("sh");
    limited
        .arg("-c")
        .arg(script)
        .arg(env!("CARGO_BIN_EXE_strata"));
    let outcome = run(limited.args([&input, &output]));
    outcome.refusal(
        1,
        &["cannot write", "out.gguf", "File too large", "ulimit -f"],
    );
    assert_eq!(names_in(folder.path()), ["in.gguf"]);
}

fn estimate(arguments: &[&str]) -> Outcome {
    run(strata().arg("estimate").args(arguments))
}

#[test]
fn an_estimate_is_there_before_the_model_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let card = |name: &str| {
        root.join("models")
            .join(name)
            .into_os_string()
            .into_string()
            .unwrap()
    };
    let mlp = card("mlp-example.toml");
    let outcome = estimate(&[&mlp, "--training", "--batch", "64"]);
    let text = outcome.success();
    for part in [
        "1,075,208",
        "17,203,328",
        "528,384",
        "8 P (m and v, in fp32)",
    ] {
        assert!(text.contains(part), "{text}");
    }
    let outcome = estimate(&[&mlp, "--training", "--batch", "64", "--json"]);
    let json: serde_json::Value = serde_json::from_str(outcome.success()).unwrap();
    assert_eq!(json["training"]["state_bytes"], 17_203_328);
    assert_eq!(json["training"]["saved_inputs"]["bytes"], 528_384);
    assert_eq!(json["training"]["techniques"].as_array().unwrap().len(), 7);

    let llama = card("llama-3.1-8b.toml");
    let machine = [
        "--device",
        "cpu",
        "--host-memory",
        "4GiB",
        "--parallel",
        "1",
    ];
    let outcome = estimate(&[&[llama.as_str()], machine.as_slice()].concat());
    let text = outcome.success();
    for part in ["q4_k_m", "131,072 bytes a token", "a step reads", "storage"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // What it takes is said where no plan fits, too.
    let outcome = estimate(&[&llama, "--device", "cpu", "--host-memory", "64MiB"]);
    assert_eq!(outcome.status.code(), Some(1), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("q4_k_m"), "{}", outcome.stdout);
    assert!(outcome.stderr.contains("host"), "{}", outcome.stderr);

    let folder = folder();
    let model = small(folder.path(), TensorType::F16);
    let outcome = run(strata().args([OsStr::new("estimate"), model.as_os_str()]));
    assert!(outcome.success().contains("weights by quantisation"));
    estimate(&[&mlp, "--training", "--pipeline", "9"]).refusal(2, &["--pipeline is 9"]);
    let hostile = folder.path().join("card.toml");
    std::fs::write(&hostile, "[mlp]\nlayers = [4, 0]\n").unwrap();
    let outcome = run(strata().args([OsStr::new("estimate"), hostile.as_os_str()]));
    outcome.refusal(1, &["card.toml", "`mlp.layers[1]` is 0"]);
}
