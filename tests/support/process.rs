//! Runs the real binary: commands to their end, and servers until the test is over.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test crate uses a part of this module, and a test fails by panicking"
)]

use super::http::{self, Response};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Only a broken program takes so long.
const PATIENCE: Duration = Duration::from_secs(120);

/// Only a broken program takes so long to write a line.
pub(super) const LOG_PATIENCE: Duration = Duration::from_secs(10);

/// The program without settings of the environment that runs the tests.
pub(super) fn strata() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("STRATA_") {
            command.env_remove(name);
        }
    }
    // Nor with rates that a user of this machine has stored.
    command.env(
        "XDG_CACHE_HOME",
        concat!(env!("CARGO_TARGET_TMPDIR"), "/no-cache"),
    );
    // Nothing is left in the home of who runs the tests.
    command.env("STRATA_CHECKSUM_DIRECTORY", "none");
    command.stdin(Stdio::null());
    command
}

/// What a command came to.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) status: ExitStatus,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// Runs a command to its end; one that does not end fails the test.
#[track_caller]
pub(super) fn run(command: &mut Command) -> Outcome {
    let mut child = Guard(
        command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let read = |mut stream: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = Vec::new();
            stream.read_to_end(&mut text).unwrap();
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let stdout = read(Box::new(child.0.stdout.take().unwrap()));
    let stderr = read(Box::new(child.0.stderr.take().unwrap()));
    let status = child.wait();
    Outcome {
        status,
        stdout: stdout.join().unwrap(),
        stderr: stderr.join().unwrap(),
    }
}

impl Outcome {
    /// The line that says what was wrong: the only one.
    #[track_caller]
    pub(super) fn refusal(&self, code: i32, parts: &[&str]) -> &str {
        let text = &self.stderr;
        assert_eq!(self.status.code(), Some(code), "{text}");
        assert!(
            text.starts_with("strata: ") && text.ends_with('\n') && text.lines().count() == 1,
            "not one line of ours: {text:?}"
        );
        assert!(!text.contains("panicked"), "{text}");
        for part in parts {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
        text.trim_end()
    }

    #[track_caller]
    pub(super) fn success(&self) -> &str {
        assert!(self.status.success(), "{:?}: {}", self.status, self.stderr);
        &self.stdout
    }
}

/// A child that does not outlive its test.
pub(super) struct Guard(pub(super) Child);

impl Guard {
    #[track_caller]
    pub(super) fn wait(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < PATIENCE, "the program does not end");
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Lines of a log as they come.
#[derive(Default)]
struct Log {
    lines: Mutex<Vec<String>>,
    changed: Condvar,
}

/// A server over a model file, ready to answer.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    log: Arc<Log>,
    child: Guard,
    reader: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn start(model: &Path, flags: &[&str]) -> Server {
        Server::start_at("127.0.0.1:0", model, flags)
    }

    pub(super) fn start_at(listen: &str, model: &Path, flags: &[&str]) -> Server {
        let mut command = strata();
        command
            .args([OsStr::new("serve"), model.as_os_str()])
            .args(["--listen", listen])
            .args(flags);
        Server::of(&mut command)
    }

    /// `command` serves, and its log goes to standard error.
    pub(super) fn of(command: &mut Command) -> Server {
        let mut child = Guard(
            command
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap(),
        );
        let log = Arc::new(Log::default());
        let stderr = BufReader::new(child.0.stderr.take().unwrap());
        let reader = std::thread::spawn({
            let log = Arc::clone(&log);
            move || {
                for line in stderr.split(b'\n') {
                    let line = String::from_utf8_lossy(&line.unwrap()).into_owned();
                    log.lines.lock().unwrap().push(line);
                    log.changed.notify_all();
                }
            }
        });
        let mut server = Server {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            log,
            child,
            reader: Some(reader),
        };
        let line = server.wait_for_line("listening on http://");
        let address = line.rsplit_once("http://").unwrap().1;
        server.address = address.split_whitespace().next().unwrap().parse().unwrap();
        server.eventually("ready", |server| server.get("/health").status == 200);
        server
    }

    /// The first line of the log that has `part`, waiting for it.
    #[track_caller]
    pub(super) fn wait_for_line(&mut self, part: &str) -> String {
        let began = Instant::now();
        let mut lines = self.log.lines.lock().unwrap();
        loop {
            if let Some(line) = lines.iter().find(|line| line.contains(part)) {
                return line.clone();
            }
            assert!(
                self.child.0.try_wait().unwrap().is_none() && began.elapsed() < PATIENCE,
                "no line with {part:?} in the log:\n{}",
                lines.join("\n")
            );
            let pause = Duration::from_millis(20);
            lines = self.log.changed.wait_timeout(lines, pause).unwrap().0;
        }
    }

    pub(super) fn log(&self) -> String {
        self.log.lines.lock().unwrap().join("\n")
    }

    /// The first line of the log that has `part`. It may come after the answer: the log is read by a thread.
    #[track_caller]
    pub(super) fn logged(&self, part: &str) -> String {
        let until = Instant::now() + LOG_PATIENCE;
        loop {
            let log = self.log();
            if let Some(line) = log.lines().find(|line| line.contains(part)) {
                return line.to_owned();
            }
            assert!(Instant::now() < until, "no line with {part:?}:\n{log}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(super) fn get(&self, path: &str) -> Response {
        http::call(self.address, "GET", path, &[], b"")
    }

    pub(super) fn post(&self, path: &str, body: &Value) -> Response {
        self.open(path, body).finish()
    }

    pub(super) fn open(&self, path: &str, body: &Value) -> http::Stream {
        let headers = [("content-type", "application/json")];
        let body = body.to_string();
        http::open(self.address, "POST", path, &headers, body.as_bytes())
    }

    /// A greedy completion of `prompt`.
    pub(super) fn complete(&self, prompt: &str, max_tokens: u32) -> Response {
        self.post("/v1/completions", &completion(prompt, max_tokens))
    }

    /// Its text.
    #[track_caller]
    pub(super) fn text(&self, prompt: &str, max_tokens: u32) -> String {
        let answer = self.complete(prompt, max_tokens).ok();
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    }

    /// The sum of a metric's samples whose labels hold `labels`.
    pub(super) fn metric(&self, name: &str, labels: &str) -> f64 {
        let text = self.get("/metrics");
        let samples = text.text().lines().filter_map(|line| {
            let (sample, value) = line.rsplit_once(' ')?;
            let of_it = sample == name || sample.strip_prefix(name)?.starts_with('{');
            (of_it && sample.contains(labels)).then(|| value.parse::<f64>().unwrap())
        });
        samples.sum()
    }

    /// Waits until `condition` holds; fails after a time that no healthy machine needs.
    #[track_caller]
    pub(super) fn eventually(&mut self, what: &str, condition: impl Fn(&Server) -> bool) {
        let began = Instant::now();
        while !condition(self) {
            assert!(
                began.elapsed() < PATIENCE && self.child.0.try_wait().unwrap().is_none(),
                "not within {PATIENCE:?}: {what}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Of the process that was started.
    pub(super) fn id(&self) -> u32 {
        self.child.0.id()
    }

    /// SIGKILL.
    pub(super) fn kill(mut self) {
        self.child.0.kill().unwrap();
        self.end();
    }

    pub(super) fn signal(&self, name: &str) {
        let id = self.child.0.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.unwrap().success());
    }

    /// Waits for the process to end by itself: its status and its whole log.
    #[track_caller]
    pub(super) fn end(&mut self) -> (ExitStatus, String) {
        let status = self.child.wait();
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        (status, self.log())
    }

    /// The process lives, answers, and nothing in it has panicked.
    #[track_caller]
    pub(super) fn assert_healthy(&self) {
        assert_eq!(self.get("/health").status, 200, "{}", self.log());
        self.assert_no_panic();
    }

    #[track_caller]
    pub(super) fn assert_no_panic(&self) {
        let log = self.log();
        assert!(!log.contains("panicked"), "{log}");
    }
}

pub(super) fn completion(prompt: &str, max_tokens: u32) -> Value {
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0})
}
