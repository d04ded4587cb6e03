// The 8-bit forms of activations in device memory, written by quantise.cu and read by the products.
//
// Blocks of 32, for `tokens` rows of `columns`:
//   quants   [tokens][columns] i8. The 8 words of a block stand in the order 0 4 1 5 2 6 3 7, so that each of four
//            lanes finds its elements 4q .. 4q + 3 and 16 + 4q .. 16 + 4q + 3 side by side.
//   scales   [tokens][columns / 32] of ScaleAndSum.
// Blocks of 256:
//   quants   [tokens][columns] i8 in their own order.
//   sums     [tokens][columns / 16] i16: of each 16 quants.
//   scales   [tokens][columns / 256] f32.
// Each part starts where the one before it ends: columns are a multiple of the block, so every part is aligned for the
// widest load that reads it.
#pragma once

#include <stdint.h>

// A block's scale and the sum of its 32 quants.
struct alignas(8) ScaleAndSum {
    float scale;
    int sum;
};

struct Quantised32 {
    int8_t* quants;
    ScaleAndSum* scales;

    __device__ __forceinline__ Quantised32(uint8_t* start, uint32_t columns, uint32_t tokens)
        : quants(reinterpret_cast<int8_t*>(start)),
          scales(reinterpret_cast<ScaleAndSum*>(start + static_cast<size_t>(tokens) * columns)) {}
};

struct Quantised256 {
    int8_t* quants;
    int16_t* sums;
    float* scales;

    __device__ __forceinline__ Quantised256(uint8_t* start, uint32_t columns, uint32_t tokens)
        : quants(reinterpret_cast<int8_t*>(start)),
          sums(reinterpret_cast<int16_t*>(start + static_cast<size_t>(tokens) * columns)),
          scales(reinterpret_cast<float*>(sums + static_cast<size_t>(tokens) * (columns / 16))) {}
};
