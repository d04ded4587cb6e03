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
use std::path::Path;

/// The name of each thread of a process, which several may share, and the CPUs that it may use, as the kernel prints
/// them.
fn cpus_of_threads(process: u32) -> Vec<(String, String)> {
    let folder = format!("/proc/{process}/task");
    let mut found = Vec::new();
    for thread in std::fs::read_dir(folder).unwrap() {
        let thread = thread.unwrap().path();
        let read = |name: &str| std::fs::read_to_string(thread.join(name)).unwrap_or_default();
        let status = read("status");
        let cpus = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
            .unwrap_or_default();
        found.push((read("comm").trim().to_owned(), cpus.trim().to_owned()));
    }
    found
}

fn serve(model: &Path, flags: &[&str]) -> Vec<(String, String)> {
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
    let everywhere = free[0].1.clone();
    assert!(free.iter().all(|(_, cpus)| *cpus == everywhere), "{free:?}");
    if cpus == 1 {
        eprintln!("skipped: with one CPU a pinned thread looks like any other");
        return;
    }

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
    assert!(
        pinned.iter().any(|(name, _)| name == "strata-io"),
        "{pinned:?}"
    );
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
