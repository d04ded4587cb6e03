//! From the lanes' addresses to bytes of this process: alignment, bounds, and who is told of the access.

use super::super::lanes::{LANES, lanes_of};
use super::super::program::Transfer;
use super::super::types::{Space, window};
use super::Machine;
use super::pattern::{Arrangement, Pattern};
use super::shared::Toucher;
use crate::seam::{Access, Fault, GlobalMemory};

/// Where the bytes of each lane of a mask are.
#[derive(Clone, Copy)]
pub(super) enum Located {
    /// Lane `first`'s, and how far apart those of a lane and the next are.
    Strided {
        start: *mut u8,
        first: usize,
        stride: usize,
    },
    /// At the pattern's address + this.
    Shifted(u64),
}

impl Located {
    /// One lane's bytes.
    #[inline(always)]
    pub(super) fn lane(self, pattern: &Pattern, lane: usize) -> *mut u8 {
        match self {
            Located::Strided {
                start,
                first,
                stride,
            } => start.wrapping_add(lane.wrapping_sub(first).wrapping_mul(stride)),
            Located::Shifted(shift) => std::ptr::with_exposed_provenance_mut(
                pattern.addresses[lane].wrapping_add(shift) as usize,
            ),
        }
    }
}

/// One access of some lanes of a warp.
#[derive(Clone, Copy)]
pub(super) struct Request {
    pub(super) space: Space,
    /// Of one lane.
    pub(super) bytes: usize,
    pub(super) access: Access,
    pub(super) atomic: bool,
    pub(super) mask: u32,
    pub(super) warp: usize,
    pub(super) instruction: u32,
}

impl Request {
    pub(super) fn of(
        transfer: &Transfer,
        access: Access,
        mask: u32,
        warp: usize,
        instruction: u32,
    ) -> Request {
        let (space, bytes) = (transfer.space, transfer.bytes());
        Request {
            space,
            bytes,
            access,
            atomic: false,
            mask,
            warp,
            instruction,
        }
    }
}

/// Adjacent bytes that some lanes touch.
#[derive(Clone, Copy)]
struct Range {
    address: u64,
    bytes: usize,
    lanes: u32,
}

impl<M: GlobalMemory> Machine<'_, M> {
    /// Checks alignment and bounds, notes the access, and finds the bytes. Changes the pattern's addresses to what the
    /// result is relative to.
    pub(super) fn locate(
        &mut self,
        pattern: &mut Pattern,
        mut request: Request,
    ) -> Result<Located, Fault> {
        if pattern.bits & (request.bytes as u64 - 1) != 0 {
            return Err(self.misaligned(pattern, request));
        }
        if request.space == Space::Generic {
            if pattern.differences >> window::SHIFT != 0 {
                return self.locate_in_several_spaces(pattern, request);
            }
            request.space = space_of(pattern.addresses[pattern.first]);
            if request.space != Space::Global {
                pattern.addresses = pattern.addresses.map(|address| address & window::OFFSET);
            }
        }
        self.locate_in(pattern, request)
    }

    #[cold]
    fn misaligned(&self, pattern: &Pattern, request: Request) -> Fault {
        let bytes = request.bytes as u64;
        let lane = lanes_of(request.mask)
            .find(|&lane| !pattern.addresses[lane].is_multiple_of(bytes))
            .unwrap_or(0);
        let message = format!(
            "address {:#x} is not a multiple of {bytes}",
            pattern.addresses[lane]
        );
        self.fault(request.warp, 1 << lane, request.instruction, message)
    }

    /// Generic addresses that are not all of one kind.
    #[cold]
    fn locate_in_several_spaces(
        &mut self,
        pattern: &mut Pattern,
        request: Request,
    ) -> Result<Located, Fault> {
        for lane in lanes_of(request.mask) {
            let address = pattern.addresses[lane];
            let space = space_of(address);
            let mut one = pattern.clone();
            one.first = lane;
            one.arrangement = Arrangement::Same;
            if space != Space::Global {
                one.addresses[lane] = address & window::OFFSET;
            }
            let located = self.locate_in(
                &mut one,
                Request {
                    space,
                    mask: 1 << lane,
                    ..request
                },
            )?;
            pattern.addresses[lane] = located.lane(&one, lane).expose_provenance() as u64;
        }
        Ok(Located::Shifted(0))
    }

    #[inline]
    fn locate_in(&mut self, pattern: &mut Pattern, request: Request) -> Result<Located, Fault> {
        if request.space == Space::Local {
            return self.locate_local(pattern, request);
        }
        let first = pattern.first;
        let address = pattern.addresses[first];
        let (bytes, stride) = match pattern.arrangement {
            Arrangement::Same => (request.bytes, 0),
            Arrangement::Adjacent => (
                request.bytes * request.mask.count_ones() as usize,
                request.bytes,
            ),
            Arrangement::Scattered => return self.locate_scattered(pattern, request),
        };
        let start = self.find(
            Range {
                address,
                bytes,
                lanes: request.mask,
            },
            pattern,
            request,
        )?;
        Ok(Located::Strided {
            start,
            first,
            stride,
        })
    }

    /// Lanes that touch adjacent bytes, or the same, are still one access.
    fn locate_scattered(
        &mut self,
        pattern: &mut Pattern,
        request: Request,
    ) -> Result<Located, Fault> {
        let only_driver_memory =
            request.space == Space::Global && pattern.bits >> window::SHIFT == 0;
        let mut rest = request.mask;
        let mut last = Range {
            address: 0,
            bytes: 0,
            lanes: 0,
        };
        let mut common = None;
        let mut shift = 0;
        while rest != 0 {
            let first = rest.trailing_zeros();
            let more = (pattern.follows >> first >> 1).trailing_ones();
            let lanes = u32::MAX >> (31 - more) << first;
            rest &= !lanes;
            let address = pattern.addresses[first as usize];
            let end = pattern.addresses[(first + more) as usize].wrapping_add(request.bytes as u64);
            let bytes = end.wrapping_sub(address) as usize;
            // The lanes of several rows often read the same of another operand.
            if address != last.address || bytes > last.bytes {
                last = Range {
                    address,
                    bytes,
                    lanes,
                };
                let start = if only_driver_memory {
                    match self.memory.access(address, bytes, request.access) {
                        Ok(start) => start,
                        Err(fault) => return Err(self.first_fault(pattern, lanes, fault, request)),
                    }
                } else {
                    self.find(last, pattern, request)?
                };
                shift = (start.expose_provenance() as u64).wrapping_sub(address);
            }
            match common {
                None => common = Some(shift),
                Some(common) if common == shift => {}
                // Allocations need not be mapped alike.
                Some(before) => {
                    let distance = shift.wrapping_sub(before);
                    for lane in lanes_of(lanes) {
                        pattern.addresses[lane] = pattern.addresses[lane].wrapping_add(distance);
                    }
                }
            }
        }
        Ok(Located::Shifted(common.unwrap_or(0)))
    }

    /// Local memory is each thread's own.
    fn locate_local(&mut self, pattern: &mut Pattern, request: Request) -> Result<Located, Fault> {
        let each = self.kernel.local_bytes;
        for lane in lanes_of(request.mask) {
            let address = pattern.addresses[lane];
            if !fits(address, request.bytes, each) {
                return Err(self.out_of_bounds(lane, address, each, request));
            }
            pattern.addresses[lane] += ((request.warp * LANES + lane) * each) as u64;
        }
        Ok(Located::Shifted(
            self.local.as_mut_ptr().expose_provenance() as u64,
        ))
    }

    /// The bytes of a range of a space that all threads share.
    #[inline]
    fn find(
        &mut self,
        range: Range,
        pattern: &Pattern,
        request: Request,
    ) -> Result<*mut u8, Fault> {
        let Range {
            address,
            bytes,
            lanes,
        } = range;
        match request.space {
            Space::Shared => self.find_shared(range, pattern, request),
            Space::Global if address >> window::SHIFT == 0 => {
                match self.memory.access(address, bytes, request.access) {
                    Ok(pointer) => Ok(pointer),
                    Err(fault) => Err(self.first_fault(pattern, lanes, fault, request)),
                }
            }
            Space::Global => {
                let offset = if space_of(address) == Space::Global && address >= window::MODULE {
                    address - window::MODULE
                } else {
                    u64::MAX
                };
                let size = self.module_global.len();
                if !fits(offset, bytes, size) {
                    return Err(self.out_of_bounds(
                        lanes.trailing_zeros() as usize,
                        address,
                        size,
                        request,
                    ));
                }
                Ok(&raw mut self.module_global[offset as usize])
            }
            _ => {
                let constant = request.space == Space::Constant;
                let memory: &[u8] = if constant {
                    &self.kernel.module.constant
                } else {
                    self.parameters
                };
                if request.access == Access::Write {
                    let message = "a write to memory that is only read";
                    return Err(self.fault(request.warp, lanes, request.instruction, message));
                }
                if !fits(address, bytes, memory.len()) {
                    return Err(self.first_out_of_bounds(pattern, lanes, memory.len(), request));
                }
                Ok((&raw const memory[address as usize]).cast_mut())
            }
        }
    }

    #[inline]
    fn find_shared(
        &mut self,
        range: Range,
        pattern: &Pattern,
        request: Request,
    ) -> Result<*mut u8, Fault> {
        let Range {
            address,
            bytes,
            lanes,
        } = range;
        let size = self.shared.bytes.len();
        if !fits(address, bytes, size) {
            return Err(self.first_out_of_bounds(pattern, lanes, size, request));
        }
        let offset = address as usize;
        // The write half of an atomic operation stands for both.
        if !(request.atomic && request.access == Access::Read) {
            let by = Toucher {
                warp: request.warp as u32,
                instruction: request.instruction,
                access: request.access,
                atomic: request.atomic,
            };
            if let Some(conflict) = self.shared.touch(offset, bytes, by) {
                let touches = |lane: &usize| {
                    let from = pattern.addresses[*lane] as usize;
                    (from..from + request.bytes).contains(&conflict.offset)
                };
                let lane = lanes_of(lanes)
                    .find(touches)
                    .unwrap_or(lanes.trailing_zeros() as usize);
                let message = format!(
                    "a race for byte {} of shared memory: this {} by warp {} and the {} by warp {} at {} have no barrier \
                     between them",
                    conflict.offset,
                    name(request.access),
                    request.warp,
                    name(conflict.access),
                    conflict.warp,
                    self.kernel.describe(conflict.instruction as usize)
                );
                return Err(self.fault(request.warp, 1 << lane, request.instruction, message));
            }
        }
        Ok(&raw mut self.shared.bytes[offset])
    }

    /// The fault of the first lane of a range that has one of its own.
    #[cold]
    fn first_fault(
        &mut self,
        pattern: &Pattern,
        lanes: u32,
        fault: Fault,
        request: Request,
    ) -> Fault {
        for lane in lanes_of(lanes) {
            if let Err(fault) =
                self.memory
                    .access(pattern.addresses[lane], request.bytes, request.access)
            {
                return self.fault(request.warp, 1 << lane, request.instruction, fault);
            }
        }
        self.fault(request.warp, lanes, request.instruction, fault)
    }

    #[cold]
    fn first_out_of_bounds(
        &self,
        pattern: &Pattern,
        lanes: u32,
        size: usize,
        request: Request,
    ) -> Fault {
        let outside = |lane: &usize| !fits(pattern.addresses[*lane], request.bytes, size);
        let lane = lanes_of(lanes)
            .find(outside)
            .unwrap_or(lanes.trailing_zeros() as usize);
        self.out_of_bounds(lane, pattern.addresses[lane], size, request)
    }

    #[cold]
    fn out_of_bounds(&self, lane: usize, address: u64, size: usize, request: Request) -> Fault {
        let space = match request.space {
            Space::Shared => "shared",
            Space::Local => "local",
            Space::Constant => "constant",
            Space::Parameter => "parameter",
            Space::Global | Space::Generic => "the module's global",
        };
        let message = format!(
            "{} bytes at {address:#x} of {space} memory, which has {size} bytes",
            request.bytes
        );
        self.fault(request.warp, 1 << lane, request.instruction, message)
    }
}

/// Whether so many bytes from an offset on lie in memory of some size.
#[inline(always)]
fn fits(offset: u64, bytes: usize, size: usize) -> bool {
    offset
        .checked_add(bytes as u64)
        .is_some_and(|end| end <= size as u64)
}

fn name(access: Access) -> &'static str {
    match access {
        Access::Read => "read",
        Access::Write => "write",
    }
}

/// The space of a generic address.
fn space_of(address: u64) -> Space {
    match address & !window::OFFSET {
        window::SHARED => Space::Shared,
        window::LOCAL => Space::Local,
        window::CONSTANT => Space::Constant,
        window::PARAMETER => Space::Parameter,
        _ => Space::Global,
    }
}
