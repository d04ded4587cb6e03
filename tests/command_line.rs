//! The program from outside: what is wrong is told in one line that says what to do, with the right exit code.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;

/// (exit code, standard error) of a run that must fail.
fn run(arguments: &[&str], environment: &[(&str, &str)]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(arguments)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    (output.status.code().unwrap(), stderr)
}

#[track_caller]
fn check(arguments: &[&str], environment: &[(&str, &str)], code: i32, parts: &[&str]) {
    let (got, stderr) = run(arguments, environment);
    assert_eq!(got, code, "{stderr}");
    assert!(stderr.starts_with("strata: "), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{stderr:?} lacks {part:?}");
    }
}

#[test]
fn settings_that_cannot_be_are_usage_errors() {
    for (arguments, parts) in [
        (
            &["serve", "m.gguf", "--context", "0"][..],
            &["--context", "from 2 to"][..],
        ),
        (
            &["serve", "m.gguf", "--context", "-1"],
            &["--context", "`-1`"],
        ),
        (
            &["serve", "m.gguf", "--host-memory", "24G"],
            &["--host-memory", "24GiB"],
        ),
        (
            &["serve", "m.gguf", "--device", "cuda:0"],
            &["--device", "cuda:0", "cpu"],
        ),
        (
            &["serve", "m.gguf", "--listen", "8080"],
            &["--listen", "127.0.0.1:8080"],
        ),
        (&["serve", "--listen", "127.0.0.1:0"], &["MODEL.gguf"]),
        (
            &["serve", "--config", "/nonexistent.toml"],
            &["/nonexistent.toml", "--config"],
        ),
        (
            &["generate", "m.gguf", "-p", "x", "--temperature", "-1"],
            &["temperature"],
        ),
        (
            &["generate", "m.gguf", "-p", "x", "--top-p", "0"],
            &["top_p"],
        ),
        (&["generate", "m.gguf", "-p", "x", "-n", "0"], &["-n"]),
    ] {
        check(arguments, &[], 2, parts);
    }
    let environment = [("STRATA_CONTXT", "5")];
    check(
        &["serve", "m.gguf"],
        &environment,
        2,
        &["STRATA_CONTXT", "STRATA_CONTEXT"],
    );
}

#[test]
fn flags_that_are_unknown_are_usage_errors() {
    let (code, stderr) = run(&["serve", "m.gguf", "--contxt", "5"], &[]);
    assert_eq!(code, 2);
    assert!(
        stderr.contains("--contxt") && stderr.contains("--context"),
        "{stderr}"
    );
}

#[test]
fn a_model_that_is_not_there_is_named() {
    let listen = ["--listen", "127.0.0.1:0"];
    check(
        &["serve", "/nonexistent/m.gguf", listen[0], listen[1]],
        &[],
        1,
        &["/nonexistent/m.gguf"],
    );
    check(
        &["generate", "/nonexistent/m.gguf", "-p", "x"],
        &[],
        1,
        &["/nonexistent/m.gguf"],
    );
    let directory = tempfile::tempdir().unwrap();
    let page = directory.path().join("page.gguf");
    std::fs::write(&page, "<html>not found</html>").unwrap();
    check(
        &["generate", page.to_str().unwrap(), "-p", "x"],
        &[],
        1,
        &["page.gguf"],
    );
}

#[test]
fn a_port_that_is_taken_is_told_before_the_model_is_read() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let arguments = ["serve", "/nonexistent/m.gguf", "--listen", &address];
    check(&arguments, &[], 1, &[&address, "taken", "--listen"]);
}
