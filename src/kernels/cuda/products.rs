//! Products with weights in device memory, and the 8-bit form of their input: `matmul_blocks32.cu`,
//! `matmul_blocks256.cu` and `matmul_floats.cu` for few tokens, `tiles_blocks32.cu`, `tiles_blocks256.cu` and
//! `tiles_floats.cu` for many, and `quantise.cu`.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use super::module::{Grid, Kernel, Module, Source, argument, source};
use super::{CudaKernels, DeviceAddress, KernelError, count};
use crate::gguf::TensorType;
use crate::kernels::blocks::{Storage, storage};

/// The token counts that the products of few tokens are compiled for.
const TOKENS: [u32; 4] = [1, 2, 4, 8];

/// As in `matmul.cuh`.
const MATMUL_THREADS: u32 = 128;

/// The token counts of a tile. More tokens than the last of `TOKENS` are computed in tiles: memory then gives the weights
/// once, and unpacking them is shared.
const TILE_TOKENS: [u32; 2] = [16, 32];

/// As in `tiles.cuh`, `tiles_blocks32.cu` and `tiles_floats.cu`.
const TILE_ROWS: u32 = 64;
const TILE_THREADS: u32 = 128;
const FLOAT_TILE_ROWS: u32 = 32;

/// How a product takes its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputForm {
    /// Rows of f32 as they are.
    Floats,
    /// 8 bits in blocks of 32.
    Blocks32,
    /// 8 bits in blocks of 256.
    Blocks256,
}

impl InputForm {
    /// The form that weights of this type are multiplied with.
    pub fn of(kind: TensorType) -> InputForm {
        match storage(kind) {
            Storage::F32 | Storage::F16 | Storage::BF16 => InputForm::Floats,
            Storage::Blocks32(_) => InputForm::Blocks32,
            Storage::Blocks256(_) => InputForm::Blocks256,
        }
    }
}

/// Bytes of `tokens` rows of `columns` in a form; none for floats, which are not converted. See `quantised_input.cuh`
/// for the layout.
pub fn quantised_input_bytes(form: InputForm, columns: usize, tokens: usize) -> u64 {
    let (columns, tokens) = (columns as u64, tokens as u64);
    match form {
        InputForm::Floats => 0,
        InputForm::Blocks32 => tokens * (columns + columns / 32 * 8),
        InputForm::Blocks256 => tokens * (columns + columns / 16 * 2 + columns / 256 * 4),
    }
}

/// Rows of f32 to a quantised form.
#[derive(Clone, Copy, Debug)]
pub struct QuantiseRows {
    /// Not `Floats`.
    pub form: InputForm,
    /// f32 `[tokens, columns]`.
    pub input: DeviceAddress,
    /// `quantised_input_bytes(form, columns, tokens)` bytes.
    pub output: DeviceAddress,
    /// A multiple of the form's block.
    pub columns: usize,
    pub tokens: usize,
}

/// Rows of a weight matrix in device memory, in the file's layout and one after another. They start at a multiple of
/// `DeviceMatrix::alignment`: tensors that their file aligns to 32 bytes do, and rows of them too, where they rest at
/// an address that is congruent to their offset in the file modulo 16.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMatrix {
    pub kind: TensorType,
    pub rows: usize,
    pub columns: usize,
    pub address: DeviceAddress,
}

impl DeviceMatrix {
    /// The widest load that the kernels read rows of this type with, in bytes.
    pub const fn alignment(kind: TensorType) -> u64 {
        match kind {
            TensorType::F16
            | TensorType::BF16
            | TensorType::Q4_0
            | TensorType::Q5_0
            | TensorType::Q8_0
            | TensorType::Q3K
            | TensorType::Q6K => 2,
            TensorType::F32 | TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q2K => 4,
            TensorType::Q4K | TensorType::Q5K => 16,
        }
    }
}

/// The value of row r of the weights for token t goes to `output[t * stride + first_column + r]`, so that the products
/// of row slices fill the columns of one buffer.
#[derive(Clone, Copy, Debug)]
pub struct MatrixProduct {
    pub weight: DeviceMatrix,
    /// `tokens` rows of `weight.columns`, in the form `InputForm::of(weight.kind)`.
    pub input: DeviceAddress,
    pub tokens: usize,
    /// f32 `[tokens, stride]`.
    pub output: DeviceAddress,
    pub stride: usize,
    pub first_column: usize,
}

pub(super) struct Kernels {
    quantise_blocks32: Kernel,
    quantise_blocks256: Kernel,
    /// As in `TensorType::ALL`.
    products: Vec<OfType>,
}

/// The products with one type of weights.
struct OfType {
    /// As in `TOKENS`.
    few: [Kernel; TOKENS.len()],
    /// As in `TILE_TOKENS`.
    tiles: [Kernel; TILE_TOKENS.len()],
}

/// The products with one form of input.
struct Modules {
    few: Arc<Module>,
    tiles: Arc<Module>,
}

impl Kernels {
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Kernels, KernelError> {
        let quantise = Module::load(context, &source!("quantise"))?;
        let modules = |few: &Source, tiles: &Source| {
            Ok(Modules {
                few: Module::load(context, few)?,
                tiles: Module::load(context, tiles)?,
            })
        };
        let floats = modules(&source!("matmul_floats"), &source!("tiles_floats"))?;
        let blocks32 = modules(&source!("matmul_blocks32"), &source!("tiles_blocks32"))?;
        let blocks256 = modules(&source!("matmul_blocks256"), &source!("tiles_blocks256"))?;
        let mut products = Vec::new();
        for kind in TensorType::ALL {
            let modules = match InputForm::of(kind) {
                InputForm::Floats => &floats,
                InputForm::Blocks32 => &blocks32,
                InputForm::Blocks256 => &blocks256,
            };
            let name = kind.name().to_lowercase();
            let few = |tokens| modules.few.kernel(format!("matmul_{name}_{tokens}"));
            let tile = |tokens| modules.tiles.kernel(format!("matmul_{name}_tile_{tokens}"));
            let [one, two, four, eight] = TOKENS.map(few);
            let [small, large] = TILE_TOKENS.map(tile);
            products.push(OfType {
                few: [one?, two?, four?, eight?],
                tiles: [small?, large?],
            });
        }
        Ok(Kernels {
            quantise_blocks32: quantise.kernel("quantise_blocks32".to_owned())?,
            quantise_blocks256: quantise.kernel("quantise_blocks256".to_owned())?,
            products,
        })
    }

    fn of(&self, kind: TensorType) -> &OfType {
        let index = TensorType::ALL.iter().position(|other| *other == kind);
        match index.and_then(|index| self.products.get(index)) {
            Some(of_type) => of_type,
            None => unreachable!("{kind:?} is a type"),
        }
    }
}

impl OfType {
    /// A group of tokens for each y, rows along x.
    fn few(&self, form: InputForm, rows: u32, tokens: u32) -> (&Kernel, Grid) {
        let size = size_for(&TOKENS, tokens);
        let rows_of_block = match form {
            InputForm::Floats => MATMUL_THREADS / 16,
            InputForm::Blocks32 | InputForm::Blocks256 => MATMUL_THREADS / 32,
        };
        let grid = Grid {
            x: rows.div_ceil(rows_of_block),
            y: tokens.div_ceil(TOKENS[size]),
            z: 1,
            threads: MATMUL_THREADS,
        };
        (&self.few[size], grid)
    }

    /// Tiles: tokens along x, rows along y.
    fn tiles(&self, form: InputForm, rows: u32, tokens: u32) -> (&Kernel, Grid) {
        let size = size_for(&TILE_TOKENS, tokens);
        let (tile_rows, threads) = match form {
            InputForm::Floats => (FLOAT_TILE_ROWS, 2 * TILE_THREADS),
            InputForm::Blocks32 => (TILE_ROWS, 2 * TILE_THREADS),
            InputForm::Blocks256 => (TILE_ROWS, TILE_THREADS),
        };
        let grid = Grid {
            x: tokens.div_ceil(TILE_TOKENS[size]),
            y: rows.div_ceil(tile_rows),
            z: 1,
            threads,
        };
        (&self.tiles[size], grid)
    }
}

/// The place of the first of `sizes` that holds so many tokens, or of the last.
fn size_for(sizes: &[u32], tokens: u32) -> usize {
    let place = sizes.iter().position(|size| tokens <= *size);
    place.unwrap_or(sizes.len() - 1)
}

impl CudaKernels {
    /// Makes the 8-bit form of activations, as `Activations` does: products over q, k, v and all row slices share it.
    ///
    /// # Panics
    /// When the form is `Floats` or a row is not a whole number of blocks.
    pub fn quantise_rows(
        &self,
        stream: &CudaStream,
        rows: &QuantiseRows,
    ) -> Result<(), KernelError> {
        let (kernel, block, elements_of_thread) = match rows.form {
            InputForm::Blocks32 => (&self.products.quantise_blocks32, 32, 4),
            InputForm::Blocks256 => (&self.products.quantise_blocks256, 256, 8),
            InputForm::Floats => panic!("floats have no quantised form"),
        };
        assert!(rows.columns.is_multiple_of(block), "{rows:?}");
        let (columns, tokens) = (count(rows.columns), count(rows.tokens));
        let grid = Grid::of_elements(u64::from(columns) / elements_of_thread, tokens);
        // SAFETY: (input, output, columns, tokens), as both kernels declare them; whoever made the addresses answers for
        // `tokens` rows at each.
        unsafe {
            kernel.launch(
                stream,
                grid,
                &mut [
                    argument(&rows.input),
                    argument(&rows.output),
                    argument(&columns),
                    argument(&tokens),
                ],
            )
        }
    }

    /// output = weight * input, for every token.
    ///
    /// # Errors
    /// The weights are not aligned, or the driver refuses.
    ///
    /// # Panics
    /// When a row is not a whole number of blocks, the rows do not fit the stride, or there are more than two million.
    pub fn matmul(&self, stream: &CudaStream, product: &MatrixProduct) -> Result<(), KernelError> {
        let DeviceMatrix {
            kind,
            rows,
            columns,
            address,
        } = product.weight;
        assert!(columns.is_multiple_of(kind.block_elements()), "{product:?}");
        let end = product.first_column.checked_add(rows);
        assert!(end.is_some_and(|end| end <= product.stride), "{product:?}");
        let alignment = DeviceMatrix::alignment(kind);
        if !address.value().is_multiple_of(alignment) {
            return Err(KernelError::Unaligned {
                what: "weights",
                address: address.value(),
                alignment,
            });
        }
        let first = product.output.after(4 * product.first_column as u64);
        let (rows, columns) = (count(rows), count(columns));
        let (tokens, stride) = (count(product.tokens), count(product.stride));
        let of_type = self.products.of(kind);
        let form = InputForm::of(kind);
        let (kernel, grid) = match tokens <= TOKENS[TOKENS.len() - 1] {
            true => of_type.few(form, rows, tokens),
            false => of_type.tiles(form, rows, tokens),
        };
        // SAFETY: (weights, x, y, rows, columns, tokens, stride), as `MATMUL_KERNEL` and `TILE_KERNEL` declare them;
        // whoever made the addresses answers for the rows of weights, and for `tokens` rows of input and output.
        unsafe {
            kernel.launch(
                stream,
                grid,
                &mut [
                    argument(&address),
                    argument(&product.input),
                    argument(&first),
                    argument(&rows),
                    argument(&columns),
                    argument(&tokens),
                    argument(&stride),
                ],
            )
        }
    }
}
