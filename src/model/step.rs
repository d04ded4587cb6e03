//! One step, as a forward pass writes it down: values, and what is done with them. Who computes it is chosen when a
//! model is loaded: the host, with kernels over borrowed slices, or a CUDA device, with kernels over addresses.
//!
//! Shapes: `width` tokens in a step; values are f32, `[rows, columns]`, one row a token unless said.

use super::cuda::{CudaCompute, DeviceValues};
use super::host::HostCompute;
use super::matrix::Matrix;
use super::{Batch, Run, StepError};
use crate::kernels::{RopeAngles, RopePairs, RopeTable};
use crate::kv_cache::KvStore;
use crate::memory::{Phase, StepScope};
use crate::trace::StepSpan;
use crate::weights::{Pass, Weights};
use candle_core::Tensor;

/// Floats where steps are computed.
#[derive(Clone, Debug)]
pub(super) enum Values {
    Host(Tensor),
    Device(DeviceValues),
}

impl Values {
    /// # Panics
    /// Values of one executor are not mixed with those of another.
    pub(super) fn host(&self) -> &Tensor {
        match self {
            Values::Host(tensor) => tensor,
            Values::Device(_) => panic!("{self:?} where the host computes"),
        }
    }

    /// # Panics
    /// As `host`.
    pub(super) fn device(&self) -> &DeviceValues {
        match self {
            Values::Device(values) => values,
            Values::Host(_) => panic!("{self:?} where the device computes"),
        }
    }
}

/// Who computes the steps of a model.
pub(super) enum Compute {
    Host(HostCompute),
    Cuda(Box<CudaCompute>),
}

impl Compute {
    /// Some product's input will have so many columns.
    pub(super) fn expect_input(&mut self, columns: usize) {
        match self {
            Compute::Host(_) => {}
            Compute::Cuda(cuda) => cuda.expect_input(columns),
        }
    }

    /// A vector that all steps read.
    pub(super) fn vector(&mut self, floats: Vec<f32>) -> Result<Values, StepError> {
        match self {
            Compute::Host(host) => host.vector(floats),
            Compute::Cuda(cuda) => cuda.vector(&floats),
        }
    }
}

/// A step under way.
pub(super) struct Step<'m> {
    compute: &'m mut Compute,
    pass: Pass<'m>,
    batch: &'m Batch<'m>,
    /// Of each rope table.
    angles: Vec<RopeAngles>,
    // Dropped last, when the pass is over.
    span: StepSpan,
    phase: StepScope,
}

/// A layer's part of the KV cache.
pub(super) struct LayerCache<'k> {
    pub(super) kv: &'k mut KvStore,
    pub(super) layer: usize,
}

impl<'m> Step<'m> {
    pub(super) fn begin(
        compute: &'m mut Compute,
        weights: &'m Weights,
        batch: &'m Batch<'m>,
        tables: &[RopeTable],
        cancelled: &'m dyn Fn() -> bool,
    ) -> Result<Step<'m>, StepError> {
        let phase = Phase::begin_step(batch.width(), batch.has_prompt());
        let span = weights.trace().step(batch.width());
        let positions = positions(batch);
        let angles: Vec<RopeAngles> = tables
            .iter()
            .map(|table| table.angles(&positions))
            .collect();
        // Before the device is asked whether all went well since the last step: where not, the pass is given up, and what
        // was fetched is fetched again.
        let pass = weights.pass(batch.width(), cancelled);
        if let Compute::Cuda(cuda) = &mut *compute {
            cuda.begin(batch, &angles, &last_tokens(batch))?;
        }
        Ok(Step {
            compute,
            pass,
            batch,
            angles,
            span,
            phase,
        })
    }

    pub(super) fn width(&self) -> usize {
        self.batch.width()
    }

    /// Room for `[rows, columns]`, of which none is to be read before it is written.
    pub(super) fn values(&mut self, rows: usize, columns: usize) -> Result<Values, StepError> {
        match self.compute {
            Compute::Host(_) => HostCompute::values(rows, columns),
            Compute::Cuda(cuda) => cuda.values(rows, columns),
        }
    }

    /// Token ids to vectors: rows of the embedding.
    pub(super) fn embed(&mut self, embedding: &Matrix) -> Result<Values, StepError> {
        let tokens: Vec<u32> = self
            .batch
            .runs
            .iter()
            .flat_map(|run| run.tokens)
            .copied()
            .collect();
        let rows = self.pass.gather_rows(&tokens)?;
        match self.compute {
            Compute::Host(_) => HostCompute::dequantise(embedding, &rows.bytes),
            Compute::Cuda(cuda) => cuda.dequantise(embedding, &rows),
        }
    }

    /// The residual connection, then RMSNorm: x += delta, where there is one, and h = the norm of x.
    pub(super) fn add_and_normalise(
        &mut self,
        x: &Values,
        delta: Option<&Values>,
        norm: &Norm<'_>,
        h: &Values,
    ) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(host) => host.add_and_normalise(x, delta, norm, h),
            Compute::Cuda(cuda) => cuda.add_and_normalise(x, delta, norm, h),
        }
    }

    /// RMSNorm of the rows of x in their place.
    pub(super) fn normalise(&mut self, x: &Values, norm: &Norm<'_>) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(host) => host.normalise(x, norm),
            Compute::Cuda(cuda) => cuda.normalise(x, norm),
        }
    }

    /// `x` times each matrix, to the values beside it: `[rows of x, rows of the matrix]`, bias included.
    pub(super) fn multiply<const N: usize>(
        &mut self,
        x: &Input<'_>,
        products: [(&Matrix, &Values); N],
    ) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(host) => host.multiply(&mut self.pass, x, products),
            Compute::Cuda(cuda) => cuda.multiply(&mut self.pass, x, products),
        }
    }

    /// Turns each head, `[width, heads, length]`, by the angles of its token's position.
    pub(super) fn rope(&mut self, x: &Values, rotation: &Rotation) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(host) => host.rope(x, &self.angles[rotation.table], rotation),
            Compute::Cuda(cuda) => cuda.rope(x, rotation),
        }
    }

    /// Writes keys and values of the step's tokens to their pages: attention reads them from there, at the precision of
    /// the pages, like all that came before.
    pub(super) fn store(
        &mut self,
        cache: &mut LayerCache<'_>,
        key: &Values,
        value: &Values,
    ) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(_) => HostCompute::store(self.batch, cache, key, value),
            Compute::Cuda(cuda) => cuda.store(cache, key, value),
        }
    }

    /// Attention of every token of the step to what is in its sequence's pages up to itself: `[width, heads * value
    /// length]`. Products of queries and keys are scaled by `scale`.
    pub(super) fn attend(
        &mut self,
        cache: &mut LayerCache<'_>,
        scale: f32,
        query: &Values,
        out: &Values,
    ) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(host) => host.attend(self.batch, cache, scale, (query, out)),
            Compute::Cuda(cuda) => cuda.attend(cache, scale, (query, out)),
        }
    }

    /// x *= factor, over the first `count`.
    pub(super) fn scale(&mut self, x: &Values, factor: f32, count: usize) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(_) => HostCompute::scale(x, factor, count),
            Compute::Cuda(cuda) => cuda.scale(x, factor, count),
        }
    }

    /// gate = gelu(gate) * up, over the first `count` of each.
    pub(super) fn gelu_mul(
        &mut self,
        gate: &Values,
        up: &Values,
        count: usize,
    ) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(host) => host.gelu_mul(gate, up, count),
            Compute::Cuda(cuda) => cuda.gelu_mul(gate, up, count),
        }
    }

    /// gate = silu(gate) * up, over the first `count` of each.
    pub(super) fn silu_mul(
        &mut self,
        gate: &Values,
        up: &Values,
        count: usize,
    ) -> Result<(), StepError> {
        match self.compute {
            Compute::Host(host) => host.silu_mul(gate, up, count),
            Compute::Cuda(cuda) => cuda.silu_mul(gate, up, count),
        }
    }

    /// The rows of `x`, `[width, columns]`, of the tokens whose successor is wanted.
    pub(super) fn last_rows(&mut self, x: &Values, columns: usize) -> Result<Values, StepError> {
        match self.compute {
            Compute::Host(_) => HostCompute::select(x, columns, &last_tokens(self.batch)),
            Compute::Cuda(cuda) => cuda.wanted_rows(x, columns),
        }
    }

    /// How many tokens' successors are wanted.
    pub(super) fn wanted(&self) -> usize {
        self.batch
            .runs
            .iter()
            .filter(|run| run.wants_logits)
            .count()
    }

    /// The product of the head with the normalised rows of the wanted tokens, a row each, on the host.
    pub(super) fn logits(
        &mut self,
        head: &Matrix,
        x: &Input<'_>,
    ) -> Result<Vec<Vec<f32>>, StepError> {
        match self.compute {
            Compute::Host(host) => host.logits(&mut self.pass, head, x),
            Compute::Cuda(cuda) => cuda.logits(&mut self.pass, head, x),
        }
    }

    /// Leases the groups of a matrix without computing: a step uses every group, or the pipeline would stand still.
    pub(super) fn pass_by(&mut self, matrix: &Matrix) -> Result<(), StepError> {
        for slice in &matrix.slices {
            self.pass.lease(slice.group)?;
        }
        Ok(())
    }

    /// The step used every group. Waits for a device, so that what it could not do fails this step and no other.
    pub(super) fn finish(mut self) -> Result<(), StepError> {
        self.pass.give_back();
        if let Compute::Cuda(cuda) = self.compute {
            cuda.synchronise()?;
        }
        self.pass.finish(depth(self.batch));
        self.span.succeed();
        self.phase.succeed();
        Ok(())
    }
}

/// How many positions the sequences of a step hold before it: the mean.
fn depth(batch: &Batch<'_>) -> u32 {
    let positions = batch.runs.iter().map(|run| u64::from(run.position));
    let mean = positions.sum::<u64>() / (batch.runs.len() as u64).max(1);
    u32::try_from(mean).unwrap_or(u32::MAX)
}

/// How heads are turned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rotation {
    /// Which of the step's rope tables has the angles.
    pub(super) table: usize,
    pub(super) pairs: RopePairs,
    pub(super) heads: usize,
    /// Elements of a head.
    pub(super) length: usize,
}

/// What products read: `[rows, columns]`.
pub(super) struct Input<'v> {
    pub(super) values: &'v Values,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// RMSNorm's weight, and what keeps its root from 0.
pub(super) struct Norm<'v> {
    pub(super) weight: &'v Values,
    pub(super) epsilon: f32,
    /// Rows that are normalised.
    pub(super) rows: usize,
    pub(super) columns: usize,
}

/// The position of every token of the step.
fn positions(batch: &Batch<'_>) -> Vec<u32> {
    let of_run = |run: &Run<'_>| run.position..run.position + run.tokens.len() as u32;
    batch.runs.iter().flat_map(of_run).collect()
}

/// Where in the step the last token of each run is that wants logits.
fn last_tokens(batch: &Batch<'_>) -> Vec<u32> {
    let mut end = 0;
    let mut wanted = Vec::new();
    for run in &batch.runs {
        end += run.tokens.len() as u32;
        if run.wants_logits {
            wanted.push(end - 1);
        }
    }
    wanted
}
