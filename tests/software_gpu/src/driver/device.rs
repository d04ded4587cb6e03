//! The device of the process: its parts, and how the host waits for it.

use std::cell::Cell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::clock::{Clock, Step};
use super::gpu;
use super::handles::Handles;
use super::left_out::LAUNCHES;
use super::lock;
use super::memory::{Allocation, DeviceMemory};
use super::operation::{HostAddress, Label, Recording, StreamName, What, Work};
use super::page_locked::PageLocked;
use super::queue::{Held, NULL_STREAM, Next, Queue, StreamKind};
use super::reports::Reports;
use super::settings::Settings;
use super::shadow::Shadow;
use super::status::{Refusal, Status};
use crate::seam::Access;

pub(super) struct Device {
    pub(super) settings: Settings,
    pub(super) memory: DeviceMemory,
    pub(super) page_locked: Mutex<PageLocked>,
    pub(super) handles: Mutex<Handles>,
    pub(super) shadow: Mutex<Shadow>,
    pub(super) reports: Reports,
    queue: Mutex<Queue>,
    /// Operations were released, or the GPU thread shall look when to release some.
    work: Condvar,
    /// An operation is over.
    over: Condvar,
}

impl Device {
    /// The device; the first call makes it. A wrong environment ends the process with a sentence.
    pub(super) fn get() -> &'static Device {
        static DEVICE: OnceLock<Device> = OnceLock::new();
        static GPU_THREAD: OnceLock<()> = OnceLock::new();
        let device = DEVICE.get_or_init(|| {
            let settings = Settings::read(|name| std::env::var(name).ok());
            settings
                .and_then(Device::new)
                .unwrap_or_else(|error| panic!("software-gpu: {error}"))
        });
        GPU_THREAD.get_or_init(|| gpu::start(device));
        device
    }

    fn new(settings: Settings) -> Result<Device, String> {
        let memory = DeviceMemory::new(settings.memory_bytes)?;
        LAUNCHES.order(settings.refused_launch);
        Ok(Device {
            page_locked: Mutex::new(PageLocked::new(settings.page_locked_bytes_max)),
            handles: Mutex::default(),
            shadow: Mutex::new(Shadow::new(memory.base(), memory.range_bytes())),
            reports: Reports::new(settings.abort),
            queue: Mutex::new(Queue::new(settings.seed, settings.link_rate)),
            work: Condvar::new(),
            over: Condvar::new(),
            memory,
            settings,
        })
    }

    pub(super) fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    pub(super) fn set_seed(&self, seed: u64) {
        self.queue().set_seed(seed);
        self.work.notify_one();
    }

    pub(super) fn set_link_rate(&self, bytes_per_second: Option<f64>) {
        self.queue().set_link_rate(bytes_per_second);
        self.work.notify_one();
    }

    /// Puts an operation into a stream.
    pub(super) fn enqueue(
        &self,
        slot: usize,
        what: What,
        work: impl FnOnce(Step, &Clock, &Arc<Label>) -> Work,
    ) -> Step {
        self.enqueue_behind(slot, what, None, work)
    }

    /// Puts an operation into a stream that also waits for the recording of an event.
    pub(super) fn enqueue_behind(
        &self,
        slot: usize,
        what: What,
        behind: Option<&Recording>,
        work: impl FnOnce(Step, &Clock, &Arc<Label>) -> Work,
    ) -> Step {
        let step = self.queue().enqueue(slot, what, behind, work);
        self.work.notify_one();
        step
    }

    /// Puts a copy from or to page-locked memory into a stream and watches that memory until the copy is known to be over.
    /// Returns its step and what whoever waits for it knows.
    pub(super) fn enqueue_transfer(
        &self,
        slot: usize,
        what: What,
        host: (HostAddress, usize),
        access: Access,
        work: Work,
    ) -> (Step, Clock) {
        let (mut reports, mut known) = (Vec::new(), Clock::default());
        let step = {
            // Held across both, so that the copy does not run before it is watched.
            let mut page_locked = lock(&self.page_locked);
            self.enqueue(slot, what, |step, clock, label| {
                #[expect(unsafe_code, reason = "vouches for the range")]
                // SAFETY: the caller has found the range in the page-locked table, which has not changed since: freeing
                // and unregistering take the lock that is held here.
                let found = unsafe {
                    page_locked.begin((step, clock, label.clone()), (host.0.0, host.1), access)
                };
                reports = found;
                known = clock.clone();
                work
            })
        };
        self.report_all(Status::LAUNCH_FAILED, reports);
        (step, known)
    }

    /// Notes an allocation that the host has made.
    pub(super) fn note_allocation(&self, allocation: &Allocation) {
        let step = self.queue().host_step();
        let what = What::HostAllocate {
            bytes: allocation.bytes,
        };
        let label = Arc::new(Label {
            what,
            number: 0,
            stream: StreamName(0),
        });
        lock(&self.shadow).allocate(allocation, step, label);
    }

    /// Waits until a step is over. The host learns nothing by it.
    pub(super) fn wait(&self, step: Step) {
        let mut queue = self.queue();
        queue.release_until(step);
        self.work.notify_one();
        while !queue.is_over(step) {
            queue = self
                .over
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The host now knows what `clock` knows.
    pub(super) fn learn(&self, clock: &Clock) {
        let host = self.queue().join_host(clock);
        let reports = lock(&self.page_locked).settle(&host);
        self.report_all(Status::LAUNCH_FAILED, reports);
    }

    /// Waits for a stream.
    pub(super) fn synchronise_stream(&self, slot: usize) {
        if slot == NULL_STREAM {
            // The null stream's work includes waiting for the blocking streams.
            self.enqueue(slot, What::Wait, |_, _, _| Work::Wait);
        }
        let (step, clock) = self.queue().last(slot);
        if step.time > 0 {
            self.wait(step);
            self.learn(&clock);
        }
    }

    /// Waits for everything.
    pub(super) fn synchronise(&self) {
        let clock = self.run_everything();
        self.learn(&clock);
    }

    /// Waits for everything without the host's learning of it. Returns what it could learn.
    pub(super) fn run_everything(&self) -> Clock {
        let mut queue = self.queue();
        queue.release_all();
        self.work.notify_one();
        let (steps, clock) = queue.everything();
        while !steps.iter().all(|step| queue.is_over(*step)) {
            queue = self
                .over
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
        clock
    }

    /// Waits for the recording of an event.
    pub(super) fn synchronise_recording(&self, recording: &Recording) {
        self.wait(recording.step);
        self.learn(&recording.clock);
    }

    /// Whether a step is over; if it is, the host knows what `clock` knows.
    pub(super) fn query(&self, step: Step, clock: &Clock) -> Result<(), Refusal> {
        let waits = {
            let mut queue = self.queue();
            match queue.is_over(step) {
                true => None,
                false => Some(queue.query_waits(step)),
            }
        };
        match waits {
            None => {}
            Some(true) => self.wait(step),
            Some(false) => return Err(Refusal::silent(Status::NOT_READY)),
        }
        self.learn(clock);
        Ok(())
    }

    /// The slot of a stream handle: null and `CU_STREAM_LEGACY` are the null stream, `CU_STREAM_PER_THREAD` is the
    /// calling thread's own.
    pub(super) fn slot(&self, handle: usize) -> Result<usize, Refusal> {
        match handle {
            0 | 1 => Ok(NULL_STREAM),
            2 => Ok(self.thread_slot()),
            _ => {
                let slot = self.queue().slot(handle);
                slot.ok_or_else(|| {
                    Refusal::new(Status::INVALID_HANDLE, format!("{handle:#x} is no stream"))
                })
            }
        }
    }

    fn thread_slot(&self) -> usize {
        thread_local! {
            static HANDLE: Cell<usize> = const { Cell::new(0) };
        }
        if HANDLE.get() == 0 {
            HANDLE.set(Handles::new_handle());
            self.queue()
                .create_stream(HANDLE.get(), StreamKind::Blocking, 0);
        }
        let slot = self.queue().slot(HANDLE.get());
        slot.unwrap_or_else(|| unreachable!("a thread's stream is never destroyed"))
    }

    pub(super) fn report_all(&self, status: Status, reports: Vec<String>) {
        for report in reports {
            self.reports.make(status, &report);
        }
    }

    /// The GPU thread's side: the next released operation, as soon as there is one that can run.
    pub(super) fn next_operation(&self) -> super::operation::Operation {
        let mut queue = self.queue();
        loop {
            let now = Instant::now();
            let due = match queue.take(now) {
                Next::Run(operation) => return operation,
                Next::Until(due) => Some(due.saturating_duration_since(now)),
                Next::Nothing => None,
            };
            let patience = match queue.release_overdue() {
                Held::NoLonger => continue,
                Held::For(pause) => Some(pause),
                Held::Nothing => None,
            };
            queue = match [due, patience].into_iter().flatten().min() {
                Some(pause) => {
                    let waited = self.work.wait_timeout(queue, pause);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self
                    .work
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// The GPU thread has run an operation.
    pub(super) fn finish(&self, step: Step) {
        self.queue().finish(step);
        self.over.notify_all();
    }
}
