use super::super::operation::{StreamName, What};
use super::*;

fn label(number: u64) -> Arc<Label> {
    Arc::new(Label {
        what: What::Record,
        number,
        stream: StreamName(1),
    })
}

#[test]
fn the_limit_holds_for_both_kinds() {
    let mut table = PageLocked::new(Some(10_000));
    let memory = vec![0_u8; 8000];
    let start = memory.as_ptr() as usize;
    let first = table.allocate(4000, 0).unwrap() as usize;
    let refusal = table.register(start, 8000, 0).unwrap_err();
    assert_eq!(refusal.status, Status::OUT_OF_MEMORY);
    table.register(start, 6000, 0).unwrap();
    assert_eq!(
        table.allocate(1, 0).unwrap_err().status,
        Status::OUT_OF_MEMORY
    );
    table.free(first, &Clock::default()).unwrap();
    let second = table.allocate(4000, 0).unwrap() as usize;
    table.unregister(start, &Clock::default()).unwrap();
    table.free(second, &Clock::default()).unwrap();
    assert_eq!(table.locked_bytes, 0);
}

#[test]
fn ranges_may_touch_but_not_overlap() {
    let mut table = PageLocked::new(None);
    let memory = vec![0_u8; 3000];
    let start = memory.as_ptr() as usize;
    table.register(start + 1000, 1000, 0).unwrap();
    for (offset, bytes) in [(0, 1001), (1999, 1), (500, 2000), (1200, 10)] {
        let refusal = table.register(start + offset, bytes, 0).unwrap_err();
        assert_eq!(
            refusal.status,
            Status::HOST_MEMORY_ALREADY_REGISTERED,
            "{offset} {bytes}"
        );
    }
    table.register(start, 1000, 0).unwrap();
    table.register(start + 2000, 1000, 0).unwrap();
    assert!(table.covers(start + 1000, 1000).unwrap());
    assert!(table.covers(start + 900, 200).is_err());
    assert!(!table.covers(start + 3000, 10).unwrap());
}

#[test]
fn a_hash_sees_every_byte() {
    let mut bytes: Vec<u8> = (0..100_u8).collect();
    // SAFETY: the bytes are there.
    let hash = |bytes: &[u8]| unsafe { hash_of(bytes.as_ptr(), bytes.len()) };
    let before = hash(&bytes);
    assert_ne!(before, hash(&bytes[..99]));
    for index in 0..100 {
        bytes[index] ^= 0x40;
        assert_ne!(hash(&bytes), before, "byte {index}");
        bytes[index] ^= 0x40;
    }
    assert_eq!(hash(&bytes), before);
}

#[test]
fn a_change_is_reported_once() {
    let mut table = PageLocked::new(None);
    let address = table.allocate(4096, 0).unwrap();
    let step = Step { actor: 1, time: 1 };
    let mut known = Clock::default();
    known.reach(step);
    // SAFETY: the memory was just allocated.
    let reports = unsafe {
        table.begin(
            (step, &known, label(1)),
            (address as usize, 4096),
            Access::Read,
        )
    };
    assert!(reports.is_empty());
    // SAFETY: inside the allocation.
    unsafe { address.add(100).write(1) };
    // SAFETY: inside the allocation.
    let read = unsafe { hash_of(address, 4096) };
    let report = table.check_read(step, read).unwrap();
    assert!(
        report.contains("the source") && report.contains("operation 1"),
        "{report}"
    );
    assert!(table.settle(&known).is_empty());
    assert!(table.transfers.is_empty());
    assert!(table.free(address as usize, &known).unwrap().is_empty());
}
