//! How fast a GPU reads weights and computes with them, by the kernels that serve.

use super::copy_rate::{CopyRate, CopyRateError};
use super::product_rate::{COLUMNS, ROWS};
use super::rounds::median;
use crate::gguf::TensorType;
use crate::kernels::cuda::{
    CudaKernels, DeviceMatrix, InputForm, KernelError, MatrixProduct, QuantiseRows,
    quantised_input_bytes,
};
use crate::memory::{Arena, CudaDevice, CudaError, MemoryError, Region};
use crate::model::Gpu;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The type whose rates stand for all: most weights of the files that people serve are of it.
const KIND: TensorType = TensorType::Q4K;
/// Tokens of a wide step.
const TOKENS: usize = 512;
/// A round is at least so long: then what a launch costs does not count.
const ROUND: Duration = Duration::from_millis(5);
const ROUNDS_MIN: usize = 3;
/// Rows of the first matrix that is tried.
const ROWS_MIN: usize = 32;

/// Why a GPU is not measured.
#[derive(Debug, thiserror::Error)]
pub enum GpuRateError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Device(#[from] CudaError),
    #[error(transparent)]
    Kernels(#[from] KernelError),
    #[error(transparent)]
    Copies(#[from] CopyRateError),
}

/// What a GPU reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuRates {
    /// Copies from page-locked RAM.
    pub link_bytes_per_second: f64,
    /// Weights for one token.
    pub memory_bytes_per_second: f64,
    /// For many tokens, the 8-bit form of the input included.
    pub flops_per_second: f64,
}

/// Takes about `bytes` of RAM and 512 MiB of the GPU, for about `time`.
///
/// # Errors
/// The GPU does not have so much, or fails.
pub fn gpu_rates(gpu: &Gpu, bytes: usize, time: Duration) -> Result<GpuRates, GpuRateError> {
    let mut copies = CopyRate::new(bytes, Some(&gpu.device))?;
    let link = copies.measure(time / 3)?;
    let mut products = Products::new(gpu, copies.copied())?;
    let few = products.rate(1, time / 3)?;
    let many = products.rate(TOKENS, time / 3)?;
    let elements_per_byte = KIND.block_elements() as f64 / KIND.block_bytes() as f64;
    Ok(GpuRates {
        link_bytes_per_second: link,
        memory_bytes_per_second: few,
        flops_per_second: many * elements_per_byte * 2.0 * TOKENS as f64,
    })
}

/// Products with the weights in some regions of a GPU.
struct Products<'a> {
    device: &'a Arc<CudaDevice>,
    kernels: &'a CudaKernels,
    /// At least one region.
    weights: &'a [Region],
    /// The region and the place in it where the next matrix is taken.
    next: (usize, usize),
    /// f32 `[TOKENS, COLUMNS]`, all 0; their 8-bit form; f32 `[TOKENS, ROWS]`.
    input: Region,
    quantised: Region,
    output: Region,
}

impl<'a> Products<'a> {
    fn new(gpu: &'a Gpu, weights: &'a [Region]) -> Result<Products<'a>, GpuRateError> {
        let device = &gpu.device;
        let form = InputForm::of(KIND);
        let quantised = quantised_input_bytes(form, COLUMNS, TOKENS) as usize;
        let (input, output) = (4 * TOKENS * COLUMNS, 4 * TOKENS * ROWS);
        let slack = 3 * crate::memory::SPAN_ALIGNMENT;
        let arena = Arena::on_cuda("device", input + quantised + output + slack, device)?;
        let arena = Arc::new(arena);
        let region = |bytes| -> Result<Region, MemoryError> {
            let mut region = Region::allocate_low(&arena, bytes)?;
            region.clear();
            Ok(region)
        };
        let products = Products {
            input: region(input)?,
            quantised: region(quantised)?,
            output: region(output)?,
            device,
            kernels: &gpu.kernels,
            weights,
            next: (0, 0),
        };
        device.synchronise()?;
        Ok(products)
    }

    /// Bytes of weights per second with so many tokens, measured for about `time`.
    fn rate(&mut self, tokens: usize, time: Duration) -> Result<f64, GpuRateError> {
        let shortest = self.weights.iter().map(Region::bytes_total).min();
        let rows_max = (shortest.unwrap_or(0) / matrix_bytes(1)).min(ROWS);
        // As long as a model's matrices, and as many of them as make a time that can be measured; on a device that
        // computes slowly, less.
        let mut round = Round {
            rows: ROWS_MIN.min(rows_max),
            products: 1,
            tokens,
        };
        self.seconds(round)?;
        while self.seconds(round)? < ROUND.as_secs_f64() {
            match round.rows < rows_max {
                true => round.rows = (2 * round.rows).min(rows_max),
                false => round.products *= 2,
            }
        }
        let bytes = round.products * matrix_bytes(round.rows);
        let began = Instant::now();
        let mut rates = Vec::new();
        while rates.len() < ROUNDS_MIN || began.elapsed() < time {
            let seconds = self.seconds(round)?;
            rates.push(bytes as f64 / seconds.max(f64::MIN_POSITIVE));
        }
        Ok(median(&rates))
    }

    /// How long a round takes: one product after the other, with the next matrix that the regions hold.
    fn seconds(&mut self, round: Round) -> Result<f64, GpuRateError> {
        let Round {
            rows,
            products,
            tokens,
        } = round;
        let bytes = matrix_bytes(rows);
        let stream = self.device.compute_stream();
        let form = InputForm::of(KIND);
        let input = self.input.device_address(0, 4 * tokens * COLUMNS);
        let quantised_bytes = quantised_input_bytes(form, COLUMNS, tokens) as usize;
        let quantised = self.quantised.device_address(0, quantised_bytes);
        let output = self.output.device_address(0, 4 * tokens * rows);
        let quantise = QuantiseRows {
            form,
            input,
            output: quantised,
            columns: COLUMNS,
            tokens,
        };
        let began = Instant::now();
        for index in 0..products {
            // A step does so once for several matrices. With one token it is a launch and next to nothing else.
            if tokens > 1 || index == 0 {
                self.kernels.quantise_rows(stream, &quantise)?;
            }
            let mut region = &self.weights[self.next.0 % self.weights.len()];
            if self.next.1 + bytes > region.bytes_total() {
                self.next = (self.next.0 + 1, 0);
                region = &self.weights[self.next.0 % self.weights.len()];
            }
            let product = MatrixProduct {
                weight: DeviceMatrix {
                    kind: KIND,
                    rows,
                    columns: COLUMNS,
                    address: region.device_address(self.next.1, bytes),
                },
                input: quantised,
                tokens,
                output,
                stride: rows,
                first_column: 0,
            };
            self.next.1 += bytes;
            self.kernels.matmul(stream, &product)?;
        }
        self.device.synchronise()?;
        Ok(began.elapsed().as_secs_f64())
    }
}

#[derive(Clone, Copy)]
struct Round {
    /// Of each matrix.
    rows: usize,
    products: usize,
    tokens: usize,
}

fn matrix_bytes(rows: usize) -> usize {
    rows * (COLUMNS / KIND.block_elements() * KIND.block_bytes())
}
