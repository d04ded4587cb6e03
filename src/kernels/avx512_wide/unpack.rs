//! Tiles of weights, unpacked: rows side by side in a vector. The packed bytes are transposed, then unpacked where they
//! lie: formats pack values of equal position in a row, so that no value has to move afterwards, and fewer bytes are
//! transposed than there are values.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::blocks::{Format32, Format256};
use super::super::streaming;
use super::TILE_ROWS;
use super::panel::offset256;

/// Four consecutive values of 16 rows, for each half of a tile.
pub(super) type Four = [__m512i; 2];

/// One block of 32 of each row of a tile. Values are unsigned.
#[derive(Clone, Copy)]
pub(super) struct Scratch32 {
    pub(super) values: [Four; 8],
    pub(super) scales: [__m512; 2],
    pub(super) minimums: [__m512; 2],
}

impl Scratch32 {
    #[target_feature(enable = "avx512f")]
    pub(super) fn empty() -> Scratch32 {
        Scratch32 {
            values: [[_mm512_setzero_si512(); 2]; 8],
            scales: [_mm512_setzero_ps(); 2],
            minimums: [_mm512_setzero_ps(); 2],
        }
    }

    /// Unpacks the block that starts at byte `at` of each of the tile's rows.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    pub(super) fn fill<const F: u8>(&mut self, rows: &[u8], row_bytes: usize, at: usize) {
        let format = Format32::from_index(F);
        let block_bytes = format.block_bytes();
        for half in 0..2 {
            let rows = &rows[half * 16 * row_bytes..(half + 1) * 16 * row_bytes];
            if format == Format32::Q8_0 {
                for part in 0..2 {
                    let bytes = columns(rows, row_bytes, at + 2 + 16 * part);
                    for k in 0..4 {
                        let value = _mm512_xor_si512(bytes[k], _mm512_set1_epi8(-128));
                        self.values[4 * part + k][half] = value;
                    }
                }
            } else {
                let bytes = columns(rows, row_bytes, at + block_bytes - 16);
                if matches!(format, Format32::Q5_0 | Format32::Q5_1) {
                    let bits = words(rows, row_bytes, at + block_bytes - 20);
                    let five = _mm512_set1_epi8(31);
                    for k in 0..4 {
                        let low = nibble_or(bytes[k], fifth_bits(bits, k));
                        let high = nibble_or(shift_right(bytes[k], 4), fifth_bits(bits, 4 + k));
                        self.values[k][half] = _mm512_and_si512(low, five);
                        self.values[4 + k][half] = _mm512_and_si512(high, five);
                    }
                } else {
                    let nibble = _mm512_set1_epi8(15);
                    for k in 0..4 {
                        self.values[k][half] = _mm512_and_si512(bytes[k], nibble);
                        let high = _mm512_and_si512(shift_right(bytes[k], 4), nibble);
                        self.values[4 + k][half] = high;
                    }
                }
            }
            let heads = words(rows, row_bytes, at);
            self.scales[half] = lower_halves(heads);
            if format.has_minimum() {
                self.minimums[half] = upper_halves(heads);
            }
        }
    }
}

/// One block of 256 of each row of a tile. Values are unsigned.
pub(super) struct Scratch256 {
    pub(super) values: [Four; 64],
    /// Integer scales of the sub-blocks, in the lower halves of lanes; the upper ones are zero.
    pub(super) scales: [Four; 16],
    /// What sums have subtracted times the scales of sub-blocks 2 i and 2 i + 1, in one lane. Q4_K and Q5_K.
    pub(super) scale_pairs: [Four; 4],
    /// The minimums of sub-blocks 2 i and 2 i + 1 in one lane. Q2_K, Q4_K and Q5_K.
    pub(super) minimum_pairs: [Four; 8],
    pub(super) scale: [__m512; 2],
    pub(super) minimum: [__m512; 2],
}

impl Scratch256 {
    #[target_feature(enable = "avx512f")]
    pub(super) fn empty() -> Scratch256 {
        let zero = [_mm512_setzero_si512(); 2];
        Scratch256 {
            values: [zero; 64],
            scales: [zero; 16],
            scale_pairs: [zero; 4],
            minimum_pairs: [zero; 8],
            scale: [_mm512_setzero_ps(); 2],
            minimum: [_mm512_setzero_ps(); 2],
        }
    }

    /// Unpacks block `block` of each of the tile's rows.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    pub(super) fn fill<const F: u8>(&mut self, rows: &[u8], row_bytes: usize, block: usize) {
        let format = Format256::from_index(F);
        let block_bytes = format.block_bytes();
        let at = block * block_bytes;
        for half in 0..2 {
            let rows = &rows[half * 16 * row_bytes..(half + 1) * 16 * row_bytes];
            match format {
                Format256::Q2K => self.fill_q2k(rows, row_bytes, at, half),
                Format256::Q3K => self.fill_q3k(rows, row_bytes, at, half),
                Format256::Q4K | Format256::Q5K => self.fill_q45k::<F>(rows, row_bytes, at, half),
                Format256::Q6K => self.fill_q6k(rows, row_bytes, at, half),
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    #[inline]
    fn fill_q2k(&mut self, rows: &[u8], row_bytes: usize, at: usize, half: usize) {
        let load = |within: usize| columns(rows, row_bytes, at + within);
        let mask = _mm512_set1_epi8(3);
        for part in 0..4 {
            let bytes = load(16 + 16 * part);
            for k in 0..4 {
                let to = 32 * (part / 2) + 4 * (part % 2) + k;
                for s in 0..4 {
                    let value = _mm512_and_si512(shift_right(bytes[k], 2 * s), mask);
                    self.values[to + 8 * s][half] = value;
                }
            }
        }
        let both = load(0);
        let nibble = _mm512_set1_epi8(15);
        for i in 0..4 {
            let scales = _mm512_and_si512(both[i], nibble);
            let minimums = _mm512_and_si512(shift_right(both[i], 4), nibble);
            for j in 0..4 {
                self.scales[4 * i + j][half] = low_byte(scales, j);
            }
            for j in 0..2 {
                self.minimum_pairs[2 * i + j][half] = pair(minimums, j);
            }
        }
        let heads = words(rows, row_bytes, at + 80);
        self.scale[half] = lower_halves(heads);
        self.minimum[half] = upper_halves(heads);
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    #[inline]
    fn fill_q3k(&mut self, rows: &[u8], row_bytes: usize, at: usize, half: usize) {
        let load = |within: usize| columns(rows, row_bytes, at + within);
        let (two, three) = (_mm512_set1_epi8(3), _mm512_set1_epi8(7));
        for part in 0..2 {
            let high = load(16 * part);
            for n in 0..2 {
                let low = load(32 + 32 * n + 16 * part);
                for k in 0..4 {
                    let to = 32 * n + 4 * part + k;
                    for s in 0..4 {
                        let low = shift_right(low[k], 2 * s);
                        // Bit 4 n + s becomes bit 2.
                        let high = if n == 0 && s < 2 {
                            shift_left(high[k], 2 - s)
                        } else {
                            shift_right(high[k], 4 * n + s - 2)
                        };
                        let value = _mm512_and_si512(select(two, low, high), three);
                        self.values[to + 8 * s][half] = value;
                    }
                }
            }
        }
        // The last 16 bytes of a block: two of values, 12 of scales, two of the block's scale.
        let [w0, w1, w2, w3] = load(94);
        let joined = |first, second| {
            let first = _mm512_srli_epi32::<16>(first);
            _mm512_or_si512(first, _mm512_slli_epi32::<16>(second))
        };
        let (a, b, c) = (joined(w0, w1), joined(w1, w2), joined(w2, w3));
        let six = |four, two| {
            let six = _mm512_and_si512(nibble_or(four, two), _mm512_set1_epi8(63));
            _mm512_sub_epi8(six, _mm512_set1_epi8(32))
        };
        let scales = [
            six(a, shift_left(c, 4)),
            six(b, shift_left(c, 2)),
            six(shift_right(a, 4), c),
            six(shift_right(b, 4), shift_right(c, 2)),
        ];
        for i in 0..4 {
            for j in 0..4 {
                self.scales[4 * i + j][half] = low_byte_signed(scales[i], j);
            }
        }
        self.scale[half] = upper_halves(w3);
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    #[inline]
    fn fill_q45k<const F: u8>(&mut self, rows: &[u8], row_bytes: usize, at: usize, half: usize) {
        let format = Format256::from_index(F);
        let load = |within: usize| columns(rows, row_bytes, at + within);
        let (nibble, five) = (_mm512_set1_epi8(15), _mm512_set1_epi8(31));
        let start = if format == Format256::Q4K { 16 } else { 48 };
        for part in 0..2 {
            let fifth = if format == Format256::Q5K {
                load(16 + 16 * part)
            } else {
                [_mm512_setzero_si512(); 4]
            };
            for n in 0..4 {
                let bytes = load(start + 32 * n + 16 * part);
                for k in 0..4 {
                    let (mut low, mut high) = (bytes[k], shift_right(bytes[k], 4));
                    if format == Format256::Q5K {
                        // Bits 2 n and 2 n + 1 become bit 4.
                        let (of_low, of_high) = if n < 2 {
                            let of_low = shift_left(fifth[k], 4 - 2 * n);
                            (of_low, shift_left(fifth[k], 3 - 2 * n))
                        } else {
                            let of_low = shift_right(fifth[k], 2 * n - 4);
                            (of_low, shift_right(fifth[k], 2 * n - 3))
                        };
                        low = _mm512_and_si512(nibble_or(low, of_low), five);
                        high = _mm512_and_si512(nibble_or(high, of_high), five);
                    } else {
                        low = _mm512_and_si512(low, nibble);
                        high = _mm512_and_si512(high, nibble);
                    }
                    self.values[16 * n + 4 * part + k][half] = low;
                    self.values[16 * n + 8 + 4 * part + k][half] = high;
                }
            }
        }
        let [heads, a, b, c] = load(0);
        let six = _mm512_set1_epi8(63);
        let joined = |four, two| _mm512_and_si512(nibble_or(four, two), six);
        let scales = [_mm512_and_si512(a, six), joined(c, shift_right(a, 2))];
        let minimums = [
            _mm512_and_si512(b, six),
            joined(shift_right(c, 4), shift_right(b, 2)),
        ];
        for i in 0..2 {
            for j in 0..4 {
                self.scales[4 * i + j][half] = low_byte(scales[i], j);
            }
            for j in 0..2 {
                let by = offset256(format).trailing_zeros() as usize;
                self.scale_pairs[2 * i + j][half] = shift_left(pair(scales[i], j), by);
                self.minimum_pairs[2 * i + j][half] = pair(minimums[i], j);
            }
        }
        self.scale[half] = lower_halves(heads);
        self.minimum[half] = upper_halves(heads);
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
    #[inline]
    fn fill_q6k(&mut self, rows: &[u8], row_bytes: usize, at: usize, half: usize) {
        let load = |within: usize| columns(rows, row_bytes, at + within);
        let six = _mm512_set1_epi8(63);
        for part in 0..4 {
            let (n, part) = (part / 2, part % 2);
            let first = load(64 * n + 16 * part);
            let second = load(64 * n + 32 + 16 * part);
            let high = load(128 + 32 * n + 16 * part);
            for k in 0..4 {
                let to = 32 * n + 4 * part + k;
                let joined = |low, high| _mm512_and_si512(nibble_or(low, high), six);
                let (first, second, high) = (first[k], second[k], high[k]);
                self.values[to][half] = joined(first, shift_left(high, 4));
                self.values[to + 8][half] = joined(second, shift_left(high, 2));
                self.values[to + 16][half] = joined(shift_right(first, 4), high);
                self.values[to + 24][half] = joined(shift_right(second, 4), shift_right(high, 2));
            }
        }
        let scales = load(192);
        for i in 0..4 {
            for j in 0..4 {
                self.scales[4 * i + j][half] = low_byte_signed(scales[i], j);
            }
        }
        // The last four bytes: two scales and the block's scale.
        self.scale[half] = upper_halves(words(rows, row_bytes, at + 206));
    }
}

/// Bytes `at` to `at + 15` of each of 16 rows, transposed: lane r of vector k has bytes 4 k to 4 k + 3 of row r.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn columns(rows: &[u8], row_bytes: usize, at: usize) -> [__m512i; 4] {
    assert!(at + 16 <= row_bytes && rows.len() >= 16 * row_bytes);
    let start = rows.as_ptr();
    // SAFETY: 16 bytes from `at` on lie inside a row, and there are 16 rows.
    let load = |r: usize| unsafe { _mm_loadu_si128(start.add(r * row_bytes + at).cast()) };
    // Masked broadcasts from memory need no shuffle.
    let four = |r: usize| {
        let first = _mm512_castsi128_si512(load(r));
        let two = _mm512_mask_broadcast_i32x4(first, 0x00f0, load(r + 4));
        let three = _mm512_mask_broadcast_i32x4(two, 0x0f00, load(r + 8));
        _mm512_mask_broadcast_i32x4(three, 0xf000, load(r + 12))
    };
    let (a, b, c, d) = (four(0), four(1), four(2), four(3));
    let (low, high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (low2, high2) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    [
        _mm512_unpacklo_epi64(low, low2),
        _mm512_unpackhi_epi64(low, low2),
        _mm512_unpacklo_epi64(high, high2),
        _mm512_unpackhi_epi64(high, high2),
    ]
}

/// Bytes `at` to `at + 3` of each of 16 rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vbmi,avx512vnni")]
#[inline]
fn words(rows: &[u8], row_bytes: usize, at: usize) -> __m512i {
    assert!(at + 4 <= row_bytes && rows.len() >= 16 * row_bytes);
    let start = rows.as_ptr();
    // SAFETY: four bytes from `at` on lie inside a row, and there are 16 rows.
    let load = |r: usize| unsafe { start.add(r * row_bytes + at).cast::<i32>().read_unaligned() };
    let words: [i32; 16] = std::array::from_fn(load);
    // SAFETY: the array holds 64 bytes.
    unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
}

/// The f16 in the lower halves of the lanes.
#[target_feature(enable = "avx512f")]
#[inline]
fn lower_halves(words: __m512i) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words))
}

/// The f16 in the upper halves of the lanes.
#[target_feature(enable = "avx512f")]
#[inline]
fn upper_halves(words: __m512i) -> __m512 {
    lower_halves(_mm512_srli_epi32::<16>(words))
}

/// Bits 4 k to 4 k + 3 of each lane, each as bit 4 of a byte; other bits are anything.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn fifth_bits(bits: __m512i, k: usize) -> __m512i {
    // Each byte takes eight bits from a place of its own in its eight bytes, around their end.
    let from = _mm512_set1_epi64(0x2322_2120_0302_0100);
    let back = _mm512_set1_epi8(4 * k as i8 - 4);
    _mm512_multishift_epi64_epi8(_mm512_add_epi8(from, back), bits)
}

/// The lower nibbles of `low` with the upper nibbles of `high`.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn nibble_or(low: __m512i, high: __m512i) -> __m512i {
    select(_mm512_set1_epi8(15), low, high)
}

/// Bits of `set` where the mask's are set, of `clear` elsewhere.
#[target_feature(enable = "avx512f")]
#[inline]
fn select(mask: __m512i, set: __m512i, clear: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0xca>(mask, set, clear)
}

/// Byte j of each lane, zero-extended.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn low_byte(bytes: __m512i, j: usize) -> __m512i {
    let first = _mm512_set4_epi32(
        0x8080_800c_u32 as i32,
        0x8080_8008_u32 as i32,
        0x8080_8004_u32 as i32,
        0x8080_8000_u32 as i32,
    );
    _mm512_shuffle_epi8(bytes, _mm512_add_epi32(first, _mm512_set1_epi32(j as i32)))
}

/// Byte j of each lane, sign-extended in the lower half of the lane, and zero in the upper.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn low_byte_signed(bytes: __m512i, j: usize) -> __m512i {
    _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(low_byte(bytes, j)))
}

/// Bytes 2 j and 2 j + 1 of each lane, zero-extended.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn pair(bytes: __m512i, j: usize) -> __m512i {
    let first = _mm512_set4_epi32(
        0x800d_800c_u32 as i32,
        0x8009_8008_u32 as i32,
        0x8005_8004_u32 as i32,
        0x8001_8000_u32 as i32,
    );
    let by = _mm512_set1_epi16(2 * j as i16);
    _mm512_shuffle_epi8(bytes, _mm512_add_epi16(first, by))
}

/// Bits move between bytes: a mask has to follow.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn shift_right(bytes: __m512i, by: usize) -> __m512i {
    _mm512_srl_epi16(bytes, _mm_cvtsi32_si128(by as i32))
}

/// Bits move between bytes: a mask has to follow.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn shift_left(bytes: __m512i, by: usize) -> __m512i {
    _mm512_sll_epi16(bytes, _mm_cvtsi32_si128(by as i32))
}

/// Asks for `bytes` bytes from `at` on of some of a tile's rows, where `at` lies behind their end for the next tile's:
/// the processor follows far fewer streams than 32.
#[inline(always)]
pub(super) fn prefetch_rows(
    rows: &[u8],
    row_bytes: usize,
    mut at: usize,
    bytes: usize,
    range: Range<usize>,
) {
    if at >= row_bytes {
        at = TILE_ROWS * row_bytes;
    }
    for r in range {
        streaming::lines(rows.as_ptr().wrapping_add(r * row_bytes + at), bytes);
    }
}
