use rand::{Rng, RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::kernels::dequantise_row;

/// Byte offsets of the f16 fields of a block.
fn half_fields(kind: TensorType) -> &'static [usize] {
    match kind {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => &[],
        TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => &[0],
        TensorType::Q4_1 | TensorType::Q5_1 => &[0, 2],
        TensorType::Q2K => &[80, 82],
        TensorType::Q3K => &[108],
        TensorType::Q4K | TensorType::Q5K => &[0, 2],
        TensorType::Q6K => &[208],
    }
}

#[derive(Clone, Copy)]
enum Style {
    /// Random quants, scales of a trained model's size.
    Plain,
    /// Quants all zeros, all ones or 0x80, scales at the ends of f16.
    Extreme,
}

fn weights(
    rng: &mut ChaCha8Rng,
    kind: TensorType,
    rows: usize,
    columns: usize,
    style: Style,
) -> Vec<u8> {
    let elements = rows * columns;
    match kind {
        TensorType::F32 => (0..elements)
            .flat_map(|_| rng.random_range(-1.0f32..1.0).to_le_bytes())
            .collect(),
        TensorType::F16 => (0..elements)
            .flat_map(|_| half::f16::from_f32(rng.random_range(-1.0f32..1.0)).to_le_bytes())
            .collect(),
        TensorType::BF16 => (0..elements)
            .flat_map(|_| half::bf16::from_f32(rng.random_range(-1.0f32..1.0)).to_le_bytes())
            .collect(),
        _ => {
            let mut bytes = vec![0; kind.row_bytes(elements as u64).unwrap() as usize];
            rng.fill_bytes(&mut bytes);
            for block in bytes.chunks_exact_mut(kind.block_bytes()) {
                if matches!(style, Style::Extreme) {
                    let fill = [0x00, 0xff, 0x80, 0x7f][rng.random_range(0..4)];
                    block.fill(fill);
                }
                for field in half_fields(kind) {
                    let value = match style {
                        Style::Plain => half::f16::from_f32(rng.random_range(-0.02f32..0.02)),
                        Style::Extreme => half::f16::from_bits(
                            [
                                0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x7bff, 0xfbff,
                            ][rng.random_range(0..8)],
                        ),
                    };
                    block[*field..*field + 2].copy_from_slice(&value.to_le_bytes());
                }
            }
            bytes
        }
    }
}

fn inputs(rng: &mut ChaCha8Rng, width: usize, columns: usize, style: Style) -> Vec<f32> {
    let mut values = Vec::with_capacity(width * columns);
    for start in (0..width * columns).step_by(16) {
        let size = match style {
            Style::Plain => 1.0,
            Style::Extreme => [0.0, 1e-44, 1e-38, 1e-30, 1.0, 1e20][rng.random_range(0..6)],
        };
        let len = (width * columns - start).min(16);
        // Quants that are all 127 or all -127 take sums of narrow lanes to their bounds.
        let sign = [-1.0, 1.0][rng.random_range(0..2)];
        let is_largest = matches!(style, Style::Extreme) && rng.random_range(0..2) == 0;
        values.extend((0..len).map(|_| {
            let value = rng.random_range(-1.0f32..=1.0);
            if is_largest {
                sign * size
            } else {
                value * size
            }
        }));
    }
    values
}

fn product(pool: &ComputePool, weight: &MatrixView<'_>, x: &[f32], width: usize) -> Vec<u32> {
    let mut data = vec![f32::NAN; width * weight.rows];
    let activations = Activations::new(x, width, weight.columns);
    let mut out = OutputRows {
        data: &mut data,
        stride: weight.rows,
        first_column: 0,
    };
    matmul(pool, weight, &activations, &mut out);
    data.into_iter().map(f32::to_bits).collect()
}

fn sets() -> impl Iterator<Item = InstructionSet> {
    InstructionSet::ALL
        .into_iter()
        .filter(|set| set.is_available())
}

#[test]
fn every_instruction_set_gives_the_bits_of_the_portable_loops() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let portable = ComputePool::with_instruction_set(1, InstructionSet::Portable);
    for kind in TensorType::ALL {
        for style in [Style::Plain, Style::Extreme] {
            for blocks in [1, 2, 3, 4, 5, 8, 11, 18] {
                let columns = blocks
                    * if kind.block_elements() == 1 {
                        13
                    } else {
                        kind.block_elements()
                    };
                for rows in [1, 5, 37, 64] {
                    // Weights at an odd address.
                    let mut bytes = vec![0];
                    bytes.extend(weights(&mut rng, kind, rows, columns, style));
                    let weight = MatrixView::new(kind, rows, columns, &bytes[1..]);
                    let x = inputs(&mut rng, 64, columns, style);
                    let expected = product(&portable, &weight, &x, 64);
                    for set in sets() {
                        let pool = ComputePool::with_instruction_set(1, set);
                        for width in [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 49, 64] {
                            let ours = product(&pool, &weight, &x[..width * columns], width);
                            assert!(
                                ours == expected[..width * rows],
                                "{} {rows} x {columns}, {set}, width {width}",
                                kind.name()
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn many_tokens_and_long_rows_give_the_bits_of_the_portable_loops() {
    // Several panels of tokens, and several segments of a row, of which the last is short.
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let portable = ComputePool::with_instruction_set(1, InstructionSet::Portable);
    let (rows, width) = (33, 137);
    for kind in TensorType::ALL {
        let columns = match kind.block_elements() {
            1 => 130,
            32 => 70 * 32,
            block => 9 * block,
        };
        for style in [Style::Plain, Style::Extreme] {
            let bytes = weights(&mut rng, kind, rows, columns, style);
            let weight = MatrixView::new(kind, rows, columns, &bytes);
            let x = inputs(&mut rng, width, columns, style);
            let expected = product(&portable, &weight, &x, width);
            for set in sets() {
                let pool = ComputePool::with_instruction_set(2, set);
                for width in [16, 17, 130, width] {
                    let ours = product(&pool, &weight, &x[..width * columns], width);
                    assert!(
                        ours == expected[..width * rows],
                        "{}, {set}, width {width}",
                        kind.name()
                    );
                }
            }
        }
    }
}

#[test]
fn products_are_within_the_bound_of_quantised_inputs() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let pool = ComputePool::with_instruction_set(1, InstructionSet::Portable);
    for kind in TensorType::ALL {
        let (rows, columns, width) = (7, 1536, 3);
        let bytes = weights(&mut rng, kind, rows, columns, Style::Plain);
        let weight = MatrixView::new(kind, rows, columns, &bytes);
        let x = inputs(&mut rng, width, columns, Style::Plain);
        let ours = product(&pool, &weight, &x, width);
        let mut row = vec![0.0; columns];
        for r in 0..rows {
            dequantise_row(kind, weight.row(r), &mut row);
            for t in 0..width {
                let x = &x[t * columns..(t + 1) * columns];
                let block = kind.block_elements();
                let (mut exact, mut bound) = (0.0, 0.0);
                for (row, x) in row.chunks(block.max(32)).zip(x.chunks(block.max(32))) {
                    // A quant is off by at most half a step of largest / 127.
                    let largest = x.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
                    let step = if block == 1 {
                        0.0
                    } else {
                        f64::from(largest) / 127.0
                    };
                    for (w, x) in row.iter().zip(x) {
                        let (w, x) = (f64::from(*w), f64::from(*x));
                        exact += w * x;
                        bound += w.abs() * (step / 2.0 + 1e-6 * x.abs());
                    }
                }
                let ours = f64::from(f32::from_bits(ours[t * rows + r]));
                assert!(
                    (ours - exact).abs() <= bound,
                    "{}: {ours} for {exact}, bound {bound}",
                    kind.name()
                );
                // Errors of 1536 elements mostly cancel: the bound alone would pass a wrong scale.
                assert!(
                    (ours - exact).abs() <= bound / 8.0 + 1e-6,
                    "{}: {ours} for {exact}",
                    kind.name()
                );
            }
        }
    }
}

#[test]
fn row_slices_chunks_threads_and_company_do_not_change_a_bit() {
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for kind in TensorType::ALL {
        let (rows, columns, width) = (203, 512, 9);
        let bytes = weights(&mut rng, kind, rows, columns, Style::Plain);
        let weight = MatrixView::new(kind, rows, columns, &bytes);
        let x = inputs(&mut rng, width, columns, Style::Plain);
        let expected = product(&ComputePool::new(1), &weight, &x, width);
        for threads in [2, 3] {
            let pool = ComputePool::new(threads);
            assert!(
                product(&pool, &weight, &x, width) == expected,
                "{}",
                kind.name()
            );
            // Each token alone, from the last to the first.
            for t in (0..width).rev() {
                let alone = product(&pool, &weight, &x[t * columns..(t + 1) * columns], 1);
                assert!(
                    alone == expected[t * rows..(t + 1) * rows],
                    "{} token {t}",
                    kind.name()
                );
            }
            // Slices of uneven heights into the columns of one buffer, wider than the product.
            let stride = rows + 11;
            let mut data = vec![-1.0; width * stride];
            let activations = Activations::new(&x, width, columns);
            for range in [0..1, 1..32, 32..100, 100..203] {
                let mut out = OutputRows {
                    data: &mut data,
                    stride,
                    first_column: 4 + range.start,
                };
                matmul(&pool, &weight.slice(range), &activations, &mut out);
            }
            for t in 0..width {
                let row = &data[t * stride..(t + 1) * stride];
                assert!(
                    row[..4]
                        .iter()
                        .chain(&row[4 + rows..])
                        .all(|value| *value == -1.0)
                );
                let bits: Vec<u32> = row[4..4 + rows]
                    .iter()
                    .map(|value| value.to_bits())
                    .collect();
                assert!(
                    bits == expected[t * rows..(t + 1) * rows],
                    "{} in slices",
                    kind.name()
                );
            }
        }
    }
}

#[test]
fn several_products_in_one_run_are_those_of_single_runs() {
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    let (columns, width) = (512, 5);
    let pool = ComputePool::new(3);
    let x = inputs(&mut rng, width, columns, Style::Plain);
    let kinds = [
        TensorType::Q4_1,
        TensorType::Q6K,
        TensorType::F16,
        TensorType::Q8_0,
    ];
    let matrices: Vec<(TensorType, usize, Vec<u8>)> = kinds
        .into_iter()
        .enumerate()
        .map(|(i, kind)| {
            let rows = 40 + 13 * i;
            (
                kind,
                rows,
                weights(&mut rng, kind, rows, columns, Style::Plain),
            )
        })
        .collect();
    let mut results: Vec<Vec<f32>> = matrices
        .iter()
        .map(|(_, rows, _)| vec![0.0; width * rows])
        .collect();
    let mut products: Vec<Product<'_, '_>> = matrices
        .iter()
        .zip(&mut results)
        .map(|((kind, rows, bytes), data)| Product {
            slices: vec![RowSlice {
                weight: MatrixView::new(*kind, *rows, columns, bytes),
                first_row: 0,
            }],
            out: OutputRows {
                data,
                stride: *rows,
                first_column: 0,
            },
        })
        .collect();
    matmul_all(&pool, &Activations::new(&x, width, columns), &mut products);
    for ((kind, rows, bytes), data) in matrices.iter().zip(&results) {
        let weight = MatrixView::new(*kind, *rows, columns, bytes);
        let bits: Vec<u32> = data.iter().map(|value| value.to_bits()).collect();
        assert!(
            bits == product(&pool, &weight, &x, width),
            "{}",
            kind.name()
        );
    }
}

#[test]
fn slices_that_lie_apart_give_the_product_of_all_their_rows() {
    let (rows, columns) = (150, 512);
    let mut rng = ChaCha8Rng::seed_from_u64(9);
    let pool = ComputePool::new(3);
    for (kind, width) in [
        (TensorType::Q4K, 1),
        (TensorType::Q4K, 20),
        (TensorType::Q8_0, 3),
    ] {
        let bytes = weights(&mut rng, kind, rows, columns, Style::Plain);
        let x: Vec<f32> = (0..width * columns).map(|i| (i as f32).sin()).collect();
        let weight = MatrixView::new(kind, rows, columns, &bytes);
        // Each in memory of its own, and the rows between them are somebody else's.
        let parts = [0..40, 40..41, 70..150].map(|rows| {
            let slice = weight.slice(rows.clone());
            (rows.start, slice.rows, slice.bytes.to_vec())
        });
        let slices = parts.iter().map(|(first_row, rows, bytes)| RowSlice {
            weight: MatrixView::new(kind, *rows, columns, bytes),
            first_row: *first_row,
        });
        let mut data = vec![7.0; width * rows];
        let out = OutputRows {
            data: &mut data,
            stride: rows,
            first_column: 0,
        };
        let slices = slices.collect();
        let x_of = Activations::new(&x, width, columns);
        matmul_all(&pool, &x_of, &mut [Product { slices, out }]);
        let whole = product(&pool, &weight, &x, width);
        for (index, (value, expected)) in data.iter().zip(whole).enumerate() {
            let expected = match (41..70).contains(&(index % rows)) {
                true => 7.0f32.to_bits(),
                false => expected,
            };
            assert_eq!(value.to_bits(), expected, "{}, value {index}", kind.name());
        }
    }
}

#[test]
#[should_panic(expected = "row 39 after row 40")]
fn no_row_is_in_two_slices() {
    let bytes = vec![0; 40 * 128];
    let slice = |first_row| RowSlice {
        weight: MatrixView::new(TensorType::F32, 40, 32, &bytes),
        first_row,
    };
    let mut data = vec![0.0; 80];
    let out = OutputRows {
        data: &mut data,
        stride: 80,
        first_column: 0,
    };
    let slices = vec![slice(0), slice(39)];
    let x = [0.0; 32];
    matmul_all(
        &ComputePool::new(1),
        &Activations::new(&x, 1, 32),
        &mut [Product { slices, out }],
    );
}

#[test]
fn a_nan_in_the_input_or_in_a_scale_is_not_lost() {
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    for kind in TensorType::ALL {
        let (rows, columns, width) = (33, 512, 6);
        let bytes = weights(&mut rng, kind, rows, columns, Style::Plain);
        let weight = MatrixView::new(kind, rows, columns, &bytes);
        let mut x = inputs(&mut rng, width, columns, Style::Plain);
        x[2 * columns + 300] = f32::NAN;
        let poison = vec![0xff; bytes.len()];
        let poisoned = MatrixView::new(kind, rows, columns, &poison);
        for set in sets() {
            let pool = ComputePool::with_instruction_set(1, set);
            for (index, bits) in product(&pool, &weight, &x, width).into_iter().enumerate() {
                assert_eq!(
                    f32::from_bits(bits).is_nan(),
                    index / rows == 2,
                    "{} {set}",
                    kind.name()
                );
            }
            let all = product(&pool, &poisoned, &x, width);
            assert!(
                all.into_iter().all(|bits| f32::from_bits(bits).is_nan()),
                "{} {set}",
                kind.name()
            );
        }
    }
}
