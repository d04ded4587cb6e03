//! candle's kernels for the product of quantised weights with few tokens: the PTX of `quantized.cu` of the crate
//! candle-kernels, launched as candle-core's `quantized/cuda.rs` does.

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use strata::gguf::TensorType;
use strata::kernels::cuda::InputForm;

use super::{Memory, Outcome};

/// candle's `MATRIX_ROW_PADDING`: rows of the input are filled up with zeros.
const PADDING: usize = 512;
/// Threads of a block that quantises.
const QUANTISE_THREADS: u32 = 256;
/// `block_q8_1`: a scale and a sum in half precision, and as many values of 8 bits.
const Q8_1_ELEMENTS: usize = 32;
const Q8_1_BYTES: usize = 36;

/// Never unloaded: the process ends after it.
pub(super) struct CandleKernels {
    module: sys::CUmodule,
    quantise: sys::CUfunction,
    /// Those that were looked for, by name.
    products: RefCell<HashMap<String, sys::CUfunction>>,
}

/// A product of one matrix.
pub(super) struct CandleProduct<'a> {
    pub(super) kind: TensorType,
    /// An even number.
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// 1 to 8.
    pub(super) tokens: usize,
    /// f32 `[tokens, columns]`.
    pub(super) input: &'a Memory,
    /// `quantised_bytes(columns, tokens)` bytes.
    pub(super) quantised: &'a Memory,
    /// f32 `[tokens, rows]`.
    pub(super) output: &'a Memory,
}

/// Bytes of a quantised input.
pub(super) fn quantised_bytes(columns: usize, tokens: usize) -> usize {
    tokens * columns.next_multiple_of(PADDING) / Q8_1_ELEMENTS * Q8_1_BYTES
}

impl CandleKernels {
    /// Has the driver compile the PTX text at `path`.
    pub(super) fn load(context: &Arc<CudaContext>, path: &Path) -> Outcome<CandleKernels> {
        let text = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let text = CString::new(text)?;
        context.bind_to_thread()?;
        // SAFETY: the text ends with a NUL and is the driver's to read during the call only.
        let module = unsafe { result::module::load_data(text.as_ptr().cast())? };
        Ok(CandleKernels {
            module,
            quantise: find(module, "quantize_q8_1")?,
            products: RefCell::default(),
        })
    }

    /// Whether it has a product with such weights: with all that have blocks.
    pub(super) fn multiplies(kind: TensorType) -> bool {
        InputForm::of(kind) != InputForm::Floats
    }

    pub(super) fn quantise(&self, stream: &CudaStream, product: &CandleProduct<'_>) -> Outcome<()> {
        let padded = product.columns.next_multiple_of(PADDING);
        let (columns, padded) = (i32::try_from(product.columns)?, i32::try_from(padded)?);
        let blocks = padded.unsigned_abs().div_ceil(QUANTISE_THREADS);
        // SAFETY: (x, y, columns, padded columns), as `quantize_q8_1` declares them; `CandleProduct` says how long they are.
        unsafe {
            launch(
                stream,
                self.quantise,
                (blocks, u32::try_from(product.tokens)?, 1),
                (QUANTISE_THREADS, 1, 1),
                &mut [
                    argument(&product.input.address),
                    argument(&product.quantised.address),
                    argument(&columns),
                    argument(&padded),
                ],
            )
        }
    }

    /// output = weight * quantised input, for every token.
    pub(super) fn multiply(
        &self,
        stream: &CudaStream,
        product: &CandleProduct<'_>,
        weight: u64,
    ) -> Outcome<()> {
        let tokens = product.tokens;
        let (rows, columns) = (
            i32::try_from(product.rows)?,
            i32::try_from(product.columns)?,
        );
        let padded = i32::try_from(product.columns.next_multiple_of(PADDING))?;
        let (rows_of_block, warps) = match tokens {
            1 => (1, 4),
            2..=4 => (2, 4),
            5..=8 => (2, 2),
            _ => return Err(format!("candle has no product of {tokens} tokens").into()),
        };
        let kind = product.kind.name().replacen('Q', "q", 1);
        let kernel = self.product(format!("mul_mat_vec_{kind}_q8_1_cuda{tokens}"))?;
        // SAFETY: (weights, y, output, columns, rows, padded columns, stride of the output), as `mul_mat_vec_q` declares
        // them; `CandleProduct` says how long they are.
        unsafe {
            launch(
                stream,
                kernel,
                (rows.unsigned_abs().div_ceil(rows_of_block), 1, 1),
                (32, warps, 1),
                &mut [
                    argument(&weight),
                    argument(&product.quantised.address),
                    argument(&product.output.address),
                    argument(&columns),
                    argument(&rows),
                    argument(&padded),
                    argument(&rows),
                ],
            )
        }
    }

    fn product(&self, name: String) -> Outcome<sys::CUfunction> {
        let mut products = self.products.borrow_mut();
        if let Some(found) = products.get(&name) {
            return Ok(*found);
        }
        let found = find(self.module, &name)?;
        products.insert(name, found);
        Ok(found)
    }
}

fn find(module: sys::CUmodule, name: &str) -> Outcome<sys::CUfunction> {
    // SAFETY: the module is loaded and stays so.
    unsafe { result::module::get_function(module, CString::new(name)?) }
        .map_err(|error| format!("find candle's kernel {name}: {error}").into())
}

fn argument<T>(value: &T) -> *mut c_void {
    ptr::from_ref(value).cast_mut().cast()
}

/// Queues a kernel.
///
/// # Safety
/// `arguments` are those that the kernel declares, and what they point to is as long as it reads and writes.
unsafe fn launch(
    stream: &CudaStream,
    kernel: sys::CUfunction,
    blocks: (u32, u32, u32),
    threads: (u32, u32, u32),
    arguments: &mut [*mut c_void],
) -> Outcome<()> {
    stream.context().bind_to_thread()?;
    // SAFETY: the kernel is of a loaded module; the arguments are the caller's promise, and the driver copies them before it
    // returns.
    unsafe { result::launch_kernel(kernel, blocks, threads, 0, stream.cu_stream(), arguments)? };
    Ok(())
}
