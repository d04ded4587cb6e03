//! Memory, or threads, that the system refuses: one line says while doing what, how much, the likeliest cause and what to
//! try first, whichever call is the one that is refused.

use super::http;
use super::models::{RandomOptions, random};
use super::process::{Guard, Outcome, completion, run, strata};
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use strata::gguf::Value;

/// `strata generate` with so many KiB of addresses.
fn generate(kibibytes: u64, model: &Path, flags: &[&str]) -> Outcome {
    let mut generate = strata();
    generate.arg("generate").arg(model).args(flags);
    generate.args([
        "-p",
        "the hen",
        "-n",
        "2",
        "--threads",
        "1",
        "--log",
        "error",
    ]);
    let limit = format!("ulimit -v {kibibytes}; exec \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &limit]).arg(generate.get_program());
    run(command.args(generate.get_args()))
}

#[test]
fn an_arena_that_the_system_refuses_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    random(&model, &RandomOptions::default());
    // 2 GiB of pages for keys and values, and 1 GiB of addresses.
    let flags = ["--device", "cpu", "--context", "1048576", "--parallel", "8"];
    let outcome = generate(1 << 20, &model, &flags);
    outcome.refusal(
        1,
        &[
            "load the model",
            "host arena",
            "bytes",
            "most likely",
            "ulimit -v",
            "first give a smaller --host-memory",
        ],
    );
}

/// As in a container with few processes: with each limit the server says what to raise, or answers.
#[test]
fn where_threads_are_refused_it_is_told_or_the_server_answers() {
    // Of the whole user, for whom nothing else runs. Only root may become another.
    const USER: &str = "3912467001";
    let as_user = ["--reuid", USER, "--clear-groups"];
    let allowed = Command::new("setpriv").args(as_user).arg("true").status();
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    random(&model, &RandomOptions::default());
    let everyone = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(folder.path(), everyone).unwrap();
    let reads = |file: &OsStr| {
        let mut test = Command::new("setpriv");
        let status = test.args(as_user).args(["test", "-r"]).arg(file).status();
        status.is_ok_and(|status| status.success())
    };
    if !allowed.is_ok_and(|status| status.success())
        || !reads(model.as_os_str())
        || !reads(strata().get_program())
    {
        eprintln!("skipped: another user, who may run this program, is needed");
        return;
    }
    let log = folder.path().join("log");
    let mut refused = 0;
    let mut limit = 1;
    loop {
        let mut serve = strata();
        serve
            .arg("serve")
            .arg(&model)
            .args(["--listen", "127.0.0.1:0"]);
        serve.args(["--copy", "--context", "64", "--threads", "2"]);
        let limited_to = format!("--nproc={limit}");
        let mut limited = Command::new("setpriv");
        limited.args(as_user).args(["prlimit", &limited_to]);
        limited.arg(serve.get_program()).args(serve.get_args());
        limited.env("STRATA_CHECKSUM_DIRECTORY", "none");
        limited.stderr(std::fs::File::create(&log).unwrap());
        let mut child = Guard(limited.spawn().unwrap());
        let text = || String::from_utf8_lossy(&std::fs::read(&log).unwrap()).into_owned();
        let status = loop {
            if let Some(status) = child.0.try_wait().unwrap() {
                break Some(status);
            }
            if text().contains("the weights are in place") {
                break None;
            }
            std::thread::sleep(Duration::from_millis(3));
        };
        let text = text();
        assert!(!text.contains("panicked"), "{limit}: {text}");
        if let Some(status) = status {
            assert_eq!(status.code(), Some(1), "{limit}: {text}");
            let line = text.lines().find(|line| line.starts_with("strata: "));
            let line = line.unwrap_or_else(|| panic!("{limit}: {text}"));
            assert!(line.contains("ulimit -u"), "{limit}: {line}");
            refused += 1;
            limit += 1;
            continue;
        }
        let (_, address) = text.split_once("http://").unwrap();
        let address = address.split_whitespace().next().unwrap().parse().unwrap();
        let body = completion("the hen", 2).to_string();
        let headers = [("content-type", "application/json")];
        let path = "/v1/completions";
        http::call(address, "POST", path, &headers, body.as_bytes()).ok();
        break;
    }
    assert!(refused > 3, "{refused} limits were too low");
}

/// Names the phase, the bytes, the cause and what to do, before the message of the runtime that ends the process.
#[test]
fn a_heap_that_the_system_refuses_is_told_before_the_process_ends() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    // The index takes more and more of the heap, so that this is what runs into most limits.
    let words: Vec<String> = (0..400_000).map(|word| format!("word {word}")).collect();
    let options = RandomOptions {
        metadata: vec![("test.words".to_owned(), Value::from(words))],
        ..RandomOptions::default()
    };
    random(&model, &options);
    let mut told = 0;
    for mebibytes in 14..30 {
        let outcome = generate(mebibytes << 10, &model, &["--device", "cpu"]);
        let text = &outcome.stderr;
        let Some((before, _)) = text.split_once("memory allocation of") else {
            continue;
        };
        told += 1;
        assert!(!outcome.status.success(), "{text}");
        for part in [
            "strata: out of memory while starting: the system refused ",
            " bytes; most likely ",
            "; first raise that limit",
        ] {
            assert!(before.contains(part), "{mebibytes} MiB: {text}");
        }
    }
    assert!(told > 0, "no limit met the heap");
}
