//! `strata bench rates` measures what a plan is predicted from, and `strata plan` uses it where it belongs: how fast
//! anything is decides nothing here.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/http.rs"]
mod http;
#[path = "support/process.rs"]
mod process;

use process::{Guard, Outcome, run, strata};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use strata::placement::HardwareCard;
use tempfile::TempDir;

/// A user's folder for caches, and a model.
struct Place {
    folder: TempDir,
    model: PathBuf,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama.gguf");
        let model = folder.path().join("model.gguf");
        std::fs::copy(tiny, &model).unwrap();
        Place { folder, model }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn stored(&self) -> PathBuf {
        self.path("cache/strata/rates.toml")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = strata();
        command
            .args(arguments)
            .env("XDG_CACHE_HOME", self.path("cache"));
        command
    }

    fn plan(&self, flags: &[&str]) -> Outcome {
        let flags = [
            &["plan", self.model.to_str().unwrap(), "--device", "emulated"],
            flags,
        ]
        .concat();
        run(&mut self.command(&flags))
    }

    /// In little time; without a GPU, should there be one.
    fn bench(&self, flags: &[&str]) -> Outcome {
        let first = ["bench", "rates", "--seconds", "1", "--device", "emulated"];
        run(&mut self.command(&[&first, flags].concat()))
    }

    #[track_caller]
    fn card(&self) -> HardwareCard {
        HardwareCard::parse(&std::fs::read_to_string(self.stored()).unwrap()).unwrap()
    }
}

#[track_caller]
fn assert_contains(text: &str, part: &str) {
    assert!(text.contains(part), "{text} lacks {part:?}");
}

#[test]
fn a_plan_is_predicted_from_what_was_measured() {
    let place = Place::new();
    assert_contains(place.plan(&[]).success(), "\nrates: assumed\n");

    let model = place.model.to_str().unwrap();
    let outcome = place.bench(&[model, "--json"]);
    let report: Value = serde_json::from_str(outcome.success()).unwrap();
    assert_eq!(report["profile"], place.stored().to_str().unwrap());
    for pointer in [
        "/storage/engine/bytes_per_second",
        "/storage/best/bytes_per_second",
        "/storage/ways/0/bytes_per_second",
        "/memory/bytes_per_second",
        "/memory/one_thread_bytes_per_second",
        "/link/copy_bytes_per_second",
        "/attention/bytes_per_second",
        "/attention/flops_per_second",
        "/rates/host_products/F32/0/bytes_per_second",
    ] {
        let rate = report.pointer(pointer).and_then(Value::as_f64);
        assert!(rate.is_some_and(|rate| rate > 0.0), "{pointer} of {report}");
    }
    for part in [
        "storage, ",
        "memory, ",
        "link, ",
        "attention, ",
        "products, ",
    ] {
        assert_contains(&outcome.stderr, part);
    }
    assert!(!outcome.stderr.contains('\u{1b}'), "{}", outcome.stderr);

    let card = place.card();
    let measured = card.measured.clone().unwrap();
    assert!(card.rates.copy_bytes_per_second.is_some());
    assert!(card.rates.host_attention.is_some());
    assert_eq!(card.rates.processors, Some(measured.threads));
    assert!(measured.storage_file.unwrap().ends_with("model.gguf"));

    let stored = place.stored();
    let named = format!("\nrates: from a measurement of {} ", &measured.date[..10]);
    let with_path = format!("({})\n", stored.display());
    let plan = place.plan(&[]);
    assert_contains(plan.success(), &named);
    assert_contains(plan.success(), &with_path);
    assert_contains(
        place.plan(&["--rates", "none"]).success(),
        "\nrates: assumed\n",
    );

    // By name too, wherever it lies.
    let moved = place.path("moved.toml");
    std::fs::rename(&stored, &moved).unwrap();
    assert_contains(place.plan(&[]).success(), "\nrates: assumed\n");
    let by_name = place.plan(&["--rates", moved.to_str().unwrap()]);
    assert_contains(by_name.success(), "moved.toml)\n");
    assert_contains(by_name.success(), &named);
    std::fs::rename(&moved, &stored).unwrap();

    // A card of another machine wins.
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let other = root.join("config/hardware/rtx-4090-desktop.toml");
    let with_card = place.plan(&["--hardware", other.to_str().unwrap()]);
    assert_contains(with_card.success(), "\nrates: from RTX 4090 desktop (");

    // One part anew; the others stay.
    let outcome = place.bench(&["--only", "memory"]);
    assert_contains(outcome.success(), "memory: ");
    let again = place.card();
    assert_eq!(again.rates.host_products, card.rates.host_products);
    assert_eq!(
        again.rates.storage_bytes_per_second,
        card.rates.storage_bytes_per_second
    );
    assert_eq!(
        again.measured.unwrap().storage_device,
        measured.storage_device
    );
}

#[test]
fn a_stored_profile_counts_where_it_belongs() {
    let place = Place::new();
    let outcome = place.bench(&[]);
    assert_contains(outcome.success(), "stored in ");
    assert_contains(outcome.success(), "storage is not measured");
    let plan = place.plan(&[]);
    assert_contains(plan.success(), "; storage assumed: it was not measured\n");

    let text = std::fs::read_to_string(place.stored()).unwrap();
    let card = place.card();
    let write = |change: &dyn Fn(&mut HardwareCard)| {
        let mut card = card.clone();
        change(&mut card);
        std::fs::write(place.stored(), card.to_toml()).unwrap();
    };
    write(&|card| card.measured.as_mut().unwrap().storage_device = Some(u64::from(u32::MAX)));
    let plan = place.plan(&[]);
    assert_contains(
        plan.success(),
        "; storage assumed: the model lies on another file system",
    );
    write(&|card| card.measured.as_mut().unwrap().processor = "Another".to_owned());
    let plan = place.plan(&[]);
    assert_contains(plan.success(), "\nrates: assumed\n");
    assert_contains(&plan.stderr, "the processor was `Another`");
    assert_contains(&plan.stderr, "`strata bench rates`");
    std::fs::write(place.stored(), &text).unwrap();
    let threads = (card.measured.unwrap().threads + 1).to_string();
    let plan = place.plan(&["--threads", &threads]);
    assert_contains(plan.success(), "\nrates: assumed\n");
    assert_contains(&plan.stderr, "threads computed");

    // A stored file that is none ends nothing; one that was asked for by name does.
    let bad = format!("speed = 3\n{text}");
    std::fs::write(place.stored(), &bad).unwrap();
    let plan = place.plan(&[]);
    assert_contains(plan.success(), "\nrates: assumed\n");
    assert_contains(&plan.stderr, "speed");
    let path = place.path("bad.toml");
    std::fs::write(&path, "name = \"x\"\nspeed = 3\n").unwrap();
    let plan = place.plan(&["--rates", path.to_str().unwrap()]);
    plan.refusal(1, &["read the rates", "bad.toml", "line 2", "speed"]);
    let zero = text.replace(
        "\nhost_memory_bytes_per_second = ",
        "\nhost_memory_bytes_per_second = -",
    );
    std::fs::write(&path, zero).unwrap();
    let plan = place.plan(&["--rates", path.to_str().unwrap()]);
    plan.refusal(
        1,
        &["bad.toml", "host_memory_bytes_per_second", "from 1 to 1e18"],
    );
    let plan = place.plan(&["--rates", "/none.toml"]);
    plan.refusal(1, &["/none.toml", "No such file"]);
}

#[test]
fn what_cannot_be_is_told_before_anything_is_measured() {
    let place = Place::new();
    let model = place.model.to_str().unwrap();
    let folder = place.folder.path().to_str().unwrap();
    place
        .bench(&["--only", "storage"])
        .refusal(2, &["MODEL.gguf"]);
    place.bench(&["--out", folder]).refusal(2, &["is a folder"]);
    place
        .bench(&["--out", "/none/rates.toml"])
        .refusal(2, &["/none/rates.toml", "not there"]);
    place
        .bench(&["--out", model])
        .refusal(2, &["model.gguf", "no profile"]);
    place
        .bench(&["--out", "-", "--json"])
        .refusal(2, &["--json", "--out"]);
    place.bench(&["/none.gguf"]).refusal(1, &["/none.gguf"]);
    let mut nowhere = strata();
    nowhere
        .args(["bench", "rates"])
        .env_remove("XDG_CACHE_HOME")
        .env_remove("HOME");
    run(&mut nowhere).refusal(2, &["--out"]);

    // A part alone makes no profile.
    let outcome = place.bench(&["--only", "memory"]);
    assert_contains(outcome.success(), "not stored");
    assert!(!place.stored().exists());
    let outcome = place.bench(&["--only", "memory", "--out", "-"]);
    HardwareCard::parse(outcome.success()).unwrap();
}

#[test]
fn an_interruption_ends_it_at_once_and_leaves_the_stored_profile_alone() {
    let place = Place::new();
    let stored = place.stored();
    std::fs::create_dir_all(stored.parent().unwrap()).unwrap();
    std::fs::write(&stored, "as it was").unwrap();
    let mut command = place.command(&["bench", "rates", "--seconds", "600"]);
    command
        .arg(&place.model)
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut child = Guard(command.spawn().unwrap());
    let mut lines = BufReader::new(child.0.stderr.take().unwrap()).lines();
    assert_contains(&lines.next().unwrap().unwrap(), "storage");
    let kill = Command::new("kill")
        .args(["-s", "INT", &child.0.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    assert_eq!(child.wait().signal(), Some(2));
    assert_eq!(std::fs::read_to_string(&stored).unwrap(), "as it was");
    let left: Vec<_> = std::fs::read_dir(place.path("cache/strata"))
        .unwrap()
        .collect();
    assert_eq!(left.len(), 1, "{left:?}");
}
