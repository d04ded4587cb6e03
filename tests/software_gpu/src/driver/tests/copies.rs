//! Bytes arrive: every kind of copy and fill, from every kind of memory.

use super::*;

fn sequence(count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|index| index.wrapping_mul(2_654_435_761))
        .collect()
}

#[test]
fn copies_of_every_size_arrive() {
    let mut program = Program::start(0);
    let stream = program.stream(NON_BLOCKING);
    for count in [1, 3, 64, 1000, 16_384, 300_000] {
        let values = sequence(count);
        let (a, b) = (program.allocate(count * 4), program.allocate(count * 4));
        let (from, to) = (program.page_locked(count), program.page_locked(count));
        from.write(values.iter().copied());
        from.to_device(a, stream);
        ok(cuMemcpyDtoDAsync_v2(b, a, count * 4, stream));
        to.copy_from_device(b, stream);
        ok(cuStreamSynchronize(stream));
        assert!(to.read() == values, "{count} values");
        assert!(program.read(a, count) == values, "{count} values");
    }
    expect_no_report();
}

#[test]
fn bytes_at_odd_addresses_arrive() {
    let mut program = Program::start(0);
    let address = program.allocate_with(&[0; 64]);
    let bytes: Vec<u8> = (1..=61).collect();
    let mut back = vec![0_u8; 61];
    // SAFETY: the buffers are there.
    unsafe {
        ok(cuMemcpyHtoD_v2(address + 1, bytes.as_ptr() as usize, 61));
        ok(cuMemcpyDtoH_v2(back.as_mut_ptr() as usize, address + 1, 61));
    }
    assert_eq!(back, bytes);
    let values = program.read(address, 16);
    assert_eq!((values[0], values[15]), (0x0302_0100, 0x0000_3D3C));
    expect_no_report();
}

#[test]
fn pageable_memory_is_copied_at_the_call_and_counted() {
    for seed in [0, ON_DEMAND] {
        let mut program = Program::start(seed);
        let stream = program.stream(NON_BLOCKING);
        let address = program.allocate(4096);
        let before = counters();
        let mut values = sequence(1024);
        // SAFETY: the values are there.
        ok(unsafe { cuMemcpyHtoDAsync_v2(address, values.as_ptr() as usize, 4096, stream) });
        values.fill(0);
        // SAFETY: the values have room.
        ok(unsafe { cuMemcpyDtoHAsync_v2(values.as_mut_ptr() as usize, address, 4096, stream) });
        assert_eq!(values, sequence(1024));
        let after = counters();
        assert_eq!(
            after.pageable_async_copies - before.pageable_async_copies,
            2
        );
        assert_eq!(after.to_device_bytes - before.to_device_bytes, 4096);
        assert_eq!(after.to_host_bytes - before.to_host_bytes, 4096);
        expect_no_report();
    }
}

#[test]
fn copies_by_address_find_their_direction() {
    let mut program = Program::start(0);
    let (a, b) = (program.allocate(64), program.allocate(64));
    let values = sequence(16);
    let mut back = vec![0_u32; 16];
    // SAFETY: the buffers are there.
    unsafe {
        ok(cuMemcpy(a, values.as_ptr() as u64, 64));
        ok(cuMemcpyAsync(b, a, 64, 0));
        ok(cuMemcpy(back.as_mut_ptr() as u64, b, 64));
        assert_eq!(
            cuMemcpy(back.as_mut_ptr() as u64, values.as_ptr() as u64, 64),
            801
        );
    }
    assert_eq!(back, values);
    ok(cuMemsetD8_v2(a, 0, 64));
    ok(cuMemcpyDtoD_v2(a + 4, b, 8));
    assert_eq!(program.read(a, 4), [0, values[0], values[1], 0]);
    expect_no_report();
}

#[test]
fn fills_repeat_their_pattern() {
    let mut program = Program::start(0);
    let address = program.allocate(64);
    ok(cuMemsetD32_v2(address, 0x0102_0304, 16));
    ok(cuMemsetD16_v2(address + 4, 0x0506, 4));
    ok(cuMemsetD8_v2(address + 13, 7, 2));
    assert_eq!(
        program.read(address, 5),
        [
            0x0102_0304,
            0x0506_0506,
            0x0506_0506,
            0x0107_0704,
            0x0102_0304
        ]
    );
    assert_eq!(cuMemsetD32_v2(address + 2, 0, 1), 1);
    assert_eq!(cuMemsetD16Async(address + 1, 0, 1, 0), 1);
    assert_eq!(cuMemsetD32Async(address, 0, usize::MAX, 0), 1);
    expect_no_report();
}

#[test]
fn memory_is_counted_and_given_back() {
    let mut program = Program::start(0);
    let info = || {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid pointers.
        ok(unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) });
        (free, total)
    };
    let (free, total) = info();
    let address = program.allocate(1000);
    assert_eq!(info(), (free - 1024, total));
    assert!(counters().memory_bytes_most >= 1024);
    ok(cuMemFree_v2(address));
    assert_eq!(cuMemFree_v2(address), 1);
    assert_eq!(info(), (free, total));
    let mut none = 0;
    // SAFETY: a valid pointer.
    assert_eq!(unsafe { cuMemAlloc_v2(&raw mut none, total + 1) }, 2);
    program.allocations.clear();
    expect_no_report();
}

#[test]
fn memory_that_a_stream_frees_can_be_had_again() {
    let mut program = Program::start(ON_DEMAND);
    let stream = program.stream(NON_BLOCKING);
    let (mut free, mut total) = (0, 0);
    // SAFETY: valid pointers.
    ok(unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) });
    for _ in 0..3 {
        let mut address = 0;
        // SAFETY: a valid pointer.
        ok(unsafe { cuMemAllocAsync(&raw mut address, free, stream) });
        ok(cuMemsetD32Async(address, 1, 16, stream));
        ok(cuMemFreeAsync(address, stream));
        assert_eq!(cuMemFreeAsync(address, stream), 1);
    }
    expect_no_report();
}

#[test]
fn addresses_say_what_they_are() {
    let mut program = Program::start(0);
    let (address, buffer) = (program.allocate(1000), program.page_locked(4));
    let (mut kind, mut base, mut bytes) = (0_u32, 0, 0);
    // SAFETY: valid pointers.
    unsafe {
        ok(cuPointerGetAttribute(
            (&raw mut kind).cast(),
            2,
            address + 999,
        ));
        assert_eq!(kind, 2);
        ok(cuPointerGetAttribute(
            (&raw mut kind).cast(),
            2,
            buffer.address as u64,
        ));
        assert_eq!(kind, 1);
        assert_eq!(
            cuPointerGetAttribute((&raw mut kind).cast(), 2, address + 1000),
            1
        );
        ok(cuMemGetAddressRange_v2(
            &raw mut base,
            &raw mut bytes,
            address + 10,
        ));
    }
    assert_eq!((base, bytes), (address, 1000));
}
