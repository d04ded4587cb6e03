use super::*;

fn bytes_of(memory: &DeviceMemory, allocation: Allocation) -> Vec<u8> {
    memory.prepare(allocation.start, allocation.bytes);
    // SAFETY: the allocation is live and this test is alone with it.
    unsafe { std::slice::from_raw_parts(memory.byte(allocation.start), allocation.bytes as usize) }
        .to_vec()
}

#[test]
fn allocations_are_aligned_apart_and_poisoned() {
    let memory = DeviceMemory::new(64 << 20).unwrap();
    let mut last_end = 0;
    for bytes in [1, 256, 1000, 65_536, 200_000, 1 << 20] {
        let allocation = memory.allocate(bytes).unwrap();
        assert_eq!(allocation.start % 512, 256);
        assert!(allocation.start >= last_end + GUARD_BYTES);
        assert!(
            bytes_of(&memory, allocation)
                .iter()
                .all(|byte| *byte == POISON)
        );
        last_end = allocation.end();
    }
}

#[test]
fn memory_that_comes_back_is_poisoned_again() {
    let memory = DeviceMemory::new(1 << 20).unwrap();
    for _ in 0..200 {
        let allocation = memory.allocate(900_000).unwrap();
        assert!(
            bytes_of(&memory, allocation)
                .iter()
                .all(|byte| *byte == POISON)
        );
        // SAFETY: the allocation is live and this test is alone with it.
        unsafe { ptr::write_bytes(memory.byte(allocation.start), 7, allocation.bytes as usize) };
        memory.release(allocation.start);
    }
    assert_eq!(memory.free_and_total(), (1 << 20, 1 << 20));
    assert_eq!(memory.used_bytes_most(), 900_096);
}

#[test]
fn no_more_than_the_total_can_be_had() {
    let memory = DeviceMemory::new(1 << 20).unwrap();
    let half = memory.allocate(512 << 10).unwrap();
    assert!(memory.allocate((512 << 10) + 1).is_none());
    assert!(memory.allocate(u64::MAX).is_none());
    let rest = memory.allocate(512 << 10).unwrap();
    assert_eq!(memory.free_and_total(), (0, 1 << 20));
    memory.release(half.start);
    memory.release(rest.start);
    assert!(memory.allocate(1 << 20).is_some());
}

#[test]
fn a_range_must_lie_in_one_allocation() {
    let memory = DeviceMemory::new(1 << 20).unwrap();
    let first = memory.allocate(1000).unwrap();
    let second = memory.allocate(1000).unwrap();
    assert_eq!(memory.check(first.start, 1000).unwrap(), first);
    assert_eq!(memory.check(second.start + 999, 1).unwrap(), second);
    assert!(
        memory
            .check(first.start + 999, 2)
            .unwrap_err()
            .contains("reach past its end at 1000")
    );
    assert!(
        memory
            .check(first.end(), 1)
            .unwrap_err()
            .contains("0 bytes past the end of allocation 1")
    );
    assert!(
        memory
            .check(16, 1)
            .unwrap_err()
            .contains("no device memory")
    );
    assert!(memory.check(u64::MAX, 8).is_err());
    memory.release(first.start);
    assert!(memory.check(first.start, 1).is_err());
}

#[test]
fn a_second_free_is_refused() {
    let memory = DeviceMemory::new(1 << 20).unwrap();
    let allocation = memory.allocate(64).unwrap();
    assert!(memory.queue_free(allocation.start + 1).is_err());
    assert_eq!(memory.queue_free(allocation.start).unwrap().number, 1);
    assert!(
        memory
            .queue_free(allocation.start)
            .unwrap_err()
            .contains("freed twice")
    );
}

#[test]
fn the_host_cannot_use_a_device_address() {
    let memory = DeviceMemory::new(1 << 20).unwrap();
    let allocation = memory.allocate(64).unwrap();
    let mut ends = [0; 2];
    // SAFETY: the system checks the address that it is given.
    let written = unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        libc::write(ends[1], allocation.start as *const libc::c_void, 1)
    };
    let error = std::io::Error::last_os_error();
    assert_eq!((written, error.raw_os_error()), (-1, Some(libc::EFAULT)));
    for end in ends {
        // SAFETY: an end of the pipe above.
        unsafe { libc::close(end) };
    }
}
