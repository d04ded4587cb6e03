//! Small things that cross the link with a step: positions, page tables and embedding rows on their way to a CUDA
//! device, logits on their way back.
//!
//! They pass through page-locked memory, in the order of the compute stream. The host does not wait for what it sends, and
//! what has been handed to the stream stays untouched until the stream is done.

#![expect(
    unsafe_code,
    reason = "gives a stream addresses inside a region that this value owns"
)]

use super::Region;
use super::arena::Span;
use super::cuda::{CudaDevice, CudaError};
use std::sync::Arc;

/// Each thing starts on such a boundary: what the widest load of a kernel asks for.
const ALIGNMENT: usize = 256;

/// A region of the host arena, used from its start once a step. Lives on the engine thread.
pub struct Crossing {
    region: Region,
    device: Arc<CudaDevice>,
    used: usize,
}

impl Crossing {
    pub fn new(region: Region, device: Arc<CudaDevice>) -> Crossing {
        Crossing {
            region,
            device,
            used: 0,
        }
    }

    /// Copies `bytes` and gives the compute stream their way to `offset` of a region on the device: in pieces, where the
    /// room is less.
    ///
    /// # Panics
    /// When the destination is too short or not on this device, or there is no room at all.
    pub fn upload(&mut self, bytes: &[u8], destination: &mut Region, offset: usize) {
        assert_on(&self.device, destination);
        let to = destination.span().part(offset, bytes.len());
        let room = self.region.bytes_total();
        assert!(
            room > 0 || bytes.is_empty(),
            "the plan has no room to cross"
        );
        for (index, piece) in bytes.chunks(room.max(1)).enumerate() {
            let from = self.take(piece.len());
            self.region.bytes_mut()[from.offset..from.end()].copy_from_slice(piece);
            let address = destination.arena().address(to) + (index * room) as u64;
            for (start, length) in self.parts(from) {
                let source = self.region.bytes()[from.offset + start..].as_ptr();
                // SAFETY: the source lies in the region, of which `take` gives no byte twice before the stream is done;
                // the destination lies in its region, which is borrowed exclusively, and later users are ordered by the
                // same stream.
                unsafe {
                    self.device
                        .compute_to_device(source, address + start as u64, length);
                }
            }
        }
    }

    /// The `bytes` bytes at `offset` of a region on the device, as they are when the compute stream has done everything that
    /// it was given: waits for that, and reports the device's first failure.
    ///
    /// # Panics
    /// When the plan left no room for them, or the source is too short or not on this device.
    pub fn fetch(
        &mut self,
        source: &Region,
        offset: usize,
        bytes: usize,
    ) -> Result<&[u8], CudaError> {
        assert_on(&self.device, source);
        let from = source.arena().address(source.span().part(offset, bytes));
        let to = self.take(bytes);
        for (start, length) in self.parts(to) {
            let destination = self.region.bytes_mut()[to.offset + start..].as_mut_ptr();
            // SAFETY: as in `upload`, the other way; the bytes are lent out below, when the stream is done.
            unsafe {
                self.device
                    .compute_from_device(from + start as u64, destination, length);
            }
        }
        self.synchronise()?;
        Ok(&self.region.bytes()[to.offset..to.end()])
    }

    /// Waits until the compute stream has done everything, and reports the device's first failure. All room is free again.
    pub fn synchronise(&mut self) -> Result<(), CudaError> {
        self.used = 0;
        self.device.synchronise()
    }

    /// Room that the stream does not use. Where all is in use, the host waits: a step in which the host multiplies by many
    /// groups sends more than one plan's room.
    fn take(&mut self, bytes: usize) -> Span {
        let room = self.region.bytes_total();
        assert!(
            bytes <= room,
            "{bytes} bytes cross the link at once, and the plan has room for {room}"
        );
        if self.used + bytes > room {
            self.used = 0;
            self.device.wait_for_compute();
        }
        let offset = self.used;
        self.used = (offset + bytes).next_multiple_of(ALIGNMENT).min(room);
        Span { offset, bytes }
    }

    /// A piece of the region, cut at the border of what is locked to its pages.
    fn parts(&self, piece: Span) -> [(usize, usize); 2] {
        let span = self.region.span().part(piece.offset, piece.bytes);
        self.region.arena().locked_and_rest(span)
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        // The region is used by the stream until it is done. A failure has been noted already.
        drop(self.synchronise());
    }
}

fn assert_on(device: &Arc<CudaDevice>, region: &Region) {
    let on = region.cuda();
    assert!(
        on.is_some_and(|on| Arc::ptr_eq(on, device)),
        "a region of {on:?} where one of {device:?} belongs"
    );
}
