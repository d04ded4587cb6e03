// Weights that are floats: element `element` of a row that starts at `row`, as f32.
#pragma once

#include "exact.cuh"

struct F32 {
    static constexpr int BYTES = 4;
    __device__ __forceinline__ static float load(const uint8_t* row, uint32_t element) {
        return __ldg(reinterpret_cast<const float*>(row) + element);
    }
};

struct F16 {
    static constexpr int BYTES = 2;
    __device__ __forceinline__ static float load(const uint8_t* row, uint32_t element) {
        return exact::from_f16(__ldg(reinterpret_cast<const unsigned short*>(row) + element));
    }
};

struct BF16 {
    static constexpr int BYTES = 2;
    __device__ __forceinline__ static float load(const uint8_t* row, uint32_t element) {
        return exact::from_bf16(__ldg(reinterpret_cast<const unsigned short*>(row) + element));
    }
};
