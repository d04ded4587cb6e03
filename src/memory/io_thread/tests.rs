//! The I/O thread over a reader that misbehaves.

#![expect(unsafe_code, reason = "looks at spans whose ticket has been reported")]

use super::super::faulty::{FaultControl, Faults, FaultyReader};
use super::super::reader::Reader;
use super::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::sync::mpsc;

const REGIONS: usize = 6;
const REGION_BYTES: usize = 256 << 10;

struct Fixture {
    reader: Reader,
    done: mpsc::Receiver<ReadDone>,
    control: FaultControl,
    arena: Arc<Arena>,
    content: Vec<u8>,
}

fn content(bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..bytes).map(|_| random.random()).collect()
}

fn fixture(bytes: usize, seed: u64, faults: Faults) -> Fixture {
    let content = content(bytes, seed);
    let arena = Arc::new(Arena::new("host", REGIONS * REGION_BYTES).unwrap());
    let faulty = FaultyReader::new(content.clone(), seed, faults);
    let control = faulty.control();
    let (sender, done) = mpsc::channel();
    let reader = Reader::with_block_reader(
        Box::new(faulty),
        Arc::clone(&arena),
        Box::new(move |report| drop(sender.send(report))),
    )
    .unwrap();
    Fixture {
        reader,
        done,
        control,
        arena,
        content,
    }
}

fn piece(file_offset: usize, offset: usize, bytes: usize) -> ReadPiece {
    ReadPiece {
        file_offset: file_offset as u64,
        span: Span { offset, bytes },
    }
}

impl Fixture {
    /// Whether every byte that the file has of the pieces is in place.
    fn holds(&self, pieces: &[ReadPiece]) -> bool {
        pieces.iter().all(|piece| {
            let start = (piece.file_offset as usize).min(self.content.len());
            let end = (piece.file_offset as usize + piece.span.bytes).min(self.content.len());
            // SAFETY: called for pieces whose ticket has been reported.
            let bytes = unsafe { self.arena.bytes(piece.span) };
            bytes[..end - start] == self.content[start..end]
        })
    }

    fn read(&self, ticket: u64, pieces: &[ReadPiece]) -> Result<u64, ReadError> {
        self.reader.read(ticket, pieces.to_vec());
        let report = self.done.recv().unwrap();
        assert_eq!(report.ticket, ticket);
        report.result
    }
}

/// Pieces of random length at random places of the file, some of them past its end, in one region of the arena.
fn random_pieces(random: &mut ChaCha8Rng, file_bytes: usize, region: usize) -> Vec<ReadPiece> {
    let mut pieces = Vec::new();
    let mut used = 512 * random.random_range(0..8);
    while pieces.len() < 4 {
        let bytes = 512 * random.random_range(0..160);
        if used + bytes > REGION_BYTES {
            break;
        }
        let file_offset = 512 * random.random_range(0..file_bytes / 512 + 3);
        pieces.push(piece(file_offset, region * REGION_BYTES + used, bytes));
        used += bytes;
    }
    pieces
}

/// Thousands of tickets, `REGIONS` at a time, under the given faults: each must end once, and well or with an error.
fn stress(seed: u64, tickets: u64, faults: Faults) -> (u64, u64) {
    let fixture = fixture(777_777, seed, faults);
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut running: HashMap<u64, (usize, Vec<ReadPiece>)> = HashMap::new();
    let mut regions: Vec<usize> = (0..REGIONS).collect();
    let (mut given, mut good, mut bad) = (0, 0, 0);
    while good + bad < tickets {
        while let Some(region) = regions.pop_if(|_| given < tickets) {
            let pieces = random_pieces(&mut random, fixture.content.len(), region);
            fixture.reader.read(given, pieces.clone());
            running.insert(given, (region, pieces));
            given += 1;
        }
        let report = fixture.done.recv().unwrap();
        let (region, pieces) = running.remove(&report.ticket).unwrap();
        match report.result {
            Ok(bytes) => {
                assert!(fixture.holds(&pieces), "ticket {}", report.ticket);
                let expected: u64 = pieces
                    .iter()
                    .map(|piece| {
                        let left = 777_777u64.saturating_sub(piece.file_offset);
                        left.min(piece.span.bytes as u64)
                    })
                    .sum();
                assert_eq!(bytes, expected, "ticket {}", report.ticket);
                good += 1;
            }
            Err(ReadError::Io { .. } | ReadError::Truncated { .. }) => bad += 1,
            Err(error) => panic!("{error}"),
        }
        // Whatever stays in the region must not pass for the next ticket's bytes.
        // SAFETY: the region's ticket has been reported.
        unsafe {
            fixture.arena.fill(
                Span {
                    offset: region * REGION_BYTES,
                    bytes: REGION_BYTES,
                },
                0xFF,
            );
        }
        regions.push(region);
    }
    fixture.reader.drain();
    assert!(fixture.done.try_recv().is_err());
    (good, bad)
}

#[test]
fn without_faults_thousands_of_tickets_are_all_right() {
    assert_eq!(stress(1, 3000, Faults::default()), (3000, 0));
}

#[test]
fn short_reads_interruptions_and_reordering_lose_nothing() {
    let faults = Faults {
        // A request of one block gets no further by a short read: seventeen tries in a row do not all fail.
        short_reads: 0.2,
        interruptions: 0.1,
        reorder: true,
        ..Faults::default()
    };
    assert_eq!(stress(2, 3000, faults), (3000, 0));
}

#[test]
fn with_errors_a_ticket_is_right_or_fails() {
    let faults = Faults {
        short_reads: 0.3,
        interruptions: 0.1,
        errors: 0.03,
        broken: vec![300_000],
        reorder: true,
        ..Faults::default()
    };
    let (good, bad) = stress(3, 600, faults);
    assert!(good > 200 && bad > 40, "{good} good, {bad} bad");
}

#[test]
fn an_error_that_passes_is_tried_again_and_counted() {
    let faults = Faults {
        broken_once: vec![70_000, 90_000],
        ..Faults::default()
    };
    let fixture = fixture(200_000, 4, faults);
    let pieces = [piece(0, 0, 131_072), piece(131_072, 131_072, 69_120)];
    assert_eq!(fixture.read(1, &pieces).unwrap(), 200_000);
    assert!(fixture.holds(&pieces));
    let retries = ReadRetries {
        errors: 2,
        short_reads: 0,
    };
    assert_eq!(fixture.reader.retries(), retries);
    assert_eq!(fixture.reader.totals().bytes, 200_000);
}

#[test]
fn an_error_that_lasts_names_the_place_after_some_tries() {
    let faults = Faults {
        broken: vec![70_000],
        ..Faults::default()
    };
    let fixture = fixture(200_000, 4, faults);
    let pieces = [piece(0, 0, 131_072), piece(131_072, 131_072, 69_120)];
    let began = Instant::now();
    match fixture.read(1, &pieces) {
        Err(error @ ReadError::Io { offset: 65_536, .. }) => {
            let text = error.to_string();
            for part in ["faulty.gguf at byte 65536", "test the drive"] {
                assert!(text.contains(part), "{text:?} lacks {part:?}");
            }
        }
        other => panic!("{other:?}"),
    }
    let errors = u64::from(ERROR_RETRIES_MAX);
    assert_eq!(fixture.reader.retries().errors, errors);
    // 2, 10 and 50 ms.
    assert!(began.elapsed() >= 31 * ERROR_PAUSE);
    fixture.control.set(Faults::default());
    assert_eq!(fixture.read(2, &pieces).unwrap(), 200_000);
    assert!(fixture.holds(&pieces));
}

#[test]
fn an_error_that_cannot_pass_is_not_tried_again() {
    for code in LASTING {
        let faults = Faults {
            broken: vec![0],
            error_code: Some(code),
            ..Faults::default()
        };
        let fixture = fixture(16_384, 16, faults);
        assert!(fixture.read(1, &[piece(0, 0, 16_384)]).is_err());
        assert_eq!(fixture.reader.retries(), ReadRetries::default());
        assert_eq!(fixture.control.submitted(), 1, "errno {code}");
    }
}

/// The thread does not sleep until a try is due: what is given meanwhile, and what is in flight, is served.
#[test]
fn others_go_on_while_a_request_waits_for_its_next_try() {
    let faults = Faults {
        broken: vec![0],
        ..Faults::default()
    };
    let fixture = fixture(200_000, 17, faults);
    fixture.reader.read(1, vec![piece(0, 0, 16_384)]);
    // Two more tries come, 10 and 60 ms later.
    fixture.control.wait_for_submitted(2);
    let good = [piece(16_384, 65_536, 16_384)];
    assert!(fixture.read(2, &good).is_ok() && fixture.holds(&good));
    // Reported only now.
    let report = fixture.done.recv().unwrap();
    assert!(report.ticket == 1 && report.result.is_err());
}

/// More requests wait for their next try than there are slots, and all get it.
#[test]
fn many_requests_may_fail_at_once() {
    let faults = Faults {
        broken_once: (0..40).map(|request| request * 16_384).collect(),
        reorder: true,
        ..Faults::default()
    };
    let fixture = fixture(40 * 16_384, 18, faults);
    let pieces = [piece(0, 0, 40 * 16_384)];
    assert_eq!(fixture.read(1, &pieces).unwrap(), 40 * 16_384);
    assert!(fixture.holds(&pieces));
    assert_eq!(fixture.reader.retries().errors, 40);
}

#[test]
fn short_reads_are_counted() {
    let faults = Faults {
        short_reads: 0.5,
        ..Faults::default()
    };
    let fixture = fixture(65_536, 19, faults);
    let pieces = [piece(0, 0, 65_536)];
    fixture.read(1, &pieces).unwrap();
    assert!(fixture.holds(&pieces));
    let retries = fixture.reader.retries();
    assert!(
        retries.short_reads > 0 && retries.errors == 0,
        "{retries:?}"
    );
}

/// A signal, or what the kernel lacks just now, is no failure of the drive.
#[test]
fn what_says_nothing_of_the_drive_is_not_counted() {
    let interrupted = Faults {
        interruptions: 0.5,
        ..Faults::default()
    };
    let fixture_of_signals = fixture(65_536, 20, interrupted);
    let pieces = [piece(0, 0, 65_536)];
    fixture_of_signals.read(1, &pieces).unwrap();
    assert!(fixture_of_signals.holds(&pieces));
    let retries = fixture_of_signals.reader.retries();
    assert_eq!(retries, ReadRetries::default());

    let short = Faults {
        errors: 1.0,
        error_code: Some(libc::EAGAIN),
        ..Faults::default()
    };
    let fixture_of_shortage = fixture(4096, 21, short);
    let result = fixture_of_shortage.read(1, &[piece(0, 0, 4096)]);
    assert!(matches!(result, Err(ReadError::Io { .. })), "{result:?}");
    let retries = fixture_of_shortage.reader.retries();
    assert_eq!(retries, ReadRetries::default());
    let tries = fixture_of_shortage.control.submitted();
    assert_eq!(tries, u64::from(RETRIES_MAX) + 1);
}

#[test]
fn what_is_not_read_again_is_no_short_read() {
    let faults = Faults {
        shrunk_to: Some(0),
        ..Faults::default()
    };
    let fixture = fixture(4096, 22, faults);
    let result = fixture.read(1, &[piece(0, 0, 4096)]);
    assert!(
        matches!(result, Err(ReadError::Truncated { offset: 0, .. })),
        "{result:?}"
    );
    assert_eq!(fixture.reader.retries(), ReadRetries::default());
}

#[test]
fn a_failed_ticket_is_reported_only_when_nothing_of_it_is_in_flight() {
    let faults = Faults {
        broken: vec![0],
        // It fails at once, and not after some tries.
        error_code: Some(libc::EBADF),
        held: true,
        ..Faults::default()
    };
    let fixture = fixture(500_000, 5, faults);
    // More requests than slots: what has not been issued when the first fails is dropped.
    fixture.reader.read(1, vec![piece(0, 0, 20 * 16_384)]);
    fixture.control.wait_for_submitted(8);
    fixture.control.change(|faults| faults.held = false);
    let report = fixture.done.recv().unwrap();
    assert!(matches!(
        report.result,
        Err(ReadError::Io { offset: 0, .. })
    ));
    let (submitted, completed) = (fixture.control.submitted(), fixture.control.completed());
    assert_eq!(submitted, completed);
    assert!(submitted < 20, "{submitted} of 20 requests were issued");
}

#[test]
fn a_failure_leaves_other_tickets_alone() {
    let faults = Faults {
        broken: vec![0],
        reorder: true,
        ..Faults::default()
    };
    let fixture = fixture(500_000, 6, faults);
    let good = [piece(65_536, 65_536, 65_536)];
    fixture.reader.read(1, vec![piece(0, 0, 65_536)]);
    fixture.reader.read(2, good.to_vec());
    fixture.reader.drain();
    let mut reports: Vec<_> = fixture.done.try_iter().collect();
    reports.sort_by_key(|report| report.ticket);
    assert!(reports[0].result.is_err());
    assert!(reports[1].result.is_ok() && fixture.holds(&good));
}

#[test]
fn a_file_that_shrank_is_named_with_what_it_had() {
    for shrunk_to in [0, 512, 100_000, 100_352, 199_999] {
        let faults = Faults {
            shrunk_to: Some(shrunk_to),
            ..Faults::default()
        };
        let fixture = fixture(200_000, 7, faults);
        match fixture.read(1, &[piece(0, 0, 200_192)]) {
            Err(error @ ReadError::Truncated { offset, .. }) => {
                // Requests past the new end fail as well; the first failure to arrive is told.
                assert!(offset >= shrunk_to, "{error}");
                let text = error.to_string();
                for part in ["200000", "shrank", "restart with the new one"] {
                    assert!(text.contains(part), "{text:?} lacks {part:?}");
                }
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn reads_past_the_end_and_tickets_without_pieces_are_complete_at_once() {
    let fixture = fixture(1000, 8, Faults::default());
    assert_eq!(fixture.read(1, &[]).unwrap(), 0);
    assert_eq!(fixture.read(2, &[piece(1024, 0, 4096)]).unwrap(), 0);
    assert_eq!(fixture.read(3, &[piece(512, 0, 8192)]).unwrap(), 488);
    assert!(fixture.holds(&[piece(512, 0, 8192)]));
    assert_eq!(fixture.control.submitted(), 1);
}

#[test]
fn flipped_bits_are_not_noticed_here() {
    let faults = Faults {
        flipped_bits: 1.0,
        ..Faults::default()
    };
    let fixture = fixture(16_384, 9, faults);
    let pieces = [piece(0, 0, 16_384)];
    assert_eq!(fixture.read(1, &pieces).unwrap(), 16_384);
    assert!(!fixture.holds(&pieces));
}

#[test]
fn an_interruption_without_end_becomes_an_error() {
    let faults = Faults {
        interruptions: 1.0,
        ..Faults::default()
    };
    let fixture = fixture(4096, 10, faults);
    assert!(matches!(
        fixture.read(1, &[piece(0, 0, 4096)]),
        Err(ReadError::Io { .. })
    ));
}

#[test]
fn drain_and_drop_wait_for_what_is_in_flight() {
    let faults = Faults {
        held: true,
        ..Faults::default()
    };
    let fixture = fixture(500_000, 11, faults);
    for ticket in 0..5 {
        let offset = ticket * 65_536;
        fixture
            .reader
            .read(ticket as u64, vec![piece(offset, offset, 65_536)]);
    }
    fixture.control.wait_for_submitted(8);
    let control = fixture.control.clone();
    std::thread::scope(|scope| {
        let drained = scope.spawn(|| {
            fixture.reader.drain();
            fixture.control.completed()
        });
        assert_eq!(control.completed(), 0);
        control.change(|faults| faults.held = false);
        assert_eq!(drained.join().unwrap(), 20);
    });
    assert_eq!(fixture.done.try_iter().count(), 5);
    fixture.reader.read(9, vec![piece(0, 0, 131_072)]);
    let Fixture { reader, done, .. } = fixture;
    drop(reader);
    assert_eq!(
        done.iter().map(|report| report.ticket).collect::<Vec<_>>(),
        [9]
    );
}

#[test]
fn a_report_may_give_the_next_ticket() {
    let content = content(100_000, 12);
    let arena = Arc::new(Arena::new("host", REGION_BYTES).unwrap());
    let handle: Arc<std::sync::OnceLock<Reader>> = Arc::default();
    let (sender, done) = mpsc::channel();
    let for_report = Arc::clone(&handle);
    let reader = Reader::with_block_reader(
        Box::new(FaultyReader::new(content, 12, Faults::default())),
        arena,
        Box::new(move |report| {
            if report.ticket < 3000 {
                let reader = for_report.wait();
                reader.read(report.ticket + 1, vec![piece(0, 0, 512)]);
            }
            sender.send(report.ticket).unwrap();
        }),
    )
    .unwrap();
    assert!(handle.set(reader).is_ok());
    let reader = handle.wait();
    reader.read(0, vec![piece(0, 0, 512)]);
    reader.drain();
    assert_eq!(
        done.try_iter().collect::<Vec<_>>(),
        (0..=3000).collect::<Vec<_>>()
    );
    assert_eq!(reader.totals().bytes, 3001 * 512);
}

#[test]
fn more_tickets_than_the_queue_holds_wait_and_all_end() {
    let fixture = fixture(100_000, 13, Faults::default());
    for ticket in 0..5000 {
        let offset = 512 * (ticket as usize % 64);
        fixture
            .reader
            .read(ticket, vec![piece(offset, offset, 512)]);
    }
    fixture.reader.drain();
    let mut tickets: Vec<_> = fixture
        .done
        .try_iter()
        .map(|report| report.ticket)
        .collect();
    tickets.sort_unstable();
    assert_eq!(tickets, (0..5000).collect::<Vec<_>>());
}

#[test]
fn busy_time_counts_while_something_is_in_flight() {
    let read_time = Duration::from_millis(2);
    let fixture = fixture(
        65_536,
        14,
        Faults {
            read_time,
            ..Faults::default()
        },
    );
    assert_eq!(fixture.reader.totals(), TransferTotals::default());
    fixture.read(1, &[piece(0, 0, 65_536)]).unwrap();
    let totals = fixture.reader.totals();
    assert_eq!(totals.bytes, 65_536);
    assert!(totals.busy >= 4 * read_time, "{totals:?}");
}

#[test]
#[should_panic(expected = "is aligned to 512 bytes")]
fn an_unaligned_piece_is_refused() {
    fixture(4096, 15, Faults::default())
        .reader
        .read(1, vec![piece(100, 0, 512)]);
}

#[test]
fn what_is_given_up_ends_with_the_requests_that_are_in_flight() {
    let fixture = fixture(REGIONS * REGION_BYTES, 5, Faults::default());
    fixture.control.change(|faults| faults.held = true);
    let ticket = |region: usize| piece(region * REGION_BYTES, region * REGION_BYTES, REGION_BYTES);
    for region in 0..REGIONS {
        fixture.reader.read(region as u64, vec![ticket(region)]);
    }
    // As many as are in flight at once, of which there is work for many more.
    let in_flight = u64::from(
        FaultyReader::new(Vec::new(), 5, Faults::default())
            .limits()
            .in_flight_max,
    );
    fixture.control.wait_for_submitted(in_flight);
    fixture.reader.give_up();
    fixture.control.set(Faults::default());
    for _ in 0..REGIONS {
        let report = fixture.done.recv().unwrap();
        assert!(
            matches!(report.result, Err(ReadError::GivenUp)),
            "{report:?}"
        );
    }
    assert_eq!(fixture.control.submitted(), in_flight);
    // What is given later is read, at once too: the thread may hear of both together.
    let later = [ticket(1)];
    for _ in 0..1000 {
        fixture.reader.give_up();
        assert_eq!(fixture.read(99, &later).unwrap(), REGION_BYTES as u64);
    }
    assert!(fixture.holds(&later));
}
