//! Steps that the host computes: kernels over slices of candle tensors, by the compute pool. On the emulated device too,
//! whose arena is the host's to read.

use super::matrix::{Matrix, Slice, Walk};
use super::step::{Input, LayerCache, Norm, Rotation, Values};
use super::{Batch, StepError};
use crate::kernels::{
    self, Activations, AttentionRun, ComputePool, MatrixView, OutputRows, PAGE_TOKENS, PageView,
    Product, RopeAngles, RowSlice,
};
use crate::placement::GroupId;
use crate::weights::Pass;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor};
use std::cell::Cell;

// As the plan's scratch counts them.
const _: () = assert!(size_of::<PageView<'_>>() == 24 && size_of::<AttentionRun<'_>>() == 24);

/// The host as the one who computes steps.
pub(super) struct HostCompute {
    pub(super) pool: ComputePool,
}

impl HostCompute {
    pub(super) fn vector(&self, floats: Vec<f32>) -> Result<Values, StepError> {
        let length = floats.len();
        Ok(Values::Host(Tensor::from_vec(
            floats,
            length,
            &Device::Cpu,
        )?))
    }

    pub(super) fn values(rows: usize, columns: usize) -> Result<Values, StepError> {
        Ok(Values::Host(zeros(rows * columns)?))
    }

    /// Stored rows of a matrix, `[rows, columns]`.
    pub(super) fn dequantise(matrix: &Matrix, rows: &[u8]) -> Result<Values, StepError> {
        let row_bytes = matrix.kind.row_bytes(matrix.columns as u64).unwrap_or(0) as usize;
        let count = rows.len() / row_bytes.max(1);
        let mut floats = vec![0.0; count * matrix.columns];
        for (row, floats) in rows
            .chunks_exact(row_bytes)
            .zip(floats.chunks_exact_mut(matrix.columns))
        {
            kernels::dequantise_row(matrix.kind, row, floats);
        }
        let length = floats.len();
        Ok(Values::Host(Tensor::from_vec(
            floats,
            length,
            &Device::Cpu,
        )?))
    }

    pub(super) fn add_and_normalise(
        &self,
        x: &Values,
        delta: Option<&Values>,
        norm: &Norm<'_>,
        h: &Values,
    ) -> Result<(), StepError> {
        let (x, h) = (x.host(), h.host());
        let delta = delta.map(Values::host);
        let are_distinct = x.id() != h.id()
            && delta.is_none_or(|delta| delta.id() != x.id() && delta.id() != h.id());
        assert!(are_distinct, "a tensor lent twice waits for itself");
        let count = norm.rows * norm.columns;
        let normalise = |delta: Option<&[f32]>| {
            with_values(norm.weight.host(), |weight| {
                with_values_mut(x, |x| {
                    with_values_mut(h, |h| {
                        let (x, h) = (&mut x[..count], &mut h[..count]);
                        kernels::add_rms_norm(&self.pool, x, delta, weight, norm.epsilon, h);
                        Ok(())
                    })
                })
            })
        };
        match delta {
            Some(delta) => with_values(delta, |delta| normalise(Some(&delta[..count]))),
            None => normalise(None),
        }
    }

    pub(super) fn normalise(&self, x: &Values, norm: &Norm<'_>) -> Result<(), StepError> {
        with_values(norm.weight.host(), |weight| {
            with_values_mut(x.host(), |x| {
                let x = &mut x[..norm.rows * norm.columns];
                kernels::rms_norm(&self.pool, x, weight, norm.epsilon);
                Ok(())
            })
        })
    }

    pub(super) fn multiply<const N: usize>(
        &self,
        pass: &mut Pass<'_>,
        x: &Input<'_>,
        products: [(&Matrix, &Values); N],
    ) -> Result<(), StepError> {
        let outputs = products.map(|(_, out)| out.host());
        let matrices = products.map(|(matrix, _)| matrix);
        with_values(x.values.host(), |values| {
            let x = Activations::new(&values[..x.rows * x.columns], x.rows, x.columns);
            with_all_mut(&outputs, Vec::with_capacity(N), &mut |mut lent| {
                for (out, matrix) in lent.iter_mut().zip(matrices) {
                    let whole = std::mem::take(out);
                    *out = &mut whole[..x.width() * matrix.rows];
                }
                self.multiply_slices(pass, &x, matrices, &mut lent)
            })
        })
    }

    /// `x` times each matrix, to rows of floats.
    pub(super) fn multiply_slices<const N: usize>(
        &self,
        pass: &mut Pass<'_>,
        x: &Activations<'_>,
        matrices: [&Matrix; N],
        outputs: &mut [&mut [f32]],
    ) -> Result<(), StepError> {
        let mut walk = Walk::new(matrices);
        let mut next = walk.next();
        while let Some((group, slices)) = next {
            // What rests in memory behind it is multiplied in the same run.
            pass.lease(group)?;
            let mut together = vec![(group, slices)];
            next = walk.next();
            while let Some((group, slices)) = next
                && pass.also_lease(group)?
            {
                together.push((group, slices));
                next = walk.next();
            }
            let products = matrices.iter().zip(&mut *outputs).enumerate();
            let mut products: Vec<Product<'_, '_>> = products
                .map(|(index, (matrix, out))| Product {
                    slices: rows_at_hand(pass, &together, matrix, index),
                    out: OutputRows {
                        data: out,
                        stride: matrix.rows,
                        first_column: 0,
                    },
                })
                .collect();
            kernels::matmul_all(&self.pool, x, &mut products);
            // The rows of the last one may be those of another product too.
            pass.keep_last();
        }
        for (matrix, out) in matrices.iter().zip(outputs) {
            if let Some(bias) = &matrix.bias {
                with_values(bias.host(), |bias| {
                    for row in out.chunks_exact_mut(matrix.rows) {
                        row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
                    }
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    pub(super) fn rope(
        &self,
        x: &Values,
        angles: &RopeAngles,
        rotation: &Rotation,
    ) -> Result<(), StepError> {
        let &Rotation {
            heads,
            length,
            pairs,
            ..
        } = rotation;
        with_values_mut(x.host(), |x| {
            let x = &mut x[..angles.width() * heads * length];
            kernels::rope(&self.pool, x, heads, length, angles, pairs);
            Ok(())
        })
    }

    pub(super) fn store(
        batch: &Batch<'_>,
        cache: &mut LayerCache<'_>,
        key: &Values,
        value: &Values,
    ) -> Result<(), StepError> {
        let LayerCache { kv, layer } = cache;
        let shape = *kv.shape(*layer);
        with_values(key.host(), |key| {
            with_values(value.host(), |value| {
                let keys = key.chunks_exact(shape.kv_heads * shape.key_length);
                let values = value.chunks_exact(shape.kv_heads * shape.value_length);
                let places = batch.runs.iter().flat_map(|run| {
                    let first = run.position as usize;
                    (first..first + run.tokens.len())
                        .map(move |position| (run.sequence(), position))
                });
                for ((sequence, position), (key, value)) in places.zip(keys.zip(values)) {
                    let page = kv.page_of(*layer, sequence, position / PAGE_TOKENS);
                    let page = kv.page_mut(*layer, page);
                    kernels::store_kv(&shape, page, position % PAGE_TOKENS, key, value);
                }
                Ok(())
            })
        })
    }

    pub(super) fn attend(
        &self,
        batch: &Batch<'_>,
        cache: &mut LayerCache<'_>,
        scale: f32,
        (query, out): (&Values, &Values),
    ) -> Result<(), StepError> {
        let (kv, layer) = (&*cache.kv, cache.layer);
        let shape = kv.shape(layer);
        let pages_of = |run: &super::Run<'_>| {
            let page = |index| kv.page(layer, kv.page_of(layer, run.sequence(), index));
            (0..run.pages.len()).map(page).collect()
        };
        let pages: Vec<Vec<PageView<'_>>> = batch.runs.iter().map(pages_of).collect();
        let runs: Vec<AttentionRun<'_>> = batch
            .runs
            .iter()
            .zip(&pages)
            .map(|(run, pages)| AttentionRun {
                pages,
                position: run.position,
                tokens: run.tokens.len() as u32,
            })
            .collect();
        let width = batch.width();
        with_values(query.host(), |query| {
            with_values_mut(out.host(), |out| {
                let query = &query[..width * shape.heads * shape.key_length];
                let out = &mut out[..width * shape.heads * shape.value_length];
                kernels::attention(&self.pool, shape, scale, query, &runs, out);
                Ok(())
            })
        })
    }

    pub(super) fn scale(x: &Values, factor: f32, count: usize) -> Result<(), StepError> {
        with_values_mut(x.host(), |x| {
            kernels::scale(&mut x[..count], factor);
            Ok(())
        })
    }

    pub(super) fn gelu_mul(
        &self,
        gate: &Values,
        up: &Values,
        count: usize,
    ) -> Result<(), StepError> {
        with_values(up.host(), |up| {
            with_values_mut(gate.host(), |gate| {
                kernels::gelu_mul(&self.pool, &mut gate[..count], &up[..count]);
                Ok(())
            })
        })
    }

    pub(super) fn silu_mul(
        &self,
        gate: &Values,
        up: &Values,
        count: usize,
    ) -> Result<(), StepError> {
        with_values(up.host(), |up| {
            with_values_mut(gate.host(), |gate| {
                kernels::silu_mul(&self.pool, &mut gate[..count], &up[..count]);
                Ok(())
            })
        })
    }

    /// Rows of `x`, `[rows, columns]`, by number.
    pub(super) fn select(x: &Values, columns: usize, rows: &[u32]) -> Result<Values, StepError> {
        let selected = with_values(x.host(), |x| {
            let row = |&row: &u32| &x[row as usize * columns..][..columns];
            Ok(rows.iter().flat_map(row).copied().collect::<Vec<f32>>())
        })?;
        let length = selected.len();
        Ok(Values::Host(Tensor::from_vec(
            selected,
            length,
            &Device::Cpu,
        )?))
    }

    pub(super) fn logits(
        &self,
        pass: &mut Pass<'_>,
        head: &Matrix,
        x: &Input<'_>,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        let mut all = vec![0.0; x.rows * head.rows];
        with_values(x.values.host(), |values| {
            let x = Activations::new(&values[..x.rows * x.columns], x.rows, x.columns);
            self.multiply_slices(pass, &x, [head], &mut [&mut all])
        })?;
        Ok(rows_of(all, head.rows))
    }
}

/// What the groups that `pass` holds have of the `index`-th of the matrices that are walked through together.
fn rows_at_hand<'p, const N: usize>(
    pass: &'p Pass<'_>,
    groups: &[(GroupId, [Option<&Slice>; N])],
    matrix: &Matrix,
    index: usize,
) -> Vec<RowSlice<'p>> {
    let slices = groups
        .iter()
        .filter_map(|(group, slices)| Some((group, slices[index]?)));
    slices
        .map(|(group, slice)| RowSlice {
            weight: MatrixView {
                kind: matrix.kind,
                rows: slice.rows,
                columns: matrix.columns,
                bytes: pass.held(*group).part(slice.part),
            },
            first_row: slice.first_row,
        })
        .collect()
}

/// Rows of their own; a single row is handed on without a copy.
fn rows_of(all: Vec<f32>, length: usize) -> Vec<Vec<f32>> {
    if all.len() == length {
        return vec![all];
    }
    all.chunks_exact(length).map(<[f32]>::to_vec).collect()
}

fn zeros(count: usize) -> Result<Tensor, StepError> {
    Ok(Tensor::zeros(count, DType::F32, &Device::Cpu)?)
}

/// Lends the elements of a contiguous f32 tensor on the CPU.
fn with_values<T>(
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
fn with_values_mut<T>(
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

/// What is done with the elements of several tensors.
type OnAll<'f> = dyn FnMut(Vec<&mut [f32]>) -> Result<(), StepError> + 'f;

/// Lends the elements of several tensors to be written, none of which is another.
fn with_all_mut(
    tensors: &[&Tensor],
    lent: Vec<&mut [f32]>,
    function: &mut OnAll<'_>,
) -> Result<(), StepError> {
    match tensors.split_first() {
        None => function(lent),
        Some((first, rest)) => with_values_mut(first, |values| {
            let mut lent: Vec<&mut [f32]> = lent;
            lent.push(values);
            with_all_mut(rest, lent, function)
        }),
    }
}

impl From<candle_core::Error> for StepError {
    fn from(error: candle_core::Error) -> StepError {
        StepError::Numeric(error.to_string())
    }
}
