//! What a kernel touches: the device's side of the interpreter's memory.
//!
//! Every access is checked against the live allocations and noted in two bitmaps, one bit for each word of 4 bytes: words
//! read before the kernel wrote them, and words written. The bitmaps exist for touched pages only and are used again by
//! the next kernel.

use std::sync::Arc;

use super::memory::{Allocation, DeviceMemory, PAGE_BYTES};
use crate::seam::{Access, Fault, GlobalMemory};

pub(super) const WORD_BYTES: u64 = 4;
/// A granule has as many words as one bitmap word has bits.
pub(super) const GRANULE_BYTES: u64 = 64 * WORD_BYTES;
const PAGE_GRANULES: usize = (PAGE_BYTES / GRANULE_BYTES) as usize;
const NO_PAGE: u64 = u64::MAX;

/// The touched words of one page, a bitmap word for each granule.
pub(super) struct PageTouches {
    reads: [u64; PAGE_GRANULES],
    writes: [u64; PAGE_GRANULES],
}

/// The touched words of one kernel.
pub(super) struct Touches {
    /// For each page of the device's range: its index in `pages` plus one.
    index: Vec<u32>,
    pages: Vec<(u64, Box<PageTouches>)>,
    spare: Vec<Box<PageTouches>>,
}

impl Touches {
    pub(super) fn new(range_bytes: u64) -> Touches {
        Touches {
            index: vec![0; (range_bytes / PAGE_BYTES) as usize],
            pages: Vec::new(),
            spare: Vec::new(),
        }
    }

    /// Calls `visit` with each touched granule, the words read and the words written, and forgets them.
    pub(super) fn drain(&mut self, mut visit: impl FnMut(u64, u64, u64)) {
        self.pages.sort_unstable_by_key(|(page, _)| *page);
        for (page, mut touches) in self.pages.drain(..) {
            let granules = touches.reads.iter_mut().zip(&mut touches.writes);
            for (granule, (reads, writes)) in granules.enumerate() {
                if *reads | *writes != 0 {
                    visit(
                        page * PAGE_GRANULES as u64 + granule as u64,
                        *reads,
                        *writes,
                    );
                    (*reads, *writes) = (0, 0);
                }
            }
            self.index[page as usize] = 0;
            self.spare.push(touches);
        }
    }

    /// The place of a page's bitmaps in `pages`.
    fn page(&mut self, page: u64) -> usize {
        let index = &mut self.index[page as usize];
        if *index == 0 {
            let empty = || {
                Box::new(PageTouches {
                    reads: [0; PAGE_GRANULES],
                    writes: [0; PAGE_GRANULES],
                })
            };
            self.pages
                .push((page, self.spare.pop().unwrap_or_else(empty)));
            *index = self.pages.len() as u32;
        }
        *index as usize - 1
    }
}

/// Global memory during one launch.
pub(super) struct KernelMemory<'a> {
    memory: &'a DeviceMemory,
    touches: &'a mut Touches,
    allocations: Arc<[Allocation]>,
    /// The allocation of the last access.
    start: u64,
    end: u64,
    base: u64,
    /// The page of the last access and its place in `touches`.
    page: u64,
    place: usize,
    /// An access was refused because nothing is there.
    pub(super) out_of_bounds: bool,
}

impl<'a> KernelMemory<'a> {
    pub(super) fn new(memory: &'a DeviceMemory, touches: &'a mut Touches) -> KernelMemory<'a> {
        KernelMemory {
            memory,
            touches,
            allocations: memory.snapshot(),
            start: 0,
            end: 0,
            base: memory.base(),
            page: NO_PAGE,
            place: 0,
            out_of_bounds: false,
        }
    }

    #[cold]
    fn enter_allocation(
        &mut self,
        address: u64,
        bytes: usize,
        access: Access,
    ) -> Result<(), Fault> {
        match self
            .memory
            .check_in(&self.allocations, address, bytes as u64)
        {
            Ok(allocation) => {
                (self.start, self.end) = (allocation.start, allocation.end());
                Ok(())
            }
            Err(reason) => {
                self.out_of_bounds = true;
                let verb = match access {
                    Access::Read => "read",
                    Access::Write => "write",
                };
                Err(Fault(format!("cannot {verb}: {reason}")))
            }
        }
    }

    #[cold]
    fn enter_page(&mut self, page: u64) {
        self.memory.prepare(self.base + page * PAGE_BYTES, 1);
        self.place = self.touches.page(page);
        self.page = page;
    }

    /// Notes words `first..=last` (counted from the start of the device's range), which may span granules and pages.
    fn note_many(&mut self, first: u64, last: u64, access: Access) {
        let mut word = first;
        while word <= last {
            let end = (word / 64 * 64 + 63).min(last);
            self.note(word, end, access);
            word = end + 1;
        }
    }

    /// Notes words `first..=last` of one granule.
    #[inline]
    fn note(&mut self, first: u64, last: u64, access: Access) {
        let page = first * WORD_BYTES / PAGE_BYTES;
        if page != self.page {
            self.enter_page(page);
        }
        let mask = word_mask(first % 64, last % 64);
        let granule = (first / 64) as usize % PAGE_GRANULES;
        let touches = &mut self.touches.pages[self.place].1;
        match access {
            Access::Read => touches.reads[granule] |= mask & !touches.writes[granule],
            Access::Write => touches.writes[granule] |= mask,
        }
    }
}

impl GlobalMemory for KernelMemory<'_> {
    #[inline]
    fn access(&mut self, address: u64, bytes: usize, access: Access) -> Result<*mut u8, Fault> {
        let end = address.wrapping_add(bytes as u64);
        if address < self.start || end > self.end || end <= address {
            self.enter_allocation(address, bytes, access)?;
        }
        let offset = address - self.base;
        let first = offset / WORD_BYTES;
        let last = (offset + (bytes as u64).max(1) - 1) / WORD_BYTES;
        if first / 64 == last / 64 {
            self.note(first, last, access);
        } else {
            self.note_many(first, last, access);
        }
        Ok(self.memory.byte(address))
    }
}

/// Bits `first..=last`.
pub(super) fn word_mask(first: u64, last: u64) -> u64 {
    (u64::MAX << first) & (u64::MAX >> (63 - last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(touches: &mut Touches) -> Vec<(u64, u64, u64)> {
        let mut granules = Vec::new();
        touches.drain(|granule, reads, writes| granules.push((granule, reads, writes)));
        granules
    }

    #[test]
    fn words_are_noted_once_across_granules_and_pages() {
        let memory = DeviceMemory::new(1 << 20).unwrap();
        let allocation = memory.allocate(3 * PAGE_BYTES).unwrap();
        let mut touches = Touches::new(memory.range_bytes());
        let mut kernel = KernelMemory::new(&memory, &mut touches);
        let page_end =
            (allocation.start - memory.base()).next_multiple_of(PAGE_BYTES) + memory.base();
        kernel.access(page_end - 8, 16, Access::Read).unwrap();
        kernel.access(page_end - 300, 300, Access::Write).unwrap();
        kernel.access(page_end - 8, 4, Access::Read).unwrap();
        let granule = (page_end - memory.base()) / GRANULE_BYTES;
        let expected = [
            (granule - 2, 0, word_mask(53, 63)),
            (granule - 1, word_mask(62, 63), u64::MAX),
            (granule, word_mask(0, 1), 0),
        ];
        assert_eq!(drained(&mut touches), expected);
        assert_eq!(drained(&mut touches), []);
    }

    #[test]
    fn a_word_that_the_kernel_wrote_is_not_read_from_outside() {
        let memory = DeviceMemory::new(1 << 20).unwrap();
        let allocation = memory.allocate(256).unwrap();
        let mut touches = Touches::new(memory.range_bytes());
        let mut kernel = KernelMemory::new(&memory, &mut touches);
        kernel.access(allocation.start, 2, Access::Write).unwrap();
        kernel.access(allocation.start, 8, Access::Read).unwrap();
        let granule = (allocation.start - memory.base()) / GRANULE_BYTES;
        assert_eq!(drained(&mut touches), [(granule, 2, 1)]);
    }

    #[test]
    fn an_access_that_leaves_its_allocation_is_a_fault() {
        let memory = DeviceMemory::new(1 << 20).unwrap();
        let allocation = memory.allocate(64).unwrap();
        let mut touches = Touches::new(memory.range_bytes());
        let mut kernel = KernelMemory::new(&memory, &mut touches);
        assert!(
            kernel
                .access(allocation.start + 60, 4, Access::Read)
                .is_ok()
        );
        assert!(
            kernel
                .access(allocation.start + 60, 8, Access::Read)
                .is_err()
        );
        assert!(kernel.access(0, 4, Access::Read).is_err());
        assert!(kernel.access(u64::MAX - 1, 8, Access::Read).is_err());
        assert!(kernel.out_of_bounds);
    }

    #[test]
    fn large_allocations_are_poisoned_when_a_kernel_comes_to_them() {
        let memory = DeviceMemory::new(4 << 20).unwrap();
        let allocation = memory.allocate(1 << 20).unwrap();
        let mut touches = Touches::new(memory.range_bytes());
        let mut kernel = KernelMemory::new(&memory, &mut touches);
        for offset in (0..1 << 20).step_by(4096) {
            let byte = kernel
                .access(allocation.start + offset, 1, Access::Read)
                .unwrap();
            #[expect(unsafe_code, reason = "reads what access pointed to")]
            // SAFETY: access has checked the address.
            let value = unsafe { *byte };
            assert_eq!(value, 0xFF);
        }
    }
}
