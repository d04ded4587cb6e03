use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::device::UNWRITTEN;
use super::*;
use crate::kernels::cuda::{
    DeviceMatrix, InputForm, KernelError, MatrixProduct, QuantiseRows, quantised_input_bytes,
};
use crate::kernels::{Activations, ComputePool, InstructionSet, MatrixView, OutputRows, matmul};

/// Around the numbers of tokens that a pass over the weights serves.
const WIDTHS: [usize; 10] = [1, 2, 3, 8, 9, 16, 17, 33, 64, 65];

/// Rows and widths around those of several tiles.
const TILE_ROWS: [usize; 5] = [32, 33, 64, 65, 131];
const TILE_WIDTHS: [usize; 3] = [9, 32, 40];

/// Columns in blocks of the type, or elements of float types: fewer than a warp or a tile takes at once, exactly that
/// many, and some more.
fn column_counts(kind: TensorType) -> &'static [usize] {
    match kind.block_elements() {
        1 => &[1, 13, 16, 64, 77],
        32 => &[32, 5 * 32, 8 * 32, 19 * 32],
        _ => &[256, 3 * 256, 4 * 256, 9 * 256],
    }
}

/// The definition: the loops in plain Rust.
fn on_the_host(weight: &MatrixView<'_>, x: &[f32], width: usize) -> Vec<f32> {
    let pool = ComputePool::with_instruction_set(1, InstructionSet::Portable);
    let mut data = vec![f32::NAN; width * weight.rows];
    let mut out = OutputRows {
        data: &mut data,
        stride: weight.rows,
        first_column: 0,
    };
    matmul(
        &pool,
        weight,
        &Activations::new(x, width, weight.columns),
        &mut out,
    );
    data
}

/// The first `width` rows of x, in the form that the type needs, times a matrix that starts `offset` bytes into its
/// buffer: `[width, rows]`.
fn on_the_device(
    device: &Device,
    weight: &MatrixView<'_>,
    offset: usize,
    x: &[f32],
    width: usize,
) -> Vec<f32> {
    let columns = weight.columns;
    let form = InputForm::of(weight.kind);
    let floats = device.upload(&x[..width * columns]);
    let quantised = device.upload(&vec![
        0u8;
        quantised_input_bytes(form, columns, width) as usize
    ]);
    if form != InputForm::Floats {
        let rows = QuantiseRows {
            form,
            input: floats.address(),
            output: quantised.address(),
            columns,
            tokens: width,
        };
        device
            .kernels
            .quantise_rows(&device.stream, &rows)
            .expect("a launch");
    }
    let bytes = device.upload_at(offset, weight.bytes);
    // The product has the middle of wider rows.
    let (first_column, stride) = (3, weight.rows + 5);
    let out = device.unwritten(width * stride);
    let product = MatrixProduct {
        weight: DeviceMatrix {
            kind: weight.kind,
            rows: weight.rows,
            columns,
            address: bytes.address().after(offset as u64),
        },
        input: match form {
            InputForm::Floats => floats.address(),
            InputForm::Blocks32 | InputForm::Blocks256 => quantised.address(),
        },
        tokens: width,
        output: out.address(),
        stride,
        first_column,
    };
    device
        .kernels
        .matmul(&device.stream, &product)
        .expect("a launch");
    let out = out.floats();
    let mut ours = Vec::new();
    for row in out.chunks_exact(stride) {
        let (before, rest) = row.split_at(first_column);
        let (values, after) = rest.split_at(weight.rows);
        assert!(
            before.iter().chain(after).all(|value| *value == UNWRITTEN),
            "columns beside the product are left alone"
        );
        ours.extend_from_slice(values);
    }
    ours
}

/// A matrix of one shape and style, at some widths.
fn check_matrix(
    device: &Device,
    kind: TensorType,
    (rows, columns): (usize, usize),
    style: Style,
    widths: &[usize],
) {
    let mut rng = ChaCha8Rng::seed_from_u64(u64::from(kind.code()) + (rows * columns) as u64);
    let widest = widths.iter().copied().max().unwrap_or(0);
    let bytes = weights(&mut rng, kind, rows * columns, style);
    let weight = MatrixView::new(kind, rows, columns, &bytes);
    let x = inputs(&mut rng, widest * columns, style);
    let expected = on_the_host(&weight, &x, widest);
    for &width in widths {
        // At the type's alignment and no better.
        let offset = DeviceMatrix::alignment(kind) as usize;
        let ours = on_the_device(device, &weight, offset, &x, width);
        let what = format!(
            "{} {rows} x {columns}, {style:?}, width {width}",
            kind.name()
        );
        // One expectation serves all widths: a token's bits do not depend on its company.
        assert_same_bits(&ours, &expected[..width * rows], &what);
    }
}

/// Every shape and style of one type, at every width.
fn check(kind: TensorType) {
    let Some(device) = device() else { return };
    let block = kind.block_elements();
    // Two blocks, or so many elements that a tile takes them in two stages.
    let columns = if block == 1 { 67 } else { 2 * block };
    for style in STYLES {
        for columns in column_counts(kind) {
            for rows in [1, 21] {
                check_matrix(&device, kind, (rows, *columns), style, &WIDTHS);
            }
        }
        for rows in TILE_ROWS {
            check_matrix(&device, kind, (rows, columns), style, &TILE_WIDTHS);
        }
    }
}

#[test]
fn f32_products_have_the_bits_of_the_host() {
    check(TensorType::F32);
}

#[test]
fn f16_products_have_the_bits_of_the_host() {
    check(TensorType::F16);
}

#[test]
fn bf16_products_have_the_bits_of_the_host() {
    check(TensorType::BF16);
}

#[test]
fn q4_0_products_have_the_bits_of_the_host() {
    check(TensorType::Q4_0);
}

#[test]
fn q4_1_products_have_the_bits_of_the_host() {
    check(TensorType::Q4_1);
}

#[test]
fn q5_0_products_have_the_bits_of_the_host() {
    check(TensorType::Q5_0);
}

#[test]
fn q5_1_products_have_the_bits_of_the_host() {
    check(TensorType::Q5_1);
}

#[test]
fn q8_0_products_have_the_bits_of_the_host() {
    check(TensorType::Q8_0);
}

#[test]
fn q2_k_products_have_the_bits_of_the_host() {
    check(TensorType::Q2K);
}

#[test]
fn q3_k_products_have_the_bits_of_the_host() {
    check(TensorType::Q3K);
}

#[test]
fn q4_k_products_have_the_bits_of_the_host() {
    check(TensorType::Q4K);
}

#[test]
fn q5_k_products_have_the_bits_of_the_host() {
    check(TensorType::Q5K);
}

#[test]
fn q6_k_products_have_the_bits_of_the_host() {
    check(TensorType::Q6K);
}

#[test]
fn infinities_and_nans_reach_every_result_that_uses_their_block() {
    let Some(device) = device() else { return };
    let mut rng = ChaCha8Rng::seed_from_u64(99);
    for kind in [TensorType::Q8_0, TensorType::Q4K] {
        let columns = 4 * kind.block_elements();
        let bytes = weights(&mut rng, kind, 2 * columns, Style::Plain);
        let weight = MatrixView::new(kind, 2, columns, &bytes);
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut x = inputs(&mut rng, 2 * columns, Style::Plain);
            x[columns / 2] = value;
            let ours = on_the_device(&device, &weight, 0, &x, 2);
            assert!(ours[0].is_nan() && ours[1].is_nan(), "{ours:?}");
            assert_same_bits(&ours, &on_the_host(&weight, &x, 2), kind.name());
        }
    }
}

#[test]
fn products_that_vanish_keep_their_sign() {
    let Some(device) = device() else { return };
    // As many columns as there are partial sums: zeros that were added to them would make 0 of -0.
    for columns in [16, 80] {
        let bytes = [1e-30f32.to_le_bytes(); 80].concat();
        let weight = MatrixView::new(TensorType::F32, 1, columns, &bytes[..4 * columns]);
        let x = vec![-1e-30; 9 * columns];
        for width in [1, 9] {
            let ours = on_the_device(&device, &weight, 0, &x, width);
            assert_same_bits(&ours, &vec![-0.0; width], "vanishing products");
            let expected = on_the_host(&weight, &x[..width * columns], width);
            assert_same_bits(&ours, &expected, "on the host");
        }
    }
}

#[test]
fn weights_that_are_not_aligned_are_refused_and_nothing_is_launched() {
    let Some(device) = device() else { return };
    let bytes = device.upload(&[0u8; 144 + 8]);
    let out = device.unwritten(1);
    let product = MatrixProduct {
        weight: DeviceMatrix {
            kind: TensorType::Q4K,
            rows: 1,
            columns: 256,
            address: bytes.address().after(8),
        },
        input: bytes.address(),
        tokens: 1,
        output: out.address(),
        stride: 1,
        first_column: 0,
    };
    let refused = device.kernels.matmul(&device.stream, &product);
    assert!(
        matches!(refused, Err(KernelError::Unaligned { alignment: 16, .. })),
        "{refused:?}"
    );
    assert_eq!(out.floats(), [UNWRITTEN]);
}
