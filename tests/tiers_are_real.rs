//! The tiers are real, as seen from outside the process: what rests where, what moves in each step and what the process
//! holds in RAM are what the plan says, by the metrics and by the kernel's own figures.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod client;
#[expect(dead_code, reason = "the program is shared with other tests")]
#[path = "support/program.rs"]
mod program;
#[path = "support/synthesised.rs"]
mod synthesised;

use program::{Page, Program, get, post, wait_until_ready};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::Path;
use strata::gguf::Gguf;

const MIB: u64 = 1 << 20;
/// Of what the plan says, for bytes that moved. Groups that were fetched ahead when a figure was taken are the reason
/// that there is any: a ring of 30 MiB beside 500 MiB in each step.
const TOLERANCE: f64 = 0.02;
/// What the process may hold beyond its budgets at its peak.
const OVERHEAD_MAX: u64 = 120 * MIB;
/// Between two looks at the memory of a process that does nothing but answer them; the kernel may join pages meanwhile.
const RSS_TOLERANCE: u64 = 8 * MIB;
/// What requests, metrics and JSON take of the heap while a step is computed.
const HEAP_OF_REQUESTS: u64 = 4 * MIB;

struct Placement {
    flags: &'static [&'static str],
    budget: u64,
    /// Decoded tokens, each of which takes a step.
    tokens: u64,
    /// Before them.
    prompt_tokens: u32,
    /// The tiers that weights must rest on for the test to show anything.
    homes: &'static [&'static str],
    streams_over_the_link: bool,
}

/// All figures at one time.
struct Figures {
    memory: Value,
    metrics: Page,
    /// From `/proc/PID/io`.
    read_bytes: u64,
}

impl Figures {
    fn now(program: &Program, address: SocketAddr) -> Figures {
        Figures {
            memory: get(address, "/memory").ok(),
            metrics: Page::of(address),
            read_bytes: figure(&program.proc_file("io"), "read_bytes:"),
        }
    }

    fn steps(&self) -> u64 {
        self.memory["steps"].as_u64().unwrap()
    }

    /// What the metrics say that went this way.
    fn moved(&self, from: &str, to: &str) -> u64 {
        let sample = format!(r#"strata_transfer_bytes_total{{from="{from}",to="{to}"}}"#);
        self.metrics.value(&sample) as u64
    }

    fn tiers(&self) -> impl Iterator<Item = (&str, &Value)> {
        let tiers = self.memory["tiers"].as_array().unwrap().iter();
        tiers.map(|tier| (tier["tier"].as_str().unwrap(), tier))
    }
}

/// The number behind a key of a file in `/proc`.
fn figure(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

fn bytes(object: &Value, key: &str) -> u64 {
    object[key]
        .as_u64()
        .unwrap_or_else(|| panic!("no count of bytes `{key}` in {object}"))
}

#[track_caller]
fn assert_near(what: &str, measured: u64, planned: u64) {
    eprintln!("{what}: {measured} bytes, the plan says {planned}");
    let apart = measured.abs_diff(planned) as f64;
    assert!(
        apart <= planned as f64 * TOLERANCE,
        "{what}: {measured} bytes, and the plan says {planned}"
    );
}

fn check(placement: &Placement) {
    let file = synthesised::tinyllama();
    let mut flags = vec!["--context", "512", "--parallel", "1"];
    flags.extend(placement.flags);
    let mut program = Program::serve(&file, &flags);
    let address = program.address();
    wait_until_ready(address);
    let before = Figures::now(&program, address);
    check_homes(&before, &file, placement);

    let mut asked = 0;
    let mut prompt: Vec<u32> = (300..300 + placement.prompt_tokens).collect();
    loop {
        let tokens = placement.tokens - asked;
        let answer = post(
            address,
            "/v1/completions",
            &json!({"prompt": prompt, "max_tokens": tokens, "temperature": 0}),
        );
        // An end token may come before the last; then another prompt goes on.
        asked += answer.ok()["usage"]["completion_tokens"].as_u64().unwrap();
        if asked >= placement.tokens {
            break;
        }
        prompt = vec![600 + asked as u32];
    }

    let after = Figures::now(&program, address);
    let steps = after.steps() - before.steps();
    assert!(steps >= placement.tokens, "{steps} steps");
    let counted = |figures: &Figures| figures.metrics.value("strata_step_seconds_count") as u64;
    assert_eq!(counted(&after) - counted(&before), steps);
    check_traffic(&before, &after, steps, placement);
    check_memory(&program, &after, placement);

    program.terminate();
    assert_eq!(program.wait().code(), Some(0));
}

/// Every weight of the file rests on one tier, and the metrics say the same as the plan.
fn check_homes(figures: &Figures, file: &Path, placement: &Placement) {
    let gguf = Gguf::open(file).unwrap();
    let of_file: u64 = gguf.tensors.iter().map(|tensor| tensor.bytes).sum();
    let homes = figures.tiers().map(|(name, tier)| {
        let home = bytes(tier, "home_bytes");
        let sample = format!(r#"strata_weight_home_bytes{{tier="{name}"}}"#);
        assert_eq!(figures.metrics.value(&sample) as u64, home, "{name}");
        assert!(
            home > 0 || !placement.homes.contains(&name),
            "nothing rests on {name}"
        );
        home
    });
    assert_eq!(homes.sum::<u64>(), of_file);
}

fn check_traffic(before: &Figures, after: &Figures, steps: u64, placement: &Placement) {
    let per_step = &after.memory["per_step"];
    let planned = bytes(per_step, "storage_read_bytes") * steps;
    assert!(planned > 0);
    let moved = |from, to| after.moved(from, to) - before.moved(from, to);
    assert_near(
        "from storage, by the metrics",
        moved("storage", "host"),
        planned,
    );
    let rung = after.memory["reader"]["rung"].as_str().unwrap();
    let read = after.read_bytes - before.read_bytes;
    if rung == "pread_buffered" {
        eprintln!("skipped: the reader is {rung}, and what the page cache holds is not read");
    } else if read == 0 {
        eprintln!("skipped: /proc/PID/io does not count what this file system reads");
    } else {
        assert_near("from storage, by the kernel", read, planned);
    }
    let planned = bytes(per_step, "link_bytes") * steps;
    assert_eq!(planned > 0, placement.streams_over_the_link);
    assert_near("over the link", moved("host", "device"), planned);
}

fn check_memory(program: &Program, figures: &Figures, placement: &Placement) {
    let mut arenas = Vec::new();
    let mut resident = 0;
    for (name, tier) in figures.tiers().filter(|(name, _)| *name != "storage") {
        let arena = bytes(tier, "arena_bytes");
        let kinds = ["weights_bytes", "ring_bytes", "kv_bytes", "scratch_bytes"];
        let claimed: u64 = kinds.map(|kind| bytes(tier, kind)).iter().sum();
        assert!(arena <= claimed && claimed <= bytes(tier, "budget_bytes"));
        let held = bytes(tier, "resident_bytes");
        let filled = bytes(tier, "weights_bytes") + bytes(tier, "ring_bytes");
        eprintln!(
            "{name}: {held} of {arena} bytes are resident, {filled} of them weights and ring"
        );
        assert!(
            held <= arena && held as f64 >= filled as f64 * (1.0 - TOLERANCE),
            "{name}: {tier}"
        );
        resident += held;
        arenas.push(arena);
    }

    let overhead = figures.memory["overhead"].as_array().unwrap();
    let items: u64 = overhead.iter().map(|item| bytes(item, "bytes")).sum();
    for item in overhead {
        eprintln!("  {}: {}", item["what"], item["bytes"]);
        assert!(item["what"].as_str().is_some_and(|what| !what.is_empty()));
    }
    let process = &figures.memory["process"];
    assert_eq!(items + resident, bytes(process, "rss_bytes"));
    assert!(items <= OVERHEAD_MAX, "{items}");

    let heap = &figures.memory["heap"];
    let activations = bytes(heap, "peak_while_serving_bytes") - bytes(heap, "at_rest_bytes");
    let scratch = bytes(heap, "scratch_planned_bytes");
    eprintln!("the heap grew by {activations} bytes for steps, the plan has {scratch} for them");
    assert!(
        activations <= scratch + HEAP_OF_REQUESTS,
        "{activations} of {scratch}"
    );

    let smaps = program.proc_file("smaps");
    let rss = smaps
        .lines()
        .map(|line| figure(line, "Rss:") * 1024)
        .sum::<u64>();
    if rss == 0 {
        eprintln!("skipped: the kernel does not say what is resident");
        return;
    }
    assert!(
        rss.abs_diff(bytes(process, "rss_bytes")) <= RSS_TOLERANCE,
        "{rss} bytes are resident, and /memory says {process}"
    );
    // No other memory asks for huge pages, so the arenas can be told from the rest.
    let mut mapped = huge_page_mappings(&smaps);
    mapped.sort_unstable();
    arenas.sort_unstable();
    if mapped.is_empty() {
        eprintln!("skipped: the kernel has no huge pages, so arenas do not show");
    } else {
        assert_eq!(mapped, arenas);
    }
    let peak = figure(&program.proc_file("status"), "VmHWM:") * 1024;
    eprintln!(
        "peak RSS: {peak} bytes, the budgets are {}",
        placement.budget
    );
    assert!(peak > 0 && peak <= placement.budget + OVERHEAD_MAX);
}

/// Sizes of the mappings for which huge pages were asked.
fn huge_page_mappings(smaps: &str) -> Vec<u64> {
    let mut sizes = Vec::new();
    let mut size = 0;
    for line in smaps.lines() {
        if line.starts_with("Size:") {
            size = figure(line, "Size:") * 1024;
        } else if let Some(flags) = line.strip_prefix("VmFlags:")
            && flags.split_whitespace().any(|flag| flag == "hg")
        {
            sizes.push(size);
        }
    }
    sizes
}

#[test]
fn three_tiers_streamed_to_the_device_for_64_tokens() {
    check(&Placement {
        flags: &[
            "--device",
            "emulated",
            "--device-memory",
            "64MiB",
            "--host-memory",
            "128MiB",
        ],
        budget: 192 * MIB,
        tokens: 64,
        prompt_tokens: 1,
        homes: &["device", "host", "storage"],
        streams_over_the_link: true,
    });
}

#[test]
fn three_tiers_where_the_host_computes() {
    check(&Placement {
        flags: &[
            "--device",
            "emulated",
            "--device-memory",
            "64MiB",
            "--host-memory",
            "128MiB",
            "--executor",
            "host",
        ],
        budget: 192 * MIB,
        tokens: 10,
        prompt_tokens: 40,
        homes: &["device", "host", "storage"],
        streams_over_the_link: false,
    });
}

#[test]
fn ram_and_storage() {
    check(&Placement {
        flags: &["--device", "cpu", "--host-memory", "160MiB"],
        budget: 160 * MIB,
        tokens: 10,
        prompt_tokens: 130,
        homes: &["host", "storage"],
        streams_over_the_link: false,
    });
}
