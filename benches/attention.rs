//! How fast does attention read the pages of the KV cache, beside what the memory allows, and how fast does it
//! multiply over a prompt?
//!
//! One token at depth 4096 in several layers, so that no cache holds the pages: bytes of keys and values per second,
//! next to the rate at which the same threads read plain memory in the same run. A prompt of 512 tokens: floating-point
//! operations per second, those of masked positions not counted. `cargo bench --bench attention [-- THREADS]`; under
//! `cargo test` a short sequence only shows that it runs.

use std::hint::black_box;
use std::time::Instant;

use strata::bench::MemoryRate;
use strata::kernels::{
    AttentionRun, AttentionShape, ComputePool, PAGE_TOKENS, PageView, attention,
};
use strata::memory::MemoryError;

/// Bits of f16: 0.0625.
const ELEMENT: u16 = 0x2c00;

fn main() -> Result<(), MemoryError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_bench = arguments.iter().any(|argument| argument == "--bench");
    let threads = arguments
        .iter()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    // Pages of several layers that no cache holds, as in a model.
    let (depth, prompt, bytes_min, rounds) = if is_bench {
        (4096, 512, 256 << 20, 5)
    } else {
        (64, 40, 1 << 16, 1)
    };
    let pool = ComputePool::new(threads);
    println!("{}, {threads} threads", pool.instruction_set());
    let mut memory = MemoryRate::new(bytes_min)?;
    for (heads, kv_heads, length) in [(32, 8, 128), (64, 8, 128), (9, 3, 64), (8, 8, 64)] {
        let shape = AttentionShape {
            heads,
            kv_heads,
            key_length: length,
            value_length: length,
            window: None,
        };
        let page_elements = shape.page_elements();
        let layer_elements = depth / PAGE_TOKENS * page_elements;
        let layers = (bytes_min / (2 * layer_elements)).max(1);
        let elements = vec![ELEMENT; layers * layer_elements];
        let layers: Vec<Vec<PageView<'_>>> = elements
            .chunks_exact(layer_elements)
            .map(|layer| {
                layer
                    .chunks_exact(page_elements)
                    .map(PageView::F16)
                    .collect()
            })
            .collect();
        let gigabytes = 2.0 * elements.len() as f64 / 1e9;
        for _ in 0..rounds {
            memory.measure(&pool);
        }
        let plain = memory.bytes_per_second() / 1e9;
        let decode = best(rounds, || {
            for pages in &layers {
                attend(&pool, &shape, pages, depth - 1, 1);
            }
        });
        let first = best(2 * rounds, || attend(&pool, &shape, &layers[0], 0, prompt));
        let late = best(rounds, || {
            attend(&pool, &shape, &layers[0], depth - prompt, prompt);
        });
        // Four operations (two multiplications, two additions) for each pair of positions, element and head.
        let gigaflop = |position: usize| {
            let pairs = prompt * position + prompt * (prompt + 1) / 2;
            (4 * heads * length * pairs) as f64 / 1e9
        };
        println!(
            "{heads:2} heads, {kv_heads} kv heads of {length:3}: width 1 at {depth}: {:5.2} GB/s of pages, memory {:5.2} ({:3.0} %); {prompt} tokens: {:5.1} GFLOP/s, at the end of {depth}: {:5.1} GFLOP/s",
            gigabytes / decode,
            plain,
            100.0 * gigabytes / decode / plain,
            gigaflop(0) / first,
            gigaflop(depth - prompt) / late,
        );
    }
    Ok(())
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

fn attend(
    pool: &ComputePool,
    shape: &AttentionShape,
    pages: &[PageView<'_>],
    position: usize,
    tokens: usize,
) {
    let queries: Vec<f32> = (0..tokens * shape.heads * shape.key_length)
        .map(|i| (i % 17) as f32 - 8.0)
        .collect();
    let run = AttentionRun {
        pages,
        position: position as u32,
        tokens: tokens as u32,
    };
    let mut out = vec![0.0; tokens * shape.heads * shape.value_length];
    attention(pool, shape, 0.1, &queries, &[run], &mut out);
    black_box(out);
}
