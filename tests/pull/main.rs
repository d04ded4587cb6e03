//! `strata pull` against servers that do all that servers and networks do: what is under the final name is the file, to
//! the byte, or nothing is, and the program says what to do.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../support/http.rs"]
mod http;
#[path = "../support/process.rs"]
mod process;
#[path = "../support/split.rs"]
mod split;

mod hub;
mod interruptions;
mod lies;
mod places;
mod refusals;
mod server;

use process::{Outcome, run, strata};
use server::{Reply, Request, Server};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A real file, small enough to be sent many times.
const MODEL: &[u8] = include_bytes!("../data/tiny/llama.gguf");
const OTHER: &[u8] = include_bytes!("../data/tiny/llama-tied.gguf");

/// A folder to fetch into.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        Place {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The program, patient enough for a machine that is busy with other things.
    fn command(&self, name: &str, flags: &[&str]) -> Command {
        let mut command = strata();
        for (name, _) in std::env::vars_os() {
            let lower = name.to_string_lossy().to_lowercase();
            if lower.starts_with("hf_") || lower.ends_with("_proxy") || lower.starts_with("ssl_") {
                command.env_remove(name);
            }
        }
        command.env("HOME", self.folder.path());
        command.arg("pull").arg(name);
        let mut output = self.folder.path().as_os_str().to_owned();
        output.push("/");
        if !flags.contains(&"--output") {
            command.arg("--output").arg(output);
        }
        let usual = [
            ("--retry-pause", "0.01"),
            ("--stall-timeout", "20"),
            ("--tries", "3"),
        ];
        for (flag, value) in usual {
            if !flags.contains(&flag) {
                command.args([flag, value]);
            }
        }
        command.args(flags);
        command
    }

    fn pull(&self, url: &str, flags: &[&str]) -> Outcome {
        run(&mut self.command(url, flags))
    }

    /// What is in the folder.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// That a file is whole, and that nothing else is there.
#[track_caller]
fn assert_fetched(outcome: &Outcome, path: &Path, bytes: &[u8]) {
    let stdout = outcome.success();
    assert_eq!(
        stdout,
        format!("{}\n", path.display()),
        "{}",
        outcome.stderr
    );
    assert!(
        std::fs::read(path).unwrap() == bytes,
        "other bytes than were sent"
    );
    let folder = path.parent().unwrap();
    let left: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .filter(|name| name.to_string_lossy().contains(".part"))
        .collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// That nothing is under the final name, and why.
#[track_caller]
fn assert_refused(outcome: &Outcome, code: i32, path: &Path, parts: &[&str]) {
    let text = &outcome.stderr;
    assert_eq!(outcome.status.code(), Some(code), "{text}");
    assert!(!path.exists(), "it is there all the same: {text}");
    assert!(!text.contains("panicked"), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(last.starts_with("strata: "), "{text}");
    for part in parts {
        assert!(last.contains(part), "{last:?} lacks {part:?}\n{text}");
    }
}

/// For servers that say nothing: how long that is waited for.
const IMPATIENT: [&str; 2] = ["--stall-timeout", "0.5"];
/// For those that say it in the end: on a busy machine a good answer may take as long, and is asked for again.
const IMPATIENT_AND_PERSISTENT: [&str; 4] = ["--stall-timeout", "0.5", "--tries", "100"];

/// What a server does, what becomes of it, and what is said meanwhile.
#[track_caller]
fn fetched(
    handler: impl Fn(&Request, &mut Reply) + Send + Sync + 'static,
    said: &[&str],
) -> Server {
    fetched_with(&[], handler, said)
}

#[track_caller]
fn fetched_with(
    flags: &[&str],
    handler: impl Fn(&Request, &mut Reply) + Send + Sync + 'static,
    said: &[&str],
) -> Server {
    let (server, place) = (Server::start(handler), Place::new());
    let outcome = place.pull(&server.url("/m.gguf"), flags);
    assert_fetched(&outcome, &place.path("m.gguf"), MODEL);
    for part in said {
        let text = &outcome.stderr;
        assert!(text.contains(part), "{text:?} lacks {part:?}");
    }
    server
}

/// The same for what comes to nothing; with the number of requests.
#[track_caller]
fn refused(
    handler: impl Fn(&Request, &mut Reply) + Send + Sync + 'static,
    parts: &[&str],
    requests: usize,
) {
    refused_with(&[], handler, parts, requests);
}

#[track_caller]
fn refused_with(
    flags: &[&str],
    handler: impl Fn(&Request, &mut Reply) + Send + Sync + 'static,
    parts: &[&str],
    requests: usize,
) {
    let (server, place) = (Server::start(handler), Place::new());
    let outcome = place.pull(&server.url("/m.gguf"), flags);
    assert_refused(&outcome, 1, &place.path("m.gguf"), parts);
    let asked = server.requests_of(requests).len();
    assert_eq!(asked, requests, "{}", outcome.stderr);
}
