use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::device::Buffer;
use super::*;
use crate::kernels::cuda::{
    Attention, DevicePages, DeviceRuns, LongAttention, PagePrecision, StoreKv,
    long_attention_scratch_bytes,
};
use crate::kernels::{
    AttentionRun, AttentionShape, ComputePool, InstructionSet, PAGE_TOKENS, PageView, PageViewMut,
    attention, store_kv,
};

/// Elements of other layers before and after this one's part of a page.
const BEFORE: usize = 64;
const AFTER: usize = 32;

/// The position of the first token of the step, and how many tokens follow: a sequence's first token, the edges of
/// pages, a whole prompt, a position that would follow it, a chunk of one, more pages than a block has at hand at once,
/// and more than a warp has lanes.
const RUNS: [(usize, usize); 7] = [
    (0, 1),
    (31, 2),
    (0, 33),
    (33, 2),
    (77, 3),
    (300, 2),
    (1100, 1),
];
/// Pages, and more than the runs need.
const PAGES: u32 = 64;

/// All pages on the host.
enum Pages {
    F16(Vec<u16>),
    F32(Vec<f32>),
}

impl Pages {
    /// What lies in slots that are not written must not matter: NaN.
    fn new(precision: PagePrecision, elements: usize) -> Pages {
        match precision {
            PagePrecision::F16 => Pages::F16(vec![0x7fff; elements]),
            PagePrecision::F32 => Pages::F32(vec![f32::NAN; elements]),
        }
    }

    fn view(&self, start: usize, length: usize) -> PageView<'_> {
        match self {
            Pages::F16(pages) => PageView::F16(&pages[start..start + length]),
            Pages::F32(pages) => PageView::F32(&pages[start..start + length]),
        }
    }

    fn view_mut(&mut self, start: usize, length: usize) -> PageViewMut<'_> {
        match self {
            Pages::F16(pages) => PageViewMut::F16(&mut pages[start..start + length]),
            Pages::F32(pages) => PageViewMut::F32(&mut pages[start..start + length]),
        }
    }

    fn upload(&self, device: &Device) -> Buffer {
        match self {
            Pages::F16(pages) => device.upload(pages),
            Pages::F32(pages) => device.upload(pages),
        }
    }

    fn assert_same(&self, there: &Buffer, what: &str) {
        match self {
            Pages::F16(pages) => assert!(there.read::<u16>() == *pages, "{what}: pages"),
            Pages::F32(pages) => assert_same_bits(&there.floats(), pages, what),
        }
    }
}

/// The tokens of a step, of all runs one after another, in device memory and out of it.
struct Tokens {
    /// Where each run's pages start in the table.
    starts: Vec<u32>,
    table: Vec<u32>,
    buffers: [Buffer; 4],
    count: usize,
}

impl Tokens {
    /// Tokens `first..first + count` of each run, on pages in any order.
    fn new(device: &Device, table: &[Vec<u32>], of_runs: &[(usize, usize)]) -> Tokens {
        let (mut positions, mut runs, mut starts, mut all) = (vec![], vec![], vec![], vec![]);
        for (run, ((first, count), pages)) in of_runs.iter().zip(table).enumerate() {
            positions.extend(*first as u32..(first + count) as u32);
            runs.extend(vec![run as u32; *count]);
            starts.push(all.len() as u32);
            all.extend_from_slice(pages);
        }
        Tokens {
            buffers: [
                device.upload(&positions),
                device.upload(&runs),
                device.upload(&starts),
                device.upload(&all),
            ],
            count: positions.len(),
            starts,
            table: all,
        }
    }

    fn runs(&self) -> DeviceRuns {
        let [positions, runs, starts, table] = &self.buffers;
        DeviceRuns {
            positions: positions.address(),
            runs: runs.address(),
            starts: starts.address(),
            table: table.address(),
        }
    }

    fn page(&self, run: usize, page: usize) -> usize {
        self.table[self.starts[run] as usize + page] as usize
    }
}

fn check(shape: AttentionShape, precision: PagePrecision) {
    check_scaled(shape, precision, shape.scale());
}

fn check_scaled(shape: AttentionShape, precision: PagePrecision, scale: f32) {
    let Some(device) = device() else { return };
    let what = format!("{shape:?}, {precision:?}, scale {scale}");
    let mut rng = ChaCha8Rng::seed_from_u64(31);
    let stride = BEFORE + shape.page_elements() + AFTER;
    let mut ids: Vec<u32> = (0..PAGES).collect();
    ids.shuffle(&mut rng);
    let mut pages = Pages::new(precision, ids.len() * stride);
    let pages_there = pages.upload(&device);
    let element_bytes = match precision {
        PagePrecision::F16 => 2,
        PagePrecision::F32 => 4,
    };
    let device_pages = DevicePages {
        start: pages_there.address().after((BEFORE * element_bytes) as u64),
        page_stride: stride,
        precision,
    };
    let table: Vec<Vec<u32>> = RUNS
        .iter()
        .map(|(first, count)| ids.split_off(ids.len() - (first + count).div_ceil(PAGE_TOKENS)))
        .collect();

    // Keys and values of every position that the step reads.
    let stored: Vec<(usize, usize)> = RUNS
        .iter()
        .map(|(first, count)| (0, first + count))
        .collect();
    let tokens = Tokens::new(&device, &table, &stored);
    let keys = inputs(
        &mut rng,
        tokens.count * shape.kv_heads * shape.key_length,
        Style::Plain,
    );
    let values = inputs(
        &mut rng,
        tokens.count * shape.kv_heads * shape.value_length,
        Style::Plain,
    );
    let (keys_there, values_there) = (device.upload(&keys), device.upload(&values));
    let store = StoreKv {
        shape,
        pages: device_pages,
        runs: tokens.runs(),
        tokens: tokens.count,
        keys: keys_there.address(),
        values: values_there.address(),
    };
    device
        .kernels
        .store_kv(&device.stream, &store)
        .expect("a launch");
    let places = stored
        .iter()
        .enumerate()
        .flat_map(|(run, (_, count))| (0..*count).map(move |position| (run, position)));
    let keys = keys.chunks_exact(shape.kv_heads * shape.key_length);
    let values = values.chunks_exact(shape.kv_heads * shape.value_length);
    for ((run, position), (key, value)) in places.zip(keys.zip(values)) {
        let page = tokens.page(run, position / PAGE_TOKENS);
        let view = pages.view_mut(page * stride + BEFORE, shape.page_elements());
        store_kv(&shape, view, position % PAGE_TOKENS, key, value);
    }
    pages.assert_same(&pages_there, &what);

    let tokens = Tokens::new(&device, &table, &RUNS);
    let queries = inputs(
        &mut rng,
        tokens.count * shape.heads * shape.key_length,
        Style::Plain,
    );
    let queries_there = device.upload(&queries);
    let out = device.unwritten(tokens.count * shape.heads * shape.value_length);
    let launch = Attention {
        shape,
        pages: device_pages,
        runs: tokens.runs(),
        tokens: tokens.count,
        queries: queries_there.address(),
        output: out.address(),
        scale,
    };
    device
        .kernels
        .attention(&device.stream, &launch)
        .expect("a launch");
    let positions = RUNS.iter().map(|(first, count)| first + count).max();
    let positions = positions.unwrap_or(0);
    let scratch_bytes = long_attention_scratch_bytes(&shape, tokens.count, positions);
    let scratch = device.unwritten(scratch_bytes as usize / 4);
    let long_out = device.unwritten(tokens.count * shape.heads * shape.value_length);
    let long = LongAttention {
        attention: Attention {
            output: long_out.address(),
            ..launch
        },
        positions,
        scratch: scratch.address(),
    };
    device
        .kernels
        .long_attention(&device.stream, &long)
        .expect("three launches");

    let views: Vec<Vec<PageView<'_>>> = RUNS
        .iter()
        .enumerate()
        .map(|(run, (first, count))| {
            (0..(first + count).div_ceil(PAGE_TOKENS))
                .map(|page| tokens.page(run, page) * stride + BEFORE)
                .map(|start| pages.view(start, shape.page_elements()))
                .collect()
        })
        .collect();
    let runs: Vec<AttentionRun<'_>> = RUNS
        .iter()
        .zip(&views)
        .map(|((first, count), pages)| AttentionRun {
            pages,
            position: *first as u32,
            tokens: *count as u32,
        })
        .collect();
    let mut expected = vec![f32::NAN; tokens.count * shape.heads * shape.value_length];
    let pool = ComputePool::with_instruction_set(1, InstructionSet::Portable);
    attention(&pool, &shape, scale, &queries, &runs, &mut expected);
    assert!(expected.iter().all(|value| value.is_finite()), "{what}");
    assert_same_bits(&out.floats(), &expected, &what);
    assert_same_bits(&long_out.floats(), &expected, &format!("{what}, long"));
}

fn shape(heads: usize, kv_heads: usize, key_length: usize, value_length: usize) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        key_length,
        value_length,
        window: None,
    }
}

fn check_both(shape: AttentionShape) {
    check(shape, PagePrecision::F16);
    check(shape, PagePrecision::F32);
}

#[test]
fn heads_of_their_own_have_the_bits_of_the_host() {
    check_both(shape(4, 4, 16, 16));
    check_both(shape(2, 2, 8, 24));
}

#[test]
fn grouped_heads_have_the_bits_of_the_host() {
    check_both(shape(9, 3, 64, 64));
    check_both(shape(4, 2, 24, 40));
    check_both(shape(7, 1, 32, 16));
}

#[test]
fn long_heads_have_the_bits_of_the_host() {
    check(shape(4, 1, 128, 128), PagePrecision::F16);
    check_both(shape(2, 1, 256, 256));
}

#[test]
fn more_heads_than_a_block_computes_have_the_bits_of_the_host() {
    check_both(shape(12, 1, 16, 16));
}

#[test]
fn steep_weights_have_the_bits_of_the_host() {
    // Few positions count, and the largest score is found again and again.
    check_scaled(shape(4, 1, 64, 32), PagePrecision::F16, 8.0);
    check_scaled(shape(2, 2, 64, 32), PagePrecision::F32, 8.0);
}

#[test]
fn windows_have_the_bits_of_the_host() {
    for window in [1, 31, 32, 33, 100, 1000] {
        check(
            AttentionShape {
                window: Some(window),
                ..shape(4, 2, 16, 16)
            },
            PagePrecision::F16,
        );
    }
    check(
        AttentionShape {
            window: Some(35),
            ..shape(2, 2, 16, 16)
        },
        PagePrecision::F32,
    );
}
