//! Whole rows: embedding rows to f32, and chosen rows of activations. `rows.cu`.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use super::module::{Grid, Kernel, Module, argument, source};
use super::{CudaKernels, DeviceAddress, KernelError, count};
use crate::gguf::TensorType;

/// Stored rows to f32, as `kernels::dequantise_row`.
#[derive(Clone, Copy, Debug)]
pub struct DequantiseRows {
    pub kind: TensorType,
    /// u64 `[rows]`: the address of each row in device memory, at any alignment.
    pub addresses: DeviceAddress,
    /// f32 `[rows, columns]`.
    pub output: DeviceAddress,
    pub rows: usize,
    pub columns: usize,
}

/// output\[i\] = x\[indices\[i\]\].
#[derive(Clone, Copy, Debug)]
pub struct GatherRows {
    /// f32 `[more than every index, columns]`.
    pub x: DeviceAddress,
    /// u32 `[rows]`.
    pub indices: DeviceAddress,
    /// f32 `[rows, columns]`.
    pub output: DeviceAddress,
    pub rows: usize,
    pub columns: usize,
}

pub(super) struct Kernels {
    /// As in `TensorType::ALL`.
    dequantise: Vec<Kernel>,
    gather: Kernel,
}

impl Kernels {
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Kernels, KernelError> {
        let module = Module::load(context, &source!("rows"))?;
        let dequantise = TensorType::ALL
            .iter()
            .map(|kind| module.kernel(format!("dequantise_{}", kind.name().to_lowercase())));
        Ok(Kernels {
            dequantise: dequantise.collect::<Result<_, _>>()?,
            gather: module.kernel("gather_rows".to_owned())?,
        })
    }
}

impl CudaKernels {
    /// # Panics
    /// When a row is not a whole number of blocks.
    pub fn dequantise_rows(
        &self,
        stream: &CudaStream,
        rows: &DequantiseRows,
    ) -> Result<(), KernelError> {
        let block = rows.kind.block_elements();
        assert!(rows.columns.is_multiple_of(block), "{rows:?}");
        let index = TensorType::ALL.iter().position(|kind| *kind == rows.kind);
        let Some(kernel) = index.and_then(|index| self.rows.dequantise.get(index)) else {
            unreachable!("{:?} is a type", rows.kind);
        };
        let columns = count(rows.columns);
        // SAFETY: (rows, out, columns), as `DEQUANTISE_KERNEL` declares them; whoever made the addresses answers for as many
        // addresses, for the row at each of them, and for as many rows of output.
        unsafe {
            kernel.launch(
                stream,
                Grid::of_elements(u64::from(columns), count(rows.rows)),
                &mut [
                    argument(&rows.addresses),
                    argument(&rows.output),
                    argument(&columns),
                ],
            )
        }
    }

    pub fn gather_rows(&self, stream: &CudaStream, rows: &GatherRows) -> Result<(), KernelError> {
        let columns = count(rows.columns);
        // SAFETY: (x, indices, out, columns), as the kernel declares them; whoever made the addresses answers for as many
        // indices and rows of output, and for the row of x at each index.
        unsafe {
            self.rows.gather.launch(
                stream,
                Grid::of_elements(u64::from(columns), count(rows.rows)),
                &mut [
                    argument(&rows.x),
                    argument(&rows.indices),
                    argument(&rows.output),
                    argument(&columns),
                ],
            )
        }
    }
}
