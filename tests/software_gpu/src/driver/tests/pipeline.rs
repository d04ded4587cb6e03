//! A program that moves data ahead of its use, as one that streams weights does: two page-locked buffers, two device
//! slots, a copy stream and a compute stream. With all its waits it gives the same results in every order; without any one
//! of them it is caught in every order, whether or not the results suffer.

use super::*;

const COUNT: usize = 192;
const ROUNDS: u32 = 7;

/// A wait that a program may have forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    Nothing,
    /// The copy does not wait for the kernel that reads the slot.
    SlotUsed,
    /// The kernel does not wait for the copy.
    SlotReady,
    /// The host does not wait for the copy before it fills the buffer again.
    BufferFree,
}

fn value(round: u32, index: u32) -> u32 {
    round.wrapping_mul(2_654_435_761) ^ index.wrapping_mul(40_503)
}

fn expected() -> Vec<u32> {
    let mut sums = vec![1_u32; COUNT];
    for round in 0..ROUNDS {
        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = sum.wrapping_mul(3).wrapping_add(value(round, index as u32));
        }
    }
    sums
}

/// Runs the program and returns its result.
fn run(program: &mut Program, missing: Missing) -> Vec<u32> {
    let (copy, compute) = (program.stream(NON_BLOCKING), program.stream(NON_BLOCKING));
    let buffers = [program.page_locked(COUNT), program.page_locked(COUNT)];
    let slots = [program.allocate(COUNT * 4), program.allocate(COUNT * 4)];
    let ready = [program.event(), program.event()];
    let used = [program.event(), program.event()];
    let result = program.page_locked(COUNT);
    let sums = program.allocate_with(&[1; COUNT]);
    for round in 0..ROUNDS {
        let place = round as usize % 2;
        if missing != Missing::BufferFree && round > 1 {
            wait_by_turns(ready[place], round);
        }
        buffers[place].write((0..COUNT as u32).map(|index| value(round, index)));
        if missing != Missing::SlotUsed {
            cuStreamWaitEvent(copy, used[place], 0);
        }
        let (from, to) = (buffers[place].address, slots[place]);
        // SAFETY: the buffer is there until the program ends.
        unsafe { cuMemcpyHtoDAsync_v2(to, from, COUNT * 4, copy) };
        cuEventRecord(ready[place], copy);
        if missing != Missing::SlotReady {
            cuStreamWaitEvent(compute, ready[place], 0);
        }
        program.launch("accumulate", &[sums, slots[place]], COUNT as u32, compute);
        cuEventRecord(used[place], compute);
    }
    // SAFETY: the buffer is there until the program ends.
    unsafe { cuMemcpyDtoHAsync_v2(result.address, sums, COUNT * 4, compute) };
    cuStreamSynchronize(compute);
    result.read()
}

/// A host may synchronise or ask again and again.
fn wait_by_turns(event: usize, round: u32) {
    if round.is_multiple_of(2) {
        cuEventSynchronize(event);
        return;
    }
    while cuEventQuery(event) == 600 {
        std::thread::yield_now();
    }
}

#[test]
fn every_order_of_a_correct_program_gives_the_same_result() {
    for seed in 0..200 {
        let mut program = Program::start(seed);
        assert_eq!(
            run(&mut program, Missing::Nothing),
            expected(),
            "seed {seed}"
        );
        expect_no_report();
    }
}

/// The reports of a program that lacks a wait.
fn reports(seed: u64, missing: Missing) -> Vec<String> {
    let mut program = Program::start(seed);
    run(&mut program, missing);
    take_reports()
}

#[track_caller]
fn expect_one_with(seed: u64, reports: &[String], words: &[&str]) {
    let found = reports
        .iter()
        .any(|report| words.iter().all(|word| report.contains(word)));
    assert!(
        found,
        "seed {seed}: no report with {words:?} in {reports:#?}"
    );
}

#[test]
fn a_copy_that_does_not_wait_for_the_kernel_that_reads_is_caught_in_every_order() {
    for seed in 0..60 {
        let reports = reports(seed, Missing::SlotUsed);
        expect_one_with(
            seed,
            &reports,
            &[
                "unordered access",
                "kernel accumulate (stream",
                "copy of 768 bytes to the device",
            ],
        );
    }
}

#[test]
fn a_kernel_that_does_not_wait_for_its_copy_is_caught_in_every_order() {
    for seed in 0..60 {
        let reports = reports(seed, Missing::SlotReady);
        expect_one_with(
            seed,
            &reports,
            &[
                "unordered access",
                "kernel accumulate (stream",
                "copy of 768 bytes to the device",
            ],
        );
    }
}

#[test]
fn a_buffer_that_is_filled_too_early_is_caught_in_every_order() {
    for seed in 0..60 {
        let reports = reports(seed, Missing::BufferFree);
        let words = [
            "changed too early",
            "the source 0x",
            "copy of 768 bytes to the device (stream",
        ];
        expect_one_with(seed, &reports, &words);
    }
}

#[test]
fn some_orders_show_a_missing_wait_in_the_results_too() {
    let mut wrong = 0;
    for seed in 1..40 {
        let mut program = Program::start(seed);
        let (copy, compute) = (program.stream(NON_BLOCKING), program.stream(NON_BLOCKING));
        let (source, target) = (
            program.allocate_with(&[5; COUNT]),
            program.allocate_with(&[0; COUNT]),
        );
        let fresh = program.allocate_with(&[9; COUNT]);
        ok(cuMemcpyDtoDAsync_v2(source, fresh, COUNT * 4, copy));
        program.launch("copy", &[target, source], COUNT as u32, compute);
        take_reports();
        wrong += u32::from(program.read(target, 1)[0] != 9);
    }
    assert!((5..35).contains(&wrong), "{wrong} of 39 orders");
}
