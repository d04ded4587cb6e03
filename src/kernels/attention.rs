//! Attention over the pages of the KV cache.
//!
//! A page holds `PAGE_TOKENS` positions of one layer, in f16 or f32: for each KV head the keys, one element of all positions after
//! another, [kv_heads][key_length][PAGE_TOKENS]; then for each KV head the values, one position after another,
//! [kv_heads][PAGE_TOKENS][value_length]. With keys laid out like this the scores of all positions of a page are made
//! side by side, with no sum across lanes.
//!
//! A token attends to positions 0 to its own, reading pages in order of position, those of its own step included, at
//! the pages' precision. For each page: scores (two partial sums, over even and odd key elements, then added), their
//! maximum, e^(score - maximum so far), the sum of these over positions i and i + 16, then as lanes are summed; sums so
//! far are scaled when the maximum grows; then the page's values are added one position after another. Nothing depends
//! on other tokens, so neither company nor chunking changes a result.
#![expect(
    clippy::needless_range_loop,
    reason = "an index keeps several arrays in step"
)]

use std::sync::Mutex;

use super::ComputePool;
use super::half_floats::f32_to_f16;
use super::simd::{self, Lanes};

/// Positions in a page.
pub const PAGE_TOKENS: usize = 32;

/// The sizes of one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: usize,
    pub kv_heads: usize,
    /// Elements of a query or key head.
    pub key_length: usize,
    /// Elements of a value head.
    pub value_length: usize,
}

impl AttentionShape {
    /// Elements of one layer's page, u16 or f32.
    pub const fn page_elements(&self) -> usize {
        self.kv_heads * PAGE_TOKENS * (self.key_length + self.value_length)
    }

    fn keys<'a, E>(&self, page: &'a [E], kv_head: usize) -> &'a [E] {
        let size = self.key_length * PAGE_TOKENS;
        &page[kv_head * size..(kv_head + 1) * size]
    }

    fn values<'a, E>(&self, page: &'a [E], kv_head: usize) -> &'a [E] {
        let size = self.value_length * PAGE_TOKENS;
        let start = self.kv_heads * self.key_length * PAGE_TOKENS + kv_head * size;
        &page[start..start + size]
    }
}

/// One layer's part of a page, at the precision that it is stored in.
#[derive(Clone, Copy, Debug)]
pub enum PageView<'a> {
    /// Bits of f16.
    F16(&'a [u16]),
    F32(&'a [f32]),
}

impl PageView<'_> {
    /// Elements.
    fn len(self) -> usize {
        match self {
            PageView::F16(page) => page.len(),
            PageView::F32(page) => page.len(),
        }
    }
}

/// The same, to be written.
#[derive(Debug)]
pub enum PageViewMut<'a> {
    F16(&'a mut [u16]),
    F32(&'a mut [f32]),
}

/// What a page is made of. The same arithmetic serves both: elements become f32 when they are loaded.
trait Element: Copy + Default {
    fn of(value: f32) -> Self;
    fn load<L: Lanes>(from: &[Self; 16]) -> L;
    /// `None` where the page is made of other elements.
    fn view(page: PageView<'_>) -> Option<&[Self]>;
}

impl Element for u16 {
    fn of(value: f32) -> u16 {
        f32_to_f16(value)
    }

    #[inline(always)]
    fn load<L: Lanes>(from: &[u16; 16]) -> L {
        L::load_f16(from)
    }

    fn view(page: PageView<'_>) -> Option<&[u16]> {
        match page {
            PageView::F16(page) => Some(page),
            PageView::F32(_) => None,
        }
    }
}

impl Element for f32 {
    fn of(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn load<L: Lanes>(from: &[f32; 16]) -> L {
        L::load(from)
    }

    fn view(page: PageView<'_>) -> Option<&[f32]> {
        match page {
            PageView::F32(page) => Some(page),
            PageView::F16(_) => None,
        }
    }
}

/// One query token: where its sequence's pages are, in order of position, and its own position.
#[derive(Clone, Copy, Debug)]
pub struct AttentionToken<'a> {
    /// At least `position / PAGE_TOKENS + 1` pages of this layer.
    pub pages: &'a [PageView<'a>],
    pub position: u32,
}

/// Writes the key and value of one position into its page. `key` is [kv_heads, key_length], `value`
/// [kv_heads, value_length].
///
/// # Panics
/// When shapes do not agree.
pub fn store_kv(
    shape: &AttentionShape,
    page: PageViewMut<'_>,
    slot: usize,
    key: &[f32],
    value: &[f32],
) {
    match page {
        PageViewMut::F16(page) => store(shape, page, slot, key, value),
        PageViewMut::F32(page) => store(shape, page, slot, key, value),
    }
}

fn store<E: Element>(
    shape: &AttentionShape,
    page: &mut [E],
    slot: usize,
    key: &[f32],
    value: &[f32],
) {
    assert!(slot < PAGE_TOKENS, "slot {slot}");
    assert_eq!(page.len(), shape.page_elements(), "elements of a page");
    assert_eq!(
        key.len(),
        shape.kv_heads * shape.key_length,
        "elements of a key"
    );
    assert_eq!(
        value.len(),
        shape.kv_heads * shape.value_length,
        "elements of a value"
    );
    let (keys, values) = page.split_at_mut(shape.kv_heads * shape.key_length * PAGE_TOKENS);
    for (column, element) in keys.as_chunks_mut::<PAGE_TOKENS>().0.iter_mut().zip(key) {
        column[slot] = E::of(*element);
    }
    let heads = values.chunks_exact_mut(shape.value_length * PAGE_TOKENS);
    for (head, value) in heads.zip(value.chunks_exact(shape.value_length)) {
        let row = &mut head[slot * shape.value_length..(slot + 1) * shape.value_length];
        for (to, element) in row.iter_mut().zip(value) {
            *to = E::of(*element);
        }
    }
}

/// out = softmax(scale * queries * keys) * values. `queries` is [width, heads, key_length], `out`
/// [width, heads, value_length].
///
/// # Panics
/// When shapes do not agree or a token has too few pages.
pub fn attention(
    pool: &ComputePool,
    shape: &AttentionShape,
    scale: f32,
    queries: &[f32],
    tokens: &[AttentionToken<'_>],
    out: &mut [f32],
) {
    let width = tokens.len();
    assert!(shape.heads.is_multiple_of(shape.kv_heads), "{shape:?}");
    assert_eq!(
        queries.len(),
        width * shape.heads * shape.key_length,
        "{width} queries"
    );
    assert_eq!(
        out.len(),
        width * shape.heads * shape.value_length,
        "{width} outputs"
    );
    for token in tokens {
        let needed = token.position as usize / PAGE_TOKENS + 1;
        assert!(
            token.pages.len() >= needed,
            "position {} in {} pages",
            token.position,
            token.pages.len()
        );
        for page in &token.pages[..needed] {
            assert_eq!(page.len(), shape.page_elements(), "elements of a page");
        }
    }
    if shape.value_length == 0 {
        return;
    }
    let set = pool.instruction_set();
    let in_f32 = tokens
        .iter()
        .any(|token| matches!(token.pages, [PageView::F32(_), ..]));
    let group = shape.heads / shape.kv_heads;
    // One item for each token and KV head. The lock of an item is taken once, by the thread that has it.
    let items: Vec<_> = out
        .chunks_mut(group * shape.value_length)
        .map(Mutex::new)
        .collect();
    pool.run(items.len(), &|index| {
        let Ok(mut out) = items[index].lock() else {
            return;
        };
        let (t, kv_head) = (index / shape.kv_heads, index % shape.kv_heads);
        let first = (t * shape.heads + kv_head * group) * shape.key_length;
        let queries = &queries[first..first + group * shape.key_length];
        let task = Task {
            shape,
            scale,
            token: tokens[t],
            kv_head,
        };
        match in_f32 {
            true => attend_f32(set, &task, queries, &mut out),
            false => attend_f16(set, &task, queries, &mut out),
        }
    });
}

/// What the query heads of one token that share a KV head have in common.
struct Task<'a> {
    shape: &'a AttentionShape,
    scale: f32,
    token: AttentionToken<'a>,
    kv_head: usize,
}

simd::vectorised! {
    fn attend_f16(task: &Task<'_>, queries: &[f32], out: &mut [f32]) => attend_f16_on
}

simd::vectorised! {
    fn attend_f32(task: &Task<'_>, queries: &[f32], out: &mut [f32]) => attend_f32_on
}

#[inline(always)]
fn attend_f16_on<L: Lanes>(task: &Task<'_>, queries: &[f32], out: &mut [f32]) {
    attend_on::<L, u16>(task, queries, out);
}

#[inline(always)]
fn attend_f32_on<L: Lanes>(task: &Task<'_>, queries: &[f32], out: &mut [f32]) {
    attend_on::<L, f32>(task, queries, out);
}

#[inline(always)]
fn attend_on<L: Lanes, E: Element>(task: &Task<'_>, queries: &[f32], out: &mut [f32]) {
    let mut queries = queries;
    let mut out = out;
    let (key_length, value_length) = (task.shape.key_length, task.shape.value_length);
    // Up to four heads at once read each page once.
    while !out.is_empty() {
        let heads = (out.len() / value_length).min(4);
        let (these_queries, more_queries) = queries.split_at(heads * key_length);
        let (these_out, more_out) = out.split_at_mut(heads * value_length);
        match heads {
            4 => attend_heads::<L, E, 4>(task, these_queries, these_out),
            3 => attend_heads::<L, E, 3>(task, these_queries, these_out),
            2 => attend_heads::<L, E, 2>(task, these_queries, these_out),
            _ => attend_heads::<L, E, 1>(task, these_queries, these_out),
        }
        (queries, out) = (more_queries, more_out);
    }
}

#[inline(always)]
fn attend_heads<L: Lanes, E: Element, const H: usize>(
    task: &Task<'_>,
    queries: &[f32],
    out: &mut [f32],
) {
    let (key_length, value_length) = (task.shape.key_length, task.shape.value_length);
    // One key element of all heads after another, scaled.
    let queries: Vec<[f32; H]> = (0..key_length)
        .map(|i| std::array::from_fn(|h| queries[h * key_length + i] * task.scale))
        .collect();
    // Values in whole vectors; the padding of the last one stays zero.
    let vectors = value_length.div_ceil(16);
    let mut sums = vec![[[0.0f32; 16]; H]; vectors];
    let mut largest = [f32::NEG_INFINITY; H];
    let mut total = [0.0f32; H];
    let mut remaining = task.token.position as usize + 1;
    for page in task.token.pages {
        if remaining == 0 {
            break;
        }
        let count = remaining.min(PAGE_TOKENS);
        remaining -= count;
        let Some(page) = E::view(*page) else {
            unreachable!("the pages of a step are of one precision");
        };
        let scores = scores::<L, E, H>(&queries, task.shape.keys(page, task.kv_head));
        let mut weights = [[0.0f32; PAGE_TOKENS]; H];
        let mut decay = [0.0f32; H];
        for h in 0..H {
            let [mut low, mut high] = scores[h];
            if count < PAGE_TOKENS {
                low = low.first(count.min(16), f32::NEG_INFINITY);
                high = high.first(count.saturating_sub(16), f32::NEG_INFINITY);
            }
            let page_largest = low.max(high).largest();
            let now = if page_largest > largest[h] {
                page_largest
            } else {
                largest[h]
            };
            decay[h] = exp_of::<L>(largest[h] - now);
            largest[h] = now;
            let low = simd::exp(low.sub(L::splat(now)));
            let high = simd::exp(high.sub(L::splat(now)));
            total[h] = total[h] * decay[h] + low.add(high).sum();
            let (to_low, to_high) = weights[h].split_at_mut(16);
            if let ([to_low], [to_high]) = (
                to_low.as_chunks_mut::<16>().0,
                to_high.as_chunks_mut::<16>().0,
            ) {
                low.store(to_low);
                high.store(to_high);
            }
        }
        let values = task.shape.values(page, task.kv_head);
        add_values::<L, E, H>(&mut sums, values, value_length, &weights, &decay, count);
    }
    for (h, out) in out.chunks_exact_mut(value_length).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            *out = sums[i / 16][h][i % 16] / total[h];
        }
    }
}

#[inline(always)]
fn exp_of<L: Lanes>(x: f32) -> f32 {
    let mut lanes = [0.0; 16];
    simd::exp(L::splat(x)).store(&mut lanes);
    lanes[0]
}

/// The scores of a page's 32 positions, as two vectors for each head.
#[inline(always)]
fn scores<L: Lanes, E: Element, const H: usize>(queries: &[[f32; H]], keys: &[E]) -> [[L; 2]; H] {
    let zero = L::splat(0.0);
    let mut even = [[zero; 2]; H];
    let mut odd = [[zero; 2]; H];
    let columns = keys.as_chunks::<PAGE_TOKENS>().0;
    let (columns, last_column) = columns.as_chunks::<2>();
    let (queries, last_query) = queries.as_chunks::<2>();
    for ([column0, column1], [query0, query1]) in columns.iter().zip(queries) {
        add_products(&mut even, column0, query0);
        add_products(&mut odd, column1, query1);
    }
    if let ([column], [query]) = (last_column, last_query) {
        add_products(&mut even, column, query);
    }
    for h in 0..H {
        even[h][0] = even[h][0].add(odd[h][0]);
        even[h][1] = even[h][1].add(odd[h][1]);
    }
    even
}

#[inline(always)]
fn add_products<L: Lanes, E: Element, const H: usize>(
    sums: &mut [[L; 2]; H],
    column: &[E; PAGE_TOKENS],
    query: &[f32; H],
) {
    let halves = column.as_chunks::<16>().0;
    let keys: [L; 2] = [E::load(&halves[0]), E::load(&halves[1])];
    for (sums, query) in sums.iter_mut().zip(query) {
        let query = L::splat(*query);
        sums[0] = keys[0].mul_add(query, sums[0]);
        sums[1] = keys[1].mul_add(query, sums[1]);
    }
}

/// sums = sums * decay + the page's values by their weights, one position after another.
#[inline(always)]
fn add_values<L: Lanes, E: Element, const H: usize>(
    sums: &mut [[[f32; 16]; H]],
    values: &[E],
    value_length: usize,
    weights: &[[f32; PAGE_TOKENS]; H],
    decay: &[f32; H],
    count: usize,
) {
    let whole = value_length / 16;
    let (pairs, single) = sums[..whole].as_chunks_mut::<2>();
    // Two vectors at once: enough independent chains to keep the multipliers busy.
    for (index, pair) in pairs.iter_mut().enumerate() {
        // No closures around lanes: they would not be compiled for the instruction set.
        let mut lanes = [[L::splat(0.0); H]; 2];
        for i in 0..2 {
            for h in 0..H {
                lanes[i][h] = L::load(&pair[i][h]).mul(L::splat(decay[h]));
            }
        }
        for j in 0..count {
            let start = j * value_length + 32 * index;
            let row = values[start..start + 32].as_chunks::<16>().0;
            let row: [L; 2] = [E::load(&row[0]), E::load(&row[1])];
            for h in 0..H {
                let weight = L::splat(weights[h][j]);
                lanes[0][h] = row[0].mul_add(weight, lanes[0][h]);
                lanes[1][h] = row[1].mul_add(weight, lanes[1][h]);
            }
        }
        for i in 0..2 {
            for h in 0..H {
                lanes[i][h].store(&mut pair[i][h]);
            }
        }
    }
    let odd = 16 * (whole - single.len());
    let rest = value_length - 16 * whole;
    let tail = sums[whole - whole % 2..].iter_mut();
    for (sums, (start, len)) in tail.zip(
        [(odd, 16), (16 * whole, rest)]
            .into_iter()
            .skip(1 - whole % 2),
    ) {
        let mut lanes = [L::splat(0.0); H];
        for h in 0..H {
            lanes[h] = L::load(&sums[h]).mul(L::splat(decay[h]));
        }
        for j in 0..count {
            let mut row = [E::default(); 16];
            let from = j * value_length + start;
            row[..len].copy_from_slice(&values[from..from + len]);
            let row: L = E::load(&row);
            for h in 0..H {
                lanes[h] = row.mul_add(L::splat(weights[h][j]), lanes[h]);
            }
        }
        for h in 0..H {
            lanes[h].store(&mut sums[h]);
        }
    }
}

#[cfg(test)]
mod tests;
