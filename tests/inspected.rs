//! `docs/inspect.md` holds what `strata inspect` prints of files that people can have, and this holds the document.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod http;
#[path = "support/models.rs"]
mod models;
#[path = "support/process.rs"]
mod process;
#[path = "support/run.rs"]
mod running;
#[path = "support/split.rs"]
mod split;

use models::{RandomOptions, random};
use process::{run, strata};
use running::smollm2;
use serde_json::Value;
use split::{Dealt, split};
use std::path::{Path, PathBuf};

const DOCUMENT: &str = "docs/inspect.md";
/// Set to write the document anew.
const WRITE: &str = "STRATA_WRITE_INSPECT";

/// Fetched, and not part of the repository.
const FETCHED: &str = "models/SmolLM2-135M-Instruct.Q4_1.gguf";
/// What stands in the document behind the models of the tests.
const AFTER_TINY: &str = "## SmolLM2 135M\n";

/// The models of the tests, by the path that the document shows.
fn tiny() -> Vec<String> {
    let names = std::fs::read_dir(root("tests/data/tiny")).unwrap();
    let mut paths: Vec<String> = names
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".gguf"))
        .map(|name| format!("tests/data/tiny/{name}"))
        .collect();
    paths.sort();
    paths
}

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn inspect(arguments: &[&str], path: &Path) -> String {
    let mut command = strata();
    command.arg("inspect").arg(path).args(arguments);
    run(&mut command).success().to_owned()
}

/// A part of the document: the command and what it prints.
fn section(path: &str, output: &str) -> String {
    format!("```console\n$ strata inspect {path}\n{output}```\n")
}

/// Where the document shows this file.
fn place(document: &str, path: &str) -> Option<std::ops::Range<usize>> {
    const END: &str = "\n```\n";
    let start = document.find(&format!("```console\n$ strata inspect {path}\n"))?;
    let length = document[start..].find(END)? + END.len();
    Some(start..start + length)
}

#[test]
fn the_document_shows_what_the_command_prints() {
    let document = root(DOCUMENT);
    let mut text = std::fs::read_to_string(&document).unwrap();
    let writes = std::env::var_os(WRITE).is_some();
    let of_tiny = tiny().into_iter().map(|path| (root(&path), path));
    let fetched = (smollm2(), FETCHED.to_owned());
    for (file, path) in of_tiny.chain([fetched]) {
        let path = path.as_str();
        let wanted = section(path, &inspect(&[], &file));
        match place(&text, path) {
            Some(place) if writes => text.replace_range(place, &wanted),
            None if writes => {
                let at = text.find(AFTER_TINY).unwrap();
                text.insert_str(at, &format!("{wanted}\n"));
            }
            shown => assert_eq!(
                shown.map(|place| &text[place]),
                Some(wanted.as_str()),
                "{DOCUMENT}; where that is meant, run this test once with {WRITE}=1"
            ),
        }
    }
    if writes {
        std::fs::write(&document, text).unwrap();
    }
}

#[test]
fn the_files_of_a_split_model_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    random(&path, &RandomOptions::default());
    let paths = split(&path, 3, Dealt::InTurn);
    let text = inspect(&["--tensors", "--metadata"], &paths[1]);
    for part in [
        "files             3\n  model-00001-of-00003.gguf  ",
        "\n  model-00003-of-00003.gguf  ",
        "split.tensors.count = 21",
        "of file 1\n",
        "of file 3\n",
    ] {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
    let json: Value = serde_json::from_str(&inspect(&["--json"], &paths[1])).unwrap();
    let files = json["files"].as_array().unwrap();
    assert_eq!(files.len(), 3);
    for (file, path) in files.iter().zip(&paths) {
        assert_eq!(file["path"], path.to_str().unwrap());
        assert_eq!(file["bytes"], std::fs::metadata(path).unwrap().len());
    }
}

/// The text of the row `served`, and the same as JSON.
fn served(path: &Path) -> (String, Value) {
    let text = inspect(&[], path);
    let line = text.lines().find(|line| line.starts_with("served "));
    let json: Value = serde_json::from_str(&inspect(&["--json"], path)).unwrap();
    (line.unwrap().to_owned(), json["served"].clone())
}

#[test]
fn what_cannot_be_served_is_shown_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let cases: [(&str, Value, &str); 3] = [
        ("general.architecture", "gpt-j".into(), "`gpt-j`"),
        ("tokenizer.ggml.model", "rwkv".into(), "rwkv"),
        ("llama.rope.scaling.type", "nonsense".into(), "`nonsense`"),
    ];
    for (key, value, reason) in cases {
        let text = value.as_str().unwrap();
        let options = RandomOptions {
            metadata: vec![(key.to_owned(), text.into())],
            ..RandomOptions::default()
        };
        random(&path, &options);
        let (line, json) = served(&path);
        assert!(line.starts_with("served            no: "), "{line}");
        assert!(line.contains(reason), "{line}");
        assert_eq!(json["cpu"], false);
        assert!(json["problem"].as_str().unwrap().contains(reason));
    }

    // A type that nothing computes with: 20 is IQ4_NL, in which a row of 64 takes 36 bytes.
    random(&path, &RandomOptions::default());
    let mut bytes = std::fs::read(&path).unwrap();
    let name = b"blk.0.attn_q.weight";
    let at = bytes.windows(name.len()).position(|window| window == name);
    let code = at.unwrap() + name.len() + 4 + 16;
    bytes[code..code + 4].copy_from_slice(&20u32.to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    let (line, json) = served(&path);
    assert!(
        line.contains("no: tensor `blk.0.attn_q.weight`: type IQ4_NL"),
        "{line}"
    );
    assert_eq!(json["gpu"], false);
    let text = inspect(&["--tensors"], &path);
    assert!(text.contains("(not supported)"), "{text}");
    let row = text
        .lines()
        .find(|line| line.contains("blk.0.attn_q.weight   "));
    assert!(row.unwrap().contains("IQ4_NL [64, 64]"), "{row:?}");

    random(&path, &RandomOptions::default());
    let (line, json) = served(&path);
    assert!(
        line.starts_with("served            yes, on a CPU"),
        "{line}"
    );
    assert_eq!(json["cpu"], true);
}
