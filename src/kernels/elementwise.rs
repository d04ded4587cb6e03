//! Operations on activations, element by element.

use std::sync::Mutex;

use super::ComputePool;
use super::simd::{self, Lanes};

/// Elements that one thread takes at once: about ten microseconds.
const CHUNK_ELEMENTS: usize = 16 << 10;

/// gate = silu(gate) * up, where silu(x) = x / (1 + e^-x): the gate of SwiGLU.
///
/// # Panics
/// When the two differ in length.
pub fn silu_mul(pool: &ComputePool, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "lengths of gate and up");
    let set = pool.instruction_set();
    // The lock of a chunk is taken once, by the thread that has it.
    let chunks: Vec<_> = gate
        .chunks_mut(CHUNK_ELEMENTS)
        .zip(up.chunks(CHUNK_ELEMENTS))
        .map(Mutex::new)
        .collect();
    pool.run(chunks.len(), &|index| {
        if let Ok(mut chunk) = chunks[index].lock() {
            let (gate, up) = &mut *chunk;
            silu_mul_chunk(set, gate, up);
        }
    });
}

simd::vectorised! {
    fn silu_mul_chunk(gate: &mut [f32], up: &[f32]) => silu_mul_on
}

#[inline(always)]
fn silu_mul_on<L: Lanes>(gate: &mut [f32], up: &[f32]) {
    let (gates, gate_rest) = gate.as_chunks_mut::<16>();
    let (ups, up_rest) = up.as_chunks::<16>();
    for (gate, up) in gates.iter_mut().zip(ups) {
        silu_mul_lanes::<L>(gate, up);
    }
    if !gate_rest.is_empty() {
        let (mut gate, mut up) = ([0.0; 16], [0.0; 16]);
        gate[..gate_rest.len()].copy_from_slice(gate_rest);
        up[..up_rest.len()].copy_from_slice(up_rest);
        silu_mul_lanes::<L>(&mut gate, &up);
        gate_rest.copy_from_slice(&gate[..gate_rest.len()]);
    }
}

#[inline(always)]
fn silu_mul_lanes<L: Lanes>(gate: &mut [f32; 16], up: &[f32; 16]) {
    let x = L::load(gate);
    let one = L::splat(1.0);
    let denominator = one.add(simd::exp(L::splat(0.0).sub(x)));
    x.div(denominator).mul(L::load(up)).store(gate);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::InstructionSet;

    #[test]
    fn silu_mul_is_accurate_and_the_same_on_every_set_and_thread_count() {
        let count = 3 * CHUNK_ELEMENTS + 5;
        let gate: Vec<f32> = (0..count).map(|i| (i as f32 * 0.37).sin() * 20.0).collect();
        let up: Vec<f32> = (0..count).map(|i| (i as f32 * 0.11).cos()).collect();
        let mut reference = gate.clone();
        let portable = ComputePool::with_instruction_set(1, InstructionSet::Portable);
        silu_mul(&portable, &mut reference, &up);
        for ((ours, gate), up) in reference.iter().zip(&gate).zip(&up) {
            let gate = f64::from(*gate);
            let expected = gate / (1.0 + (-gate).exp()) * f64::from(*up);
            assert!((f64::from(*ours) - expected).abs() <= 1e-6 * expected.abs() + 1e-12);
        }
        for set in InstructionSet::ALL
            .into_iter()
            .filter(|set| set.is_available())
        {
            for threads in [1, 3] {
                let mut ours = gate.clone();
                silu_mul(
                    &ComputePool::with_instruction_set(threads, set),
                    &mut ours,
                    &up,
                );
                assert_eq!(ours, reference, "{set}, {threads} threads");
            }
        }
    }
}
