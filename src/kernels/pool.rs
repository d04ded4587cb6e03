//! The compute pool: runs one function over numbered chunks on a fixed set of threads.
//!
//! The caller takes part. Chunks are handed out one at a time by an atomic counter, so that a core disturbed by
//! another process takes fewer of them and holds up nobody. A worker with nothing to do looks for work for a few tens
//! of microseconds (the gap between two products of one step), then sleeps: an idle server burns no processor time.
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

/// How long a thread looks for work, or for the last chunk to finish, before it sleeps.
const SPIN: Duration = Duration::from_micros(40);

thread_local! {
    /// Whether this thread is inside a chunk: a nested `run` is then executed inline.
    static INSIDE_CHUNK: Cell<bool> = const { Cell::new(false) };
}

/// Threads that compute together. Dropping the pool ends and joins them.
pub struct ComputePool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the length of a run: callers on different threads take turns.
    turn: Mutex<()>,
    threads: usize,
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
    spin: Duration,
}

// SAFETY: `job` is written only by the caller that holds `ComputePool::turn`, while no chunk is owned, and read only
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
        let threads = threads.max(1);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
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
            // More threads than cores cannot gain by looking: the one that has work needs the core.
            spin: if threads > cores {
                Duration::ZERO
            } else {
                SPIN
            },
        });
        let mut workers = Vec::new();
        for index in 1..threads {
            let shared = Arc::clone(&shared);
            let spawned = std::thread::Builder::new()
                .name(format!("strata-compute-{index}"))
                .spawn(move || shared.work_until_stopped());
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
            shared,
            workers,
            turn: Mutex::new(()),
            threads,
            instruction_set,
        }
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// What the kernels of this pool use.
    pub fn instruction_set(&self) -> InstructionSet {
        self.instruction_set
    }

    /// Calls `function(0)` to `function(chunks - 1)`, each once, on any thread in any order, and returns when all are
    /// done. A panic in a chunk is passed on to the caller after the others have stopped. Called from inside a chunk
    /// it runs inline.
    ///
    /// # Panics
    /// When a chunk does, or `chunks` exceeds `u32::MAX`.
    pub fn run(&self, chunks: usize, function: &(dyn Fn(usize) + Sync)) {
        if chunks <= 1 || self.workers.is_empty() || INSIDE_CHUNK.get() {
            for index in 0..chunks {
                function(index);
            }
            return;
        }
        let count = u32::try_from(chunks)
            .unwrap_or_else(|_| panic!("{chunks} chunks: at most {}", u32::MAX));
        let turn = lock(&self.turn);
        let shared = &*self.shared;
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

impl Drop for ComputePool {
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
                    ticket = self.ticket.load(Ordering::SeqCst);
                }
                Err(now) => ticket = now,
            }
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
        if spin_until(self.spin, is_finished) {
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
        if !spin_until(self.spin, has_work) {
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

/// Looks at `condition` for up to `limit`; whether it came true.
fn spin_until(limit: Duration, condition: impl Fn() -> bool) -> bool {
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
        if start.elapsed() > limit {
            return false;
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
