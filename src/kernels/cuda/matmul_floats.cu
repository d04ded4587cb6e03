// Products with F32, F16 and BF16 weights: activations stay f32, [tokens][columns].
//
// Sixteen lanes for each row: lane i holds the partial sum of the elements i, i + 16, i + 32 ..., a chain of fused
// multiply-adds. A row whose length is no multiple of 16 continues with zeros.
#include "floats.cuh"
#include "matmul.cuh"

namespace {

// Grid: x covers the rows, half a warp each; y the tokens.
template <class Format, int TOKENS>
__device__ __forceinline__ void multiply(
    const uint8_t* weights, const uint8_t* x, const Output& out, uint32_t rows, uint32_t columns, uint32_t tokens
) {
    const uint32_t row = blockIdx.x * (MATMUL_THREADS / 16) + threadIdx.x / 16;
    const uint32_t lane = threadIdx.x % 16;
    const uint32_t first_token = blockIdx.y * TOKENS;
    // Both halves of a warp take part in the shuffles: one without a row computes the last again.
    const uint32_t source_row = min(row, rows - 1);
    const uint8_t* bytes = weights + static_cast<size_t>(source_row) * columns * Format::BYTES;
    const float* inputs[TOKENS];
    float sums[TOKENS] = {};
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const size_t token = min(first_token + t, tokens - 1);
        inputs[t] = reinterpret_cast<const float*>(x) + token * columns;
    }
    const uint32_t whole = columns / 16 * 16;
#pragma unroll 4
    for (uint32_t element = lane; element < whole; element += 16) {
        const float weight = Format::load(bytes, element);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            sums[t] = exact::fma(weight, __ldg(inputs[t] + element), sums[t]);
        }
    }
    if (whole < columns) {
        const uint32_t element = whole + lane;
        const bool is_inside = element < columns;
        const float weight = is_inside ? Format::load(bytes, element) : 0.0f;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float value = is_inside ? __ldg(inputs[t] + element) : 0.0f;
            sums[t] = exact::fma(weight, value, sums[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        for (int distance = 8; distance > 0; distance /= 2) {
            sums[t] = exact::add(sums[t], __shfl_xor_sync(ALL_LANES, sums[t], distance));
        }
    }
    if (row < rows && lane == 0) {
        store(out, sums, row, first_token, tokens);
    }
}

}  // namespace

MATMUL_KERNELS(f32, F32, multiply)
MATMUL_KERNELS(f16, F16, multiply)
MATMUL_KERNELS(bf16, BF16, multiply)
