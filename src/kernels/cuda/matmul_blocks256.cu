// Products with weights in blocks of 256: Q2_K to Q6_K.
//
// One warp for each row, eight lanes for each block, four blocks at a time: lanes 8p .. 8p + 7 hold partial sum p, to
// which every fourth block is added, in order. So the warp reads its row from front to back.
#include "formats256.cuh"
#include "matmul.cuh"
#include "quantised_input.cuh"

namespace {

// One token's row of the input.
struct InputRow {
    const int8_t* quants;
    const int16_t* sums;
    const float* scales;
};

template <class Format, int TOKENS>
struct Sums {
    float partial[TOKENS];

    // Adds block `index` of a row, whose bytes are at `bytes`. All lanes take part; `is_inside` is false for those
    // whose block is past the end of the row.
    __device__ __forceinline__ void add(
        const uint8_t* bytes, uint32_t index, bool is_inside, const InputRow (&inputs)[TOKENS], int lane
    ) {
        Format block;
        if (is_inside) {
            block.load(bytes, lane);
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            IntegerSums sums = {0, 0};
            float input_scale = 0.0f;
            if (is_inside) {
                const InputRow& input = inputs[t];
                input_scale = __ldg(input.scales + index);
                block.add({input.quants + 256 * index, input.sums + 16 * index}, sums);
            }
#pragma unroll
            for (int distance = 1; distance < 8; distance *= 2) {
                sums.products += __shfl_xor_sync(ALL_LANES, sums.products, distance);
                if (Format::HAS_MINIMUM) {
                    sums.minimums += __shfl_xor_sync(ALL_LANES, sums.minimums, distance);
                }
            }
            if (is_inside) {
                const float scale = exact::mul(block.scale, input_scale);
                partial[t] = exact::fma(scale, static_cast<float>(sums.products), partial[t]);
                if (Format::HAS_MINIMUM) {
                    const float minimum = exact::mul(block.minimum, input_scale);
                    partial[t] = exact::fma(-minimum, static_cast<float>(sums.minimums), partial[t]);
                }
            }
        }
    }

    // (p0 + p1) + (p2 + p3), in every lane.
    __device__ __forceinline__ void reduce() {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            partial[t] = exact::add(partial[t], __shfl_xor_sync(ALL_LANES, partial[t], 8));
            partial[t] = exact::add(partial[t], __shfl_xor_sync(ALL_LANES, partial[t], 16));
        }
    }
};

// Grid: x covers the rows, a warp each; y the tokens.
template <class Format, int TOKENS>
__device__ __forceinline__ void multiply(
    const uint8_t* weights, const uint8_t* x, const Output& out, uint32_t rows, uint32_t columns, uint32_t tokens
) {
    const uint32_t row = blockIdx.x * (MATMUL_THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t group = lane / 8;
    const uint32_t blocks = columns / 256;
    const uint32_t first_token = blockIdx.y * TOKENS;
    const Quantised256 input(const_cast<uint8_t*>(x), columns, tokens);
    InputRow inputs[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const size_t token = min(first_token + t, tokens - 1);
        inputs[t] = {input.quants + token * columns, input.sums + token * (columns / 16), input.scales + token * blocks};
    }
    const uint8_t* bytes = weights + static_cast<size_t>(row) * blocks * Format::BYTES;
    Sums<Format, TOKENS> sums = {};
    const uint32_t whole = blocks / 4 * 4;
    for (uint32_t first = 0; first < whole; first += 4) {
        const uint32_t index = first + group;
        sums.add(bytes + index * Format::BYTES, index, true, inputs, lane % 8);
    }
    if (whole < blocks) {
        const uint32_t index = whole + group;
        sums.add(bytes + index * Format::BYTES, index, index < blocks, inputs, lane % 8);
    }
    sums.reduce();
    if (lane == 0) {
        store(out, sums.partial, row, first_token, tokens);
    }
}

}  // namespace

MATMUL_KERNELS(q2_k, Q2_K, multiply)
MATMUL_KERNELS(q3_k, Q3_K, multiply)
MATMUL_KERNELS(q4_k, Q4_K, multiply)
MATMUL_KERNELS(q5_k, Q5_K, multiply)
MATMUL_KERNELS(q6_k, Q6_K, multiply)
