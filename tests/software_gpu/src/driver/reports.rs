//! Reports: what the checks have found, the error that stays until they are taken, and counters.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::lock;
use super::status::Status;

/// Reports that are kept to be taken; after that many, they are counted and printed only.
const KEPT_MAX: usize = 1000;

pub(super) struct Reports {
    waiting: Mutex<Waiting>,
    /// What every call answers since the first report; 0 is none.
    sticky: AtomicU32,
    abort: bool,
    pub(super) counters: LiveCounters,
}

#[derive(Default)]
struct Waiting {
    texts: VecDeque<String>,
    /// Reports made and not yet taken, kept or not.
    count: u64,
}

/// What the device has done since the process began.
#[derive(Default)]
pub(super) struct LiveCounters {
    pub(super) operations: AtomicU64,
    pub(super) to_device_bytes: AtomicU64,
    pub(super) to_host_bytes: AtomicU64,
    pub(super) launches: AtomicU64,
    pub(super) pageable_async_copies: AtomicU64,
    pub(super) timed_events: AtomicU64,
    pub(super) event_waits: AtomicU64,
    pub(super) spinning_waits: AtomicU64,
}

/// The answer of `software_gpu_counters`. All are totals since the process began.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations that have run, in all streams.
    pub operations: u64,
    /// Bytes copied from the host to the device.
    pub to_device_bytes: u64,
    /// Bytes copied from the device to the host.
    pub to_host_bytes: u64,
    /// Kernels that have run.
    pub launches: u64,
    /// Asynchronous copies from or to memory that was not page-locked, which are synchronous.
    pub pageable_async_copies: u64,
    /// The most device memory that was allocated at one time.
    pub memory_bytes_most: u64,
}

impl Reports {
    pub(super) fn new(abort: bool) -> Reports {
        Reports {
            waiting: Mutex::default(),
            sticky: AtomicU32::new(0),
            abort,
            counters: LiveCounters::default(),
        }
    }

    /// Prints, keeps and counts a report; `status` is what calls answer from now on, unless an earlier report said so.
    pub(super) fn make(&self, status: Status, text: &str) {
        let text = text.replace('\n', "; ");
        eprintln!("software-gpu: {text}");
        if self.abort {
            std::process::abort();
        }
        let mut waiting = lock(&self.waiting);
        waiting.count += 1;
        if waiting.texts.len() < KEPT_MAX {
            waiting.texts.push_back(text);
        }
        // A second report leaves the first one's status.
        let _ = self
            .sticky
            .compare_exchange(0, status.0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Reports that have not been taken.
    pub(super) fn count(&self) -> u64 {
        lock(&self.waiting).count
    }

    /// The oldest report; the sticky error goes with the last one.
    pub(super) fn take(&self) -> Option<String> {
        let mut waiting = lock(&self.waiting);
        let text = waiting.texts.pop_front();
        match text {
            Some(_) => waiting.count -= 1,
            None => waiting.count = 0,
        }
        if waiting.texts.is_empty() {
            waiting.count = 0;
            self.sticky.store(0, Ordering::SeqCst);
        }
        text
    }

    pub(super) fn sticky(&self) -> Option<Status> {
        match self.sticky.load(Ordering::SeqCst) {
            0 => None,
            code => Some(Status(code)),
        }
    }
}

impl LiveCounters {
    pub(super) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    pub(super) fn read(&self, memory_bytes_most: u64) -> Counters {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counters {
            operations: value(&self.operations),
            to_device_bytes: value(&self.to_device_bytes),
            to_host_bytes: value(&self.to_host_bytes),
            launches: value(&self.launches),
            pageable_async_copies: value(&self.pageable_async_copies),
            memory_bytes_most,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_stays_until_the_last_report_is_taken() {
        let reports = Reports::new(false);
        assert_eq!((reports.count(), reports.sticky()), (0, None));
        reports.make(Status::ILLEGAL_ADDRESS, "first");
        reports.make(Status::LAUNCH_FAILED, "second\nline");
        assert_eq!(
            (reports.count(), reports.sticky()),
            (2, Some(Status::ILLEGAL_ADDRESS))
        );
        assert_eq!(reports.take().as_deref(), Some("first"));
        assert_eq!(reports.sticky(), Some(Status::ILLEGAL_ADDRESS));
        assert_eq!(reports.take().as_deref(), Some("second; line"));
        assert_eq!((reports.count(), reports.sticky()), (0, None));
        assert_eq!(reports.take(), None);
    }

    #[test]
    fn no_more_reports_are_kept_than_the_bound() {
        let reports = Reports::new(false);
        for _ in 0..KEPT_MAX + 5 {
            reports.make(Status::LAUNCH_FAILED, "x");
        }
        assert_eq!(reports.count(), KEPT_MAX as u64 + 5);
        for _ in 0..KEPT_MAX {
            assert!(reports.take().is_some());
        }
        assert_eq!((reports.count(), reports.sticky()), (0, None));
    }
}
