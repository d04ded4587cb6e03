//! The compute pool: runs one function over numbered chunks on a fixed set of threads.
//!
//! The caller takes part. Chunks are handed out one at a time by an atomic counter, so that a core disturbed by
//! another process takes fewer of them and holds up nobody. A worker with nothing to do looks for work for a tenth
//! of a millisecond (the gap between two products of one step), then sleeps: an idle server burns no processor time.
//!
//! A thread whose core is taken away in the middle of a chunk holds up all others until it gets it back, some
//! milliseconds later. So threads offer their cores (`sched_yield`) when they hold no chunk: between chunks about once
//! a millisecond, and while they look for work or for the end. Where nobody else wants the core that costs less than a
//! microsecond; where somebody does, it is given away at a moment at which nobody waits for it. `benches/pool.rs`
//! measures both.
//!
//! Protocol. `Shared::ticket` holds (generation, chunks left) in one word. `run` writes the job into its slot, then
//! publishes a new ticket. Whoever lowers `chunks left` from a positive number by compare-exchange owns that chunk,
//! and only an owner reads the slot; `run` returns (and the slot changes) only after every owned chunk is counted in
//! `finished`. So a worker that wakes late finds no chunk left and never touches a job that is over.
#![expect(
    unsafe_code,
    reason = "a job borrows from its caller while other threads execute it"
)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::InstructionSet;
use rustix::thread::{CpuSet, sched_setaffinity};

/// How long threads wait in which way.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// A worker looks for work so long before it sleeps. Waking one takes its caller ten to sixty microseconds.
    work: Duration,
    /// The caller looks for the last chunk to finish so long before it sleeps, offering its core meanwhile: about a
    /// slice of the scheduler, after which a thread that lost its core has it again.
    end: Duration,
    /// A thread offers its core between two chunks if the last offer is so long ago: less than the scheduler's slice,
    /// so that it seldom takes the core itself.
    offer: Duration,
}

impl Patience {
    const USUAL: Patience = Patience {
        work: Duration::from_micros(100),
        end: Duration::from_micros(3000),
        offer: Duration::from_micros(1000),
    };
    /// More threads than CPUs cannot gain by looking: the one that has work needs the core.
    const CROWDED: Patience = Patience {
        work: Duration::ZERO,
        end: Duration::ZERO,
        offer: Duration::from_micros(1000),
    };

    /// For a pool of so many threads on this machine.
    fn of(threads: usize) -> Patience {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        match threads > cpus {
            true => Patience::CROWDED,
            false => Patience::USUAL,
        }
    }
}

/// A thread that looks for something keeps its core so long, and then offers it between two looks.
const KEEP: Duration = Duration::from_micros(10);

thread_local! {
    /// Whether this thread is inside a chunk: a nested `run` is then executed inline.
    static INSIDE_CHUNK: Cell<bool> = const { Cell::new(false) };
    /// When this thread last offered its core between two chunks.
    static OFFERED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Threads that compute together. Clones are handles to the same threads; dropping the last one ends and joins them.
#[derive(Clone)]
pub struct ComputePool {
    team: Arc<Team>,
}

struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a run: callers on different threads take turns.
    turn: Mutex<()>,
    threads: usize,
    /// The CPU of each thread, the caller's first, where they are pinned; otherwise none.
    cpus: Vec<usize>,
    instruction_set: InstructionSet,
}

type Chunk<'a> = dyn Fn(usize) + Sync + 'a;

struct Job {
    function: *const Chunk<'static>,
    chunks: u32,
}

struct Shared {
    /// Generation in the high half, chunks left in the low half.
    ticket: AtomicU64,
    job: UnsafeCell<Job>,
    finished: AtomicU32,
    /// Set when a chunk panicked: chunks that are still handed out are counted, not executed.
    failed: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Guards nothing but the two condition variables.
    lock: Mutex<()>,
    work: Condvar,
    sleeping: AtomicUsize,
    done: Condvar,
    caller_sleeps: AtomicBool,
    patience: Patience,
}

// SAFETY: `job` is written only by the caller that holds `Team::turn`, while no chunk is owned, and read only
// by owners of a chunk (see the protocol above); the function it points to is Sync and outlives the run.
unsafe impl Sync for Shared {}
// SAFETY: as above; the raw pointer is not tied to a thread.
unsafe impl Send for Shared {}

impl ComputePool {
    /// A pool of `threads` threads, the caller included, on the fastest instruction set of this machine. Where the
    /// system refuses threads, the pool has fewer and the log says so.
    pub fn new(threads: usize) -> ComputePool {
        ComputePool::with_instruction_set(threads, InstructionSet::detect())
    }

    /// A pool whose kernels use the given instruction set (benches and tests; results are the same).
    ///
    /// # Panics
    /// When the machine cannot run the set.
    pub fn with_instruction_set(threads: usize, instruction_set: InstructionSet) -> ComputePool {
        assert!(
            instruction_set.is_available(),
            "this machine cannot run {instruction_set}"
        );
        let patience = Patience::of(threads);
        ComputePool::start(threads.max(1), &[], instruction_set, patience)
    }

    /// A pool of a thread for each of these CPUs, on which each stays. The caller is the first of them, and is free
    /// until it asks for it: see [`ComputePool::pin_caller`]. A CPU that the system refuses leaves its thread free,
    /// and the log says so.
    pub fn pinned(cpus: &[usize]) -> ComputePool {
        let (threads, set) = (cpus.len().max(1), InstructionSet::detect());
        ComputePool::start(threads, cpus, set, Patience::of(threads))
    }

    /// Pins the calling thread to the first CPU of a pinned pool; does nothing otherwise. Threads that it starts later
    /// are pinned with it.
    pub fn pin_caller(&self) {
        if let Some(&cpu) = self.team.cpus.first() {
            pin(cpu);
        }
    }

    fn start(
        threads: usize,
        cpus: &[usize],
        instruction_set: InstructionSet,
        patience: Patience,
    ) -> ComputePool {
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(0),
            job: UnsafeCell::new(Job {
                function: &nothing as &Chunk<'static>,
                chunks: 0,
            }),
            finished: AtomicU32::new(0),
            failed: AtomicBool::new(false),
            payload: Mutex::new(None),
            stop: AtomicBool::new(false),
            lock: Mutex::new(()),
            work: Condvar::new(),
            sleeping: AtomicUsize::new(0),
            done: Condvar::new(),
            caller_sleeps: AtomicBool::new(false),
            patience,
        });
        let mut workers = Vec::new();
        for index in 1..threads {
            let shared = Arc::clone(&shared);
            let cpu = cpus.get(index).copied();
            let spawned = std::thread::Builder::new()
                .name(format!("strata-compute-{index}"))
                .spawn(move || {
                    if let Some(cpu) = cpu {
                        pin(cpu);
                    }
                    shared.work_until_stopped();
                });
            match spawned {
                Ok(worker) => workers.push(worker),
                // A limit of the process or the machine: those that run can do the work.
                Err(error) => {
                    tracing::warn!(
                        "only {index} of {threads} compute threads run; the next cannot be started: {error}"
                    );
                    break;
                }
            }
        }
        let threads = 1 + workers.len();
        ComputePool {
            team: Arc::new(Team {
                shared,
                workers,
                turn: Mutex::new(()),
                threads,
                cpus: cpus.get(..threads).unwrap_or_default().to_vec(),
                instruction_set,
            }),
        }
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.team.threads
    }

    /// The CPU of each thread, the caller's first; none where they are not pinned.
    pub fn cpus(&self) -> &[usize] {
        &self.team.cpus
    }

    /// What the kernels of this pool use.
    pub fn instruction_set(&self) -> InstructionSet {
        self.team.instruction_set
    }

    /// Calls `function(0)` to `function(chunks - 1)`, each once, on any thread in any order, and returns when all are
    /// done. A panic in a chunk is passed on to the caller after the others have stopped. Called from inside a chunk
    /// it runs inline.
    ///
    /// # Panics
    /// When a chunk does, or `chunks` exceeds `u32::MAX`.
    pub fn run(&self, chunks: usize, function: &(dyn Fn(usize) + Sync)) {
        let team = &*self.team;
        if chunks <= 1 || team.workers.is_empty() || INSIDE_CHUNK.get() {
            for index in 0..chunks {
                function(index);
            }
            return;
        }
        let count = u32::try_from(chunks)
            .unwrap_or_else(|_| panic!("{chunks} chunks: at most {}", u32::MAX));
        let turn = lock(&team.turn);
        let shared = &*team.shared;
        // SAFETY: only the lifetime changes. The pointer is used by owners of a chunk of this run alone, and this
        // function does not return (nor unwind) before all of them are counted as finished.
        let function = unsafe {
            std::mem::transmute::<*const Chunk<'_>, *const Chunk<'static>>(
                function as *const Chunk<'_>,
            )
        };
        // SAFETY: `turn` is held and no chunk of an earlier run is owned, so nobody else looks at the slot.
        unsafe {
            *shared.job.get() = Job {
                function,
                chunks: count,
            };
        }
        shared.finished.store(0, Ordering::Relaxed);
        shared.failed.store(false, Ordering::Relaxed);
        let generation = (shared.ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        shared
            .ticket
            .store((generation << 32) | u64::from(count), Ordering::SeqCst);
        if shared.sleeping.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&shared.lock);
            shared.work.notify_all();
        }
        shared.take_chunks();
        shared.wait_until_finished(count);
        let payload = if shared.failed.load(Ordering::Acquire) {
            lock(&shared.payload).take()
        } else {
            None
        };
        drop(turn);
        if let Some(payload) = payload {
            resume_unwind(payload);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = lock(&self.shared.lock);
            self.shared.work.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its chunks, so join cannot fail for a reason the caller could act on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work_until_stopped(&self) {
        loop {
            self.take_chunks();
            if !self.wait_for_work() {
                return;
            }
        }
    }

    /// Executes chunks until none is left to take.
    fn take_chunks(&self) {
        let mut ticket = self.ticket.load(Ordering::SeqCst);
        while ticket & u64::from(u32::MAX) != 0 {
            match self.ticket.compare_exchange_weak(
                ticket,
                ticket - 1,
                Ordering::SeqCst,
                Ordering::SeqCst,
            ) {
                Ok(_) => {
                    self.execute((ticket & u64::from(u32::MAX)) as u32);
                    self.offer_core();
                    ticket = self.ticket.load(Ordering::SeqCst);
                }
                Err(now) => ticket = now,
            }
        }
    }

    /// Gives others the core for a moment if they want it and the last offer was long ago.
    fn offer_core(&self) {
        let now = Instant::now();
        let last = OFFERED.get().unwrap_or(now);
        if now - last >= self.patience.offer {
            std::thread::yield_now();
            OFFERED.set(Some(Instant::now()));
        } else {
            OFFERED.set(Some(last));
        }
    }

    /// Executes the chunk that the caller owns: the one taken when `left` chunks were left.
    fn execute(&self, left: u32) {
        // SAFETY: the calling thread owns a chunk, so the slot is not written and the function is alive.
        let (function, chunks) = unsafe {
            let job = &*self.job.get();
            (&*job.function, job.chunks)
        };
        if !self.failed.load(Ordering::Relaxed) {
            INSIDE_CHUNK.set(true);
            // Chunks go out in ascending order, so that memory is walked forwards.
            let result = catch_unwind(AssertUnwindSafe(|| function((chunks - left) as usize)));
            INSIDE_CHUNK.set(false);
            if let Err(payload) = result {
                lock(&self.payload).get_or_insert(payload);
                self.failed.store(true, Ordering::Release);
            }
        }
        // After this the job may be over: nothing of it may be touched any more.
        if self.finished.fetch_add(1, Ordering::SeqCst) + 1 == chunks
            && self.caller_sleeps.load(Ordering::SeqCst)
        {
            let _guard = lock(&self.lock);
            self.done.notify_all();
        }
    }

    fn wait_until_finished(&self, chunks: u32) {
        let is_finished = || self.finished.load(Ordering::SeqCst) == chunks;
        if look_for(self.patience.end, is_finished) {
            return;
        }
        let mut guard = lock(&self.lock);
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while !is_finished() {
            guard = self
                .done
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    /// Waits until there is a chunk to take; false when the pool ends.
    fn wait_for_work(&self) -> bool {
        let has_work = || {
            self.ticket.load(Ordering::SeqCst) & u64::from(u32::MAX) != 0
                || self.stop.load(Ordering::SeqCst)
        };
        if !look_for(self.patience.work, has_work) {
            let mut guard = lock(&self.lock);
            self.sleeping.fetch_add(1, Ordering::SeqCst);
            while !has_work() {
                guard = self
                    .work
                    .wait(guard)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeping.fetch_sub(1, Ordering::SeqCst);
        }
        !self.stop.load(Ordering::SeqCst)
    }
}

fn nothing(_: usize) {}

/// Keeps the calling thread on a CPU.
fn pin(cpu: usize) {
    if cpu >= CpuSet::MAX_CPU {
        tracing::warn!(
            "CPU {cpu} is beyond what threads can be pinned to; a compute thread is not"
        );
        return;
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!("a compute thread is not pinned to CPU {cpu}: {error}");
    }
}

/// Looks at `condition` for up to `limit`; whether it came true.
fn look_for(limit: Duration, condition: impl Fn() -> bool) -> bool {
    if condition() {
        return true;
    }
    if limit.is_zero() {
        return false;
    }
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            std::hint::spin_loop();
            if condition() {
                return true;
            }
        }
        let looked = start.elapsed();
        if looked > limit {
            return false;
        }
        if looked > KEEP {
            std::thread::yield_now();
        }
    }
}

/// Locks whether or not a holder panicked: what these locks guard is valid at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getaffinity;
    use std::sync::atomic::AtomicU8;

    #[test]
    fn every_chunk_runs_once_whatever_the_thread_count() {
        for threads in [1, 2, 3, 8] {
            let pool = ComputePool::new(threads);
            for chunks in [0, 1, 2, 7, 100, 1000] {
                let counts: Vec<AtomicU8> = (0..chunks).map(|_| AtomicU8::new(0)).collect();
                pool.run(chunks, &|index| {
                    counts[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn ten_thousand_short_runs_end() {
        let pool = ComputePool::new(4);
        let total = AtomicUsize::new(0);
        for run in 0..10_000 {
            pool.run(1 + run % 9, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        }
        let expected: usize = (0..10_000).map(|run| 1 + run % 9).sum();
        assert_eq!(total.load(Ordering::Relaxed), expected);
    }

    #[test]
    fn every_way_of_waiting_ends() {
        let (now, later) = (Duration::ZERO, Duration::from_millis(2));
        for work in [now, later] {
            for end in [now, later] {
                for offer in [now, later] {
                    let patience = Patience { work, end, offer };
                    let pool = ComputePool::start(3, &[], InstructionSet::detect(), patience);
                    let total = AtomicUsize::new(0);
                    for run in 0..500 {
                        pool.run(1 + run % 9, &|index| {
                            // Now and then the last chunk is late, or the next run is.
                            if run % 50 == 0 && index == 0 {
                                std::thread::sleep(Duration::from_micros(300));
                            }
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                        if run % 70 == 0 {
                            std::thread::sleep(Duration::from_micros(300));
                        }
                    }
                    let expected: usize = (0..500).map(|run| 1 + run % 9).sum();
                    assert_eq!(total.load(Ordering::Relaxed), expected, "{patience:?}");
                }
            }
        }
    }

    #[test]
    fn workers_wake_after_they_slept() {
        let pool = ComputePool::new(3);
        for _ in 0..5 {
            std::thread::sleep(Duration::from_millis(2));
            let total = AtomicUsize::new(0);
            pool.run(50, &|index| {
                total.fetch_add(index, Ordering::Relaxed);
            });
            assert_eq!(total.load(Ordering::Relaxed), 49 * 50 / 2);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_still_works() {
        let pool = ComputePool::new(3);
        for round in 0..100 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, &|index| assert_ne!(index, round % 20, "chunk {index}"));
            }));
            let payload = result.unwrap_err();
            assert!(payload.downcast_ref::<String>().unwrap().contains("chunk"));
            let total = AtomicUsize::new(0);
            pool.run(20, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(total.load(Ordering::Relaxed), 20);
        }
    }

    #[test]
    fn a_nested_run_is_executed_inline() {
        let pool = ComputePool::new(2);
        let total = AtomicUsize::new(0);
        pool.run(8, &|_| {
            let here = std::thread::current().id();
            pool.run(5, &|_| {
                assert_eq!(std::thread::current().id(), here);
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.load(Ordering::Relaxed), 40);
    }

    #[test]
    fn pinned_threads_stay_on_their_cpus_and_others_are_free() {
        let allowed = |set: CpuSet| -> Vec<usize> {
            (0..CpuSet::MAX_CPU)
                .filter(|&cpu| set.is_set(cpu))
                .collect()
        };
        let here = || allowed(sched_getaffinity(None).unwrap());
        // On a thread of its own: the test's own thread stays as it is.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let all = here();
                let cpus: Vec<usize> = all.iter().copied().take(3).collect();
                let pool = ComputePool::pinned(&cpus);
                assert_eq!((pool.threads(), pool.cpus()), (cpus.len(), cpus.as_slice()));
                assert_eq!(here(), all, "the caller has not asked for it");
                pool.pin_caller();
                let seen = Mutex::new(std::collections::HashMap::new());
                // Until every thread has had a chunk, however long the scheduler leaves one out.
                while lock(&seen).len() < cpus.len() {
                    pool.run(64, &|_| {
                        std::thread::sleep(Duration::from_micros(50));
                        lock(&seen).insert(std::thread::current().id(), here());
                    });
                }
                let mut seen: Vec<Vec<usize>> = lock(&seen).values().cloned().collect();
                seen.sort();
                let expected: Vec<Vec<usize>> = cpus.iter().map(|&cpu| vec![cpu]).collect();
                assert_eq!(seen, expected);
            });
        });
        assert!(ComputePool::new(2).cpus().is_empty());
    }

    #[test]
    fn clones_share_the_threads_and_the_last_one_ends_them() {
        let pool = ComputePool::new(2);
        let clone = pool.clone();
        drop(pool);
        let total = AtomicUsize::new(0);
        clone.run(10, &|index| {
            total.fetch_add(index, Ordering::Relaxed);
        });
        assert_eq!(total.load(Ordering::Relaxed), 45);
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = ComputePool::new(2);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(6, &|_| {
                            total.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 200 * 6);
    }
}
