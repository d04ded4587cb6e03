//! What the forward passes are made of: matrices whose rows may rest in several groups, and the products with them.

use super::StepError;
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::kernels::{self, Activations, ComputePool, MatrixView, OutputRows, Product};
use crate::placement::{GroupId, Plan};
use crate::weights::{Lease, LeaseError, Pass};
use candle_core::{Device, Tensor};

/// Why a file cannot be this model.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("the file has no tensor `{0}`")]
    Missing(String),
    #[error(
        "tensor `{name}` has the shape {found:?}, and the hyper-parameters ask for {expected:?}"
    )]
    Shape {
        name: String,
        found: Vec<u64>,
        expected: Vec<u64>,
    },
    #[error("tensor `{name}` has the type {kind}, and norms, biases and rope factors must be F32 or F16", kind = kind.name())]
    Kind { name: String, kind: TensorType },
    #[error(transparent)]
    Lease(#[from] LeaseError),
    #[error("make a tensor: {0}")]
    Tensor(#[from] candle_core::Error),
}

/// Rows of a matrix that rest in one group.
#[derive(Clone, Debug)]
struct Slice {
    group: GroupId,
    part: usize,
    first_row: usize,
    rows: usize,
}

/// A weight matrix `[rows, columns]`, and the groups that hold its rows, in order.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    kind: TensorType,
    slices: Vec<Slice>,
    bias: Option<Vec<f32>>,
}

/// Looks tensors up by name and checks their shapes.
pub(super) struct Tensors<'a> {
    gguf: &'a Gguf,
    plan: &'a Plan,
}

impl<'a> Tensors<'a> {
    pub(super) fn new(gguf: &'a Gguf, plan: &'a Plan) -> Tensors<'a> {
        Tensors { gguf, plan }
    }

    fn find(&self, name: &str, dimensions: &[u64]) -> Result<(usize, &'a TensorInfo), ModelError> {
        let found = self.gguf.tensor(name);
        let (index, tensor) = found.ok_or_else(|| ModelError::Missing(name.to_owned()))?;
        if tensor.dimensions != dimensions {
            return Err(ModelError::Shape {
                name: name.to_owned(),
                found: tensor.dimensions.clone(),
                expected: dimensions.to_vec(),
            });
        }
        Ok((index, tensor))
    }

    /// A matrix by the name of its tensor.
    pub(super) fn matrix(
        &self,
        name: &str,
        rows: u64,
        columns: u64,
        bias: Option<Vec<f32>>,
    ) -> Result<Matrix, ModelError> {
        let (index, tensor) = self.find(name, &[columns, rows])?;
        let mut slices = Vec::new();
        for (group, contents) in self.plan.groups.iter().enumerate() {
            for (part, rows) in contents.parts.iter().enumerate() {
                if rows.tensor == index {
                    slices.push(Slice {
                        group: GroupId(group as u32),
                        part,
                        first_row: rows.rows.start as usize,
                        rows: (rows.rows.end - rows.rows.start) as usize,
                    });
                }
            }
        }
        let planned: usize = slices.iter().map(|slice| slice.rows).sum();
        assert_eq!(planned as u64, rows, "the plan holds every row of {name}");
        Ok(Matrix {
            rows: rows as usize,
            columns: columns as usize,
            kind: tensor.kind,
            slices,
            bias,
        })
    }

    /// A norm's weight, as a tensor like the activations that it scales.
    pub(super) fn vector(
        &self,
        small: &Option<Lease<'_>>,
        name: &str,
        length: u64,
    ) -> Result<Tensor, ModelError> {
        let floats = self.floats(small, name, length)?;
        Ok(Tensor::from_vec(floats, length as usize, &Device::Cpu)?)
    }

    /// The same as floats; `None` where the file has no such tensor.
    pub(super) fn optional_floats(
        &self,
        small: &Option<Lease<'_>>,
        name: &str,
        length: u64,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        match self.gguf.tensor(name) {
            Some(_) => self.floats(small, name, length).map(Some),
            None => Ok(None),
        }
    }

    fn floats(
        &self,
        small: &Option<Lease<'_>>,
        name: &str,
        length: u64,
    ) -> Result<Vec<f32>, ModelError> {
        let (index, tensor) = self.find(name, &[length])?;
        if !matches!(tensor.kind, TensorType::F32 | TensorType::F16) {
            return Err(ModelError::Kind {
                name: name.to_owned(),
                kind: tensor.kind,
            });
        }
        let missing = || ModelError::Missing(name.to_owned());
        let lease = small.as_ref().ok_or_else(missing)?;
        let parts = &self.plan.groups[lease.group().0 as usize].parts;
        let part = parts.iter().position(|part| part.tensor == index);
        let mut floats = vec![0.0; length as usize];
        let bytes = lease.part(part.ok_or_else(missing)?);
        kernels::dequantise_row(tensor.kind, bytes, &mut floats);
        Ok(floats)
    }
}

/// Matrices with one input, and where `x` times each of them goes: `[width, rows]`. What one group holds of them is
/// multiplied in one run of the pool, as the pass lends it.
pub(super) fn multiply<const N: usize>(
    pass: &mut Pass<'_>,
    pool: &ComputePool,
    x: &Activations<'_>,
    mut products: [(&Matrix, &mut [f32]); N],
) -> Result<(), StepError> {
    // How many slices of each matrix are done. A plan numbers its groups in the order in which a step uses them.
    let mut done = [0; N];
    loop {
        let remaining = products.iter().zip(done);
        let next = remaining.filter_map(|((matrix, _), done)| matrix.slices.get(done));
        let Some(group) = next.map(|slice| slice.group).min() else {
            break;
        };
        let lease = pass.lease(group)?;
        let mut together = Vec::with_capacity(N);
        for ((matrix, out), done) in products.iter_mut().zip(&mut done) {
            let next = matrix.slices.get(*done);
            let Some(slice) = next.filter(|slice| slice.group == group) else {
                continue;
            };
            *done += 1;
            together.push(Product {
                weight: MatrixView {
                    kind: matrix.kind,
                    rows: slice.rows,
                    columns: matrix.columns,
                    bytes: lease.part(slice.part),
                },
                out: OutputRows {
                    data: out,
                    stride: matrix.rows,
                    first_column: slice.first_row,
                },
            });
        }
        kernels::matmul_all(pool, x, &mut together);
    }
    for (matrix, out) in products {
        if let Some(bias) = &matrix.bias {
            for row in out.chunks_exact_mut(matrix.rows) {
                row.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
        }
    }
    Ok(())
}

/// Leases the groups of a matrix without computing: a step uses every group, or the pipeline would stand still.
pub(super) fn pass_by(pass: &mut Pass<'_>, matrix: &Matrix) -> Result<(), StepError> {
    for slice in &matrix.slices {
        pass.lease(slice.group)?;
    }
    Ok(())
}

/// Stored rows of a matrix as one f32 tensor `[rows, columns]`.
pub(super) fn dequantise(matrix: &Matrix, rows: &[u8]) -> Result<Tensor, StepError> {
    let row_bytes = matrix.kind.row_bytes(matrix.columns as u64).unwrap_or(0) as usize;
    let count = rows.len() / row_bytes.max(1);
    let mut floats = vec![0.0; count * matrix.columns];
    for (row, floats) in rows
        .chunks_exact(row_bytes)
        .zip(floats.chunks_exact_mut(matrix.columns))
    {
        kernels::dequantise_row(matrix.kind, row, floats);
    }
    Ok(Tensor::from_vec(
        floats,
        (count, matrix.columns),
        &Device::Cpu,
    )?)
}

impl From<LeaseError> for StepError {
    fn from(error: LeaseError) -> StepError {
        match error {
            LeaseError::Cancelled => StepError::Cancelled,
            LeaseError::Read { .. } => StepError::Weights(error.to_string()),
        }
    }
}
