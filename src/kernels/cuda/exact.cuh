// Arithmetic whose every step is rounded as the parent module's loops round it, so that the device gives their bits.
//
// Operators are avoided wherever a product meets a sum: nvcc would fuse them. The intrinsics below never fuse, and none
// of them flushes subnormal numbers to zero.
#pragma once

#include <stdint.h>

namespace exact {

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
// a * b + c, rounded once.
__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// The larger; `b` where either is a NaN.
__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// e^x as `simd::exp` computes it: relative error at most 2e-7 for -87.3 <= x <= 88, exactly 0 below (and for a NaN),
// e^88 above.
__device__ __forceinline__ float exp(float x) {
    const float lowest = -87.3f;
    const float magic = 12582912.0f;
    const float clamped = larger(sub(0.0f, larger(sub(0.0f, x), -88.0f)), lowest);
    const float n = sub(add(mul(clamped, 1.44269504088896340735992468100189214f), magic), magic);
    float r = fma(n, -0.6933594f, clamped);
    r = fma(n, 2.1219444e-4f, r);
    float p = 1.9875691e-4f;
    p = fma(p, r, 1.3981999e-3f);
    p = fma(p, r, 8.333452e-3f);
    p = fma(p, r, 4.1665796e-2f);
    p = fma(p, r, 1.6666665e-1f);
    p = fma(p, r, 0.5f);
    const float fraction = fma(p, mul(r, r), add(r, 1.0f));
    const float power = __int_as_float((static_cast<int>(n) + 127) << 23);
    return x >= lowest ? mul(fraction, power) : 0.0f;
}

// IEEE half precision to f32, exact.
__device__ __forceinline__ float from_f16(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// f32 to IEEE half precision, to nearest, ties to even.
__device__ __forceinline__ uint16_t to_f16(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// bfloat16 to f32, exact.
__device__ __forceinline__ float from_bf16(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

}  // namespace exact

constexpr uint32_t ALL_LANES = 0xffffffff;
