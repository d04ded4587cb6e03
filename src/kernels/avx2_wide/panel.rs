//! The input of the wide loops: what a tile reads of a token, 32 bits at a time, in the order in which it reads it.

use std::arch::x86_64::*;

use super::super::activations::Quantised;
use super::super::blocks::{Format32, Format256};

/// The words of one block of 32 of a token: eight of quants, then what the format needs.
pub(super) struct Words32 {
    /// -offset times the sums of quants, one for each half of a 32-bit lane: where 16-bit sums start.
    pub(super) start: Option<usize>,
    /// The offset times the sum of quants, where the format does not subtract the offset that the sums start with.
    pub(super) back: Option<usize>,
    pub(super) scaled_sum: Option<usize>,
    pub(super) scale: usize,
    pub(super) count: usize,
}

impl Words32 {
    pub(super) const fn of(format: Format32) -> Words32 {
        let (start, back, scaled_sum, scale) = match format {
            Format32::Q4_0 | Format32::Q5_0 => (Some(8), None, None, 9),
            Format32::Q4_1 => (None, None, Some(8), 9),
            Format32::Q5_1 => (Some(8), Some(9), Some(10), 11),
            Format32::Q8_0 => (None, None, None, 8),
        };
        Words32 {
            start,
            back,
            scaled_sum,
            scale,
            count: scale + 1,
        }
    }
}

/// The words of one block of 256 of a token: 64 of quants, then what the format needs.
pub(super) struct Words256 {
    /// Fours of values in a sub-block.
    pub(super) steps: usize,
    /// For each sub-block, -offset times the sums of quants, one for each half of a 32-bit lane.
    pub(super) starts: Option<usize>,
    /// Sums of the quants of sub-blocks, two in a word.
    pub(super) sums: usize,
    pub(super) sums_count: usize,
    pub(super) scale: usize,
    pub(super) count: usize,
}

impl Words256 {
    pub(super) const fn of(format: Format256) -> Words256 {
        let (steps, starts_count, sums_count) = match format {
            Format256::Q2K => (4, 0, 8),
            Format256::Q3K | Format256::Q6K => (4, 16, 0),
            Format256::Q4K => (8, 0, 4),
            Format256::Q5K => (8, 8, 4),
        };
        let scale = 64 + starts_count + sums_count;
        Words256 {
            steps,
            starts: if starts_count == 0 { None } else { Some(64) },
            sums: 64 + starts_count,
            sums_count,
            scale,
            count: scale + 1,
        }
    }
}

/// What 16-bit sums of a format's values have subtracted.
const fn offset32(format: Format32) -> i32 {
    match format {
        Format32::Q4_0 => 8,
        Format32::Q5_0 | Format32::Q5_1 => 16,
        Format32::Q4_1 | Format32::Q8_0 => 0,
    }
}

/// What 16-bit sums of a format's values have subtracted.
const fn offset256(format: Format256) -> i32 {
    match format {
        Format256::Q3K => 4,
        Format256::Q5K => 16,
        Format256::Q6K => 32,
        Format256::Q2K | Format256::Q4K => 0,
    }
}

/// Packs `tokens` tokens: for each eight blocks, for each token, for each of the eight blocks its words.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack32<const F: u8>(
    x: &Quantised,
    first_token: usize,
    tokens: usize,
    panel: &mut [i32],
) {
    let format = Format32::from_index(F);
    let words = const { Words32::of(Format32::from_index(F)) };
    for t in 0..tokens {
        let row = x.row(first_token + t);
        // Rows of activations are padded to whole groups of eight.
        for block in 0..x.blocks_stride {
            let at = ((block / 8 * tokens + t) * 8 + block % 8) * words.count;
            let to = &mut panel[at..at + words.count];
            let quants = &row.quants[32 * block..32 * block + 32];
            // SAFETY: the slices hold 32 bytes or more.
            let quants = unsafe {
                let quants = _mm256_loadu_si256(quants.as_ptr().cast());
                _mm256_storeu_si256(to.as_mut_ptr().cast(), quants);
                quants
            };
            if let Some(start) = words.start {
                let sums = lane_sums(quants, offset32(format));
                to[start] = _mm_cvtsi128_si32(_mm_add_epi16(sums[0], sums[1]));
            }
            if let Some(back) = words.back {
                to[back] = offset32(format) * row.sums32[block];
            }
            if let Some(scaled_sum) = words.scaled_sum {
                to[scaled_sum] = row.scaled_sums[block].to_bits() as i32;
            }
            to[words.scale] = row.scales[block].to_bits() as i32;
        }
    }
}

/// Packs `tokens` tokens: for each block, for each token the block's words.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn pack256<const F: u8>(
    x: &Quantised,
    first_token: usize,
    tokens: usize,
    blocks: usize,
    panel: &mut [i32],
) {
    let format = Format256::from_index(F);
    let words = const { Words256::of(Format256::from_index(F)) };
    for t in 0..tokens {
        let row = x.row(first_token + t);
        for block in 0..blocks {
            let at = (block * tokens + t) * words.count;
            let to = &mut panel[at..at + words.count];
            let quants = row.quants[256 * block..256 * block + 256].as_ptr();
            for v in 0..8 {
                // SAFETY: both slices hold 256 bytes or more.
                let quants = unsafe {
                    let quants = _mm256_loadu_si256(quants.add(32 * v).cast());
                    _mm256_storeu_si256(to.as_mut_ptr().add(8 * v).cast(), quants);
                    quants
                };
                if let Some(starts) = words.starts {
                    let sums = lane_sums(quants, offset256(format));
                    if words.steps == 8 {
                        to[starts + v] = _mm_cvtsi128_si32(_mm_add_epi16(sums[0], sums[1]));
                    } else {
                        to[starts + 2 * v] = _mm_cvtsi128_si32(sums[0]);
                        to[starts + 2 * v + 1] = _mm_cvtsi128_si32(sums[1]);
                    }
                }
            }
            let sums = match words.sums_count {
                8 => &row.sums16[16 * block..16 * block + 16],
                4 => &row.sums_of_32[8 * block..8 * block + 8],
                _ => &[],
            };
            let to_sums = to[words.sums..words.sums + words.sums_count].iter_mut();
            for (to, [a, b]) in to_sums.zip(sums.as_chunks::<2>().0) {
                *to = (u32::from(*a as u16) | (u32::from(*b as u16) << 16)) as i32;
            }
            to[words.scale] = row.scales[block].to_bits() as i32;
        }
    }
}

/// For each half of 32 quants, -offset times the sums that the two halves of a 32-bit lane make of them (in each lane).
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn lane_sums(quants: __m256i, offset: i32) -> [__m128i; 2] {
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(offset as i8), quants);
    let pairs = _mm256_sub_epi16(_mm256_setzero_si256(), pairs);
    let fours = _mm256_add_epi16(pairs, _mm256_shuffle_epi32::<0b01_00_11_10>(pairs));
    let sums = _mm256_add_epi16(fours, _mm256_shuffle_epi32::<0b10_11_00_01>(fours));
    [
        _mm256_castsi256_si128(sums),
        _mm256_extracti128_si256::<1>(sums),
    ]
}
