//! How fast are the weight products, beside what the memory and the processor allow?
//!
//! For each type and row length: weights read per second for 1, 4 and 8 tokens, and the share of the rate at which the
//! same threads read plain memory in the same run; then floating-point operations per second for 128 and 512 tokens.
//! The best of several runs. `cargo bench --bench kernels [-- THREADS]`; under `cargo test` a tiny matrix only shows
//! that it runs.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use strata::bench::MemoryRate;
use strata::gguf::TensorType;
use strata::kernels::{Activations, ComputePool, InstructionSet, MatrixView, OutputRows, matmul};
use strata::memory::{Arena, MemoryError, Region};

/// How much is computed.
struct Size {
    /// More than any cache holds, as the weights of a model are.
    weight_bytes: usize,
    /// Row lengths: those of SmolLM2, and of Llama's 1.1B, 8B and 70B shapes.
    columns: &'static [usize],
    /// Rows for many tokens, and for the plain loops, which are hundreds of times slower.
    wide_rows: usize,
    portable_rows: usize,
    rounds: usize,
}

const BENCH: Size = Size {
    weight_bytes: 512 << 20,
    columns: &[576, 2048, 4096, 14_336],
    wide_rows: 4096,
    portable_rows: 128,
    rounds: 5,
};
const TEST: Size = Size {
    weight_bytes: 1 << 16,
    columns: &[512],
    wide_rows: 32,
    portable_rows: 32,
    rounds: 1,
};

fn main() -> Result<(), MemoryError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let size = if is_bench { BENCH } else { TEST };
    let threads = arguments
        .iter()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    // In huge pages where the kernel gives them, as weights are.
    let arena = Arc::new(Arena::new("weights", size.weight_bytes)?);
    let mut weights = Region::allocate_low(&arena, size.weight_bytes)?;
    for (index, byte) in weights.bytes_mut().iter_mut().enumerate() {
        // Ordinary numbers wherever a block has its scale, and as floats.
        *byte = 0x30 + (index % 13) as u8;
    }
    let mut memory = MemoryRate::new(size.weight_bytes)?;
    let fastest = InstructionSet::detect();
    for set in InstructionSet::ALL {
        if !set.is_available() {
            println!("{set}: not on this machine");
            continue;
        }
        let pool = ComputePool::with_instruction_set(threads, set);
        let columns = if set == fastest {
            size.columns
        } else {
            &size.columns[size.columns.len() / 2..][..1]
        };
        for &columns in columns {
            println!("{set}, {threads} threads, {columns} columns");
            for kind in TensorType::ALL {
                // SmolLM2's rows are no multiple of 256.
                if let Some(row_bytes) = kind.row_bytes(columns as u64) {
                    let rows = weights.bytes().len() / row_bytes as usize;
                    let bytes = &weights.bytes()[..rows * row_bytes as usize];
                    let weight = MatrixView::new(kind, rows, columns, bytes);
                    println!(
                        "  {:5} {}",
                        kind.name(),
                        line(&size, &pool, &mut memory, &weight)
                    );
                }
            }
        }
    }
    Ok(())
}

/// The figures of one matrix.
fn line(
    size: &Size,
    pool: &ComputePool,
    memory: &mut MemoryRate,
    weight: &MatrixView<'_>,
) -> String {
    let is_portable = pool.instruction_set() == InstructionSet::Portable;
    let narrow_rows = match is_portable {
        true => size.portable_rows,
        false => weight.rows,
    };
    let wide_rows = match is_portable {
        true => size.portable_rows,
        false => size.wide_rows,
    };
    let narrow = weight.slice(0..narrow_rows.min(weight.rows));
    let wide = weight.slice(0..wide_rows.min(weight.rows));
    memory.measure(pool);
    let plain = memory.bytes_per_second();
    let mut line = String::new();
    for width in [1, 4, 8] {
        let rate = narrow.bytes.len() as f64 / seconds(size.rounds, pool, &narrow, width);
        line += &format!(
            "{width:2}: {:6.2} GB/s ({:3.0} %)  ",
            rate / 1e9,
            100.0 * rate / plain
        );
    }
    for width in [128, 512] {
        let operations = 2.0 * (width * wide.rows * wide.columns) as f64;
        let rate = operations / seconds(size.rounds.div_ceil(2), pool, &wide, width);
        line += &format!("{width}: {:6.1} GFLOP/s  ", rate / 1e9);
    }
    line + &format!("memory: {:.2} GB/s", plain / 1e9)
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

/// The shortest time of a product with `width` tokens, the 8-bit form of its input included.
fn seconds(rounds: usize, pool: &ComputePool, weight: &MatrixView<'_>, width: usize) -> f64 {
    let x: Vec<f32> = (0..width * weight.columns)
        .map(|i| (i % 17) as f32 - 8.0)
        .collect();
    // One buffer for all rounds: the first pays for its pages.
    let mut data = vec![0.0; width * weight.rows];
    best(rounds + 1, || {
        let mut out = OutputRows {
            data: &mut data,
            stride: weight.rows,
            first_column: 0,
        };
        let x = Activations::new(&x, width, weight.columns);
        matmul(pool, weight, &x, &mut out);
        black_box(&data);
    })
}
