//! A block's shared memory and the check for races in it.
//!
//! Between two barriers, bytes that one warp writes may not be touched by another. For each grain (the least bytes that
//! the kernel's accesses touch) the last write and the last read are remembered, with the warp and the epoch: the number
//! of barriers so far, counted on over all blocks, so that nothing needs clearing.

use super::super::lanes::NONE;
use crate::seam::Access;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) bytes: Vec<u8>,
    grain_shift: u32,
    grains: Vec<Grain>,
    epoch: u32,
}

#[derive(Clone, Copy, Debug)]
struct Mark {
    epoch: u32,
    warp: u32,
    instruction: u32,
}

#[derive(Clone, Copy, Debug)]
struct Grain {
    write: Mark,
    read: Mark,
    /// Whether another warp than the marked one has read in the same epoch.
    many_read: bool,
    /// Whether the write was part of an atomic operation.
    atomic: bool,
}

/// Who touches shared memory, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Toucher {
    pub(super) warp: u32,
    pub(super) instruction: u32,
    pub(super) access: Access,
    pub(super) atomic: bool,
}

/// An earlier access that conflicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Conflict {
    /// The first byte in question.
    pub(super) offset: usize,
    pub(super) access: Access,
    pub(super) warp: u32,
    pub(super) instruction: u32,
}

impl Shared {
    pub(super) fn new(bytes: usize, grain: usize) -> Shared {
        let never = Mark {
            epoch: 0,
            warp: NONE,
            instruction: 0,
        };
        let grain_shift = grain.trailing_zeros();
        Shared {
            bytes: vec![0xFF; bytes],
            grain_shift,
            grains: vec![
                Grain {
                    write: never,
                    read: never,
                    many_read: false,
                    atomic: false
                };
                bytes.div_ceil(grain)
            ],
            epoch: 0,
        }
    }

    pub(super) fn begin_block(&mut self) {
        self.bytes.fill(0xFF);
        self.next_epoch();
    }

    /// A barrier has been passed.
    pub(super) fn next_epoch(&mut self) {
        self.epoch += 1;
    }

    /// Notes an access to bytes that exist; the earlier one that it is not ordered with, if there is one.
    #[inline]
    pub(super) fn touch(&mut self, address: usize, bytes: usize, by: Toucher) -> Option<Conflict> {
        let epoch = self.epoch;
        let first = address >> self.grain_shift;
        let last = (address + bytes - 1) >> self.grain_shift;
        let mark = Mark {
            epoch,
            warp: by.warp,
            instruction: by.instruction,
        };
        for (index, grain) in self.grains[first..=last].iter_mut().enumerate() {
            let offset = || (first + index) << self.grain_shift;
            let both_atomic = by.atomic && grain.atomic;
            if grain.write.epoch == epoch && grain.write.warp != by.warp && !both_atomic {
                let Mark {
                    warp, instruction, ..
                } = grain.write;
                return Some(Conflict {
                    offset: offset(),
                    access: Access::Write,
                    warp,
                    instruction,
                });
            }
            if by.access == Access::Read {
                let another = grain.read.epoch == epoch && grain.read.warp != by.warp;
                grain.many_read = another || grain.many_read && grain.read.epoch == epoch;
                if !another {
                    grain.read = mark;
                }
                continue;
            }
            let read_by_another = grain.read.warp != by.warp || grain.many_read;
            if grain.read.epoch == epoch && read_by_another {
                let Mark {
                    warp, instruction, ..
                } = grain.read;
                return Some(Conflict {
                    offset: offset(),
                    access: Access::Read,
                    warp,
                    instruction,
                });
            }
            // A plain write and then atomics of the same warp: others' atomics still conflict with the plain one.
            let plain_before = grain.write.epoch == epoch && !grain.atomic;
            grain.atomic = by.atomic && !plain_before;
            grain.write = mark;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(shared: &mut Shared, warp: u32, access: Access) -> Option<Conflict> {
        let by = Toucher {
            warp,
            instruction: warp * 10,
            access,
            atomic: false,
        };
        shared.touch(8, 4, by)
    }

    #[test]
    fn reads_of_many_warps_and_a_later_write_conflict() {
        let mut shared = Shared::new(64, 4);
        shared.begin_block();
        assert_eq!(touch(&mut shared, 1, Access::Read), None);
        assert_eq!(touch(&mut shared, 2, Access::Read), None);
        let conflict = touch(&mut shared, 1, Access::Write);
        assert_eq!(
            conflict,
            Some(Conflict {
                offset: 8,
                access: Access::Read,
                warp: 1,
                instruction: 10
            })
        );
        shared.next_epoch();
        assert_eq!(touch(&mut shared, 1, Access::Write), None);
        assert_eq!(touch(&mut shared, 1, Access::Read), None);
        let conflict = touch(&mut shared, 2, Access::Read);
        assert_eq!(
            conflict,
            Some(Conflict {
                offset: 8,
                access: Access::Write,
                warp: 1,
                instruction: 10
            })
        );
    }

    #[test]
    fn atomics_of_different_warps_do_not_conflict() {
        let mut shared = Shared::new(64, 4);
        shared.begin_block();
        let atomic = |warp| Toucher {
            warp,
            instruction: 0,
            access: Access::Write,
            atomic: true,
        };
        assert_eq!(shared.touch(0, 4, atomic(0)), None);
        assert_eq!(shared.touch(0, 4, atomic(1)), None);
        let plain = Toucher {
            warp: 2,
            instruction: 0,
            access: Access::Read,
            atomic: false,
        };
        assert!(shared.touch(0, 4, plain).is_some());
    }
}
