//! Products with quantised weights in plain Rust: the reference whose bits every other loop reproduces, and the loop
//! of machines without AVX2. The order of the arithmetic is the one that the parent module defines.
#![expect(unsafe_code, reason = "several threads write to one buffer")]

use super::activations::{Activations, QuantisedRow};
use super::blocks::{Block32, Block256, Format32, Format256};
use super::matmul::{MatrixView, Output};

/// Rows of weights in blocks of 32 times all tokens.
pub(super) fn rows_of_blocks32(
    format: Format32,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    let quantised = x.blocks32();
    let mut row: Vec<Block32> = Vec::with_capacity(weight.columns / 32);
    for r in 0..weight.rows {
        row.clear();
        let blocks = weight.row(r).chunks_exact(format.block_bytes());
        row.extend(blocks.map(|bytes| format.decode(bytes)));
        for t in 0..x.width() {
            let value = dot32(format, &row, quantised.row(t));
            // SAFETY: r and t are in range.
            unsafe { out.set(t, r, value) };
        }
    }
}

/// Rows of weights in blocks of 256 times all tokens.
pub(super) fn rows_of_blocks256(
    format: Format256,
    weight: &MatrixView<'_>,
    x: &Activations<'_>,
    out: Output,
) {
    let quantised = x.blocks256();
    let mut row: Vec<Block256> = Vec::with_capacity(weight.columns / 256);
    for r in 0..weight.rows {
        row.clear();
        let blocks = weight.row(r).chunks_exact(format.block_bytes());
        row.extend(blocks.map(|bytes| format.decode(bytes)));
        for t in 0..x.width() {
            let value = dot256(format, &row, quantised.row(t));
            // SAFETY: r and t are in range.
            unsafe { out.set(t, r, value) };
        }
    }
}

fn dot32(format: Format32, row: &[Block32], x: QuantisedRow<'_>) -> f32 {
    let mut partial = [0f32; 8];
    for (index, block) in row.iter().enumerate() {
        let quants = &x.quants[32 * index..32 * index + 32];
        let products: i32 = block
            .values
            .iter()
            .zip(quants)
            .map(|(value, quant)| i32::from(*value) * i32::from(*quant))
            .sum();
        let sum = products - format.offset() * x.sums32[index];
        let partial = &mut partial[index % 8];
        *partial = (block.scale * x.scales[index]).mul_add(sum as f32, *partial);
        if format.has_minimum() {
            *partial = block.minimum.mul_add(x.scaled_sums[index], *partial);
        }
    }
    sum_of_eight(partial)
}

fn dot256(format: Format256, row: &[Block256], x: QuantisedRow<'_>) -> f32 {
    let mut partial = [0f32; 4];
    for (index, block) in row.iter().enumerate() {
        let quants = &x.quants[256 * index..256 * index + 256];
        let mut sum = 0;
        let mut minimums = 0;
        for j in 0..16 {
            let products: i32 = block.values[16 * j..16 * j + 16]
                .iter()
                .zip(&quants[16 * j..16 * j + 16])
                .map(|(value, quant)| i32::from(*value) * i32::from(*quant))
                .sum();
            let sum16 = i32::from(x.sums16[16 * index + j]);
            sum += i32::from(block.scales[j]) * (products - format.offset() * sum16);
            minimums += i32::from(block.minimums[j]) * sum16;
        }
        let partial = &mut partial[index % 4];
        *partial = (block.scale * x.scales[index]).mul_add(sum as f32, *partial);
        if format.has_minimum() {
            let scale = block.minimum * x.scales[index];
            *partial = (-scale).mul_add(minimums as f32, *partial);
        }
    }
    sum_of_four(partial)
}

/// The fixed order in which eight partial sums become one.
pub(super) fn sum_of_eight(p: [f32; 8]) -> f32 {
    ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]))
}

/// The fixed order in which four partial sums become one.
pub(super) fn sum_of_four(p: [f32; 4]) -> f32 {
    (p[0] + p[1]) + (p[2] + p[3])
}
