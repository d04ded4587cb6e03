//! What does it cost to verify what is read, beside what the drive takes to read it?
//!
//! `cargo bench --bench checksums [-- FILE]` prints the rate of XXH3 over buffers that a cache holds and over ones that
//! none does, and, where a file is given, the rate at which the reader brings groups of 16 MiB of it into memory. The
//! quotient is the share of a thread that verifying takes while the drive is the limit. What it takes of a whole step,
//! `strata bench decode --verify-reads 0` and `1` tell. Under `cargo test` it runs with tiny buffers.

use std::hint::black_box;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use strata::memory::{
    Arena, FileIdentity, FilePlace, ReaderChoice, Region, RegionPiece, RegionReader,
};
use twox_hash::XxHash3_64;

/// A group of weights.
const GROUP_BYTES: usize = 16 << 20;
/// Groups that are read at once.
const ENTRIES: usize = 3;
/// What is read of the file at most: more says nothing new.
const FILE_BYTES_MAX: u64 = 4 << 30;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let file = arguments.iter().find(|argument| !argument.starts_with('-'));
    let most = if is_bench { 512 << 20 } else { 1 << 20 };
    for bytes in [64 << 10, 1 << 20, GROUP_BYTES, 512 << 20] {
        let rate = hash_rate(bytes.min(most), if is_bench { 7 } else { 1 });
        println!(
            "XXH3 over {:7} KiB: {:6.2} GB/s",
            bytes.min(most) >> 10,
            rate / 1e9
        );
    }
    let Some(file) = file.filter(|_| is_bench) else {
        return;
    };
    let hash = hash_rate(most, 7);
    let (drive, rung) = drive_rate(Path::new(file));
    println!(
        "the drive ({rung}): {:6.2} GB/s; verifying takes {:.1} % of a thread",
        drive / 1e9,
        100.0 * drive / hash
    );
}

/// Bytes per second: the best of several rounds of at least 256 MiB in the bench.
fn hash_rate(bytes: usize, rounds: usize) -> f64 {
    let data: Vec<u8> = (0..bytes).map(|i| (i * 31 % 251) as u8).collect();
    let times = if rounds > 1 {
        ((256 << 20) / bytes).max(1)
    } else {
        1
    };
    let round = || {
        let began = Instant::now();
        for _ in 0..times {
            black_box(XxHash3_64::oneshot(black_box(&data)));
        }
        (times * bytes) as f64 / began.elapsed().as_secs_f64()
    };
    (0..rounds).map(|_| round()).fold(0.0, f64::max)
}

/// Bytes per second of the reader, and the rung that it took.
fn drive_rate(path: &Path) -> (f64, &'static str) {
    let size = FileIdentity::at(path).expect("find the file").bytes;
    let groups = size.min(FILE_BYTES_MAX) / GROUP_BYTES as u64;
    assert!(groups > 0, "give a file of at least 16 MiB");
    let arena = Arc::new(Arena::new("host", ENTRIES * GROUP_BYTES).expect("allocate"));
    let (sender, done) = mpsc::channel();
    let on_done = Box::new(move |read| drop(sender.send(read)));
    let reader = RegionReader::start(
        &FilePlace::alone(path),
        Arc::clone(&arena),
        ReaderChoice::Auto,
        on_done,
    );
    let reader = reader.expect("open the file");
    let mut free: Vec<Region> = (0..ENTRIES)
        .map(|_| Region::allocate_low(&arena, GROUP_BYTES).expect("allocate"))
        .collect();
    let began = Instant::now();
    for group in 0..groups + ENTRIES as u64 {
        let region = free.pop().unwrap_or_else(|| {
            let read = done.recv().expect("the reader lives");
            read.result.expect("read the file");
            read.region
        });
        if group < groups {
            let piece = RegionPiece {
                file_offset: group * GROUP_BYTES as u64,
                offset: 0,
                bytes: GROUP_BYTES,
            };
            reader.read(group, region, &[piece]);
        }
    }
    let rate = (groups * GROUP_BYTES as u64) as f64 / began.elapsed().as_secs_f64();
    (rate, reader.rung().name())
}
