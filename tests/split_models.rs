//! A model in several files is the same model: the same bits under every plan, whichever shard is given, and the same care
//! for each of its files while it is served.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/faults.rs"]
mod faults;
#[path = "support/flip.rs"]
mod flip;
#[path = "support/http.rs"]
mod http;
#[path = "support/models.rs"]
mod models;
#[path = "support/process.rs"]
mod process;
#[path = "support/run.rs"]
mod run;
#[path = "support/split.rs"]
mod split;

use faults::{load as load_faulty, placements, step};
use flip::flip;
use models::{RandomOptions, random};
use process::{LOG_PATIENCE, Server, strata};
use run::{Sequence, all_resident, load, settings};
use split::{Dealt, split};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use strata::gguf::Gguf;
use strata::memory::{Faults, ReaderChoice};
use strata::model::{PlannedModel, StepError};
use strata::placement::{PlanRequest, Tier};
use strata::weights::WeightsSettings;
use tempfile::TempDir;

const PROMPT: &str = "the hen on the other hand";

/// The bits of the logits after a prompt and after one token more.
fn bits(path: &Path, request: &PlanRequest, settings: WeightsSettings) -> Vec<u32> {
    let mut loaded = load(path, request, settings);
    let mut sequence = Sequence::new(0, 2);
    let mut logits = sequence.step(&mut loaded, &[5, 70, 200, 9, 131]);
    logits.extend(sequence.step(&mut loaded, &[77]));
    logits.iter().map(|logit| logit.to_bits()).collect()
}

#[test]
fn every_tiny_model_gives_the_same_bits_mapped_and_copied_by_each_reader() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny");
    for name in [
        "llama",
        "llama-tied",
        "llama-rope-factors",
        "llama-rope-linear",
    ] {
        let whole = folder.path().join(format!("{name}.gguf"));
        std::fs::copy(tiny.join(format!("{name}.gguf")), &whole).unwrap();
        let mapped = PlanRequest {
            context: 64,
            ..all_resident()
        };
        let copied = PlanRequest {
            map_file: false,
            ..mapped.clone()
        };
        let expected = bits(&whole, &mapped, settings());
        for (shards, dealt) in [
            (2, Dealt::InRuns),
            (3, Dealt::InTurn),
            (3, Dealt::NoneToTheFirst),
        ] {
            let paths = split(&whole, shards, dealt);
            let planned = PlannedModel::open(&paths[0], &mapped).unwrap();
            assert!(planned.plan.mapped);
            assert_eq!(planned.gguf.files.len(), shards);
            for path in &paths {
                assert!(
                    bits(path, &mapped, settings()) == expected,
                    "{name}, {dealt:?}"
                );
            }
            for reader in [ReaderChoice::Auto, ReaderChoice::Pread] {
                let settings = WeightsSettings {
                    reader,
                    ..settings()
                };
                let ours = bits(&paths[1], &copied, settings);
                assert!(ours == expected, "{name}, {dealt:?}, {reader:?}");
            }
        }
    }
}

#[test]
fn streamed_from_several_files_the_bits_are_the_same() {
    let (_folder, whole) = faults::model();
    let mut resident = load(&whole, &all_resident(), settings());
    let expected = step(&mut resident, &|| false).unwrap();
    for dealt in Dealt::ALL {
        let paths = split(&whole, 3, dealt);
        for (name, request) in placements() {
            for reader in [ReaderChoice::Auto, ReaderChoice::Pread] {
                let planned = PlannedModel::open(&paths[2], &request).unwrap();
                assert!(planned.plan.weight_home_bytes(Tier::Storage) > 0, "{name}");
                let settings = WeightsSettings {
                    reader,
                    ..settings()
                };
                let mut loaded = load(&paths[2], &request, settings);
                for _ in 0..2 {
                    let ours = step(&mut loaded, &|| false).unwrap();
                    assert!(ours == expected, "{dealt:?}, {name}, {reader:?}");
                }
            }
        }
    }
}

/// Most of them have no tensor. Each is an open file, and with direct reads opened twice.
#[test]
fn a_model_in_the_most_files_that_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama.gguf");
    let whole = folder.path().join("whole.gguf");
    std::fs::copy(tiny, &whole).unwrap();
    let paths = split(&whole, 256, Dealt::InTurn);
    let mapped = PlanRequest {
        context: 64,
        ..all_resident()
    };
    let copied = PlanRequest {
        map_file: false,
        ..mapped.clone()
    };
    let expected = bits(&whole, &mapped, settings());
    assert!(bits(&paths[255], &mapped, settings()) == expected);
    for reader in [ReaderChoice::Auto, ReaderChoice::Pread] {
        let settings = WeightsSettings {
            reader,
            ..settings()
        };
        assert!(bits(&paths[3], &copied, settings) == expected, "{reader:?}");
    }
}

/// Wherever the drive fails or returns a wrong bit, the error is that of the file, at its own offset; afterwards the model
/// computes.
#[test]
fn faults_are_those_of_a_shard() {
    let (_folder, whole) = faults::model();
    let mut resident = load(&whole, &all_resident(), settings());
    let expected = step(&mut resident, &|| false).unwrap();
    let paths = split(&whole, 3, Dealt::InTurn);
    let index = Gguf::open(&paths[0]).unwrap();
    let (_, request) = placements().pop().unwrap();
    let mut faulty = load_faulty(&paths[0], &request, 4, settings());
    // One step records checksums of everything that streams.
    assert!(step(&mut faulty.loaded, &|| false).unwrap() == expected);
    let mut failures = [0; 3];
    for tensor in &index.tensors {
        let file = index
            .files
            .iter()
            .rposition(|file| file.base <= tensor.file_offset);
        let file = file.unwrap();
        let offset = tensor.file_offset + tensor.bytes / 2;
        for faults in [
            Faults {
                broken: vec![offset],
                ..Faults::default()
            },
            Faults {
                flipped: vec![offset],
                ..Faults::default()
            },
        ] {
            faulty.control.set(faults);
            // What was read ahead may serve the first.
            let failed = (0..3).find_map(|_| step(&mut faulty.loaded, &|| false).err());
            faulty.control.set(Faults::default());
            if let Some(failed) = failed {
                failures[file] += 1;
                let StepError::Weights(message) = failed else {
                    panic!("{failed:?}");
                };
                let name = paths[file].file_name().unwrap().to_str().unwrap();
                assert!(message.contains(name), "{message} lacks {name}");
                let (_, at) = message.split_once("at byte ").unwrap();
                let at: u64 = at.split(':').next().unwrap().parse().unwrap();
                assert!(at < index.files[file].bytes, "{message}");
            }
            // One that was fetched before the fault ended is forgotten with it.
            drop(step(&mut faulty.loaded, &|| false));
            assert!(
                step(&mut faulty.loaded, &|| false).unwrap() == expected,
                "{}",
                tensor.name
            );
        }
    }
    assert!(failures.iter().all(|&times| times > 0), "{failures:?}");
}

/// A model of some megabytes in three files, most of which is read in every step.
fn served() -> (TempDir, Vec<PathBuf>) {
    // Beside the test binaries: a disk, where direct reads are likely to work.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("served.gguf");
    let options = RandomOptions {
        layers: 6,
        width: 128,
        ffn: 1024,
        ..RandomOptions::default()
    };
    random(&path, &options);
    let paths = split(&path, 3, Dealt::InRuns);
    std::fs::remove_file(&path).unwrap();
    (folder, paths)
}

const STREAMED: [&[&str]; 2] = [
    &["--copy", "--host-memory", "4MiB", "--reader", "auto"],
    &["--copy", "--host-memory", "4MiB", "--reader", "pread"],
];
const SMALL: [&str; 6] = ["--context", "256", "--parallel", "2", "--slice", "256KiB"];

fn truncate(path: &Path, bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
}

/// Another file with these bytes takes the place of the first.
fn replace(path: &Path, bytes: &[u8]) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, bytes).unwrap();
    std::fs::rename(&beside, path).unwrap();
}

/// Asks until an answer fails: what was read ahead may serve the first.
#[track_caller]
fn fails(server: &Server) {
    let failed = (0..20).any(|_| server.complete(PROMPT, 8).status == 500);
    assert!(failed, "no failure: {}", server.log());
    assert_eq!(server.get("/health").status, 200);
}

/// Each file is watched by itself: one that was damaged is served again once it is whole, or once another with the same
/// weights is in its place, and one with other weights is refused.
#[test]
fn a_shard_that_is_damaged_or_replaced_while_it_is_served() {
    for placement in STREAMED {
        let (_folder, paths) = served();
        let damaged = &paths[1];
        let whole = std::fs::read(damaged).unwrap();
        let server = Server::start(&paths[0], &[placement, &SMALL].concat());
        assert!(server.metric("strata_weight_home_bytes", "storage") > 0.0);
        let models = server.get("/v1/models").json();
        assert_eq!(models["data"][0]["id"], "served", "{models}");
        let expected = server.text(PROMPT, 8);

        truncate(damaged, 4096);
        fails(&server);
        let line = server.logged("compute a step");
        for part in ["served-00002-of-00003.gguf", "byte ", "shrank"] {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
        replace(damaged, &whole);
        assert_eq!(server.text(PROMPT, 8), expected, "{placement:?}");
        let line = server.logged("is whole again");
        assert!(line.contains("served-00002-of-00003.gguf"), "{line}");

        truncate(damaged, 4096);
        fails(&server);
        let mut other = whole.clone();
        let place = other.len() / 2;
        other[place] ^= 1;
        replace(damaged, &other);
        fails(&server);
        let line = server.logged("other weights");
        assert!(line.contains("served-00002-of-00003.gguf"), "{line}");
        replace(damaged, &whole);
        assert_eq!(server.text(PROMPT, 8), expected, "{placement:?}");

        // While nothing fails, a shard that another takes the place of goes on being read, and that is said.
        replace(&paths[2], b"something else");
        let until = Instant::now() + LOG_PATIENCE;
        let told = |server: &Server| {
            let log = server.log();
            log.lines().any(|line| {
                line.contains("was replaced") && line.contains("served-00003-of-00003.gguf")
            })
        };
        while !told(&server) {
            assert!(Instant::now() < until, "{}", server.log());
            assert_eq!(server.text(PROMPT, 8), expected);
            std::thread::sleep(Duration::from_millis(50));
        }
        server.assert_healthy();
    }
}

#[test]
fn a_mapped_shard_that_shrinks_ends_the_process_with_its_name() {
    let (_folder, paths) = served();
    let mut server = Server::start(&paths[2], &["--host-memory", "1GiB", "--context", "256"]);
    let memory = server.get("/memory").json();
    assert!(memory["mapped"].as_bool().unwrap());
    server.complete(PROMPT, 4).ok();
    // What is mapped of all files is the host tier's.
    let memory = server.get("/memory").json();
    let host = &memory["tiers"][0];
    let resident = host["resident_bytes"].as_u64().unwrap();
    let weights = host["weights_bytes"].as_u64().unwrap();
    assert!(resident > weights / 2, "{host}");
    truncate(&paths[1], 0);
    let body = process::completion(PROMPT, 4).to_string();
    let headers = [("content-type", "application/json")];
    let answer = http::try_open(
        server.address,
        "POST",
        "/v1/completions",
        &headers,
        body.as_bytes(),
    );
    assert!(answer.is_err(), "an answer without weights");
    let (status, log) = server.end();
    assert_eq!(status.code(), Some(74), "{log}");
    assert!(log.contains("served-00002-of-00003.gguf shrank"), "{log}");
}

/// The checksums of one run are held against the reads of the next, file by file.
#[test]
fn a_shard_that_was_changed_between_two_runs_is_refused() {
    let (folder, paths) = served();
    let cache = folder.path().join("cache");
    let generate = || {
        let mut command = strata();
        command
            .arg("generate")
            .arg(&paths[0])
            .args(["-p", PROMPT, "-n", "4"]);
        command.args(["--copy", "--host-memory", "1GiB", "--context", "64"]);
        command.args(["--log", "error"]);
        command.env_remove("STRATA_CHECKSUM_DIRECTORY");
        command
            .env("XDG_CACHE_HOME", &cache)
            .env("HOME", "/nowhere");
        process::run(&mut command)
    };
    let expected = generate().success().to_owned();
    let kept = cache.join("strata/checksums");
    assert_eq!(std::fs::read_dir(&kept).unwrap().count(), 3);
    let place = std::fs::metadata(&paths[2]).unwrap().len() / 2;
    flip(&paths[2], place);
    generate().refusal(1, &["served-00003-of-00003.gguf", "than in an earlier run"]);
    flip(&paths[2], place);
    assert_eq!(generate().success(), expected);
}

/// A shard that is still being written when its weights are to be read.
#[test]
fn a_shard_that_changes_while_the_model_is_opened_is_refused() {
    let (_folder, paths) = served();
    let whole = std::fs::read(&paths[2]).unwrap();
    for map_file in [true, false] {
        let request = PlanRequest {
            map_file,
            ..all_resident()
        };
        let planned = PlannedModel::open(&paths[0], &request).unwrap();
        truncate(&paths[2], whole.len() as u64 * 2);
        let loading = strata::weights::Loading {
            settings: settings(),
            metrics: &strata::metrics::Metrics::new(),
            progress: &|_| true,
        };
        let loaded = planned.load(strata::kernels::ComputePool::new(1), &loading);
        let Err(error) = loaded else {
            panic!("loaded");
        };
        let error = error.to_string();
        assert!(error.contains("served-00003-of-00003.gguf"), "{error}");
        assert!(error.contains("it is being written"), "{error}");
        std::fs::write(&paths[2], &whole).unwrap();
    }
}

#[test]
fn every_command_takes_any_shard() {
    let (folder, paths) = served();
    let run = |arguments: &[&str], path: &Path| {
        let mut command = strata();
        command.args(arguments).arg(path);
        command.env("XDG_CACHE_HOME", folder.path());
        process::run(&mut command).success().to_owned()
    };
    let reports: Vec<String> = paths
        .iter()
        .map(|path| {
            let plan = run(
                &[
                    "plan",
                    "--json",
                    "--host-memory",
                    "4MiB",
                    "--context",
                    "256",
                ],
                path,
            );
            let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
            plan["groups"].to_string()
        })
        .collect();
    assert!(reports.iter().all(|report| *report == reports[0]));
    let inspected: serde_json::Value =
        serde_json::from_str(&run(&["inspect", "--json"], &paths[1])).unwrap();
    assert_eq!(inspected["tensors"].as_array().unwrap().len(), 6 * 9 + 3);
    let answer = |path: &Path| {
        run(
            &[
                "generate",
                "-p",
                PROMPT,
                "-n",
                "4",
                "--context",
                "64",
                "--log",
                "error",
            ],
            path,
        )
    };
    assert_eq!(answer(&paths[0]), answer(&paths[2]));
    let bench = run(
        &[
            "bench", "decode", "--tokens", "2", "--rounds", "1", "--json",
        ],
        &paths[2],
    );
    serde_json::from_str::<serde_json::Value>(&bench).unwrap();
    // The largest of the files is what storage is measured with.
    let largest = paths
        .iter()
        .max_by_key(|path| std::fs::metadata(path).unwrap().len());
    let name = largest.unwrap().file_name().unwrap().to_str().unwrap();
    let arguments = ["bench", "rates", "--only", "storage", "--seconds", "2"];
    let rates = run(&[&arguments[..], &["--json"]].concat(), &paths[0]);
    let rates: serde_json::Value = serde_json::from_str(&rates).unwrap();
    let file = rates["storage"]["file"].as_str().unwrap();
    assert!(file.ends_with(name), "{rates}");
}
