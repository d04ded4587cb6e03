//! The heap, counted. The program installs [`CountingHeap`] as its allocator, so that what is in use outside the arenas
//! is a fact and not an estimate; where it is not installed every count is 0. When the system refuses, one line says what
//! for, what most likely is the cause, and what to try first, before the caller ends the process.

#![expect(
    unsafe_code,
    reason = "an allocator is unsafe to implement; this one passes every call on and counts"
)]

use super::phase::tell_that_the_heap_is_refused;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator with two counters.
pub struct CountingHeap;

/// Bytes that the program has asked for and not given back. Not what the allocator takes for them from the kernel.
pub fn heap_live_bytes() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// The most that was live at once since the start or the last [`restart_heap_peak`].
pub fn heap_peak_bytes() -> usize {
    PEAK.load(Ordering::Relaxed)
}

/// The peak is counted anew from what is live now.
pub fn restart_heap_peak() {
    PEAK.store(heap_live_bytes(), Ordering::Relaxed);
}

/// The two counters need no order between them: the peak may miss a moment in which two threads race, by the bytes of
/// one allocation.
fn add(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    if live > PEAK.load(Ordering::Relaxed) {
        PEAK.fetch_max(live, Ordering::Relaxed);
    }
}

fn subtract(bytes: usize) {
    LIVE.fetch_sub(bytes, Ordering::Relaxed);
}

/// What was given counts; that nothing was given is said. Neither allocates or unwinds.
fn counted(pointer: *mut u8, bytes: usize) -> *mut u8 {
    match pointer.is_null() {
        false => add(bytes),
        true => tell_that_the_heap_is_refused(bytes),
    }
    pointer
}

// SAFETY: every method passes its arguments on to `System`, unchanged, and returns what `System` returns; counting
// allocates nothing and does not unwind.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of this method, which is that of `System`.
        counted(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        counted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`; the pointer came from `System`, for every method passes on what `System` gave.
        unsafe { System.dealloc(pointer, layout) };
        subtract(layout.size());
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as in `dealloc`.
        let moved = counted(unsafe { System.realloc(pointer, layout, size) }, size);
        if !moved.is_null() {
            subtract(layout.size());
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::super::Phase;
    use super::*;
    use std::process::Command;

    #[test]
    fn what_is_given_back_is_not_live() {
        // Not installed in this test, so nothing else counts.
        let heap = CountingHeap;
        let small = Layout::from_size_align(1000, 8).unwrap();
        let large = Layout::from_size_align(3000, 8).unwrap();
        // SAFETY: the layouts are not empty, each pointer is used with the layout it has at the time, and both are
        // given back once.
        unsafe {
            let first = heap.alloc(small);
            let second = heap.alloc_zeroed(small);
            assert_eq!((heap_live_bytes(), heap_peak_bytes()), (2000, 2000));
            let second = heap.realloc(second, small, 3000);
            assert_eq!(heap_live_bytes(), 4000);
            heap.dealloc(first, small);
            restart_heap_peak();
            assert_eq!((heap_live_bytes(), heap_peak_bytes()), (3000, 3000));
            heap.dealloc(second, large);
        }
        assert_eq!((heap_live_bytes(), heap_peak_bytes()), (0, 3000));
    }

    /// Tells a process of this test binary that it is the child of the test below.
    const CHILD: &str = "STRATA_TEST_HEAP_REFUSED";

    #[test]
    fn a_refusal_names_the_phase_the_bytes_the_cause_and_what_to_do() {
        let name = format!("{}::child", module_path!().split_once("::").unwrap().1);
        let output = Command::new(std::env::current_exe().unwrap())
            .args([name.as_str(), "--exact", "--nocapture"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("strata: "))
            .collect();
        let expected = [
            ["while starting", "4611686018427387904 bytes", "ulimit -v"],
            [
                "while loading",
                "4611686018427387905 bytes",
                "--host-memory",
            ],
            ["first step, 512 ", "4611686018427387906 bytes", "reserve"],
            ["between", "4611686018427387907 bytes", "another program"],
            [
                "prompt's step, 96 ",
                "4611686018427387908 bytes",
                "--step-width",
            ],
            [
                "decoding, 2 ",
                "4611686018427387908 bytes",
                "another program",
            ],
            // Of another model.
            ["first step, 1 ", "4611686018427387908 bytes", "reserve"],
        ];
        assert_eq!(lines.len(), expected.len(), "{text}");
        for (line, parts) in lines.iter().zip(expected) {
            for part in ["out of memory", "most likely", "first "]
                .iter()
                .chain(&parts)
            {
                assert!(line.contains(part), "{line:?} lacks {part:?}");
            }
        }
    }

    /// Does nothing unless it runs in the child process of the test above: the phase is of a process.
    #[test]
    fn child() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        // More than any address space has.
        let layout = |more: usize| Layout::from_size_align((1 << 62) + more, 1).unwrap();
        let heap = CountingHeap;
        let small = Layout::from_size_align(8, 1).unwrap();
        // The compiler leaves out an allocation that nobody uses.
        let refused = |pointer: *mut u8| std::hint::black_box(pointer).is_null();
        // SAFETY: the layouts are not empty; what is not refused is given back with the layout that it was taken with,
        // which a refused `realloc` leaves as it was.
        unsafe {
            for _ in 0..2 {
                assert!(refused(heap.alloc(layout(0))));
            }
            Phase::begin_loading();
            assert!(refused(heap.alloc_zeroed(layout(1))));
            let kept = std::hint::black_box(heap.alloc(small));
            // Given up: the next is the first still.
            drop(Phase::begin_step(512, true));
            {
                let step = Phase::begin_step(512, true);
                assert!(refused(heap.realloc(kept, small, layout(2).size())));
                step.succeed();
            }
            assert_eq!(heap_live_bytes(), small.size());
            heap.dealloc(kept, small);
            assert!(refused(heap.alloc(layout(3))));
            for (width, has_prompt) in [(96, true), (2, false)] {
                let _step = Phase::begin_step(width, has_prompt);
                assert!(refused(heap.alloc(layout(4))));
            }
            Phase::begin_loading();
            Phase::end_loading();
            let _step = Phase::begin_step(1, false);
            assert!(refused(heap.alloc(layout(4))));
        }
        assert_eq!(heap_live_bytes(), 0);
    }
}
