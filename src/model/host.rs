//! Activations of a step: candle tensors on the CPU, whose elements the kernels are lent.

use super::StepError;
use crate::kernels::{ComputePool, add_rms_norm};
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor};
use std::cell::Cell;

/// What a step fills in: `[width, columns]`, all zeros.
pub(super) fn zeros(width: usize, columns: usize) -> Result<Tensor, StepError> {
    Ok(Tensor::zeros((width, columns), DType::F32, &Device::Cpu)?)
}

/// Lends the elements of a contiguous f32 tensor on the CPU.
pub(super) fn with_values<T>(
    x: &Tensor,
    function: impl FnOnce(&[f32]) -> Result<T, StepError>,
) -> Result<T, StepError> {
    let (storage, layout) = x.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        return Err(StepError::Numeric("activations left the CPU".to_owned()));
    };
    function(&storage.as_slice::<f32>()?[start..end])
}

/// Lends them to be written. Every tensor that shares them sees what is written; `function` must not use one that does:
/// it would wait for itself.
pub(super) fn with_values_mut<T>(
    x: &Tensor,
    function: impl FnOnce(&mut [f32]) -> Result<T, StepError>,
) -> Result<T, StepError> {
    let mut result = None;
    x.inplace_op1(&Lend(Cell::new(Some(|values: &mut [f32]| {
        result = Some(function(values));
    }))))?;
    result.unwrap_or_else(|| Err(StepError::Numeric("activations were not lent".to_owned())))
}

/// The elements are lent through an operation: candle gives them for writing in no other way.
struct Lend<F>(Cell<Option<F>>);

impl<F: FnOnce(&mut [f32])> InplaceOp1 for Lend<F> {
    fn name(&self) -> &'static str {
        "lend"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let contiguous = || candle_core::Error::Msg("activations are not contiguous".to_owned());
        let (start, end) = layout.contiguous_offsets().ok_or_else(contiguous)?;
        match (storage, self.0.take()) {
            (CpuStorage::F32(values), Some(function)) => function(&mut values[start..end]),
            _ => candle_core::bail!("activations are not f32"),
        }
        Ok(())
    }
}

/// The residual connection, then RMSNorm: x += delta, where there is one, and h = the norm of x.
pub(super) fn add_and_normalise(
    pool: &ComputePool,
    x: &Tensor,
    delta: Option<&Tensor>,
    weight: &Tensor,
    epsilon: f32,
    h: &Tensor,
) -> Result<(), StepError> {
    let are_distinct =
        x.id() != h.id() && delta.is_none_or(|delta| delta.id() != x.id() && delta.id() != h.id());
    assert!(are_distinct, "a tensor lent twice waits for itself");
    let normalise = |delta: Option<&[f32]>| {
        with_values(weight, |weight| {
            with_values_mut(x, |x| {
                with_values_mut(h, |h| {
                    add_rms_norm(pool, x, delta, weight, epsilon, h);
                    Ok(())
                })
            })
        })
    };
    match delta {
        Some(delta) => with_values(delta, |delta| normalise(Some(delta))),
        None => normalise(None),
    }
}

impl From<candle_core::Error> for StepError {
    fn from(error: candle_core::Error) -> StepError {
        StepError::Numeric(error.to_string())
    }
}
