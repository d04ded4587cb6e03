//! Whatever is wrong with what people give it, the program says so in one line that tells what to do, with an exit code
//! that is not 0, and never panics or hangs.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/http.rs"]
mod http;
#[path = "../support/models.rs"]
mod models;
#[path = "../support/process.rs"]
mod process;
#[path = "../support/split.rs"]
mod split;

mod budgets;
mod files;
mod headers;
mod models_that_do_not_add_up;
mod out_of_memory;
mod output;
mod settings;
mod shards;

use models::{RandomOptions, random};
use process::{Outcome, run, strata};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A folder with a good model in it.
fn good_model() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("good.gguf");
    random(&path, &RandomOptions::default());
    (folder, path)
}

/// A card of a file of a few megabytes.
const CARD: &str = r#"
name = "Small"
architecture = "llama"
layers = 2
embedding_length = 64
feed_forward_length = 96
head_count = 4
head_count_kv = 2
vocabulary_size = 1000
context_length = 128
rms_epsilon = 1e-5
tied_head = true
quantisation = "f32"

[rope]
base = 10000.0
"#;

fn with(arguments: &[&OsStr]) -> Outcome {
    run(strata().args(arguments))
}

/// What every command that reads a model says of `path`.
fn every_command(path: &Path) -> Vec<Outcome> {
    let folder = tempfile::tempdir().unwrap();
    let card = folder.path().join("card.toml");
    std::fs::write(&card, CARD).unwrap();
    let output = folder.path().join("out.gguf");
    let path = path.as_os_str();
    let text = |text: &'static str| OsStr::new(text);
    let outcomes = vec![
        with(&[text("inspect"), path]),
        with(&[text("plan"), path]),
        with(&[text("plan"), path, text("--json")]),
        with(&[
            text("synth"),
            card.as_os_str(),
            output.as_os_str(),
            text("--vocabulary"),
            path,
        ]),
        generate(path),
        serve(path),
    ];
    let synthesised = outcomes[3].status.success();
    assert_eq!(output.exists(), synthesised, "{:?}", outcomes[3]);
    outcomes
}

fn generate(path: impl AsRef<OsStr>) -> Outcome {
    let arguments = ["-p", "the", "-n", "2", "--log", "error"];
    run(strata().arg("generate").arg(path).args(arguments))
}

fn serve(path: impl AsRef<OsStr>) -> Outcome {
    let arguments = ["--listen", "127.0.0.1:0", "--log", "error"];
    run(strata().arg("serve").arg(path).args(arguments))
}
