// What the attention kernels share: pages and the way to them, and the scores of a page; attention.rs has the layout of
// a page and the definition, which all keep to bit by bit.
#pragma once

#include "exact.cuh"

namespace {

// Positions in a page.
constexpr uint32_t PAGE_TOKENS = 32;
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
__device__ __forceinline__ typename Format::Element* page_start(
    const Pages& pages, const uint32_t* table, uint32_t page
) {
    return static_cast<typename Format::Element*>(pages.elements) + __ldg(table + page) * pages.page_stride;
}

// The slots of `page` that a token attends to: those from `start` up to `end`.
struct Slots {
    uint32_t start;
    uint32_t end;

    // `end` is one more than the token's position.
    __device__ __forceinline__ Slots(uint32_t page, uint32_t first_position, uint32_t end_position) {
        const uint32_t page_position = page * PAGE_TOKENS;
        start = first_position > page_position ? first_position - page_position : 0;
        end = end_position > page_position ? min(end_position - page_position, PAGE_TOKENS) : 0;
    }

    __device__ __forceinline__ bool is_empty() const { return start >= end; }
    __device__ __forceinline__ bool has(uint32_t slot) const { return slot >= start && slot < end; }
    __device__ __forceinline__ bool operator==(const Slots& other) const {
        return start == other.start && end == other.end;
    }
};

// The pages that a token attends to, of one KV head.
struct Context {
    // One more than the token's position.
    uint32_t end_position;
    uint32_t window;
    uint32_t first_page;
    uint32_t end_page;
    const uint32_t* table;
    // In elements, from a page's start.
    uint32_t keys_offset;
    uint32_t values_offset;

    __device__ __forceinline__ Context(const Step& step, const Shape& shape, uint32_t token, uint32_t kv_head) {
        end_position = step.positions[token] + 1;
        window = shape.window;
        first_page = (end_position > window ? end_position - window : 0) / PAGE_TOKENS;
        end_page = (end_position + PAGE_TOKENS - 1) / PAGE_TOKENS;
        table = step.table + step.starts[step.runs[token]];
        keys_offset = kv_head * shape.key_length * PAGE_TOKENS;
        values_offset = (shape.kv_heads * shape.key_length + kv_head * shape.value_length) * PAGE_TOKENS;
    }

    // Those of the token that comes so many after this one.
    __device__ __forceinline__ Slots slots(uint32_t page, uint32_t later = 0) const {
        const uint32_t end = end_position + later;
        return Slots(page, end > window ? end - window : 0, end);
    }
};

// Scaled queries of some rows, a row being one head of one token, element by element.
template <int ROWS>
using Queries = float[HEAD_LENGTH_MAX][ROWS];

// The heads that a block of threads computes: those from `first` on, of the `group` that share a KV head. Where fewer
// are left, the last is computed several times.
struct HeadGroup {
    uint32_t token;
    uint32_t kv_head;
    uint32_t group;
    uint32_t first;

    // Whether head h is not a repetition.
    __device__ __forceinline__ bool has(int h) const { return first + h < group; }

    // The place of head h among those of all tokens.
    __device__ __forceinline__ size_t index(int h, const Shape& shape) const {
        return static_cast<size_t>(token) * shape.heads + kv_head * group + min(first + h, group - 1);
    }
};

// By all threads of a block, of which there are `threads`. `rows` tells the places of rows among those of all tokens.
template <int ROWS, class Rows>
__device__ __forceinline__ void load_queries(
    Queries<ROWS>& to, const float* queries, const Rows& rows, const Shape& shape, int threads
) {
    for (uint32_t i = threadIdx.x; i < ROWS * shape.key_length; i += threads) {
        const uint32_t row = i / shape.key_length;
        const uint32_t element = i % shape.key_length;
        const float query = __ldg(queries + rows.index(row, shape) * shape.key_length + element);
        to[element][row] = exact::mul(query, shape.scale);
    }
}

// The scores of a page's positions, by one warp: lanes i and i + 16 get those of positions 2i and 2i + 1. Half a warp
// takes the even key elements, the other the odd ones: the two partial sums of the definition.
template <class Format, int ROWS>
__device__ __forceinline__ void page_scores(
    float2 (&sums)[ROWS], const Queries<ROWS>& queries, const typename Format::Element* keys, uint32_t key_length,
    Slots slots
) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t parity = lane / 16;
    const uint32_t slot = lane % 16 * 2;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sums[r] = make_float2(0.0f, 0.0f);
    }
    // What lies in slots that nothing was written to is not read.
    if (slot < slots.end && slot + 1 >= slots.start) {
#pragma unroll 8
        for (uint32_t element = parity; element < key_length; element += 2) {
            const float2 key = Format::load_two(keys + element * PAGE_TOKENS + slot);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float query = queries[element][r];
                sums[r].x = exact::fma(key.x, query, sums[r].x);
                sums[r].y = exact::fma(key.y, query, sums[r].y);
            }
        }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sums[r].x = exact::add(sums[r].x, __shfl_xor_sync(ALL_LANES, sums[r].x, 16));
        sums[r].y = exact::add(sums[r].y, __shfl_xor_sync(ALL_LANES, sums[r].y, 16));
    }
}

// The largest of a page's scores, of which those that a token does not attend to are minus infinity: one warp, a
// position a lane.
__device__ __forceinline__ float largest_of_page(float score) {
    for (int distance = 16; distance > 0; distance /= 2) {
        score = exact::larger(score, __shfl_xor_sync(ALL_LANES, score, distance));
    }
    return score;
}

__device__ __forceinline__ float sum_of_page(float weight) {
    for (int distance = 16; distance > 0; distance /= 2) {
        weight = exact::add(weight, __shfl_xor_sync(ALL_LANES, weight, distance));
    }
    return weight;
}

}  // namespace
