//! The addresses of one instruction's lanes, and how they lie to each other.

use super::super::alu::fast_cpu;
use super::super::lanes::{LANES, Lanes, NONE};
use super::super::program::Address;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrangement {
    /// The mask's lanes follow each other without a gap, each one's bytes right behind those of the one before.
    Adjacent,
    /// All lanes of the mask at the same address.
    Same,
    Scattered,
}

#[derive(Clone, Debug)]
pub(super) struct Pattern {
    pub(super) addresses: [u64; LANES],
    /// A bit for each lane of the mask whose bytes begin where those of the lane before it begin or end.
    pub(super) follows: u32,
    /// The first lane of the mask.
    pub(super) first: usize,
    pub(super) arrangement: Arrangement,
    /// All bits that the mask's addresses have.
    pub(super) bits: u64,
    /// All bits in which the mask's addresses differ.
    pub(super) differences: u64,
}

impl Pattern {
    /// The addresses of `bytes` bytes in each lane of a mask, which is not empty.
    #[inline]
    pub(super) fn new(lanes: &Lanes, address: &Address, bytes: usize, mask: u32) -> Pattern {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn fast(lanes: &Lanes, address: &Address, bytes: usize, mask: u32) -> Pattern {
                pattern(lanes, address, bytes, mask)
            }
            if fast_cpu() {
                #[expect(
                    unsafe_code,
                    reason = "compiled for a CPU that has just been asked for"
                )]
                // SAFETY: `fast_cpu` has found the features that `fast` is compiled for.
                return unsafe { fast(lanes, address, bytes, mask) };
            }
        }
        pattern(lanes, address, bytes, mask)
    }
}

#[inline(always)]
fn pattern(lanes: &Lanes, address: &Address, bytes: usize, mask: u32) -> Pattern {
    let mut addresses = [0u64; LANES];
    let mut offset = address.offset as u64;
    if address.base == NONE {
        // The same in each lane.
    } else if address.wide {
        addresses = *lanes.wide(address.base);
    } else {
        let base = lanes.narrow(address.base);
        for (address, base) in addresses.iter_mut().zip(base) {
            *address = u64::from(base.wrapping_add(offset as u32));
        }
        offset = 0;
    }
    let first = mask.trailing_zeros() as usize % LANES;
    let start = addresses[first].wrapping_add(offset);
    let before = start.wrapping_sub(first as u64 * bytes as u64);
    let (mut bits, mut differences, mut from_adjacent) = (0u64, 0u64, 0u64);
    for (lane, slot) in addresses.iter_mut().enumerate() {
        let address = slot.wrapping_add(offset);
        *slot = address;
        let active = u64::from(mask >> lane & 1).wrapping_neg();
        bits |= address & active;
        differences |= (address ^ start) & active;
        from_adjacent |= (address ^ before.wrapping_add(lane as u64 * bytes as u64)) & active;
    }
    let gapless = (u64::from(mask >> first) + 1).is_power_of_two();
    let arrangement = if differences == 0 {
        Arrangement::Same
    } else if from_adjacent == 0 && gapless {
        Arrangement::Adjacent
    } else {
        Arrangement::Scattered
    };
    let mut follows = 0;
    if arrangement == Arrangement::Scattered {
        // In this form it is compiled to vectors.
        let mut before = [start; LANES];
        before[1..].copy_from_slice(&addresses[..LANES - 1]);
        let mut near = [0u32; LANES];
        for lane in 0..LANES {
            let step = addresses[lane].wrapping_sub(before[lane]);
            near[lane] = u32::from((step == 0) | (step == bytes as u64));
        }
        for (lane, near) in near.into_iter().enumerate() {
            follows |= near << lane;
        }
        follows &= mask;
    }
    Pattern {
        addresses,
        follows,
        first,
        arrangement,
        bits,
        differences,
    }
}
