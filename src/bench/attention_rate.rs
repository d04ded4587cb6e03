//! How fast the host's attention reads the KV cache for one token, and how fast it computes for the chunk of a prompt.

use super::rounds::usual_seconds;
use crate::kernels::{AttentionRun, AttentionShape, ComputePool, PAGE_TOKENS, PageView, attention};
use crate::memory::{Arena, MemoryError, Region};
use crate::placement::AttentionRates;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of a model of 8 billion weights.
const SHAPE: AttentionShape = AttentionShape {
    heads: 32,
    kv_heads: 8,
    key_length: 128,
    value_length: 128,
    window: None,
};
/// Positions that one token sees.
pub const ATTENTION_DEPTH: usize = 4096;
/// Tokens of a prompt's chunk, fewer where they take longer than is to be spent.
const CHUNK_MAX: usize = 512;
const CHUNK_MIN: usize = 32;
/// Bits of f16: 0.0625.
const ELEMENT: u16 = 0x2c00;

/// Pages of several layers in about `bytes` of memory (at least one layer, 16 MiB), measured for about `time`.
///
/// # Errors
/// The system does not give so much memory.
pub fn attention_rates(
    pool: &ComputePool,
    bytes: usize,
    time: Duration,
) -> Result<AttentionRates, MemoryError> {
    let page_elements = SHAPE.page_elements();
    let layer_bytes = ATTENTION_DEPTH / PAGE_TOKENS * page_elements * size_of::<u16>();
    let bytes = (bytes / layer_bytes).max(1) * layer_bytes;
    let arena = Arc::new(Arena::new("host", bytes)?);
    let mut memory = Region::allocate_high(&arena, bytes)?;
    memory.u16s_mut().fill(ELEMENT);
    let layers: Vec<Vec<PageView<'_>>> = memory
        .u16s()
        .chunks_exact(layer_bytes / size_of::<u16>())
        .map(|layer| {
            layer
                .chunks_exact(page_elements)
                .map(PageView::F16)
                .collect()
        })
        .collect();

    let mut walk = layers.iter().cycle();
    let mut run = |position: usize, tokens: usize| -> f64 {
        let Some(pages) = walk.next() else { return 0.0 };
        attend(pool, pages, position, tokens)
    };
    // One layer after another, so that no cache holds what is read.
    let last = ATTENTION_DEPTH - 1;
    run(last, 1);
    let decode = samples(time / 3, || run(last, 1));

    let mut tokens = CHUNK_MIN;
    let mut seconds = run(ATTENTION_DEPTH - tokens, tokens);
    while tokens < CHUNK_MAX && 2.0 * seconds < time.as_secs_f64() / 8.0 {
        tokens *= 2;
        seconds = run(ATTENTION_DEPTH - tokens, tokens);
    }
    // The first chunk of a prompt and one at the end of a long one, by turns.
    let mut both = || run(0, tokens) + run(ATTENTION_DEPTH - tokens, tokens);
    let chunks = samples(time / 2, &mut both);
    let flops = flops(0, tokens) + flops(ATTENTION_DEPTH - tokens, tokens);
    Ok(AttentionRates {
        bytes_per_second: layer_bytes as f64 / decode,
        flops_per_second: flops / chunks,
    })
}

/// The usual of the seconds that `run` gives in `time`; at least two count.
fn samples(time: Duration, mut run: impl FnMut() -> f64) -> f64 {
    let began = Instant::now();
    let mut seconds = Vec::new();
    while seconds.len() < 2 || began.elapsed() < time {
        seconds.push(run());
    }
    usual_seconds(&seconds).max(f64::MIN_POSITIVE)
}

/// Two multiplications and two additions for each pair of positions, element and head; none for positions that come
/// after a token.
fn flops(position: usize, tokens: usize) -> f64 {
    let pairs = tokens * position + tokens * (tokens + 1) / 2;
    4.0 * (SHAPE.heads * SHAPE.key_length) as f64 * pairs as f64
}

/// Seconds in which `tokens` tokens attend to all positions up to their own.
fn attend(pool: &ComputePool, pages: &[PageView<'_>], position: usize, tokens: usize) -> f64 {
    let queries: Vec<f32> = (0..tokens * SHAPE.heads * SHAPE.key_length)
        .map(|i| (i % 17) as f32 - 8.0)
        .collect();
    let mut out = vec![0.0; tokens * SHAPE.heads * SHAPE.value_length];
    let run = AttentionRun {
        pages: &pages[..(position + tokens).div_ceil(PAGE_TOKENS)],
        position: position as u32,
        tokens: tokens as u32,
    };
    let began = Instant::now();
    attention(pool, &SHAPE, SHAPE.scale(), &queries, &[run], &mut out);
    black_box(out.as_ptr());
    began.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_rates_are_measured_in_little_memory_and_time() {
        let pool = ComputePool::new(2);
        let rates = attention_rates(&pool, 0, Duration::ZERO).unwrap();
        for rate in [rates.bytes_per_second, rates.flops_per_second] {
            assert!(rate.is_finite() && rate > 0.0, "{rates:?}");
        }
    }

    #[test]
    fn a_chunk_computes_with_the_positions_that_it_sees() {
        // Three tokens at position 5 see 6, 7 and 8 positions.
        assert_eq!(flops(5, 3), 4.0 * 32.0 * 128.0 * 21.0);
    }
}
