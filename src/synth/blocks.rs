//! Random blocks of every tensor type: valid, without bias, and of a given standard deviation.
//!
//! All the bits of a block are random, then its scales are set. A quantised type whose values are not symmetric (Q4_0
//! holds -8..=7) gets a scale of random sign; one with minimums (Q4_K) gets a second scale that makes the expected
//! minimum equal the expected value. So the mean of the weights is about zero, and activations stay small through many
//! layers, as in a trained model.

use half::{bf16, f16};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;

use crate::gguf::TensorType;

/// How the scales of one type's blocks are set. `levels` is the standard deviation of a weight when the scale is 1;
/// offsets are in bytes from the start of the block.
struct Scales {
    levels: f32,
    scale_at: usize,
    /// Where a second f16 stands that is `ratio` times the scale: the minimum of *_1 types (added) or the scale of the
    /// minimums of K types (subtracted).
    second: Option<(usize, f32)>,
}

/// Standard deviations: of n equally likely consecutive integers, (n^2 - 1) / 12 under the root; of a product with an
/// independent scale s, E[s^2] times that; and, for types with minimums, plus `ratio`^2 times the variance of (scale -
/// minimum).
fn scales(kind: TensorType) -> Option<Scales> {
    // Spread of the factor by which each block's scale differs: 0.75..1.25 has a mean square of 1 + 1/48.
    let spread = (1.0f32 + 1.0 / 48.0).sqrt();
    let (levels, scale_at, second) = match kind {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => return None,
        // 16 values about -0.5: the mean adds its square.
        TensorType::Q4_0 => ((21.25f32 + 0.25).sqrt(), 0, None),
        TensorType::Q4_1 => (21.25f32.sqrt(), 0, Some((2, -7.5))),
        TensorType::Q5_0 => ((85.25f32 + 0.25).sqrt(), 0, None),
        TensorType::Q5_1 => (85.25f32.sqrt(), 0, Some((2, -15.5))),
        TensorType::Q8_0 => ((5461.25f32 + 0.25).sqrt(), 0, None),
        // Scales and minimums 0..16: mean square 77.5, variance 21.25. Values 0..4: variance 1.25, mean 1.5.
        TensorType::Q2K => {
            let variance = 77.5f32 * 1.25 + 1.5 * 1.5 * 2.0 * 21.25;
            (variance.sqrt(), 80, Some((82, 1.5)))
        }
        // Scales -32..32: mean square 341.5. Values -4..4: mean square 5.5.
        TensorType::Q3K => ((341.5f32 * 5.5).sqrt(), 108, None),
        // Scales and minimums 0..64: mean square 1333.5, variance 341.25. Values 0..16 or 0..32.
        TensorType::Q4K => {
            let variance = 1333.5f32 * 21.25 + 7.5 * 7.5 * 2.0 * 341.25;
            (variance.sqrt(), 0, Some((2, 7.5)))
        }
        TensorType::Q5K => {
            let variance = 1333.5f32 * 85.25 + 15.5 * 15.5 * 2.0 * 341.25;
            (variance.sqrt(), 0, Some((2, 15.5)))
        }
        // Scales -128..128: mean square 5461.5. Values -32..32: mean square 341.5.
        TensorType::Q6K => ((5461.5f32 * 341.5).sqrt(), 208, None),
    };
    Some(Scales {
        levels: levels * spread,
        scale_at,
        second,
    })
}

/// Fills `bytes`, a whole number of blocks, with random weights of mean about 0 and standard deviation `deviation`.
pub fn fill_random(kind: TensorType, deviation: f32, random: &mut ChaCha8Rng, bytes: &mut [u8]) {
    assert!(
        bytes.len().is_multiple_of(kind.block_bytes()),
        "{} bytes are no whole number of {} blocks",
        bytes.len(),
        kind.name()
    );
    let Some(scales) = scales(kind) else {
        fill_floats(kind, 0.0, deviation, random, bytes);
        return;
    };
    random.fill_bytes(bytes);
    for block in bytes.chunks_exact_mut(kind.block_bytes()) {
        let noise = random.next_u32();
        let factor = 0.75 + unit(noise) * 0.5;
        // The lowest bit is not part of `factor`.
        let sign = if noise & 1 == 0 { 1.0 } else { -1.0 };
        let scale = sign * factor * deviation / scales.levels;
        put_f16(block, scales.scale_at, scale);
        if let Some((at, ratio)) = scales.second {
            put_f16(block, at, scale * ratio);
        }
    }
}

/// Fills `bytes` with floats spread evenly about `mean`; `kind` must be a float type.
pub fn fill_floats(
    kind: TensorType,
    mean: f32,
    deviation: f32,
    random: &mut ChaCha8Rng,
    bytes: &mut [u8],
) {
    let width = deviation * 12.0f32.sqrt();
    for element in bytes.chunks_exact_mut(kind.block_bytes()) {
        let value = mean + (unit(random.next_u32()) - 0.5) * width;
        match kind {
            TensorType::F32 => element.copy_from_slice(&value.to_le_bytes()),
            TensorType::F16 => element.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
            TensorType::BF16 => element.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
            other => unreachable!("{} is not a float type", other.name()),
        }
    }
}

/// 0..1 from the upper 24 bits.
fn unit(noise: u32) -> f32 {
    (noise >> 8) as f32 / (1 << 24) as f32
}

fn put_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::rand_core::SeedableRng;

    fn read_f16(bytes: &[u8], at: usize) -> f32 {
        f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
    }

    /// The 6-bit scale and minimum of sub-block `j` of a Q4_K or Q5_K block.
    fn scale_and_minimum(scales: &[u8], j: usize) -> (f32, f32) {
        let (scale, minimum) = if j < 4 {
            (scales[j] & 63, scales[j + 4] & 63)
        } else {
            (
                (scales[j + 4] & 15) | ((scales[j - 4] >> 6) << 4),
                (scales[j + 4] >> 4) | ((scales[j] >> 6) << 4),
            )
        };
        (f32::from(scale), f32::from(minimum))
    }

    /// The weights of a block, written plainly from the layout of ggml's structs. Orders within a block do not matter
    /// to a mean and a deviation, so Q3_K and Q6_K may pair any scale with any value of its sub-block size.
    fn weights(kind: TensorType, block: &[u8]) -> Vec<f32> {
        let nibbles = |bytes: &[u8]| -> Vec<f32> {
            bytes
                .iter()
                .flat_map(|&byte| [f32::from(byte & 15), f32::from(byte >> 4)])
                .collect()
        };
        // 5-bit values: nibbles with a fifth bit from a bit field.
        let fifths = |high: &[u8], low: &[u8]| -> Vec<f32> {
            nibbles(low)
                .into_iter()
                .enumerate()
                .map(|(i, value)| value + f32::from((high[i / 8] >> (i % 8)) & 1) * 16.0)
                .collect()
        };
        let pairs = |bytes: &[u8]| -> Vec<f32> {
            bytes
                .iter()
                .flat_map(|&byte| [0, 2, 4, 6].map(|shift| f32::from((byte >> shift) & 3)))
                .collect()
        };
        match kind {
            TensorType::Q4_0 => {
                let d = read_f16(block, 0);
                nibbles(&block[2..]).iter().map(|q| d * (q - 8.0)).collect()
            }
            TensorType::Q4_1 => {
                let (d, m) = (read_f16(block, 0), read_f16(block, 2));
                nibbles(&block[4..]).iter().map(|q| d * q + m).collect()
            }
            TensorType::Q5_0 => {
                let d = read_f16(block, 0);
                let q = fifths(&block[2..6], &block[6..]);
                q.iter().map(|q| d * (q - 16.0)).collect()
            }
            TensorType::Q5_1 => {
                let (d, m) = (read_f16(block, 0), read_f16(block, 2));
                let q = fifths(&block[4..8], &block[8..]);
                q.iter().map(|q| d * q + m).collect()
            }
            TensorType::Q8_0 => {
                let d = read_f16(block, 0);
                block[2..].iter().map(|&q| d * f32::from(q as i8)).collect()
            }
            TensorType::Q2K => {
                let (d, dmin) = (read_f16(block, 80), read_f16(block, 82));
                pairs(&block[16..80])
                    .iter()
                    .enumerate()
                    .map(|(i, q)| {
                        let scale = block[i / 16];
                        d * f32::from(scale & 15) * q - dmin * f32::from(scale >> 4)
                    })
                    .collect()
            }
            TensorType::Q3K => {
                let d = read_f16(block, 108);
                let scales = nibbles(&block[96..104]);
                let high = pairs(&block[104..108]);
                pairs(&block[32..96])
                    .iter()
                    .enumerate()
                    .map(|(i, q)| {
                        let subtract = if (block[i / 8] >> (i % 8)) & 1 == 0 {
                            4.0
                        } else {
                            0.0
                        };
                        d * (scales[i / 16] + 16.0 * high[i / 16] - 32.0) * (q - subtract)
                    })
                    .collect()
            }
            TensorType::Q4K | TensorType::Q5K => {
                let (d, dmin) = (read_f16(block, 0), read_f16(block, 2));
                let q = match kind {
                    TensorType::Q4K => nibbles(&block[16..]),
                    _ => fifths(&block[16..48], &block[48..]),
                };
                q.iter()
                    .enumerate()
                    .map(|(i, q)| {
                        let (scale, minimum) = scale_and_minimum(&block[4..16], i / 32);
                        d * scale * q - dmin * minimum
                    })
                    .collect()
            }
            TensorType::Q6K => {
                let d = read_f16(block, 208);
                let high = pairs(&block[128..192]);
                nibbles(&block[..128])
                    .iter()
                    .enumerate()
                    .map(|(i, q)| {
                        let scale = f32::from(block[192 + i / 16] as i8);
                        d * scale * (q + 16.0 * high[i] - 32.0)
                    })
                    .collect()
            }
            TensorType::F32 => vec![f32::from_le_bytes(block.try_into().unwrap())],
            TensorType::F16 => vec![read_f16(block, 0)],
            TensorType::BF16 => vec![bf16::from_le_bytes([block[0], block[1]]).to_f32()],
        }
    }

    #[test]
    fn weights_of_every_type_have_no_bias_and_the_deviation_asked_for() {
        // Rows of 512, of Llama 70B's feed-forward width, and a large scale.
        for deviation in [1.0 / 512f32.sqrt(), 1.0 / 28_672f32.sqrt(), 3.0] {
            for kind in TensorType::ALL {
                let mut random = ChaCha8Rng::seed_from_u64(1);
                let blocks = 400_000 / kind.block_elements();
                let mut bytes = vec![0; blocks * kind.block_bytes()];
                fill_random(kind, deviation, &mut random, &mut bytes);
                let weights: Vec<f64> = bytes
                    .chunks_exact(kind.block_bytes())
                    .flat_map(|block| weights(kind, block))
                    .map(f64::from)
                    .collect();
                assert_eq!(weights.len(), blocks * kind.block_elements());
                let count = weights.len() as f64;
                let mean = weights.iter().sum::<f64>() / count;
                let square = weights.iter().map(|weight| weight * weight).sum::<f64>() / count;
                let ratio = square.sqrt() / f64::from(deviation);
                let bias = mean / f64::from(deviation);
                assert!(
                    (0.97..1.03).contains(&ratio),
                    "{}: deviation {ratio}",
                    kind.name()
                );
                assert!(bias.abs() < 0.015, "{}: bias {bias}", kind.name());
            }
        }
    }

    #[test]
    fn one_seed_gives_one_sequence_of_bytes() {
        let fill = |seed| {
            let mut bytes = vec![0; 144 * 10];
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            fill_random(TensorType::Q4K, 0.1, &mut random, &mut bytes);
            bytes
        };
        assert_eq!(fill(7), fill(7));
        assert_ne!(fill(7), fill(8));
    }
}
