//! Loads, stores and atomics: between bytes of this process and registers.

use super::super::lanes::{FULL, LANES, Lanes, NONE, lanes_of};
use super::super::program::{Atomic, Element, Transfer};
use super::Machine;
use super::memory::{Located, Request};
use super::pattern::Pattern;
use super::warp::Warp;
use crate::seam::{Access, Fault, GlobalMemory};

impl<M: GlobalMemory> Machine<'_, M> {
    pub(super) fn load(
        &mut self,
        warp: &mut Warp,
        transfer: &Transfer,
        mask: u32,
        at: u32,
    ) -> Result<(), Fault> {
        let mut pattern = Pattern::new(&warp.lanes, &transfer.address, transfer.bytes(), mask);
        let located = self.locate(
            &mut pattern,
            Request::of(transfer, Access::Read, mask, warp.index, at),
        )?;
        let stride = transfer.element.bytes();
        for (index, &register) in transfer.registers[..transfer.count].iter().enumerate() {
            if register != NONE {
                read(
                    &mut warp.lanes,
                    register,
                    transfer,
                    Source {
                        located,
                        pattern: &pattern,
                        mask,
                        skip: index * stride,
                    },
                );
            }
        }
        Ok(())
    }

    pub(super) fn store(
        &mut self,
        warp: &Warp,
        transfer: &Transfer,
        mask: u32,
        at: u32,
    ) -> Result<(), Fault> {
        let mut pattern = Pattern::new(&warp.lanes, &transfer.address, transfer.bytes(), mask);
        let located = self.locate(
            &mut pattern,
            Request::of(transfer, Access::Write, mask, warp.index, at),
        )?;
        let stride = transfer.element.bytes();
        for (index, &register) in transfer.registers[..transfer.count].iter().enumerate() {
            write(
                &warp.lanes,
                register,
                transfer,
                Source {
                    located,
                    pattern: &pattern,
                    mask,
                    skip: index * stride,
                },
            );
        }
        Ok(())
    }

    /// One lane after the other, in their order.
    #[expect(unsafe_code, reason = "the bytes are found by address")]
    pub(super) fn atomic(
        &mut self,
        warp: &mut Warp,
        atomic: &Atomic,
        mask: u32,
        at: u32,
    ) -> Result<(), Fault> {
        let mut pattern = Pattern::new(&warp.lanes, &atomic.address, atomic.bytes, mask);
        let mut request = Request {
            space: atomic.space,
            bytes: atomic.bytes,
            access: Access::Read,
            atomic: true,
            mask,
            warp: warp.index,
            instruction: at,
        };
        self.locate(&mut pattern.clone(), request)?;
        request.access = Access::Write;
        let located = self.locate(&mut pattern, request)?;
        let value = |lanes: &Lanes, register: u32, lane: usize| match atomic.bytes {
            _ if register == NONE => 0,
            8 => lanes.wide(register)[lane],
            4 => u64::from(lanes.narrow(register)[lane]),
            _ => u64::from(lanes.narrow(register)[lane] as u16),
        };
        for lane in lanes_of(mask) {
            let (a, b) = (
                value(&warp.lanes, atomic.a, lane),
                value(&warp.lanes, atomic.b, lane),
            );
            let mut bytes = [0; 8];
            // SAFETY: `locate` says that `atomic.bytes` (2, 4 or 8) bytes there are the kernel's to read and write,
            // and nothing else has a reference to them while an instruction is executed.
            let old = unsafe {
                std::ptr::copy_nonoverlapping(
                    located.lane(&pattern, lane),
                    bytes.as_mut_ptr(),
                    atomic.bytes,
                );
                let old = u64::from_le_bytes(bytes);
                let new = (atomic.run)(old, a, b).to_le_bytes();
                std::ptr::copy_nonoverlapping(
                    new.as_ptr(),
                    located.lane(&pattern, lane),
                    atomic.bytes,
                );
                old
            };
            if atomic.d != NONE {
                if atomic.bytes == 8 {
                    warp.lanes.wide_mut(atomic.d)[lane] = old;
                } else {
                    warp.lanes.narrow_mut(atomic.d)[lane] = old as u32;
                }
            }
        }
        Ok(())
    }
}

/// The bytes of one element in each lane of a mask: `skip` bytes from where the lane's bytes begin.
#[derive(Clone, Copy)]
struct Source<'a> {
    located: Located,
    pattern: &'a Pattern,
    mask: u32,
    skip: usize,
}

impl Source<'_> {
    #[inline(always)]
    fn lane<T>(self, lane: usize) -> *mut T {
        self.located
            .lane(self.pattern, lane)
            .wrapping_add(self.skip)
            .cast()
    }

    /// Lane 0's where all lanes' lie `stride` bytes apart.
    #[inline(always)]
    fn strided<T>(self, wanted: impl Fn(usize) -> bool) -> Option<(*mut T, usize)> {
        match self.located {
            Located::Strided { start, stride, .. } if self.mask == FULL && wanted(stride) => {
                Some((start.wrapping_add(self.skip).cast(), stride))
            }
            _ => None,
        }
    }
}

/// Reads one element of each lane.
#[expect(unsafe_code, reason = "the bytes are found by address")]
fn read(lanes: &mut Lanes, register: u32, transfer: &Transfer, source: Source<'_>) {
    macro_rules! each {
        ($row:ident, $memory:ty, $register:ty) => {{
            let row = lanes.$row(register);
            let mask = source.mask;
            // SAFETY: `locate` has found a whole transfer's bytes for each lane of the mask, readable until the
            // launch's end; `skip` is a multiple of the element's size within it, and nothing else refers to them now.
            let value = |bytes: *mut $memory| unsafe { bytes.read_unaligned() as $register as _ };
            if let Located::Strided { start, stride: 0, .. } = source.located {
                let value = value(start.wrapping_add(source.skip).cast());
                for lane in 0..LANES {
                    row[lane] = if mask >> lane & 1 != 0 { value } else { row[lane] };
                }
            } else if let Some((start, _)) = source.strided::<[$memory; LANES]>(|stride| stride == size_of::<$memory>()) {
                // SAFETY: as above; the lanes' bytes lie side by side, the first at lane 0's.
                let values = unsafe { start.read_unaligned() };
                for lane in 0..LANES {
                    row[lane] = values[lane] as $register as _;
                }
            } else if let Some((start, stride)) = source.strided::<$memory>(|_| true) {
                for (lane, to) in row.iter_mut().enumerate() {
                    *to = value(start.wrapping_byte_add(lane * stride));
                }
            } else if mask == FULL {
                for (lane, to) in row.iter_mut().enumerate() {
                    *to = value(source.lane(lane));
                }
            } else {
                for lane in lanes_of(mask) {
                    row[lane] = value(source.lane(lane));
                }
            }
        }};
    }
    match (transfer.element, transfer.wide) {
        (Element::U8, false) => each!(narrow_mut, u8, u32),
        (Element::U8, true) => each!(wide_mut, u8, u64),
        (Element::S8ToNarrow, _) => each!(narrow_mut, i8, i32),
        (Element::S8ToWide, _) => each!(wide_mut, i8, i64),
        (Element::U16, false) => each!(narrow_mut, u16, u32),
        (Element::U16, true) => each!(wide_mut, u16, u64),
        (Element::S16ToNarrow, _) => each!(narrow_mut, i16, i32),
        (Element::S16ToWide, _) => each!(wide_mut, i16, i64),
        (Element::U32, false) => each!(narrow_mut, u32, u32),
        (Element::U32, true) => each!(wide_mut, u32, u64),
        (Element::S32ToWide, _) => each!(wide_mut, i32, i64),
        (Element::U64, _) => each!(wide_mut, u64, u64),
    }
}

/// Writes one element of each lane. Where lanes write to the same place the highest lane's value stays.
#[expect(unsafe_code, reason = "the bytes are found by address")]
fn write(lanes: &Lanes, register: u32, transfer: &Transfer, to: Source<'_>) {
    macro_rules! each {
        ($row:ident, $memory:ty) => {{
            let row = lanes.$row(register);
            if let Some((start, _)) = to.strided::<[$memory; LANES]>(|stride| stride == size_of::<$memory>()) {
                let values = row.map(|value| value as $memory);
                // SAFETY: as below; the lanes' bytes lie side by side, the first at lane 0's.
                unsafe { start.write_unaligned(values) };
            } else {
                for lane in lanes_of(to.mask) {
                    // SAFETY: `locate` has found a whole transfer's bytes for each lane of the mask, writable until the
                    // launch's end; `skip` is a multiple of the element's size within it, and nothing else refers to
                    // them now.
                    unsafe { to.lane::<$memory>(lane).write_unaligned(row[lane] as $memory) };
                }
            }
        }};
    }
    match (transfer.element.bytes(), transfer.wide) {
        (1, _) => each!(narrow, u8),
        (2, _) => each!(narrow, u16),
        (4, _) => each!(narrow, u32),
        _ => each!(wide, u64),
    }
}
