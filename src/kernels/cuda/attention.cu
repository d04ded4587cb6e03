// Attention over the pages of the KV cache, and the kernel that writes to them; attention.rs has the layout of a page
// and the definition, which these keep to bit by bit.
#include "exact.cuh"

namespace {

// Positions in a page.
constexpr uint32_t PAGE_TOKENS = 32;
constexpr int THREADS = 256;
// Pages that a block has at hand at once, a warp each.
constexpr uint32_t WARPS = THREADS / 32;
// Elements of a key or value head.
constexpr uint32_t HEAD_LENGTH_MAX = 256;

// What a page is made of, and two of it side by side as f32.
struct F16 {
    using Element = uint16_t;
    __device__ __forceinline__ static uint16_t of(float value) { return exact::to_f16(value); }
    __device__ __forceinline__ static float2 load_two(const uint16_t* from) {
        const uint32_t both = __ldg(reinterpret_cast<const unsigned int*>(from));
        return make_float2(exact::from_f16(both & 0xffff), exact::from_f16(both >> 16));
    }
};

struct F32 {
    using Element = float;
    __device__ __forceinline__ static float of(float value) { return value; }
    __device__ __forceinline__ static float2 load_two(const float* from) {
        return __ldg(reinterpret_cast<const float2*>(from));
    }
};

}  // namespace

// One layer's part of every page: page p starts at elements + p * page_stride.
struct Pages {
    void* elements;
    // In elements, not bytes.
    uint64_t page_stride;
};

// Which pages the step's tokens read. Token t is at positions[t] of run runs[t], whose pages are, in order of position,
// table[starts[run]], table[starts[run] + 1] ...
struct Step {
    const uint32_t* positions;
    const uint32_t* runs;
    const uint32_t* starts;
    const uint32_t* table;
};

// Of one layer.
struct Shape {
    uint32_t heads;
    uint32_t kv_heads;
    uint32_t key_length;
    uint32_t value_length;
    // How many positions a token attends to, its own included.
    uint32_t window;
    float scale;
};

namespace {

// The start of `page` of a run.
template <class Format>
__device__ __forceinline__ typename Format::Element* page_start(const Pages& pages, const uint32_t* table, uint32_t page) {
    return static_cast<typename Format::Element*>(pages.elements) + __ldg(table + page) * pages.page_stride;
}

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

// What the threads of a block share about its HEADS query heads.
template <int HEADS>
struct Shared {
    // Scaled queries, element by element.
    float queries[HEAD_LENGTH_MAX][HEADS];
    // Scores, then weights, of the pages at hand.
    float weights[HEADS][WARPS][PAGE_TOKENS];
    // What sums so far are scaled with before a page is added.
    float decay[HEADS][WARPS];
    // The sums of weights.
    float totals[HEADS];
};

// The slots of `page` that a token attends to: those from `start` up to `end`.
struct Slots {
    uint32_t start;
    uint32_t end;

    // `end` is one more than the token's position.
    __device__ __forceinline__ Slots(uint32_t page, uint32_t first_position, uint32_t end_position) {
        const uint32_t page_position = page * PAGE_TOKENS;
        start = first_position > page_position ? first_position - page_position : 0;
        end = min(end_position - page_position, PAGE_TOKENS);
    }
};

// The scores of a page's positions, by one warp. Half a warp takes the even key elements, the other the odd ones, two
// positions a lane: the two partial sums of the definition.
template <class Format, int HEADS>
__device__ __forceinline__ void page_scores(
    Shared<HEADS>& shared, const typename Format::Element* keys, uint32_t key_length, Slots slots, uint32_t warp
) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t parity = lane / 16;
    const uint32_t slot = lane % 16 * 2;
    float2 sums[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        sums[h] = make_float2(0.0f, 0.0f);
    }
    // What lies in slots that nothing was written to is not read.
    if (slot < slots.end && slot + 1 >= slots.start) {
#pragma unroll 4
        for (uint32_t element = parity; element < key_length; element += 2) {
            const float2 key = Format::load_two(keys + element * PAGE_TOKENS + slot);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float query = shared.queries[element][h];
                sums[h].x = exact::fma(key.x, query, sums[h].x);
                sums[h].y = exact::fma(key.y, query, sums[h].y);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        sums[h].x = exact::add(sums[h].x, __shfl_xor_sync(ALL_LANES, sums[h].x, 16));
        sums[h].y = exact::add(sums[h].y, __shfl_xor_sync(ALL_LANES, sums[h].y, 16));
        if (parity == 0) {
            shared.weights[h][warp][slot] = sums[h].x;
            shared.weights[h][warp][slot + 1] = sums[h].y;
        }
    }
}

// From the scores of a head to the weights of the values, page by page: one warp, a position a lane.
struct Softmax {
    float largest;
    float total;

    // Returns what the sums so far are scaled with.
    __device__ __forceinline__ float weigh(float& score, Slots slots) {
        const uint32_t lane = threadIdx.x % 32;
        const float minus_infinity = __int_as_float(0xff800000);
        if (lane < slots.start || lane >= slots.end) {
            score = minus_infinity;
        }
        float page_largest = score;
        for (int distance = 16; distance > 0; distance /= 2) {
            page_largest = exact::larger(page_largest, __shfl_xor_sync(ALL_LANES, page_largest, distance));
        }
        float decay = 1.0f;
        if (page_largest > largest) {
            decay = exact::exp(exact::sub(largest, page_largest));
            largest = page_largest;
        }
        score = exact::exp(exact::sub(score, largest));
        float sum = score;
        for (int distance = 16; distance > 0; distance /= 2) {
            sum = exact::add(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
        }
        total = exact::add(exact::mul(total, decay), sum);
        return decay;
    }
};

// Grid: x is the token, y the KV head, z covers the query heads that share it, HEADS at a time.
//
// In rounds of as many pages as there are warps: each warp makes one page's scores for all heads; then each head's
// weights are made by one warp, page by page; then every thread adds the values of all positions, one after another, to
// the two elements that it has of some heads.
template <class Format, int HEADS>
__device__ __forceinline__ void attend(
    const float* queries, float* out, const Pages& pages, const Step& step, const Shape& shape
) {
    // A slice of the threads has all value elements, two each, of every `slices`th head.
    constexpr int HEADS_OF_THREAD = (HEADS + 1) / 2;
    __shared__ Shared<HEADS> shared;
    const uint32_t token = blockIdx.x;
    const uint32_t kv_head = blockIdx.y;
    const uint32_t group = shape.heads / shape.kv_heads;
    const uint32_t first_head = blockIdx.z * HEADS;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t lane = threadIdx.x % 32;

    const uint32_t end_position = step.positions[token] + 1;
    const uint32_t first_position = end_position > shape.window ? end_position - shape.window : 0;
    const uint32_t end_page = (end_position + PAGE_TOKENS - 1) / PAGE_TOKENS;
    const uint32_t* table = step.table + step.starts[step.runs[token]];
    const uint32_t keys_offset = kv_head * shape.key_length * PAGE_TOKENS;
    const uint32_t values_offset =
        (shape.kv_heads * shape.key_length + kv_head * shape.value_length) * PAGE_TOKENS;

    // Where there are fewer heads, the last is computed several times.
    for (uint32_t i = threadIdx.x; i < HEADS * shape.key_length; i += THREADS) {
        const uint32_t h = i / shape.key_length;
        const uint32_t element = i % shape.key_length;
        const size_t head = static_cast<size_t>(token) * shape.heads + kv_head * group + min(first_head + h, group - 1);
        shared.queries[element][h] = exact::mul(__ldg(queries + head * shape.key_length + element), shape.scale);
    }

    const uint32_t pairs = shape.value_length / 2;
    const uint32_t slice_threads = (pairs + 31) / 32 * 32;
    const uint32_t slices = THREADS / slice_threads;
    const uint32_t slice = threadIdx.x / slice_threads;
    const uint32_t pair = threadIdx.x % slice_threads;
    float2 sums[HEADS_OF_THREAD];
#pragma unroll
    for (int j = 0; j < HEADS_OF_THREAD; j++) {
        sums[j] = make_float2(0.0f, 0.0f);
    }
    Softmax softmax = {__int_as_float(0xff800000), 0.0f};
    __syncthreads();

    for (uint32_t first_page = first_position / PAGE_TOKENS; first_page < end_page; first_page += WARPS) {
        const uint32_t count = min(WARPS, end_page - first_page);
        if (warp < count) {
            const uint32_t page = first_page + warp;
            const auto* keys = page_start<Format>(pages, table, page) + keys_offset;
            page_scores<Format, HEADS>(shared, keys, shape.key_length, Slots(page, first_position, end_position), warp);
        }
        __syncthreads();
        if (warp < HEADS) {
            for (uint32_t i = 0; i < count; i++) {
                const Slots slots(first_page + i, first_position, end_position);
                float score = shared.weights[warp][i][lane];
                const float decay = softmax.weigh(score, slots);
                shared.weights[warp][i][lane] = score;
                if (lane == 0) {
                    shared.decay[warp][i] = decay;
                }
            }
        }
        __syncthreads();
        if (slice < min(slices, static_cast<uint32_t>(HEADS)) && pair < pairs) {
            for (uint32_t i = 0; i < count; i++) {
                const Slots slots(first_page + i, first_position, end_position);
                const auto* values = page_start<Format>(pages, table, first_page + i) + values_offset + 2 * pair;
#pragma unroll
                for (int j = 0; j < HEADS_OF_THREAD; j++) {
                    const uint32_t h = slice + j * slices;
                    if (h < HEADS) {
                        sums[j].x = exact::mul(sums[j].x, shared.decay[h][i]);
                        sums[j].y = exact::mul(sums[j].y, shared.decay[h][i]);
                    }
                }
#pragma unroll 4
                for (uint32_t slot = slots.start; slot < slots.end; slot++) {
                    const float2 value = Format::load_two(values + slot * shape.value_length);
#pragma unroll
                    for (int j = 0; j < HEADS_OF_THREAD; j++) {
                        const uint32_t h = slice + j * slices;
                        if (h < HEADS) {
                            const float weight = shared.weights[h][i][slot];
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

    if (warp < HEADS && lane == 0) {
        shared.totals[warp] = softmax.total;
    }
    __syncthreads();
    if (slice >= slices || pair >= pairs) {
        return;
    }
#pragma unroll
    for (int j = 0; j < HEADS_OF_THREAD; j++) {
        const uint32_t h = slice + j * slices;
        if (h < HEADS && first_head + h < group) {
            const size_t head = static_cast<size_t>(token) * shape.heads + kv_head * group + first_head + h;
            float* to = out + head * shape.value_length + 2 * pair;
            to[0] = exact::div(sums[j].x, shared.totals[h]);
            to[1] = exact::div(sums[j].y, shared.totals[h]);
        }
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
