use candle_core::Device;
use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

fn dequantised(kind: TensorType, bytes: &[u8]) -> Vec<f32> {
    let elements = bytes.len() / kind.block_bytes() * kind.block_elements();
    let mut out = vec![f32::NAN; elements];
    dequantise_row(kind, bytes, &mut out);
    out
}

fn candle_type(kind: TensorType) -> GgmlDType {
    match kind {
        TensorType::F32 => GgmlDType::F32,
        TensorType::F16 => GgmlDType::F16,
        TensorType::BF16 => GgmlDType::BF16,
        TensorType::Q4_0 => GgmlDType::Q4_0,
        TensorType::Q4_1 => GgmlDType::Q4_1,
        TensorType::Q5_0 => GgmlDType::Q5_0,
        TensorType::Q5_1 => GgmlDType::Q5_1,
        TensorType::Q8_0 => GgmlDType::Q8_0,
        TensorType::Q2K => GgmlDType::Q2K,
        TensorType::Q3K => GgmlDType::Q3K,
        TensorType::Q4K => GgmlDType::Q4K,
        TensorType::Q5K => GgmlDType::Q5K,
        TensorType::Q6K => GgmlDType::Q6K,
    }
}

#[test]
fn random_blocks_decode_as_in_candle() {
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    for kind in TensorType::ALL {
        let elements = 64 * 256;
        let mut bytes = vec![0; kind.row_bytes(elements as u64).unwrap() as usize];
        rng.fill_bytes(&mut bytes);
        // Any bytes are valid blocks, but an infinite or NaN scale has nothing to compare.
        let ours = dequantised(kind, &bytes);
        let theirs = qtensor_from_ggml(candle_type(kind), &bytes, vec![elements], &Device::Cpu)
            .unwrap()
            .dequantize(&Device::Cpu)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        let mut compared = 0;
        for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            if theirs.is_finite() {
                // The order of the factors may differ.
                let tolerance = 1e-6 * theirs.abs().max(1e-3 * ours.abs());
                let block = index / kind.block_elements();
                assert!(
                    (ours - theirs).abs() <= tolerance.max(1e-6 * scale_of(kind, &bytes, block)),
                    "{} element {index}: {ours}, candle {theirs}",
                    kind.name()
                );
                compared += 1;
            }
        }
        assert!(
            compared > elements / 2,
            "{}: {compared} compared",
            kind.name()
        );
    }
}

/// The size of what is added up in a block: a scale times a value, and a minimum, may cancel.
fn scale_of(kind: TensorType, bytes: &[u8], block: usize) -> f32 {
    let bytes = &bytes[block * kind.block_bytes()..(block + 1) * kind.block_bytes()];
    match storage(kind) {
        Storage::F32 | Storage::F16 | Storage::BF16 => 0.0,
        Storage::Blocks32(format) => {
            let block = format.decode(bytes);
            256.0 * block.scale.abs() + block.minimum.abs()
        }
        Storage::Blocks256(format) => {
            let block = format.decode(bytes);
            4096.0 * block.scale.abs() + 64.0 * block.minimum.abs()
        }
    }
}

#[test]
fn blocks_of_32_decode_as_computed_by_hand() {
    let half = |value: f32| half::f16::from_f32(value).to_le_bytes();
    // Q4_0: scale 0.5; byte i holds element i below and element i + 16 above.
    let mut block = half(0.5).to_vec();
    block.extend((0..16).map(|i: u8| i | ((15 - i) << 4)));
    let out = dequantised(TensorType::Q4_0, &block);
    assert_eq!((out[0], out[15], out[16], out[31]), (-4.0, 3.5, 3.5, -4.0));
    // Q4_1: scale 2, minimum -3.
    let mut block = [half(2.0), half(-3.0)].concat();
    block.extend([0x21; 16]);
    let out = dequantised(TensorType::Q4_1, &block);
    assert_eq!((out[0], out[16]), (-1.0, 1.0));
    // Q5_0: scale 1; the fifth bits of elements 0 and 31 are set.
    let mut block = half(1.0).to_vec();
    block.extend(0x8000_0001_u32.to_le_bytes());
    block.extend([0x43; 16]);
    let out = dequantised(TensorType::Q5_0, &block);
    assert_eq!((out[0], out[1], out[30], out[31]), (3.0, -13.0, -12.0, 4.0));
    // Q8_0: scale 0.25, signed bytes.
    let mut block = half(0.25).to_vec();
    block.extend((0..32).map(|i: i32| (i - 16) as i8 as u8));
    let out = dequantised(TensorType::Q8_0, &block);
    assert_eq!((out[0], out[16], out[31]), (-4.0, 0.0, 3.75));
}

#[test]
fn a_block_of_q4_k_decodes_as_computed_by_hand() {
    let half = |value: f32| half::f16::from_f32(value).to_le_bytes();
    let mut block = [half(1.0), half(2.0)].concat();
    // Sub-block 0: scale 33, minimum 5; sub-block 4: scale 0x31 (its low bits in byte 8, its high bits in byte 0),
    // minimum 0x12 (low bits in byte 8, high bits in byte 4).
    let mut scales = [0u8; 12];
    scales[0] = 33 | (3 << 6);
    scales[4] = 5 | (1 << 6);
    scales[8] = 0x21;
    block.extend(scales);
    block.extend([0x73; 128]);
    let out = dequantised(TensorType::Q4K, &block);
    assert_eq!(out[0], 33.0 * 3.0 - 2.0 * 5.0);
    assert_eq!(out[32], 0.0);
    assert_eq!(
        out[128],
        f32::from(0x31_u8) * 3.0 - 2.0 * f32::from(0x12_u8)
    );
}
