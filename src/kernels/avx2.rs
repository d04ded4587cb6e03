use super::activations::Activations;
use super::blocks::{Format32, Format256};
use super::matmul::{MatrixView, Output};
use super::portable;

pub(super) fn rows_of_blocks32(
    format: Format32,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    portable::rows_of_blocks32(format, weight, x, out);
}

pub(super) fn rows_of_blocks256(
    format: Format256,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    portable::rows_of_blocks256(format, weight, x, out);
}
