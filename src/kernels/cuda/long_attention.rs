//! Attention of few tokens over long contexts: `long_attention.cu`.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use super::attention::{Attention, PagePrecision, ShapeArgument, StepArgument};
use super::module::{Argument, Grid, Kernel, Module, argument, source};
use super::{CudaKernels, DeviceAddress, KernelError, count};
use crate::kernels::{AttentionShape, PAGE_TOKENS};

/// As in `long_attention.cu`.
const SCORES_THREADS: u32 = 256;
const WEIGHTS_THREADS: u32 = 512;
const VALUES_THREADS: u32 = 288;
/// Value elements of a block.
const SLICE_ELEMENTS: u32 = 16;

/// The numbers of query heads that it is compiled for: those that share a KV head, or so many of them at a time.
const HEADS: [u32; 2] = [1, 4];

/// Attention whose tokens are too few to fill the device by themselves: the positions of each are split over many blocks,
/// in three launches. It has the bits of `CudaKernels::attention`, which needs no scratch and is faster where there are
/// about as many tokens times KV heads as multiprocessors, or contexts of a few hundred positions.
#[derive(Clone, Copy, Debug)]
pub struct LongAttention {
    pub attention: Attention,
    /// More than any token's position.
    pub positions: usize,
    /// `long_attention_scratch_bytes` bytes.
    pub scratch: DeviceAddress,
}

/// Pages that one token attends to, at most.
fn pages_max(shape: &AttentionShape, positions: usize) -> usize {
    let pages = positions.div_ceil(PAGE_TOKENS);
    match shape.window {
        // The first of them may be the last of its page.
        Some(window) => pages.min((window as usize).saturating_sub(1).div_ceil(PAGE_TOKENS) + 1),
        None => pages,
    }
}

/// Bytes that `long_attention` works in, for so many tokens at less than `positions`: a score for each head and position,
/// and a little for each page.
pub fn long_attention_scratch_bytes(
    shape: &AttentionShape,
    tokens: usize,
    positions: usize,
) -> u64 {
    let heads = tokens as u64 * shape.heads as u64;
    // Weights, decay and sum of each page, and the total.
    heads * (pages_max(shape, positions) as u64 * (4 * PAGE_TOKENS as u64 + 8) + 4)
}

/// `Scratch` of `long_attention.cu`.
#[repr(C)]
struct ScratchArgument {
    start: DeviceAddress,
    tokens: u32,
    pages_max: u32,
}

// SAFETY: the fields of the C++ struct, in their order.
unsafe impl Argument for ScratchArgument {}

/// For one number of heads.
struct OfHeads {
    scores: Kernel,
    values: Kernel,
}

pub(super) struct Kernels {
    weights: Kernel,
    /// By precision, as in `PagePrecision::ALL`, and heads, as in `HEADS`.
    of_precision: [[OfHeads; HEADS.len()]; 2],
}

impl Kernels {
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Kernels, KernelError> {
        let module = Module::load(context, &source!("long_attention"))?;
        let of_precision = |precision: PagePrecision| {
            let kernel = |step: &str, heads: u32| {
                module.kernel(format!(
                    "long_attention_{step}_{}_{heads}",
                    precision.name()
                ))
            };
            let of_heads = |heads| {
                Ok(OfHeads {
                    scores: kernel("scores", heads)?,
                    values: kernel("values", heads)?,
                })
            };
            let [one, four] = HEADS.map(of_heads);
            Ok([one?, four?])
        };
        let [f16, f32] = PagePrecision::ALL.map(of_precision);
        Ok(Kernels {
            weights: module.kernel("long_attention_weights".to_owned())?,
            of_precision: [f16?, f32?],
        })
    }

    fn of(&self, precision: PagePrecision) -> &[OfHeads; HEADS.len()] {
        let [f16, f32] = &self.of_precision;
        match precision {
            PagePrecision::F16 => f16,
            PagePrecision::F32 => f32,
        }
    }
}

impl CudaKernels {
    /// Attention of every token of the step, to the bits of `CudaKernels::attention`.
    ///
    /// # Errors
    /// The pages are not aligned, or the driver refuses.
    ///
    /// # Panics
    /// When head lengths are odd or above 256, or shapes do not agree.
    pub fn long_attention(
        &self,
        stream: &CudaStream,
        long: &LongAttention,
    ) -> Result<(), KernelError> {
        let attention = &long.attention;
        let shape = ShapeArgument::new(&attention.shape, attention.scale);
        let pages = attention.pages.argument(&attention.shape)?;
        let step = StepArgument::new(&attention.runs);
        if shape.value_length == 0 {
            return Ok(());
        }
        let tokens = count(attention.tokens);
        let scratch = ScratchArgument {
            start: long.scratch,
            tokens,
            pages_max: count(pages_max(&attention.shape, long.positions)),
        };
        let group = shape.heads / shape.kv_heads;
        let at_once = usize::from(group > HEADS[0]);
        let kernels = &self.long_attention.of(attention.pages.precision)[at_once];
        let y = shape.kv_heads * group.div_ceil(HEADS[at_once]);
        let scores_grid = Grid {
            x: scratch.pages_max.div_ceil(SCORES_THREADS / 32),
            y,
            z: tokens,
            threads: SCORES_THREADS,
        };
        let weights_grid = Grid {
            x: shape.heads,
            y: tokens,
            z: 1,
            threads: WEIGHTS_THREADS,
        };
        let values_grid = Grid {
            x: shape.value_length.div_ceil(SLICE_ELEMENTS),
            y,
            z: tokens,
            threads: VALUES_THREADS,
        };
        // SAFETY: the arguments that `LONG_ATTENTION_KERNELS` and `long_attention_weights` declare; whoever made the
        // addresses answers for `tokens` rows at each, for the pages that the table names, and for scratch of the size
        // that `long_attention_scratch_bytes` tells, with no token past `positions`.
        unsafe {
            kernels.scores.launch(
                stream,
                scores_grid,
                &mut [
                    argument(&attention.queries),
                    argument(&scratch),
                    argument(&pages),
                    argument(&step),
                    argument(&shape),
                ],
            )?;
            self.long_attention.weights.launch(
                stream,
                weights_grid,
                &mut [argument(&scratch), argument(&step), argument(&shape)],
            )?;
            kernels.values.launch(
                stream,
                values_grid,
                &mut [
                    argument(&scratch),
                    argument(&attention.output),
                    argument(&pages),
                    argument(&step),
                    argument(&shape),
                ],
            )
        }
    }
}
