//! Attention over the pages of the KV cache.
//!
//! A page holds `PAGE_TOKENS` positions of one layer, in f16 or f32: for each KV head the keys, one element of all positions after
//! another, [kv_heads][key_length][PAGE_TOKENS]; then for each KV head the values, one position after another,
//! [kv_heads][PAGE_TOKENS][value_length]. With keys laid out like this the scores of all positions of a page are made
//! side by side, with no sum across lanes.
//!
//! A token attends to the positions up to its own, or to the last `window` of them, reading pages in order of position,
//! those of its own step included, at the pages' precision. For each page: scores (two partial sums, over even and odd
//! key elements, then added), the maximum of those that it attends to, e^(score - maximum so far), the sum of these over
//! positions i and i + 16, then as lanes are summed; sums so far are scaled when the maximum grows; then the page's values
//! are added one position after another. A page without a position that the token attends to is passed by. Nothing
//! depends on other tokens, so neither company nor chunking changes a result.
//!
//! The loops serve many *rows* at once, a row being one head of one token: the rows of a *tile*, some consecutive tokens
//! of a run and the heads that share a KV head, read each page together. A block of rows, as many as the registers hold
//! sums for, takes each element that it loads.

use std::sync::{Mutex, PoisonError};

use super::ComputePool;
use super::half_floats::f32_to_f16;
use super::simd::{self, Lanes};
use super::streaming;

/// Rows of a tile, about: so many that making f32 of a page is little beside using it, so few that what belongs to them
/// stays in the nearest caches.
const TILE_ROWS: usize = 48;

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
    /// How many positions a token attends to, its own included; `None` for all.
    pub window: Option<u32>,
}

impl AttentionShape {
    /// What products of queries and keys are scaled by (Vaswani et al., 2017).
    pub fn scale(&self) -> f32 {
        1.0 / (self.key_length as f32).sqrt()
    }

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
    /// Whether loading one as f32 is work.
    const IS_NARROW: bool;

    fn of(value: f32) -> Self;
    fn load<L: Lanes>(from: &[Self; 16]) -> L;
    /// `None` where the page is made of other elements.
    fn view(page: PageView<'_>) -> Option<&[Self]>;
}

impl Element for u16 {
    const IS_NARROW: bool = true;

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
    const IS_NARROW: bool = false;

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

/// Consecutive query tokens of one sequence: where its pages are, in order of position, and the position of the first
/// token.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRun<'a> {
    /// Of this layer, up to the page of the last token.
    pub pages: &'a [PageView<'a>],
    pub position: u32,
    pub tokens: u32,
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

/// out = softmax(scale * queries * keys) * values, for the tokens of all runs, one run after another. `queries` is
/// [width, heads, key_length], `out` [width, heads, value_length].
///
/// # Panics
/// When shapes do not agree or a run has too few pages.
pub fn attention(
    pool: &ComputePool,
    shape: &AttentionShape,
    scale: f32,
    queries: &[f32],
    runs: &[AttentionRun<'_>],
    out: &mut [f32],
) {
    let width: usize = runs.iter().map(|run| run.tokens as usize).sum();
    assert!(shape.heads.is_multiple_of(shape.kv_heads), "{shape:?}");
    assert!(shape.window != Some(0), "a token attends to itself");
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
    let group = shape.heads / shape.kv_heads;
    let tile_tokens = (TILE_ROWS / group).max(1);
    let mut tiles = Vec::new();
    let mut first_token = 0;
    for run in runs {
        let end = run.position as usize + run.tokens as usize;
        assert!(
            run.pages.len() >= end.div_ceil(PAGE_TOKENS),
            "{end} positions in {} pages",
            run.pages.len()
        );
        for page in run.pages {
            assert_eq!(page.len(), shape.page_elements(), "elements of a page");
        }
        for start in (0..run.tokens as usize).step_by(tile_tokens) {
            let tokens = tile_tokens.min(run.tokens as usize - start);
            tiles.push(Tile {
                pages: run.pages,
                position: run.position as usize + start,
                first_token: first_token + start,
                tokens,
            });
        }
        first_token += run.tokens as usize;
    }
    if shape.value_length == 0 {
        return;
    }
    let set = pool.instruction_set();
    let is_f32 = |page: &PageView<'_>| matches!(page, PageView::F32(_));
    let mut pages = runs.iter().flat_map(|run| run.pages);
    let in_f32 = pages.next().is_some_and(is_f32);
    assert!(
        pages.all(|page| is_f32(page) == in_f32),
        "the pages of a step are of one precision"
    );
    // The lock of a token's outputs is taken once for each KV head, by the thread that has its tile.
    let outputs: Vec<_> = out
        .chunks_mut(group * shape.value_length)
        .map(Mutex::new)
        .collect();
    // The last tiles of a run read most: they are begun first, so that no thread is left with one at the end.
    pool.run(tiles.len() * shape.kv_heads, &|index| {
        let tile = &tiles[tiles.len() - 1 - index / shape.kv_heads];
        let kv_head = index % shape.kv_heads;
        let task = Task {
            shape,
            scale,
            tile,
            kv_head,
            queries,
        };
        let mut rows = Rows::new(shape, tile);
        match in_f32 {
            true => attend_f32(set, &task, &mut rows),
            false => attend_f16(set, &task, &mut rows),
        }
        let mut done = rows.sums.chunks_exact(rows.stride);
        for token in tile.first_token..tile.first_token + tile.tokens {
            let output = &outputs[token * shape.kv_heads + kv_head];
            let mut out = output.lock().unwrap_or_else(PoisonError::into_inner);
            let heads = out.chunks_exact_mut(shape.value_length);
            for (out, sums) in heads.zip(&mut done) {
                out.copy_from_slice(&sums[..shape.value_length]);
            }
        }
    });
}

/// Consecutive tokens of a run.
struct Tile<'a> {
    pages: &'a [PageView<'a>],
    /// Of the first token.
    position: usize,
    /// The first token's place in the step.
    first_token: usize,
    tokens: usize,
}

/// What belongs to the rows of a tile, for one KV head: head by head for each token.
struct Rows {
    count: usize,
    /// Scaled queries, [key_length][n] for each block of n rows.
    queries: Vec<f32>,
    /// Sums of values by their weights, `stride` for each row: whole vectors, of which the padding stays zero.
    sums: Vec<f32>,
    stride: usize,
    /// For each row: the largest score so far.
    largest: Vec<f32>,
    /// For each row: the sum of weights so far.
    total: Vec<f32>,
    /// Scores, then weights, of the page at hand.
    weights: Vec<[f32; PAGE_TOKENS]>,
    /// For each row: what sums so far are scaled with.
    decay: Vec<f32>,
    /// For each row: the slots of the page at hand that it attends to.
    slots: Vec<(usize, usize)>,
}

/// Rows that are computed together where `left` are left: no block is much smaller than the others.
#[inline(always)]
fn block_rows<L: Lanes>(left: usize) -> usize {
    match left {
        // No registers to fill: one loop does.
        _ if L::REGISTERS < 8 => 1,
        1..=4 => left,
        5 => 3,
        8 if L::REGISTERS >= 32 => 8,
        7 | 8 => 4,
        12.. if L::REGISTERS >= 32 => 12,
        _ => 6,
    }
}

impl Rows {
    fn new(shape: &AttentionShape, tile: &Tile<'_>) -> Rows {
        let count = tile.tokens * (shape.heads / shape.kv_heads);
        let stride = shape.value_length.next_multiple_of(16);
        Rows {
            count,
            queries: vec![0.0; count * shape.key_length],
            sums: vec![0.0; count * stride],
            stride,
            largest: vec![f32::NEG_INFINITY; count],
            total: vec![0.0; count],
            weights: vec![[0.0; PAGE_TOKENS]; count],
            decay: vec![1.0; count],
            slots: vec![(0, 0); count],
        }
    }
}

/// What the rows of a tile read: one KV head of the pages of their run.
struct Task<'a> {
    shape: &'a AttentionShape,
    scale: f32,
    tile: &'a Tile<'a>,
    kv_head: usize,
    /// Of the whole step.
    queries: &'a [f32],
}

simd::vectorised! {
    fn attend_f16(task: &Task<'_>, rows: &mut Rows) => attend_f16_on
}

simd::vectorised! {
    fn attend_f32(task: &Task<'_>, rows: &mut Rows) => attend_f32_on
}

#[inline(always)]
fn attend_f16_on<L: Lanes>(task: &Task<'_>, rows: &mut Rows) {
    attend_on::<L, u16>(task, rows);
}

#[inline(always)]
fn attend_f32_on<L: Lanes>(task: &Task<'_>, rows: &mut Rows) {
    attend_on::<L, f32>(task, rows);
}

#[inline(always)]
fn attend_on<L: Lanes, E: Element>(task: &Task<'_>, rows: &mut Rows) {
    let Task { shape, tile, .. } = *task;
    gather_queries::<L>(task, rows);
    let group = shape.heads / shape.kv_heads;
    let last = tile.position + tile.tokens - 1;
    let window = shape.window.map_or(usize::MAX, |window| window as usize);
    let first = (tile.position + 1).saturating_sub(window);
    // Loops read whole vectors of values, and several blocks of rows share the work of making f32 of a page.
    let is_whole = shape.value_length == rows.stride;
    let is_one_block = block_rows::<L>(rows.count) == rows.count;
    let is_direct = is_whole && (is_one_block || !const { E::IS_NARROW });
    let (mut keys, mut values) = match is_direct {
        true => (Vec::new(), Vec::new()),
        false => (
            vec![[0.0; PAGE_TOKENS]; shape.key_length],
            vec![0.0; PAGE_TOKENS * rows.stride],
        ),
    };
    for page in first / PAGE_TOKENS..=last / PAGE_TOKENS {
        let page_start = page * PAGE_TOKENS;
        let Some(elements) = E::view(tile.pages[page]) else {
            unreachable!("the pages of a step are of one precision");
        };
        for (row, slots) in rows.slots.iter_mut().enumerate() {
            let end = tile.position + row / group + 1;
            let slot = |position: usize| position.saturating_sub(page_start).min(PAGE_TOKENS);
            *slots = (slot(end.saturating_sub(window)), slot(end));
        }
        let page_keys = shape.keys(elements, task.kv_head).as_chunks().0;
        let page_values = shape.values(elements, task.kv_head);
        if is_direct {
            // A single block is soon done with a page: memory has to be at work on the next one meanwhile.
            let next = match tile.pages.get(page + 1) {
                Some(next) if is_one_block => E::view(*next),
                _ => None,
            };
            let next = next.map(|next| NextPage {
                keys: shape.keys(next, task.kv_head).as_chunks().0,
                values: shape.values(next, task.kv_head),
            });
            add_page::<L, E>(rows, page_keys, page_values, next);
            continue;
        }
        for (to, from) in keys.iter_mut().zip(page_keys) {
            convert::<L, E>(to, from);
        }
        let from = page_values.chunks_exact(shape.value_length);
        for (to, from) in values.chunks_exact_mut(rows.stride).zip(from) {
            convert::<L, E>(&mut to[..shape.value_length], from);
        }
        add_page::<L, f32>(rows, &keys, &values, None);
    }
    for (sums, total) in rows.sums.chunks_exact_mut(rows.stride).zip(&rows.total) {
        for sums in sums.as_chunks_mut::<16>().0 {
            L::load(sums).div(L::splat(*total)).store(sums);
        }
    }
}

/// The tile's queries, scaled, block by block.
#[inline(always)]
fn gather_queries<L: Lanes>(task: &Task<'_>, rows: &mut Rows) {
    let Task { shape, tile, .. } = *task;
    let group = shape.heads / shape.kv_heads;
    let mut first = 0;
    while first < rows.count {
        let count = block_rows::<L>(rows.count - first);
        let block = &mut rows.queries[first * shape.key_length..][..count * shape.key_length];
        for r in 0..count {
            let token = tile.first_token + (first + r) / group;
            let head = task.kv_head * group + (first + r) % group;
            let query = &task.queries[(token * shape.heads + head) * shape.key_length..];
            for (to, element) in block[r..].iter_mut().step_by(count).zip(query) {
                *to = element * task.scale;
            }
        }
        first += count;
    }
}

/// The same elements as f32.
#[inline(always)]
fn convert<L: Lanes, E: Element>(to: &mut [f32], from: &[E]) {
    let (to, to_rest) = to.as_chunks_mut::<16>();
    let (from, from_rest) = from.as_chunks::<16>();
    for (to, from) in to.iter_mut().zip(from) {
        E::load::<L>(from).store(to);
    }
    if !to_rest.is_empty() {
        let mut padded = [E::default(); 16];
        padded[..from_rest.len()].copy_from_slice(from_rest);
        let mut lanes = [0.0; 16];
        E::load::<L>(&padded).store(&mut lanes);
        to_rest.copy_from_slice(&lanes[..to_rest.len()]);
    }
}

/// The next page of a KV head: asked for line by line while the page at hand is computed.
#[derive(Clone, Copy)]
struct NextPage<'a, E> {
    keys: &'a [[E; PAGE_TOKENS]],
    values: &'a [E],
}

/// What each row takes from one page.
#[inline(always)]
fn add_page<L: Lanes, E: Element>(
    rows: &mut Rows,
    keys: &[[E; PAGE_TOKENS]],
    values: &[E],
    next: Option<NextPage<'_, E>>,
) {
    let next_keys = next.map(|next| next.keys);
    let next_values = next.map(|next| next.values);
    let mut first = 0;
    while first < rows.count {
        let count = block_rows::<L>(rows.count - first);
        let queries = &rows.queries[first * keys.len()..(first + count) * keys.len()];
        let out = &mut rows.weights[first..first + count];
        if const { L::REGISTERS >= 32 } {
            match count {
                12 => scores::<L, E, 12>(queries, keys, out, next_keys),
                8 => scores::<L, E, 8>(queries, keys, out, next_keys),
                _ => {}
            }
        }
        if const { L::REGISTERS >= 8 } {
            match count {
                6 => scores::<L, E, 6>(queries, keys, out, next_keys),
                4 => scores::<L, E, 4>(queries, keys, out, next_keys),
                3 => scores::<L, E, 3>(queries, keys, out, next_keys),
                2 => scores::<L, E, 2>(queries, keys, out, next_keys),
                _ => {}
            }
        }
        if count == 1 {
            scores::<L, E, 1>(queries, keys, out, next_keys);
        }
        first += count;
    }
    for row in 0..rows.count {
        weigh::<L>(rows, row);
    }
    let mut first = 0;
    while first < rows.count {
        let mut count = block_rows::<L>(rows.count - first);
        // At the edges of what tokens see their rows attend to different slots: each then goes alone.
        let slots = &rows.slots[first..first + count];
        if slots.iter().any(|other| *other != slots[0]) {
            count = 1;
        }
        if const { L::REGISTERS >= 32 } {
            match count {
                12 => add_values::<L, E, 12>(rows, first, values, next_values),
                8 => add_values::<L, E, 8>(rows, first, values, next_values),
                _ => {}
            }
        }
        if const { L::REGISTERS >= 8 } {
            match count {
                6 => add_values::<L, E, 6>(rows, first, values, next_values),
                4 => add_values::<L, E, 4>(rows, first, values, next_values),
                3 => add_values::<L, E, 3>(rows, first, values, next_values),
                2 => add_values::<L, E, 2>(rows, first, values, next_values),
                _ => {}
            }
        }
        if count == 1 {
            add_values::<L, E, 1>(rows, first, values, next_values);
        }
        first += count;
    }
}

/// The scores of a page's positions for R rows.
#[inline(always)]
fn scores<L: Lanes, E: Element, const R: usize>(
    queries: &[f32],
    keys: &[[E; PAGE_TOKENS]],
    out: &mut [[f32; PAGE_TOKENS]],
    next: Option<&[[E; PAGE_TOKENS]]>,
) {
    let queries = queries.as_chunks::<R>().0;
    // As many sums at once as the registers hold beside what is loaded.
    if const { 4 * R <= L::REGISTERS * 3 / 4 } {
        let [even, odd] = partial_scores::<L, E, R, 2, 2>(queries, keys, next, 0, 0);
        store_scores(&even[0], &odd[0], out, 0);
        store_scores(&even[1], &odd[1], out, 1);
    } else if const { 2 * R <= L::REGISTERS * 3 / 4 } {
        for half in 0..2 {
            // Asked for once.
            let next = if half == 0 { next } else { None };
            let [even, odd] = partial_scores::<L, E, R, 1, 2>(queries, keys, next, half, 0);
            store_scores(&even[0], &odd[0], out, half);
        }
    } else {
        for half in 0..2 {
            let next = if half == 0 { next } else { None };
            let [even] = partial_scores::<L, E, R, 1, 1>(queries, keys, next, half, 0);
            let [odd] = partial_scores::<L, E, R, 1, 1>(queries, keys, None, half, 1);
            store_scores(&even[0], &odd[0], out, half);
        }
    }
}

/// The sums over even (parity 0) or odd key elements, P parities and H halves of the page's positions at once.
#[inline(always)]
fn partial_scores<L: Lanes, E: Element, const R: usize, const H: usize, const P: usize>(
    queries: &[[f32; R]],
    keys: &[[E; PAGE_TOKENS]],
    next: Option<&[[E; PAGE_TOKENS]]>,
    first_half: usize,
    first_parity: usize,
) -> [[[L; R]; H]; P] {
    let mut sums = [[[L::splat(0.0); R]; H]; P];
    let (keys, last_key) = keys.as_chunks::<2>();
    let (queries, last_query) = queries.as_chunks::<2>();
    for (index, (keys, queries)) in keys.iter().zip(queries).enumerate() {
        if let Some(next) = next.and_then(|next| next.get(2 * index..2 * index + 2)) {
            streaming::whole(next);
        }
        for p in 0..P {
            let halves = keys[first_parity + p].as_chunks::<16>().0;
            for h in 0..H {
                let key: L = E::load(&halves[first_half + h]);
                for r in 0..R {
                    let query = L::splat(queries[first_parity + p][r]);
                    sums[p][h][r] = key.mul_add(query, sums[p][h][r]);
                }
            }
        }
    }
    if let ([key], [query], 0) = (last_key, last_query, first_parity) {
        let halves = key.as_chunks::<16>().0;
        for h in 0..H {
            let key: L = E::load(&halves[first_half + h]);
            for r in 0..R {
                sums[0][h][r] = key.mul_add(L::splat(query[r]), sums[0][h][r]);
            }
        }
    }
    sums
}

#[inline(always)]
fn store_scores<L: Lanes, const R: usize>(
    even: &[L; R],
    odd: &[L; R],
    out: &mut [[f32; PAGE_TOKENS]],
    half: usize,
) {
    for r in 0..R {
        even[r]
            .add(odd[r])
            .store(&mut out[r].as_chunks_mut::<16>().0[half]);
    }
}

/// From the scores of a row to the weights of the values, and what becomes of its sums so far.
#[inline(always)]
fn weigh<L: Lanes>(rows: &mut Rows, row: usize) {
    let (start, end) = rows.slots[row];
    rows.decay[row] = 1.0;
    if start >= end {
        return;
    }
    let weights = &mut rows.weights[row];
    weights[..start].fill(f32::NEG_INFINITY);
    weights[end..].fill(f32::NEG_INFINITY);
    let [low, high] = weights.as_chunks_mut::<16>().0 else {
        unreachable!("a page has two halves");
    };
    let (low_scores, high_scores) = (L::load(low), L::load(high));
    let page_largest = low_scores.max(high_scores).largest();
    if page_largest > rows.largest[row] {
        rows.decay[row] = exp_of::<L>(rows.largest[row] - page_largest);
        rows.largest[row] = page_largest;
    }
    let largest = L::splat(rows.largest[row]);
    let low_weights = simd::exp(low_scores.sub(largest));
    let high_weights = simd::exp(high_scores.sub(largest));
    rows.total[row] = rows.total[row] * rows.decay[row] + low_weights.add(high_weights).sum();
    low_weights.store(low);
    high_weights.store(high);
}

#[inline(always)]
fn exp_of<L: Lanes>(x: f32) -> f32 {
    let mut lanes = [0.0; 16];
    simd::exp(L::splat(x)).store(&mut lanes);
    lanes[0]
}

/// sums = sums * decay + the page's values by their weights, one position after another, for R rows that attend to the
/// same slots.
#[inline(always)]
fn add_values<L: Lanes, E: Element, const R: usize>(
    rows: &mut Rows,
    first: usize,
    values: &[E],
    next: Option<&[E]>,
) {
    let stride = rows.stride;
    let slots = rows.slots[first];
    if slots.0 >= slots.1 {
        return;
    }
    let sums = &mut rows.sums[first * stride..(first + R) * stride];
    let weights = &rows.weights[first..first + R];
    let decay = &rows.decay[first..first + R];
    let vectors = stride / 16;
    let mut vector = 0;
    if const { 4 * R <= L::REGISTERS * 3 / 4 } {
        while vector + 4 <= vectors {
            add_vectors::<L, E, R, 4>(sums, values, next, weights, decay, slots, vector);
            vector += 4;
        }
    } else if const { 2 * R <= L::REGISTERS * 3 / 4 } {
        while vector + 2 <= vectors {
            add_vectors::<L, E, R, 2>(sums, values, next, weights, decay, slots, vector);
            vector += 2;
        }
    }
    while vector < vectors {
        add_vectors::<L, E, R, 1>(sums, values, next, weights, decay, slots, vector);
        vector += 1;
    }
}

/// V vectors of the values, from `first` on.
#[inline(always)]
fn add_vectors<L: Lanes, E: Element, const R: usize, const V: usize>(
    sums: &mut [f32],
    values: &[E],
    next: Option<&[E]>,
    weights: &[[f32; PAGE_TOKENS]],
    decay: &[f32],
    (start, end): (usize, usize),
    first: usize,
) {
    let sums = sums.as_chunks_mut::<16>().0;
    let vectors = sums.len() / R;
    let values = values.as_chunks::<16>().0;
    let next = next.map(|next| next.as_chunks::<16>().0);
    let (Some(weights), Some(decay)) = (weights.first_chunk::<R>(), decay.first_chunk::<R>())
    else {
        unreachable!("weights of {R} rows");
    };
    // No closures around lanes: they would not be compiled for the instruction set.
    let mut lanes = [[L::splat(0.0); R]; V];
    for v in 0..V {
        for r in 0..R {
            lanes[v][r] = L::load(&sums[r * vectors + first + v]).mul(L::splat(decay[r]));
        }
    }
    #[expect(
        clippy::needless_range_loop,
        reason = "an index keeps several arrays in step"
    )]
    for slot in start..end.min(PAGE_TOKENS) {
        let at = slot * vectors + first;
        let values = &values[at..][..V];
        if let Some(next) = next.and_then(|next| next.get(at..at + V)) {
            streaming::whole(next);
        }
        for v in 0..V {
            let value: L = E::load(&values[v]);
            for r in 0..R {
                lanes[v][r] = value.mul_add(L::splat(weights[r][slot]), lanes[v][r]);
            }
        }
    }
    for v in 0..V {
        for r in 0..R {
            lanes[v][r].store(&mut sums[r * vectors + first + v]);
        }
    }
}

#[cfg(test)]
mod tests;
