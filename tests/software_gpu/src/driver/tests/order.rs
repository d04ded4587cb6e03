//! What the order checker finds and what it lets pass, one pair of operations at a time.

use super::*;

const COUNT: usize = 256;
const BYTES: usize = COUNT * 4;

/// Two streams and two allocations that everything knows of.
fn two_streams(program: &mut Program) -> (usize, usize, u64, u64) {
    let streams = (program.stream(NON_BLOCKING), program.stream(NON_BLOCKING));
    let (a, b) = (
        program.allocate_with(&[1; COUNT]),
        program.allocate_with(&[2; COUNT]),
    );
    (streams.0, streams.1, a, b)
}

/// A case for several seeds, the one that keeps the order of the calls among them.
fn for_seeds(case: impl Fn(&mut Program)) {
    for seed in 0..16 {
        let mut program = Program::start(seed);
        case(&mut program);
    }
}

#[test]
fn two_kernels_that_read_the_same_need_no_order() {
    for_seeds(|program| {
        let (first, second, a, b) = two_streams(program);
        let c = program.allocate(BYTES);
        ok(program.launch("copy", &[b, a], COUNT as u32, first));
        ok(program.launch("copy", &[c, a], COUNT as u32, second));
        expect_no_report();
    });
}

#[test]
fn a_fill_and_a_kernel_that_writes_the_same_need_an_order() {
    for_seeds(|program| {
        let (first, second, a, b) = two_streams(program);
        ok(cuMemsetD32Async(b, 7, COUNT, first));
        // The first may have run already.
        program.launch("copy", &[b, a], COUNT as u32, second);
        expect_report(&[
            "unordered access",
            "fill of 1024 bytes (stream",
            "kernel copy (stream",
            "writes",
        ]);
    });
}

#[test]
fn neighbours_in_one_granule_need_no_order() {
    for_seeds(|program| {
        let (first, second, a, _) = two_streams(program);
        // Bytes 0 to 49 and 50 to 99: they share a word.
        ok(cuMemsetD8Async(a, 7, 50, first));
        ok(cuMemsetD8Async(a + 50, 8, 50, second));
        expect_no_report();
        let values = program.read(a, 25);
        assert_eq!(
            (values[0], values[12], values[24]),
            (0x0707_0707, 0x0808_0707, 0x0808_0808)
        );
    });
}

#[test]
fn overlaps_of_one_word_are_found() {
    for_seeds(|program| {
        let (first, second, a, _) = two_streams(program);
        ok(cuMemsetD32Async(a, 7, 100, first));
        cuMemsetD32Async(a + 99 * 4, 8, 100, second);
        expect_report(&["unordered access", "byte 396 of allocation"]);
    });
}

#[test]
fn an_event_orders_what_came_before_it_only() {
    for_seeds(|program| {
        let (first, second, a, b) = two_streams(program);
        let event = program.event();
        ok(cuMemsetD32Async(a, 7, COUNT, first));
        ok(cuEventRecord(event, first));
        ok(cuMemsetD32Async(b, 7, COUNT, first));
        ok(cuStreamWaitEvent(second, event, 0));
        ok(cuMemsetD32Async(a, 8, COUNT, second));
        assert_eq!(program.read(a, 1), [8]);
        expect_no_report();

        ok(cuMemsetD32Async(b, 9, COUNT, first));
        ok(cuStreamWaitEvent(second, event, 0));
        cuMemsetD32Async(b, 8, COUNT, second);
        expect_report(&["unordered access", "fill of 1024 bytes"]);
    });
}

#[test]
fn a_wait_is_for_the_recording_at_the_call() {
    for_seeds(|program| {
        let (first, second, a, _) = two_streams(program);
        let event = program.event();
        ok(cuEventRecord(event, first));
        ok(cuStreamWaitEvent(second, event, 0));
        ok(cuMemsetD32Async(a, 7, COUNT, first));
        // The wait above knows nothing of this.
        cuEventRecord(event, first);
        cuMemsetD32Async(a, 8, COUNT, second);
        expect_report(&["unordered access"]);
    });
}

#[test]
fn the_host_orders_what_it_has_waited_for() {
    for_seeds(|program| {
        let (first, second, a, b) = two_streams(program);
        let event = program.event();
        ok(cuMemsetD32Async(a, 7, COUNT, first));
        ok(cuStreamSynchronize(first));
        ok(cuMemsetD32Async(a, 8, COUNT, second));
        ok(cuEventRecord(event, second));
        ok(cuEventSynchronize(event));
        ok(cuMemsetD32Async(a, 9, COUNT, first));
        ok(cuEventRecord(event, first));
        while cuEventQuery(event) == 600 {}
        ok(program.launch("copy", &[b, a], COUNT as u32, second));
        assert_eq!(program.read(b, 1), [9]);
        expect_no_report();
    });
}

#[test]
fn the_null_stream_orders_blocking_streams_only() {
    for_seeds(|program| {
        let (_, other, a, b) = two_streams(program);
        let blocking = program.stream(0);
        ok(cuMemsetD32Async(a, 7, COUNT, blocking));
        ok(cuMemsetD32_v2(a, 8, COUNT));
        ok(program.launch("copy", &[b, a], COUNT as u32, blocking));
        assert_eq!(program.read(b, 1), [8]);
        expect_no_report();

        ok(cuMemsetD32_v2(a, 8, COUNT));
        program.launch("copy", &[b, a], COUNT as u32, other);
        expect_report(&[
            "unordered access",
            "fill of 1024 bytes (null stream",
            "kernel copy (stream",
        ]);
    });
}

#[test]
fn a_free_needs_the_end_of_all_uses() {
    for_seeds(|program| {
        let (first, second, a, b) = two_streams(program);
        let mut memory = 0;
        // SAFETY: a valid pointer.
        ok(unsafe { cuMemAllocAsync(&raw mut memory, BYTES, first) });
        ok(cuMemsetD32Async(memory, 7, COUNT, first));
        ok(program.launch("copy", &[a, memory], COUNT as u32, first));
        ok(cuMemFreeAsync(memory, first));
        expect_no_report();

        let event = program.event();
        // SAFETY: a valid pointer.
        ok(unsafe { cuMemAllocAsync(&raw mut memory, BYTES, first) });
        ok(cuMemsetD32Async(memory, 7, COUNT, first));
        ok(cuEventRecord(event, first));
        ok(cuStreamWaitEvent(second, event, 0));
        ok(program.launch("copy", &[b, memory], COUNT as u32, second));
        cuMemFreeAsync(memory, first);
        // The kernel comes first or finds the memory gone.
        let reports = take_reports();
        assert!(!reports.is_empty());
        assert!(
            reports[0].contains("free (stream") || reports[0].contains("no live allocation"),
            "{reports:?}"
        );
    });
}

#[test]
fn a_stream_ordered_allocation_is_its_streams_until_told() {
    for_seeds(|program| {
        let (first, second, _, _) = two_streams(program);
        let mut memory = 0;
        // SAFETY: a valid pointer.
        ok(unsafe { cuMemAllocAsync(&raw mut memory, BYTES, first) });
        cuMemsetD32Async(memory, 7, COUNT, second);
        expect_report(&[
            "unordered access",
            "allocation of 1024 bytes (stream",
            "allocates",
        ]);
        ok(cuMemFreeAsync(memory, first));
    });
}

#[test]
fn a_synchronous_copy_from_pageable_memory_may_still_be_under_way() {
    for_seeds(|program| {
        let (_, other, a, b) = two_streams(program);
        let values = [5_u32; COUNT];
        // SAFETY: the values are there.
        ok(unsafe { cuMemcpyHtoD_v2(a, values.as_ptr() as usize, BYTES) });
        ok(cuCtxSynchronize());
        ok(program.launch("copy", &[b, a], COUNT as u32, other));
        expect_no_report();

        // SAFETY: the values are there.
        ok(unsafe { cuMemcpyHtoD_v2(a, values.as_ptr() as usize, BYTES) });
        program.launch("copy", &[b, a], COUNT as u32, other);
        expect_report(&[
            "unordered access",
            "from pageable memory to the device (null stream",
            "synchronise its stream",
        ]);
    });
}

#[test]
fn reads_of_unwritten_memory_are_found() {
    for_seeds(|program| {
        let (first, _, a, _) = two_streams(program);
        let fresh = program.allocate(BYTES);
        program.launch("copy", &[a, fresh], COUNT as u32, first);
        expect_report(&[
            "unwritten memory",
            "kernel copy (stream",
            "byte 0 of allocation",
        ]);

        ok(cuMemsetD8Async(fresh, 0, 100, first));
        let buffer = program.page_locked(COUNT);
        // SAFETY: the buffer is there until the program ends.
        unsafe { cuMemcpyDtoHAsync_v2(buffer.address, fresh, BYTES, first) };
        expect_report(&[
            "unwritten memory",
            "copy of 1024 bytes to the host (stream",
            "byte 100 of allocation",
        ]);
    });
}

#[test]
fn page_locked_memory_is_watched_until_the_copy_is_known_to_be_over() {
    for_seeds(|program| {
        let (first, second, a, b) = two_streams(program);
        let buffer = program.page_locked(COUNT);
        buffer.write([1; COUNT]);
        buffer.to_device(a, first);
        ok(cuStreamSynchronize(first));
        buffer.write([2; COUNT]);
        buffer.to_device(b, second);
        expect_no_report();
        assert_eq!((program.read(a, 1)[0], program.read(b, 1)[0]), (1, 2));

        // A copy into memory that a copy reads: the device's own change is no change by the host, but needs an order.
        ok(cuMemsetD32Async(a, 3, COUNT, first));
        buffer.copy_from_device(a, first);
        buffer.to_device(b, first);
        ok(cuStreamSynchronize(first));
        assert_eq!((buffer.read()[0], program.read(b, 1)[0]), (3, 3));
        expect_no_report();
        buffer.copy_from_device(a, first);
        // SAFETY: the buffer is there until the program ends.
        unsafe { cuMemcpyHtoDAsync_v2(b, buffer.address, BYTES, second) };
        expect_report(&[
            "unordered use of page-locked memory",
            "to the host (stream",
            "to the device (stream",
        ]);

        buffer.copy_from_device(a, first);
        buffer.write([8]);
        expect_report(&[
            "changed too early",
            "the destination 0x",
            "copy of 1024 bytes to the host (stream",
        ]);
    });
}

#[test]
fn page_locked_memory_is_given_back_after_its_copies() {
    for_seeds(|program| {
        let (first, _, a, _) = two_streams(program);
        let mut memory = vec![7_u32; COUNT];
        let address = memory.as_mut_ptr() as usize;
        // SAFETY: the memory is there until it is unregistered.
        unsafe {
            ok(cuMemHostRegister_v2(address, BYTES, 0));
            ok(cuMemcpyHtoDAsync_v2(a, address, BYTES, first));
            ok(cuStreamSynchronize(first));
            ok(cuMemHostUnregister(address));
            expect_no_report();
            ok(cuMemHostRegister_v2(address, BYTES, 0));
            ok(cuMemcpyHtoDAsync_v2(a, address, BYTES, first));
            cuMemHostUnregister(address);
        }
        expect_report(&[
            "unregistered before the host knows",
            "copy of 1024 bytes to the device (stream",
        ]);
    });
}

#[test]
fn a_host_function_tells_the_host_what_is_over() {
    unsafe extern "C" fn refill(buffer: *mut libc::c_void) {
        // SAFETY: the program's buffer, whose copy is over.
        unsafe { buffer.cast::<u32>().write_volatile(9) };
    }
    for_seeds(|program| {
        let (first, _, a, b) = two_streams(program);
        let buffer = program.page_locked(COUNT);
        buffer.write([1; COUNT]);
        buffer.to_device(a, first);
        // SAFETY: the buffer is there until the program ends.
        ok(unsafe { cuLaunchHostFunc(first, Some(refill), buffer.address) });
        ok(cuStreamSynchronize(first));
        buffer.to_device(b, first);
        expect_no_report();
        assert_eq!((program.read(a, 1)[0], program.read(b, 1)[0]), (1, 9));
    });
}

/// More operations than numbers are kept for: what is settled is given up on the way, and nothing else.
#[test]
fn long_programs_are_checked_to_their_end() {
    for seed in [0, 2] {
        let mut program = Program::start(seed);
        let (first, second, a, b) = two_streams(&mut program);
        let (there, back) = (program.event(), program.event());
        let fresh = program.allocate(BYTES);
        for round in 0..12_000_u32 {
            ok(cuMemsetD32Async(a, round, COUNT, first));
            ok(cuEventRecord(there, first));
            ok(cuStreamWaitEvent(second, there, 0));
            ok(cuMemcpyDtoDAsync_v2(b, a, BYTES, second));
            ok(cuEventRecord(back, second));
            ok(cuStreamWaitEvent(first, back, 0));
            if round % 1000 == 0 {
                ok(cuStreamSynchronize(second));
            }
        }
        assert_eq!(program.read(b, 1), [11_999]);
        expect_no_report();
        let authors = super::super::lock(&super::super::device::Device::get().shadow).authors();
        assert!(authors < 1 << 14, "{authors} authors");

        ok(cuMemsetD32Async(a, 1, COUNT, first));
        cuMemcpyDtoDAsync_v2(b, a, BYTES, second);
        expect_report(&["unordered access"]);
        program.launch("copy", &[a, fresh], COUNT as u32, first);
        expect_report(&["unwritten memory"]);
    }
}
