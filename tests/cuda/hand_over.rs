//! `strata` becomes `strata-cuda` where there is a driver, and says what is missing otherwise.

use crate::device::device;
use crate::program::{Program, strata_path, without_settings};
use crate::run::root;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Output;

fn tiny() -> PathBuf {
    root().join("tests/data/tiny/llama.gguf")
}

/// The file name of the program that a process is.
fn name_of(process: u32) -> String {
    let path = fs::read_link(format!("/proc/{process}/exe")).unwrap();
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// One token of `program` on a device, with what it says of the device.
fn generate(program: &Path, device: &str) -> Output {
    without_settings(program)
        .arg("generate")
        .arg(tiny())
        .args(["-p", "the", "-n", "1", "--context", "64", "--log", "debug"])
        .args(["--device", device])
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_process_is_the_program_that_suits_the_device() {
    let Some(device) = device() else { return };
    drop(device);
    for (flags, name) in [
        (["--device", "cpu"], "strata"),
        (["--device", "cuda:0"], "strata-cuda"),
        (["--device", "auto"], "strata-cuda"),
    ] {
        let mut program = Program::serve(&tiny(), &[&flags[..], &["--context", "64"]].concat());
        program.address();
        assert_eq!(name_of(program.id()), name, "{flags:?}");
        program.terminate();
        assert_eq!(program.wait().code(), Some(0), "{flags:?}");
    }
}

/// The other has more than a hundred.
#[test]
fn the_program_for_the_cpu_has_no_kernels() {
    let program = fs::read(strata_path()).unwrap();
    let entry = b".visible .entry";
    assert!(!program.windows(entry.len()).any(|bytes| bytes == entry));
}

#[test]
fn what_does_not_lie_beside_strata_is_said() {
    let Some(_device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("strata");
    let beside = folder.path().join("strata-cuda");
    fs::copy(strata_path(), &program).unwrap();
    let told = |what: &str| {
        let missing = format!(
            "strata-cuda, which has the kernels of a GPU, is not in {}",
            folder.path().display()
        );
        let refused = generate(&program, "cuda:0");
        let text = said(&refused);
        assert_eq!(refused.status.code(), Some(2), "{what}: {text}");
        let ours = text.lines().filter(|line| line.starts_with("strata: "));
        assert_eq!(ours.count(), 1, "{what}: {text}");
        for part in [
            "--device cuda:0",
            &missing,
            "make build-cuda",
            "--device cpu",
        ] {
            assert!(text.contains(part), "{what}: {text:?} lacks {part:?}");
        }
        let served = generate(&program, "auto");
        let text = said(&served);
        assert!(served.status.success(), "{what}: {text}");
        let lines = text
            .lines()
            .filter(|line| line.contains("the CPU computes: "));
        let lines: Vec<&str> = lines.collect();
        assert_eq!(lines.len(), 1, "{what}: {text}");
        assert!(lines[0].contains(&missing), "{what}: {text}");
    };
    told("nothing");
    symlink(&program, &beside).unwrap();
    told("strata itself");
    fs::remove_file(&beside).unwrap();
    fs::copy(&program, &beside).unwrap();
    told("a copy of strata");
}

#[test]
fn a_program_beside_strata_that_does_not_start_is_named() {
    let Some(_device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("strata");
    let beside = folder.path().join("strata-cuda");
    fs::copy(strata_path(), &program).unwrap();
    // Nobody may start it.
    fs::write(&beside, "no program").unwrap();
    for device in ["auto", "cuda:0"] {
        let refused = generate(&program, device);
        let text = said(&refused);
        assert_eq!(refused.status.code(), Some(1), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        let path = beside.display().to_string();
        for part in [
            &path,
            "Permission denied",
            "make build-cuda",
            "--device cpu",
        ] {
            assert!(text.contains(part), "{text:?} lacks {part:?}");
        }
    }
    // Who does not ask for a GPU is not held up.
    let served = generate(&program, "cpu");
    assert!(served.status.success(), "{}", said(&served));
}
