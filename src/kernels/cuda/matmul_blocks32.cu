// Products with weights in blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//
// One warp for each row, four lanes for each block, eight blocks at a time: lanes 4p .. 4p + 3 hold partial sum p, to
// which every eighth block is added, in order. So the warp reads its row from front to back.
#include "formats32.cuh"
#include "matmul.cuh"
#include "quantised_input.cuh"

namespace {

template <class Format, int TOKENS>
struct Sums {
    float partial[TOKENS];

    // Adds block `index` of a row, whose bytes are at `block`. All lanes take part; `is_inside` is false for those
    // whose block is past the end of the row.
    __device__ __forceinline__ void add(
        const uint8_t* block, uint32_t index, bool is_inside, const int8_t* const (&quants)[TOKENS],
        const ScaleAndSum* const (&scales)[TOKENS], int quarter
    ) {
        Part32 part = {0, 0, 0.0f, 0.0f};
        if (is_inside) {
            part = Format::load(block, quarter);
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            int sum = 0;
            int2 scale = make_int2(0, 0);
            if (is_inside) {
                const int2 x = __ldg(reinterpret_cast<const int2*>(quants[t] + 32 * index + 8 * quarter));
                scale = __ldg(reinterpret_cast<const int2*>(scales[t] + index));
                sum = __dp4a(part.high, x.y, __dp4a(part.low, x.x, 0));
            }
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            if (is_inside) {
                const float input_scale = __int_as_float(scale.x);
                const float product = exact::mul(part.scale, input_scale);
                partial[t] = exact::fma(product, static_cast<float>(sum), partial[t]);
                if (Format::HAS_MINIMUM) {
                    const float scaled_sum = exact::mul(input_scale, static_cast<float>(scale.y));
                    partial[t] = exact::fma(part.minimum, scaled_sum, partial[t]);
                }
            }
        }
    }

    // ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7)), in every lane.
    __device__ __forceinline__ void reduce() {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            for (int distance = 16; distance >= 4; distance /= 2) {
                partial[t] = exact::add(partial[t], __shfl_xor_sync(ALL_LANES, partial[t], distance));
            }
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
    const uint32_t group = lane / 4;
    const uint32_t quarter = lane % 4;
    const uint32_t blocks = columns / 32;
    const uint32_t first_token = blockIdx.y * TOKENS;
    const Quantised32 input(const_cast<uint8_t*>(x), columns, tokens);
    const int8_t* quants[TOKENS];
    const ScaleAndSum* scales[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const size_t token = min(first_token + t, tokens - 1);
        quants[t] = input.quants + token * columns;
        scales[t] = input.scales + token * blocks;
    }
    const uint8_t* bytes = weights + static_cast<size_t>(row) * blocks * Format::BYTES;
    Sums<Format, TOKENS> sums = {};
    const uint32_t whole = blocks / 8 * 8;
#pragma unroll 2
    for (uint32_t first = 0; first < whole; first += 8) {
        const uint32_t index = first + group;
        sums.add(bytes + index * Format::BYTES, index, true, quants, scales, quarter);
    }
    if (whole < blocks) {
        const uint32_t index = whole + group;
        sums.add(bytes + index * Format::BYTES, index, index < blocks, quants, scales, quarter);
    }
    sums.reduce();
    if (lane == 0) {
        store(out, sums.partial, row, first_token, tokens);
    }
}

}  // namespace

MATMUL_KERNELS(q4_0, Q4_0, multiply)
MATMUL_KERNELS(q4_1, Q4_1, multiply)
MATMUL_KERNELS(q5_0, Q5_0, multiply)
MATMUL_KERNELS(q5_1, Q5_1, multiply)
MATMUL_KERNELS(q8_0, Q8_0, multiply)
