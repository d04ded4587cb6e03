//! Places that cannot be written: folders, full disks, closed pipes; and a run that is killed half way.

use super::process::{Guard, Server, run, strata};
use super::split::{Dealt, split};
use super::{CARD, good_model};
use std::fs::OpenOptions;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use strata::gguf::Gguf;

fn synth(card: &Path, output: &Path, vocabulary: &Path) -> Command {
    let mut command = strata();
    command.arg("synth").args([card, output]);
    command.arg("--vocabulary").arg(vocabulary);
    command
}

fn full() -> std::fs::File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

/// Nothing but the given names is in the folder.
#[track_caller]
fn assert_holds(folder: &Path, names: &[&str]) {
    let mut found: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    found.sort();
    assert_eq!(found, names);
}

#[test]
fn synth_into_a_place_that_cannot_be_written_leaves_nothing() {
    let (folder, model) = good_model();
    let card = folder.path().join("card.toml");
    std::fs::write(&card, CARD).unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir(path("folder")).unwrap();
    std::fs::create_dir_all(path("busy/out.gguf.partial")).unwrap();
    std::fs::create_dir(path("pipe")).unwrap();
    let made = Command::new("mkfifo")
        .arg(path("pipe/out.gguf.partial"))
        .status();
    assert!(made.unwrap().success());
    std::fs::create_dir(path("link")).unwrap();
    std::fs::write(path("precious"), "kept").unwrap();
    std::os::unix::fs::symlink(path("precious"), path("link/out.gguf.partial")).unwrap();
    for (output, part) in [
        (path("nowhere/out.gguf"), "No such file"),
        (path("folder"), "a directory"),
        (path("good.gguf/out.gguf"), "Not a directory"),
        (path("busy/out.gguf"), "directory"),
        (path("pipe/out.gguf"), "is no file"),
        (path("link/out.gguf"), "out.gguf.partial is a link"),
        ("/dev/full".into(), "a device"),
        ("/".into(), "a directory"),
        ("..".into(), "a directory"),
        (path("none/."), "name of a folder"),
    ] {
        let outcome = run(&mut synth(&card, &output, &model));
        outcome.refusal(1, &["cannot write", part]);
        assert!(!output.is_file(), "{}", output.display());
    }
    assert_eq!(std::fs::read_to_string(path("precious")).unwrap(), "kept");
    assert_holds(&path("folder"), &[]);
    run(&mut synth(&card, &model, &model)).refusal(2, &["the vocabulary file itself"]);
    // In several files it is all of them.
    let shards = split(&model, 3, Dealt::InRuns);
    for onto in &shards {
        let before = std::fs::read(onto).unwrap();
        let outcome = run(synth(&card, onto, &shards[0]).arg("--force"));
        outcome.refusal(2, &["the vocabulary file itself"]);
        assert!(std::fs::read(onto).unwrap() == before);
    }
}

#[test]
fn synth_replaces_a_file_only_when_told_to() {
    let (folder, model) = good_model();
    let card = folder.path().join("card.toml");
    std::fs::write(&card, CARD).unwrap();
    let output = folder.path().join("precious.gguf");
    std::fs::write(&output, "kept").unwrap();
    run(&mut synth(&card, &output, &model)).refusal(2, &["is there already", "--force"]);
    assert_eq!(std::fs::read_to_string(&output).unwrap(), "kept");
    assert!(
        run(synth(&card, &output, &model).arg("--force"))
            .status
            .success()
    );
    assert!(std::fs::metadata(&output).unwrap().len() > 4);
}

#[test]
fn synth_of_a_user_who_may_not_write_there() {
    let (folder, model) = good_model();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("card.toml"), CARD).unwrap();
    let program = path("strata");
    std::fs::copy(env!("CARGO_BIN_EXE_strata"), &program).unwrap();
    std::fs::create_dir(path("locked")).unwrap();
    for name in [".", "locked"] {
        std::fs::set_permissions(path(name), PermissionsExt::from_mode(0o555)).unwrap();
    }
    let mut command = Command::new(&program);
    command.arg("synth").arg(path("card.toml"));
    command
        .arg(path("locked/out.gguf"))
        .arg("--vocabulary")
        .arg(model);
    if std::fs::write(path("locked/probe"), "").is_ok() {
        std::fs::remove_file(path("locked/probe")).unwrap();
        // This user may write everywhere; another may not.
        if Command::new(&program)
            .uid(65534)
            .arg("--version")
            .output()
            .is_err()
        {
            println!("skipped: this user writes everywhere, and no other can be had");
            return;
        }
        command.uid(65534);
    }
    run(&mut command).refusal(1, &["cannot write", "Permission denied"]);
    assert_holds(&path("locked"), &[]);
    std::fs::set_permissions(path("."), PermissionsExt::from_mode(0o755)).unwrap();
}

/// Unmounts when the test is over.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(bytes: u32) -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"])
            .arg(folder.path())
            .stderr(Stdio::null())
            .status();
        mounted
            .is_ok_and(|status| status.success())
            .then(|| SmallDisk(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg(self.0.path()).status());
    }
}

#[test]
fn synth_to_a_full_disk_says_how_much_is_missing() {
    let (folder, model) = good_model();
    let card = folder.path().join("card.toml");
    std::fs::write(&card, CARD).unwrap();
    // A kilobyte for each token, and more than the disk that there is.
    let wild = folder.path().join("wild.toml");
    let text = CARD
        .replace("layers = 2", "layers = 4000")
        .replace("embedding_length = 64", "embedding_length = 65536")
        .replace("feed_forward_length = 96", "feed_forward_length = 65536");
    std::fs::write(&wild, text).unwrap();
    let output = folder.path().join("out.gguf");
    run(&mut synth(&wild, &output, &model)).refusal(1, &["not enough space", "are free"]);
    assert!(!output.exists());

    let Some(disk) = SmallDisk::mount(128 << 10) else {
        println!("skipped: this user cannot mount a small disk");
        return;
    };
    let output = disk.0.path().join("out.gguf");
    run(&mut synth(&card, &output, &model)).refusal(1, &["not enough space", "are free"]);
    assert_holds(disk.0.path(), &[]);

    // Room for one file, and an interrupted run has left almost all of one.
    let good = folder.path().join("good-size.gguf");
    run(&mut synth(&card, &good, &model)).success();
    let bytes = std::fs::metadata(&good).unwrap().len();
    let Some(disk) = SmallDisk::mount(bytes as u32 + (64 << 10)) else {
        return;
    };
    let output = disk.0.path().join("out.gguf");
    let left = disk.0.path().join("out.gguf.partial");
    std::fs::write(&left, vec![1; bytes as usize - 1]).unwrap();
    run(&mut synth(&card, &output, &model)).success();
    assert_holds(disk.0.path(), &["out.gguf"]);
}

/// A disk that fills up while the file is written, as the limit of a file's size.
#[test]
fn synth_that_runs_into_a_limit_half_way_leaves_nothing_under_the_final_name() {
    let (folder, model) = good_model();
    let card = folder.path().join("card.toml");
    std::fs::write(&card, CARD).unwrap();
    let output = folder.path().join("out.gguf");
    let command = synth(&card, &output, &model);
    // Blocks of 512 bytes.
    let outcome = run(Command::new("sh")
        .args(["-c", "ulimit -f 200; exec \"$0\" \"$@\""])
        .arg(command.get_program())
        .args(command.get_args()));
    outcome.refusal(1, &["cannot write", "File too large", "ulimit -f"]);
    assert_holds(folder.path(), &["card.toml", "good.gguf"]);
}

#[test]
fn synth_that_is_killed_half_way_leaves_nothing_under_the_final_name() {
    let (folder, model) = good_model();
    let output = folder.path().join("out.gguf");
    let large = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/tinyllama-1.1b.toml");
    let mut command = synth(&large, &output, &model);
    let mut child = Guard(command.stderr(Stdio::null()).spawn().unwrap());
    let partial = folder.path().join("out.gguf.partial");
    while std::fs::metadata(&partial).map_or(0, |file| file.len()) < 1 << 20 {
        let ended = child.0.try_wait().unwrap();
        assert!(ended.is_none(), "{ended:?}");
        std::thread::yield_now();
    }
    child.0.kill().unwrap();
    child.wait();
    assert_holds(folder.path(), &["good.gguf", "out.gguf.partial"]);

    // The next run is not disturbed by what the killed one left.
    let card = folder.path().join("card.toml");
    std::fs::write(&card, CARD).unwrap();
    assert!(run(&mut synth(&card, &output, &model)).status.success());
    Gguf::open(&output).unwrap();
    assert_holds(folder.path(), &["card.toml", "good.gguf", "out.gguf"]);
}

#[test]
fn output_that_cannot_be_written_is_a_failure_and_no_panic() {
    let (_folder, model) = good_model();
    let generate = ["-p", "the", "-n", "2"];
    for arguments in [&["inspect"][..], &["plan"]] {
        let outcome = run_into_full(strata().args(arguments).arg(&model));
        assert_eq!(
            outcome,
            (
                Some(1),
                "strata: write to stdout: No space left on device (os error 28)\n".to_owned()
            )
        );
    }
    let (code, text) = run_into_full(strata().arg("generate").arg(&model).args(generate));
    assert!(
        code == Some(1) && text.contains("write to stdout: No space left"),
        "{text}"
    );
}

/// Exit code and standard error of a command whose standard output is full.
fn run_into_full(command: &mut Command) -> (Option<i32>, String) {
    let output = command.stdout(full()).stderr(Stdio::piped()).spawn();
    let output = output.unwrap().wait_with_output().unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn a_standard_error_that_cannot_be_written_changes_no_exit_code() {
    let (folder, model) = good_model();
    let card = folder.path().join("card.toml");
    std::fs::write(&card, CARD).unwrap();
    let code = |command: &mut Command| {
        let status = command.stdout(Stdio::null()).stderr(full()).status();
        status.unwrap().code()
    };
    let generate = ["-p", "the", "-n", "2"];
    assert_eq!(
        code(strata().arg("generate").arg(&model).args(generate)),
        Some(0)
    );
    assert_eq!(
        code(strata().arg("generate").arg("/no").args(generate)),
        Some(1)
    );
    assert_eq!(
        code(strata().args(["generate", "/no", "-p", "x", "--context", "0"])),
        Some(2)
    );
    let output = folder.path().join("out.gguf");
    assert_eq!(code(&mut synth(&card, &output, &model)), Some(0));
}

/// `strata serve 2>&1 | head -3`, and the log on a full disk.
#[test]
fn a_server_outlives_the_reader_of_its_log() {
    let (_folder, model) = good_model();
    let program = env!("CARGO_BIN_EXE_strata");
    // The log goes through `sed`, which leaves after the line that tells the address; the rest has no reader.
    let script = "\"$0\" \"$@\" 2>&1 >/dev/null | sed -u '/listening/q' >&2";
    let mut command = Command::new("sh");
    command.args(["-c", script, program, "serve"]).arg(model);
    command.args(["--listen", "127.0.0.1:0", "--log", "trace", "--grace", "1"]);
    command.env("STRATA_RATES", "none");
    command.env("STRATA_CHECKSUM_DIRECTORY", "none");
    command.process_group(0);
    let server = Server::of(&mut command);
    let _group = GroupGuard(server.id());
    for _ in 0..3 {
        assert!(!server.text("the hen", 4).is_empty());
    }
    assert_eq!(server.get("/health").status, 200);
}

/// Ends every process of a group.
struct GroupGuard(u32);

impl Drop for GroupGuard {
    fn drop(&mut self) {
        let group = format!("-{}", self.0);
        drop(
            Command::new("kill")
                .args(["-s", "KILL", "--", &group])
                .status(),
        );
    }
}

/// Another user's processes are counted alone, so the limit hits the threads of this one.
#[test]
fn threads_that_the_system_refuses_are_done_without() {
    let (folder, model) = good_model();
    let program = folder.path().join("strata");
    std::fs::copy(env!("CARGO_BIN_EXE_strata"), &program).unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let limited = |arguments: &[&str]| {
        let mut command = Command::new("bash");
        command.args(["-c", "ulimit -u 40 && exec \"$0\" \"$@\""]);
        command.arg(&program).args(arguments).uid(65534);
        command.env("STRATA_RATES", "none");
        command.env("STRATA_CHECKSUM_DIRECTORY", "none");
        command
    };
    if !limited(&["--version"])
        .output()
        .is_ok_and(|output| output.status.success())
    {
        println!("skipped: this user cannot run a program as another with a limit of threads");
        return;
    }
    let model = model.to_str().unwrap();
    let outcome = run(&mut limited(&[
        "generate",
        model,
        "-p",
        "the",
        "-n",
        "2",
        "--threads",
        "1000",
    ]));
    outcome.success();
    assert!(
        outcome.stderr.contains("of 1000 compute threads"),
        "{}",
        outcome.stderr
    );
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
}
