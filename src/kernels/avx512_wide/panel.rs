//! The input of the wide loops: what a tile reads of a token, 32 bits at a time, in the order in which it reads it.
//!
//! Packed once for an input and a format, before the threads take their rows: a chunk of rows may be two tiles high,
//! for which packing would cost a fifth of the product.

use std::arch::x86_64::*;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::gguf::TensorType;

use super::super::activations::{Activations, Quantised};
use super::super::blocks::{Format32, Format256, Storage, for_format32, for_format256, storage};
use super::super::{ComputePool, InstructionSet};
use super::{TILE_TOKENS, WIDTH_MIN32, width_min256};

/// Bytes of a panel: most of a second-level cache of 2 MiB.
const PANEL_BYTES: usize = 1280 << 10;
const PANEL_TOKENS: usize = 128;
/// Groups of eight blocks of 32 in a segment.
pub(super) const GROUPS_MAX: usize = 8;
/// Up to so many tokens, segments have one group.
const GROUPS_TOKENS: usize = 16;

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

/// The tokens of an input, packed for the formats that were multiplied with it.
#[derive(Default)]
pub(in crate::kernels) struct Panels {
    blocks32: [OnceLock<Panel>; 5],
    blocks256: [OnceLock<Panel>; 5],
}

/// All tokens of an input, packed for one format.
pub(super) struct Panel {
    words: Vec<i32>,
    /// Tokens that are taken together: their words and partial sums stay in the second-level cache.
    pub(super) tokens: usize,
    /// Words of one token.
    token_words: usize,
    /// Groups of eight blocks of 32 in a segment. Blocks of 256: unused.
    pub(super) groups: usize,
}

impl Panels {
    /// Packs the input for weights of a type, where it has tokens enough for the wide loops.
    pub(in crate::kernels) fn prepare(
        &self,
        kind: TensorType,
        x: &Activations<'_>,
        pool: &ComputePool,
    ) {
        if pool.instruction_set() != InstructionSet::Avx512 {
            return;
        }
        match storage(kind) {
            Storage::Blocks32(format) if x.width() >= WIDTH_MIN32 => {
                self.blocks32[format as usize].get_or_init(|| panel32(format, x, pool));
            }
            Storage::Blocks256(format) if x.width() >= width_min256(format) => {
                self.blocks256[format as usize].get_or_init(|| panel256(format, x, pool));
            }
            _ => {}
        }
    }

    /// What `prepare` packed.
    pub(super) fn of32(&self, format: Format32) -> Option<&Panel> {
        self.blocks32[format as usize].get()
    }

    /// What `prepare` packed.
    pub(super) fn of256(&self, format: Format256) -> Option<&Panel> {
        self.blocks256[format as usize].get()
    }
}

fn panel32(format: Format32, x: &Activations<'_>, pool: &ComputePool) -> Panel {
    let (x, width) = (x.blocks32(), x.width());
    // Few tokens: their partial sums stay in the first-level cache.
    let most = if width <= GROUPS_TOKENS {
        1
    } else {
        GROUPS_MAX
    };
    // Segments of about equal size: the last one is padded.
    let eights = x.blocks_stride / 8;
    let groups = eights.div_ceil(eights.div_ceil(most).max(1)).max(1);
    let segments = x.blocks_stride.div_ceil(8 * groups);
    let segment_words = 8 * groups * Words32::of(format).count;
    let mut panel = Panel::new(segments, segment_words, width, pool, &|segment, t, to| {
        // SAFETY: the pool has this instruction set only where the machine can run it.
        unsafe { for_format32!(format, pack32(x, t, segment, groups, to)) }
    });
    panel.groups = groups;
    panel
}

fn panel256(format: Format256, x: &Activations<'_>, pool: &ComputePool) -> Panel {
    let (blocks, width) = (x.columns() / 256, x.width());
    let x = x.blocks256();
    Panel::new(
        blocks,
        Words256::of(format).count,
        width,
        pool,
        &|block, t, to| {
            // SAFETY: as above.
            unsafe { for_format256!(format, pack256(x, t, block, to)) }
        },
    )
}

impl Panel {
    /// A token has `parts` parts of `part_words` words. For each panel of tokens, for each part, for a number of tokens
    /// from the given one on, `pack` writes their words.
    fn new(
        parts: usize,
        part_words: usize,
        width: usize,
        pool: &ComputePool,
        pack: &(dyn Fn(usize, usize, &mut [i32]) + Sync),
    ) -> Panel {
        let token_words = parts * part_words;
        // Panels of about equal size, in whole tiles.
        let fit = (PANEL_BYTES / 4 / token_words.max(1)).clamp(TILE_TOKENS, PANEL_TOKENS);
        let panels = width.div_ceil(fit);
        let tokens = width.div_ceil(panels).next_multiple_of(TILE_TOKENS);
        let mut words = vec![0; width * token_words];
        let mut chunks = Vec::new();
        let panels = words.chunks_mut((tokens * token_words).max(1)).enumerate();
        for (panel, words) in panels {
            let part = words.len() / parts;
            for (index, words) in words.chunks_exact_mut(part).enumerate() {
                chunks.push((panel * tokens, index, Mutex::new(words)));
            }
        }
        let run = |chunk: usize| {
            let (first_token, part, words) = &chunks[chunk];
            let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
            pack(*part, *first_token, &mut words);
        };
        // A few thousand words take about a microsecond: not worth another thread's attention.
        if width * token_words < 1 << 14 {
            (0..chunks.len()).for_each(run);
        } else {
            pool.run(chunks.len(), &run);
        }
        drop(chunks);
        Panel {
            words,
            tokens,
            token_words,
            groups: 0,
        }
    }

    /// The words of the panel that starts with a token.
    pub(super) fn from(&self, first_token: usize) -> &[i32] {
        &self.words[first_token * self.token_words..]
    }
}

/// Packs blocks of 32, for each token from `first_token` on: for each of the eight partial sums, for each token, the
/// words of the segment's blocks that add to it. A segment is `groups` times eight blocks.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
fn pack32<const F: u8>(
    x: &Quantised,
    first_token: usize,
    segment: usize,
    groups: usize,
    panel: &mut [i32],
) {
    let format = Format32::from_index(F);
    let words = const { Words32::of(Format32::from_index(F)) };
    let tokens = panel.len() / (8 * groups * words.count);
    // Rows of activations are padded to whole groups of eight.
    let blocks = x.blocks_stride - segment * 8 * groups;
    for t in 0..tokens {
        let row = x.row(first_token + t);
        for b in 0..blocks.min(8 * groups) {
            let block = segment * 8 * groups + b;
            let at = (b % 8 * tokens + t) * groups + b / 8;
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

/// Packs the words of a block of 256, for each token from `first_token` on.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
fn pack256<const F: u8>(x: &Quantised, first_token: usize, block: usize, panel: &mut [i32]) {
    let format = Format256::from_index(F);
    let words = const { Words256::of(Format256::from_index(F)) };
    for (t, to) in panel.chunks_exact_mut(words.count).enumerate() {
        let row = x.row(first_token + t);
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

/// -offset times the sum of each eight quants.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn sums_of_8(quants: __m512i, offset: i32) -> __m256i {
    let zero = _mm512_setzero_si512();
    let fours = _mm512_dpbusd_epi32(zero, _mm512_set1_epi8(offset as i8), quants);
    let eights = _mm512_add_epi32(fours, _mm512_srli_epi64::<32>(fours));
    _mm256_sub_epi32(_mm256_setzero_si256(), _mm512_cvtepi64_epi32(eights))
}
