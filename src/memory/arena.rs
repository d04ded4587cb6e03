//! An arena: the memory of one tier, taken in one piece at start, from the kernel or from a CUDA device.
//!
//! The plan says how many bytes; nothing else allocates weights, pages or I/O buffers. Weights and rings are taken
//! from the low end, the KV cache from the high end. Nothing is given back: an arena lives as long as its plan.
//!
//! Threads: an `Arena` is shared by `Arc`. Allocation takes a mutex; access to the bytes takes none, and who may touch
//! which span when is the contract of `bytes` and `bytes_mut`. Memory of a device has addresses and no bytes: the host
//! cannot reach it, and asking for them is a bug.

#![expect(
    unsafe_code,
    reason = "maps anonymous memory and lends slices of it by the contract of its unsafe functions"
)]

use super::cuda::{CudaDevice, CudaError};
use std::io;
use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Every span starts at a multiple of this and has a multiple of it as its length: a page, and at least the logical
/// block of every disk that is read directly.
pub const SPAN_ALIGNMENT: usize = 4096;

/// The kernel's huge page on x86-64 and on arm64 with 4 KiB pages. An arena starts at a multiple of it.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// What one thread populates at a time.
const POPULATE_BYTES: usize = 64 << 20;
/// More threads than these do not zero memory faster.
const POPULATE_THREADS_MAX: usize = 8;

/// A range of one arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span {
    pub offset: usize,
    pub bytes: usize,
}

impl Span {
    pub const fn end(self) -> usize {
        self.offset + self.bytes
    }

    /// The part of this span that starts `offset` bytes in and is `bytes` long.
    ///
    /// # Panics
    /// When the part does not lie inside the span.
    pub fn part(self, offset: usize, bytes: usize) -> Span {
        assert!(
            offset <= self.bytes && bytes <= self.bytes - offset,
            "{bytes} bytes at {offset} of a span of {} bytes",
            self.bytes
        );
        Span {
            offset: self.offset + offset,
            bytes,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error(
        "the system refused {bytes} bytes ({:.1} MiB) for the {arena} arena: {source}; most likely the budget is larger than \
         what this machine, its control group or `ulimit -v` leaves; first give a smaller --{arena}-memory, --context or \
         --parallel",
        mebibytes(*bytes)
    )]
    Map {
        arena: &'static str,
        bytes: usize,
        source: io::Error,
    },
    #[error(
        "{device} refused {bytes} bytes ({:.1} MiB) for the device arena: {source}; most likely another program has taken \
         what was free when the plan was made; first end it (`nvidia-smi` lists them), or give a smaller --device-memory",
        mebibytes(*bytes)
    )]
    Device {
        bytes: usize,
        device: String,
        source: CudaError,
    },
    #[error("the {arena} arena has {free} bytes left and {bytes} are needed")]
    Exhausted {
        arena: &'static str,
        bytes: usize,
        free: usize,
    },
    #[error("map {file}: {source}")]
    MapFile {
        file: std::path::PathBuf,
        source: io::Error,
    },
}

fn mebibytes(bytes: usize) -> f64 {
    bytes as f64 / (1u64 << 20) as f64
}

/// One contiguous piece of memory.
pub struct Arena {
    name: &'static str,
    memory: Memory,
    bytes: usize,
    /// What lies between the two is free. Both are multiples of `SPAN_ALIGNMENT`, low <= high <= bytes.
    border: Mutex<Border>,
}

enum Memory {
    /// An anonymous mapping, zeroed; its pages come when they are touched, or by `populate`. The kernel is asked for huge
    /// ones.
    Mapped {
        base: NonNull<u8>,
        locked: Option<Locked>,
    },
    /// Allocated on a device: an address that only the device can use. Its contents are undefined until they are written.
    Cuda { base: u64, device: Arc<CudaDevice> },
}

/// The pages at the start of a mapping that a device copies from by itself.
struct Locked {
    device: Arc<CudaDevice>,
    bytes: usize,
}

struct Border {
    low: usize,
    high: usize,
}

// SAFETY: the mapping belongs to this value alone and to no thread; it is unmapped once, in drop. All access to its
// bytes goes through the unsafe functions below, whose contracts exclude conflicting access from any thread.
unsafe impl Send for Arena {}
// SAFETY: as above; the shared functions read plain fields or take the mutex.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `bytes`, rounded up to `SPAN_ALIGNMENT`. Zero is an arena in which nothing can be allocated.
    pub fn new(name: &'static str, bytes: usize) -> Result<Arena, MemoryError> {
        let error = |source| MemoryError::Map {
            arena: name,
            bytes,
            source,
        };
        let too_large = || error(io::Error::from(io::ErrorKind::OutOfMemory));
        let rounded = round_up(bytes).ok_or_else(too_large)?;
        let base = if rounded == 0 {
            // No access is ever made through this pointer: every span of an empty arena is empty.
            NonNull::<u8>::dangling()
        } else {
            let mapped = rounded
                .checked_add(HUGE_PAGE_BYTES)
                .filter(|&mapped| isize::try_from(mapped).is_ok())
                .ok_or_else(too_large)?;
            map_aligned(rounded, mapped).map_err(error)?
        };
        Ok(Arena::over(
            name,
            Memory::Mapped { base, locked: None },
            rounded,
        ))
    }

    /// Allocates `bytes`, rounded up to `SPAN_ALIGNMENT`, on a device.
    pub fn on_cuda(
        name: &'static str,
        bytes: usize,
        device: &Arc<CudaDevice>,
    ) -> Result<Arena, MemoryError> {
        let rounded = round_up(bytes).unwrap_or(usize::MAX);
        let allocated = match rounded {
            0 => Ok(0),
            bytes => device.allocate(bytes),
        };
        let base = allocated.map_err(|source| MemoryError::Device {
            bytes,
            device: device.name().to_owned(),
            source,
        })?;
        let device = Arc::clone(device);
        Ok(Arena::over(name, Memory::Cuda { base, device }, rounded))
    }

    fn over(name: &'static str, memory: Memory, bytes: usize) -> Arena {
        Arena {
            name,
            memory,
            bytes,
            border: Mutex::new(Border {
                low: 0,
                high: bytes,
            }),
        }
    }

    /// Has the kernel give all pages of the mapping now, zeroed by several threads at once, from the low end on, until that is
    /// done or `stop` is set. Otherwise the one that registers or locks them has to wait for each: a drive reads about as
    /// fast as one thread zeroes. What is written to the arena meanwhile stays. False where the kernel does not do that
    /// (before 5.14), or where it was stopped: then pages come when they are touched.
    pub fn populate(&self, stop: &AtomicBool) -> bool {
        let Memory::Mapped { base, .. } = &self.memory else {
            return false;
        };
        let base = base.addr().get();
        let next = AtomicUsize::new(0);
        let refused = AtomicBool::new(false);
        let given_up = || refused.load(Ordering::Relaxed) || stop.load(Ordering::Relaxed);
        let populate = || {
            while !given_up() {
                let offset = next.fetch_add(POPULATE_BYTES, Ordering::Relaxed);
                if offset >= self.bytes {
                    break;
                }
                let bytes = POPULATE_BYTES.min(self.bytes - offset);
                let start = std::ptr::without_provenance_mut(base + offset);
                // SAFETY: the range lies inside the mapping, which `self` keeps; its bytes do not change.
                let result = unsafe { libc::madvise(start, bytes, libc::MADV_POPULATE_WRITE) };
                refused.fetch_or(result != 0, Ordering::Relaxed);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        let pieces = self.bytes.div_ceil(POPULATE_BYTES);
        std::thread::scope(|scope| {
            for _ in 1..threads.min(pieces).min(POPULATE_THREADS_MAX) {
                // One that the system refuses is done without.
                let thread = std::thread::Builder::new().name("populate".to_owned());
                let _ = thread.spawn_scoped(scope, populate);
            }
            populate();
        });
        !given_up()
    }

    /// Locks as much of the mapping to its pages as the system lets, from the low end on, where rings are: all of it, or
    /// half, or half of that. From what is not locked the device copies too, but the thread that asks for it waits.
    /// Says how many bytes are locked, and why not more.
    pub fn lock_pages(&mut self, device: &Arc<CudaDevice>) -> (usize, Option<CudaError>) {
        let Memory::Mapped { base, locked } = &mut self.memory else {
            return (0, None);
        };
        let mut refusal = None;
        let mut bytes = self.bytes;
        while locked.is_none() && bytes >= SPAN_ALIGNMENT {
            // SAFETY: the mapping is `self.bytes` long and unmapped in drop only, after the pages are unlocked.
            match unsafe { device.lock_pages(base.as_ptr(), bytes) } {
                Ok(()) => {
                    let device = Arc::clone(device);
                    *locked = Some(Locked { device, bytes });
                }
                Err(error) => {
                    refusal.get_or_insert(error);
                    bytes = bytes / 2 / SPAN_ALIGNMENT * SPAN_ALIGNMENT;
                }
            }
        }
        (locked.as_ref().map_or(0, |locked| locked.bytes), refusal)
    }

    /// How many bytes from the start are locked to their pages.
    pub fn page_locked_bytes(&self) -> usize {
        match &self.memory {
            Memory::Mapped {
                locked: Some(locked),
                ..
            } => locked.bytes,
            _ => 0,
        }
    }

    /// A span in two parts, offset and length: what is locked to its pages, and the rest. A copy does not cross the border.
    pub(super) fn locked_and_rest(&self, span: Span) -> [(usize, usize); 2] {
        let locked = self
            .page_locked_bytes()
            .saturating_sub(span.offset)
            .min(span.bytes);
        [(0, locked), (locked, span.bytes - locked)]
    }

    /// The device that this memory is on.
    pub fn cuda(&self) -> Option<&Arc<CudaDevice>> {
        match &self.memory {
            Memory::Mapped { .. } => None,
            Memory::Cuda { device, .. } => Some(device),
        }
    }

    /// The name of the tier, for messages.
    pub fn name(&self) -> &'static str {
        self.name
    }

    pub fn bytes_total(&self) -> usize {
        self.bytes
    }

    /// Bytes taken from the low end so far.
    pub(super) fn low_bytes(&self) -> usize {
        self.lock_border().low
    }

    /// Takes `bytes` (rounded up to `SPAN_ALIGNMENT`) from the low end: weights, rings, scratch.
    pub fn allocate_low(&self, bytes: usize) -> Result<Span, MemoryError> {
        let mut border = self.lock_border();
        let bytes = self.fitting(&border, bytes)?;
        let offset = border.low;
        border.low += bytes;
        Ok(Span { offset, bytes })
    }

    /// Takes `bytes` (rounded up to `SPAN_ALIGNMENT`) from the high end: the KV cache.
    pub fn allocate_high(&self, bytes: usize) -> Result<Span, MemoryError> {
        let mut border = self.lock_border();
        let bytes = self.fitting(&border, bytes)?;
        border.high -= bytes;
        Ok(Span {
            offset: border.high,
            bytes,
        })
    }

    /// The largest span that can still be allocated.
    pub fn largest_free(&self) -> usize {
        let border = self.lock_border();
        border.high - border.low
    }

    fn fitting(&self, border: &Border, bytes: usize) -> Result<usize, MemoryError> {
        let free = border.high - border.low;
        round_up(bytes)
            .filter(|&rounded| rounded <= free)
            .ok_or(MemoryError::Exhausted {
                arena: self.name,
                bytes,
                free,
            })
    }

    fn lock_border(&self) -> std::sync::MutexGuard<'_, Border> {
        // Nothing panics while the mutex is held, and the two numbers are valid after each statement.
        self.border.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `bytes` bytes at `address` lie inside this arena.
    pub fn contains(&self, address: u64, bytes: usize) -> bool {
        let bytes = bytes as u64;
        address
            .checked_sub(self.base_address())
            .is_some_and(|offset| {
                offset <= self.bytes as u64 && bytes <= self.bytes as u64 - offset
            })
    }

    /// Where the arena is in this process, or on its device.
    pub fn addresses(&self) -> std::ops::Range<u64> {
        let start = self.base_address();
        start..start + self.bytes as u64
    }

    fn base_address(&self) -> u64 {
        match &self.memory {
            Memory::Mapped { base, .. } => base.addr().get() as u64,
            Memory::Cuda { base, .. } => *base,
        }
    }

    /// The address of a span's first byte, for who can use it: this process or the device.
    ///
    /// # Panics
    /// When the span does not lie inside this arena.
    pub fn address(&self, span: Span) -> u64 {
        self.assert_inside(span);
        self.base_address() + span.offset as u64
    }

    /// A span's first byte, valid for `span.bytes` bytes while the arena lives.
    ///
    /// # Panics
    /// When the span does not lie inside this arena, or the arena is on a device.
    pub fn pointer(&self, span: Span) -> *mut u8 {
        self.assert_inside(span);
        let Memory::Mapped { base, .. } = &self.memory else {
            panic!("the host cannot reach the {} arena", self.name);
        };
        // SAFETY: the offset is at most the length of the mapping (asserted above), which is at most isize::MAX, so
        // the result points into the mapping or one past its end. In an empty arena the offset is 0.
        unsafe { base.as_ptr().add(span.offset) }
    }

    fn assert_inside(&self, span: Span) {
        assert!(
            span.offset <= self.bytes && span.bytes <= self.bytes - span.offset,
            "{span:?} lies outside the {} arena of {} bytes",
            self.name,
            self.bytes
        );
    }

    /// The bytes of a span.
    ///
    /// # Safety
    /// For as long as the slice lives, nothing writes the span: no `Reader` has a read into it in flight, no
    /// `CopyStream` a copy to it, and nobody holds `bytes_mut` of an overlapping span.
    ///
    /// # Panics
    /// When the span does not lie inside this arena.
    pub unsafe fn bytes(&self, span: Span) -> &[u8] {
        let pointer = self.pointer(span);
        // SAFETY: `pointer` checked that the span lies inside a mapping, which is readable, initialised (anonymous
        // memory is zeroed) and lives as long as `self`; u8 needs no alignment. The caller excludes writers.
        unsafe { std::slice::from_raw_parts(pointer, span.bytes) }
    }

    /// The bytes of a span, to be written.
    ///
    /// # Safety
    /// For as long as the slice lives, nothing else reads or writes the span: no `Reader` has a read into it in flight,
    /// no `CopyStream` a copy from or to it, and nobody holds `bytes` or `bytes_mut` of an overlapping span.
    ///
    /// # Panics
    /// When the span does not lie inside this arena.
    #[expect(
        clippy::mut_from_ref,
        reason = "spans of one arena are lent to different owners at once; the contract excludes overlap"
    )]
    pub unsafe fn bytes_mut(&self, span: Span) -> &mut [u8] {
        let pointer = self.pointer(span);
        // SAFETY: as in `bytes`; the mapping is writable, and the caller excludes all other access to the span.
        unsafe { std::slice::from_raw_parts_mut(pointer, span.bytes) }
    }

    /// Fills a span with a byte. On a device that happens when what was given to its compute stream before is done.
    ///
    /// # Safety
    /// As for `bytes_mut`, while the call lasts; on a device, nothing but its compute stream uses the span.
    pub unsafe fn fill(&self, span: Span, value: u8) {
        match &self.memory {
            // SAFETY: the caller upholds the contract of `bytes_mut`, and the slice ends with this statement.
            Memory::Mapped { .. } => unsafe { self.bytes_mut(span) }.fill(value),
            Memory::Cuda { device, .. } => {
                // SAFETY: `address` checked that the span lies inside the arena; the caller excludes other streams.
                unsafe { device.fill(self.address(span), value, span.bytes) }
            }
        }
    }
}

impl std::fmt::Debug for Arena {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Arena")
            .field("name", &self.name)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        match &self.memory {
            Memory::Mapped { base, locked } => {
                if let Some(locked) = locked {
                    locked.device.finish_all();
                    // SAFETY: these pages were locked once, and the streams are past every copy from them.
                    unsafe { locked.device.unlock_pages(base.as_ptr()) };
                }
                // SAFETY: base and bytes are the whole mapping made by `new`, unmapped only here. Slices borrow `self`,
                // and operations in flight hold an Arc of it, so none of them is left.
                let result = unsafe { libc::munmap(base.as_ptr().cast(), self.bytes) };
                debug_assert_eq!(result, 0, "{}", io::Error::last_os_error());
            }
            Memory::Cuda { base, device } => {
                device.finish_all();
                // SAFETY: allocated once, by `on_cuda`. Regions hold an Arc of the arena, so that none is left, and the
                // streams are past everything that they were given over its addresses.
                unsafe { device.release(*base) };
            }
        }
    }
}

fn round_up(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(SPAN_ALIGNMENT)
}

/// Maps `mapped` bytes and keeps the `bytes` in them that start at a huge page.
///
/// `bytes` is a multiple of the page size, above 0, and `mapped` exceeds it by one huge page.
fn map_aligned(bytes: usize, mapped: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory that is in use.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            mapped,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = start.cast::<u8>();
    let head = start.addr().next_multiple_of(HUGE_PAGE_BYTES) - start.addr();
    let tail = mapped - head - bytes;
    // SAFETY: head < HUGE_PAGE_BYTES = mapped - bytes, so head + bytes is inside the mapping just made, and both ends
    // are page-aligned. The pieces that are unmapped are its first `head` and last `tail` bytes, to which no pointer
    // has been given out. A failure would only leave address space unused.
    unsafe {
        let base = start.add(head);
        if head > 0 {
            libc::munmap(start.cast(), head);
        }
        if tail > 0 {
            libc::munmap(base.add(bytes).cast(), tail);
        }
        // Advice: where the kernel has no huge pages, small ones serve.
        libc::madvise(base.cast(), bytes, libc::MADV_HUGEPAGE);
        NonNull::new(base).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
    }
}

/// The limit on locked memory in words, as `ulimit -l` counts it.
pub(super) fn memory_lock_limit() -> String {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes one rlimit into a local of that type.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    match (result, limit.rlim_cur) {
        (0, libc::RLIM_INFINITY) => "unlimited".to_owned(),
        (0, bytes) => format!("{} KiB", bytes / 1024),
        _ => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_grow_from_both_ends_aligned_and_never_overlap() {
        let arena = Arena::new("host", 10 * SPAN_ALIGNMENT).unwrap();
        let low = arena.allocate_low(1).unwrap();
        let high = arena.allocate_high(SPAN_ALIGNMENT + 1).unwrap();
        let next = arena.allocate_low(5000).unwrap();
        assert_eq!((low.offset, low.bytes), (0, 4096));
        assert_eq!((high.offset, high.bytes), (8 * 4096, 8192));
        assert_eq!((next.offset, next.bytes), (4096, 8192));
        assert_eq!(arena.largest_free(), 5 * 4096);
        assert_eq!(arena.pointer(low).addr() % HUGE_PAGE_BYTES, 0);
    }

    #[test]
    fn exhaustion_names_what_is_short_and_takes_nothing() {
        let arena = Arena::new("device", 3 * SPAN_ALIGNMENT).unwrap();
        arena.allocate_high(4096).unwrap();
        for bytes in [8193, usize::MAX, usize::MAX - 5000] {
            let error = arena.allocate_low(bytes).unwrap_err();
            assert!(
                matches!(
                    error,
                    MemoryError::Exhausted {
                        arena: "device",
                        free: 8192,
                        ..
                    }
                ),
                "{error}"
            );
        }
        assert_eq!(arena.allocate_low(8192).unwrap().bytes, 8192);
        assert_eq!(arena.largest_free(), 0);
        assert_eq!(arena.allocate_low(0).unwrap().bytes, 0);
    }

    #[test]
    fn an_empty_arena_holds_nothing() {
        let arena = Arena::new("device", 0).unwrap();
        assert_eq!(arena.largest_free(), 0);
        assert!(arena.allocate_low(1).is_err());
        let empty = arena.allocate_high(0).unwrap();
        // SAFETY: the span is empty.
        assert!(unsafe { arena.bytes(empty) }.is_empty());
    }

    #[test]
    fn an_arena_that_no_machine_has_is_an_error() {
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let error = Arena::new("host", bytes).unwrap_err();
            assert!(matches!(error, MemoryError::Map { .. }), "{error}");
            // The tier, the bytes, the cause, what to do.
            let bytes = bytes.to_string();
            for part in [
                "host arena",
                &bytes,
                "ulimit -v",
                "first give a smaller --host-memory",
            ] {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }

    #[test]
    fn contains_holds_at_the_borders() {
        let arena = Arena::new("host", 2 * SPAN_ALIGNMENT).unwrap();
        let start = arena.address(Span {
            offset: 0,
            bytes: 0,
        });
        assert!(arena.contains(start, 8192));
        assert!(arena.contains(start + 8192, 0));
        assert!(!arena.contains(start + 8192, 1));
        assert!(!arena.contains(start - 1, 1));
        assert!(!arena.contains(start, 8193));
        assert!(!arena.contains(start + 1, usize::MAX));
    }

    #[test]
    fn memory_is_zero_until_written_and_what_it_is_filled_with() {
        let arena = Arena::new("host", 4 * SPAN_ALIGNMENT).unwrap();
        let span = arena.allocate_low(8192).unwrap();
        let other = arena.allocate_low(4096).unwrap();
        // SAFETY: this thread is the only user of the arena, and no two slices live at once.
        unsafe {
            assert!(arena.bytes(span).iter().all(|&byte| byte == 0));
            arena.bytes_mut(other).fill(7);
            arena.fill(span, 0xFF);
            assert!(arena.bytes(span).iter().all(|&byte| byte == 0xFF));
            assert!(arena.bytes(other).iter().all(|&byte| byte == 7));
        }
        assert!(f32::from_le_bytes([0xFF; 4]).is_nan());
    }

    #[test]
    fn pages_are_there_when_they_were_populated_and_hold_what_they_held() {
        let bytes = POPULATE_BYTES + 3 * SPAN_ALIGNMENT;
        let arena = Arena::new("host", bytes).unwrap();
        let span = arena.allocate_low(bytes).unwrap();
        let last = span.part(bytes - 5, 5);
        // SAFETY: this thread is the only user of the arena.
        unsafe { arena.fill(last, 9) };
        let stop = AtomicBool::new(false);
        if !arena.populate(&stop) {
            eprintln!("skipped: the kernel gives pages only when they are touched");
            return;
        }
        let mut pages = vec![0u8; bytes / SPAN_ALIGNMENT];
        // SAFETY: the range is the arena's, and there is a byte for each of its pages.
        let result =
            unsafe { libc::mincore(arena.pointer(span).cast(), bytes, pages.as_mut_ptr()) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        assert!(pages.iter().all(|page| page & 1 == 1), "{pages:?}");
        // SAFETY: as above.
        assert_eq!(unsafe { arena.bytes(last) }, [9; 5]);
        assert!(Arena::new("host", 0).unwrap().populate(&stop));

        let arena = Arena::new("host", bytes).unwrap();
        assert!(!arena.populate(&AtomicBool::new(true)));
        // SAFETY: as above.
        let result =
            unsafe { libc::mincore(arena.pointer(span).cast(), bytes, pages.as_mut_ptr()) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        assert!(
            pages.iter().all(|page| page & 1 == 0),
            "stopped before it began"
        );
    }

    #[test]
    #[should_panic(expected = "lies outside the host arena")]
    fn a_span_of_another_arena_is_refused() {
        let arena = Arena::new("host", SPAN_ALIGNMENT).unwrap();
        arena.pointer(Span {
            offset: 4096,
            bytes: 1,
        });
    }

    #[test]
    #[should_panic(expected = "of a span of")]
    fn a_part_outside_its_span_is_refused() {
        Span {
            offset: 4096,
            bytes: 4096,
        }
        .part(1, 4096);
    }
}
