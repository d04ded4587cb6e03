//! Norm, gate, biases and rotary positions: `elementwise.cu`.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use super::module::{Grid, Kernel, Module, argument, source};
use super::{CudaKernels, DeviceAddress, KernelError, count};
use crate::kernels::RopePairs;

/// Threads that share a row; as in `elementwise.cu`.
const NORM_THREADS: u32 = 256;

/// The residual connection and RMSNorm, as `kernels::add_rms_norm`. All f32.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNorm {
    /// `[tokens, columns]`.
    pub x: DeviceAddress,
    /// `[tokens, columns]`, added to `x` first.
    pub delta: Option<DeviceAddress>,
    /// `[columns]`.
    pub weight: DeviceAddress,
    /// `[tokens, columns]`; `x` itself for a norm in its place (`kernels::rms_norm`).
    pub output: DeviceAddress,
    pub columns: usize,
    pub tokens: usize,
    pub epsilon: f32,
}

/// gate = activation(gate) * up, as `kernels::silu_mul` and `kernels::gelu_mul`.
#[derive(Clone, Copy, Debug)]
pub struct GateMul {
    /// f32 `[count]`.
    pub gate: DeviceAddress,
    /// f32 `[count]`.
    pub up: DeviceAddress,
    pub count: usize,
}

/// x *= factor, as `kernels::scale`.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// f32 `[count]`.
    pub x: DeviceAddress,
    pub factor: f32,
    pub count: usize,
}

/// y\[token\]\[i\] += bias\[i\].
#[derive(Clone, Copy, Debug)]
pub struct AddBias {
    /// f32 `[tokens, columns]`.
    pub y: DeviceAddress,
    /// f32 `[columns]`.
    pub bias: DeviceAddress,
    pub columns: usize,
    pub tokens: usize,
}

/// Rotary positions, as `kernels::rope`.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// f32 `[tokens, heads, head_length]`.
    pub x: DeviceAddress,
    /// f32 `[tokens, rotated_pairs, 2]`: `RopeAngles::rotations`.
    pub rotations: DeviceAddress,
    pub tokens: usize,
    pub heads: usize,
    pub head_length: usize,
    /// Pairs of each head that are rotated, from its start.
    pub rotated_pairs: usize,
    pub pairs: RopePairs,
}

pub(super) struct Kernels {
    add_rms_norm: Kernel,
    silu_mul: Kernel,
    gelu_mul: Kernel,
    scale: Kernel,
    add_bias: Kernel,
    rope: Kernel,
}

impl Kernels {
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Kernels, KernelError> {
        let module = Module::load(context, &source!("elementwise"))?;
        Ok(Kernels {
            add_rms_norm: module.kernel("add_rms_norm".to_owned())?,
            silu_mul: module.kernel("silu_mul".to_owned())?,
            gelu_mul: module.kernel("gelu_mul".to_owned())?,
            scale: module.kernel("scale".to_owned())?,
            add_bias: module.kernel("add_bias".to_owned())?,
            rope: module.kernel("rope".to_owned())?,
        })
    }
}

impl CudaKernels {
    /// x += delta, then output = the norm of x.
    ///
    /// # Panics
    /// When `x`, to which something is added, would be overwritten by its norm.
    pub fn add_rms_norm(&self, stream: &CudaStream, norm: &AddRmsNorm) -> Result<(), KernelError> {
        assert!(norm.x != norm.output || norm.delta.is_none(), "{norm:?}");
        let delta = norm.delta.unwrap_or(DeviceAddress::NULL);
        let columns = count(norm.columns);
        let grid = Grid {
            x: count(norm.tokens),
            y: 1,
            z: 1,
            threads: NORM_THREADS,
        };
        // SAFETY: (x, delta or null, weight, out, columns, epsilon), as the kernel declares them; whoever made the
        // addresses answers for `tokens` rows at each, and for one of weights.
        unsafe {
            self.elementwise.add_rms_norm.launch(
                stream,
                grid,
                &mut [
                    argument(&norm.x),
                    argument(&delta),
                    argument(&norm.weight),
                    argument(&norm.output),
                    argument(&columns),
                    argument(&norm.epsilon),
                ],
            )
        }
    }

    pub fn silu_mul(&self, stream: &CudaStream, gate: &GateMul) -> Result<(), KernelError> {
        gate_mul(&self.elementwise.silu_mul, stream, gate)
    }

    pub fn gelu_mul(&self, stream: &CudaStream, gate: &GateMul) -> Result<(), KernelError> {
        gate_mul(&self.elementwise.gelu_mul, stream, gate)
    }

    pub fn scale(&self, stream: &CudaStream, scale: &Scale) -> Result<(), KernelError> {
        let count = scale.count as u64;
        // SAFETY: (x, factor, count), as the kernel declares them; whoever made the address answers for `count` floats at it.
        unsafe {
            self.elementwise.scale.launch(
                stream,
                Grid::of_elements(count, 1),
                &mut [
                    argument(&scale.x),
                    argument(&scale.factor),
                    argument(&count),
                ],
            )
        }
    }

    pub fn add_bias(&self, stream: &CudaStream, bias: &AddBias) -> Result<(), KernelError> {
        let columns = count(bias.columns);
        // SAFETY: (y, bias, columns), as the kernel declares them; whoever made the addresses answers for `tokens` rows of
        // y and one of biases.
        unsafe {
            self.elementwise.add_bias.launch(
                stream,
                Grid::of_elements(u64::from(columns), count(bias.tokens)),
                &mut [argument(&bias.y), argument(&bias.bias), argument(&columns)],
            )
        }
    }

    /// Rotates every head in place; elements past the rotated pairs stay.
    ///
    /// # Panics
    /// When more elements are rotated than a head has.
    pub fn rope(&self, stream: &CudaStream, rope: &Rope) -> Result<(), KernelError> {
        assert!(2 * rope.rotated_pairs <= rope.head_length, "{rope:?}");
        let (heads, head_length) = (count(rope.heads), count(rope.head_length));
        let pairs = count(rope.rotated_pairs);
        let halves = u32::from(rope.pairs == RopePairs::Halves);
        let grid = Grid::of_elements(u64::from(heads) * u64::from(pairs), count(rope.tokens));
        // SAFETY: (x, rotations, heads, head_length, pairs, halves), as the kernel declares them; whoever made the
        // addresses answers for `tokens` rows at each.
        unsafe {
            self.elementwise.rope.launch(
                stream,
                grid,
                &mut [
                    argument(&rope.x),
                    argument(&rope.rotations),
                    argument(&heads),
                    argument(&head_length),
                    argument(&pairs),
                    argument(&halves),
                ],
            )
        }
    }
}

fn gate_mul(kernel: &Kernel, stream: &CudaStream, gate: &GateMul) -> Result<(), KernelError> {
    let count = gate.count as u64;
    // SAFETY: (gate, up, count), as both kernels declare them; whoever made the addresses answers for `count` floats at
    // each.
    unsafe {
        kernel.launch(
            stream,
            Grid::of_elements(count, 1),
            &mut [argument(&gate.gate), argument(&gate.up), argument(&count)],
        )
    }
}
