use super::super::memory::DeviceMemory;
use super::super::operation::{StreamName, What};
use super::super::pass::Finding;
use super::super::touch::GRANULE_BYTES;
use super::*;
use crate::seam::Access;

/// Two streams over one allocation, driven by hand.
struct Rig {
    memory: DeviceMemory,
    shadow: Shadow,
    allocation: Allocation,
    clocks: [Clock; 2],
    times: [u64; 2],
    unwritten: Unwritten,
}

impl Rig {
    fn new(bytes: u64) -> Rig {
        let memory = DeviceMemory::new(8 << 20).unwrap();
        let allocation = memory.allocate(bytes).unwrap();
        let mut shadow = Shadow::new(memory.base(), memory.range_bytes());
        shadow.allocate(&allocation, Step { actor: 0, time: 1 }, label());
        let mut clock = Clock::default();
        clock.reach(Step { actor: 0, time: 1 });
        let clocks = [clock.clone(), clock];
        Rig {
            memory,
            shadow,
            allocation,
            clocks,
            times: [0; 2],
            unwritten: Unwritten::Off,
        }
    }

    /// The next operation of a stream, which touches bytes `start..end`.
    fn touch(&mut self, stream: usize, start: u64, end: u64, access: Access) -> Vec<Finding> {
        let address = self.allocation.start;
        self.operation(stream, |pass| {
            pass.range(address + start, end - start, access)
        })
    }

    fn operation(&mut self, stream: usize, touch: impl FnOnce(&mut Pass<'_>)) -> Vec<Finding> {
        self.times[stream] += 1;
        let step = Step {
            actor: stream + 1,
            time: self.times[stream],
        };
        self.clocks[stream].reach(step);
        let mut pass = self
            .shadow
            .pass(step, &self.clocks[stream], label(), self.unwritten);
        touch(&mut pass);
        pass.finish()
    }

    /// One stream waits for all that the other has done.
    fn wait(&mut self, stream: usize) {
        let other = self.clocks[1 - stream].clone();
        self.clocks[stream].join(&other);
    }

    fn collect(&mut self, settled: &Clock) {
        let allocations = self.memory.snapshot();
        self.shadow.collect(settled, &allocations);
    }
}

fn label() -> Arc<Label> {
    Arc::new(Label {
        what: What::Free,
        number: 0,
        stream: StreamName(0),
    })
}

fn offsets(rig: &Rig, findings: &[Finding]) -> Vec<u64> {
    let address = |finding: &Finding| match finding {
        Finding::Unordered { address, .. } | Finding::Unwritten { address } => {
            address - rig.allocation.start
        }
    };
    findings.iter().map(address).collect()
}

#[test]
fn a_stream_is_ordered_with_itself() {
    let mut rig = Rig::new(4096);
    for access in [
        Access::Write,
        Access::Read,
        Access::Write,
        Access::Write,
        Access::Read,
    ] {
        assert!(rig.touch(0, 0, 4096, access).is_empty());
    }
}

#[test]
fn each_pair_with_a_write_needs_an_order() {
    for (first, second) in [
        (Access::Write, Access::Read),
        (Access::Read, Access::Write),
        (Access::Write, Access::Write),
    ] {
        let mut rig = Rig::new(4096);
        assert!(rig.touch(0, 0, 1024, first).is_empty());
        let findings = rig.touch(1, 512, 2048, second);
        assert_eq!(offsets(&rig, &findings), [512], "{first:?} {second:?}");
        let Finding::Unordered {
            access,
            other_access,
            ..
        } = findings[0]
        else {
            panic!("{findings:?}")
        };
        assert_eq!((access, other_access), (second, first));

        let mut rig = Rig::new(4096);
        assert!(rig.touch(0, 0, 1024, first).is_empty());
        rig.wait(1);
        assert!(rig.touch(1, 512, 2048, second).is_empty());
    }
    let mut rig = Rig::new(4096);
    assert!(rig.touch(0, 0, 1024, Access::Read).is_empty());
    assert!(rig.touch(1, 0, 1024, Access::Read).is_empty());
    // Both readers count.
    assert_eq!(rig.touch(0, 0, 4, Access::Write).len(), 1);
    rig.wait(1);
    assert_eq!(rig.touch(1, 4, 8, Access::Write).len(), 0);
}

/// Every range against a plain list of who touched which word.
#[test]
fn words_have_their_own_history() {
    for seed in 1..300_u64 {
        let mut rig = Rig::new(1500);
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut next = |bound: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        // For each word: the last writer, and readers since, as (stream, time).
        let mut writers: Vec<Option<(usize, u64)>> = vec![None; 375];
        let mut readers: Vec<Vec<(usize, u64)>> = vec![Vec::new(); 375];
        for _ in 0..40 {
            if next(6) == 0 {
                rig.wait(next(2) as usize);
            }
            let stream = next(2) as usize;
            let start = next(370);
            let end = start + 1 + next(375 - start);
            let access = if next(2) == 0 {
                Access::Read
            } else {
                Access::Write
            };
            let clock = rig.clocks[stream].clone();
            let ordered = |(stream, time): (usize, u64)| {
                Step {
                    actor: stream + 1,
                    time,
                }
                .is_before(&clock)
            };
            let mut wrong = false;
            let me = (stream, rig.times[stream] + 1);
            for word in start as usize..end as usize {
                wrong |= writers[word].is_some_and(|writer| !ordered(writer));
                match access {
                    Access::Read => readers[word].push(me),
                    Access::Write => {
                        wrong |= readers[word].iter().any(|reader| !ordered(*reader));
                        writers[word] = Some(me);
                        readers[word].clear();
                    }
                }
            }
            let findings = rig.touch(stream, start * 4, end * 4, access);
            assert_eq!(
                !findings.is_empty(),
                wrong,
                "seed {seed}: {access:?} of {start}..{end}"
            );
            if next(10) == 0 {
                rig.collect(&Clock::default());
            }
        }
    }
}

#[test]
fn parts_of_words_belong_to_nobody() {
    let mut rig = Rig::new(4096);
    assert!(rig.touch(0, 0, 102, Access::Write).is_empty());
    assert!(rig.touch(1, 102, 300, Access::Write).is_empty());
    assert_eq!(rig.touch(1, 96, 100, Access::Read).len(), 1);
}

#[test]
fn a_word_in_two_copies_orders_neither_reader() {
    let mut rig = Rig::new(4096);
    rig.unwritten = Unwritten::Word;
    assert!(rig.touch(0, 0, 102, Access::Write).is_empty());
    assert!(rig.touch(1, 102, 300, Access::Write).is_empty());
    let granule = (rig.allocation.start - rig.memory.base()) / GRANULE_BYTES;
    for (stream, words) in [(0, 0x03FF_FFFF), (1, 0x07FE_0000_u64 << 8)] {
        let findings = rig.operation(stream, |pass| pass.granule(granule, words, 0));
        assert!(findings.is_empty(), "stream {stream}: {findings:?}");
    }
}

#[test]
fn unwritten_words_are_found_as_exactly_as_wanted() {
    for (unwritten, expected) in [
        (Unwritten::Word, vec![vec![300], vec![512], vec![]]),
        (Unwritten::Granule, vec![vec![], vec![512], vec![]]),
        (Unwritten::Off, vec![vec![], vec![], vec![]]),
    ] {
        let mut rig = Rig::new(4096);
        rig.unwritten = unwritten;
        assert!(rig.touch(0, 0, 299, Access::Write).is_empty());
        let found: Vec<Vec<u64>> = [(256, 512), (256, 1024), (0, 300)]
            .iter()
            .map(|(start, end)| {
                let findings = rig.touch(0, *start, *end, Access::Read);
                offsets(&rig, &findings)
            })
            .collect();
        // The second read meets the partly written granule first.
        let expected = if unwritten == Unwritten::Word {
            vec![vec![300], vec![300], vec![]]
        } else {
            expected
        };
        assert_eq!(found, expected, "{unwritten:?}");
    }
}

#[test]
fn a_kernel_may_read_what_it_has_written() {
    let mut rig = Rig::new(512);
    rig.unwritten = Unwritten::Word;
    let granule = (rig.allocation.start - rig.memory.base()) / GRANULE_BYTES;
    assert!(
        rig.operation(0, |pass| pass.granule(granule, 0, u64::MAX))
            .is_empty()
    );
    // Words 0 to 3 were read before they were written, 4 to 7 read only.
    let findings = rig.operation(0, |pass| pass.granule(granule + 1, 0xFF, 0x0F));
    assert_eq!(offsets(&rig, &findings), [256 + 16]);
    assert!(
        rig.operation(0, |pass| pass.granule(granule + 1, 0x0F, 0))
            .is_empty()
    );
}

#[test]
fn an_allocation_needs_an_order_too() {
    let mut rig = Rig::new(512);
    rig.shadow
        .allocate(&rig.allocation, Step { actor: 2, time: 9 }, label());
    assert_eq!(rig.touch(0, 0, 512, Access::Write).len(), 1);
    rig.shadow.forget(&rig.allocation);
    rig.shadow
        .allocate(&rig.allocation, Step { actor: 1, time: 1 }, label());
    assert!(rig.touch(0, 0, 512, Access::Write).is_empty());
}

#[test]
fn collecting_keeps_what_can_still_conflict() {
    let mut rig = Rig::new(4096);
    rig.unwritten = Unwritten::Word;
    for _ in 0..100 {
        assert!(rig.touch(0, 0, 1000, Access::Write).is_empty());
        assert!(rig.touch(0, 0, 500, Access::Read).is_empty());
    }
    assert!(rig.touch(0, 1000, 2000, Access::Write).is_empty());
    rig.wait(1);
    assert!(rig.touch(1, 0, 100, Access::Read).is_empty());
    // Settled: all of stream 0 and the allocation.
    let mut settled = Clock::default();
    settled.reach(Step { actor: 0, time: 1 });
    settled.reach(Step {
        actor: 1,
        time: rig.times[0],
    });
    rig.collect(&settled);
    assert_eq!(rig.shadow.authors.len(), 1);
    assert_eq!(rig.shadow.reader_sets.len(), 1);
    // The reader of stream 1 is still there, and so is the knowledge of what was never written.
    assert_eq!(rig.touch(0, 0, 100, Access::Write).len(), 1);
    let findings = rig.touch(0, 1996, 2004, Access::Read);
    assert_eq!(offsets(&rig, &findings), [2000]);
    settled.reach(Step {
        actor: 2,
        time: rig.times[1],
    });
    settled.reach(Step {
        actor: 1,
        time: rig.times[0],
    });
    rig.collect(&settled);
    assert_eq!(
        (rig.shadow.authors.len(), rig.shadow.reader_sets.len()),
        (0, 0)
    );
}
