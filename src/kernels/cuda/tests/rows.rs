use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::kernels::cuda::{DequantiseRows, GatherRows};
use crate::kernels::dequantise_row;

#[test]
fn rows_of_every_type_are_those_of_the_host_at_any_address() {
    let Some(device) = device() else { return };
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    for kind in TensorType::ALL {
        let columns = match kind.block_elements() {
            1 => 301,
            block => 11 * block,
        };
        for style in STYLES {
            let rows: Vec<Vec<u8>> = (0..3)
                .map(|_| weights(&mut rng, kind, columns, style))
                .collect();
            let buffers: Vec<_> = rows
                .iter()
                .enumerate()
                .map(|(offset, row)| device.upload_at(offset, row))
                .collect();
            let addresses: Vec<u64> = buffers
                .iter()
                .enumerate()
                .map(|(offset, buffer)| buffer.address().value() + offset as u64)
                .collect();
            let addresses = device.upload(&addresses);
            let out = device.unwritten(rows.len() * columns);
            let launch = DequantiseRows {
                kind,
                addresses: addresses.address(),
                output: out.address(),
                rows: rows.len(),
                columns,
            };
            device
                .kernels
                .dequantise_rows(&device.stream, &launch)
                .expect("a launch");
            let mut expected = vec![0.0; rows.len() * columns];
            for (row, expected) in rows.iter().zip(expected.chunks_exact_mut(columns)) {
                dequantise_row(kind, row, expected);
            }
            assert_same_bits(
                &out.floats(),
                &expected,
                &format!("{}, {style:?}", kind.name()),
            );
        }
    }
}

#[test]
fn gathered_rows_are_copies() {
    let Some(device) = device() else { return };
    let columns = 300;
    let mut rng = ChaCha8Rng::seed_from_u64(12);
    let x = inputs(&mut rng, 5 * columns, Style::Extreme);
    let chosen = [4u32, 0, 4, 2];
    let (x_there, indices) = (device.upload(&x), device.upload(&chosen));
    let out = device.unwritten(chosen.len() * columns);
    let launch = GatherRows {
        x: x_there.address(),
        indices: indices.address(),
        output: out.address(),
        rows: chosen.len(),
        columns,
    };
    device
        .kernels
        .gather_rows(&device.stream, &launch)
        .expect("a launch");
    let expected: Vec<f32> = chosen
        .iter()
        .flat_map(|row| &x[*row as usize * columns..][..columns])
        .copied()
        .collect();
    assert_same_bits(&out.floats(), &expected, "rows");
}
