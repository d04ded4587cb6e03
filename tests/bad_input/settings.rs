//! Flags, files and variables that ask for what cannot be.

use super::good_model;
use super::process::{run, strata};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::process::Command;

#[test]
fn absurd_values_are_usage_errors_that_say_what_to_write() {
    let (_folder, model) = good_model();
    for (flags, parts) in [
        (&["--context", "0"][..], &["--context", "from 2 to"][..]),
        (&["--context", "-1"], &["`-1`", "from 2 to"]),
        (&["--context", "2147483648"], &["from 2 to"]),
        (&["--context", "1e30"], &["from 2 to"]),
        (&["--parallel", "0"], &["--parallel", "from 1 to"]),
        (&["--parallel", "99999"], &["from 1 to"]),
        (&["--threads", "0"], &["--threads", "from 1 to"]),
        (&["--threads", "100000"], &["from 1 to"]),
        (&["--host-memory", "0"], &["--host-memory", "24GiB"]),
        (&["--host-memory=-1GiB"], &["write it like"]),
        (&["--host-memory", "1e30"], &["write it like"]),
        (&["--host-memory", "99999999TiB"], &["up to 1024TiB"]),
        (&["--host-memory", "99999999999999999999999TiB"], &["up to"]),
        (&["--device-memory", "24G"], &["24GiB"]),
        (&["--device-memory", ""], &["write it like"]),
        (&["--link-rate", "0"], &["--link-rate", "4GB/s"]),
        (&["--link-rate", "0GB/s"], &["above 0"]),
        (&["--link-rate", "nan"], &["4GB/s"]),
        (&["--link-rate=-4GB/s"], &["4GB/s"]),
        (&["--slice", "1"], &["--slice", "64KiB to 4GiB"]),
        (&["--slice", "1TiB"], &["64KiB to 4GiB"]),
        (&["--ring-entries", "1"], &["--ring-entries", "from 2 to"]),
        (&["--ring-entries", "1000000"], &["from 2 to"]),
        (&["--step-width", "0"], &["--step-width", "from 1 to"]),
        (&["--device", "cuda:x"], &["cuda:0", "emulated"]),
        (&["--device", "tpu"], &["cpu, emulated or cuda:0"]),
        (&["--reader", "mmap"], &["io-uring or pread"]),
        (&["--executor", "both"], &["device, host or a number"]),
        (&["--copy=maybe"], &["true or false"]),
        (&["--log", "loud"], &["warn"]),
    ] {
        run(strata().arg("plan").arg(&model).args(flags)).refusal(2, parts);
        run(strata().arg("serve").arg(&model).args(flags)).refusal(2, parts);
    }
    for (flags, parts) in [
        (
            &["--listen", "8080"][..],
            &["--listen", "127.0.0.1:8080"][..],
        ),
        (&["--listen", "127.0.0.1:99999"], &["127.0.0.1:8080"]),
        (&["--queue", "0"], &["--queue", "from 1 to"]),
        (&["--grace", "nan"], &["--grace", "from 0 to"]),
        (&["--grace", "1e30"], &["from 0 to"]),
        (&["--keep-alive", "-1"], &["from 0 to"]),
        (&["--stall-timeout", "0"], &["from 0.001"]),
        (&["--api-key", ""], &["empty"]),
        (&["--model-name", "a\nb"], &["one line"]),
    ] {
        run(strata().arg("serve").arg(&model).args(flags)).refusal(2, parts);
    }
    for (flags, parts) in [
        (
            &["-p", "x", "--temperature", "nan"][..],
            &["temperature"][..],
        ),
        (&["-p", "x", "--temperature", "1e39"], &["temperature"]),
        (&["-p", "x", "--top-p", "0"], &["top_p"]),
        (&["-p", "x", "--min-p", "2"], &["min_p"]),
        (&["-p", "x", "-n", "0"], &["-n"]),
        (&["-p", "", "--log", "error"], &["-p"]),
        (
            &["-p", "the the the", "--context", "2", "--log", "error"],
            &["--context"],
        ),
    ] {
        run(strata().arg("generate").arg(&model).args(flags)).refusal(2, parts);
    }
    run(strata().args(["serve", "--listen", "127.0.0.1:0"])).refusal(2, &["MODEL.gguf"]);
}

#[test]
fn unknown_flags_and_commands_are_usage_errors() {
    for arguments in [
        &["sevre"][..],
        &["serve", "m.gguf", "--contxt", "5"],
        &["serve", "m.gguf", "--context"],
        &["serve", "a.gguf", "b.gguf"],
        &["generate", "m.gguf"],
        &["synth", "card.toml"],
        &[],
    ] {
        let outcome = run(strata().args(arguments));
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.stderr);
        assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    }
    let outcome = run(strata().args(["serve", "m.gguf", "--contxt", "5"]));
    assert!(outcome.stderr.contains("--context"), "{}", outcome.stderr);
    let outcome = run(strata().arg("inspect").arg(OsStr::from_bytes(b"\xff.gguf")));
    outcome.refusal(1, &["cannot open"]);
    let outcome = run(strata()
        .args(["generate", "m.gguf", "-p"])
        .arg(OsStr::from_bytes(b"\xff")));
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.stderr);
}

#[test]
fn configurations_that_cannot_be_read_are_named() {
    let (folder, model) = good_model();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("unknown.toml"), "contxt = 5").unwrap();
    std::fs::write(path("syntax.toml"), "a = 1\nb = = 2").unwrap();
    std::fs::write(path("value.toml"), "context = -5").unwrap();
    std::fs::write(path("table.toml"), "[context]\nx = 1").unwrap();
    std::fs::write(path("binary.toml"), b"\xff\xfe\x00").unwrap();
    std::fs::write(path("long.toml"), "# comment\n".repeat(200_000)).unwrap();
    std::fs::create_dir(path("folder.toml")).unwrap();
    symlink("/dev/zero", path("device.toml")).unwrap();
    symlink("loop.toml", path("loop.toml")).unwrap();
    let made = Command::new("mkfifo").arg(path("pipe.toml")).status();
    assert!(made.unwrap().success());
    for (name, parts) in [
        ("missing.toml", &["No such file", "--config"][..]),
        ("unknown.toml", &["`contxt`", "`context`"]),
        ("syntax.toml", &["line 2"]),
        ("value.toml", &["context", "from 2 to"]),
        ("table.toml", &["give a string"]),
        ("binary.toml", &["UTF-8"]),
        ("long.toml", &["at most"]),
        ("folder.toml", &["not a regular file", "--config"]),
        ("device.toml", &["not a regular file", "--config"]),
        ("loop.toml", &["symbolic links"]),
        ("pipe.toml", &["not a regular file", "--config"]),
    ] {
        let flag = run(strata()
            .arg("serve")
            .arg(&model)
            .arg("--config")
            .arg(path(name)));
        let line = flag.refusal(2, parts);
        assert_eq!(line.matches(name).count(), 1, "{line}");
        let variable = run(strata()
            .arg("plan")
            .arg(&model)
            .env("STRATA_CONFIG", path(name)));
        variable.refusal(2, parts);
    }
}

#[test]
fn variables_that_mean_nothing_are_named() {
    let (_folder, model) = good_model();
    for (variable, value, parts) in [
        (
            "STRATA_CONTXT",
            "5",
            &["STRATA_CONTXT", "STRATA_CONTEXT"][..],
        ),
        ("STRATA_", "5", &["STRATA_"]),
        ("STRATA_CONTEXT", "many", &["STRATA_CONTEXT", "from 2 to"]),
        ("STRATA_HOST_MEMORY", "-1", &["STRATA_HOST_MEMORY"]),
    ] {
        run(strata().arg("plan").arg(&model).env(variable, value)).refusal(2, parts);
    }
}

/// What is missing for a GPU is one line: the end where one was asked for, and no obstacle where it would have been taken.
#[test]
fn where_there_is_no_gpu_it_is_said_what_is_missing() {
    let Err(missing) = strata::memory::find_cuda_driver() else {
        println!("skipped: there is a driver");
        return;
    };
    let missing = missing.to_string();
    let (_folder, model) = good_model();
    let parts = ["--device cuda:0", &missing, "--device cpu"];
    let serve = ["--device", "cuda:0"];
    let outcome = run(strata().arg("serve").arg(&model).args(serve));
    outcome.refusal(2, &parts);
    let generate = ["-p", "the", "-n", "1", "--device", "auto", "--log", "debug"];
    let outcome = run(strata().arg("generate").arg(&model).args(generate));
    outcome.success();
    let said: Vec<&str> = outcome
        .stderr
        .lines()
        .filter(|line| line.contains("the CPU computes: "))
        .collect();
    assert_eq!(said.len(), 1, "{}", outcome.stderr);
    assert!(said[0].contains(&missing), "{}", said[0]);
}

#[test]
fn an_address_that_cannot_be_had_is_told_before_the_model_is_read() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (address, part) in [
        (address.as_str(), "taken"),
        ("192.0.2.1:80", "does not have the address"),
        ("no such host:80", "--listen"),
    ] {
        let outcome = run(strata().args(["serve", "/nonexistent/m.gguf", "--listen", address]));
        outcome.refusal(1, &[address, part, "--listen"]);
    }
}

#[test]
fn what_is_wrong_in_a_shape_card_is_told_with_its_name() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let good = std::fs::read_to_string(root.join("models/tinyllama-1.1b.toml")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let card = folder.path().join("bad.toml");
    let long_key = format!("{} = 1", "k".repeat(1 << 19));
    for (from, to, part) in [
        ("layers = 22", "", "missing field `layers`"),
        ("layers = 22", "layers = true", "(in `layers`)"),
        ("layers = 22", "layers = 1000000", "1 to 4096"),
        (
            "head_count = 32",
            "head_count = 3",
            "llama.attention.head_count_kv",
        ),
        ("layers = 22", &long_key, "unknown field `kkk"),
    ] {
        assert!(good.contains(from), "{from}");
        std::fs::write(&card, good.replacen(from, to, 1)).unwrap();
        for command in ["plan", "estimate"] {
            let outcome = run(strata().arg(command).arg(&card));
            outcome.refusal(1, &["bad.toml: ", part]);
            assert!(
                outcome.stderr.len() < 10_000,
                "{} bytes",
                outcome.stderr.len()
            );
            assert!(
                !outcome.stderr.contains("(in `name`)"),
                "{}",
                outcome.stderr
            );
        }
    }
    std::fs::remove_file(&card).unwrap();
    run(strata().arg("plan").arg(&card)).refusal(1, &["bad.toml", "No such file"]);
}

/// A shape card and a hardware card alone: the machine that is planned for is the card's, not this one.
#[test]
fn a_hardware_card_is_a_machine_to_plan_for() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let plan = |card: &str, flags: &[&str]| {
        let mut command = super::strata();
        command
            .arg("plan")
            .arg(root.join("models/llama-3.3-70b.toml"))
            .arg("--hardware")
            .arg(root.join("config/hardware").join(card))
            .args(flags);
        super::run(&mut command)
    };
    let outcome = plan("rtx-4090-desktop.toml", &[]);
    let report = outcome.success();
    // 24 GiB less 512 MiB, and 64 GiB less a sixteenth.
    for part in [
        "device cuda,",
        "\ndevice       23.5 GiB",
        "\nhost         60.0 GiB",
        " limit  bound by",
        "\na prompt of 4096 tokens: ",
        "tokens/s for one sequence; more of them with\n",
    ] {
        assert!(report.contains(part), "no `{part}` in\n{report}");
    }
    // What is said wins.
    let outcome = plan("rtx-4090-desktop.toml", &["--host-memory", "32GiB"]);
    assert!(outcome.success().contains("\nhost         32.0 GiB"));
    let outcome = plan("two-core-vm.toml", &[]);
    assert!(outcome.success().starts_with("device cpu,"));
}

#[test]
fn a_hardware_card_gives_its_rates_and_the_report_says_so() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let plan = |card: Option<&std::path::Path>| {
        let mut command = super::strata();
        command
            .arg("plan")
            .arg(root.join("models/llama-3.3-70b.toml"))
            .args(["--device", "emulated"])
            .args(["--device-memory", "24GiB", "--host-memory", "64GiB"]);
        if let Some(card) = card {
            command.arg("--hardware").arg(card);
        }
        super::run(&mut command)
    };
    let assumed = plan(None);
    assert!(assumed.success().contains("\nrates: assumed\n"));
    let with_card = plan(Some(&root.join("config/hardware/rtx-4090-desktop.toml")));
    let report = with_card.success();
    assert!(
        report.contains("\nrates: from RTX 4090 desktop ("),
        "{report}"
    );
    let predictions = |report: &str| report.split("\nwidth").nth(1).unwrap().to_owned();
    assert_ne!(predictions(report), predictions(assumed.success()));

    let folder = tempfile::tempdir().unwrap();
    let bad = folder.path().join("bad.toml");
    std::fs::write(&bad, "name = \"x\"\nspeed = 3\n").unwrap();
    plan(Some(&bad)).refusal(1, &["hardware card", "bad.toml", "line 2", "speed"]);
    std::fs::write(&bad, "#".repeat(2 << 20)).unwrap();
    plan(Some(&bad)).refusal(1, &["bad.toml", "at most"]);
    plan(Some(folder.path())).refusal(1, &["not a regular file"]);
    plan(Some("/dev/zero".as_ref())).refusal(1, &["not a regular file"]);
}
