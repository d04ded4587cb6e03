//! Paths at which there is no model.

use super::process::{run, strata};
use super::{CARD, every_command, good_model};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Users of this number own nothing.
const NOBODY: u32 = 65534;

fn pipe(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}

#[test]
fn what_is_no_model_is_named() {
    type Make = fn(&Path);
    let cases: [(&str, Make, &str); 9] = [
        ("missing.gguf", |_| {}, "No such file"),
        (
            "folder.gguf",
            |path| std::fs::create_dir(path).unwrap(),
            "a directory",
        ),
        (
            "empty.gguf",
            |path| std::fs::write(path, "").unwrap(),
            "empty",
        ),
        (
            "page.gguf",
            |path| std::fs::write(path, "<!DOCTYPE html><html>not found").unwrap(),
            "HTML",
        ),
        (
            "words.gguf",
            |path| std::fs::write(path, "hello, world").unwrap(),
            "starts with `hell`",
        ),
        ("pipe.gguf", pipe, "a pipe"),
        (
            "socket.gguf",
            |path| drop(std::os::unix::net::UnixListener::bind(path).unwrap()),
            "cannot open",
        ),
        (
            "loop.gguf",
            |path| symlink(path, path).unwrap(),
            "symbolic links",
        ),
        (
            "zero.gguf",
            |path| symlink("/dev/zero", path).unwrap(),
            "a device",
        ),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (name, make, part) in cases {
        let path = folder.path().join(name);
        make(&path);
        for outcome in every_command(&path) {
            let line = outcome.refusal(1, &[name, part]);
            // The path stands in the line once.
            assert_eq!(line.matches(name).count(), 1, "{line}");
        }
    }
}

#[test]
fn a_name_that_looks_like_a_line_of_ours_makes_no_line() {
    let (folder, _) = good_model();
    let path = folder.path().join("a\nstrata: all is well\u{1b}[2K\r.gguf");
    std::fs::write(&path, "x").unwrap();
    for outcome in every_command(&path) {
        let line = outcome.refusal(1, &["all is well"]);
        assert!(!line.contains(['\u{1b}', '\r']), "{line:?}");
    }
}

#[test]
fn a_file_that_may_not_be_read_is_named() {
    let (folder, model) = good_model();
    std::fs::set_permissions(&model, PermissionsExt::from_mode(0o000)).unwrap();
    let mut command = strata();
    if std::fs::File::open(&model).is_ok() {
        // This user may read everything; another may not. The program and its folder must be open to that one.
        let program = folder.path().join("strata");
        std::fs::copy(env!("CARGO_BIN_EXE_strata"), &program).unwrap();
        std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
        command = Command::new(program);
        command.uid(NOBODY);
        if let Err(error) = command.arg("--version").output() {
            println!("skipped: this user reads every file, and no other can be had: {error}");
            return;
        }
        command = Command::new(command.get_program());
        command.uid(NOBODY);
    }
    run(command.arg("inspect").arg(&model)).refusal(1, &["good.gguf", "Permission denied"]);
}

#[test]
fn cards_that_are_none_are_named() {
    let (folder, model) = good_model();
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("empty.toml", "");
    write("broken.toml", "layers = = 2");
    write("unknown.toml", &format!("layres = 2\n{CARD}"));
    write("zero.toml", &CARD.replace("layers = 2", "layers = 0"));
    write(
        "nan.toml",
        &CARD.replace("rms_epsilon = 1e-5", "rms_epsilon = nan"),
    );
    write(
        "wild.toml",
        &CARD.replace(
            "feed_forward_length = 96",
            "feed_forward_length = 4294967295",
        ),
    );
    write("long.toml", &"# a comment\n".repeat(100_000));
    pipe(&folder.path().join("pipe.toml"));
    std::fs::create_dir(folder.path().join("folder.toml")).unwrap();
    symlink("/dev/zero", folder.path().join("device.toml")).unwrap();
    symlink("loop.toml", folder.path().join("loop.toml")).unwrap();
    for (name, part) in [
        ("missing.toml", "missing.toml"),
        ("empty.toml", "missing field"),
        ("broken.toml", "line 1"),
        ("unknown.toml", "layres"),
        ("zero.toml", "layers"),
        ("nan.toml", "epsilon"),
        ("wild.toml", "feed_forward_length"),
        ("long.toml", "at most"),
        ("pipe.toml", "not a regular file"),
        ("folder.toml", "not a regular file"),
        ("device.toml", "not a regular file"),
        ("loop.toml", "symbolic links"),
    ] {
        let card = folder.path().join(name);
        run(strata().arg("plan").arg(&card)).refusal(1, &[part]);
        let output = folder.path().join("out.gguf");
        run(strata()
            .arg("synth")
            .args([&card, &output])
            .arg("--vocabulary")
            .arg(&model))
        .refusal(1, &[part]);
        assert!(!output.exists());
    }
}
