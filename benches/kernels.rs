//! How fast are the weight products, beside what the memory and the processor allow?
//!
//! For each type: weights read per second at width 1, next to the rate at which the same threads read plain memory in
//! the same run; and floating-point operations per second at width 128. `cargo bench --bench kernels [-- THREADS]`;
//! under `cargo test` a tiny matrix only shows that it runs.

use std::hint::black_box;
use std::time::Instant;

use strata::gguf::TensorType;
use strata::kernels::{Activations, ComputePool, InstructionSet, MatrixView, OutputRows, matmul};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let threads = arguments
        .iter()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    // Weights that no cache holds, as in a model.
    let (columns, weight_bytes, rounds) = if is_bench {
        (4096, 1 << 30, 3)
    } else {
        (512, 1 << 16, 1)
    };
    let mut bytes = vec![0u8; weight_bytes];
    for (index, byte) in bytes.iter_mut().enumerate() {
        // Ordinary numbers wherever a block has its scale, and as floats.
        *byte = 0x30 + (index % 13) as u8;
    }
    for set in InstructionSet::ALL {
        if !set.is_available() {
            println!("{set}: not on this machine");
            continue;
        }
        let pool = ComputePool::with_instruction_set(threads, set);
        println!("{set}, {threads} threads, {columns} columns");
        for kind in TensorType::ALL {
            let row_bytes = kind.row_bytes(columns as u64).unwrap_or_default() as usize;
            let rows = weight_bytes / row_bytes;
            // The plain loops are hundreds of times slower: a part of the matrix shows how slow.
            let rows = if set == InstructionSet::Portable {
                rows.div_ceil(32)
            } else {
                rows
            };
            let weight = MatrixView::new(kind, rows, columns, &bytes[..rows * row_bytes]);
            let plain = best(rounds, || read(&pool, weight.bytes));
            let narrow = best(rounds, || multiply(&pool, &weight, 1));
            let few = best(rounds, || multiply(&pool, &weight, 4));
            let wide_rows = if is_bench { rows.min(8192) } else { rows };
            let wide_rows = if set == InstructionSet::Portable {
                wide_rows.min(128)
            } else {
                wide_rows
            };
            let wide = best(rounds, || multiply(&pool, &weight.slice(0..wide_rows), 128));
            let gigabytes = weight.bytes.len() as f64 / 1e9;
            println!(
                "  {:5} width 1: {:6.2} GB/s of weights, memory {:6.2} ({:3.0} %); width 4: {:6.2} GB/s; width 128: {:7.1} GFLOP/s",
                kind.name(),
                gigabytes / narrow,
                gigabytes / plain,
                100.0 * plain / narrow,
                gigabytes / few,
                2.0 * 128.0 * (wide_rows * columns) as f64 / wide / 1e9,
            );
        }
    }
}

/// The shortest time of several.
fn best(rounds: usize, mut run: impl FnMut()) -> f64 {
    (0..rounds)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// Reads memory as fast as these threads can: the limit of every product at width 1.
fn read(pool: &ComputePool, bytes: &[u8]) {
    let chunks: Vec<&[u8]> = bytes.chunks(1 << 20).collect();
    pool.run(chunks.len(), &|index| {
        let mut sums = [0u64; 16];
        for line in chunks[index].as_chunks::<128>().0 {
            for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                *sum ^= u64::from_le_bytes(*word);
            }
        }
        black_box(sums);
    });
}

fn multiply(pool: &ComputePool, weight: &MatrixView<'_>, width: usize) {
    let x: Vec<f32> = (0..width * weight.columns)
        .map(|i| (i % 17) as f32 - 8.0)
        .collect();
    let mut data = vec![0.0; width * weight.rows];
    let mut out = OutputRows {
        data: &mut data,
        stride: weight.rows,
        first_column: 0,
    };
    matmul(
        pool,
        weight,
        &Activations::new(&x, width, weight.columns),
        &mut out,
    );
    black_box(data);
}
