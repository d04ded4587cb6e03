//! Device memory: allocations, their addresses, and where their bytes are in this process.
//!
//! Device addresses lie in a range that is reserved without access, so a host that dereferences one faults. The bytes
//! are in a second mapping of the same size; an address and its byte are a constant distance apart. Allocations are
//! aligned to 256 bytes and no more, stand apart by a guard gap, and their addresses are not reused soon, so that a
//! stray access meets no other allocation. What a new allocation holds is 0xFF (NaN in every float type); large ones
//! are filled a page at a time, at the first touch ([`DeviceMemory::prepare`]).
//!
//! Host threads allocate and free; the GPU thread touches bytes. The table is behind a lock; the bytes are not: the
//! GPU thread is their only user, except for the fill of an allocation that nobody knows of yet.

#![expect(
    unsafe_code,
    reason = "memory maps and the bytes behind device addresses"
)]

use std::collections::BTreeMap;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;

/// Alignment of allocations, as `cuMemAlloc` promises it.
const ALIGNMENT: u64 = 256;
/// Bytes between two allocations that belong to none.
const GUARD_BYTES: u64 = 4096;
/// The unit of the lazy fill and of the touched-words map.
pub(super) const PAGE_BYTES: u64 = 64 << 10;
/// What memory holds before it is written.
const POISON: u8 = 0xFF;

/// One live piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// Counts allocations from 1: how reports name it.
    pub(super) number: u64,
    /// A free is queued in a stream: the address must not be freed again.
    free_queued: bool,
}

impl Allocation {
    pub(super) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

pub(super) struct DeviceMemory {
    /// The first device address.
    base: u64,
    /// Where that byte is.
    backing: *mut u8,
    range_bytes: u64,
    /// A bit for each page that must be filled before it is used.
    unfilled: Box<[AtomicU64]>,
    table: Mutex<Table>,
}

// SAFETY: `backing` is a mapping that lives as long as the process; who may touch which bytes is said above.
unsafe impl Send for DeviceMemory {}
// SAFETY: as above.
unsafe impl Sync for DeviceMemory {}

struct Table {
    live: BTreeMap<u64, Allocation>,
    /// The search for room starts here, so that freed addresses rest for a while.
    cursor: u64,
    total_bytes: u64,
    used_bytes: u64,
    used_bytes_most: u64,
    allocations: u64,
    /// The live allocations by address, for kernels; none after a change.
    snapshot: Option<Arc<[Allocation]>>,
}

impl DeviceMemory {
    /// Reserves addresses and backing for `total_bytes` of memory; the range is larger, so that gaps cost no memory.
    pub(super) fn new(total_bytes: u64) -> Result<DeviceMemory, String> {
        let range_bytes = (2 * total_bytes + (64 << 20)).next_multiple_of(PAGE_BYTES);
        let base = map(range_bytes, libc::PROT_NONE)? as u64;
        let backing = map(range_bytes, libc::PROT_READ | libc::PROT_WRITE)?;
        let words = (range_bytes / PAGE_BYTES).div_ceil(64);
        Ok(DeviceMemory {
            base,
            backing,
            range_bytes,
            unfilled: (0..words).map(|_| AtomicU64::new(0)).collect(),
            table: Mutex::new(Table {
                live: BTreeMap::new(),
                cursor: base,
                total_bytes,
                used_bytes: 0,
                used_bytes_most: 0,
                allocations: 0,
                snapshot: None,
            }),
        })
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(super) fn range_bytes(&self) -> u64 {
        self.range_bytes
    }

    /// Whether an address is one of the device's, allocated or not.
    pub(super) fn owns(&self, address: u64) -> bool {
        (self.base..self.base + self.range_bytes).contains(&address)
    }

    /// Where the byte at a device address is; the caller has checked that it is allocated.
    pub(super) fn byte(&self, address: u64) -> *mut u8 {
        debug_assert!(self.owns(address), "{address:#x}");
        self.backing.wrapping_add((address - self.base) as usize)
    }

    /// Free and total bytes.
    pub(super) fn free_and_total(&self) -> (u64, u64) {
        let table = lock(&self.table);
        (table.total_bytes - table.used_bytes, table.total_bytes)
    }

    pub(super) fn used_bytes_most(&self) -> u64 {
        lock(&self.table).used_bytes_most
    }

    /// A new allocation with poison in it; none where there is no room.
    pub(super) fn allocate(&self, bytes: u64) -> Option<Allocation> {
        let allocation = lock(&self.table).allocate(self.base, self.range_bytes, bytes)?;
        let first_page = (allocation.start - self.base).div_ceil(PAGE_BYTES);
        let end_page = (allocation.end() - self.base) / PAGE_BYTES;
        if first_page >= end_page {
            self.fill(allocation.start, allocation.bytes);
            return Some(allocation);
        }
        // Whole pages wait for their first touch; the ends share their pages with others.
        self.fill(
            allocation.start,
            self.base + first_page * PAGE_BYTES - allocation.start,
        );
        self.fill(
            self.base + end_page * PAGE_BYTES,
            allocation.end() - (self.base + end_page * PAGE_BYTES),
        );
        for page in first_page..end_page {
            self.unfilled[(page / 64) as usize].fetch_or(1 << (page % 64), Ordering::Relaxed);
        }
        Some(allocation)
    }

    /// Marks an allocation as being freed by a stream; an address that starts none, or one freed already, is an error.
    pub(super) fn queue_free(&self, address: u64) -> Result<Allocation, String> {
        let mut table = lock(&self.table);
        match table.live.get_mut(&address) {
            Some(allocation) if allocation.free_queued => Err(format!(
                "allocation {} at {address:#x} is freed twice",
                allocation.number
            )),
            Some(allocation) => {
                allocation.free_queued = true;
                Ok(*allocation)
            }
            None => Err(format!("no allocation starts at {address:#x}")),
        }
    }

    /// Takes an allocation back; its bytes cannot be reached any more, so only the system gets its whole pages.
    pub(super) fn release(&self, address: u64) {
        let Some(allocation) = lock(&self.table).release(address) else {
            return;
        };
        let first = (allocation.start - self.base).next_multiple_of(PAGE_BYTES);
        let end = (allocation.end() - self.base) / PAGE_BYTES * PAGE_BYTES;
        if first < end {
            let start = self.backing.wrapping_add(first as usize);
            // SAFETY: the pages lie in the backing map and belong to the allocation that was just released.
            unsafe { libc::madvise(start.cast(), (end - first) as usize, libc::MADV_DONTNEED) };
        }
        // Pages that were never touched must not be filled under their next owner.
        for page in first / PAGE_BYTES..end / PAGE_BYTES {
            self.unfilled[(page / 64) as usize].fetch_and(!(1 << (page % 64)), Ordering::Relaxed);
        }
    }

    /// The live allocation that holds an address.
    pub(super) fn find(&self, address: u64) -> Option<Allocation> {
        lock(&self.table).find(address)
    }

    /// The live allocation that holds all of a range; an error says what is there instead.
    pub(super) fn check(&self, address: u64, bytes: u64) -> Result<Allocation, String> {
        self.check_in(&self.snapshot(), address, bytes)
    }

    /// The same for a snapshot of the live allocations.
    pub(super) fn check_in(
        &self,
        allocations: &[Allocation],
        address: u64,
        bytes: u64,
    ) -> Result<Allocation, String> {
        if !self.owns(address) {
            return Err(format!(
                "{bytes} bytes at {address:#x} are no device memory"
            ));
        }
        check(allocations, address, bytes)
    }

    /// The live allocations in the order of their addresses.
    pub(super) fn snapshot(&self) -> Arc<[Allocation]> {
        let mut table = lock(&self.table);
        if let Some(snapshot) = &table.snapshot {
            return snapshot.clone();
        }
        let snapshot: Arc<[Allocation]> = table.live.values().copied().collect();
        table.snapshot = Some(snapshot.clone());
        snapshot
    }

    /// Fills the pages of a range that still wait for their poison. Called by the GPU thread before it touches them.
    pub(super) fn prepare(&self, address: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let first = (address - self.base) / PAGE_BYTES;
        let last = (address + bytes - 1 - self.base) / PAGE_BYTES;
        for page in first..=last {
            let word = &self.unfilled[(page / 64) as usize];
            let bit = 1 << (page % 64);
            if word.load(Ordering::Relaxed) & bit != 0
                && word.fetch_and(!bit, Ordering::Relaxed) & bit != 0
            {
                self.fill(self.base + page * PAGE_BYTES, PAGE_BYTES);
            }
        }
    }

    fn fill(&self, address: u64, bytes: u64) {
        // SAFETY: callers pass parts of one allocation, which lies in the backing map; nobody else touches them, as the
        // allocation is not yet known or its page not yet filled.
        unsafe { ptr::write_bytes(self.byte(address), POISON, bytes as usize) };
    }
}

impl Table {
    fn allocate(&mut self, base: u64, range_bytes: u64, bytes: u64) -> Option<Allocation> {
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT)?;
        if rounded > self.total_bytes - self.used_bytes {
            return None;
        }
        let start = self
            .room(self.cursor, base + range_bytes, rounded)
            .or_else(|| self.room(base, base + range_bytes, rounded))?;
        self.allocations += 1;
        self.used_bytes += rounded;
        self.used_bytes_most = self.used_bytes_most.max(self.used_bytes);
        self.cursor = start + rounded;
        self.snapshot = None;
        let allocation = Allocation {
            start,
            bytes,
            number: self.allocations,
            free_queued: false,
        };
        self.live.insert(start, allocation);
        Some(allocation)
    }

    /// The first place in `from..to` with a guard gap on both sides.
    fn room(&self, from: u64, to: u64, bytes: u64) -> Option<u64> {
        let before = self
            .live
            .range(..from)
            .next_back()
            .map_or(0, |(_, allocation)| allocation.end());
        let mut start = place(from.max(before));
        for allocation in self.live.range(from..).map(|(_, allocation)| allocation) {
            if start + bytes + GUARD_BYTES <= allocation.start {
                break;
            }
            start = place(allocation.end());
        }
        (start + bytes + GUARD_BYTES <= to).then_some(start)
    }

    fn release(&mut self, address: u64) -> Option<Allocation> {
        let allocation = self.live.remove(&address)?;
        self.used_bytes -= allocation.bytes.next_multiple_of(ALIGNMENT);
        self.snapshot = None;
        Some(allocation)
    }

    fn find(&self, address: u64) -> Option<Allocation> {
        let (_, allocation) = self.live.range(..=address).next_back()?;
        (address < allocation.end()).then_some(*allocation)
    }
}

/// The first address behind a guard gap that is a multiple of 256 but not of 512: a program that counts on more
/// alignment than it is promised shall notice.
fn place(after: u64) -> u64 {
    (after + GUARD_BYTES).next_multiple_of(2 * ALIGNMENT) + ALIGNMENT
}

/// The allocation among `allocations` (sorted by address) that holds a range; an error is a sentence.
pub(super) fn check(
    allocations: &[Allocation],
    address: u64,
    bytes: u64,
) -> Result<Allocation, String> {
    let next = allocations.partition_point(|allocation| allocation.start <= address);
    let before = next.checked_sub(1).and_then(|index| allocations.get(index));
    let Some(end) = address.checked_add(bytes) else {
        return Err(format!(
            "{bytes} bytes at {address:#x} reach past the end of all addresses"
        ));
    };
    match before {
        Some(allocation) if address < allocation.end() && end <= allocation.end() => {
            Ok(*allocation)
        }
        Some(Allocation {
            start,
            bytes: size,
            number,
            ..
        }) if address < start + size => Err(format!(
            "{bytes} bytes at {address:#x} start in allocation {number} at byte {} and reach past its end at {size}",
            address - start
        )),
        Some(Allocation {
            start,
            bytes: size,
            number,
            ..
        }) => Err(format!(
            "{bytes} bytes at {address:#x} lie in no live allocation: {} bytes past the end of allocation {number} \
             ({start:#x}, {size} bytes)",
            address - start - size
        )),
        None => Err(format!(
            "{bytes} bytes at {address:#x} lie in no live allocation"
        )),
    }
}

/// A private mapping that costs nothing until it is touched.
fn map(bytes: u64, protection: i32) -> Result<*mut u8, String> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new anonymous mapping at an address of the system's choice touches nothing that exists.
    let address = unsafe { libc::mmap(ptr::null_mut(), bytes as usize, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(format!(
            "map {bytes} bytes for the device: {}",
            std::io::Error::last_os_error()
        ));
    }
    Ok(address.cast())
}

#[cfg(test)]
#[path = "tests/memory.rs"]
mod tests;
