//! Products of a weight matrix with activations: shapes, bounds, and how the rows are shared between threads.
#![expect(unsafe_code, reason = "several threads write to one buffer")]

use std::ops::Range;

use crate::gguf::TensorType;

use super::activations::Activations;
use super::blocks::{Storage, storage};
use super::{ComputePool, InstructionSet, float, portable};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};

/// Rows of a weight matrix, where they lie: `rows` rows of `columns` elements, at any address.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    pub kind: TensorType,
    pub rows: usize,
    pub columns: usize,
    pub bytes: &'a [u8],
}

impl<'a> MatrixView<'a> {
    /// # Panics
    /// When `bytes` is not exactly `rows` rows of whole blocks.
    pub fn new(kind: TensorType, rows: usize, columns: usize, bytes: &'a [u8]) -> MatrixView<'a> {
        let view = MatrixView {
            kind,
            rows,
            columns,
            bytes,
        };
        assert_eq!(
            view.row_bytes().checked_mul(rows),
            Some(bytes.len()),
            "bytes of {rows} rows of {columns} {} elements",
            kind.name()
        );
        view
    }

    /// Bytes of one row.
    ///
    /// # Panics
    /// When a row is not a whole number of blocks.
    pub fn row_bytes(&self) -> usize {
        let bytes = self.kind.row_bytes(self.columns as u64);
        bytes.unwrap_or_else(|| panic!("{} columns of {}", self.columns, self.kind.name())) as usize
    }

    /// The bytes of row `r`.
    pub fn row(&self, r: usize) -> &'a [u8] {
        let row_bytes = self.row_bytes();
        &self.bytes[r * row_bytes..(r + 1) * row_bytes]
    }

    /// Rows `range` as a matrix of their own.
    pub fn slice(&self, range: std::ops::Range<usize>) -> MatrixView<'a> {
        let row_bytes = self.row_bytes();
        MatrixView::new(
            self.kind,
            range.len(),
            self.columns,
            &self.bytes[range.start * row_bytes..range.end * row_bytes],
        )
    }
}

/// Where a product goes: the value for row r of the weights and token t is `data[t * stride + first_column + r]`, so
/// that the products of row slices fill the columns of one buffer.
#[derive(Debug)]
pub struct OutputRows<'a> {
    pub data: &'a mut [f32],
    pub stride: usize,
    pub first_column: usize,
}

/// Some rows of a matrix, wherever they lie.
#[derive(Clone, Copy, Debug)]
pub struct RowSlice<'w> {
    pub weight: MatrixView<'w>,
    /// The column of the product that the first of these rows fills, counted from `OutputRows::first_column`.
    pub first_row: usize,
}

/// One of the products of `matmul_all`: with all rows of a matrix, or with some slices of them.
#[derive(Debug)]
pub struct Product<'w, 'o> {
    /// One after the other, and none of the rows twice.
    pub slices: Vec<RowSlice<'w>>,
    pub out: OutputRows<'o>,
}

/// out = weight * x, for every token of x.
///
/// # Panics
/// When shapes do not agree.
pub fn matmul(
    pool: &ComputePool,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: &mut OutputRows<'_>,
) {
    let out = OutputRows {
        data: out.data,
        stride: out.stride,
        first_column: out.first_column,
    };
    let slices = vec![RowSlice {
        weight: *weight,
        first_row: 0,
    }];
    matmul_all(pool, x, &mut [Product { slices, out }]);
}

/// Several products with the same input (q, k and v; gate and up; slices that rest in several places) in one run of the
/// pool: what a run costs is then paid once, and small matrices fill all threads.
///
/// # Panics
/// When shapes do not agree, or the slices of a product are not one after the other.
pub fn matmul_all(pool: &ComputePool, x: &Activations<'_>, products: &mut [Product<'_, '_>]) {
    let mut tasks = Vec::with_capacity(products.len());
    for product in products.iter_mut() {
        let OutputRows {
            data,
            stride,
            first_column,
        } = &mut product.out;
        let needed = x.width().checked_mul(*stride);
        assert!(
            needed.is_some_and(|needed| needed <= data.len()),
            "{} rows of {stride} in {} values",
            x.width(),
            data.len()
        );
        let start = data.as_mut_ptr();
        let mut end = 0;
        for &RowSlice { weight, first_row } in &product.slices {
            let weight = MatrixView::new(weight.kind, weight.rows, weight.columns, weight.bytes);
            assert_eq!(weight.columns, x.columns(), "columns of weight and input");
            // Each row of the output is written by one thread only.
            assert!(first_row >= end, "row {first_row} after row {end}");
            end = first_row.saturating_add(weight.rows);
            assert!(
                first_column
                    .checked_add(end)
                    .is_some_and(|end| end <= *stride),
                "{} columns from {first_column} + {first_row} of {stride}",
                weight.rows
            );
            x.prepare(weight.kind, pool);
            tasks.push((
                weight,
                Output {
                    start: start.wrapping_add(*first_column + first_row),
                    stride: *stride,
                },
            ));
        }
    }
    if x.width() == 0 {
        return;
    }
    let set = pool.instruction_set();
    let chunks = chunks(tasks.iter().map(|(weight, _)| weight), pool.threads());
    pool.run(chunks.len(), &|index| {
        let (task, rows) = &chunks[index];
        let (weight, out) = &tasks[*task];
        let first_row = rows.start;
        multiply_rows(
            set,
            &weight.slice(rows.clone()),
            x,
            out.starting_at(first_row),
        );
    });
}

/// The rows of which product threads take at once, in the order in which they take them: guided self-scheduling
/// (Polychronopoulos and Kuck, 1987). A chunk is three quarters of a thread's fair share of what is left: the first
/// ones are large, so that a thread walks memory it asked for ahead, and the last ones small, so that all threads end
/// together. No chunk is so large that a thread that loses its core holds up the others for long.
fn chunks<'w>(
    weights: impl Iterator<Item = &'w MatrixView<'w>> + Clone,
    threads: usize,
) -> Vec<(usize, Range<usize>)> {
    const CHUNK_BYTES: usize = 512 << 10;
    // A multiple of the tallest tile of the wide loops.
    const ROWS: usize = 32;
    let mut left: usize = weights.clone().map(|weight| weight.bytes.len()).sum();
    let mut chunks = Vec::new();
    for (task, weight) in weights.enumerate() {
        let row_bytes = weight.row_bytes();
        let mut first_row = 0;
        while first_row < weight.rows {
            let bytes = (left / 4 * 3 / threads).min(CHUNK_BYTES);
            let rows = (bytes / row_bytes.max(1)).max(1).next_multiple_of(ROWS);
            let end = (first_row + rows).min(weight.rows);
            chunks.push((task, first_row..end));
            left -= (end - first_row) * row_bytes;
            first_row = end;
        }
    }
    chunks
}

/// Where the threads of a product write: `OutputRows` without the exclusive reference.
#[derive(Clone, Copy)]
pub(super) struct Output {
    start: *mut f32,
    stride: usize,
}

// SAFETY: the address range is borrowed exclusively by `matmul_all` for the whole run, and each of its elements is
// written by the one chunk that has its row.
unsafe impl Sync for Output {}
// SAFETY: as above.
unsafe impl Send for Output {}

impl Output {
    fn starting_at(self, row: usize) -> Output {
        Output {
            start: self.start.wrapping_add(row),
            stride: self.stride,
        }
    }

    /// Writes the value of row `row` (of the rows at hand) for token `t`.
    ///
    /// # Safety
    /// `t` is below the input's width and `row` is one of the rows at hand.
    #[inline(always)]
    pub(super) unsafe fn set(self, t: usize, row: usize, value: f32) {
        // SAFETY: `matmul_all` checked that every row and token at hand lies inside the buffer, and gave these rows
        // to this thread alone.
        unsafe { *self.start.add(t * self.stride + row) = value }
    }

    /// The address for token `t` of the first of the rows at hand.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub(super) fn token(self, t: usize) -> *mut f32 {
        self.start.wrapping_add(t * self.stride)
    }
}

fn multiply_rows(set: InstructionSet, weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
    match storage(weight.kind) {
        Storage::F32 | Storage::F16 | Storage::BF16 => float::rows(set, weight, x, out),
        Storage::Blocks32(format) => match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => avx512::rows_of_blocks32(format, weight, x, out),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => avx2::rows_of_blocks32(format, weight, x, out),
            _ => portable::rows_of_blocks32(format, weight, x, out),
        },
        Storage::Blocks256(format) => match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => avx512::rows_of_blocks256(format, weight, x, out),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => avx2::rows_of_blocks256(format, weight, x, out),
            _ => portable::rows_of_blocks256(format, weight, x, out),
        },
    }
}

#[cfg(test)]
mod tests;
