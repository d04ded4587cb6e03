//! What happens after a report: every call says so until the reports are taken.

use super::*;

#[test]
fn a_kernel_that_leaves_its_memory_is_a_report_and_an_error_that_stays() {
    for seed in [0, 1, 2, ON_DEMAND] {
        let mut program = Program::start(seed);
        let stream = program.stream(NON_BLOCKING);
        let (a, b) = (
            program.allocate_with(&[1; 64]),
            program.allocate_with(&[2; 64]),
        );
        ok(program.launch("copy", &[b, a], 65, stream));
        assert_eq!(cuStreamSynchronize(stream), 700);
        let mut event = 0;
        // SAFETY: valid pointers.
        unsafe {
            assert_eq!(cuEventCreate(&raw mut event, 0), 700);
            assert_eq!(cuMemcpyDtoH_v2((&raw mut event) as usize, a, 8), 700);
        }
        assert_eq!(cuCtxSynchronize(), 700);
        assert!(software_gpu_reports() == 1);
        let reports = take_reports();
        let words = [
            "kernel copy (stream",
            "cannot read",
            "0 bytes past the end of allocation",
        ];
        assert!(
            words.iter().all(|word| reports[0].contains(word)),
            "{reports:?}"
        );
        ok(cuStreamSynchronize(stream));
        assert_eq!(program.read(a, 64), [1; 64]);
    }
}

#[test]
fn a_report_is_cut_to_the_room_there_is() {
    let mut program = Program::start(0);
    let stream = program.stream(NON_BLOCKING);
    let (a, fresh) = (program.allocate_with(&[1; 64]), program.allocate(256));
    ok(program.launch("copy", &[a, fresh], 64, stream));
    assert_eq!(cuStreamSynchronize(stream), 719);
    let mut text = [b'?'; 32];
    assert_eq!(
        // SAFETY: the room is there.
        unsafe { software_gpu_take_report(text.as_mut_ptr(), 14) },
        14
    );
    assert_eq!(&text[..16], b"read of unwrit??");
    assert_eq!(
        // SAFETY: the room is there.
        unsafe { software_gpu_take_report(text.as_mut_ptr(), 14) },
        0
    );
    ok(cuCtxSynchronize());
}

#[test]
fn what_is_given_back_after_a_report_is_gone_all_the_same() {
    let mut program = Program::start(0);
    let stream = program.stream(NON_BLOCKING);
    let (a, fresh) = (program.allocate_with(&[1; 64]), program.allocate(256));
    ok(program.launch("copy", &[a, fresh], 64, stream));
    assert_eq!(cuStreamSynchronize(stream), 719);
    assert_eq!(cuMemFree_v2(a), 719);
    assert_eq!(cuStreamDestroy_v2(stream), 719);
    take_reports();
    assert_eq!(cuMemFree_v2(a), 1);
    assert_eq!(cuStreamDestroy_v2(stream), 400);
    program.allocations.retain(|address| *address != a);
    program.streams.clear();
}

#[test]
fn an_operation_in_a_freed_allocation_is_out_of_bounds() {
    let mut program = Program::start(ON_DEMAND);
    let stream = program.stream(NON_BLOCKING);
    let mut memory = 0;
    // SAFETY: a valid pointer.
    ok(unsafe { cuMemAllocAsync(&raw mut memory, 256, stream) });
    ok(cuMemFreeAsync(memory, stream));
    // The call cannot know; the stream does.
    ok(cuMemsetD8Async(memory, 0, 256, stream));
    assert_eq!(cuStreamSynchronize(stream), 700);
    expect_report(&[
        "fill of 256 bytes (stream",
        "writes out of bounds",
        "no live allocation",
    ]);
}

/// Runs another test of this module in a process of its own and returns how it ended and what it printed.
fn run_alone(test: &str, variable: (&str, &str)) -> (std::process::ExitStatus, String) {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let name = format!("driver::tests::faults::{test}");
    command
        .args(["--exact", &name, "--nocapture"])
        .env(variable.0, variable.1);
    let output = command.output().unwrap();
    (
        output.status,
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

#[test]
fn the_first_report_can_end_the_process() {
    use std::os::unix::process::ExitStatusExt;
    let test = "what_is_given_back_after_a_report_is_gone_all_the_same";
    let (status, errors) = run_alone(test, ("SOFTWARE_GPU_ABORT", "1"));
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{errors}");
    let lines: Vec<&str> = errors
        .lines()
        .filter(|line| line.starts_with("software-gpu: "))
        .collect();
    assert_eq!(lines.len(), 1, "{errors}");
    assert!(
        lines[0].starts_with("software-gpu: read of unwritten memory: kernel copy"),
        "{errors}"
    );
}

#[test]
fn the_environment_decides_what_is_looked_for() {
    let test = "what_is_given_back_after_a_report_is_gone_all_the_same";
    let (status, _) = run_alone(test, ("SOFTWARE_GPU_UNWRITTEN", "off"));
    assert!(!status.success(), "the read is let pass, so the test fails");
    let (status, errors) = run_alone(test, ("SOFTWARE_GPU_MEMORY", "1MiB"));
    assert!(status.success(), "{errors}");
    let (status, errors) = run_alone(test, ("SOFTWARE_GPU_MEMORY", "little"));
    assert!(!status.success());
    assert!(
        errors.contains("SOFTWARE_GPU_MEMORY=little is not a size"),
        "{errors}"
    );
}
