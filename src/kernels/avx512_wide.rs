//! Products with quantised weights on AVX-512 for many tokens. The order of the arithmetic is the parent module's.
//!
//! A tile of 32 rows is unpacked into a scratch, transposed so that a vector holds four consecutive values of each of 16
//! rows (`unpack`). One block of 256 of it, or an eighth of a segment of blocks of 32, is used at a time, and stays in
//! the first-level cache. The tokens' quants are packed in the order in which the tile
//! reads them (`panel`). Each vector is multiplied with four broadcast quants of up to `TILE_TOKENS` tokens:
//! `vpdpbusd` does 64 multiplications, and no sum across lanes is ever needed.
//!
//! In blocks of 256, sums of products are scaled before they are added up. Where such a sum fits 16 bits, one
//! `vpdpwssd` by the integer scale in the lower half of the lane does both. With quants of at most 127, sums over 16
//! values of Q2_K fit (3 * 127 * 16 = 6096). Others fit once the middle of their range is subtracted: |value - 4| * 127 *
//! 16 (Q3_K), |value - 8| * 127 * 32 (Q4_K), |value - 16| * 127 * 16 (Q5_K) and |value - 32| * 127 * 8 (Q6_K) are at most
//! 32512. Values stay unsigned for the instruction; instead a sum starts at minus that offset (`panel::offset256`) times the sum of its quants, which the
//! panel holds. Where the format subtracts that very offset, its work is done too.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]
#![expect(
    clippy::needless_range_loop,
    reason = "an index keeps several arrays in step"
)]

mod panel;
mod unpack;

use std::arch::x86_64::*;

use super::activations::Activations;
use super::avx512::multiply_add_pairs;
use super::blocks::{Format32, Format256};
use super::matmul::{MatrixView, Output};
use super::streaming;
pub(super) use panel::Panels;
use panel::{Words32, Words256};
use unpack::{Scratch32, Scratch256, prefetch_rows};

/// Rows of a tile: two vectors of 16.
const TILE_ROWS: usize = 32;
/// Tokens that share a loaded vector of weights. The sums of 8 tokens need 16 registers, and as many wait in others or
/// in the first-level cache; fewer sums than 12 do not cover the latency of `vpdpbusd`.
const TILE_TOKENS: usize = 8;

/// Fewer tokens than this do not repay the transposition, in the steps of a model: the loops over single rows are faster.
const WIDTH_MIN32: usize = 5;

/// The same for blocks of 256.
const fn width_min256(format: Format256) -> usize {
    match format {
        Format256::Q2K => 3,
        Format256::Q3K | Format256::Q4K | Format256::Q5K | Format256::Q6K => 5,
    }
}

/// Multiplies whole tiles where there are tokens enough; how many rows were done.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn rows32<const F: u8>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) -> usize {
    let format = Format32::from_index(F);
    let block_bytes = format.block_bytes();
    let words = const { Words32::of(Format32::from_index(F)) };
    let blocks = weight.columns / 32;
    let Some(panels) = x.panels().of32(format) else {
        return 0;
    };
    let groups = panels.groups;
    let segments = blocks.div_ceil(8 * groups);
    let mut scratch = vec![Scratch32::empty(); 8 * groups];
    let mut partial = vec![[_mm512_setzero_ps(); 2]; 8 * panels.tokens];
    let row_bytes = weight.row_bytes();
    for first_token in (0..x.width()).step_by(panels.tokens) {
        let tokens = (x.width() - first_token).min(panels.tokens);
        let panel = panels.from(first_token);
        for (tile, rows) in weight.bytes.chunks_exact(TILE_ROWS * row_bytes).enumerate() {
            partial.fill([_mm512_setzero_ps(); 2]);
            for segment in 0..segments {
                let first_block = segment * 8 * groups;
                let count = (blocks - first_block).min(8 * groups);
                for b in 0..count {
                    let at = (first_block + b) * block_bytes;
                    scratch[b % 8 * groups + b / 8].fill::<F>(rows, row_bytes, at);
                }
                let segment_bytes = 8 * groups * block_bytes;
                let next = (segment + 1) * segment_bytes;
                for slot in 0..count.min(8) {
                    let scratch = &scratch[slot * groups..][..(count - slot).div_ceil(8)];
                    // Each eighth of the work asks for what an eighth of the rows need next.
                    prefetch_rows(rows, row_bytes, next, segment_bytes, 4 * slot..4 * slot + 4);
                    let panel = &panel[(segment * 8 + slot) * tokens * groups * words.count..];
                    let mut t = 0;
                    while t < tokens {
                        let partial = &mut partial[slot * tokens + t..(slot + 1) * tokens];
                        let panel = &panel[t * groups * words.count..];
                        t += TILE_TOKENS;
                        match partial.len() {
                            1 => tile32::<F, 1>(scratch, panel, groups, partial),
                            2 => tile32::<F, 2>(scratch, panel, groups, partial),
                            3 => tile32::<F, 3>(scratch, panel, groups, partial),
                            4 => tile32::<F, 4>(scratch, panel, groups, partial),
                            5 => tile32::<F, 5>(scratch, panel, groups, partial),
                            6 => tile32::<F, 6>(scratch, panel, groups, partial),
                            7 => tile32::<F, 7>(scratch, panel, groups, partial),
                            _ => tile32::<F, 8>(scratch, panel, groups, partial),
                        }
                    }
                }
            }
            for t in 0..tokens {
                for half in 0..2 {
                    let p = |slot: usize| partial[slot * tokens + t][half];
                    let even = _mm512_add_ps(_mm512_add_ps(p(0), p(4)), _mm512_add_ps(p(2), p(6)));
                    let odd = _mm512_add_ps(_mm512_add_ps(p(1), p(5)), _mm512_add_ps(p(3), p(7)));
                    let at = out
                        .token(first_token + t)
                        .wrapping_add(tile * TILE_ROWS + 16 * half);
                    // SAFETY: 16 rows of the tile at hand, for a token that is there.
                    unsafe { _mm512_storeu_ps(at, _mm512_add_ps(even, odd)) };
                }
            }
        }
    }
    weight.rows / TILE_ROWS * TILE_ROWS
}

/// Multiplies whole tiles where there are tokens enough; how many rows were done.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
pub(super) fn rows256<const F: u8>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) -> usize {
    let Some(panels) = x.panels().of256(Format256::from_index(F)) else {
        return 0;
    };
    let block_bytes = Format256::from_index(F).block_bytes();
    let blocks = weight.columns / 256;
    let words = const { Words256::of(Format256::from_index(F)) };
    let mut scratch = Scratch256::empty();
    let mut partial = vec![[_mm512_setzero_ps(); 2]; 4 * panels.tokens];
    let row_bytes = weight.row_bytes();
    for first_token in (0..x.width()).step_by(panels.tokens) {
        let tokens = (x.width() - first_token).min(panels.tokens);
        let panel = panels.from(first_token);
        for (tile, rows) in weight.bytes.chunks_exact(TILE_ROWS * row_bytes).enumerate() {
            partial.fill([_mm512_setzero_ps(); 2]);
            for block in 0..blocks {
                scratch.fill::<F>(rows, row_bytes, block);
                let tiles = tokens.div_ceil(TILE_TOKENS);
                let mut ahead = NextBlock::of(rows, row_bytes, (block + 1) * block_bytes, tiles);
                let panel = &panel[block * tokens * words.count..];
                let partial = &mut partial[block % 4 * tokens..(block % 4 + 1) * tokens];
                let mut t = 0;
                while t < tokens {
                    let partial = &mut partial[t..];
                    let panel = &panel[t * words.count..];
                    ahead.start_tile(t / TILE_TOKENS);
                    t += TILE_TOKENS;
                    match partial.len() {
                        1 => tile256::<F, 1>(&scratch, panel, &mut ahead, partial),
                        2 => tile256::<F, 2>(&scratch, panel, &mut ahead, partial),
                        3 => tile256::<F, 3>(&scratch, panel, &mut ahead, partial),
                        4 => tile256::<F, 4>(&scratch, panel, &mut ahead, partial),
                        5 => tile256::<F, 5>(&scratch, panel, &mut ahead, partial),
                        6 => tile256::<F, 6>(&scratch, panel, &mut ahead, partial),
                        7 => tile256::<F, 7>(&scratch, panel, &mut ahead, partial),
                        _ => tile256::<F, 8>(&scratch, panel, &mut ahead, partial),
                    }
                }
            }
            for t in 0..tokens {
                for half in 0..2 {
                    let p = |slot: usize| partial[slot * tokens + t][half];
                    let sum = _mm512_add_ps(_mm512_add_ps(p(0), p(1)), _mm512_add_ps(p(2), p(3)));
                    let at = out
                        .token(first_token + t)
                        .wrapping_add(tile * TILE_ROWS + 16 * half);
                    // SAFETY: 16 rows of the tile at hand, for a token that is there.
                    unsafe { _mm512_storeu_ps(at, sum) };
                }
            }
        }
    }
    weight.rows / TILE_ROWS * TILE_ROWS
}

/// A tile times the first C tokens of `panel`, over the blocks in the scratch, which all add to the same partial sums.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline(never)]
fn tile32<const F: u8, const C: usize>(
    scratch: &[Scratch32],
    panel: &[i32],
    groups: usize,
    partial: &mut [[__m512; 2]],
) {
    let words = const { Words32::of(Format32::from_index(F)) };
    assert!(scratch.len() <= groups);
    let panel = panel[..C * groups * words.count].as_ptr();
    let partial = &mut partial[..C];
    let mut totals = [[_mm512_setzero_ps(); C]; 2];
    for c in 0..C {
        for half in 0..2 {
            totals[half][c] = partial[c][half];
        }
    }
    for (b, scratch) in scratch.iter().enumerate() {
        let word = |c: usize, word: usize| {
            // SAFETY: the slice above holds `groups` blocks of C tokens, and there are no more blocks; words are below
            // `words.count`.
            unsafe { *panel.add((c * groups + b) * words.count + word) }
        };
        let mut sums = [[_mm512_setzero_si512(); C]; 2];
        if let Some(start) = words.start {
            for c in 0..C {
                sums[0][c] = broadcast(word(c, start));
                sums[1][c] = sums[0][c];
            }
        }
        for k in 0..8 {
            let [lower, upper] = scratch.values[k];
            for c in 0..C {
                let four = broadcast(word(c, k));
                sums[0][c] = _mm512_dpbusd_epi32(sums[0][c], lower, four);
                sums[1][c] = _mm512_dpbusd_epi32(sums[1][c], upper, four);
            }
        }
        for c in 0..C {
            let x_scale = _mm512_castsi512_ps(broadcast(word(c, words.scale)));
            for half in 0..2 {
                let scale = _mm512_mul_ps(scratch.scales[half], x_scale);
                let sum = _mm512_cvtepi32_ps(sums[half][c]);
                totals[half][c] = _mm512_fmadd_ps(scale, sum, totals[half][c]);
                if let Some(scaled_sum) = words.scaled_sum {
                    let scaled_sum = _mm512_castsi512_ps(broadcast(word(c, scaled_sum)));
                    let minimum = scratch.minimums[half];
                    totals[half][c] = _mm512_fmadd_ps(minimum, scaled_sum, totals[half][c]);
                }
            }
        }
    }
    for c in 0..C {
        for half in 0..2 {
            partial[c][half] = totals[half][c];
        }
    }
}

/// What a tile of rows needs for its next block, or at the rows' end for the next tile's first: the processor follows far
/// fewer streams than 32. The last products of the rows' block, up to four, ask for it, each in eight steps: fewer misses
/// are in flight at a time than the processor can hold, and what they bring is not evicted before it is used.
struct NextBlock {
    at: *const u8,
    row_bytes: usize,
    /// Rows of a step.
    rows: usize,
    /// Rows of a step, once it is time.
    share: usize,
    /// The product from which on it is time.
    first: usize,
}

impl NextBlock {
    fn of(rows: &[u8], row_bytes: usize, mut at: usize, tiles: usize) -> NextBlock {
        if at >= row_bytes {
            at = TILE_ROWS * row_bytes;
        }
        let share = match tiles {
            1 => 4,
            2 | 3 => 2,
            _ => 1,
        };
        NextBlock {
            at: rows.as_ptr().wrapping_add(at),
            row_bytes,
            rows: 0,
            share,
            first: tiles - TILE_ROWS / 8 / share,
        }
    }

    fn start_tile(&mut self, index: usize) {
        self.rows = if index >= self.first { self.share } else { 0 };
    }
}

/// A tile times the first C tokens of `panel`, over the block in the scratch.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline(never)]
fn tile256<const F: u8, const C: usize>(
    scratch: &Scratch256,
    panel: &[i32],
    ahead: &mut NextBlock,
    partial: &mut [[__m512; 2]],
) {
    let format = Format256::from_index(F);
    let words = const { Words256::of(Format256::from_index(F)) };
    let at_hand = C * words.count;
    // The words of the next tokens.
    let next = panel.as_ptr().wrapping_add(at_hand);
    streaming::lines(next.cast(), 4 * at_hand);
    let panel = panel[..C * words.count].as_ptr();
    let partial = &mut partial[..C];
    let word = |c: usize, word: usize| {
        // SAFETY: the slice above holds a block of C tokens; words are below `words.count`.
        unsafe { *panel.add(c * words.count + word) }
    };
    let mut sums = [[_mm512_setzero_si512(); C]; 2];
    // What the sums start with and the format does not subtract.
    if words.starts.is_some() && format.has_minimum() {
        for pair in 0..4 {
            for c in 0..C {
                let two = broadcast(word(c, words.sums + pair));
                for half in 0..2 {
                    let factors = scratch.scale_pairs[pair][half];
                    sums[half][c] = multiply_add_pairs(sums[half][c], factors, two);
                }
            }
        }
    }
    // Sums that are scaled in a row by the same scale.
    let repeats = if matches!(format, Format256::Q5K | Format256::Q6K) {
        2
    } else {
        1
    };
    let block_bytes = format.block_bytes();
    let mut ahead_at = ahead.at;
    for j in 0..64 / words.steps {
        // The eight steps of `Ahead`.
        let rows = if j % (8 / words.steps) == 0 {
            ahead.rows
        } else {
            0
        };
        for _ in 0..rows {
            for line in (0..block_bytes).step_by(64) {
                // Prefetching an address that is not mapped does nothing, so the end of the weights needs no care.
                _mm_prefetch::<_MM_HINT_T0>(ahead_at.wrapping_add(line).cast());
            }
            ahead_at = ahead_at.wrapping_add(ahead.row_bytes);
        }
        let mut products = [[_mm512_setzero_si512(); C]; 2];
        if let Some(starts) = words.starts {
            for c in 0..C {
                products[0][c] = broadcast(word(c, starts + j));
                products[1][c] = products[0][c];
            }
        }
        for k in words.steps * j..words.steps * (j + 1) {
            let [lower, upper] = scratch.values[k];
            for c in 0..C {
                let four = broadcast(word(c, k));
                products[0][c] = _mm512_dpbusd_epi32(products[0][c], lower, four);
                products[1][c] = _mm512_dpbusd_epi32(products[1][c], upper, four);
            }
        }
        for half in 0..2 {
            let scale = scratch.scales[j / repeats][half];
            for c in 0..C {
                sums[half][c] = multiply_add_pairs(sums[half][c], products[half][c], scale);
            }
        }
    }
    ahead.at = ahead_at;
    let mut of_sums = [[_mm512_setzero_si512(); C]; 2];
    if format.has_minimum() {
        for pair in 0..words.sums_count {
            for c in 0..C {
                let two = broadcast(word(c, words.sums + pair));
                for half in 0..2 {
                    let factors = scratch.minimum_pairs[pair][half];
                    of_sums[half][c] = multiply_add_pairs(of_sums[half][c], factors, two);
                }
            }
        }
    }
    for c in 0..C {
        let x_scale = _mm512_castsi512_ps(broadcast(word(c, words.scale)));
        for half in 0..2 {
            let to = &mut partial[c][half];
            let scale = _mm512_mul_ps(scratch.scale[half], x_scale);
            let mut next = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sums[half][c]), *to);
            if format.has_minimum() {
                let minimum = _mm512_mul_ps(scratch.minimum[half], x_scale);
                next = _mm512_fnmadd_ps(minimum, _mm512_cvtepi32_ps(of_sums[half][c]), next);
            }
            *to = next;
        }
    }
}

/// The word in every lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn broadcast(word: i32) -> __m512i {
    _mm512_set1_epi32(word)
}
