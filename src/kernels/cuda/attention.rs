//! Attention over the pages of the KV cache in device memory, and what writes to them: `attention.cu`.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use super::module::{Argument, Grid, Kernel, Module, argument, source};
use super::{CudaKernels, DeviceAddress, KernelError, count};
use crate::kernels::{AttentionShape, PAGE_TOKENS};

/// As in `attention.cu`.
const THREADS: u32 = 256;
/// As in `attention.cuh`.
/// Elements of the longest head that the kernels take; heads have an even number of them.
pub const HEAD_LENGTH_MAX: usize = 256;

/// The numbers of query heads that attention is compiled for: those that share a KV head, or so many of them at a time.
const HEADS: [u32; 4] = [1, 2, 4, 8];

/// What a page is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagePrecision {
    F16,
    F32,
}

impl PagePrecision {
    pub(super) const ALL: [PagePrecision; 2] = [PagePrecision::F16, PagePrecision::F32];

    pub(super) const fn name(self) -> &'static str {
        match self {
            PagePrecision::F16 => "f16",
            PagePrecision::F32 => "f32",
        }
    }

    const fn element_bytes(self) -> u64 {
        match self {
            PagePrecision::F16 => 2,
            PagePrecision::F32 => 4,
        }
    }
}

/// One layer's part of all pages, each in the layout of `kernels::attention`.
#[derive(Clone, Copy, Debug)]
pub struct DevicePages {
    /// Where the layer's part of page 0 starts; that of page p starts `p * page_stride` elements later.
    pub start: DeviceAddress,
    /// Elements from one page to the next, all layers.
    pub page_stride: usize,
    pub precision: PagePrecision,
}

/// Which pages the tokens of a step read: u32 arrays in device memory. Token t is at `positions[t]` of run `runs[t]`;
/// page n of run r is `table[starts[r] + n]`.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRuns {
    /// `[tokens]`.
    pub positions: DeviceAddress,
    /// `[tokens]`.
    pub runs: DeviceAddress,
    /// `[runs]`.
    pub starts: DeviceAddress,
    /// The pages of all runs, each up to that of its last token.
    pub table: DeviceAddress,
}

/// Keys and values of a step's tokens to their pages, as `kernels::store_kv`.
#[derive(Clone, Copy, Debug)]
pub struct StoreKv {
    pub shape: AttentionShape,
    pub pages: DevicePages,
    pub runs: DeviceRuns,
    pub tokens: usize,
    /// f32 `[tokens, kv_heads, key_length]`.
    pub keys: DeviceAddress,
    /// f32 `[tokens, kv_heads, value_length]`.
    pub values: DeviceAddress,
}

/// output = softmax(scale * queries * keys) * values, as `kernels::attention`.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    pub shape: AttentionShape,
    pub pages: DevicePages,
    pub runs: DeviceRuns,
    pub tokens: usize,
    /// f32 `[tokens, heads, key_length]`.
    pub queries: DeviceAddress,
    /// f32 `[tokens, heads, value_length]`.
    pub output: DeviceAddress,
    pub scale: f32,
}

/// `Pages` of `attention.cuh`.
#[repr(C)]
pub(super) struct PagesArgument {
    elements: DeviceAddress,
    page_stride: u64,
}

/// `Step` of `attention.cuh`.
#[repr(C)]
pub(super) struct StepArgument {
    positions: DeviceAddress,
    runs: DeviceAddress,
    starts: DeviceAddress,
    table: DeviceAddress,
}

/// `Shape` of `attention.cuh`.
#[repr(C)]
pub(super) struct ShapeArgument {
    pub(super) heads: u32,
    pub(super) kv_heads: u32,
    key_length: u32,
    pub(super) value_length: u32,
    window: u32,
    scale: f32,
}

// SAFETY: the fields of the C++ structs, in their order.
unsafe impl Argument for PagesArgument {}
// SAFETY: as above.
unsafe impl Argument for StepArgument {}
// SAFETY: as above.
unsafe impl Argument for ShapeArgument {}

impl StepArgument {
    pub(super) fn new(runs: &DeviceRuns) -> StepArgument {
        StepArgument {
            positions: runs.positions,
            runs: runs.runs,
            starts: runs.starts,
            table: runs.table,
        }
    }
}

impl ShapeArgument {
    /// # Panics
    /// When the kernels are not made for the shape.
    pub(super) fn new(shape: &AttentionShape, scale: f32) -> ShapeArgument {
        let is_length = |length: usize| length.is_multiple_of(2) && length <= HEAD_LENGTH_MAX;
        assert!(
            shape.kv_heads > 0
                && shape.heads.is_multiple_of(shape.kv_heads)
                && shape.window != Some(0)
                && is_length(shape.key_length)
                && is_length(shape.value_length),
            "{shape:?}"
        );
        ShapeArgument {
            heads: count(shape.heads),
            kv_heads: count(shape.kv_heads),
            key_length: count(shape.key_length),
            value_length: count(shape.value_length),
            window: shape.window.unwrap_or(u32::MAX),
            scale,
        }
    }
}

impl DevicePages {
    /// # Panics
    /// When pages of this shape do not fit the stride.
    pub(super) fn argument(&self, shape: &AttentionShape) -> Result<PagesArgument, KernelError> {
        assert!(
            self.page_stride >= shape.page_elements(),
            "{self:?}, {shape:?}"
        );
        // Two elements are loaded at a time.
        let alignment = 2 * self.precision.element_bytes();
        let is_aligned =
            self.start.value().is_multiple_of(alignment) && self.page_stride.is_multiple_of(2);
        if !is_aligned {
            return Err(KernelError::Unaligned {
                what: "pages",
                address: self.start.value(),
                alignment,
            });
        }
        Ok(PagesArgument {
            elements: self.start,
            page_stride: self.page_stride as u64,
        })
    }
}

/// The kernels of one precision.
struct OfPrecision {
    store: Kernel,
    /// As in `HEADS`.
    attention: [Kernel; HEADS.len()],
}

pub(super) struct Kernels {
    /// As in `PagePrecision::ALL`.
    of_precision: [OfPrecision; 2],
}

impl Kernels {
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Kernels, KernelError> {
        let module = Module::load(context, &source!("attention"))?;
        let of_precision = |precision: PagePrecision| {
            let name = precision.name();
            let kernel = |heads| module.kernel(format!("attention_{name}_{heads}"));
            let [one, two, four, eight] = HEADS.map(kernel);
            Ok(OfPrecision {
                store: module.kernel(format!("store_kv_{name}"))?,
                attention: [one?, two?, four?, eight?],
            })
        };
        let [f16, f32] = PagePrecision::ALL.map(of_precision);
        Ok(Kernels {
            of_precision: [f16?, f32?],
        })
    }

    fn of(&self, precision: PagePrecision) -> &OfPrecision {
        let [f16, f32] = &self.of_precision;
        match precision {
            PagePrecision::F16 => f16,
            PagePrecision::F32 => f32,
        }
    }
}

const _: () = assert!(
    PAGE_TOKENS == 32,
    "attention.cuh is written for pages of 32"
);

impl CudaKernels {
    /// # Errors
    /// The pages are not aligned, or the driver refuses.
    ///
    /// # Panics
    /// When head lengths are odd or above 256, or shapes do not agree.
    pub fn store_kv(&self, stream: &CudaStream, store: &StoreKv) -> Result<(), KernelError> {
        let shape = ShapeArgument::new(&store.shape, 0.0);
        let pages = store.pages.argument(&store.shape)?;
        let step = StepArgument::new(&store.runs);
        let elements = store.shape.kv_heads * (store.shape.key_length + store.shape.value_length);
        // SAFETY: (keys, values, pages, step, shape), as `STORE_KERNEL` declares them; whoever made the addresses answers
        // for `tokens` rows at each, and for the pages that the table names.
        unsafe {
            self.attention.of(store.pages.precision).store.launch(
                stream,
                Grid::of_elements(elements as u64, count(store.tokens)),
                &mut [
                    argument(&store.keys),
                    argument(&store.values),
                    argument(&pages),
                    argument(&step),
                    argument(&shape),
                ],
            )
        }
    }

    /// Attention of every token of the step. What lies in slots past a token's own position is never used.
    ///
    /// # Errors
    /// The pages are not aligned, or the driver refuses.
    ///
    /// # Panics
    /// When head lengths are odd or above 256, or shapes do not agree.
    pub fn attention(&self, stream: &CudaStream, attention: &Attention) -> Result<(), KernelError> {
        let shape = ShapeArgument::new(&attention.shape, attention.scale);
        let pages = attention.pages.argument(&attention.shape)?;
        let step = StepArgument::new(&attention.runs);
        if shape.value_length == 0 {
            return Ok(());
        }
        let group = shape.heads / shape.kv_heads;
        let at_once = HEADS.iter().position(|heads| group <= *heads);
        let at_once = at_once.unwrap_or(HEADS.len() - 1);
        let grid = Grid {
            x: count(attention.tokens),
            y: shape.kv_heads,
            z: group.div_ceil(HEADS[at_once]),
            threads: THREADS,
        };
        let kernels = &self.attention.of(attention.pages.precision).attention;
        // SAFETY: (queries, out, pages, step, shape), as `ATTENTION_KERNEL` declares them; whoever made the addresses
        // answers for `tokens` rows at each, and for the pages that the table names.
        unsafe {
            kernels[at_once].launch(
                stream,
                grid,
                &mut [
                    argument(&attention.queries),
                    argument(&attention.output),
                    argument(&pages),
                    argument(&step),
                    argument(&shape),
                ],
            )
        }
    }
}
