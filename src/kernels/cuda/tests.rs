//! Every kernel against the host's, bit for bit, on random and on adversarial input.
//!
//! They need a CUDA driver, or what stands for one: where none is found they say so and pass, unless
//! `STRATA_REQUIRE_GPU=1` asks for one.

mod attention;
mod device;
mod elementwise;
mod products;
mod rows;

use device::{Device, device};

use rand::{Rng, RngExt};
use rand_chacha::ChaCha8Rng;

use crate::gguf::TensorType;

/// Byte offsets of the f16 fields of a block.
fn half_fields(kind: TensorType) -> &'static [usize] {
    match kind {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => &[],
        TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => &[0],
        TensorType::Q4_1 | TensorType::Q5_1 => &[0, 2],
        TensorType::Q2K => &[80, 82],
        TensorType::Q3K => &[108],
        TensorType::Q4K | TensorType::Q5K => &[0, 2],
        TensorType::Q6K => &[208],
    }
}

#[derive(Clone, Copy, Debug)]
enum Style {
    /// Random quants, scales and values of a trained model's size.
    Plain,
    /// Quants all zeros, all ones or 0x80, scales at the ends of f16; inputs from subnormal to 1e20.
    Extreme,
}

const STYLES: [Style; 2] = [Style::Plain, Style::Extreme];

/// Elements of any type that fill whole blocks.
fn weights(rng: &mut ChaCha8Rng, kind: TensorType, elements: usize, style: Style) -> Vec<u8> {
    let mut bytes = vec![0; kind.row_bytes(elements as u64).expect("whole blocks") as usize];
    let value = |rng: &mut ChaCha8Rng| match style {
        Style::Plain => rng.random_range(-1.0f32..1.0),
        Style::Extreme => {
            [0.0, -0.0, 1e-7, -1e-7, 6e-5, 1.0, -1.0, 65504.0][rng.random_range(0..8)]
        }
    };
    match kind {
        TensorType::F32 => bytes
            .as_chunks_mut()
            .0
            .iter_mut()
            .for_each(|bytes| *bytes = value(rng).to_le_bytes()),
        TensorType::F16 => bytes
            .as_chunks_mut()
            .0
            .iter_mut()
            .for_each(|bytes| *bytes = half::f16::from_f32(value(rng)).to_le_bytes()),
        TensorType::BF16 => bytes
            .as_chunks_mut()
            .0
            .iter_mut()
            .for_each(|bytes| *bytes = half::bf16::from_f32(value(rng)).to_le_bytes()),
        _ => {
            rng.fill_bytes(&mut bytes);
            for block in bytes.chunks_exact_mut(kind.block_bytes()) {
                if matches!(style, Style::Extreme) {
                    block.fill([0x00, 0xff, 0x80, 0x7f][rng.random_range(0..4)]);
                }
                for field in half_fields(kind) {
                    let half = match style {
                        Style::Plain => half::f16::from_f32(rng.random_range(-0.02f32..0.02)),
                        Style::Extreme => half::f16::from_bits(
                            [
                                0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff,
                            ][rng.random_range(0..8)],
                        ),
                    };
                    block[*field..*field + 2].copy_from_slice(&half.to_le_bytes());
                }
            }
        }
    }
    bytes
}

/// Activations.
fn inputs(rng: &mut ChaCha8Rng, count: usize, style: Style) -> Vec<f32> {
    let mut values = Vec::with_capacity(count);
    for start in (0..count).step_by(16) {
        let size = match style {
            Style::Plain => 1.0,
            Style::Extreme => [0.0, 1e-44, 1e-38, 1e-36, 1e-30, 1.0, 1e20][rng.random_range(0..7)],
        };
        // Quants that are all 127 or all -127 take integer sums to their bounds.
        let sign = [-1.0, 1.0][rng.random_range(0..2)];
        let is_largest = matches!(style, Style::Extreme) && rng.random_range(0..2) == 0;
        values.extend((start..count.min(start + 16)).map(|_| {
            let value = rng.random_range(-1.0f32..=1.0);
            if is_largest {
                sign * size
            } else {
                value * size
            }
        }));
    }
    values
}

/// Equal to the bit; two NaNs count as equal whatever their payload.
fn assert_same_bits(ours: &[f32], expected: &[f32], what: &str) {
    assert_eq!(ours.len(), expected.len(), "{what}");
    for (i, (ours, expected)) in ours.iter().zip(expected).enumerate() {
        assert!(
            ours.to_bits() == expected.to_bits() || (ours.is_nan() && expected.is_nan()),
            "{what}: element {i} is {ours:e} ({:08x}), and the host has {expected:e} ({:08x})",
            ours.to_bits(),
            expected.to_bits(),
        );
    }
}
