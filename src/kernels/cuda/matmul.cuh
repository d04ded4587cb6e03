// What all products share: y[token, first_column + row] = sum over columns of weight[row, column] * x[token, column].
//
// Weights are read where they lie, in the file's layout. A kernel is compiled for 1, 2, 4 and 8 tokens, which share one
// pass over the weights; where fewer are left than it is made for, the last one is computed again and not stored.
// Wider steps take groups of tokens along the grid's y. A sum's order depends on nothing but its row's length: a token
// has the same bits at every width, and they are those of the parent module's loops.
#pragma once

#include "exact.cuh"

// Threads of a block.
constexpr int MATMUL_THREADS = 128;

// Where a product goes: the value of row r for token t is y[t * stride + r].
struct Output {
    float* y;
    uint32_t stride;
};

// Stores one token's sum of a row, where there is such a token.
template <int TOKENS>
__device__ __forceinline__ void store(
    const Output& out, const float (&sums)[TOKENS], uint32_t row, uint32_t first_token, uint32_t tokens
) {
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        if (first_token + t < tokens) {
            out.y[static_cast<size_t>(first_token + t) * out.stride + row] = sums[t];
        }
    }
}

// The kernels of one type: `matmul_NAME_TOKENS` for each number of tokens.
#define MATMUL_KERNEL(name, format, function, count)                                                              \
    extern "C" __global__ void __launch_bounds__(MATMUL_THREADS) matmul_##name##_##count(                         \
        const uint8_t* weights, const uint8_t* x, float* y, uint32_t rows, uint32_t columns, uint32_t tokens,     \
        uint32_t stride                                                                                           \
    ) {                                                                                                           \
        function<format, count>(weights, x, Output{y, stride}, rows, columns, tokens);                            \
    }
#define MATMUL_KERNELS(name, format, function)  \
    MATMUL_KERNEL(name, format, function, 1)    \
    MATMUL_KERNEL(name, format, function, 2)    \
    MATMUL_KERNEL(name, format, function, 4)    \
    MATMUL_KERNEL(name, format, function, 8)
