use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;
use crate::kernels::InstructionSet;
use crate::kernels::half_floats::f16_to_f32;

/// A sequence in pages, and the same keys and values in plain arrays.
struct Sequence {
    pages: Vec<Vec<u16>>,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

fn sequence(rng: &mut ChaCha8Rng, shape: &AttentionShape, length: usize) -> Sequence {
    // What lies in slots that are not written must not matter: NaN.
    let mut pages = vec![vec![0x7fff; shape.page_elements()]; length.div_ceil(PAGE_TOKENS)];
    let mut vector = |elements: usize| -> Vec<f32> {
        let rounded = |value| f16_to_f32(f32_to_f16(value));
        (0..elements)
            .map(|_| rounded(rng.random_range(-2.0f32..2.0)))
            .collect()
    };
    let mut keys = Vec::new();
    let mut values = Vec::new();
    for position in 0..length {
        let key = vector(shape.kv_heads * shape.key_length);
        let value = vector(shape.kv_heads * shape.value_length);
        let page = &mut pages[position / PAGE_TOKENS];
        store_kv(
            shape,
            PageViewMut::F16(page),
            position % PAGE_TOKENS,
            &key,
            &value,
        );
        keys.push(key);
        values.push(value);
    }
    Sequence {
        pages,
        keys,
        values,
    }
}

/// Softmax attention of one head in f64, all positions at once.
fn expected(
    shape: &AttentionShape,
    scale: f32,
    query: &[f32],
    sequence: &Sequence,
    position: usize,
    head: usize,
) -> Vec<f64> {
    let kv_head = head / (shape.heads / shape.kv_heads);
    let window = shape.window.map_or(usize::MAX, |window| window as usize);
    let first = (position + 1).saturating_sub(window);
    let scores: Vec<f64> = sequence.keys[first..=position]
        .iter()
        .map(|key| {
            let key = &key[kv_head * shape.key_length..(kv_head + 1) * shape.key_length];
            let dot: f64 = query
                .iter()
                .zip(key)
                .map(|(q, k)| f64::from(*q) * f64::from(*k))
                .sum();
            dot * f64::from(scale)
        })
        .collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    (0..shape.value_length)
        .map(|i| {
            let values = sequence.values[first..=position]
                .iter()
                .map(|value| f64::from(value[kv_head * shape.value_length + i]));
            weights
                .iter()
                .zip(values)
                .map(|(weight, value)| weight * value)
                .sum::<f64>()
                / total
        })
        .collect()
}

/// FNV-1a over the bits.
fn bits_hash(values: &[f32]) -> u64 {
    values.iter().fold(0xcbf2_9ce4_8422_2325, |hash, value| {
        (hash ^ u64::from(value.to_bits())).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Against softmax attention in f64, and the same bits on every set, with every thread count, alone and in company.
fn check(shape: AttentionShape) -> u64 {
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    let scale = 1.0 / (shape.key_length as f32).sqrt();
    let sequences: Vec<Sequence> = [1, 31, 32, 33, 77, 300]
        .into_iter()
        .map(|length| sequence(&mut rng, &shape, length))
        .collect();
    let pages: Vec<Vec<PageView<'_>>> = sequences
        .iter()
        .map(|sequence| {
            sequence
                .pages
                .iter()
                .map(|page| PageView::F16(page))
                .collect()
        })
        .collect();
    // The last position of each sequence, and one inside it.
    let places: Vec<(usize, usize)> = sequences
        .iter()
        .enumerate()
        .flat_map(|(index, sequence)| {
            let last = sequence.keys.len() - 1;
            [(index, last), (index, last / 2)]
        })
        .collect();
    let tokens: Vec<AttentionRun<'_>> = places
        .iter()
        .map(|(index, position)| AttentionRun {
            pages: &pages[*index],
            position: *position as u32,
            tokens: 1,
        })
        .collect();
    let query_size = shape.heads * shape.key_length;
    let out_size = shape.heads * shape.value_length;
    let queries: Vec<f32> = (0..tokens.len() * query_size)
        .map(|_| rng.random_range(-2.0f32..2.0))
        .collect();
    let mut reference = vec![f32::NAN; tokens.len() * out_size];
    let portable = ComputePool::with_instruction_set(1, InstructionSet::Portable);
    attention(&portable, &shape, scale, &queries, &tokens, &mut reference);

    for (t, (index, position)) in places.iter().enumerate() {
        for head in 0..shape.heads {
            let query = &queries[t * query_size + head * shape.key_length..][..shape.key_length];
            let ours = &reference[t * out_size + head * shape.value_length..][..shape.value_length];
            let expected = expected(&shape, scale, query, &sequences[*index], *position, head);
            for (ours, expected) in ours.iter().zip(expected) {
                assert!(
                    (f64::from(*ours) - expected).abs() < 1e-5,
                    "{shape:?}: {ours} for {expected}"
                );
            }
        }
    }
    for set in InstructionSet::ALL
        .into_iter()
        .filter(|set| set.is_available())
    {
        for threads in [1, 3] {
            let pool = ComputePool::with_instruction_set(threads, set);
            let mut ours = vec![f32::NAN; reference.len()];
            attention(&pool, &shape, scale, &queries, &tokens, &mut ours);
            assert!(
                ours == reference,
                "{shape:?}, {set}, {threads} threads, together"
            );
            for t in 0..tokens.len() {
                let mut alone = vec![f32::NAN; out_size];
                let query = &queries[t * query_size..(t + 1) * query_size];
                attention(&pool, &shape, scale, query, &tokens[t..t + 1], &mut alone);
                assert!(
                    alone == reference[t * out_size..(t + 1) * out_size],
                    "{shape:?}, {set}, token {t} alone"
                );
            }
        }
    }
    bits_hash(&reference)
}

/// The tokens of a sequence in runs of several lengths, on every set, give the bits that each gives alone.
fn check_chunks(shape: AttentionShape) {
    let mut rng = ChaCha8Rng::seed_from_u64(8);
    let length = 150;
    let sequence = sequence(&mut rng, &shape, length);
    let pages: Vec<PageView<'_>> = sequence
        .pages
        .iter()
        .map(|page| PageView::F16(page))
        .collect();
    let query_size = shape.heads * shape.key_length;
    let out_size = shape.heads * shape.value_length;
    let queries: Vec<f32> = (0..length * query_size)
        .map(|_| rng.random_range(-2.0f32..2.0))
        .collect();
    let run = |position: usize, tokens: usize| AttentionRun {
        pages: &pages,
        position: position as u32,
        tokens: tokens as u32,
    };
    let portable = ComputePool::with_instruction_set(1, InstructionSet::Portable);
    let mut alone = vec![f32::NAN; length * out_size];
    for (position, out) in alone.chunks_exact_mut(out_size).enumerate() {
        let query = &queries[position * query_size..(position + 1) * query_size];
        attention(&portable, &shape, 0.3, query, &[run(position, 1)], out);
        for (head, out) in out.chunks_exact(shape.value_length).enumerate() {
            let query = &query[head * shape.key_length..(head + 1) * shape.key_length];
            let expected = expected(&shape, 0.3, query, &sequence, position, head);
            for (ours, expected) in out.iter().zip(expected) {
                assert!((f64::from(*ours) - expected).abs() < 1e-5, "{shape:?}");
            }
        }
    }
    for set in InstructionSet::ALL
        .into_iter()
        .filter(|set| set.is_available())
    {
        let pool = ComputePool::with_instruction_set(2, set);
        for chunk in [1, 7, 31, 64, length] {
            let runs: Vec<AttentionRun<'_>> = (0..length)
                .step_by(chunk)
                .map(|position| run(position, chunk.min(length - position)))
                .collect();
            let mut together = vec![f32::NAN; alone.len()];
            attention(&pool, &shape, 0.3, &queries, &runs, &mut together);
            assert!(together == alone, "{shape:?}, {set}, chunks of {chunk}");
        }
    }
}

#[test]
fn a_window_hides_what_lies_before_it_and_chunking_does_not_change_a_bit() {
    for (heads, kv_heads, key_length, value_length) in
        [(9, 3, 64, 64), (6, 1, 20, 36), (3, 3, 7, 5)]
    {
        for window in [1, 31, 33, 77, 1000] {
            check_chunks(AttentionShape {
                heads,
                kv_heads,
                key_length,
                value_length,
                window: Some(window),
            });
        }
        check_chunks(AttentionShape {
            heads,
            kv_heads,
            key_length,
            value_length,
            window: None,
        });
    }
}

#[test]
fn attention_is_softmax_attention_and_company_does_not_change_a_bit() {
    // The bits are those of the definition in the module's doc: no later loop may change them.
    for (heads, kv_heads, key_length, value_length, bits) in [
        (9, 3, 64, 64, 0xf616_7125_5b0d_bbd5),
        (8, 2, 128, 128, 0xcf52_2236_97c7_24ad),
        (4, 4, 16, 16, 0xab5f_25ef_441e_d29f),
        (6, 1, 20, 36, 0xf102_2516_4443_5bcb),
        (5, 1, 7, 5, 0xb543_1e29_cd9e_2f40),
        (2, 1, 32, 48, 0x6874_7f14_d47d_75dc),
        (7, 7, 80, 80, 0xc9a5_a90f_46a4_883b),
    ] {
        let shape = AttentionShape {
            heads,
            kv_heads,
            key_length,
            value_length,
            window: None,
        };
        assert_eq!(check(shape), bits, "{shape:?}");
        check(AttentionShape {
            window: Some(40),
            ..shape
        });
    }
}

#[test]
fn scores_far_apart_do_not_overflow() {
    let shape = AttentionShape {
        heads: 1,
        kv_heads: 1,
        key_length: 16,
        value_length: 16,
        window: None,
    };
    let mut pages = vec![vec![0u16; shape.page_elements()]; 2];
    for position in 0..64 {
        // Position 40 scores 16 * 100 * 100, all others as much below zero.
        let key = if position == 40 { 100.0 } else { -100.0 };
        let page = &mut pages[position / PAGE_TOKENS];
        store_kv(
            &shape,
            PageViewMut::F16(page),
            position % PAGE_TOKENS,
            &[key; 16],
            &[position as f32; 16],
        );
    }
    let pages: Vec<PageView<'_>> = pages.iter().map(|page| PageView::F16(page)).collect();
    let token = AttentionRun {
        pages: &pages,
        position: 63,
        tokens: 1,
    };
    let mut out = [0.0; 16];
    attention(
        &ComputePool::new(1),
        &shape,
        1.0,
        &[100.0; 16],
        &[token],
        &mut out,
    );
    assert_eq!(out, [40.0; 16]);
}

#[test]
fn pages_of_f32_hold_what_they_are_given() {
    let shape = AttentionShape {
        heads: 2,
        kv_heads: 1,
        key_length: 16,
        value_length: 16,
        window: None,
    };
    // Between two values of f16: attention over one position gives the value itself, rounded or not.
    let value = 1.0 + f32::EPSILON;
    let mut wide = vec![0.0f32; shape.page_elements()];
    let mut narrow = vec![0u16; shape.page_elements()];
    store_kv(
        &shape,
        PageViewMut::F32(&mut wide),
        0,
        &[0.5; 16],
        &[value; 16],
    );
    store_kv(
        &shape,
        PageViewMut::F16(&mut narrow),
        0,
        &[0.5; 16],
        &[value; 16],
    );
    for set in InstructionSet::ALL
        .into_iter()
        .filter(|set| set.is_available())
    {
        let pool = ComputePool::with_instruction_set(1, set);
        for (page, expected) in [(PageView::F32(&wide), value), (PageView::F16(&narrow), 1.0)] {
            let tokens = [AttentionRun {
                pages: &[page],
                position: 0,
                tokens: 1,
            }];
            let mut out = [0.0; 32];
            attention(&pool, &shape, 0.25, &[0.1; 32], &tokens, &mut out);
            assert_eq!(out, [expected; 32], "{set}");
        }
    }
}
