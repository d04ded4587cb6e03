//! With `--pin-threads` each thread that computes stays on one CPU, and no other thread of the server does.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod http;
#[path = "support/models.rs"]
mod models;
#[path = "support/process.rs"]
mod process;

use models::{RandomOptions, random};
use process::{Server, run, strata};
use std::collections::BTreeMap;
use std::path::Path;

/// The CPUs that each thread of a process may use, as the kernel prints them, by the thread's name.
fn cpus_of_threads(process: u32) -> BTreeMap<String, String> {
    let folder = format!("/proc/{process}/task");
    let mut found = BTreeMap::new();
    for thread in std::fs::read_dir(folder).unwrap() {
        let thread = thread.unwrap().path();
        let read = |name: &str| std::fs::read_to_string(thread.join(name)).unwrap_or_default();
        let status = read("status");
        let cpus = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
            .unwrap_or_default();
        found.insert(read("comm").trim().to_owned(), cpus.trim().to_owned());
    }
    found
}

fn serve(model: &Path, flags: &[&str]) -> BTreeMap<String, String> {
    // Weights are copied and streamed: the threads that read and copy are there too.
    let placement = ["--copy", "--device", "emulated", "--log", "info"];
    let server = Server::start(model, &[&placement[..], flags].concat());
    server.text("the", 2);
    server.assert_healthy();
    if !flags.is_empty() {
        assert!(server.log().contains("pinned to CPUs"), "{}", server.log());
    }
    cpus_of_threads(server.id())
}

#[test]
fn only_the_threads_that_compute_are_pinned() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    random(&model, &RandomOptions::default());

    let cpus = std::thread::available_parallelism().unwrap().get();
    let free = serve(&model, &[]);
    let everywhere = free["engine"].clone();
    assert!(free.values().all(|cpus| *cpus == everywhere), "{free:?}");

    let threads = cpus.min(2);
    let pinned = serve(
        &model,
        &["--pin-threads", "--threads", &threads.to_string()],
    );
    let mut of_compute = Vec::new();
    for (name, cpus) in &pinned {
        if name == "engine" || name.starts_with("strata-compute") {
            assert!(cpus.parse::<usize>().is_ok(), "{name}: {cpus}");
            of_compute.push(cpus);
        } else {
            assert_eq!(*cpus, everywhere, "{name} in {pinned:?}");
        }
    }
    assert_eq!(of_compute.len(), threads, "{pinned:?}");
    of_compute.sort();
    of_compute.dedup();
    assert_eq!(of_compute.len(), threads, "two on one CPU: {pinned:?}");
    assert!(pinned.contains_key("strata-io"), "{pinned:?}");
}

#[test]
fn more_pinned_threads_than_cpus_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    random(&model, &RandomOptions::default());
    let flags = ["--threads", "1024", "--pin-threads", "--log", "error"];
    for command in [&["bench", "decode"][..], &["serve"]] {
        let outcome = run(strata().args(command).arg(&model).args(flags));
        outcome.refusal(2, &["--pin-threads", "1024 threads", "give --threads "]);
    }
}
