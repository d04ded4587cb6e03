//! What the forward passes are made of: matrices whose rows may rest in several groups, and vectors.

use super::StepError;
use super::step::{Compute, Values};
use crate::gguf::{Gguf, TensorInfo, TensorType};
use crate::kernels;
use crate::placement::{GroupId, Plan};
use crate::weights::{Lease, LeaseError};

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
    #[error(
        "tensor `{name}` holds {value}, and frequencies are divided by finite values above zero"
    )]
    RopeFactor { name: String, value: f32 },
    #[error("{0}")]
    Compute(#[from] StepError),
}

/// Rows of a matrix that rest in one group.
#[derive(Clone, Debug)]
pub(super) struct Slice {
    pub(super) group: GroupId,
    pub(super) part: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

/// A weight matrix `[rows, columns]`, and the groups that hold its rows, in order.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) kind: TensorType,
    pub(super) slices: Vec<Slice>,
    /// `[rows]`
    pub(super) bias: Option<Values>,
}

/// Looks tensors up by name, checks their shapes, and brings the small ones to where steps are computed.
pub(super) struct Tensors<'a> {
    gguf: &'a Gguf,
    plan: &'a Plan,
    small: Option<Lease<'a>>,
    compute: &'a mut Compute,
}

impl<'a> Tensors<'a> {
    pub(super) fn new(
        gguf: &'a Gguf,
        plan: &'a Plan,
        small: Option<Lease<'a>>,
        compute: &'a mut Compute,
    ) -> Tensors<'a> {
        Tensors {
            gguf,
            plan,
            small,
            compute,
        }
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

    /// A matrix by the name of its tensor, without a bias.
    pub(super) fn matrix(
        &mut self,
        name: &str,
        rows: u64,
        columns: u64,
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
        self.compute.expect_input(columns as usize);
        let planned: usize = slices.iter().map(|slice| slice.rows).sum();
        assert_eq!(planned as u64, rows, "the plan holds every row of {name}");
        Ok(Matrix {
            rows: rows as usize,
            columns: columns as usize,
            kind: tensor.kind,
            slices,
            bias: None,
        })
    }

    /// A layer's matrix `NAME.weight` with the bias `NAME.bias`, if the file has one.
    pub(super) fn linear(
        &mut self,
        name: &str,
        rows: u64,
        columns: u64,
    ) -> Result<Matrix, ModelError> {
        let mut matrix = self.matrix(&format!("{name}.weight"), rows, columns)?;
        if let Some(bias) = self.optional_floats(&format!("{name}.bias"), rows)? {
            matrix.bias = Some(self.compute.vector(bias)?);
        }
        Ok(matrix)
    }

    /// A norm's weight.
    pub(super) fn vector(&mut self, name: &str, length: u64) -> Result<Values, ModelError> {
        let floats = self.floats(name, length)?;
        Ok(self.compute.vector(floats)?)
    }

    /// A vector as floats of the host; `None` where the file has no such tensor.
    pub(super) fn optional_floats(
        &self,
        name: &str,
        length: u64,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        match self.gguf.tensor(name) {
            Some(_) => self.floats(name, length).map(Some),
            None => Ok(None),
        }
    }

    fn floats(&self, name: &str, length: u64) -> Result<Vec<f32>, ModelError> {
        let (index, tensor) = self.find(name, &[length])?;
        if !matches!(tensor.kind, TensorType::F32 | TensorType::F16) {
            return Err(ModelError::Kind {
                name: name.to_owned(),
                kind: tensor.kind,
            });
        }
        let missing = || ModelError::Missing(name.to_owned());
        let lease = self.small.as_ref().ok_or_else(missing)?;
        let parts = &self.plan.groups[lease.group().0 as usize].parts;
        let part = parts.iter().position(|part| part.tensor == index);
        let mut floats = vec![0.0; length as usize];
        let bytes = lease.part(part.ok_or_else(missing)?);
        kernels::dequantise_row(tensor.kind, bytes, &mut floats);
        Ok(floats)
    }
}

/// A walk through matrices with one input, group by group: a plan numbers its groups in the order in which a step uses
/// them, and what one group holds of the matrices is multiplied while it is leased.
pub(super) struct Walk<'m, const N: usize> {
    matrices: [&'m Matrix; N],
    /// How many slices of each matrix are done.
    done: [usize; N],
}

impl<'m, const N: usize> Walk<'m, N> {
    pub(super) fn new(matrices: [&'m Matrix; N]) -> Walk<'m, N> {
        Walk {
            matrices,
            done: [0; N],
        }
    }

    /// The next group and what it holds of each matrix; `None` when all is done.
    pub(super) fn next(&mut self) -> Option<(GroupId, [Option<&'m Slice>; N])> {
        let remaining = self.matrices.iter().zip(self.done);
        let next = remaining.filter_map(|(matrix, done)| matrix.slices.get(done));
        let group = next.map(|slice| slice.group).min()?;
        let slices = std::array::from_fn(|index| {
            let next = self.matrices[index].slices.get(self.done[index]);
            let slice = next.filter(|slice| slice.group == group)?;
            self.done[index] += 1;
            Some(slice)
        });
        Some((group, slices))
    }
}

impl From<LeaseError> for StepError {
    fn from(error: LeaseError) -> StepError {
        match error {
            LeaseError::Cancelled => StepError::Cancelled,
            LeaseError::Read { .. } => StepError::Weights(error.to_string()),
        }
    }
}
