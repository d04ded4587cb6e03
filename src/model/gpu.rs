//! A GPU that models can be loaded on, and which models those are.

use crate::gguf::{Gguf, Hyperparameters};
use crate::kernels::cuda::{CudaKernels, DeviceMatrix, HEAD_LENGTH_MAX, KernelError};
use crate::memory::{CudaDevice, CudaError};
use std::sync::Arc;

/// Opened, and with kernels that its driver has taken.
#[derive(Clone)]
pub struct Gpu {
    pub device: Arc<CudaDevice>,
    pub kernels: Arc<CudaKernels>,
}

/// Why there is none, in words that go on from "cuda:0: ".
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    #[error(transparent)]
    Device(#[from] CudaError),
    #[error(
        "{0} (a card of the Turing generation or later is needed, and some memory that is free on it)"
    )]
    Kernels(KernelError),
}

impl Gpu {
    /// Opens the device with this number, in the driver's order, and loads the kernels into it.
    pub fn open(ordinal: usize) -> Result<Gpu, GpuError> {
        let device = CudaDevice::open(ordinal)?;
        let kernels = CudaKernels::load(device.context()).map_err(GpuError::Kernels)?;
        Ok(Gpu {
            device,
            kernels: Arc::new(kernels),
        })
    }
}

/// Whether the kernels of a GPU can compute a model: if not, why, as the rest of a sentence about the file.
pub fn gpu_supports(gguf: &Gguf, hyperparameters: &Hyperparameters) -> Result<(), String> {
    let lengths = [hyperparameters.key_length, hyperparameters.value_length];
    for length in lengths {
        if !length.is_multiple_of(2) || length as usize > HEAD_LENGTH_MAX {
            return Err(format!(
                "its heads have {length} elements, and the GPU's kernels take an even number up to {HEAD_LENGTH_MAX}"
            ));
        }
    }
    // Vectors come to the device as f32 of their own.
    let matrices = gguf
        .tensors
        .iter()
        .filter(|tensor| tensor.dimensions.len() > 1);
    for tensor in matrices {
        let alignment = DeviceMatrix::alignment(tensor.kind);
        if !tensor.file_offset.is_multiple_of(alignment) {
            return Err(format!(
                "tensor `{}` starts at byte {} of it, and a GPU reads {} in words of {alignment} bytes",
                tensor.name,
                tensor.file_offset,
                tensor.kind.name()
            ));
        }
    }
    Ok(())
}
