//! Products with quantised weights on AVX2 for many tokens. The order of the arithmetic is the parent module's.
//!
//! A tile of 16 rows is unpacked 256 columns at a time into a scratch that stays in the first-level cache, transposed
//! so that a vector holds four consecutive values of each of 8 rows (`unpack`). The tokens' quants are packed in the
//! order in which the tile reads them (`panel`). Each vector is multiplied with four broadcast quants of up to
//! `TILE_TOKENS` tokens: `vpmaddubsw` does 32 multiplications, and no sum across lanes is ever needed.
//!
//! The sums of a whole sub-block stay in 16-bit lanes, which makes one widening multiplication (`vpmaddwd`, by the
//! sub-block's integer scale) do for 4 or 8 of the narrow ones. A lane adds up 8 or 16 products; with quants of at most
//! 127, values below 16 fit 16 of them (15 * 127 * 16 = 30480). Wider values fit once the middle of their range is
//! subtracted: |value - 16| * 127 * 16 and |value - 32| * 127 * 8 are at most 32512. Values stay unsigned for the
//! instruction; instead a lane starts at minus that offset (`panel::offset32`, `panel::offset256`) times the sum of its
//! quants, which the panel holds, and wraps around on its way to a sum that fits. Where the format subtracts that very
//! offset, its work is done too. Q8_0 is too wide for any of this: each pair of products is widened at once.
#![expect(unsafe_code, reason = "processor intrinsics over borrowed bytes")]
#![expect(
    clippy::needless_range_loop,
    reason = "an index keeps several arrays in step"
)]

mod panel;
mod unpack;

use std::arch::asm;
use std::arch::x86_64::*;

use super::activations::Activations;
use super::blocks::{Format32, Format256};
use super::matmul::{MatrixView, Output};
use super::streaming;
use panel::{Words32, Words256, pack32, pack256};
use unpack::{Scratch32, Scratch256};

/// Rows of a tile: two vectors of 8.
const TILE_ROWS: usize = 16;

/// Fewer tokens than this do not repay the transposition: `row32` is faster (`cargo bench --bench kernels`).
const fn width_min32(format: Format32) -> usize {
    match format {
        Format32::Q4_0 | Format32::Q4_1 | Format32::Q5_0 | Format32::Q5_1 => 5,
        Format32::Q8_0 => 12,
    }
}

/// The same beside `row256`.
const fn width_min256(format: Format256) -> usize {
    match format {
        Format256::Q2K | Format256::Q3K => 8,
        Format256::Q4K => 12,
        Format256::Q5K | Format256::Q6K => 16,
    }
}

/// Tokens of a panel: what a tile reads of them in 4096 columns, and their partial sums, stay in a second-level cache
/// of 512 KiB.
const PANEL_TOKENS: usize = 48;
/// Tokens that share a loaded vector of weights; bounded by the 16 registers.
const TILE_TOKENS: usize = 6;

/// Multiplies whole tiles where there are tokens enough; how many rows were done.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows32<const F: u8>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) -> usize {
    if x.width() < width_min32(Format32::from_index(F)) || weight.rows < TILE_ROWS {
        return 0;
    }
    let blocks = weight.columns / 32;
    let words = const { Words32::of(Format32::from_index(F)) };
    let group_words = 8 * words.count;
    // Signed values take more registers.
    let tile_tokens = if F == Format32::Q8_0 as u8 {
        TILE_TOKENS - 2
    } else {
        TILE_TOKENS
    };
    let panel_tokens = x.width().min(PANEL_TOKENS);
    let mut panel = vec![0i32; panel_tokens * blocks.div_ceil(8) * group_words];
    let mut scratch = Scratch32::empty();
    let mut partial = vec![[[[0.0f32; 8]; 2]; 8]; panel_tokens];
    let row_bytes = weight.row_bytes();
    for first_token in (0..x.width()).step_by(PANEL_TOKENS) {
        let tokens = (x.width() - first_token).min(PANEL_TOKENS);
        pack32::<F>(x.blocks32(), first_token, tokens, &mut panel);
        for (tile, rows) in weight.bytes.chunks_exact(TILE_ROWS * row_bytes).enumerate() {
            partial.fill([[[0.0; 8]; 2]; 8]);
            for first_block in (0..blocks).step_by(8) {
                let count = (blocks - first_block).min(8);
                scratch.fill::<F>(rows, row_bytes, first_block, count);
                let panel = &panel[first_block / 8 * tokens * group_words..];
                let mut t = 0;
                while t < tokens {
                    let partial = &mut partial[t..tokens];
                    let panel = &panel[t * group_words..];
                    t += tile_tokens;
                    match partial.len().min(tile_tokens) {
                        1 => tile32::<F, 1>(&scratch, panel, count, partial),
                        2 => tile32::<F, 2>(&scratch, panel, count, partial),
                        3 => tile32::<F, 3>(&scratch, panel, count, partial),
                        4 => tile32::<F, 4>(&scratch, panel, count, partial),
                        5 => tile32::<F, 5>(&scratch, panel, count, partial),
                        _ => tile32::<F, 6>(&scratch, panel, count, partial),
                    }
                }
            }
            for (t, partial) in partial[..tokens].iter().enumerate() {
                for half in 0..2 {
                    let p = |b: usize| load(&partial[b][half]);
                    let even = _mm256_add_ps(_mm256_add_ps(p(0), p(4)), _mm256_add_ps(p(2), p(6)));
                    let odd = _mm256_add_ps(_mm256_add_ps(p(1), p(5)), _mm256_add_ps(p(3), p(7)));
                    let at = out
                        .token(first_token + t)
                        .wrapping_add(tile * TILE_ROWS + 8 * half);
                    // SAFETY: 8 rows of the tile at hand, for a token that is there.
                    unsafe { _mm256_storeu_ps(at, _mm256_add_ps(even, odd)) };
                }
            }
        }
    }
    weight.rows / TILE_ROWS * TILE_ROWS
}

/// Multiplies whole tiles where there are tokens enough; how many rows were done.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn rows256<const F: u8>(
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) -> usize {
    if x.width() < width_min256(Format256::from_index(F)) || weight.rows < TILE_ROWS {
        return 0;
    }
    let blocks = weight.columns / 256;
    let words = const { Words256::of(Format256::from_index(F)) };
    let panel_tokens = x.width().min(PANEL_TOKENS);
    let mut panel = vec![0i32; panel_tokens * blocks * words.count];
    let mut scratch = Scratch256::empty();
    let mut partial = vec![[[[0.0f32; 8]; 2]; 4]; panel_tokens];
    let row_bytes = weight.row_bytes();
    for first_token in (0..x.width()).step_by(PANEL_TOKENS) {
        let tokens = (x.width() - first_token).min(PANEL_TOKENS);
        pack256::<F>(x.blocks256(), first_token, tokens, blocks, &mut panel);
        for (tile, rows) in weight.bytes.chunks_exact(TILE_ROWS * row_bytes).enumerate() {
            partial.fill([[[0.0; 8]; 2]; 4]);
            for block in 0..blocks {
                scratch.fill::<F>(rows, row_bytes, block);
                let panel = &panel[block * tokens * words.count..];
                let mut t = 0;
                while t < tokens {
                    let partial = &mut partial[t..tokens];
                    let panel = &panel[t * words.count..];
                    t += TILE_TOKENS;
                    match partial.len() {
                        1 => tile256::<F, 1>(&scratch, panel, block % 4, partial),
                        2 => tile256::<F, 2>(&scratch, panel, block % 4, partial),
                        3 => tile256::<F, 3>(&scratch, panel, block % 4, partial),
                        4 => tile256::<F, 4>(&scratch, panel, block % 4, partial),
                        5 => tile256::<F, 5>(&scratch, panel, block % 4, partial),
                        _ => tile256::<F, 6>(&scratch, panel, block % 4, partial),
                    }
                }
            }
            for (t, partial) in partial[..tokens].iter().enumerate() {
                for half in 0..2 {
                    let p = |b: usize| load(&partial[b][half]);
                    let sum = _mm256_add_ps(_mm256_add_ps(p(0), p(1)), _mm256_add_ps(p(2), p(3)));
                    let at = out
                        .token(first_token + t)
                        .wrapping_add(tile * TILE_ROWS + 8 * half);
                    // SAFETY: 8 rows of the tile at hand, for a token that is there.
                    unsafe { _mm256_storeu_ps(at, sum) };
                }
            }
        }
    }
    weight.rows / TILE_ROWS * TILE_ROWS
}

/// A tile times the first C tokens of `panel`, over the `count` blocks in the scratch.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
fn tile32<const F: u8, const C: usize>(
    scratch: &Scratch32,
    panel: &[i32],
    count: usize,
    partial: &mut [[[[f32; 8]; 2]; 8]],
) {
    let format = Format32::from_index(F);
    let words = const { Words32::of(Format32::from_index(F)) };
    assert!(count <= 8);
    let at_hand = 8 * C * words.count;
    // The words of the next tokens.
    let next = panel.as_ptr().wrapping_add(at_hand);
    streaming::lines(next.cast(), 4 * at_hand);
    let panel = panel[..C * 8 * words.count].as_ptr();
    let partial = &mut partial[..C];
    let ones = _mm256_set1_epi16(1);
    for b in 0..count {
        let word = |c: usize, word: usize| {
            // SAFETY: the slice above holds eight blocks of C tokens, and there are no more than eight blocks; words are below `words.count`.
            unsafe { *panel.add((8 * c + b) * words.count + word) }
        };
        let mut sums = [[_mm256_setzero_si256(); C]; 2];
        if format == Format32::Q8_0 {
            for k in 0..8 {
                let [lower, upper] = scratch.values[b][k];
                let (lower_size, upper_size) = (_mm256_abs_epi8(lower), _mm256_abs_epi8(upper));
                for c in 0..C {
                    let four = broadcast(word(c, k));
                    sums[0][c] = add_signed_products(sums[0][c], lower, lower_size, four, ones);
                    sums[1][c] = add_signed_products(sums[1][c], upper, upper_size, four, ones);
                }
            }
        } else {
            if let Some(start) = words.start {
                for c in 0..C {
                    sums[0][c] = broadcast(word(c, start));
                    sums[1][c] = sums[0][c];
                }
            }
            for k in 0..8 {
                let [lower, upper] = scratch.values[b][k];
                for c in 0..C {
                    let four = broadcast(word(c, k));
                    sums[0][c] = add_products(sums[0][c], lower, four);
                    sums[1][c] = add_products(sums[1][c], upper, four);
                }
            }
            for c in 0..C {
                for half in 0..2 {
                    sums[half][c] = _mm256_madd_epi16(sums[half][c], ones);
                    if let Some(back) = words.back {
                        sums[half][c] = _mm256_add_epi32(sums[half][c], broadcast(word(c, back)));
                    }
                }
            }
        }
        for c in 0..C {
            let x_scale = _mm256_castsi256_ps(broadcast(word(c, words.scale)));
            for half in 0..2 {
                let scale = _mm256_mul_ps(scratch.scales[b][half], x_scale);
                let to = &mut partial[c][b][half];
                let mut next = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums[half][c]), load(to));
                if let Some(scaled_sum) = words.scaled_sum {
                    let scaled_sum = _mm256_castsi256_ps(broadcast(word(c, scaled_sum)));
                    next = _mm256_fmadd_ps(scratch.minimums[b][half], scaled_sum, next);
                }
                store(to, next);
            }
        }
    }
}

/// A tile times the first C tokens of `panel`, over the block in the scratch.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
fn tile256<const F: u8, const C: usize>(
    scratch: &Scratch256,
    panel: &[i32],
    slot: usize,
    partial: &mut [[[[f32; 8]; 2]; 4]],
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
    let mut sums = [[_mm256_setzero_si256(); C]; 2];
    if format == Format256::Q5K {
        for pair in 0..4 {
            for c in 0..C {
                let two = broadcast(word(c, words.sums + pair));
                for half in 0..2 {
                    let back = _mm256_madd_epi16(scratch.scale_pairs[pair][half], two);
                    sums[half][c] = _mm256_add_epi32(sums[half][c], back);
                }
            }
        }
        for c in 0..C {
            for half in 0..2 {
                sums[half][c] = _mm256_slli_epi32::<4>(sums[half][c]);
            }
        }
    }
    let steps = words.steps;
    for j in 0..64 / steps {
        let mut products = [[_mm256_setzero_si256(); C]; 2];
        if let Some(starts) = words.starts {
            for c in 0..C {
                products[0][c] = broadcast(word(c, starts + j));
                products[1][c] = products[0][c];
            }
        }
        for k in steps * j..steps * (j + 1) {
            let [lower, upper] = scratch.values[k];
            for c in 0..C {
                let four = broadcast(word(c, k));
                products[0][c] = add_products(products[0][c], lower, four);
                products[1][c] = add_products(products[1][c], upper, four);
            }
        }
        for half in 0..2 {
            for c in 0..C {
                let scaled = _mm256_madd_epi16(products[half][c], scratch.scales[j][half]);
                sums[half][c] = _mm256_add_epi32(sums[half][c], scaled);
            }
        }
    }
    for c in 0..C {
        let x_scale = _mm256_castsi256_ps(broadcast(word(c, words.scale)));
        for half in 0..2 {
            let to = &mut partial[c][slot][half];
            let scale = _mm256_mul_ps(scratch.scale[half], x_scale);
            let mut next = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums[half][c]), load(to));
            if format.has_minimum() {
                let mut of_sums = _mm256_setzero_si256();
                for pair in 0..words.sums_count {
                    let two = broadcast(word(c, words.sums + pair));
                    let factors = scratch.minimum_pairs[pair][half];
                    of_sums = _mm256_add_epi32(of_sums, _mm256_madd_epi16(factors, two));
                }
                let minimum = _mm256_mul_ps(scratch.minimum[half], x_scale);
                next = _mm256_fnmadd_ps(minimum, _mm256_cvtepi32_ps(of_sums), next);
            }
            store(to, next);
        }
    }
}

/// Adds products of unsigned values and signed quants, two in each 16-bit lane, to sums that may wrap around.
///
/// In assembly because the compiler regroups plain additions, (sum + a) + b into sum + (a + b), until the registers do
/// not hold the intermediate results.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_products(mut sums: __m256i, values: __m256i, quants: __m256i) -> __m256i {
    // SAFETY: the instructions compute registers from registers.
    unsafe {
        asm!(
            "vpmaddubsw {products}, {values}, {quants}",
            "vpaddw {sums}, {sums}, {products}",
            products = out(ymm_reg) _,
            values = in(ymm_reg) values,
            quants = in(ymm_reg) quants,
            sums = inout(ymm_reg) sums,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// Adds products of signed values, the magnitudes of which are `sizes`, and signed quants, four in each lane. A pair of
/// them fits 16 bits: 128 * 127 * 2 = 32512. In assembly for the reason above.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_signed_products(
    mut sums: __m256i,
    values: __m256i,
    sizes: __m256i,
    quants: __m256i,
    ones: __m256i,
) -> __m256i {
    // SAFETY: the instructions compute registers from registers.
    unsafe {
        asm!(
            "vpsignb {products}, {quants}, {values}",
            "vpmaddubsw {products}, {sizes}, {products}",
            "vpmaddwd {products}, {products}, {ones}",
            "vpaddd {sums}, {sums}, {products}",
            products = out(ymm_reg) _,
            values = in(ymm_reg) values,
            sizes = in(ymm_reg) sizes,
            quants = in(ymm_reg) quants,
            ones = in(ymm_reg) ones,
            sums = inout(ymm_reg) sums,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// The word in every lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn broadcast(word: i32) -> __m256i {
    _mm256_set1_epi32(word)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn load(from: &[f32; 8]) -> __m256 {
    // SAFETY: the array holds 8 values.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn store(to: &mut [f32; 8], value: __m256) {
    // SAFETY: the array holds 8 values.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
}
