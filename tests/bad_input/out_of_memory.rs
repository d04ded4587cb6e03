//! Memory that the system refuses: one line says while doing what, how much, the likeliest cause and what to try first,
//! whichever call is the one that is refused.

use super::models::{RandomOptions, random};
use super::process::{Outcome, run, strata};
use std::path::Path;
use std::process::Command;
use strata::gguf::Value;

/// `strata generate` with so many KiB of addresses.
fn generate(kibibytes: u64, model: &Path, flags: &[&str]) -> Outcome {
    let mut generate = strata();
    generate.arg("generate").arg(model).args(flags);
    generate.args([
        "-p",
        "the hen",
        "-n",
        "2",
        "--threads",
        "1",
        "--log",
        "error",
    ]);
    let limit = format!("ulimit -v {kibibytes}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limit]).arg(generate.get_program());
    run(command.args(generate.get_args()))
}

#[test]
fn an_arena_that_the_system_refuses_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    random(&model, &RandomOptions::default());
    // 2 GiB of pages for keys and values, and 1 GiB of addresses.
    let flags = ["--device", "cpu", "--context", "1048576", "--parallel", "8"];
    let outcome = generate(1 << 20, &model, &flags);
    outcome.refusal(
        1,
        &[
            "load the model",
            "host arena",
            "bytes",
            "most likely",
            "ulimit -v",
            "first give a smaller --host-memory",
        ],
    );
}

/// Names the phase, the bytes, the cause and what to do, before the message of the runtime that ends the process.
#[test]
fn a_heap_that_the_system_refuses_is_told_before_the_process_ends() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    // The index takes more and more of the heap, so that this is what runs into most limits.
    let words: Vec<String> = (0..400_000).map(|word| format!("word {word}")).collect();
    let options = RandomOptions {
        metadata: vec![("test.words".to_owned(), Value::from(words))],
        ..RandomOptions::default()
    };
    random(&model, &options);
    let mut told = 0;
    for mebibytes in 14..30 {
        let outcome = generate(mebibytes << 10, &model, &["--device", "cpu"]);
        let text = &outcome.stderr;
        let Some((before, _)) = text.split_once("memory allocation of") else {
            continue;
        };
        told += 1;
        assert!(!outcome.status.success(), "{text}");
        for part in [
            "strata: out of memory while starting: the system refused ",
            " bytes; most likely ",
            "; first raise that limit",
        ] {
            assert!(before.contains(part), "{mebibytes} MiB: {text}");
        }
    }
    assert!(told > 0, "no limit met the heap");
}
