//! Operations on activations, element by element.

use std::sync::{Mutex, PoisonError};

use super::simd::{self, Lanes};
use super::{ComputePool, InstructionSet};

/// Elements that one thread takes at once: about ten microseconds.
const CHUNK_ELEMENTS: usize = 16 << 10;

/// gate = silu(gate) * up, where silu(x) = x / (1 + e^-x): the gate of SwiGLU.
///
/// # Panics
/// When the two differ in length.
pub fn silu_mul(pool: &ComputePool, gate: &mut [f32], up: &[f32]) {
    in_chunks(pool, gate, up, silu_mul_chunk);
}

/// gate = gelu(gate) * up, where gelu(x) is x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3): the gate of
/// GeGLU (Shazeer, 2020) with the approximation of Hendrycks and Gimpel (2016). It is computed as x / (1 + e^-2u), which
/// is the same.
///
/// # Panics
/// When the two differ in length.
pub fn gelu_mul(pool: &ComputePool, gate: &mut [f32], up: &[f32]) {
    in_chunks(pool, gate, up, gelu_mul_chunk);
}

/// Every element of `x` times the factor.
pub fn scale(x: &mut [f32], factor: f32) {
    for value in x {
        *value *= factor;
    }
}

fn in_chunks(
    pool: &ComputePool,
    gate: &mut [f32],
    up: &[f32],
    function: impl Fn(InstructionSet, &mut [f32], &[f32]) + Sync,
) {
    assert_eq!(gate.len(), up.len(), "lengths of gate and up");
    let set = pool.instruction_set();
    // The lock of a chunk is taken once, by the thread that has it.
    let chunks: Vec<_> = gate
        .chunks_mut(CHUNK_ELEMENTS)
        .zip(up.chunks(CHUNK_ELEMENTS))
        .map(Mutex::new)
        .collect();
    pool.run(chunks.len(), &|index| {
        let mut chunk = chunks[index].lock().unwrap_or_else(PoisonError::into_inner);
        let (gate, up) = &mut *chunk;
        function(set, gate, up);
    });
}

/// Adds `delta`, where there is one, to the rows of `x` (the residual connection), then writes each row's RMSNorm to
/// `out`: x / sqrt(mean of x^2 + epsilon) * weight (Zhang and Sennrich, 2019).
///
/// The squares are added as a row of float weights is (see `float`): 16 partial sums, a chain of fused multiply-adds
/// each.
///
/// # Panics
/// When the lengths are not those of equally many rows of `weight.len()`.
pub fn add_rms_norm(
    pool: &ComputePool,
    x: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    epsilon: f32,
    out: &mut [f32],
) {
    let columns = weight.len();
    assert!(
        columns > 0 && x.len().is_multiple_of(columns) && x.len() == out.len(),
        "rows of {columns}: {} and {} values",
        x.len(),
        out.len()
    );
    assert!(
        delta.is_none_or(|delta| delta.len() == x.len()),
        "{} values to add to {}",
        delta.map_or(0, <[f32]>::len),
        x.len()
    );
    let set = pool.instruction_set();
    let chunk = columns * (CHUNK_ELEMENTS / columns).max(1);
    let chunks: Vec<_> = x
        .chunks_mut(chunk)
        .zip(out.chunks_mut(chunk))
        .map(Mutex::new)
        .collect();
    pool.run(chunks.len(), &|index| {
        let mut rows = chunks[index].lock().unwrap_or_else(PoisonError::into_inner);
        let (x, out) = &mut *rows;
        let delta = delta.map(|delta| &delta[index * chunk..][..x.len()]);
        add_rms_norm_rows(set, x, delta, weight, epsilon, out);
    });
}

/// The RMSNorm of each row in its place, as `add_rms_norm` computes it: of heads, and of what a half of a layer gives.
///
/// # Panics
/// When `x` is not rows of `weight.len()`.
pub fn rms_norm(pool: &ComputePool, x: &mut [f32], weight: &[f32], epsilon: f32) {
    let columns = weight.len();
    assert!(
        columns > 0 && x.len().is_multiple_of(columns),
        "rows of {columns}: {} values",
        x.len()
    );
    let set = pool.instruction_set();
    let chunk = columns * (CHUNK_ELEMENTS / columns).max(1);
    let chunks: Vec<_> = x.chunks_mut(chunk).map(Mutex::new).collect();
    pool.run(chunks.len(), &|index| {
        let mut rows = chunks[index].lock().unwrap_or_else(PoisonError::into_inner);
        rms_norm_rows(set, &mut rows, weight, epsilon);
    });
}

simd::vectorised! {
    fn add_rms_norm_rows(
        x: &mut [f32],
        delta: Option<&[f32]>,
        weight: &[f32],
        epsilon: f32,
        out: &mut [f32]
    ) => add_rms_norm_on
}

#[inline(always)]
fn add_rms_norm_on<L: Lanes>(
    x: &mut [f32],
    delta: Option<&[f32]>,
    weight: &[f32],
    epsilon: f32,
    out: &mut [f32],
) {
    let columns = weight.len();
    let rows = x
        .chunks_exact_mut(columns)
        .zip(out.chunks_exact_mut(columns));
    for (index, (x, out)) in rows.enumerate() {
        let delta = delta.map(|delta| &delta[index * columns..][..columns]);
        let squares = add_and_square::<L>(x, delta);
        let scale = 1.0 / (squares / columns as f32 + epsilon).sqrt();
        let (values, value_rest) = x.as_chunks::<16>();
        let (weights, weight_rest) = weight.as_chunks::<16>();
        let (outs, out_rest) = out.as_chunks_mut::<16>();
        for ((value, weight), out) in values.iter().zip(weights).zip(outs) {
            let normal = L::load(value).mul(L::splat(scale));
            normal.mul(L::load(weight)).store(out);
        }
        for ((value, weight), out) in value_rest.iter().zip(weight_rest).zip(out_rest) {
            *out = value * scale * weight;
        }
    }
}

simd::vectorised! {
    fn rms_norm_rows(x: &mut [f32], weight: &[f32], epsilon: f32) => rms_norm_on
}

#[inline(always)]
fn rms_norm_on<L: Lanes>(x: &mut [f32], weight: &[f32], epsilon: f32) {
    let columns = weight.len();
    for x in x.chunks_exact_mut(columns) {
        let squares = add_and_square::<L>(x, None);
        let scale = 1.0 / (squares / columns as f32 + epsilon).sqrt();
        let (values, value_rest) = x.as_chunks_mut::<16>();
        let (weights, weight_rest) = weight.as_chunks::<16>();
        for (value, weight) in values.iter_mut().zip(weights) {
            let normal = L::load(value).mul(L::splat(scale));
            normal.mul(L::load(weight)).store(value);
        }
        for (value, weight) in value_rest.iter_mut().zip(weight_rest) {
            *value = *value * scale * weight;
        }
    }
}

/// x + delta in place of x; the sum of its squares.
#[inline(always)]
fn add_and_square<L: Lanes>(x: &mut [f32], delta: Option<&[f32]>) -> f32 {
    let mut sums = L::splat(0.0);
    let (values, rest) = x.as_chunks_mut::<16>();
    let (deltas, delta_rest) = delta.unwrap_or(&[]).as_chunks::<16>();
    for (index, value) in values.iter_mut().enumerate() {
        let mut sum = L::load(value);
        if let Some(delta) = deltas.get(index) {
            sum = sum.add(L::load(delta));
            sum.store(value);
        }
        sums = sum.mul_add(sum, sums);
    }
    if !rest.is_empty() {
        for (value, delta) in rest.iter_mut().zip(delta_rest) {
            *value += delta;
        }
        let mut padded = [0.0; 16];
        padded[..rest.len()].copy_from_slice(rest);
        let last = L::load(&padded);
        sums = last.mul_add(last, sums);
    }
    sums.sum()
}

simd::vectorised! {
    fn silu_mul_chunk(gate: &mut [f32], up: &[f32]) => silu_mul_on
}

#[inline(always)]
fn silu_mul_on<L: Lanes>(gate: &mut [f32], up: &[f32]) {
    mul_on::<L, Silu>(gate, up);
}

simd::vectorised! {
    fn gelu_mul_chunk(gate: &mut [f32], up: &[f32]) => gelu_mul_on
}

#[inline(always)]
fn gelu_mul_on<L: Lanes>(gate: &mut [f32], up: &[f32]) {
    mul_on::<L, Gelu>(gate, up);
}

/// x / (1 + e^-t), where t is what an activation makes of x.
trait Activation {
    fn exponent<L: Lanes>(x: L) -> L;
}

struct Silu;
struct Gelu;

impl Activation for Silu {
    #[inline(always)]
    fn exponent<L: Lanes>(x: L) -> L {
        x
    }
}

/// 2 sqrt(2 / pi).
const GELU_LINEAR: f32 = 1.595_769_2;
/// 0.044715 times that.
const GELU_CUBIC: f32 = 0.071_354_814;

impl Activation for Gelu {
    #[inline(always)]
    fn exponent<L: Lanes>(x: L) -> L {
        let square = x.mul(x);
        x.mul(square.mul_add(L::splat(GELU_CUBIC), L::splat(GELU_LINEAR)))
    }
}

#[inline(always)]
fn mul_on<L: Lanes, A: Activation>(gate: &mut [f32], up: &[f32]) {
    let (gates, gate_rest) = gate.as_chunks_mut::<16>();
    let (ups, up_rest) = up.as_chunks::<16>();
    for (gate, up) in gates.iter_mut().zip(ups) {
        mul_lanes::<L, A>(gate, up);
    }
    if !gate_rest.is_empty() {
        let (mut gate, mut up) = ([0.0; 16], [0.0; 16]);
        gate[..gate_rest.len()].copy_from_slice(gate_rest);
        up[..up_rest.len()].copy_from_slice(up_rest);
        mul_lanes::<L, A>(&mut gate, &up);
        gate_rest.copy_from_slice(&gate[..gate_rest.len()]);
    }
}

#[inline(always)]
fn mul_lanes<L: Lanes, A: Activation>(gate: &mut [f32; 16], up: &[f32; 16]) {
    let x = L::load(gate);
    let one = L::splat(1.0);
    let exponent = A::exponent(x);
    let denominator = one.add(simd::exp(L::splat(0.0).sub(exponent)));
    x.div(denominator).mul(L::load(up)).store(gate);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::InstructionSet;
    use candle_core::{Device, Tensor};
    use candle_nn::ops::rms_norm;

    #[test]
    fn rms_norm_is_accurate_and_the_same_on_every_set_and_thread_count() {
        let columns = 1000;
        let rows = 2 * CHUNK_ELEMENTS / columns + 3;
        let values = |step: f32| -> Vec<f32> {
            let of = |i: usize| (i as f32 * step).sin() * (i % 7) as f32;
            (0..rows * columns).map(of).collect()
        };
        let (x, delta) = (values(0.37), values(0.11));
        let weight: Vec<f32> = (0..columns).map(|i| 0.5 + (i % 13) as f32 / 8.0).collect();
        let epsilon = 1e-5;
        let run = |pool: &ComputePool, delta: Option<&[f32]>| {
            let (mut x, mut out) = (x.clone(), vec![f32::NAN; x.len()]);
            add_rms_norm(pool, &mut x, delta, &weight, epsilon, &mut out);
            (x, out)
        };
        for delta in [None, Some(&*delta)] {
            let portable = ComputePool::with_instruction_set(1, InstructionSet::Portable);
            let (sum, out) = run(&portable, delta);
            for (r, row) in sum.chunks_exact(columns).enumerate() {
                let at = r * columns;
                let squares: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
                let root = (squares / columns as f64 + f64::from(epsilon)).sqrt();
                for i in 0..columns {
                    assert_eq!(row[i], x[at + i] + delta.map_or(0.0, |delta| delta[at + i]));
                    let expected = f64::from(row[i]) / root * f64::from(weight[i]);
                    let error = (f64::from(out[at + i]) - expected).abs();
                    assert!(error <= 1e-6 * expected.abs(), "row {r}, column {i}");
                }
            }
            for set in InstructionSet::ALL
                .into_iter()
                .filter(|set| set.is_available())
            {
                for threads in [1, 3] {
                    let ours = run(&ComputePool::with_instruction_set(threads, set), delta);
                    assert_eq!(ours, (sum.clone(), out.clone()), "{set}, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn rms_norm_agrees_with_candle() {
        let (rows, columns, epsilon) = (5, 576, 1e-5);
        let values = |step: f32, count: usize| -> Vec<f32> {
            (0..count).map(|i| (i as f32 * step).cos() * 3.0).collect()
        };
        let (x, weight) = (values(0.7, rows * columns), values(0.3, columns));
        let tensor = |values: &[f32], shape: &[usize]| {
            Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
        };
        let theirs = rms_norm(
            &tensor(&x, &[rows, columns]),
            &tensor(&weight, &[columns]),
            epsilon,
        )
        .and_then(|theirs| theirs.flatten_all()?.to_vec1::<f32>())
        .unwrap();
        let (mut sum, mut ours) = (x, vec![0.0; rows * columns]);
        add_rms_norm(
            &ComputePool::new(1),
            &mut sum,
            None,
            &weight,
            epsilon,
            &mut ours,
        );
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert!(
                (ours - theirs).abs() <= 1e-6 * theirs.abs(),
                "{ours}, candle {theirs}"
            );
        }
    }

    #[test]
    fn the_norm_in_place_has_the_bits_of_the_norm_beside() {
        for columns in [5, 16, 256, 1000] {
            let rows = 2 * CHUNK_ELEMENTS / columns + 3;
            let x: Vec<f32> = (0..rows * columns)
                .map(|i| (i as f32 * 0.37).sin() * 5.0)
                .collect();
            let weight: Vec<f32> = (0..columns).map(|i| 0.5 + (i % 13) as f32 / 8.0).collect();
            let mut beside = vec![0.0; x.len()];
            let pool = ComputePool::new(1);
            add_rms_norm(&pool, &mut x.clone(), None, &weight, 1e-6, &mut beside);
            for set in InstructionSet::ALL
                .into_iter()
                .filter(|set| set.is_available())
            {
                for threads in [1, 3] {
                    let pool = ComputePool::with_instruction_set(threads, set);
                    let mut in_place = x.clone();
                    super::rms_norm(&pool, &mut in_place, &weight, 1e-6);
                    assert_eq!(in_place, beside, "{columns} columns, {set}");
                }
            }
        }
    }

    type Gate = fn(&ComputePool, &mut [f32], &[f32]);

    #[test]
    fn silu_mul_is_accurate_and_the_same_on_every_set_and_thread_count() {
        check_gate(silu_mul, 1e-6, |x| x / (1.0 + (-x).exp()));
    }

    #[test]
    fn gelu_mul_is_accurate_and_the_same_on_every_set_and_thread_count() {
        // An exponent of size t is good to about t * 2^-23, and |t| is below 90 where e^-t counts.
        check_gate(gelu_mul, 2e-5, |x| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            // 1 + tanh u, without cancellation where it is small.
            x / (1.0 + (-2.0 * u).exp())
        });
        // The form with the tangent, where nothing cancels.
        for x in [-1.0f32, -0.1, 0.0, 0.3, 1.0, 2.5] {
            let mut ours = [x];
            gelu_mul(&ComputePool::new(1), &mut ours, &[1.0]);
            let x = f64::from(x);
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            let expected = 0.5 * x * (1.0 + u.tanh());
            assert!((f64::from(ours[0]) - expected).abs() < 1e-6, "{x}");
        }
    }

    #[track_caller]
    fn check_gate(function: Gate, error: f64, exact: fn(f64) -> f64) {
        let count = 3 * CHUNK_ELEMENTS + 5;
        let gate: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37).sin() * 20.0).collect();
        let up: Vec<f32> = (0..count).map(|i| (i as f32 * 0.11).cos()).collect();
        let mut reference = gate.clone();
        let portable = ComputePool::with_instruction_set(1, InstructionSet::Portable);
        function(&portable, &mut reference, &up);
        for ((ours, gate), up) in reference.iter().zip(&gate).zip(&up) {
            let expected = exact(f64::from(*gate)) * f64::from(*up);
            assert!(
                (f64::from(*ours) - expected).abs() <= error * expected.abs() + 1e-12,
                "{gate}: {ours} and not {expected}"
            );
        }
        for set in InstructionSet::ALL
            .into_iter()
            .filter(|set| set.is_available())
        {
            for threads in [1, 3] {
                let mut ours = gate.clone();
                function(
                    &ComputePool::with_instruction_set(threads, set),
                    &mut ours,
                    &up,
                );
                assert_eq!(ours, reference, "{set}, {threads} threads");
            }
        }
    }
}
