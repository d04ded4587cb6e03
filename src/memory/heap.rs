//! The heap, counted. The program installs [`CountingHeap`] as its allocator, so that what is in use outside the arenas
//! is a fact and not an estimate; where it is not installed every count is 0.

#![expect(
    unsafe_code,
    reason = "an allocator is unsafe to implement; this one passes every call on and counts"
)]

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

// SAFETY: every method passes its arguments on to `System`, unchanged, and returns what `System` returns; counting
// allocates nothing and does not unwind.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of this method, which is that of `System`.
        let pointer = unsafe { System.alloc(layout) };
        if !pointer.is_null() {
            add(layout.size());
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            add(layout.size());
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`; the pointer came from `System`, for every method passes on what `System` gave.
        unsafe { System.dealloc(pointer, layout) };
        subtract(layout.size());
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as in `dealloc`.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        if !moved.is_null() {
            add(size);
            subtract(layout.size());
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
