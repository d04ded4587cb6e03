//! The layouts of quantisation blocks, decoded in plain Rust: what the portable loops, the edges of the others and
//! `dequantise_row` use. Layouts are ggml's (`ggml-common.h`, `ggml-quants.c`).
//!
//! A block is decoded to unsigned values; the constant that a format subtracts is a property of the format
//! (`Format32::offset`, `Format256::offset`), so that every loop can multiply unsigned by signed bytes.

use crate::gguf::TensorType;

use super::half_floats::{bf16_to_f32, f16_to_f32};

/// Calls the function that is compiled for the format: `for_format32!(format, rows(weight, x))` is
/// `rows::<F>(weight, x)`, F being the format's index.
#[cfg(target_arch = "x86_64")]
macro_rules! for_format32 {
    ($format:expr, $function:ident $arguments:tt) => {
        for_format32!(@ $format, $function $arguments, Q4_0 Q4_1 Q5_0 Q5_1 Q8_0)
    };
    (@ $format:expr, $function:ident $arguments:tt, $($name:ident)*) => {
        match $format {
            $(Format32::$name => $function::<{ Format32::$name as u8 }> $arguments,)*
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use for_format32;

/// The same for formats with blocks of 256.
#[cfg(target_arch = "x86_64")]
macro_rules! for_format256 {
    ($format:expr, $function:ident $arguments:tt) => {
        for_format256!(@ $format, $function $arguments, Q2K Q3K Q4K Q5K Q6K)
    };
    (@ $format:expr, $function:ident $arguments:tt, $($name:ident)*) => {
        match $format {
            $(Format256::$name => $function::<{ Format256::$name as u8 }> $arguments,)*
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use for_format256;

/// A block of 32: weight = scale * (value - offset) + minimum.
pub(super) struct Block32 {
    pub(super) values: [u8; 32],
    pub(super) scale: f32,
    pub(super) minimum: f32,
}

/// The formats with blocks of 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format32 {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
}

impl Format32 {
    /// The format whose discriminant is `index`: formats are const parameters of the loops.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn from_index(index: u8) -> Format32 {
        match index {
            0 => Format32::Q4_0,
            1 => Format32::Q4_1,
            2 => Format32::Q5_0,
            3 => Format32::Q5_1,
            4 => Format32::Q8_0,
            _ => panic!("index of a format with blocks of 32"),
        }
    }

    pub(super) const fn block_bytes(self) -> usize {
        match self {
            Format32::Q4_0 => 18,
            Format32::Q4_1 => 20,
            Format32::Q5_0 => 22,
            Format32::Q5_1 => 24,
            Format32::Q8_0 => 34,
        }
    }

    /// What is subtracted from a value before it is scaled.
    pub(super) const fn offset(self) -> i32 {
        match self {
            Format32::Q4_0 => 8,
            Format32::Q5_0 => 16,
            Format32::Q8_0 => 128,
            Format32::Q4_1 | Format32::Q5_1 => 0,
        }
    }

    /// Whether a block has a minimum that is added to every element.
    pub(super) const fn has_minimum(self) -> bool {
        matches!(self, Format32::Q4_1 | Format32::Q5_1)
    }

    /// Decodes the first `block_bytes` of `bytes`.
    #[inline(always)]
    pub(super) fn decode(self, bytes: &[u8]) -> Block32 {
        let mut values = [0; 32];
        let scale = f16_at(bytes, 0);
        let mut minimum = 0.0;
        match self {
            Format32::Q4_0 => nibbles(&bytes[2..18], &mut values),
            Format32::Q4_1 => {
                minimum = f16_at(bytes, 2);
                nibbles(&bytes[4..20], &mut values);
            }
            Format32::Q5_0 => {
                nibbles(&bytes[6..22], &mut values);
                fifth_bits(&bytes[2..6], &mut values);
            }
            Format32::Q5_1 => {
                minimum = f16_at(bytes, 2);
                nibbles(&bytes[8..24], &mut values);
                fifth_bits(&bytes[4..8], &mut values);
            }
            Format32::Q8_0 => {
                for (value, byte) in values.iter_mut().zip(&bytes[2..34]) {
                    // Adds 128 to the signed byte.
                    *value = byte ^ 0x80;
                }
            }
        }
        Block32 {
            values,
            scale,
            minimum,
        }
    }
}

/// A block of 256 in sub-blocks of 16: weight = scale * scales[j] * (value - offset) - minimum * minimums[j]. Formats
/// with sub-blocks of 32 repeat each scale.
pub(super) struct Block256 {
    pub(super) values: [u8; 256],
    pub(super) scales: [i16; 16],
    pub(super) minimums: [i16; 16],
    pub(super) scale: f32,
    pub(super) minimum: f32,
}

/// The formats with blocks of 256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format256 {
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

impl Format256 {
    #[cfg(target_arch = "x86_64")]
    pub(super) const BLOCK_BYTES_MAX: usize = 210;

    /// The format whose discriminant is `index`: formats are const parameters of the loops.
    #[cfg(target_arch = "x86_64")]
    pub(super) const fn from_index(index: u8) -> Format256 {
        match index {
            0 => Format256::Q2K,
            1 => Format256::Q3K,
            2 => Format256::Q4K,
            3 => Format256::Q5K,
            4 => Format256::Q6K,
            _ => panic!("index of a format with blocks of 256"),
        }
    }

    pub(super) const fn block_bytes(self) -> usize {
        match self {
            Format256::Q2K => 84,
            Format256::Q3K => 110,
            Format256::Q4K => 144,
            Format256::Q5K => 176,
            Format256::Q6K => 210,
        }
    }

    /// What is subtracted from a value before it is scaled.
    pub(super) const fn offset(self) -> i32 {
        match self {
            Format256::Q3K => 4,
            Format256::Q6K => 32,
            Format256::Q2K | Format256::Q4K | Format256::Q5K => 0,
        }
    }

    /// Whether a block has a minimum that is subtracted from every element.
    pub(super) const fn has_minimum(self) -> bool {
        matches!(self, Format256::Q2K | Format256::Q4K | Format256::Q5K)
    }

    /// Decodes the first `block_bytes` of `bytes`.
    #[inline(always)]
    pub(super) fn decode(self, bytes: &[u8]) -> Block256 {
        let mut block = Block256 {
            values: [0; 256],
            scales: [0; 16],
            minimums: [0; 16],
            scale: 0.0,
            minimum: 0.0,
        };
        match self {
            Format256::Q2K => {
                for (j, byte) in bytes[..16].iter().enumerate() {
                    block.scales[j] = i16::from(byte & 15);
                    block.minimums[j] = i16::from(byte >> 4);
                }
                two_bits(&bytes[16..80], &mut block.values);
                block.scale = f16_at(bytes, 80);
                block.minimum = f16_at(bytes, 82);
            }
            Format256::Q3K => {
                two_bits(&bytes[32..96], &mut block.values);
                for (i, value) in block.values.iter_mut().enumerate() {
                    *value |= ((bytes[i % 32] >> (i / 32)) & 1) << 2;
                }
                block.scales = scales_q3k(&bytes[96..108]);
                block.scale = f16_at(bytes, 108);
            }
            Format256::Q4K | Format256::Q5K => {
                block.scale = f16_at(bytes, 0);
                block.minimum = f16_at(bytes, 2);
                for j in 0..8 {
                    let (scale, minimum) = scale_and_minimum(&bytes[4..16], j);
                    block.scales[2 * j] = scale;
                    block.scales[2 * j + 1] = scale;
                    block.minimums[2 * j] = minimum;
                    block.minimums[2 * j + 1] = minimum;
                }
                let start = if self == Format256::Q4K { 16 } else { 48 };
                let quants = &bytes[start..start + 128];
                for (values, quants) in block
                    .values
                    .chunks_exact_mut(64)
                    .zip(quants.chunks_exact(32))
                {
                    for i in 0..32 {
                        values[i] = quants[i] & 15;
                        values[32 + i] = quants[i] >> 4;
                    }
                }
                if self == Format256::Q5K {
                    for (i, value) in block.values.iter_mut().enumerate() {
                        *value |= ((bytes[16 + i % 32] >> (i / 32)) & 1) << 4;
                    }
                }
            }
            Format256::Q6K => {
                for (half, values) in block.values.chunks_exact_mut(128).enumerate() {
                    let low = &bytes[64 * half..64 * half + 64];
                    let high = &bytes[128 + 32 * half..160 + 32 * half];
                    for i in 0..32 {
                        values[i] = (low[i] & 15) | ((high[i] & 3) << 4);
                        values[i + 32] = (low[i + 32] & 15) | (((high[i] >> 2) & 3) << 4);
                        values[i + 64] = (low[i] >> 4) | (((high[i] >> 4) & 3) << 4);
                        values[i + 96] = (low[i + 32] >> 4) | ((high[i] >> 6) << 4);
                    }
                }
                for (scale, byte) in block.scales.iter_mut().zip(&bytes[192..208]) {
                    *scale = i16::from(*byte as i8);
                }
                block.scale = f16_at(bytes, 208);
            }
        }
        block
    }
}

/// How a type's elements are stored, by the loop that handles it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    F32,
    F16,
    BF16,
    Blocks32(Format32),
    Blocks256(Format256),
}

pub(super) const fn storage(kind: TensorType) -> Storage {
    match kind {
        TensorType::F32 => Storage::F32,
        TensorType::F16 => Storage::F16,
        TensorType::BF16 => Storage::BF16,
        TensorType::Q4_0 => Storage::Blocks32(Format32::Q4_0),
        TensorType::Q4_1 => Storage::Blocks32(Format32::Q4_1),
        TensorType::Q5_0 => Storage::Blocks32(Format32::Q5_0),
        TensorType::Q5_1 => Storage::Blocks32(Format32::Q5_1),
        TensorType::Q8_0 => Storage::Blocks32(Format32::Q8_0),
        TensorType::Q2K => Storage::Blocks256(Format256::Q2K),
        TensorType::Q3K => Storage::Blocks256(Format256::Q3K),
        TensorType::Q4K => Storage::Blocks256(Format256::Q4K),
        TensorType::Q5K => Storage::Blocks256(Format256::Q5K),
        TensorType::Q6K => Storage::Blocks256(Format256::Q6K),
    }
}

/// Writes the weights of one row as f32.
///
/// # Panics
/// When `out` is not a whole number of blocks or `bytes` is not exactly that long.
pub fn dequantise_row(kind: TensorType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(
        kind.row_bytes(out.len() as u64),
        Some(bytes.len() as u64),
        "a row of {} {} elements",
        out.len(),
        kind.name()
    );
    match storage(kind) {
        Storage::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*bytes);
            }
        }
        Storage::F16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = f16_to_f32(u16::from_le_bytes(*bytes));
            }
        }
        Storage::BF16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = bf16_to_f32(u16::from_le_bytes(*bytes));
            }
        }
        Storage::Blocks32(format) => {
            let blocks = bytes.chunks_exact(format.block_bytes());
            for (out, bytes) in out.as_chunks_mut::<32>().0.iter_mut().zip(blocks) {
                let block = format.decode(bytes);
                for (out, value) in out.iter_mut().zip(block.values) {
                    let value = (i32::from(value) - format.offset()) as f32;
                    *out = value * block.scale + block.minimum;
                }
            }
        }
        Storage::Blocks256(format) => {
            let blocks = bytes.chunks_exact(format.block_bytes());
            for (out, bytes) in out.as_chunks_mut::<256>().0.iter_mut().zip(blocks) {
                let block = format.decode(bytes);
                for (i, (out, value)) in out.iter_mut().zip(block.values).enumerate() {
                    let value = (i32::from(value) - format.offset()) as f32;
                    let scale = block.scale * f32::from(block.scales[i / 16]);
                    let minimum = block.minimum * f32::from(block.minimums[i / 16]);
                    *out = scale * value - minimum;
                }
            }
        }
    }
}

/// The scale and minimum of sub-block `j` of Q4_K and Q5_K: 6 bits each, packed into 12 bytes.
#[inline(always)]
fn scale_and_minimum(bytes: &[u8], j: usize) -> (i16, i16) {
    let (scale, minimum) = if j < 4 {
        (bytes[j] & 63, bytes[j + 4] & 63)
    } else {
        (
            (bytes[j + 4] & 15) | ((bytes[j - 4] >> 6) << 4),
            (bytes[j + 4] >> 4) | ((bytes[j] >> 6) << 4),
        )
    };
    (i16::from(scale), i16::from(minimum))
}

/// The 16 scales of Q3_K: 6 bits each, packed into 12 bytes, less 32.
#[inline(always)]
fn scales_q3k(bytes: &[u8]) -> [i16; 16] {
    std::array::from_fn(|j| {
        let low = if j < 8 {
            bytes[j] & 15
        } else {
            bytes[j - 8] >> 4
        };
        let high = (bytes[8 + j % 4] >> (2 * (j / 4))) & 3;
        i16::from(low | (high << 4)) - 32
    })
}

#[inline(always)]
fn nibbles(bytes: &[u8], values: &mut [u8; 32]) {
    for (i, byte) in bytes.iter().enumerate() {
        values[i] = byte & 15;
        values[i + 16] = byte >> 4;
    }
}

#[inline(always)]
fn fifth_bits(bytes: &[u8], values: &mut [u8; 32]) {
    let bits = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    for (i, value) in values.iter_mut().enumerate() {
        *value |= (((bits >> i) & 1) << 4) as u8;
    }
}

/// Q2_K and Q3_K: 32 bytes hold 128 elements, 32 at each pair of bits.
#[inline(always)]
fn two_bits(bytes: &[u8], values: &mut [u8; 256]) {
    for (i, value) in values.iter_mut().enumerate() {
        *value = (bytes[32 * (i / 128) + i % 32] >> (2 * (i / 32 % 4))) & 3;
    }
}

#[inline(always)]
fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

#[cfg(test)]
mod tests;
