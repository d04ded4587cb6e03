//! Executes a grid: its blocks one after another, a block's warps in turns, a warp's 32 lanes at once.
//!
//! [`run`] walks over the blocks; `block` runs the warps of one and releases barriers; `warp` chooses which lanes of a
//! warp go on and runs instructions; `pattern` and `memory` find the bytes behind addresses, `transfer` moves them;
//! `shared` checks shared memory for races; `exchange` has what lanes tell each other.

mod block;
mod exchange;
mod memory;
mod pattern;
mod shared;
mod transfer;
mod warp;

use std::sync::{MutexGuard, PoisonError};

use super::lanes::{LANES, Row, lanes_of};
use super::program::{Fixed, Kernel, Special};
use crate::seam::{Fault, GlobalMemory, Launch};
use shared::Shared;
use warp::Warp;

/// Executes one launch. `parameters` is the parameter block, of at least [`Kernel::parameter_bytes`]. A fault ends it:
/// the message names kernel, PTX line and text, block and thread.
pub fn run<M: GlobalMemory>(
    kernel: &Kernel,
    launch: &Launch,
    parameters: &[u8],
    memory: &mut M,
) -> Result<(), Fault> {
    let refuse = |message: String| Err(Fault(format!("kernel {}: {message}", kernel.name())));
    let threads: u64 = launch.block.iter().map(|&size| u64::from(size)).product();
    let blocks: u128 = launch.grid.iter().map(|&size| u128::from(size)).product();
    if threads == 0 || threads > kernel.threads_max || blocks == 0 {
        return refuse(format!(
            "a launch of {:?} blocks of {:?} threads, of which it takes {} at most",
            launch.grid, launch.block, kernel.threads_max
        ));
    }
    if parameters.len() < kernel.parameter_bytes {
        return refuse(format!(
            "{} bytes of parameters where {} are needed",
            parameters.len(),
            kernel.parameter_bytes
        ));
    }
    let threads = threads as usize;
    let shared_bytes = kernel.static_shared_bytes + launch.dynamic_shared_bytes as usize;
    let mut machine = Machine {
        kernel,
        launch,
        parameters,
        memory,
        module_global: kernel
            .module
            .global
            .lock()
            .unwrap_or_else(PoisonError::into_inner),
        shared: Shared::new(shared_bytes, kernel.shared_grain),
        local: vec![0xFF; threads * kernel.local_bytes],
        block: [0; 3],
        clock: 0,
    };
    let mut warps: Vec<Warp> = (0..threads.div_ceil(LANES))
        .map(|index| {
            let mut warp = Warp::new(kernel, index, threads);
            machine.set_fixed_rows(&mut warp, threads, |special| {
                !matches!(special, Special::Block(_))
            });
            warp
        })
        .collect();
    let block_rows = kernel
        .fixed
        .iter()
        .any(|(_, fixed)| matches!(fixed, Fixed::Special(Special::Block(_))));
    for block in block_order(launch, blocks as u64) {
        let [x, y, _] = launch.grid.map(u64::from);
        machine.block = [
            (block % x) as u32,
            (block / x % y) as u32,
            (block / x / y) as u32,
        ];
        if block_rows {
            for warp in &mut warps {
                machine.set_fixed_rows(warp, threads, |special| {
                    matches!(special, Special::Block(_))
                });
            }
        }
        machine.run_block(&mut warps)?;
    }
    Ok(())
}

/// The blocks in ascending order, or permuted by the launch's seed.
fn block_order(launch: &Launch, blocks: u64) -> Box<dyn Iterator<Item = u64>> {
    let Some(seed) = launch.block_order_seed else {
        return Box::new(0..blocks);
    };
    let mut order: Vec<u64> = (0..blocks).collect();
    shuffle(&mut order, seed);
    Box::new(order.into_iter())
}

/// Permutes a slice by a seed (Fisher and Yates, numbers from SplitMix64).
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    for end in (1..items.len()).rev() {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut number = state;
        number = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        number = (number ^ number >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        number ^= number >> 31;
        items.swap(end, (number % (end as u64 + 1)) as usize);
    }
}

/// What a launch has, except for its warps.
struct Machine<'a, M> {
    kernel: &'a Kernel,
    launch: &'a Launch,
    parameters: &'a [u8],
    memory: &'a mut M,
    module_global: MutexGuard<'a, Vec<u8>>,
    shared: Shared,
    /// `local_bytes` for each thread of the block, one after the other.
    local: Vec<u8>,
    /// The coordinates of the block that runs.
    block: [u32; 3],
    /// Instructions so far, each counted once for a warp.
    clock: u64,
}

impl<M: GlobalMemory> Machine<'_, M> {
    /// Fills the rows of constants and of those special registers that `wanted` chooses.
    fn set_fixed_rows(&self, warp: &mut Warp, threads: usize, wanted: impl Fn(Special) -> bool) {
        for &(register, fixed) in &self.kernel.fixed {
            match fixed {
                Fixed::Constant { wide: true, bits } => {
                    *warp.lanes.wide_mut(register) = [bits; LANES]
                }
                Fixed::Constant { wide: false, bits } => {
                    *warp.lanes.narrow_mut(register) = [bits as u32; LANES]
                }
                Fixed::Special(special) if wanted(special) => {
                    let index = warp.index;
                    let row = warp.lanes.narrow_mut(register);
                    for (lane, value) in row.iter_mut().enumerate() {
                        *value = self.special(special, index, lane, threads);
                    }
                }
                Fixed::Special(_) => {}
            }
        }
    }

    fn special(&self, special: Special, warp: usize, lane: usize, threads: usize) -> u32 {
        let below = (1u64 << lane) - 1;
        (match special {
            Special::Thread(dimension) => u64::from(self.thread(warp, lane)[dimension]),
            Special::BlockSize(dimension) => u64::from(self.launch.block[dimension]),
            Special::Block(dimension) => u64::from(self.block[dimension]),
            Special::GridSize(dimension) => u64::from(self.launch.grid[dimension]),
            Special::LaneId => lane as u64,
            Special::WarpId => warp as u64,
            Special::WarpCount => threads.div_ceil(LANES) as u64,
            Special::Zero => 0,
            Special::One => 1,
            Special::WarpSize => LANES as u64,
            Special::LaneMaskEqual => below + 1,
            Special::LaneMaskLess => below,
            Special::LaneMaskLessEqual => below * 2 + 1,
            Special::LaneMaskGreater => !(below * 2 + 1),
            Special::LaneMaskGreaterEqual => !below,
            Special::DynamicSharedBytes => u64::from(self.launch.dynamic_shared_bytes),
            Special::TotalSharedBytes => self.shared.bytes.len() as u64,
        }) as u32
    }

    /// A thread's coordinates in its block.
    fn thread(&self, warp: usize, lane: usize) -> [u32; 3] {
        let thread = (warp * LANES + lane) as u32;
        let [x, y, _] = self.launch.block;
        [thread % x, thread / x % y, thread / x / y]
    }

    /// A fault at an instruction, for the first of some lanes.
    #[cold]
    fn fault(
        &self,
        warp: usize,
        lanes: u32,
        instruction: u32,
        message: impl std::fmt::Display,
    ) -> Fault {
        let lane = lanes_of(lanes).next().unwrap_or(0);
        let ([x, y, z], [i, j, k]) = (self.block, self.thread(warp, lane));
        Fault(format!(
            "kernel {}, {}, block ({x}, {y}, {z}), thread ({i}, {j}, {k}): {message}",
            self.kernel.name(),
            self.kernel.describe(instruction as usize)
        ))
    }

    /// Makes memory and registers what they are when a block begins: poisoned.
    fn begin_block(&mut self, warps: &mut [Warp]) {
        self.shared.begin_block();
        self.local.fill(0xFF);
        for warp in warps {
            for &row in &self.kernel.poisoned {
                warp.lanes.rows[row as usize] = Row::POISON;
            }
            warp.lanes.predicates.fill(u32::MAX);
            warp.begin_block();
        }
    }
}
