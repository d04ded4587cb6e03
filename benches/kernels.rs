//! How fast are the weight products, beside what the memory allows?
//!
//! For each type and row length: weights read per second for 1, 4 and 8 tokens, and the share of the rate at which the
//! same threads read plain memory just before (the plain loops' few rows lie in a cache); then floating-point operations per second for 128 and 512 tokens. All
//! processors that the process may run on compute (`taskset` gives it fewer).
//!
//! `cargo bench --bench kernels [-- FILTER]`, where a name is SET/TYPE/COLUMNS/TOKENS: `-- avx2/Q4_K/4096`. Under
//! `cargo test` a tiny matrix only shows that it runs.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, SamplingMode, Throughput};
use strata::bench::MemoryRate;
use strata::gguf::TensorType;
use strata::kernels::{Activations, ComputePool, InstructionSet, MatrixView, OutputRows, matmul};
use strata::memory::{Arena, MemoryError, Region};

/// How much is computed.
struct Size {
    /// More than a thread's caches hold, as the weights of a model are.
    weight_bytes: usize,
    /// Row lengths: those of SmolLM2, and of Llama's 1.1B, 8B and 70B shapes.
    columns: &'static [usize],
    /// Rows for many tokens, and for the plain loops, which are hundreds of times slower.
    wide_rows: usize,
    portable_rows: usize,
}

const BENCH: Size = Size {
    weight_bytes: 512 << 20,
    columns: &[576, 2048, 4096, 14_336],
    wide_rows: 4096,
    portable_rows: 128,
};
const TEST: Size = Size {
    weight_bytes: 1 << 16,
    columns: &[512],
    wide_rows: 32,
    portable_rows: 32,
};

fn main() -> Result<(), MemoryError> {
    let is_bench = std::env::args().any(|argument| argument == "--bench");
    let size = if is_bench { BENCH } else { TEST };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // In huge pages where the kernel gives them, as weights are.
    let arena = Arc::new(Arena::new("weights", size.weight_bytes)?);
    let mut weights = Region::allocate_low(&arena, size.weight_bytes)?;
    for (index, byte) in weights.bytes_mut().iter_mut().enumerate() {
        // Ordinary numbers wherever a block has its scale, and as floats.
        *byte = 0x30 + (index % 13) as u8;
    }
    let share = ShareOfMemory::default();
    let memory_rate = Arc::clone(&share.memory_rate);
    let mut criterion = Criterion::default()
        .with_measurement(share)
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .without_plots()
        .configure_from_args();
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
            for kind in TensorType::ALL {
                // SmolLM2's rows are no multiple of 256.
                let Some(row_bytes) = kind.row_bytes(columns as u64) else {
                    continue;
                };
                let rows = weights.bytes().len() / row_bytes as usize;
                let bytes = &weights.bytes()[..rows * row_bytes as usize];
                let weight = MatrixView::new(kind, rows, columns, bytes);
                let name = format!("{set}/{}/{columns}", kind.name());
                let mut group = criterion.benchmark_group(name);
                group.sampling_mode(SamplingMode::Flat);
                products(&size, &pool, &weight, &memory_rate, &mut group);
                group.finish();
            }
        }
    }
    criterion.final_summary();
    Ok(())
}

/// Products of one matrix with a few tokens and with many.
fn products(
    size: &Size,
    pool: &ComputePool,
    weight: &MatrixView<'_>,
    memory_rate: &AtomicU64,
    group: &mut BenchmarkGroup<'_, ShareOfMemory>,
) {
    let is_portable = pool.instruction_set() == InstructionSet::Portable;
    let (narrow_rows, wide_rows) = match is_portable {
        true => (size.portable_rows, size.portable_rows),
        false => (weight.rows, size.wide_rows),
    };
    for width in [1, 4, 8, 128, 512] {
        let is_wide = width > 8;
        let rows = if is_wide { wide_rows } else { narrow_rows };
        let weight = weight.slice(0..rows.min(weight.rows));
        group.throughput(if is_wide {
            Throughput::Elements(2 * (width * weight.rows * weight.columns) as u64)
        } else {
            Throughput::Bytes(weight.bytes.len() as u64)
        });
        let x: Vec<f32> = (0..width * weight.columns)
            .map(|i| (i % 17) as f32 - 8.0)
            .collect();
        // One buffer for all samples: the first pays for its pages.
        let mut data = vec![0.0; width * weight.rows];
        let mut is_measured = false;
        group.bench_function(BenchmarkId::from_parameter(width), |bencher| {
            // Anew for each product that was asked for: the machine's rate drifts.
            if !is_wide && !std::mem::replace(&mut is_measured, true) {
                let rate = MemoryRate::new(size.weight_bytes).map_or(0.0, |mut memory| {
                    memory.measure(pool);
                    memory.bytes_per_second()
                });
                memory_rate.store(rate as u64, Ordering::Relaxed);
            }
            // The 8-bit form of the input included.
            bencher.iter(|| {
                let mut out = OutputRows {
                    data: &mut data,
                    stride: weight.rows,
                    first_column: 0,
                };
                let x = Activations::new(&x, width, weight.columns);
                matmul(pool, &weight, &x, &mut out);
                black_box(out.data.as_ptr());
            });
        });
    }
}

/// Time by the clock; bytes are shown as a rate and as a share of the memory's, elements as operations.
#[derive(Default)]
struct ShareOfMemory {
    /// Bytes per second.
    memory_rate: Arc<AtomicU64>,
}

impl Measurement for ShareOfMemory {
    type Intermediate = <WallTime as Measurement>::Intermediate;
    type Value = <WallTime as Measurement>::Value;

    fn start(&self) -> Self::Intermediate {
        WallTime.start()
    }

    fn end(&self, started: Self::Intermediate) -> Self::Value {
        WallTime.end(started)
    }

    fn add(&self, a: &Self::Value, b: &Self::Value) -> Self::Value {
        WallTime.add(a, b)
    }

    fn zero(&self) -> Self::Value {
        WallTime.zero()
    }

    fn to_f64(&self, value: &Self::Value) -> f64 {
        WallTime.to_f64(value)
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        self
    }
}

impl ValueFormatter for ShareOfMemory {
    fn format_throughput(&self, throughput: &Throughput, nanoseconds: f64) -> String {
        match *throughput {
            Throughput::Bytes(bytes) => {
                let rate = bytes as f64 / nanoseconds;
                let memory = self.memory_rate.load(Ordering::Relaxed) as f64 / 1e9;
                format!("{rate:.2} GB/s ({:.0} %)", 100.0 * rate / memory)
            }
            Throughput::Elements(operations) => {
                format!("{:.1} GFLOP/s", operations as f64 / nanoseconds)
            }
            _ => WallTime
                .formatter()
                .format_throughput(throughput, nanoseconds),
        }
    }

    fn scale_values(&self, typical: f64, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_values(typical, values)
    }

    fn scale_throughputs(
        &self,
        typical: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        WallTime
            .formatter()
            .scale_throughputs(typical, throughput, values)
    }

    fn scale_for_machines(&self, values: &mut [f64]) -> &'static str {
        WallTime.formatter().scale_for_machines(values)
    }
}
