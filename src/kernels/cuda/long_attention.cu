// Attention of few tokens over long contexts, in three launches that split a token's positions over many blocks of
// threads; attention.rs has the definition, which these keep to bit by bit.
//
// A sum of values is a chain: it takes one position after another, and rounds after each. So it cannot be cut by
// positions. But scores are independent of each other, and so are a page's largest score, its weights and their sum
// once the largest of the pages before is known; what is left to do in order is little. And chains of different value
// elements are independent.
//   scores    a warp for each page.
//   weights   a block for each head: largest scores, then weights, by all warps; the maximum so far, and the total, in
//             order of pages by one.
//   values    a block for each sixteen value elements: eight warps bring values, one adds them.
// The arithmetic for 8,192 positions, 8 KV heads of 128 elements in f16 and four query heads each: keys and values are
// 33.6 MB, 34 us at 1 TB/s. Keys are read by 256 blocks at the memory's rate. The chains of 8,192 multiply-adds of four
// cycles take 20 us, in 64 blocks with 16 kB on the way each. One block for each KV head, as attention.cu has it, would
// have 8 * 4 kB on the way: at 0.7 us from memory, some 0.7 ms.
#include "attention.cuh"

// What one launch leaves for the next, for each head of each token. Pages count from the first that a token attends to;
// there is room for `pages_max`.
struct Scratch {
    float* start;
    uint32_t tokens;
    uint32_t pages_max;
};

namespace {

// A page's place in the chains.
struct PageSums {
    // What sums so far are scaled with.
    float decay;
    // The largest score of the page, then of all up to it, then the sum of the page's weights.
    float value;
};

// Of one head of one token.
struct HeadScratch {
    // Scores, then weights: [pages_max][PAGE_TOKENS].
    float* weights;
    // [pages_max].
    PageSums* pages;
    float* total;

    __device__ __forceinline__ HeadScratch(const Scratch& scratch, const Shape& shape, size_t head) {
        const size_t heads = static_cast<size_t>(scratch.tokens) * shape.heads;
        const size_t pages_max = scratch.pages_max;
        float* all_pages = scratch.start + heads * pages_max * PAGE_TOKENS;
        weights = scratch.start + head * pages_max * PAGE_TOKENS;
        pages = reinterpret_cast<PageSums*>(all_pages) + head * pages_max;
        total = all_pages + heads * pages_max * 2 + head;
    }
};

// Where y covers the KV heads and the query heads that share them, HEADS at a time, and z is the token.
template <int HEADS>
__device__ __forceinline__ HeadGroup heads_of_block(const Shape& shape) {
    const uint32_t group = shape.heads / shape.kv_heads;
    const uint32_t parts = (group + HEADS - 1) / HEADS;
    return {blockIdx.z, blockIdx.y / parts, group, blockIdx.y % parts * HEADS};
}

constexpr int SCORES_THREADS = 256;

// Grid: x covers the pages, a warp each.
template <class Format, int HEADS>
__device__ __forceinline__ void make_scores(
    const float* queries, const Scratch& scratch, const Pages& pages, const Step& step, const Shape& shape
) {
    __shared__ Queries<HEADS> scaled_queries;
    const HeadGroup heads = heads_of_block<HEADS>(shape);
    const Context context(step, shape, heads.token, heads.kv_head);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t index = blockIdx.x * (SCORES_THREADS / 32) + threadIdx.x / 32;
    const uint32_t page = context.first_page + index;
    load_queries<HEADS>(scaled_queries, queries, heads, shape, SCORES_THREADS);
    __syncthreads();
    if (page >= context.end_page) {
        return;
    }
    const auto* keys = page_start<Format>(pages, context.table, page) + context.keys_offset;
    float2 scores[HEADS];
    page_scores<Format, HEADS>(scores, scaled_queries, keys, shape.key_length, context.slots(page));
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (lane < 16 && heads.has(h)) {
            const HeadScratch of_head(scratch, shape, heads.index(h, shape));
            reinterpret_cast<float2*>(of_head.weights + index * PAGE_TOKENS)[lane] = scores[h];
        }
    }
}

constexpr int WEIGHTS_THREADS = 512;

// Grid: x is the head, y the token.
__device__ __forceinline__ void make_weights(const Scratch& scratch, const Step& step, const Shape& shape) {
    const float minus_infinity = __int_as_float(0xff800000);
    const uint32_t head = blockIdx.x, token = blockIdx.y;
    const Context context(step, shape, token, 0);
    const HeadScratch of_head(scratch, shape, static_cast<size_t>(token) * shape.heads + head);
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t count = context.end_page - context.first_page;
    const auto score = [&](uint32_t index) {
        const Slots slots = context.slots(context.first_page + index);
        const float score = of_head.weights[index * PAGE_TOKENS + lane];
        return slots.has(lane) ? score : minus_infinity;
    };

    for (uint32_t index = warp; index < count; index += WEIGHTS_THREADS / 32) {
        const float largest = largest_of_page(score(index));
        if (lane == 0) {
            of_head.pages[index].value = largest;
        }
    }
    __syncthreads();

    // The largest so far, as if pages came one after another: the first of equals stays, and a NaN is passed by.
    if (warp == 0) {
        float before = minus_infinity;
        for (uint32_t first = 0; first < count; first += 32) {
            const bool is_inside = first + lane < count;
            const float own = is_inside ? of_head.pages[first + lane].value : minus_infinity;
            float largest = exact::larger(own, minus_infinity);
            for (int distance = 1; distance < 32; distance *= 2) {
                const float earlier = __shfl_up_sync(ALL_LANES, largest, distance);
                if (lane >= distance) {
                    largest = exact::larger(largest, earlier);
                }
            }
            largest = exact::larger(largest, before);
            const float neighbour = __shfl_up_sync(ALL_LANES, largest, 1);
            const float previous = lane == 0 ? before : neighbour;
            if (is_inside) {
                const float decay = own > previous ? exact::exp(exact::sub(previous, own)) : 1.0f;
                of_head.pages[first + lane] = {decay, largest};
            }
            before = __shfl_sync(ALL_LANES, largest, 31);
        }
    }
    __syncthreads();

    for (uint32_t index = warp; index < count; index += WEIGHTS_THREADS / 32) {
        const float largest = of_head.pages[index].value;
        const float weight = exact::exp(exact::sub(score(index), largest));
        const float sum = sum_of_page(weight);
        of_head.weights[index * PAGE_TOKENS + lane] = weight;
        if (lane == 0) {
            of_head.pages[index].value = sum;
        }
    }
    __syncthreads();

    if (warp == 0) {
        float total = 0.0f;
        for (uint32_t first = 0; first < count; first += 32) {
            PageSums page = {1.0f, 0.0f};
            if (first + lane < count) {
                page = of_head.pages[first + lane];
            }
            const uint32_t end = min(32, count - first);
            for (uint32_t i = 0; i < end; i++) {
                const float decay = __shfl_sync(ALL_LANES, page.decay, i);
                total = exact::add(exact::mul(total, decay), __shfl_sync(ALL_LANES, page.value, i));
            }
        }
        if (lane == 0) {
            *of_head.total = total;
        }
    }
}

// Value elements of a block, in pairs.
constexpr uint32_t SLICE_PAIRS = 8;
// Pages that are in shared memory at once; and as many are on their way there.
constexpr uint32_t STAGE_PAGES = 8;
constexpr uint32_t STAGE_POSITIONS = STAGE_PAGES * PAGE_TOKENS;
// Those who bring a stage, a position and pair of a page each; one warp more adds it up.
constexpr uint32_t LOADERS = PAGE_TOKENS * SLICE_PAIRS;
constexpr int VALUES_THREADS = LOADERS + 32;

template <int HEADS>
struct Stage {
    float2 values[STAGE_POSITIONS][SLICE_PAIRS];
    // Four more than there are: those of different heads lie in different banks.
    alignas(16) float weights[HEADS][STAGE_POSITIONS + 4];
    float decay[HEADS][STAGE_PAGES];
};

// What a block adds up.
template <int HEADS>
struct Slice {
    HeadGroup heads;
    Context context;
    // The first.
    uint32_t pair;
    // Pages from the token's first on.
    uint32_t count;
};

// Brings pages from `first` on, counted from the token's first. Thread `loader` of LOADERS.
template <class Format, int HEADS>
__device__ __forceinline__ void load_stage(
    Stage<HEADS>& stage, const Slice<HEADS>& slice, uint32_t first, uint32_t loader, const Scratch& scratch,
    const Pages& pages, const Shape& shape
) {
    static_assert(HEADS * STAGE_POSITIONS <= 4 * LOADERS, "a loader brings four weights");
    const Context& context = slice.context;
    const uint32_t pair = loader % SLICE_PAIRS;
    const uint32_t slot = loader / SLICE_PAIRS;
    const uint32_t element = min(2 * (slice.pair + pair), shape.value_length - 2);
    // All at once, without a condition: where there is nothing to bring, a neighbour is brought again. What lies in
    // slots that nothing was written to is not read.
    float2 values[STAGE_PAGES];
#pragma unroll
    for (uint32_t i = 0; i < STAGE_PAGES; i++) {
        const uint32_t page = context.first_page + min(first + i, slice.count - 1);
        const Slots slots = context.slots(page);
        const uint32_t from = min(max(slot, slots.start), slots.end - 1) * shape.value_length + element;
        values[i] = Format::load_two(page_start<Format>(pages, context.table, page) + context.values_offset + from);
    }
#pragma unroll
    for (uint32_t i = 0; i < STAGE_PAGES; i++) {
        stage.values[i * PAGE_TOKENS + slot][pair] = values[i];
    }
    const uint32_t four = loader % (STAGE_POSITIONS / 4);
    const uint32_t head_of_weights = loader / (STAGE_POSITIONS / 4);
    if (head_of_weights < HEADS && first + 4 * four / PAGE_TOKENS < slice.count) {
        const HeadScratch of_head(scratch, shape, slice.heads.index(head_of_weights, shape));
        const float* weights = of_head.weights + first * PAGE_TOKENS;
        *reinterpret_cast<float4*>(&stage.weights[head_of_weights][4 * four]) =
            __ldg(reinterpret_cast<const float4*>(weights) + four);
    }
    const uint32_t head = loader / STAGE_PAGES;
    const uint32_t page = loader % STAGE_PAGES;
    if (head < HEADS && first + page < slice.count) {
        const HeadScratch of_head(scratch, shape, slice.heads.index(head, shape));
        stage.decay[head][page] = __ldg(&of_head.pages[first + page].decay);
    }
}

// Adds the stage's pages to a pair of one head's sums.
template <int HEADS>
__device__ __forceinline__ void add_stage(
    float2& sums, const Stage<HEADS>& stage, const Slice<HEADS>& slice, uint32_t first, uint32_t head, uint32_t pair
) {
    const uint32_t count = min(STAGE_PAGES, slice.count - first);
    for (uint32_t i = 0; i < count; i++) {
        const Slots slots = slice.context.slots(slice.context.first_page + first + i);
        const float decay = stage.decay[head][i];
        const float* weights = &stage.weights[head][i * PAGE_TOKENS];
        const float2(*values)[SLICE_PAIRS] = &stage.values[i * PAGE_TOKENS];
        sums.x = exact::mul(sums.x, decay);
        sums.y = exact::mul(sums.y, decay);
        const auto add = [&](uint32_t slot, float weight) {
            const float2 value = values[slot][pair];
            sums.x = exact::fma(value.x, weight, sums.x);
            sums.y = exact::fma(value.y, weight, sums.y);
        };
        if (slots.start == 0 && slots.end == PAGE_TOKENS) {
#pragma unroll
            for (uint32_t slot = 0; slot < PAGE_TOKENS; slot += 4) {
                const float4 four = *reinterpret_cast<const float4*>(weights + slot);
                add(slot, four.x);
                add(slot + 1, four.y);
                add(slot + 2, four.z);
                add(slot + 3, four.w);
            }
        } else {
            for (uint32_t slot = slots.start; slot < slots.end; slot++) {
                add(slot, weights[slot]);
            }
        }
    }
}

// Grid: x covers the pairs of a value head.
template <class Format, int HEADS>
__device__ __forceinline__ void add_values(
    const Scratch& scratch, float* out, const Pages& pages, const Step& step, const Shape& shape
) {
    static_assert(HEADS * SLICE_PAIRS <= 32, "one warp adds up");
    __shared__ Stage<HEADS> stages[2];
    const HeadGroup heads = heads_of_block<HEADS>(shape);
    const Context context(step, shape, heads.token, heads.kv_head);
    const Slice<HEADS> slice = {heads, context, blockIdx.x * SLICE_PAIRS, context.end_page - context.first_page};
    const bool is_loader = threadIdx.x < LOADERS;
    const uint32_t head = threadIdx.x % 32 / SLICE_PAIRS;
    const uint32_t pair = threadIdx.x % SLICE_PAIRS;
    float2 sums = make_float2(0.0f, 0.0f);
    if (is_loader) {
        load_stage<Format, HEADS>(stages[0], slice, 0, threadIdx.x, scratch, pages, shape);
    }
    __syncthreads();
    for (uint32_t first = 0, at = 0; first < slice.count; first += STAGE_PAGES, at = 1 - at) {
        if (is_loader) {
            const uint32_t next = first + STAGE_PAGES;
            if (next < slice.count) {
                load_stage<Format, HEADS>(stages[1 - at], slice, next, threadIdx.x, scratch, pages, shape);
            }
        } else if (head < HEADS) {
            add_stage(sums, stages[at], slice, first, head, pair);
        }
        __syncthreads();
    }
    const uint32_t element = 2 * (slice.pair + pair);
    if (!is_loader && head < HEADS && heads.has(head) && element < shape.value_length) {
        const size_t index = heads.index(head, shape);
        const float total = *HeadScratch(scratch, shape, index).total;
        float* to = out + index * shape.value_length + element;
        to[0] = exact::div(sums.x, total);
        to[1] = exact::div(sums.y, total);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WEIGHTS_THREADS)
long_attention_weights(Scratch scratch, Step step, Shape shape) {
    make_weights(scratch, step, shape);
}

#define LONG_ATTENTION_KERNELS(name, format, heads)                                                                  \
    extern "C" __global__ void __launch_bounds__(SCORES_THREADS)                                                     \
    long_attention_scores_##name##_##heads(                                                                          \
        const float* queries, Scratch scratch, Pages pages, Step step, Shape shape                                   \
    ) {                                                                                                              \
        make_scores<format, heads>(queries, scratch, pages, step, shape);                                            \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(VALUES_THREADS)                                                     \
    long_attention_values_##name##_##heads(Scratch scratch, float* out, Pages pages, Step step, Shape shape) {       \
        add_values<format, heads>(scratch, out, pages, step, shape);                                                 \
    }

LONG_ATTENTION_KERNELS(f16, F16, 1)
LONG_ATTENTION_KERNELS(f16, F16, 4)
LONG_ATTENTION_KERNELS(f32, F32, 1)
LONG_ATTENTION_KERNELS(f32, F32, 4)
