//! Page-locked host memory and the copies from and to it.
//!
//! A copy from page-locked memory reads it some time after the call, so the host must not change it until it knows, by a
//! synchronisation, that the copy is over; likewise for the destination of a copy to the host. Host writes cannot be
//! seen, but their effect can: a [`Transfer`] keeps a hash of its host memory from the call on, which is compared when
//! the copy runs and again when the host first knows that it is over. Copies that themselves write host memory renew the
//! hashes of the others. Two transfers that touch the same host memory, one writing, must be ordered like any others.
//!
//! Lock order: this table, then the queue.

#![expect(
    unsafe_code,
    reason = "hashes and copies the program's page-locked memory"
)]

use std::collections::BTreeMap;
use std::ptr;
use std::sync::Arc;

use super::clock::{Clock, Step};
use super::operation::Label;
use super::status::{Refusal, Status};
use crate::seam::Access;

const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Allocated,
    Registered,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    bytes: usize,
    origin: Origin,
    flags: u32,
}

/// A copy between page-locked memory and the device, until the host knows that it is over.
struct Transfer {
    step: Step,
    label: Arc<Label>,
    address: usize,
    bytes: usize,
    /// What the copy does to host memory.
    access: Access,
    /// Of the host memory, as the program or a copy left it last.
    hash: u64,
    /// A change has been reported; once is enough.
    reported: bool,
}

pub(super) struct PageLocked {
    ranges: BTreeMap<usize, Range>,
    locked_bytes: u64,
    locked_bytes_max: Option<u64>,
    transfers: Vec<Transfer>,
}

impl PageLocked {
    pub(super) fn new(locked_bytes_max: Option<u64>) -> PageLocked {
        PageLocked {
            ranges: BTreeMap::new(),
            locked_bytes: 0,
            locked_bytes_max,
            transfers: Vec::new(),
        }
    }

    /// New page-locked memory, as `cuMemHostAlloc` gives it.
    pub(super) fn allocate(&mut self, bytes: usize, flags: u32) -> Result<*mut u8, Refusal> {
        if bytes == 0 {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                "an allocation of 0 bytes",
            ));
        }
        self.take_room(bytes)?;
        let (protection, map_flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: a new anonymous mapping at an address of the system's choice touches nothing that exists.
        let address = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, map_flags, -1, 0) };
        if address == libc::MAP_FAILED {
            self.locked_bytes -= bytes as u64;
            return Err(Refusal::new(
                Status::OUT_OF_MEMORY,
                format!("the system has no {bytes} bytes"),
            ));
        }
        self.ranges.insert(
            address as usize,
            Range {
                bytes,
                origin: Origin::Allocated,
                flags,
            },
        );
        Ok(address.cast())
    }

    /// Locks memory that the program has, as `cuMemHostRegister` does.
    pub(super) fn register(
        &mut self,
        address: usize,
        bytes: usize,
        flags: u32,
    ) -> Result<(), Refusal> {
        let end = address
            .checked_add(bytes)
            .filter(|_| address != 0 && bytes != 0);
        let Some(end) = end else {
            return Err(Refusal::new(
                Status::INVALID_VALUE,
                format!("no range of {bytes} bytes at {address:#x}"),
            ));
        };
        if let Some((start, range)) = self.overlapping(address, end) {
            let reason = format!(
                "{bytes} bytes at {address:#x} overlap {} bytes at {start:#x}",
                range.bytes
            );
            return Err(Refusal::new(Status::HOST_MEMORY_ALREADY_REGISTERED, reason));
        }
        if !is_mapped(address, bytes) {
            let reason = format!("{bytes} bytes at {address:#x} are not all mapped");
            return Err(Refusal::new(Status::INVALID_VALUE, reason));
        }
        self.take_room(bytes)?;
        self.ranges.insert(
            address,
            Range {
                bytes,
                origin: Origin::Registered,
                flags,
            },
        );
        Ok(())
    }

    /// Takes back what [`PageLocked::allocate`] gave. Returns reports on transfers that are not known to be over.
    pub(super) fn free(&mut self, address: usize, host: &Clock) -> Result<Vec<String>, Refusal> {
        let refusal = || {
            Refusal::new(
                Status::INVALID_VALUE,
                format!("{address:#x} was not allocated by cuMemHostAlloc"),
            )
        };
        let range = self
            .remove(address, Origin::Allocated)
            .ok_or_else(refusal)?;
        let reports = self.abandon(address, range.bytes, host, "freed");
        // SAFETY: the mapping was made by `allocate` with this size and the program gives it back; nothing that is
        // queued uses it, as the caller has waited for all work.
        unsafe { libc::munmap(address as *mut libc::c_void, range.bytes) };
        Ok(reports)
    }

    /// Undoes [`PageLocked::register`]. Returns reports on transfers that are not known to be over.
    pub(super) fn unregister(
        &mut self,
        address: usize,
        host: &Clock,
    ) -> Result<Vec<String>, Refusal> {
        let refusal = || {
            let reason = format!("no registered range starts at {address:#x}");
            Refusal::new(Status::HOST_MEMORY_NOT_REGISTERED, reason)
        };
        let range = self
            .remove(address, Origin::Registered)
            .ok_or_else(refusal)?;
        Ok(self.abandon(address, range.bytes, host, "unregistered"))
    }

    /// The flags with which the memory at an address was locked.
    pub(super) fn flags(&self, address: usize) -> Option<u32> {
        self.overlapping(address, address.checked_add(1)?)
            .map(|(_, range)| range.flags)
    }

    /// Whether a copy's host memory is page-locked. A range that is so in part, or in two pieces, cannot be copied.
    pub(super) fn covers(&self, address: usize, bytes: usize) -> Result<bool, Refusal> {
        let end = address.checked_add(bytes);
        let end =
            end.ok_or_else(|| Refusal::new(Status::INVALID_VALUE, "the host range wraps around"))?;
        match self.overlapping(address, end) {
            None => Ok(false),
            Some((start, range)) if start <= address && end <= start + range.bytes => Ok(true),
            Some((start, range)) => Err(Refusal::new(
                Status::INVALID_VALUE,
                format!(
                    "{bytes} bytes of host memory at {address:#x} lie only partly in the page-locked range of {} bytes \
                     at {start:#x}",
                    range.bytes
                ),
            )),
        }
    }

    /// Begins to watch a copy's host memory. Returns reports on transfers of the same memory that nothing orders.
    ///
    /// # Safety
    /// The range is page-locked memory of the program and stays so until it is freed or unregistered here.
    pub(super) unsafe fn begin(
        &mut self,
        (step, clock, label): (Step, &Clock, Arc<Label>),
        (address, bytes): (usize, usize),
        access: Access,
    ) -> Vec<String> {
        let unordered = self.transfers.iter().filter(|other| {
            let writes = access == Access::Write || other.access == Access::Write;
            writes && other.overlaps(address, bytes) && !other.step.is_before(clock)
        });
        let reports = unordered
            .map(|other| {
                format!(
                    "unordered use of page-locked memory: {label} {} {address:#x}, which {} {}; nothing orders the two",
                    verb(access),
                    other.label,
                    verb(other.access)
                )
            })
            .collect();
        // SAFETY: the caller's promise.
        let hash = unsafe { hash_of(address as *const u8, bytes) };
        self.transfers.push(Transfer {
            step,
            label,
            address,
            bytes,
            access,
            hash,
            reported: false,
        });
        reports
    }

    /// Compares what a copy to the device has read with what was there at the call.
    pub(super) fn check_read(&mut self, step: Step, hash: u64) -> Option<String> {
        let transfer = self
            .transfers
            .iter_mut()
            .find(|transfer| transfer.step == step)?;
        (transfer.hash != hash)
            .then(|| transfer.report("before it ran"))
            .flatten()
    }

    /// Runs a copy to the host, `copy`, between comparing its destination with the call and renewing all hashes.
    pub(super) fn write(&mut self, step: Step, copy: impl FnOnce()) -> Vec<String> {
        let place = self.transfers.iter().find(|transfer| transfer.step == step);
        let Some((address, bytes)) = place.map(|transfer| (transfer.address, transfer.bytes))
        else {
            copy();
            return Vec::new();
        };
        let touched = || |transfer: &&mut Transfer| transfer.overlaps(address, bytes);
        let reports = self
            .transfers
            .iter_mut()
            .filter(touched())
            .filter_map(|transfer| {
                let changed = transfer.hash != transfer.hash_now();
                changed.then(|| transfer.report("before it ran")).flatten()
            });
        let reports = reports.collect();
        copy();
        for transfer in self.transfers.iter_mut().filter(touched()) {
            transfer.hash = transfer.hash_now();
        }
        reports
    }

    /// Ends the watch over the transfers that the host knows to be over. Returns reports on those whose memory the host
    /// changed before it knew.
    pub(super) fn settle(&mut self, host: &Clock) -> Vec<String> {
        let mut reports = Vec::new();
        self.transfers.retain_mut(|transfer| {
            let over = transfer.step.is_before(host);
            if over && transfer.hash != transfer.hash_now() {
                reports.extend(transfer.report("before it was known to be over"));
            }
            !over
        });
        reports
    }

    fn overlapping(&self, address: usize, end: usize) -> Option<(usize, Range)> {
        let (start, range) = self.ranges.range(..end).next_back()?;
        (start + range.bytes > address).then_some((*start, *range))
    }

    fn take_room(&mut self, bytes: usize) -> Result<(), Refusal> {
        let locked = self.locked_bytes + bytes as u64;
        if let Some(max) = self.locked_bytes_max
            && locked > max
        {
            let reason =
                format!("{locked} bytes of page-locked memory are more than the limit of {max}");
            return Err(Refusal::new(Status::OUT_OF_MEMORY, reason));
        }
        self.locked_bytes = locked;
        Ok(())
    }

    fn remove(&mut self, address: usize, origin: Origin) -> Option<Range> {
        let range = *self
            .ranges
            .get(&address)
            .filter(|range| range.origin == origin)?;
        self.ranges.remove(&address);
        self.locked_bytes -= range.bytes as u64;
        Some(range)
    }

    fn abandon(&mut self, address: usize, bytes: usize, host: &Clock, what: &str) -> Vec<String> {
        let mut reports = self.settle(host);
        self.transfers.retain(|transfer| {
            let overlaps = transfer.overlaps(address, bytes);
            if overlaps {
                reports.push(format!(
                    "page-locked memory at {address:#x} is {what} before the host knows that {} is over",
                    transfer.label
                ));
            }
            !overlaps
        });
        reports
    }
}

impl Transfer {
    fn overlaps(&self, address: usize, bytes: usize) -> bool {
        self.address < address + bytes && address < self.address + self.bytes
    }

    fn hash_now(&self) -> u64 {
        // SAFETY: the promise of `begin`: the range is there until its transfers are abandoned.
        unsafe { hash_of(self.address as *const u8, self.bytes) }
    }

    fn report(&mut self, when: &str) -> Option<String> {
        let role = match self.access {
            Access::Read => "source",
            Access::Write => "destination",
        };
        let report = format!(
            "page-locked buffer changed too early: the host wrote the {role} {:#x} of {} {when}",
            self.address, self.label
        );
        (!std::mem::replace(&mut self.reported, true)).then_some(report)
    }
}

fn verb(access: Access) -> &'static str {
    match access {
        Access::Read => "reads",
        Access::Write => "writes",
    }
}

/// Whether all pages of a range are mapped.
fn is_mapped(address: usize, bytes: usize) -> bool {
    let start = address / PAGE_BYTES * PAGE_BYTES;
    let pages = (address + bytes - start).div_ceil(PAGE_BYTES);
    let mut resident = vec![0_u8; pages];
    // SAFETY: mincore looks at the page table only and writes one byte for each page.
    let answer = unsafe {
        libc::mincore(
            start as *mut libc::c_void,
            pages * PAGE_BYTES,
            resident.as_mut_ptr(),
        )
    };
    answer == 0
}

/// A 64-bit hash that any change of one word changes; four lanes keep it near the speed of memory.
///
/// # Safety
/// `start` is readable for `bytes` bytes. Another thread may write them meanwhile; the hash is then of some mixture,
/// which is what the caller looks for.
pub(super) unsafe fn hash_of(start: *const u8, bytes: usize) -> u64 {
    const MULTIPLIERS: [u64; 4] = [
        0x9E37_79B9_7F4A_7C15,
        0xC2B2_AE3D_27D4_EB4F,
        0x1656_67B1_9E37_79F9,
        0x27D4_EB2F_1656_67C5,
    ];
    let mut lanes = [1_u64, 2, 3, 4];
    let mut at = 0;
    while at + 32 <= bytes {
        for (lane, (state, multiplier)) in lanes.iter_mut().zip(MULTIPLIERS).enumerate() {
            // SAFETY: `at + 32` is not past the end.
            let word = unsafe { start.add(at + 8 * lane).cast::<u64>().read_unaligned() };
            *state = (*state ^ word).wrapping_mul(multiplier).rotate_left(29);
        }
        at += 32;
    }
    let mut hash = lanes.iter().fold(bytes as u64, |hash, lane| {
        (hash ^ lane).wrapping_mul(MULTIPLIERS[0]).rotate_left(31)
    });
    while at < bytes {
        // SAFETY: `at` is not past the end.
        let byte = unsafe { start.add(at).read() };
        hash = (hash ^ u64::from(byte))
            .wrapping_mul(MULTIPLIERS[1])
            .rotate_left(27);
        at += 1;
    }
    hash
}

#[cfg(test)]
#[path = "tests/page_locked.rs"]
mod tests;
