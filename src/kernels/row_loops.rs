//! How the loops of an instruction set share the rows and tokens of a product; x86-64 only.

/// Defines `rows_of_blocks32` and `rows_of_blocks256`: the tiles of `$wide`, then row by row what these leave, in
/// groups of up to four tokens that share the unpacking of a row (`row32::<F, N>` and `row256::<F, N>`).
///
/// A macro because each set's functions have to be compiled with its features.
macro_rules! row_loops {
    ($features:literal, $wide:ident) => {
        use super::activations::Activations;
        use super::blocks::{Format32, Format256, for_format32, for_format256};
        use super::matmul::{MatrixView, Output};

        /// Rows of weights in blocks of 32 times all tokens.
        pub(super) fn rows_of_blocks32(
            format: Format32,
            weight: &MatrixView<'_>,
            x: &Activations<'_>,
            out: Output,
        ) {
            // SAFETY: a pool has this instruction set only where the machine can run it.
            unsafe { for_format32!(format, rows32(weight, x, out)) }
        }

        /// Rows of weights in blocks of 256 times all tokens.
        pub(super) fn rows_of_blocks256(
            format: Format256,
            weight: &MatrixView<'_>,
            x: &Activations<'_>,
            out: Output,
        ) {
            // SAFETY: a pool has this instruction set only where the machine can run it.
            unsafe { for_format256!(format, rows256(weight, x, out)) }
        }

        row_loops!(@ $features, $wide, rows32, rows32_of, row32, blocks32);
        row_loops!(@ $features, $wide, rows256, rows256_of, row256, blocks256);
    };
    (@ $features:literal, $wide:ident, $rows:ident, $rows_of:ident, $row:ident, $blocks:ident) => {
        #[target_feature(enable = $features)]
        fn $rows<const F: u8>(weight: &MatrixView<'_>, x: &Activations<'_>, out: Output) {
            let done = super::$wide::$rows::<F>(weight, x, out);
            let mut t = 0;
            while t < x.width() {
                t += match x.width() - t {
                    1 => $rows_of::<F, 1>(weight, x, out, done, t),
                    2 => $rows_of::<F, 2>(weight, x, out, done, t),
                    3 => $rows_of::<F, 3>(weight, x, out, done, t),
                    _ => $rows_of::<F, 4>(weight, x, out, done, t),
                };
            }
        }

        /// Rows from `done` on times N tokens from `t`; N.
        #[target_feature(enable = $features)]
        fn $rows_of<const F: u8, const N: usize>(
            weight: &MatrixView<'_>,
            x: &Activations<'_>,
            out: Output,
            done: usize,
            t: usize,
        ) -> usize {
            let tokens: [_; N] = std::array::from_fn(|n| x.$blocks().row(t + n));
            let rows = weight.bytes.chunks_exact(weight.row_bytes());
            for (r, row) in rows.enumerate().skip(done) {
                for (n, value) in $row::<F, N>(row, &tokens).into_iter().enumerate() {
                    // SAFETY: r and t + n are in range.
                    unsafe { out.set(t + n, r, value) };
                }
            }
            N
        }
    };
}
pub(super) use row_loops;
