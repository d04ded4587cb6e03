//! Scratch: everything a step needs beside weights, rings and KV, as named items.
//!
//! The sizes are upper bounds that the forward pass keeps to. On a CUDA device all of it is in the arena. On the host only
//! what reads land in and what crosses the link is (`Plan::arena_bytes`); activations are allocated by each step.

use super::{GatherBuffer, PlanRequest, Tier, planner::DeviceKind, round_up};
use crate::gguf::{Hyperparameters, TensorInfo};

/// One named piece of scratch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScratchItem {
    pub tier: Tier,
    pub name: &'static str,
    pub bytes: u64,
}

/// What scratch depends on beside the model and the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScratchNeeds {
    pub(super) step_width: u32,
    pub(super) gather: GatherBuffer,
    /// Host bytes through which device homes are loaded where no host ring serves.
    pub(super) staging_bytes: u64,
    /// On a machine with a device tier: the widest step in which the host multiplies by some groups.
    pub(super) host_width_max: u32,
    /// Bytes of a stored row of the token embedding.
    pub(super) embedding_row_bytes: u64,
    /// Bytes of norms, biases and rope factors in the file.
    pub(super) small_bytes: u64,
    /// 8-bit forms that the weights are multiplied with.
    pub(super) forms: InputForms,
}

/// 8-bit forms of an input that some matrices are multiplied with: those of their own blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InputForms {
    blocks_of_32: bool,
    blocks_of_256: bool,
}

impl InputForms {
    pub(super) fn of(tensors: &[TensorInfo]) -> InputForms {
        let matrices = || tensors.iter().filter(|tensor| tensor.dimensions.len() > 1);
        let is_there = |elements| matrices().any(|matrix| matrix.kind.block_elements() == elements);
        InputForms {
            blocks_of_32: is_there(32),
            blocks_of_256: is_there(256),
        }
    }

    /// Bytes of a row: by 32, in two orders with scale, sum and their product, 9.5 for four elements; by 256, 52 for the
    /// scale and the sums by 16 and by 32 of each block, in fours of blocks. Rows of quants are padded by a cache line or
    /// two.
    fn row_bytes(self, columns: u64) -> u64 {
        let columns = round_up(columns, PACKED_BLOCK);
        let by_32 = (columns / 8).saturating_mul(19).saturating_add(2 * 128);
        let by_256 = (round_up(columns, 4 * PACKED_BLOCK) / PACKED_BLOCK)
            .saturating_mul(52)
            .saturating_add(columns)
            .saturating_add(128);
        by_32
            .saturating_mul(self.blocks_of_32.into())
            .saturating_add(by_256.saturating_mul(self.blocks_of_256.into()))
    }
}

/// The item whose bytes are in the host arena, page-locked.
pub(super) const CROSSING: &str = "what crosses the link with a step";
/// Buffers on a CUDA device, and things that cross, start on such a boundary.
const BUFFER_ALIGNMENT: u64 = 256;
/// More buffers than a step has on a CUDA device beside norms, and things that cross the link with it apart from rows.
const BUFFERS_OF_A_STEP: u64 = 64;
/// On a CUDA device attention splits the positions of a token where a step has at most so many tokens, over contexts of at
/// least so many positions: more tokens, or fewer positions, keep the device's multiprocessors busy by themselves. (By
/// arithmetic, for some 100 multiprocessors and 8 KV heads; not measured.)
pub const SPLIT_ATTENTION_TOKENS_MAX: u32 = 4;
pub const SPLIT_ATTENTION_POSITIONS_MIN: u32 = 1024;
/// Bytes for each page of a token's context and each of its heads: a score (4) for each position, and decay and sum (8).
const SPLIT_ATTENTION_PAGE_BYTES: u64 = 4 * super::PAGE_TOKENS as u64 + 8;

/// What a kernel is told of a token (position and run, 8 bytes; the address of its embedding row; its number, where its
/// successor is wanted) and of a run (4 bytes; a run has a token at least).
const DESCRIPTION_OF_A_TOKEN_BYTES: u64 = 8 + 8 + 4 + 4;

const F32_BYTES: u64 = 4;
/// Bytes for 64 elements of an input that is packed for the tiles of one weight type, in whole blocks: at most 97 words
/// for 256 (Q6_K). Blocks of 32 take 80, and their segments up to an eighth more.
const PACKED_BYTES_OF_64: u64 = 97;
const PACKED_BLOCK: u64 = 256;
/// The products that share an input may have a weight type each: q, k and v.
const TYPES_OF_AN_INPUT: u64 = 3;
/// What the sampler keeps for each token of the vocabulary: a candidate (token and logit), one at the border of top_p,
/// and a weight (f64).
const SAMPLER_BYTES: u64 = 8 + 8 + 8;
/// What attention is handed for a page, and for a run: a slice with its kind, and a slice with a position and a length.
const PAGE_VIEW_BYTES: u64 = 24;
/// Cosine and sine of a pair of dimensions.
const ANGLE_BYTES: u64 = 8;

/// The scratch formula. With w the width of the widest step, E the embedding length, F the widest feed-forward, q, k, v
/// and o the widest query, key, value and attention outputs of any layer, all in f32 unless said:
///
/// | item | bytes |
/// |---|---|
/// | residual, norm and projection | 3 w E, and again for the tokens whose logits are wanted, at most min(w, parallel) |
/// | attention q, k, v and output, and in the place of q and the output feed-forward gate and up | w (max(q, F) + k + v + max(o, F)) |
/// | inputs as the kernels read them | w max(E, F, o), in the 8-bit forms that the weights' types need, and packed for tiles: E for three weight types, the others for one; what a compute thread unpacks or packs for one tile is of the heap's overhead |
/// | rope angles | 8 bytes for each pair of rotated dimensions, w times; twice where some layers see a window |
/// | logits | min(w, parallel) rows of the vocabulary (a step holds at most w sequences); where there are several, twice: the product and the rows that are handed out |
/// | sampler | 24 bytes for each token of the vocabulary |
/// | block tables | 4 bytes for each page of the KV cache; twice where some layers see a window |
/// | pages as attention reads them | 24 bytes for each page of the KV cache and each of at most w runs, for one layer at a time |
/// | embedding rows read from storage | `GatherBuffer` |
///
/// With a device tier all but the last four and the sampler's are on the device, and the host adds: the logits that
/// are handed out, the
/// embedding rows of a step on their way (w E), the staging entry of loading and, where the host multiplies, inputs and
/// outputs that cross the link, on a CUDA device in f32 once more.
///
/// A CUDA device adds: norms, biases and rope factors in f32; embedding rows as they are stored, w of them; what kernels
/// are told of a step (24 bytes a token and the block tables); and the boundaries of buffers. What of that changes with
/// the step crosses the link through page-locked memory of the host, with angles, logits and, where the host multiplies,
/// inputs and outputs.
pub(super) fn items(
    hyperparameters: &Hyperparameters,
    request: &PlanRequest,
    pages: u64,
    needs: ScratchNeeds,
) -> Vec<ScratchItem> {
    let shape = hyperparameters;
    let widest = |counts: &[u32], length: u32| {
        let count = counts.iter().copied().max().unwrap_or(0);
        u64::from(count) * u64::from(length)
    };
    let width = u64::from(needs.step_width);
    let embedding = u64::from(shape.embedding_length);
    let feed_forward = widest(&shape.feed_forward_length, 1);
    let query = widest(&shape.head_count, shape.key_length);
    let key = widest(&shape.head_count_kv, shape.key_length);
    let value = widest(&shape.head_count_kv, shape.value_length);
    let output = widest(&shape.head_count, shape.value_length);
    let vocabulary = u64::from(shape.vocabulary_size);

    let input = |columns: u64, types: u64| {
        let packed = (round_up(columns, PACKED_BLOCK) / 64).saturating_mul(PACKED_BYTES_OF_64);
        needs
            .forms
            .row_bytes(columns)
            .saturating_add(packed.saturating_mul(types))
    };
    let widest_input = input(embedding, TYPES_OF_AN_INPUT)
        .max(input(feed_forward, 1))
        .max(input(output, 1));
    let inputs = width.saturating_mul(widest_input);
    let floats = |count: u64| width.saturating_mul(count).saturating_mul(F32_BYTES);
    let logit_rows = width.min(u64::from(request.parallel));
    let logits = (logit_rows * F32_BYTES).saturating_mul(vocabulary);
    let layer = query
        .max(feed_forward)
        .saturating_add(key)
        .saturating_add(value)
        .saturating_add(output.max(feed_forward));

    let kinds = u64::from(shape.layer_kinds());
    let tables = pages.saturating_mul(kinds);
    let rotated_pairs = kinds * u64::from(shape.rope_dimensions / 2);
    let angles = (width * ANGLE_BYTES).saturating_mul(rotated_pairs);

    let compute = match request.device {
        DeviceKind::Cpu => Tier::Host,
        DeviceKind::Emulated | DeviceKind::Cuda => Tier::Device,
    };
    let mut items = Vec::new();
    let mut add = |tier, name, bytes: u64| {
        if bytes > 0 {
            let bytes = round_up(bytes, 64);
            items.push(ScratchItem { tier, name, bytes });
        }
    };
    add(
        compute,
        "residual, norm and projection",
        floats(3 * embedding)
            .saturating_add((3 * logit_rows * F32_BYTES).saturating_mul(embedding)),
    );
    add(
        compute,
        "attention q, k, v and output, then feed-forward gate and up",
        floats(layer),
    );
    add(compute, "inputs as the kernels read them", inputs);
    add(compute, "rope angles", angles);
    let handed_out = if compute == Tier::Host && logit_rows > 1 {
        logits
    } else {
        0
    };
    add(compute, "logits", logits.saturating_add(handed_out));
    if compute == Tier::Device {
        add(Tier::Host, "logits", logits);
        add(Tier::Host, "embedding rows of a step", floats(embedding));
        add(
            Tier::Host,
            "staging for loading the device",
            needs.staging_bytes,
        );
    }
    let host_width = width.min(u64::from(needs.host_width_max));
    let host_floats = |count: u64| host_width.saturating_mul(count).saturating_mul(F32_BYTES);
    // Of the products that share an input.
    let widest_output = query
        .saturating_add(key)
        .saturating_add(value)
        .max(feed_forward.saturating_mul(2))
        .max(embedding);
    if request.device == DeviceKind::Cuda {
        let rows = width.saturating_mul(needs.embedding_row_bytes);
        let described =
            (width * DESCRIPTION_OF_A_TOKEN_BYTES).saturating_add(tables.saturating_mul(4));
        let boundaries = BUFFERS_OF_A_STEP * BUFFER_ALIGNMENT;
        // F16 takes twice its bytes as f32; a vector for each norm and bias of a layer.
        let vectors = (u64::from(shape.layers) + 1) * BUFFERS_OF_A_STEP * BUFFER_ALIGNMENT;
        add(
            Tier::Device,
            "norms, biases and rope factors in f32",
            needs.small_bytes.saturating_mul(2).saturating_add(vectors),
        );
        add(Tier::Device, "embedding rows of a step", rows);
        if request.context >= SPLIT_ATTENTION_POSITIONS_MIN {
            let tokens = width.min(u64::from(SPLIT_ATTENTION_TOKENS_MAX));
            let heads = tokens * widest(&shape.head_count, 1);
            let context_pages = u64::from(request.context.div_ceil(super::PAGE_TOKENS));
            let bytes = context_pages.saturating_mul(SPLIT_ATTENTION_PAGE_BYTES) + 4;
            add(
                Tier::Device,
                "scores of long contexts",
                heads.saturating_mul(bytes),
            );
        }
        add(
            Tier::Device,
            "what kernels are told of a step, and boundaries of buffers",
            described.saturating_add(boundaries),
        );
        // An input comes to the host, or rows of outputs go back one by one, each from its own boundary.
        let multiplied = host_floats(embedding.max(feed_forward).max(output))
            .max(host_floats(widest_output).saturating_add(host_width * 3 * BUFFER_ALIGNMENT));
        add(
            Tier::Host,
            CROSSING,
            rows.saturating_add(described)
                .saturating_add(boundaries)
                .saturating_add(angles)
                .saturating_add(logits)
                .saturating_add(multiplied),
        );
    }
    if compute == Tier::Device && host_width > 0 {
        // From a CUDA device an input comes in f32.
        let floats = match request.device {
            DeviceKind::Cuda => host_floats(embedding.max(feed_forward).max(output)),
            DeviceKind::Cpu | DeviceKind::Emulated => 0,
        };
        let inputs = host_width.saturating_mul(widest_input);
        add(
            Tier::Host,
            "inputs as the kernels read them",
            inputs.saturating_add(floats),
        );
        add(
            Tier::Host,
            "outputs that cross the link",
            host_floats(widest_output),
        );
    }
    add(Tier::Host, "sampler", vocabulary * SAMPLER_BYTES);
    add(Tier::Host, "block tables", tables.saturating_mul(4));
    add(
        Tier::Host,
        "pages as attention reads them",
        pages.saturating_add(width).saturating_mul(PAGE_VIEW_BYTES),
    );
    add(
        Tier::Host,
        "embedding rows read from storage",
        round_up(needs.gather.bytes(), super::ARENA_ALIGNMENT),
    );
    items
}

/// What the items of one tier take of its budget, rounded up as splits are.
pub(super) fn total(items: &[ScratchItem], tier: Tier) -> u64 {
    let of_tier = items.iter().filter(|item| item.tier == tier);
    let sum = of_tier.fold(0u64, |sum, item| sum.saturating_add(item.bytes));
    round_up(sum, super::ARENA_ALIGNMENT)
}
