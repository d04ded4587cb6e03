//! What does a parallel section cost, and what does it cost when another program takes a core?
//!
//! `cargo bench --bench pool [-- THREADS]` prints the time of an empty section (two chunks that do nothing), one after
//! another and with gaps between them; then the time of many small sections and of sections of large chunks, alone
//! and while another process burns the first CPU. With one core in N taken, a run of N threads cannot take less than
//! N / (N - 1/2) of its time alone where the scheduler is fair to all of them: 1.33 times with two. Under
//! `cargo test` a few sections show that it runs.

use std::hint::black_box;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use strata::kernels::ComputePool;

/// The argument of the process that does nothing but burn a CPU.
const BURN: &str = "burn-a-cpu";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|argument| argument == BURN) {
        return burn();
    }
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let threads = arguments
        .iter()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let scale = if is_bench { 1 } else { 1000 };

    let free = ComputePool::new(threads);
    println!("{threads} threads");
    for (gap, sections) in [(0, 200_000), (20, 20_000), (200, 5_000), (2_000, 500)] {
        empty_sections(&free, Duration::from_micros(gap), sections / scale);
    }
    let data = vec![1u8; if is_bench { 256 << 20 } else { 1 << 20 }];
    // Each several times, and the median: other programs come and go.
    let rounds = if is_bench { 7 } else { 1 };
    let small = |pool: &ComputePool| median(rounds, || small_sections(pool, 20_000 / scale));
    let large = |pool: &ComputePool| median(rounds, || large_chunks(pool, &data));
    let alone = [small(&free), large(&free)];
    println!(
        "alone: small sections {:.1} ms, chunks of 512 KiB {:.1} ms",
        alone[0] * 1e3,
        alone[1] * 1e3
    );
    if !is_bench {
        return;
    }
    let burner = Burner::start();
    let disturbed = [small(&free), large(&free)];
    drop(burner);
    println!(
        "while another process burns a CPU: small sections {:.1} ms ({:.2} times), chunks of 512 KiB {:.1} ms ({:.2} times)",
        disturbed[0] * 1e3,
        disturbed[0] / alone[0],
        disturbed[1] * 1e3,
        disturbed[1] / alone[1]
    );
}

/// Two chunks that do nothing, with a busy caller between the sections.
fn empty_sections(pool: &ComputePool, gap: Duration, sections: usize) {
    let mut times: Vec<Duration> = (0..sections.max(1))
        .map(|_| {
            let began = Instant::now();
            while began.elapsed() < gap {
                std::hint::spin_loop();
            }
            let began = Instant::now();
            pool.run(2, &|index| {
                black_box(index);
            });
            began.elapsed()
        })
        .collect();
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    println!(
        "empty section, {:4} us apart: p50 {:6.2} us, p99 {:6.2} us, most {:8.2} us",
        gap.as_micros(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
}

/// Sections of eight chunks of some microseconds, and a little work of the caller's between them: the small products of
/// a step.
fn small_sections(pool: &ComputePool, sections: usize) {
    for _ in 0..sections.max(1) {
        pool.run(8, &|index| work(1_500, index as u64));
        work(1_000, 0);
    }
}

/// Dependent arithmetic: takes as long on every core.
fn work(rounds: u64, seed: u64) {
    let mut state = seed | 1;
    for _ in 0..rounds {
        state = black_box(
            state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1),
        );
    }
    black_box(state);
}

/// Sections that read 16 MiB in chunks of 512 KiB: the large products of a step.
fn large_chunks(pool: &ComputePool, data: &[u8]) {
    for section in data.chunks(16 << 20) {
        let chunks: Vec<&[u8]> = section.chunks(512 << 10).collect();
        pool.run(chunks.len(), &|index| {
            let mut sums = [0u64; 16];
            for line in chunks[index].as_chunks::<128>().0 {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                    *sum ^= u64::from_le_bytes(*word);
                }
            }
            black_box(sums);
        });
    }
}

/// The middle of several times, in seconds, after one that is not counted.
fn median(rounds: usize, mut run: impl FnMut()) -> f64 {
    run();
    let mut times: Vec<f64> = (0..rounds)
        .map(|_| {
            let began = Instant::now();
            run();
            began.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Another process that burns a CPU until this is dropped.
struct Burner(Child);

impl Burner {
    fn start() -> Burner {
        let program = std::env::current_exe().expect("find this program");
        let mut command = Command::new(program);
        let child = command.arg(BURN).stdin(Stdio::piped());
        Burner(child.spawn().expect("start another process"))
    }
}

impl Drop for Burner {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Stays on the first CPU that it may use, until its parent is gone.
fn burn() {
    let allowed = sched_getaffinity(None).expect("ask for the CPUs");
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    let mut set = CpuSet::new();
    set.set(first.unwrap_or(0));
    sched_setaffinity(None, &set).expect("stay on one CPU");
    // Standard input is a pipe that ends with the parent.
    std::thread::spawn(|| {
        let mut nothing = Vec::new();
        drop(std::io::Read::read_to_end(
            &mut std::io::stdin(),
            &mut nothing,
        ));
        std::process::exit(0);
    });
    loop {
        work(1_000_000, 0);
    }
}
