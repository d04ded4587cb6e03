//! `strata` becomes `strata-cuda` where there is a driver, and says what is missing otherwise.

use crate::device::device;
use crate::program::{Program, strata_path, without_settings};
use crate::run::root;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const SUCCESSOR: &str = "strata-cuda";

fn tiny() -> PathBuf {
    root().join("tests/data/tiny/llama.gguf")
}

/// The file name of the program that a process is.
fn name_of(process: u32) -> String {
    let path = fs::read_link(format!("/proc/{process}/exe")).unwrap();
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// What one token of `program` on a device came to, and what it said.
fn generate(program: &Path, device: &str, variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let output = without_settings(program)
        .arg("generate")
        .arg(tiny())
        .args([
            "-p",
            "the",
            "-n",
            "1",
            "--context",
            "64",
            "--device",
            device,
        ])
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

/// `cuda:0` is refused in one line with all of `parts`; for `auto` the CPU computes, and a line of the log says why.
#[track_caller]
fn assert_the_cpu_computes(program: &Path, variables: &[(&str, &str)], parts: &[&str]) {
    let has_all = |line: &str| parts.iter().all(|part| line.contains(part));
    let (code, said) = generate(program, "cuda:0", variables);
    let lines = said.lines().filter(|line| line.starts_with("strata: "));
    let lines: Vec<&str> = lines.collect();
    assert!(
        lines.len() == 1
            && has_all(lines[0])
            && lines[0].starts_with("strata: --device cuda:0: ")
            && lines[0].contains("--device cpu"),
        "{parts:?} in {said}"
    );
    assert_eq!(code, Some(2), "{said}");
    let (code, said) = generate(program, "auto", variables);
    let lines = said
        .lines()
        .filter(|line| line.contains("the CPU computes: "));
    let lines: Vec<&str> = lines.collect();
    assert!(lines.len() == 1 && has_all(lines[0]), "{parts:?} in {said}");
    assert_eq!(code, Some(0), "{said}");
}

/// `strata` in a folder of its own: a link to it, for a program that was just written may not be started while another
/// thread starts one. So the folder is on the same file system.
fn alone() -> (TempDir, PathBuf) {
    let program = strata_path();
    let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
    let alone = folder.path().join("strata");
    fs::hard_link(&program, &alone).unwrap();
    (folder, alone)
}

#[test]
fn the_process_is_the_program_that_suits_the_device() {
    let Some(device) = device() else { return };
    drop(device);
    for (flags, name) in [
        (["--device", "cpu"], "strata"),
        (["--device", "cuda:0"], SUCCESSOR),
        (["--device", "auto"], SUCCESSOR),
    ] {
        let mut program = Program::serve(&tiny(), &[&flags[..], &["--context", "64"]].concat());
        program.address();
        assert_eq!(name_of(program.id()), name, "{flags:?}");
        program.terminate();
        assert_eq!(program.wait().code(), Some(0), "{flags:?}");
    }
}

#[test]
fn the_program_for_the_cpu_has_no_kernels() {
    let has_kernels = |program: &Path| {
        let entry = b".visible .entry";
        let bytes = fs::read(program).unwrap();
        bytes.windows(entry.len()).any(|bytes| bytes == entry)
    };
    let program = strata_path();
    assert!(!has_kernels(&program));
    assert!(has_kernels(&program.with_file_name(SUCCESSOR)));
}

#[test]
fn what_is_missing_beside_strata_is_said() {
    let Some(_device) = device() else { return };
    let (folder, program) = alone();
    let folder = folder.path().canonicalize().unwrap();
    let missing = format!(
        "{SUCCESSOR}, which has the kernels of a GPU, is not in {}",
        folder.display()
    );
    assert_the_cpu_computes(&program, &[], &[&missing, "make build-cuda"]);
    // A link to nothing is not there either.
    symlink(folder.join("gone"), folder.join(SUCCESSOR)).unwrap();
    assert_the_cpu_computes(&program, &[], &[&missing, "make build-cuda"]);
}

#[test]
fn what_lies_beside_strata_and_is_not_strata_cuda_is_not_started() {
    let Some(_device) = device() else { return };
    let (folder, program) = alone();
    let beside = folder.path().canonicalize().unwrap().join(SUCCESSOR);
    let named = format!(
        "{}, which has the kernels of a GPU, cannot be used: ",
        beside.display()
    );
    let assert_refused = |why: &str| {
        let parts = [&format!("{named}{why}"), "make build-cuda"];
        assert_the_cpu_computes(&program, &[], &parts);
        fs::remove_file(&beside).unwrap();
    };
    // Each would hand over to itself for ever.
    symlink(&program, &beside).unwrap();
    assert_refused("it is this program again");
    fs::hard_link(&program, &beside).unwrap();
    assert_refused("it is this program again");
    let (elsewhere, other) = alone();
    symlink(&program, elsewhere.path().join(SUCCESSOR)).unwrap();
    symlink(&other, &beside).unwrap();
    assert_refused("it is this program again");
    // A shell would be given these.
    let whole = fs::read(&program).unwrap();
    let wrapper = b"#!/bin/sh\nexec strata \"$@\"\n".repeat(9);
    let cut = [0, 40, 200, whole.len() / 2, whole.len() - 1].map(|length| whole[..length].to_vec());
    for content in cut.into_iter().chain([wrapper]) {
        fs::write(&beside, content).unwrap();
        fs::set_permissions(&beside, PermissionsExt::from_mode(0o755)).unwrap();
        assert_refused("it is no whole program for this machine");
    }
    // Nobody may start it.
    fs::write(&beside, "").unwrap();
    assert_refused("Permission denied");
}

#[test]
fn a_program_that_the_system_does_not_start_leaves_it_to_the_cpu() {
    let Some(_device) = device() else { return };
    let (folder, program) = alone();
    let beside = folder.path().canonicalize().unwrap().join(SUCCESSOR);
    // It names a loader that is not there.
    let mut content = fs::read(&program).unwrap();
    let loader = b"/ld-linux";
    let place = content
        .windows(loader.len())
        .position(|bytes| bytes == loader);
    content[place.unwrap() + 1] = b'x';
    fs::write(&beside, content).unwrap();
    fs::set_permissions(&beside, PermissionsExt::from_mode(0o755)).unwrap();
    let named = format!("start {}: ", beside.display());
    assert_the_cpu_computes(&program, &[], &[&named]);
}

#[test]
fn a_driver_without_a_device_leaves_it_to_the_cpu() {
    let Some(device) = device() else { return };
    if device.software.is_none() {
        println!("skipped: the device cannot be taken away");
        return;
    }
    let none = [("SOFTWARE_GPU_DEVICES", "0")];
    let parts = ["open CUDA device 0: CUDA_ERROR_NO_DEVICE"];
    assert_the_cpu_computes(&strata_path(), &none, &parts);
}
