//! The model file is damaged, or another takes its place, while it is served. Where weights are copied, requests fail and
//! the server lives; once the file is whole again, so are the answers, and none is computed from other weights. Where it is
//! mapped, the process ends with a code of its own and says why.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/flip.rs"]
mod flip;
#[path = "support/http.rs"]
mod http;
#[path = "support/models.rs"]
mod models;
#[path = "support/process.rs"]
mod process;

use flip::flip;
use models::{RandomOptions, random};
use process::{LOG_PATIENCE, Server, completion, strata};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PROMPT: &str = "the hen on the other hand";

/// A model of some megabytes, most of which is read from the file in every step.
fn model(context: u32) -> (TempDir, PathBuf) {
    // Beside the test binaries: a disk, where direct reads are likely to work.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("served.gguf");
    random(
        &path,
        &RandomOptions {
            layers: 6,
            width: 128,
            heads: 4,
            kv_heads: 2,
            ffn: 1024,
            context,
            ..RandomOptions::default()
        },
    );
    (folder, path)
}

const STREAMED: [&[&str]; 3] = [
    &["--copy", "--host-memory", "4MiB", "--reader", "auto"],
    &["--copy", "--host-memory", "4MiB", "--reader", "pread"],
    &[
        "--device",
        "emulated",
        "--device-memory",
        "4MiB",
        "--host-memory",
        "3MiB",
    ],
];
const SMALL: [&str; 6] = ["--context", "256", "--parallel", "2", "--slice", "256KiB"];

fn flags(placement: &[&'static str]) -> Vec<&'static str> {
    [placement, &SMALL].concat()
}

fn truncate(path: &Path, bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
}

/// Writes the bytes back into the same file.
fn restore(path: &Path, bytes: &[u8]) {
    let mut file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
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
    server.complete(PROMPT, 8).error(500);
    assert_eq!(server.get("/health").status, 200);
}

#[track_caller]
fn assert_streams(server: &Server) {
    assert!(server.metric("strata_weight_home_bytes", "storage") > 0.0);
}

#[test]
fn a_file_that_shrinks_fails_requests_until_it_is_whole_again() {
    for placement in STREAMED {
        let (_folder, path) = model(512);
        let whole = std::fs::read(&path).unwrap();
        let server = Server::start(&path, &flags(placement));
        assert_streams(&server);
        let expected = server.text(PROMPT, 8);
        // Whatever the plan keeps in memory, some of the last quarter is read in each step.
        let length = whole.len() as u64;
        for length in [length / 4, 0, length / 4 * 3] {
            truncate(&path, length);
            // What was read ahead may serve the first steps; then each request fails.
            let failed = (0..20).find_map(|_| {
                let response = server.complete(PROMPT, 8);
                (response.status != 200).then_some(response)
            });
            let failed = failed.unwrap_or_else(|| panic!("{placement:?}, {length}: no failure"));
            let error = failed.error(500);
            let message = error["message"].as_str().unwrap();
            assert!(message.contains("could not be read"), "{message}");
            assert!(!message.contains("served.gguf"), "{message}");
            server.complete(PROMPT, 8).error(500);
            assert_eq!(server.get("/health").status, 200);
            assert_eq!(server.metric("strata_requests_active", ""), 0.0);
            assert_eq!(server.metric("strata_kv_pages", "used"), 0.0);

            restore(&path, &whole);
            assert_eq!(server.text(PROMPT, 8), expected, "{placement:?}, {length}");
            server.assert_healthy();
        }
        // The log names file, offset and group.
        let line = server.logged("compute a step");
        for part in ["served.gguf", "layer ", "byte ", "shrank"] {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
    }
}

#[test]
fn a_stream_that_was_begun_ends_with_an_error_event() {
    let (_folder, path) = model(1 << 16);
    let whole = std::fs::read(&path).unwrap();
    let flags = "--copy --host-memory 24MiB --context 12000 --parallel 1 --slice 256KiB";
    let flags: Vec<&str> = flags.split(' ').collect();
    let server = Server::start(&path, &flags);
    assert_streams(&server);
    let expected = server.text(PROMPT, 8);
    let mut body = completion(PROMPT, 10_000);
    body["stream"] = true.into();
    body["seed"] = 3.into();
    body["temperature"] = 1.into();
    let mut stream = server.open("/v1/completions", &body);
    assert_eq!(stream.status, 200);
    let mut text = String::new();
    while !text.contains("\"text\"") {
        text += &stream.chunk().unwrap();
    }
    truncate(&path, 4096);
    while let Some(chunk) = stream.chunk() {
        text += &chunk;
    }
    let events: Vec<&str> = text.split_terminator("\n\n").collect();
    let [.., error, done] = &events[..] else {
        panic!("{text}");
    };
    assert_eq!(*done, "data: [DONE]");
    let (_, data) = error.split_once("data: ").unwrap();
    let error: serde_json::Value = serde_json::from_str(data).unwrap();
    let message = error["error"]["message"].as_str();
    assert!(
        message.is_some_and(|m| m.contains("could not be read")),
        "{error}"
    );
    restore(&path, &whole);
    assert_eq!(server.text(PROMPT, 8), expected);
    server.assert_healthy();
}

/// The engine thread logs a failed step: a log that cannot be written must not end it.
#[test]
fn failures_are_survived_where_the_log_cannot_be_written() {
    let (folder, path) = model(512);
    let whole = std::fs::read(&path).unwrap();
    // The address is found by trying: this log cannot tell it.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let log = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut command = strata();
    command.arg("serve").arg(&path).args(flags(STREAMED[0]));
    command.args(["--listen", &address.to_string(), "--log", "trace"]);
    command.stdout(std::process::Stdio::null()).stderr(log);
    let mut child = process::Guard(command.spawn().unwrap());
    let complete = || {
        let body = completion(PROMPT, 4).to_string();
        let headers = [("content-type", "application/json")];
        http::try_open(
            address,
            "POST",
            "/v1/completions",
            &headers,
            body.as_bytes(),
        )
    };
    let expected = loop {
        assert!(child.0.try_wait().unwrap().is_none(), "the server ended");
        match complete() {
            Ok(stream) if stream.status == 200 => break stream.finish().ok(),
            _ => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    truncate(&path, 4096);
    while complete().unwrap().finish().status == 200 {}
    complete().unwrap().finish().error(500);
    restore(&path, &whole);
    let again = complete().unwrap().finish().ok();
    assert_eq!(again["choices"], expected["choices"]);
    drop(folder);
}

#[test]
fn a_mapped_file_that_shrinks_ends_the_process_with_its_name() {
    let (_folder, path) = model(512);
    for length in [4096, 0] {
        let whole = std::fs::read(&path).unwrap();
        let mut server = Server::start(&path, &["--host-memory", "1GiB", "--context", "256"]);
        assert!(server.get("/memory").json()["mapped"].as_bool().unwrap());
        server.complete(PROMPT, 4).ok();
        truncate(&path, length);
        let body = completion(PROMPT, 4).to_string();
        let headers = [("content-type", "application/json")];
        let address = server.address;
        let answer = http::try_open(
            address,
            "POST",
            "/v1/completions",
            &headers,
            body.as_bytes(),
        );
        assert!(answer.is_err(), "an answer without weights");
        let (status, log) = server.end();
        assert_eq!(status.code(), Some(74), "{log}");
        let lines = log.lines().filter(|line| line.starts_with("strata: "));
        let [line] = lines.collect::<Vec<_>>()[..] else {
            panic!("{log}");
        };
        for part in ["served.gguf", "shrank", "--host-memory"] {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
        assert!(!log.contains("panicked"), "{log}");
        restore(&path, &whole);
    }
}

/// What is at the path is another file now, and the open one is damaged. The same weights are the same model.
#[test]
fn a_file_that_took_the_place_of_a_damaged_one_is_served_if_it_is_the_same() {
    for placement in STREAMED {
        let (_folder, path) = model(512);
        let whole = std::fs::read(&path).unwrap();
        let server = Server::start(&path, &flags(placement));
        assert_streams(&server);
        let expected = server.text(PROMPT, 8);

        truncate(&path, 4096);
        fails(&server);
        replace(&path, &whole);
        assert_eq!(server.text(PROMPT, 8), expected, "{placement:?}");
        server.logged("is whole again");

        // Once more, with one that has other weights: none is computed with, and the log says what to do.
        truncate(&path, 4096);
        fails(&server);
        let mut other = whole.clone();
        let place = other.len() / 2;
        other[place] ^= 1;
        replace(&path, &other);
        fails(&server);
        let line = server.logged("other weights");
        for part in ["served.gguf", "replaced", "at byte ", "restart the server"] {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }

        replace(&path, &whole);
        assert_eq!(server.text(PROMPT, 8), expected, "{placement:?}");
        server.assert_healthy();
    }
}

#[test]
fn a_bit_that_is_changed_in_the_file_gives_no_token() {
    for placement in STREAMED {
        let (_folder, path) = model(512);
        let length = std::fs::metadata(&path).unwrap().len();
        let server = Server::start(&path, &flags(placement));
        let expected = server.text(PROMPT, 8);
        let mut failures = 0;
        for place in (1..10).map(|tenth| length * tenth / 10) {
            flip(&path, place);
            for _ in 0..2 {
                let response = server.complete(PROMPT, 8);
                if response.status == 200 {
                    let answer = response.ok();
                    assert_eq!(answer["choices"][0]["text"], expected, "{placement:?}");
                } else {
                    response.error(500);
                    failures += 1;
                }
            }
            flip(&path, place);
            assert_eq!(server.text(PROMPT, 8), expected, "{placement:?}");
        }
        assert!(failures > 0, "{placement:?}: nothing was read");
        assert!(server.metric("strata_read_retries_total", "checksum") >= 3.0);
        let memory = server.get("/memory").json();
        let reads = &memory["reads"];
        assert_eq!(reads["verified_share"], 1.0);
        assert!(reads["verified_bytes"].as_u64() > Some(length), "{reads}");
        assert!(reads["verified_groups"].as_u64() > Some(10), "{reads}");
        assert!(reads["retries"]["checksum"].as_u64() >= Some(3), "{reads}");
        let line = server.logged("compute a step");
        for part in ["served.gguf", "byte ", "other bytes than at first"] {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
        server.assert_healthy();
    }
}

/// The checksums of one run are held against the reads of the next.
#[test]
fn a_file_that_was_changed_between_two_runs_is_refused() {
    let (folder, path) = model(512);
    let cache = folder.path().join("cache");
    let generate = || {
        let mut command = strata();
        command
            .arg("generate")
            .arg(&path)
            .args(["-p", PROMPT, "-n", "4"]);
        command.args(["--copy", "--host-memory", "1GiB", "--context", "64"]);
        command.env_remove("STRATA_CHECKSUM_DIRECTORY");
        command
            .env("XDG_CACHE_HOME", &cache)
            .env("HOME", "/nowhere");
        process::run(&mut command)
    };
    let expected = generate().success().to_owned();
    let length = std::fs::metadata(&path).unwrap().len();
    flip(&path, length / 2);
    let outcome = generate();
    let folder = cache.join("strata/checksums");
    let message = outcome.stderr.lines().find(|l| l.starts_with("strata: "));
    let message = message.unwrap_or_else(|| panic!("{outcome:?}"));
    assert_eq!(outcome.status.code(), Some(1), "{outcome:?}");
    for part in ["layer ", "served.gguf", "delete ", folder.to_str().unwrap()] {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    flip(&path, length / 2);
    assert_eq!(generate().success(), expected);

    // Not what it should be: it is ignored, with a warning.
    let [file] = &std::fs::read_dir(&folder).unwrap().collect::<Vec<_>>()[..] else {
        panic!("more than one file of checksums");
    };
    let file = file.as_ref().unwrap().path();
    std::fs::write(&file, b"hello").unwrap();
    let outcome = generate();
    assert_eq!(outcome.success(), expected);
    assert!(outcome.stderr.contains("are ignored"), "{}", outcome.stderr);
    // It cannot be written: the model computes all the same.
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, b"in the way").unwrap();
    let outcome = generate();
    assert_eq!(outcome.success(), expected);
    assert!(
        outcome.stderr.contains("--checksum-directory"),
        "{}",
        outcome.stderr
    );
}

/// A file that another takes the place of (written beside it and renamed) is none of the running server's business.
#[test]
fn a_file_that_is_replaced_goes_on_being_served() {
    for flags in [
        flags(STREAMED[0]),
        vec!["--host-memory", "1GiB", "--context", "256"],
    ] {
        let (_folder, path) = model(512);
        let server = Server::start(&path, &flags);
        let expected = server.text(PROMPT, 8);
        replace(&path, b"something else");
        assert_eq!(server.text(PROMPT, 8), expected);
        if server.metric("strata_weight_home_bytes", "storage") > 0.0 {
            // The path is looked at once a second, where the file is read, before a step.
            let until = Instant::now() + LOG_PATIENCE;
            while !server.log().contains("was replaced") {
                assert!(Instant::now() < until, "{}", server.log());
                assert_eq!(server.text(PROMPT, 8), expected);
                std::thread::sleep(Duration::from_millis(50));
            }
            // A further look finds the same file.
            std::thread::sleep(Duration::from_millis(1500));
            for _ in 0..2 {
                assert_eq!(server.text(PROMPT, 8), expected);
            }
            let log = server.log();
            assert_eq!(log.matches("was replaced").count(), 1, "{log}");
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(server.text(PROMPT, 8), expected);
        server.assert_healthy();
    }
}

/// Weights that are not those of the header: where nothing is verified, any text, and no crash.
#[test]
fn other_bytes_in_the_file_give_other_answers_and_no_crash() {
    for flags in [
        [&flags(STREAMED[0])[..], &["--verify-reads", "0"]].concat(),
        vec!["--host-memory", "1GiB", "--context", "256"],
    ] {
        let (_folder, path) = model(512);
        let whole = std::fs::read(&path).unwrap();
        let server = Server::start(&path, &flags);
        let expected = server.text(PROMPT, 8);
        for byte in [0x00, 0x7f, 0xff, 0x80] {
            let start = whole.len() / 3;
            let mut other = whole.clone();
            other[start..].fill(byte);
            restore(&path, &other);
            for _ in 0..2 {
                let response = server.complete(PROMPT, 8);
                assert!([200, 500].contains(&response.status), "{}", response.text());
                if response.status == 500 {
                    response.error(500);
                }
            }
            assert_eq!(server.get("/health").status, 200, "{}", server.log());
        }
        restore(&path, &whole);
        // What was read ahead may still be of the other file.
        server.complete(PROMPT, 1);
        assert_eq!(server.text(PROMPT, 8), expected);
        server.assert_healthy();
    }
}

/// Nobody has seen that what was restored is what it was: the log does not claim it.
#[test]
fn where_nothing_is_verified_a_restored_file_is_served_uncompared() {
    let (_folder, path) = model(512);
    let whole = std::fs::read(&path).unwrap();
    let flags = [&flags(STREAMED[0])[..], &["--verify-reads", "0"]].concat();
    let server = Server::start(&path, &flags);
    let expected = server.text(PROMPT, 8);
    truncate(&path, 4096);
    fails(&server);
    restore(&path, &whole);
    assert_eq!(server.text(PROMPT, 8), expected);
    server.logged("it was not compared");
    let log = server.log();
    assert!(!log.contains("is whole again"), "{log}");
    server.assert_healthy();
}

/// A file that shrinks between the reading of its header and the reading of its weights.
#[test]
fn a_file_that_changes_while_it_is_opened_is_refused() {
    use strata::metrics::Metrics;
    use strata::model::PlannedModel;
    use strata::placement::{DeviceKind, ExecutorChoice, KvType, PlanRequest, Rates};
    use strata::weights::{Loading, Lookahead, VerifyShare, WeightsSettings};
    let (folder, path) = model(512);
    let whole = std::fs::read(&path).unwrap();
    for map_file in [true, false] {
        let request = PlanRequest {
            device: DeviceKind::Cpu,
            device_budget: None,
            host_budget: 1 << 30,
            context: 256,
            parallel: 1,
            kv_type: KvType::F16,
            step_width: None,
            read_alignment: 4096,
            slice_bytes: None,
            ring_entries: None,
            executor: ExecutorChoice::Auto,
            map_file,
            rates: Rates::default(),
            rates_card: None,
        };
        let settings = WeightsSettings {
            reader: strata::memory::ReaderChoice::Auto,
            link_rate: None,
            lookahead: Lookahead::Ring,
            poison_released: true,
            verify_share: VerifyShare::Fixed(1.0),
            checksums: None,
        };
        let opened = |change: &dyn Fn()| {
            let planned = PlannedModel::open(&path, &request).unwrap();
            assert_eq!(planned.plan.mapped, map_file);
            change();
            let loaded = planned.load(
                strata::kernels::ComputePool::new(1),
                &Loading {
                    settings: settings.clone(),
                    metrics: &Metrics::new(),
                    progress: &|_| true,
                },
            );
            std::fs::remove_file(&path).unwrap();
            File::create(&path).unwrap().write_all(&whole).unwrap();
            match loaded {
                Ok(_) => panic!("loaded"),
                Err(error) => error.to_string(),
            }
        };
        let half = whole.len() as u64 / 2;
        let shrunk = opened(&|| truncate(&path, half));
        assert!(shrunk.contains("it is being written"), "{shrunk}");
        let longer = opened(&|| truncate(&path, half * 4));
        assert!(longer.contains("it is being written"), "{longer}");
        let gone = opened(&|| {
            std::fs::rename(&path, folder.path().join("away")).unwrap();
            let made = Command::new("mkfifo").arg(&path).status();
            assert!(made.unwrap().success());
        });
        assert!(gone.contains("not a regular file"), "{gone}");
    }
}
