//! The program as its users run it: a process of its own, asked over HTTP and watched from outside.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use super::client::{Response, call};
use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// For anything that takes seconds at most: only a broken program takes so long, whatever else the machine does.
pub(super) const FOREVER: Duration = Duration::from_secs(120);

/// Killed when dropped.
pub(super) struct Program {
    child: Child,
    log: Receiver<String>,
    /// What has been read of the log.
    seen: Vec<String>,
}

/// Where the test runs, which may be another machine than the one that built it.
pub(super) fn strata_path() -> PathBuf {
    let program = std::env::var_os("CARGO_BIN_EXE_strata");
    program.map_or_else(|| env!("CARGO_BIN_EXE_strata").into(), PathBuf::from)
}

/// The program for which nothing but its flags decides, and which leaves nothing in the home of who runs the tests.
pub(super) fn without_settings(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("STRATA_") {
            command.env_remove(name);
        }
    }
    let cache = concat!(env!("CARGO_TARGET_TMPDIR"), "/no-cache");
    command.env("XDG_CACHE_HOME", cache);
    command.env("STRATA_CHECKSUM_DIRECTORY", "none");
    command
}

impl Program {
    /// `strata serve` on a port of the kernel's choice.
    pub(super) fn serve(model: &Path, flags: &[&str]) -> Program {
        Program::serve_with(model, flags, &[])
    }

    /// The same with these variables.
    pub(super) fn serve_with(model: &Path, flags: &[&str], variables: &[(&str, &str)]) -> Program {
        let mut command = without_settings(&strata_path());
        command
            .arg("serve")
            .arg(model)
            .args(["--listen", "127.0.0.1:0"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command.envs(variables.iter().copied());
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (lines, log) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                // An error means that nobody reads any more; the pipe is emptied all the same.
                let _ = lines.send(line);
            }
        });
        Program {
            child,
            log,
            seen: Vec::new(),
        }
    }

    /// Waits for a line of the log.
    #[track_caller]
    pub(super) fn line_with(&mut self, text: &str) -> String {
        loop {
            match self.log.recv_timeout(FOREVER) {
                Ok(line) => {
                    assert!(!line.contains('\u{1b}'), "colours in a pipe: {line:?}");
                    self.seen.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(error) => panic!("no line with {text:?} ({error}):\n{}", self.seen.join("\n")),
            }
        }
    }

    /// Waits until it says where it listens.
    #[track_caller]
    pub(super) fn address(&mut self) -> SocketAddr {
        let line = self.line_with("listening on http://");
        let (_, rest) = line.split_once("http://").unwrap();
        let address = rest.split(' ').next().unwrap_or_default();
        let address: SocketAddr = address.parse().unwrap_or_else(|_| panic!("{line}"));
        assert_ne!(address.port(), 0, "{line}");
        address
    }

    /// Everything that is in the log when it has ended.
    pub(super) fn whole_log(&mut self) -> String {
        self.seen.extend(self.log.iter());
        self.seen.join("\n")
    }

    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// As `kill -TERM` does.
    pub(super) fn terminate(&self) {
        let kill = format!("kill -TERM {}", self.id());
        let status = Command::new("sh").args(["-c", &kill]).status().unwrap();
        assert!(status.success(), "{kill}");
    }

    #[track_caller]
    pub(super) fn wait(&mut self) -> ExitStatus {
        let began = Instant::now();
        while began.elapsed() < FOREVER {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("it still runs after {FOREVER:?}");
    }

    /// A file that the kernel keeps about it; empty where there is none, or none that this user may read.
    pub(super) fn proc_file(&self, name: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{name}", self.id())).unwrap_or_default()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("its log:\n{}", self.whole_log());
        }
    }
}

pub(super) fn get(address: SocketAddr, path: &str) -> Response {
    call(address, "GET", path, &[], b"")
}

pub(super) fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    let headers = [("content-type", "application/json")];
    call(address, "POST", path, &headers, body.to_string().as_bytes())
}

/// Asks again and again until `condition` holds.
#[track_caller]
pub(super) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < FOREVER, "not within {FOREVER:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[track_caller]
pub(super) fn wait_until_ready(address: SocketAddr) {
    eventually("it is ready", || get(address, "/health").status == 200);
}

/// A page of metrics: values by name and labels, as `name{label="value"}`.
pub(super) struct Page(HashMap<String, f64>);

impl Page {
    pub(super) fn of(address: SocketAddr) -> Page {
        let response = get(address, "/metrics");
        assert_eq!(response.status, 200);
        let samples = response
            .text()
            .lines()
            .filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Page(samples.filter_map(sample).collect())
    }

    /// 0 where there is no such sample: nothing was counted yet.
    pub(super) fn value(&self, sample: &str) -> f64 {
        self.0.get(sample).copied().unwrap_or(0.0)
    }

    /// Of all samples of a metric.
    pub(super) fn sum(&self, metric: &str) -> f64 {
        let labelled = format!("{metric}{{");
        let of_metric = self
            .0
            .iter()
            .filter(|(name, _)| name.as_str() == metric || name.starts_with(&labelled));
        of_metric.map(|(_, value)| value).sum()
    }
}
