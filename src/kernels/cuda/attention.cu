// Attention over the pages of the KV cache, and the kernel that writes to them; attention.rs has the layout of a page
// and the definition, which these keep to bit by bit.
#include "attention.cuh"

namespace {

constexpr int THREADS = 256;
// Pages that a block has at hand at once, a warp each.
constexpr uint32_t WARPS = THREADS / 32;

// Grid: x covers the elements of a token's keys and values, y is the token.
template <class Format>
__device__ __forceinline__ void store_token(
    const float* keys, const float* values, const Pages& pages, const Step& step, const Shape& shape
) {
    const uint32_t token = blockIdx.y;
    const uint32_t keys_count = shape.kv_heads * shape.key_length;
    const uint32_t values_count = shape.kv_heads * shape.value_length;
    const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= keys_count + values_count) {
        return;
    }
    const uint32_t position = step.positions[token];
    const uint32_t slot = position % PAGE_TOKENS;
    const uint32_t* table = step.table + step.starts[step.runs[token]];
    auto* page = page_start<Format>(pages, table, position / PAGE_TOKENS);
    if (index < keys_count) {
        const float key = keys[static_cast<size_t>(token) * keys_count + index];
        page[index * PAGE_TOKENS + slot] = Format::of(key);
    } else {
        const uint32_t i = index - keys_count;
        const uint32_t head = i / shape.value_length;
        const uint32_t element = i % shape.value_length;
        const float value = values[static_cast<size_t>(token) * values_count + i];
        auto* page_values = page + keys_count * PAGE_TOKENS;
        page_values[(head * PAGE_TOKENS + slot) * shape.value_length + element] = Format::of(value);
    }
}

// The rows of a block: HEADS query heads of each of some consecutive tokens of a run, head by head for each token.
// Where there are fewer tokens, the last is computed several times.
template <int HEADS>
struct Rows {
    // `token` is the first.
    HeadGroup heads;
    uint32_t tokens;

    // How many tokens after the first.
    __device__ __forceinline__ uint32_t later(uint32_t row) const { return min(row / HEADS, tokens - 1); }
    __device__ __forceinline__ bool has(uint32_t row) const { return row / HEADS < tokens && heads.has(row % HEADS); }
    __device__ __forceinline__ size_t index(uint32_t row, const Shape& shape) const {
        return heads.index(row % HEADS, shape) + static_cast<size_t>(later(row)) * shape.heads;
    }
};

// What the threads of a block share about its rows.
template <int ROWS>
struct Shared {
    Queries<ROWS> queries;
    // Scores, then weights, of the pages at hand.
    float weights[ROWS][WARPS][PAGE_TOKENS];
    // What sums so far are scaled with before a page is added.
    float decay[ROWS][WARPS];
    // The sums of weights.
    float totals[ROWS];
};

// From the scores of a row to the weights of the values, page by page: one warp, a position a lane.
struct Softmax {
    float largest = __int_as_float(0xff800000);
    float total = 0.0f;

    // Returns what the sums so far are scaled with.
    __device__ __forceinline__ float weigh(float& score, Slots slots) {
        if (!slots.has(threadIdx.x % 32)) {
            score = __int_as_float(0xff800000);
        }
        const float page_largest = largest_of_page(score);
        float decay = 1.0f;
        if (page_largest > largest) {
            decay = exact::exp(exact::sub(largest, page_largest));
            largest = page_largest;
        }
        score = exact::exp(exact::sub(score, largest));
        total = exact::add(exact::mul(total, decay), sum_of_page(score));
        return decay;
    }
};

// In rounds of as many pages as there are warps: each warp makes one page's scores for all rows; then each row's
// weights are made by one warp, page by page; then every thread adds the values of all positions, one after another, to
// the two elements that it has of some rows.
//
// All tokens lie in one page: with the first token's, a page has something for each row, but at the start of a window.
template <class Format, int HEADS, int TOKENS>
__device__ __forceinline__ void attend_rows(
    Shared<HEADS * TOKENS>& shared, const Rows<HEADS>& rows, const float* queries, float* out, const Pages& pages,
    const Step& step, const Shape& shape
) {
    constexpr int ROWS = HEADS * TOKENS;
    constexpr int ROWS_OF_WARP = (ROWS + WARPS - 1) / WARPS;
    // A slice of the threads has all value elements, two each, of every `slices`th row.
    constexpr int ROWS_OF_THREAD = (ROWS + 1) / 2;
    const Context context(step, shape, rows.heads.token, rows.heads.kv_head);
    const uint32_t last = rows.tokens - 1;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;

    load_queries<ROWS>(shared.queries, queries, rows, shape, THREADS);

    const uint32_t pairs = shape.value_length / 2;
    const uint32_t slice_threads = (pairs + 31) / 32 * 32;
    const uint32_t slices = THREADS / slice_threads;
    const uint32_t slice = threadIdx.x / slice_threads;
    const uint32_t pair = threadIdx.x % slice_threads;
    float2 sums[ROWS_OF_THREAD];
#pragma unroll
    for (int j = 0; j < ROWS_OF_THREAD; j++) {
        sums[j] = make_float2(0.0f, 0.0f);
    }
    Softmax softmax[ROWS_OF_WARP];
    __syncthreads();

    for (uint32_t first_page = context.first_page; first_page < context.end_page; first_page += WARPS) {
        const uint32_t count = min(WARPS, context.end_page - first_page);
        if (warp < count) {
            const uint32_t page = first_page + warp;
            const auto* keys = page_start<Format>(pages, context.table, page) + context.keys_offset;
            Slots slots = context.slots(page);
            slots.end = context.slots(page, last).end;
            float2 scores[ROWS];
            page_scores<Format, ROWS>(scores, shared.queries, keys, shape.key_length, slots);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (lane < 16) {
                    shared.weights[r][warp][2 * lane] = scores[r].x;
                    shared.weights[r][warp][2 * lane + 1] = scores[r].y;
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < ROWS_OF_WARP; k++) {
            const uint32_t row = warp + k * WARPS;
            for (uint32_t i = 0; row < ROWS && i < count; i++) {
                const Slots slots = context.slots(first_page + i, rows.later(row));
                if (slots.is_empty()) {
                    continue;
                }
                float score = shared.weights[row][i][lane];
                const float decay = softmax[k].weigh(score, slots);
                shared.weights[row][i][lane] = score;
                if (lane == 0) {
                    shared.decay[row][i] = decay;
                }
            }
        }
        __syncthreads();
        if (slice < min(slices, static_cast<uint32_t>(ROWS)) && pair < pairs) {
            for (uint32_t i = 0; i < count; i++) {
                const uint32_t page = first_page + i;
                const Slots first_slots = context.slots(page);
                const Slots last_slots = context.slots(page, last);
                const auto* values =
                    page_start<Format>(pages, context.table, page) + context.values_offset + 2 * pair;
                if (TOKENS == 1 || first_slots == last_slots) {
#pragma unroll
                    for (int j = 0; j < ROWS_OF_THREAD; j++) {
                        const uint32_t row = slice + j * slices;
                        if (row < ROWS) {
                            sums[j].x = exact::mul(sums[j].x, shared.decay[row][i]);
                            sums[j].y = exact::mul(sums[j].y, shared.decay[row][i]);
                        }
                    }
#pragma unroll 4
                    for (uint32_t slot = first_slots.start; slot < first_slots.end; slot++) {
                        const float2 value = Format::load_two(values + slot * shape.value_length);
#pragma unroll
                        for (int j = 0; j < ROWS_OF_THREAD; j++) {
                            const uint32_t row = slice + j * slices;
                            if (row < ROWS) {
                                const float weight = shared.weights[row][i][slot];
                                sums[j].x = exact::fma(value.x, weight, sums[j].x);
                                sums[j].y = exact::fma(value.y, weight, sums[j].y);
                            }
                        }
                    }
                } else {
                    // Where tokens end, or their windows start: each row has slots of its own.
#pragma unroll
                    for (int j = 0; j < ROWS_OF_THREAD; j++) {
                        const uint32_t row = slice + j * slices;
                        const Slots slots = context.slots(page, rows.later(row));
                        if (row >= ROWS || slots.is_empty()) {
                            continue;
                        }
                        sums[j].x = exact::mul(sums[j].x, shared.decay[row][i]);
                        sums[j].y = exact::mul(sums[j].y, shared.decay[row][i]);
                        for (uint32_t slot = slots.start; slot < slots.end; slot++) {
                            const float2 value = Format::load_two(values + slot * shape.value_length);
                            const float weight = shared.weights[row][i][slot];
                            sums[j].x = exact::fma(value.x, weight, sums[j].x);
                            sums[j].y = exact::fma(value.y, weight, sums[j].y);
                        }
                    }
                }
            }
        }
        // The next round's scores take the place of these weights.
        __syncthreads();
    }

#pragma unroll
    for (int k = 0; k < ROWS_OF_WARP; k++) {
        if (warp + k * WARPS < ROWS && lane == 0) {
            shared.totals[warp + k * WARPS] = softmax[k].total;
        }
    }
    __syncthreads();
    if (slice >= slices || pair >= pairs) {
        return;
    }
#pragma unroll
    for (int j = 0; j < ROWS_OF_THREAD; j++) {
        const uint32_t row = slice + j * slices;
        if (row < ROWS && rows.has(row)) {
            float* to = out + rows.index(row, shape) * shape.value_length + 2 * pair;
            to[0] = exact::div(sums[j].x, shared.totals[row]);
            to[1] = exact::div(sums[j].y, shared.totals[row]);
        }
    }
}

// Rows that a block computes together where a run has several tokens.
constexpr int SHARED_ROWS = 8;

// How many tokens the block of `token` computes: none where the block of an earlier one does. Those are the tokens of a
// run whose positions are the same but for the remainder modulo TOKENS.
template <int TOKENS>
__device__ __forceinline__ uint32_t tokens_of_block(const Step& step, uint32_t token) {
    static_assert(TOKENS < 32 && PAGE_TOKENS % TOKENS == 0, "a lane for each token, and all of them in one page");
    if (TOKENS == 1) {
        return 1;
    }
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t later = token + lane;
    bool follows = false;
    if (later > 0 && later < gridDim.x && lane < TOKENS) {
        const uint32_t position = step.positions[later];
        follows = step.runs[later] == step.runs[later - 1] && position == step.positions[later - 1] + 1 &&
                  position % TOKENS != 0;
    }
    const uint32_t all = __ballot_sync(ALL_LANES, follows);
    return all % 2 == 1 ? 0 : __ffs(~(all >> 1));
}

// Grid: x is the token, y the KV head, z covers the query heads that share it, HEADS at a time.
//
// Tokens of a prompt read the same pages: a block computes several of them. For 128 elements in f16 and n rows, a
// position takes 256 * n multiply-adds, 2 * n cycles of a multiprocessor or more, and 512 bytes: at most 32 bytes a
// cycle for eight rows, what the second cache gives; for the one row of a model without grouped heads it would be 256.
template <class Format, int HEADS>
__device__ __forceinline__ void attend(
    const float* queries, float* out, const Pages& pages, const Step& step, const Shape& shape
) {
    constexpr int TOKENS = SHARED_ROWS / HEADS;
    __shared__ union {
        Shared<HEADS> of_one;
        Shared<SHARED_ROWS> of_several;
    } shared;
    const HeadGroup heads = {blockIdx.x, blockIdx.y, shape.heads / shape.kv_heads, blockIdx.z * HEADS};
    const Rows<HEADS> rows = {heads, tokens_of_block<TOKENS>(step, heads.token)};
    if (rows.tokens == 1) {
        attend_rows<Format, HEADS, 1>(shared.of_one, rows, queries, out, pages, step, shape);
    } else if (TOKENS > 1 && rows.tokens > 1) {
        attend_rows<Format, HEADS, TOKENS>(shared.of_several, rows, queries, out, pages, step, shape);
    }
}

}  // namespace

#define STORE_KERNEL(name, format)                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                  \
    store_kv_##name(const float* keys, const float* values, Pages pages, Step step, Shape shape) {         \
        store_token<format>(keys, values, pages, step, shape);                                             \
    }

#define ATTENTION_KERNEL(name, format, heads)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                  \
    attention_##name##_##heads(const float* queries, float* out, Pages pages, Step step, Shape shape) {    \
        attend<format, heads>(queries, out, pages, step, shape);                                           \
    }

STORE_KERNEL(f16, F16)
STORE_KERNEL(f32, F32)
ATTENTION_KERNEL(f16, F16, 1)
ATTENTION_KERNEL(f16, F16, 2)
ATTENTION_KERNEL(f16, F16, 4)
ATTENTION_KERNEL(f16, F16, 8)
ATTENTION_KERNEL(f32, F32, 1)
ATTENTION_KERNEL(f32, F32, 2)
ATTENTION_KERNEL(f32, F32, 4)
ATTENTION_KERNEL(f32, F32, 8)
