//! The ladder: every rung that this machine has, and the steps down from it.

#![expect(
    unsafe_code,
    reason = "looks at spans whose ticket has been reported; forbids system calls to a thread"
)]

use super::super::arena::Span;
use super::super::block_reader::{BlockRead, Buffer, logical_block_bytes};
use super::super::ladder::open_with_limits;
use super::*;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::fs::File;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::mpsc;

const RUNGS: [Rung; 4] = [
    Rung::IoUringRegistered,
    Rung::IoUring,
    Rung::PreadDirect,
    Rung::PreadBuffered,
];

/// The rung itself, or None where this machine does not have it, which is said.
fn at_rung(
    rung: Rung,
    path: &Path,
    arena: &Arc<Arena>,
    border_bytes: usize,
) -> Option<Box<dyn BlockReader>> {
    files_at_rung(rung, &FilePlace::alone(path), arena, border_bytes)
}

/// The same for several files, which lie on one drive.
fn files_at_rung(
    rung: Rung,
    places: &[FilePlace],
    arena: &Arc<Arena>,
    border_bytes: usize,
) -> Option<Box<dyn BlockReader>> {
    let limits = Limits {
        block_bytes: logical_block_bytes(&places[0].path),
        in_flight_max: 16,
        request_bytes_max: 128 << 10,
        border_bytes,
    };
    match open_with_limits(places, arena, rung, limits) {
        Ok(reader) => Some(reader),
        Err(reason) => {
            eprintln!("skipped {rung}: {reason}");
            None
        }
    }
}

struct Model {
    _directory: tempfile::TempDir,
    path: PathBuf,
    content: Vec<u8>,
}

fn model(bytes: usize) -> Model {
    let mut random = ChaCha8Rng::seed_from_u64(bytes as u64);
    let content: Vec<u8> = (0..bytes).map(|_| random.random()).collect();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, &content).unwrap();
    Model {
        _directory: directory,
        path,
        content,
    }
}

fn collect() -> (Box<dyn Fn(ReadDone) + Send>, mpsc::Receiver<ReadDone>) {
    let (sender, done) = mpsc::channel();
    (Box::new(move |report| drop(sender.send(report))), done)
}

fn check(arena: &Arena, content: &[u8], piece: &ReadPiece) {
    let start = (piece.file_offset as usize).min(content.len());
    let end = (start + piece.span.bytes).min(content.len());
    // SAFETY: called for pieces whose ticket has been reported.
    let bytes = unsafe { arena.bytes(piece.span) };
    assert!(bytes[..end - start] == content[start..end], "{piece:?}");
}

#[test]
fn every_rung_reads_the_same_bytes_at_odd_places() {
    // The last size ends inside a block; the third inside the first one.
    for size in [1 << 20, 4096, 77, (3 << 20) + 12_345] {
        let model = model(size);
        for rung in RUNGS {
            let arena = Arc::new(Arena::new("host", 8 << 20).unwrap());
            // Borders inside almost every piece.
            let Some(block_reader) = at_rung(rung, &model.path, &arena, 256 << 10) else {
                continue;
            };
            let (on_done, done) = collect();
            let reader =
                Reader::with_block_reader(block_reader, Arc::clone(&arena), on_done).unwrap();
            let block = reader.block_bytes() as usize;
            let mut random = ChaCha8Rng::seed_from_u64(size as u64);
            let mut pieces = vec![ReadPiece {
                file_offset: 0,
                span: Span {
                    offset: 0,
                    bytes: size.next_multiple_of(block),
                },
            }];
            let mut used = pieces[0].span.bytes;
            loop {
                let bytes = block * random.random_range(1..1000);
                if used + bytes > 8 << 20 {
                    break;
                }
                pieces.push(ReadPiece {
                    file_offset: (block * random.random_range(0..size.div_ceil(block))) as u64,
                    span: Span {
                        offset: used,
                        bytes,
                    },
                });
                used += bytes;
            }
            for (ticket, pieces) in pieces.chunks(2).enumerate() {
                reader.read(ticket as u64, pieces.to_vec());
            }
            reader.drain();
            for report in done.try_iter() {
                report.result.unwrap();
            }
            for piece in &pieces {
                check(&arena, &model.content, piece);
            }
        }
    }
}

#[test]
fn every_rung_tells_that_the_file_shrank_and_lives_on() {
    for rung in RUNGS {
        let model = model(2 << 20);
        let arena = Arc::new(Arena::new("host", 2 << 20).unwrap());
        let Some(block_reader) = at_rung(rung, &model.path, &arena, 1 << 30) else {
            continue;
        };
        let (on_done, done) = collect();
        let reader = Reader::with_block_reader(block_reader, Arc::clone(&arena), on_done).unwrap();
        File::options()
            .write(true)
            .open(&model.path)
            .unwrap()
            .set_len(300_000)
            .unwrap();
        let piece = |bytes| ReadPiece {
            file_offset: 0,
            span: Span { offset: 0, bytes },
        };
        reader.read(1, vec![piece(2 << 20)]);
        match done.recv().unwrap().result {
            Err(error @ ReadError::Truncated { offset, .. }) => {
                assert!(offset >= 300_000, "{rung}: {error}");
                assert!(error.to_string().contains("model.gguf"), "{error}");
            }
            other => panic!("{rung}: {other:?}"),
        }
        reader.read(2, vec![piece(256 << 10)]);
        done.recv().unwrap().result.unwrap();
        check(&arena, &model.content, &piece(256 << 10));
        assert_ne!(
            reader.files()[0].identity,
            FileIdentity::at(&model.path).unwrap()
        );
    }
}

#[test]
fn every_rung_opens_a_file_that_took_the_place_of_the_first() {
    for rung in RUNGS {
        let model = model(1 << 20);
        let arena = Arc::new(Arena::new("host", 1 << 20).unwrap());
        let Some(block_reader) = at_rung(rung, &model.path, &arena, 1 << 30) else {
            continue;
        };
        let (on_done, done) = collect();
        let reader = Reader::with_block_reader(block_reader, Arc::clone(&arena), on_done).unwrap();
        let whole = ReadPiece {
            file_offset: 0,
            span: Span {
                offset: 0,
                bytes: 1 << 20,
            },
        };
        let holds = |content: &[u8]| {
            reader.read(1, vec![whole]);
            done.recv().unwrap().result.unwrap();
            check(&arena, content, &whole);
        };
        holds(&model.content);
        let other: Vec<u8> = model.content.iter().map(|byte| !byte).collect();
        let beside = model.path.with_extension("new");
        std::fs::write(&beside, &other).unwrap();
        let first = FileIdentity::at(&model.path).unwrap();
        std::fs::rename(&beside, &model.path).unwrap();
        // It is not the one that is expected: the first goes on being read.
        let error = reader.reopen(0, first).unwrap_err().to_string();
        assert!(error.contains("model.gguf"), "{rung}: {error}");
        holds(&model.content);
        reader
            .reopen(0, FileIdentity::at(&model.path).unwrap())
            .unwrap();
        holds(&other);
        std::fs::remove_file(&model.path).unwrap();
        holds(&other);
    }
}

/// Three files of odd sizes with bases far apart, and reads that end past the end of each.
#[test]
fn every_rung_reads_several_files_as_one() {
    const BASE: u64 = 1 << 20;
    const SIZES: [usize; 3] = [100_001, 77, 300_000];
    for rung in RUNGS {
        let models = SIZES.map(model);
        let places: Vec<FilePlace> = models
            .iter()
            .zip(0..)
            .map(|(model, index)| FilePlace {
                path: model.path.clone(),
                base: index * BASE,
            })
            .collect();
        let arena = Arc::new(Arena::new("host", 1 << 20).unwrap());
        let Some(block_reader) = files_at_rung(rung, &places, &arena, 1 << 30) else {
            continue;
        };
        let (on_done, done) = collect();
        let reader = Reader::with_block_reader(block_reader, Arc::clone(&arena), on_done).unwrap();
        let identities = reader.files().iter().map(|file| file.identity.bytes);
        assert!(identities.eq(SIZES.map(|size| size as u64)), "{rung}");
        // What a piece has of its file, from this byte of it on.
        let piece = |file: usize, start: usize, bytes: usize| ReadPiece {
            file_offset: file as u64 * BASE + start as u64,
            span: Span {
                offset: file * (320 << 10),
                bytes,
            },
        };
        let check_all = |last: &[u8]| {
            let pieces = [
                piece(0, 0, 104 << 10),
                piece(1, 0, 4096),
                piece(2, 8192, 300 << 10),
            ];
            reader.read(1, pieces.to_vec());
            let read = done.recv().unwrap().result.unwrap();
            let wanted = 100_001 + 77 + 300_000 - 8192;
            // A block may end past the end of a file.
            assert!(
                (wanted..wanted + 3 * 4096).contains(&read),
                "{rung}: {read}"
            );
            let contents = [&models[0].content[..], &models[1].content, &last[8192..]];
            for (piece, content) in pieces.iter().zip(contents) {
                let bytes = content.len().min(piece.span.bytes);
                // SAFETY: the ticket has been reported.
                let read = unsafe { arena.bytes(piece.span.part(0, bytes)) };
                assert!(read == &content[..bytes], "{rung}: {piece:?}");
            }
        };
        check_all(&models[2].content);

        // One of them is opened again, and no other.
        let other: Vec<u8> = models[2].content.iter().map(|byte| !byte).collect();
        let beside = models[2].path.with_extension("new");
        std::fs::write(&beside, &other).unwrap();
        std::fs::rename(&beside, &models[2].path).unwrap();
        let same = FileIdentity::at(&models[1].path).unwrap();
        reader.reopen(1, same).unwrap();
        check_all(&models[2].content);
        let now = FileIdentity::at(&models[2].path).unwrap();
        reader.reopen(2, now).unwrap();
        check_all(&other);

        // The error is that of the file, at its own offset.
        let file = File::options().write(true).open(&models[2].path).unwrap();
        file.set_len(50_000).unwrap();
        reader.read(2, vec![piece(0, 0, 4096), piece(2, 0, 300 << 10)]);
        match done.recv().unwrap().result {
            Err(ReadError::Truncated {
                file,
                offset,
                bytes_at_open,
            }) => {
                assert_eq!((file, bytes_at_open), (models[2].path.clone(), 300_000));
                assert!((50_000..300_000).contains(&offset), "{rung}: {offset}");
            }
            other => panic!("{rung}: {other:?}"),
        }
    }
}

#[test]
fn every_rung_waits_no_longer_than_it_is_told() {
    let time = std::time::Duration::from_millis(20);
    for rung in RUNGS {
        let model = model(4096);
        let arena = Arc::new(Arena::new("host", 4096).unwrap());
        let Some(mut block_reader) = at_rung(rung, &model.path, &arena, 1 << 30) else {
            continue;
        };
        let mut ended = Vec::new();
        let began = std::time::Instant::now();
        block_reader.wait(Some(time), &mut ended);
        assert!(began.elapsed() >= time && ended.is_empty(), "{rung}");
        let bytes = 4096;
        block_reader.submit(BlockRead {
            slot: 0,
            file: 0,
            file_offset: 0,
            buffer: Buffer::new(Arc::clone(&arena), Span { offset: 0, bytes }),
        });
        while ended.is_empty() {
            block_reader.wait(Some(time), &mut ended);
        }
        assert!(matches!(ended[0].result, Ok(4096)), "{rung}");
    }
}

#[test]
fn every_rung_survives_thousands_of_random_tickets() {
    const REGION: usize = 128 << 10;
    let model = model(5_000_001);
    for rung in RUNGS {
        let arena = Arc::new(Arena::new("host", 8 * REGION).unwrap());
        let Some(block_reader) = at_rung(rung, &model.path, &arena, 64 << 10) else {
            continue;
        };
        let (on_done, done) = collect();
        let reader = Reader::with_block_reader(block_reader, Arc::clone(&arena), on_done).unwrap();
        let block = reader.block_bytes() as usize;
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut in_region = [ReadPiece {
            file_offset: 0,
            span: Span::default(),
        }; 8];
        for number in 0..2000 {
            let region = if number < 8 {
                number
            } else {
                let report = done.recv().unwrap();
                report.result.unwrap();
                let region = report.ticket as usize;
                check(&arena, &model.content, &in_region[region]);
                region
            };
            let bytes = block * random.random_range(1..=REGION / block);
            in_region[region] = ReadPiece {
                file_offset: (block * random.random_range(0..5_000_001 / block)) as u64,
                span: Span {
                    offset: region * REGION,
                    bytes,
                },
            };
            reader.read(region as u64, vec![in_region[region]]);
        }
        reader.drain();
        for report in done.try_iter() {
            report.result.unwrap();
            check(&arena, &model.content, &in_region[report.ticket as usize]);
        }
    }
}

fn start(path: &Path, choice: ReaderChoice) -> Result<Reader, ReadError> {
    let arena = Arc::new(Arena::new("host", 1 << 20).unwrap());
    let (on_done, done) = collect();
    let reader = Reader::start(&FilePlace::alone(path), arena, choice, on_done)?;
    reader.read(
        1,
        vec![ReadPiece {
            file_offset: 0,
            span: Span {
                offset: 0,
                bytes: 64 << 10,
            },
        }],
    );
    assert_eq!(done.recv().unwrap().result.unwrap(), 64 << 10);
    Ok(reader)
}

#[test]
fn pread_by_name_is_never_io_uring() {
    let model = model(64 << 10);
    let reader = start(&model.path, ReaderChoice::Pread).unwrap();
    assert!(matches!(
        reader.rung(),
        Rung::PreadDirect | Rung::PreadBuffered
    ));
    assert!(reader.rung_reason().contains("pread was asked for"));
}

#[test]
fn a_file_that_is_none_is_an_error_with_its_name() {
    for path in ["/none/model.gguf", "/"] {
        let Err(error) = start(Path::new(path), ReaderChoice::Auto) else {
            panic!("{path} opens");
        };
        assert!(error.to_string().contains(path), "{error}");
    }
}

/// On file systems of both kinds, where the machine has them: each gives a rung, and a reason for it.
#[test]
fn memory_file_systems_are_read_too() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: no /dev/shm");
        return;
    };
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, vec![3; 64 << 10]).unwrap();
    for choice in [ReaderChoice::Auto, ReaderChoice::Pread] {
        let reader = start(&path, choice).unwrap();
        assert!(!reader.rung_reason().is_empty());
    }
}

/// Makes one system call fail for the calling thread and the threads that it starts; where `operation` is given,
/// only with that value as its second argument.
///
/// False where the system does not let a process do that, which is said.
fn forbid(call: libc::c_long, operation: Option<u32>, code: i32) -> bool {
    let statement = |code: u32, jump_false: u8, value: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: jump_false,
        k: value,
    };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let give = libc::BPF_RET | libc::BPF_K;
    // struct seccomp_data: the call's number at byte 0, the low half of its second argument at byte 24.
    let mut filter = vec![statement(load, 0, 0)];
    if let Some(operation) = operation {
        filter.push(statement(equal, 3, call as u32));
        filter.push(statement(load, 0, 24));
        filter.push(statement(equal, 1, operation));
    } else {
        filter.push(statement(equal, 1, call as u32));
    }
    filter.push(statement(give, 0, libc::SECCOMP_RET_ERRNO | code as u32));
    filter.push(statement(give, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: the program points to `filter`, which outlives the call; the kernel copies it.
    let forbidden = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) == 0
    };
    if !forbidden {
        eprintln!("skipped: {}", io::Error::last_os_error());
    }
    forbidden
}

#[test]
fn without_io_uring_auto_steps_down_and_its_name_is_an_error() {
    let model = model(64 << 10);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if !forbid(libc::SYS_io_uring_setup, None, libc::EPERM) {
                return;
            }
            let reader = start(&model.path, ReaderChoice::Auto).unwrap();
            match reader.rung() {
                Rung::PreadDirect => assert!(
                    reader.rung_reason().contains("io_uring is refused"),
                    "{}",
                    reader.rung_reason()
                ),
                Rung::PreadBuffered => assert!(
                    reader.rung_reason().contains("direct reads are refused"),
                    "{}",
                    reader.rung_reason()
                ),
                other => panic!("{other}"),
            }
            let Err(error) = start(&model.path, ReaderChoice::IoUring) else {
                panic!("io_uring works where it is forbidden");
            };
            assert!(matches!(error, ReadError::IoUringRefused { .. }), "{error}");
        });
    });
}

/// Operations of the system call by which a ring is told of buffers.
const REGISTER_BUFFERS: u32 = 0;
const REGISTER_BUFFERS2: u32 = 15;
const REGISTER_BUFFERS_UPDATE: u32 = 16;

#[test]
fn without_registration_io_uring_is_plain_and_says_why() {
    let model = model(64 << 10);
    let asked = start(&model.path, ReaderChoice::IoUring);
    if let Err(error) = asked {
        eprintln!("skipped: {error}");
        return;
    }
    for operations in [
        vec![REGISTER_BUFFERS, REGISTER_BUFFERS2],
        vec![REGISTER_BUFFERS_UPDATE],
    ] {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut forbidden = operations.iter().map(|&operation| {
                    forbid(libc::SYS_io_uring_register, Some(operation), libc::ENOMEM)
                });
                if !forbidden.all(|forbidden| forbidden) {
                    return;
                }
                let reader = start(&model.path, ReaderChoice::IoUring).unwrap();
                assert_eq!(reader.rung(), Rung::IoUring);
                assert!(
                    reader.rung_reason().contains("ulimit -l"),
                    "{}",
                    reader.rung_reason()
                );
            });
        });
    }
}

/// As on a kernel before 5.19.
#[test]
fn where_pieces_cannot_follow_later_all_memory_is_registered_at_once() {
    let model = model(64 << 10);
    if at_rung(
        Rung::IoUringRegistered,
        &model.path,
        &Arc::new(Arena::new("host", 1 << 20).unwrap()),
        64 << 10,
    )
    .is_none()
    {
        return;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if forbid(
                libc::SYS_io_uring_register,
                Some(REGISTER_BUFFERS2),
                libc::EINVAL,
            ) {
                let reader = start(&model.path, ReaderChoice::IoUring).unwrap();
                assert_eq!(reader.rung(), Rung::IoUringRegistered);
            }
        });
    });
}

/// As where the limit on locked memory is met halfway: what is registered stays so, and the rest is read plainly. What is
/// taken of the arena when the reader starts is registered first.
#[test]
fn memory_that_is_refused_later_is_read_into_all_the_same_and_the_rung_says_so() {
    const PIECE: usize = 64 << 10;
    let model = model(4 * PIECE);
    let arena = Arc::new(Arena::new("host", 4 * PIECE).unwrap());
    arena.allocate_low(2 * PIECE).unwrap();
    let Some(mut reader) = at_rung(Rung::IoUringRegistered, &model.path, &arena, PIECE) else {
        return;
    };
    arena.allocate_low(2 * PIECE).unwrap();
    let span = Span {
        offset: 0,
        bytes: 4 * PIECE,
    };
    let refused_later = reader.refused_later();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            if !forbid(
                libc::SYS_io_uring_register,
                Some(REGISTER_BUFFERS_UPDATE),
                libc::ENOMEM,
            ) {
                return;
            }
            for slot in 0..4 {
                let offset = slot as usize * PIECE;
                reader.submit(BlockRead {
                    slot,
                    file: 0,
                    file_offset: offset as u64,
                    buffer: Buffer::new(Arc::clone(&arena), span.part(offset, PIECE)),
                });
                assert_eq!(refused_later.get().is_some(), slot >= 2, "piece {slot}");
            }
            let mut ended = Vec::new();
            while ended.len() < 4 {
                reader.wait(None, &mut ended);
            }
            for done in ended {
                assert_eq!(done.result.unwrap(), PIECE);
            }
            // SAFETY: nothing is in flight, and this thread is the only user of the arena.
            assert!(unsafe { arena.bytes(span) } == model.content);

            let on_done = Box::new(|_| {});
            let reason = "the best there is".to_owned();
            let rung = Rung::IoUringRegistered;
            let reader = Reader::spawn(reader, rung, reason, arena, on_done).unwrap();
            assert_eq!(reader.rung(), Rung::IoUringPartlyRegistered);
            let reason = reader.rung_reason();
            assert!(reason.contains("ulimit -l"), "{reason}");
        });
    });
}
