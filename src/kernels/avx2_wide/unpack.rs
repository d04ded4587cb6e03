//! Tiles of weights, unpacked: rows side by side in a vector. The packed bytes are transposed, then unpacked where they
//! lie: formats pack values of equal position in a row, so that no value has to move afterwards, and fewer bytes are
//! transposed than there are values.

use std::arch::x86_64::*;

use super::super::avx2::halves_to_floats;
use super::super::blocks::{Format32, Format256};
use super::TILE_ROWS;

/// Four consecutive values of 8 rows, for each half of a tile.
pub(super) type Four = [__m256i; 2];

/// Eight blocks of 32 of each row of a tile. Values are unsigned, but signed for Q8_0.
pub(super) struct Scratch32 {
    pub(super) values: [[Four; 8]; 8],
    pub(super) scales: [[__m256; 2]; 8],
    pub(super) minimums: [[__m256; 2]; 8],
}

impl Scratch32 {
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn empty() -> Scratch32 {
        Scratch32 {
            values: [[[_mm256_setzero_si256(); 2]; 8]; 8],
            scales: [[_mm256_setzero_ps(); 2]; 8],
            minimums: [[_mm256_setzero_ps(); 2]; 8],
        }
    }

    /// Unpacks `count` blocks from `first_block` on of each of the tile's rows.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn fill<const F: u8>(
        &mut self,
        rows: &[u8],
        row_bytes: usize,
        first_block: usize,
        count: usize,
    ) {
        let format = Format32::from_index(F);
        let block_bytes = format.block_bytes();
        let nibble = _mm256_set1_epi8(15);
        let group_bytes = count * block_bytes;
        let group_at = first_block * block_bytes;
        prefetch_rows(rows, row_bytes, group_at, 8 * block_bytes);
        for half in 0..2 {
            let rows = &rows[half * 8 * row_bytes..(half + 1) * 8 * row_bytes];
            let mut scales = [[0u16; 8]; 8];
            let mut minimums = [[0u16; 8]; 8];
            for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
                let group = &row[group_at..group_at + group_bytes];
                for (b, block) in group.chunks_exact(block_bytes).enumerate() {
                    scales[b][r] = u16::from_le_bytes([block[0], block[1]]);
                    if format.has_minimum() {
                        minimums[b][r] = u16::from_le_bytes([block[2], block[3]]);
                    }
                }
            }
            for b in 0..count {
                let at = group_at + b * block_bytes;
                let values = &mut self.values[b];
                if format == Format32::Q8_0 {
                    for part in 0..2 {
                        let bytes = columns(rows, row_bytes, at + 2 + 16 * part);
                        for k in 0..4 {
                            values[4 * part + k][half] = bytes[k];
                        }
                    }
                } else {
                    let bytes = columns(rows, row_bytes, at + block_bytes - 16);
                    for k in 0..4 {
                        values[k][half] = _mm256_and_si256(bytes[k], nibble);
                        values[4 + k][half] =
                            _mm256_and_si256(_mm256_srli_epi16::<4>(bytes[k]), nibble);
                    }
                    if matches!(format, Format32::Q5_0 | Format32::Q5_1) {
                        let bits = words(rows, row_bytes, at + block_bytes - 20);
                        for k in 0..8 {
                            let fifth = fifth_bits(bits, k);
                            values[k][half] = _mm256_or_si256(values[k][half], fifth);
                        }
                    }
                }
            }
            for b in 0..8 {
                self.scales[b][half] = halves_to_floats(&scales[b]);
                if format.has_minimum() {
                    self.minimums[b][half] = halves_to_floats(&minimums[b]);
                }
            }
        }
    }
}

/// One block of 256 of each row of a tile. Values are unsigned.
pub(super) struct Scratch256 {
    pub(super) values: [Four; 64],
    /// Integer scales of the sub-blocks, in both halves of a lane.
    pub(super) scales: [Four; 16],
    /// The scales of sub-blocks 2 i and 2 i + 1 in one lane. Q5_K.
    pub(super) scale_pairs: [Four; 4],
    /// The minimums of sub-blocks 2 i and 2 i + 1 in one lane. Q2_K, Q4_K and Q5_K.
    pub(super) minimum_pairs: [Four; 8],
    pub(super) scale: [__m256; 2],
    pub(super) minimum: [__m256; 2],
}

impl Scratch256 {
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn empty() -> Scratch256 {
        let zero = [_mm256_setzero_si256(); 2];
        Scratch256 {
            values: [zero; 64],
            scales: [zero; 16],
            scale_pairs: [zero; 4],
            minimum_pairs: [zero; 8],
            scale: [_mm256_setzero_ps(); 2],
            minimum: [_mm256_setzero_ps(); 2],
        }
    }

    /// Unpacks block `block` of each of the tile's rows.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn fill<const F: u8>(&mut self, rows: &[u8], row_bytes: usize, block: usize) {
        let format = Format256::from_index(F);
        let block_bytes = format.block_bytes();
        let at = block * block_bytes;
        prefetch_rows(rows, row_bytes, at, block_bytes);
        for half in 0..2 {
            let rows = &rows[half * 8 * row_bytes..(half + 1) * 8 * row_bytes];
            let load = |within: usize| columns(rows, row_bytes, at + within);
            match format {
                Format256::Q2K => {
                    let mask = _mm256_set1_epi8(3);
                    for part in 0..4 {
                        let bytes = load(16 + 16 * part);
                        for k in 0..4 {
                            let to = 32 * (part / 2) + 4 * (part % 2) + k;
                            for s in 0..4 {
                                let value = _mm256_and_si256(shift_right(bytes[k], 2 * s), mask);
                                self.values[to + 8 * s][half] = value;
                            }
                        }
                    }
                    let both = load(0);
                    let nibble = _mm256_set1_epi8(15);
                    for i in 0..4 {
                        let scales = _mm256_and_si256(both[i], nibble);
                        let minimums = _mm256_and_si256(shift_right(both[i], 4), nibble);
                        for j in 0..4 {
                            self.scales[4 * i + j][half] = repeated(scales, j);
                        }
                        for j in 0..2 {
                            self.minimum_pairs[2 * i + j][half] = pair(minimums, j);
                        }
                    }
                    self.heads(words(rows, row_bytes, at + 80), half);
                }
                Format256::Q3K => {
                    let mask = _mm256_set1_epi8(3);
                    let bit = _mm256_set1_epi8(4);
                    for part in 0..2 {
                        let high = load(16 * part);
                        for n in 0..2 {
                            let low = load(32 + 32 * n + 16 * part);
                            for k in 0..4 {
                                let to = 32 * n + 4 * part + k;
                                for s in 0..4 {
                                    let low = _mm256_and_si256(shift_right(low[k], 2 * s), mask);
                                    // Bit 4 n + s becomes bit 2.
                                    let high = if n == 0 && s < 2 {
                                        shift_left(high[k], 2 - s)
                                    } else {
                                        shift_right(high[k], 4 * n + s - 2)
                                    };
                                    let high = _mm256_and_si256(high, bit);
                                    self.values[to + 8 * s][half] = _mm256_or_si256(low, high);
                                }
                            }
                        }
                    }
                    // The last 16 bytes of a block: two of values, 12 of scales, two of the block's scale.
                    let [w0, w1, w2, w3] = load(94);
                    let joined = |first, second| {
                        _mm256_or_si256(
                            _mm256_srli_epi32::<16>(first),
                            _mm256_slli_epi32::<16>(second),
                        )
                    };
                    let (a, b, c) = (joined(w0, w1), joined(w1, w2), joined(w2, w3));
                    let (low, high) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
                    let six = |four, two| {
                        let four = _mm256_and_si256(four, low);
                        let six = _mm256_or_si256(four, _mm256_and_si256(two, high));
                        _mm256_sub_epi8(six, _mm256_set1_epi8(32))
                    };
                    let scales = [
                        six(a, shift_left(c, 4)),
                        six(b, shift_left(c, 2)),
                        six(shift_right(a, 4), c),
                        six(shift_right(b, 4), shift_right(c, 2)),
                    ];
                    for i in 0..4 {
                        for j in 0..4 {
                            self.scales[4 * i + j][half] = repeated_signed(scales[i], j);
                        }
                    }
                    self.heads(_mm256_srli_epi32::<16>(w3), half);
                }
                Format256::Q4K | Format256::Q5K => {
                    let nibble = _mm256_set1_epi8(15);
                    let bit = _mm256_set1_epi8(16);
                    let start = if format == Format256::Q4K { 16 } else { 48 };
                    for part in 0..2 {
                        let fifth = load(16 + 16 * part);
                        for n in 0..4 {
                            let bytes = load(start + 32 * n + 16 * part);
                            for k in 0..4 {
                                let mut low = _mm256_and_si256(bytes[k], nibble);
                                let mut high = _mm256_and_si256(shift_right(bytes[k], 4), nibble);
                                if format == Format256::Q5K {
                                    // Bits 2 n and 2 n + 1 become bit 4.
                                    let (of_low, of_high) = if n < 2 {
                                        let of_low = shift_left(fifth[k], 4 - 2 * n);
                                        (of_low, shift_left(fifth[k], 3 - 2 * n))
                                    } else {
                                        let of_low = shift_right(fifth[k], 2 * n - 4);
                                        (of_low, shift_right(fifth[k], 2 * n - 3))
                                    };
                                    low = _mm256_or_si256(low, _mm256_and_si256(of_low, bit));
                                    high = _mm256_or_si256(high, _mm256_and_si256(of_high, bit));
                                }
                                self.values[16 * n + 4 * part + k][half] = low;
                                self.values[16 * n + 8 + 4 * part + k][half] = high;
                            }
                        }
                    }
                    let [heads, a, b, c] = load(0);
                    let six = _mm256_set1_epi8(0x3f);
                    let joined = |four, two| {
                        let two = _mm256_and_si256(two, _mm256_set1_epi8(0x30));
                        _mm256_or_si256(_mm256_and_si256(four, nibble), two)
                    };
                    let scales = [_mm256_and_si256(a, six), joined(c, shift_right(a, 2))];
                    let minimums = [
                        _mm256_and_si256(b, six),
                        joined(shift_right(c, 4), shift_right(b, 2)),
                    ];
                    for i in 0..2 {
                        for j in 0..4 {
                            self.scales[4 * i + j][half] = repeated(scales[i], j);
                        }
                        for j in 0..2 {
                            self.scale_pairs[2 * i + j][half] = pair(scales[i], j);
                            self.minimum_pairs[2 * i + j][half] = pair(minimums[i], j);
                        }
                    }
                    self.heads(heads, half);
                }
                Format256::Q6K => {
                    let nibble = _mm256_set1_epi8(15);
                    let two = _mm256_set1_epi8(0x30);
                    for part in 0..4 {
                        let (n, part) = (part / 2, part % 2);
                        let first = load(64 * n + 16 * part);
                        let second = load(64 * n + 32 + 16 * part);
                        let high = load(128 + 32 * n + 16 * part);
                        for k in 0..4 {
                            let to = 32 * n + 4 * part + k;
                            let joined = |low, high| {
                                let low = _mm256_and_si256(low, nibble);
                                _mm256_or_si256(low, _mm256_and_si256(high, two))
                            };
                            let (first, second, high) = (first[k], second[k], high[k]);
                            self.values[to][half] = joined(first, shift_left(high, 4));
                            self.values[to + 8][half] = joined(second, shift_left(high, 2));
                            self.values[to + 16][half] = joined(shift_right(first, 4), high);
                            self.values[to + 24][half] =
                                joined(shift_right(second, 4), shift_right(high, 2));
                        }
                    }
                    let scales = load(192);
                    for i in 0..4 {
                        for j in 0..4 {
                            self.scales[4 * i + j][half] = repeated_signed(scales[i], j);
                        }
                    }
                    // The last four bytes: two scales and the block's scale.
                    let heads = words(rows, row_bytes, at + 206);
                    self.heads(_mm256_srli_epi32::<16>(heads), half);
                }
            }
        }
    }

    /// Takes the f16 scales from the lower and the f16 minimums from the upper halves of the lanes.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn heads(&mut self, heads: __m256i, half: usize) {
        let low = _mm256_and_si256(heads, _mm256_set1_epi32(0xffff));
        let both = _mm256_packus_epi32(low, _mm256_srli_epi32::<16>(heads));
        let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(both);
        self.scale[half] = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
        self.minimum[half] = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(both));
    }
}

/// Bytes `at` to `at + 15` of each of eight rows, transposed: lane r of vector k has bytes 4 k to 4 k + 3 of row r.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn columns(rows: &[u8], row_bytes: usize, at: usize) -> [__m256i; 4] {
    assert!(at + 16 <= row_bytes && rows.len() >= 8 * row_bytes);
    let start = rows.as_ptr();
    // SAFETY: 16 bytes from `at` on lie inside a row, and there are eight rows.
    let load = |r: usize| unsafe { _mm_loadu_si128(start.add(r * row_bytes + at).cast()) };
    let two = |r: usize| _mm256_set_m128i(load(r + 4), load(r));
    let (a, b, c, d) = (two(0), two(1), two(2), two(3));
    let (low, high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (low2, high2) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    [
        _mm256_unpacklo_epi64(low, low2),
        _mm256_unpackhi_epi64(low, low2),
        _mm256_unpacklo_epi64(high, high2),
        _mm256_unpackhi_epi64(high, high2),
    ]
}

/// Bytes `at` to `at + 3` of each of eight rows.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn words(rows: &[u8], row_bytes: usize, at: usize) -> __m256i {
    assert!(at + 4 <= row_bytes && rows.len() >= 8 * row_bytes);
    let start = rows.as_ptr();
    // SAFETY: four bytes from `at` on lie inside a row, and there are eight rows.
    let load = |r: usize| unsafe { start.add(r * row_bytes + at).cast::<i32>().read_unaligned() };
    _mm256_setr_epi32(
        load(0),
        load(1),
        load(2),
        load(3),
        load(4),
        load(5),
        load(6),
        load(7),
    )
}

/// Bits 4 k to 4 k + 3 of each lane, each as bit 4 of a byte.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fifth_bits(bits: __m256i, k: usize) -> __m256i {
    let byte = _mm256_set1_epi8((k / 2) as i8);
    let lanes = _mm256_set1_epi64x(0x0404_0404_0000_0000);
    let upper = _mm256_setr_epi64x(0, 0x0808_0808_0808_0808, 0, 0x0808_0808_0808_0808);
    let byte = _mm256_add_epi8(byte, _mm256_add_epi8(lanes, upper));
    let bit = _mm256_set1_epi32(if k.is_multiple_of(2) {
        0x0804_0201
    } else {
        0x8040_2010_u32 as i32
    });
    let spread = _mm256_and_si256(_mm256_shuffle_epi8(bits, byte), bit);
    _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit), _mm256_set1_epi8(16))
}

/// Byte j of each lane, zero-extended into both halves of the lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn repeated(bytes: __m256i, j: usize) -> __m256i {
    let first = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, -128, 0, -128, 4, -128, 4, -128, 8, -128, 8, -128, 12, -128, 12, -128,
    ));
    _mm256_shuffle_epi8(bytes, _mm256_add_epi8(first, _mm256_set1_epi16(j as i16)))
}

/// Byte j of each lane, sign-extended into both halves of the lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn repeated_signed(bytes: __m256i, j: usize) -> __m256i {
    let high = _mm256_slli_epi16::<8>(repeated(bytes, j));
    _mm256_srai_epi16::<8>(high)
}

/// Bytes 2 j and 2 j + 1 of each lane, zero-extended.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn pair(bytes: __m256i, j: usize) -> __m256i {
    let first = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0, -128, 1, -128, 4, -128, 5, -128, 8, -128, 9, -128, 12, -128, 13, -128,
    ));
    _mm256_shuffle_epi8(
        bytes,
        _mm256_add_epi8(first, _mm256_set1_epi16(2 * j as i16)),
    )
}

/// Bits move between bytes: a mask has to follow.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn shift_right(bytes: __m256i, by: usize) -> __m256i {
    _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(by as i32))
}

/// Bits move between bytes: a mask has to follow.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn shift_left(bytes: __m256i, by: usize) -> __m256i {
    _mm256_sll_epi16(bytes, _mm_cvtsi32_si128(by as i32))
}

/// Asks for what the tile needs next of its rows, and at their end for the start of the next tile's: the processor
/// follows far fewer streams than 16.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn prefetch_rows(rows: &[u8], row_bytes: usize, at: usize, bytes: usize) {
    const AHEAD: usize = 512;
    let mut ahead = at + AHEAD;
    if ahead >= row_bytes {
        ahead += (TILE_ROWS - 1) * row_bytes;
    }
    for r in 0..TILE_ROWS {
        for line in (0..bytes).step_by(64) {
            // Prefetching an address that is not mapped does nothing, so the end of the weights needs no care.
            let at = rows.as_ptr().wrapping_add(r * row_bytes + ahead + line);
            _mm_prefetch::<_MM_HINT_T0>(at.cast());
        }
    }
}
