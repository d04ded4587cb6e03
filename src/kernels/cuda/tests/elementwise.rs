use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::gguf::RopeScaling;
use crate::kernels::cuda::{AddBias, AddRmsNorm, GateMul, Rope, Scale};
use crate::kernels::{
    ComputePool, RopePairs, RopeSettings, RopeTable, add_rms_norm, gelu_mul, rms_norm, rope, scale,
    silu_mul,
};

const WIDTHS: [usize; 3] = [1, 3, 17];

#[test]
fn norms_have_the_bits_of_the_host() {
    let Some(device) = device() else { return };
    let pool = ComputePool::new(1);
    let mut rng = ChaCha8Rng::seed_from_u64(21);
    // Less than a vector of sixteen, no whole number of them, and more than a block has at hand at once.
    for columns in [5, 64, 1000, 2048, 4500] {
        for width in WIDTHS {
            for style in STYLES {
                let count = width * columns;
                let weight = inputs(&mut rng, columns, Style::Plain);
                let x = inputs(&mut rng, count, style);
                let added = inputs(&mut rng, count, style);
                for delta in [None, Some(&added)] {
                    let x_there = device.upload(&x);
                    let delta_there = delta.map(|delta| device.upload(delta));
                    let weight_there = device.upload(&weight);
                    let out = device.unwritten(count);
                    let launch = AddRmsNorm {
                        x: x_there.address(),
                        delta: delta_there.as_ref().map(|delta| delta.address()),
                        weight: weight_there.address(),
                        output: out.address(),
                        columns,
                        tokens: width,
                        epsilon: 1e-5,
                    };
                    device
                        .kernels
                        .add_rms_norm(&device.stream, &launch)
                        .expect("a launch");
                    let (mut sum, mut expected) = (x.clone(), vec![0.0; count]);
                    let delta = delta.map(Vec::as_slice);
                    add_rms_norm(&pool, &mut sum, delta, &weight, 1e-5, &mut expected);
                    let what = format!("{width} x {columns}, {style:?}");
                    assert_same_bits(&x_there.floats(), &sum, &what);
                    assert_same_bits(&out.floats(), &expected, &what);
                }
                let in_place = device.upload(&x);
                let weight_there = device.upload(&weight);
                let launch = AddRmsNorm {
                    x: in_place.address(),
                    delta: None,
                    weight: weight_there.address(),
                    output: in_place.address(),
                    columns,
                    tokens: width,
                    epsilon: 1e-5,
                };
                device
                    .kernels
                    .add_rms_norm(&device.stream, &launch)
                    .expect("a launch");
                let mut expected = x.clone();
                rms_norm(&pool, &mut expected, &weight, 1e-5);
                let what = format!("{width} x {columns} in place, {style:?}");
                assert_same_bits(&in_place.floats(), &expected, &what);
            }
        }
    }
}

#[test]
fn gates_have_the_bits_of_the_host() {
    let Some(device) = device() else { return };
    let pool = ComputePool::new(1);
    let mut rng = ChaCha8Rng::seed_from_u64(22);
    let count = 10_000;
    let mut gate: Vec<f32> = (0..count)
        .map(|_| rng.random_range(-100.0f32..100.0))
        .collect();
    let edges = [
        0.0,
        -0.0,
        87.3,
        -87.3,
        88.0,
        -88.0,
        88.1,
        -88.1,
        1e-44,
        1e30,
        -1e30,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    gate[..edges.len()].copy_from_slice(&edges);
    let up = inputs(&mut rng, count, Style::Extreme);
    let up_there = device.upload(&up);
    let gate_there = device.upload(&gate);
    let launch = GateMul {
        gate: gate_there.address(),
        up: up_there.address(),
        count,
    };
    device
        .kernels
        .silu_mul(&device.stream, &launch)
        .expect("a launch");
    let mut expected = gate.clone();
    silu_mul(&pool, &mut expected, &up);
    assert_same_bits(&gate_there.floats(), &expected, "silu");
    let gate_there = device.upload(&gate);
    let launch = GateMul {
        gate: gate_there.address(),
        ..launch
    };
    device
        .kernels
        .gelu_mul(&device.stream, &launch)
        .expect("a launch");
    let mut expected = gate.clone();
    gelu_mul(&pool, &mut expected, &up);
    assert_same_bits(&gate_there.floats(), &expected, "gelu");
    let gate_there = device.upload(&gate);
    let launch = Scale {
        x: gate_there.address(),
        factor: 25.298_221,
        count,
    };
    device
        .kernels
        .scale(&device.stream, &launch)
        .expect("a launch");
    scale(&mut gate, 25.298_221);
    assert_same_bits(&gate_there.floats(), &gate, "scaled");
}

#[test]
fn biases_are_added_to_every_row() {
    let Some(device) = device() else { return };
    let mut rng = ChaCha8Rng::seed_from_u64(23);
    for width in WIDTHS {
        let columns = 333;
        let mut y = inputs(&mut rng, width * columns, Style::Plain);
        let bias = inputs(&mut rng, columns, Style::Plain);
        let (y_there, bias_there) = (device.upload(&y), device.upload(&bias));
        let launch = AddBias {
            y: y_there.address(),
            bias: bias_there.address(),
            columns,
            tokens: width,
        };
        device
            .kernels
            .add_bias(&device.stream, &launch)
            .expect("a launch");
        for row in y.chunks_exact_mut(columns) {
            row.iter_mut().zip(&bias).for_each(|(y, bias)| *y += bias);
        }
        assert_same_bits(&y_there.floats(), &y, "biased rows");
    }
}

#[test]
fn rotations_have_the_bits_of_the_host() {
    let Some(device) = device() else { return };
    let pool = ComputePool::new(1);
    let mut rng = ChaCha8Rng::seed_from_u64(24);
    for pairs in [RopePairs::Interleaved, RopePairs::Halves] {
        for (heads, head_length, dimensions) in [(3, 10, 8), (9, 64, 64), (1, 16, 0)] {
            for width in WIDTHS {
                let table = RopeTable::new(&RopeSettings {
                    dimensions,
                    base: 10_000.0,
                    scaling: RopeScaling::None,
                    magnitude: 1.25,
                    factors: None,
                });
                let positions: Vec<u32> = (0..width as u32).map(|t| 1 + 97 * t).collect();
                let angles = table.angles(&positions);
                let rotations: Vec<f32> = angles.rotations().iter().flatten().copied().collect();
                let mut x = inputs(&mut rng, width * heads * head_length, Style::Plain);
                let (x_there, rotations) = (device.upload(&x), device.upload(&rotations));
                let launch = Rope {
                    x: x_there.address(),
                    rotations: rotations.address(),
                    tokens: width,
                    heads,
                    head_length,
                    rotated_pairs: dimensions / 2,
                    pairs,
                };
                device
                    .kernels
                    .rope(&device.stream, &launch)
                    .expect("a launch");
                rope(&pool, &mut x, heads, head_length, &angles, pairs);
                let what = format!("{pairs:?}, {heads} heads of {head_length}, width {width}");
                assert_same_bits(&x_there.floats(), &x, &what);
            }
        }
    }
}
