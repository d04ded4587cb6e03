//! The input of the wide loops: what a tile reads of a token, 32 bits at a time, in the order in which it reads it.

use std::arch::x86_64::*;

use super::super::activations::Quantised;
use super::super::blocks::{Format32, Format256};

/// The words of one block of 32 of a token: eight of quants, then what the format needs.
pub(super) struct Words32 {
    /// -offset times the sum of quants: where the sum of products starts.
    pub(super) start: Option<usize>,
    pub(super) scaled_sum: Option<usize>,
    pub(super) scale: usize,
    pub(super) count: usize,
}

impl Words32 {
    pub(super) const fn of(format: Format32) -> Words32 {
        let (start, scaled_sum) = match format {
            Format32::Q4_0 | Format32::Q5_0 | Format32::Q8_0 => (Some(9), None),
            Format32::Q4_1 | Format32::Q5_1 => (None, Some(9)),
        };
        Words32 {
            start,
            scaled_sum,
            scale: 8,
            count: 10,
        }
    }
}

/// The words of one block of 256 of a token: 64 of quants, then what the format needs.
pub(super) struct Words256 {
    /// Fours of values that are added up before they are scaled.
    pub(super) steps: usize,
    /// For each sum of that many fours, -offset times the sum of the quants: where it starts.
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
            Format256::Q3K => (4, 16, 0),
            Format256::Q4K => (8, 8, 4),
            Format256::Q5K => (4, 16, 4),
            Format256::Q6K => (2, 32, 0),
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

/// What sums of a format's products have subtracted, so that they fit 16 bits.
pub(super) const fn offset256(format: Format256) -> i32 {
    match format {
        Format256::Q2K => 0,
        Format256::Q3K => 4,
        Format256::Q4K => 8,
        Format256::Q5K => 16,
        Format256::Q6K => 32,
    }
}

/// Packs `tokens` tokens: for each segment of `groups` times eight blocks, for each of the eight partial sums, for each
/// token, the words of the segment's blocks that add to it.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn pack32<const F: u8>(
    x: &Quantised,
    first_token: usize,
    tokens: usize,
    groups: usize,
    panel: &mut [i32],
) {
    let format = Format32::from_index(F);
    let words = const { Words32::of(Format32::from_index(F)) };
    for t in 0..tokens {
        let row = x.row(first_token + t);
        // Rows of activations are padded to whole groups of eight.
        for block in 0..x.blocks_stride {
            let (group, slot) = (block / 8, block % 8);
            let (segment, group) = (group / groups, group % groups);
            let at = ((segment * 8 + slot) * tokens + t) * groups + group;
            let to = &mut panel[at * words.count..(at + 1) * words.count];
            let quants = &row.quants[32 * block..32 * block + 32];
            // SAFETY: both slices hold 32 bytes or more.
            unsafe {
                let quants = _mm256_loadu_si256(quants.as_ptr().cast());
                _mm256_storeu_si256(to.as_mut_ptr().cast(), quants);
            }
            to[words.scale] = row.scales[block].to_bits() as i32;
            if let Some(start) = words.start {
                to[start] = -format.offset() * row.sums32[block];
            }
            if let Some(scaled_sum) = words.scaled_sum {
                to[scaled_sum] = row.scaled_sums[block].to_bits() as i32;
            }
        }
    }
}

/// Packs `tokens` tokens: for each block, for each token the block's words.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
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
            let sums16 = &row.sums16[16 * block..16 * block + 16];
            let sums_of_32 = &row.sums_of_32[8 * block..8 * block + 8];
            for v in 0..4 {
                // SAFETY: both slices hold 256 bytes or more.
                let quants = unsafe {
                    let quants = _mm512_loadu_si512(quants.add(64 * v).cast());
                    _mm512_storeu_si512(to.as_mut_ptr().add(16 * v).cast(), quants);
                    quants
                };
                if words.steps == 2 {
                    let sums = sums_of_8(quants, offset256(format));
                    let to = &mut to[64 + 8 * v..64 + 8 * v + 8];
                    // SAFETY: the slice holds 8 words.
                    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), sums) };
                }
            }
            if let Some(starts) = words.starts {
                let sums = match words.steps {
                    8 => sums_of_32,
                    4 => sums16,
                    _ => &[],
                };
                for (to, sum) in to[starts..].iter_mut().zip(sums) {
                    *to = -offset256(format) * i32::from(*sum);
                }
            }
            let sums = match words.sums_count {
                8 => sums16,
                4 => sums_of_32,
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

/// -offset times the sum of each eight quants.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn sums_of_8(quants: __m512i, offset: i32) -> __m256i {
    let zero = _mm512_setzero_si512();
    let fours = _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(offset as i8), quants);
    let eights = _mm512_add_epi32(fours, _mm512_srli_epi64::<32>(fours));
    _mm256_sub_epi32(_mm256_setzero_si256(), _mm512_cvtepi64_epi32(eights))
}
