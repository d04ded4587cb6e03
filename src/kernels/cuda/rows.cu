// Whole rows: embedding rows to f32, and chosen rows of activations.
#include "exact.cuh"

namespace {

// Rows of an embedding lie wherever their group rests, at any address: they are read byte by byte. It is a row a token.
__device__ __forceinline__ uint32_t u16_at(const uint8_t* at) { return at[0] | at[1] << 8; }
__device__ __forceinline__ float f16_at(const uint8_t* at) { return exact::from_f16(u16_at(at)); }

// Element i of a row, for each type.

struct F32 {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* at = row + 4 * static_cast<size_t>(i);
        return __uint_as_float(u16_at(at) | u16_at(at + 2) << 16);
    }
};

struct F16 {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        return f16_at(row + 2 * static_cast<size_t>(i));
    }
};

struct BF16 {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        return exact::from_bf16(u16_at(row + 2 * static_cast<size_t>(i)));
    }
};

// value * scale + minimum.
__device__ __forceinline__ float of_block32(int value, float scale, float minimum) {
    return exact::add(exact::mul(static_cast<float>(value), scale), minimum);
}

__device__ __forceinline__ int nibble(const uint8_t* bytes, uint32_t i) { return bytes[i % 16] >> (i / 16 * 4) & 15; }

struct Q4_0 {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 18 * static_cast<size_t>(i / 32);
        return of_block32(nibble(block + 2, i % 32) - 8, f16_at(block), 0.0f);
    }
};

struct Q4_1 {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 20 * static_cast<size_t>(i / 32);
        return of_block32(nibble(block + 4, i % 32), f16_at(block), f16_at(block + 2));
    }
};

// Bit i % 32 of four bytes, as a fifth bit.
__device__ __forceinline__ int fifth_bit(const uint8_t* bytes, uint32_t i) {
    return (bytes[i % 32 / 8] >> (i % 8) & 1) << 4;
}

struct Q5_0 {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 22 * static_cast<size_t>(i / 32);
        const int value = nibble(block + 6, i % 32) | fifth_bit(block + 2, i);
        return of_block32(value - 16, f16_at(block), 0.0f);
    }
};

struct Q5_1 {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 24 * static_cast<size_t>(i / 32);
        const int value = nibble(block + 8, i % 32) | fifth_bit(block + 4, i);
        return of_block32(value, f16_at(block), f16_at(block + 2));
    }
};

struct Q8_0 {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 34 * static_cast<size_t>(i / 32);
        return of_block32(static_cast<int8_t>(block[2 + i % 32]), f16_at(block), 0.0f);
    }
};

// scale * scale_factor * value - minimum * minimum_factor.
__device__ __forceinline__ float of_block256(int value, float scale, int scale_factor, float minimum, int minimum_factor) {
    const float scaled = exact::mul(scale, static_cast<float>(scale_factor));
    const float subtracted = exact::mul(minimum, static_cast<float>(minimum_factor));
    return exact::sub(exact::mul(scaled, static_cast<float>(value)), subtracted);
}

__device__ __forceinline__ int two_bits(const uint8_t* bytes, uint32_t i) {
    return bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

struct Q2_K {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 84 * static_cast<size_t>(i / 256);
        i %= 256;
        const int both = block[i / 16];
        return of_block256(two_bits(block + 16, i), f16_at(block + 80), both & 15, f16_at(block + 82), both >> 4);
    }
};

struct Q3_K {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 110 * static_cast<size_t>(i / 256);
        i %= 256;
        const int value = two_bits(block + 32, i) | (block[i % 32] >> (i / 32) & 1) << 2;
        const uint32_t j = i / 16;
        const int low = block[96 + j % 8] >> (j / 8 * 4) & 15;
        const int high = block[104 + j % 4] >> (j / 4 * 2) & 3;
        return of_block256(value - 4, f16_at(block + 108), (low | high << 4) - 32, 0.0f, 0);
    }
};

// The element of a block of Q4_K or Q5_K whose value is known; its scales stand in bytes 4 to 15.
__device__ __forceinline__ float with_scales_k(const uint8_t* block, uint32_t i, int value) {
    const uint8_t* bytes = block + 4;
    const uint32_t j = i / 32;
    int scale, minimum;
    if (j < 4) {
        scale = bytes[j] & 63;
        minimum = bytes[j + 4] & 63;
    } else {
        scale = (bytes[j + 4] & 15) | bytes[j - 4] >> 6 << 4;
        minimum = bytes[j + 4] >> 4 | bytes[j] >> 6 << 4;
    }
    return of_block256(value, f16_at(block), scale, f16_at(block + 2), minimum);
}

__device__ __forceinline__ int nibble_k(const uint8_t* bytes, uint32_t i) {
    return bytes[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
}

struct Q4_K {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 144 * static_cast<size_t>(i / 256);
        i %= 256;
        return with_scales_k(block, i, nibble_k(block + 16, i));
    }
};

struct Q5_K {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 176 * static_cast<size_t>(i / 256);
        i %= 256;
        const int fifth = (block[16 + i % 32] >> (i / 32) & 1) << 4;
        return with_scales_k(block, i, nibble_k(block + 48, i) | fifth);
    }
};

struct Q6_K {
    __device__ static float element(const uint8_t* row, uint32_t i) {
        const uint8_t* block = row + 210 * static_cast<size_t>(i / 256);
        i %= 256;
        const uint32_t half = i / 128, quarter = i / 32 % 4, k = i % 32;
        const int low = block[64 * half + quarter % 2 * 32 + k] >> (quarter / 2 * 4) & 15;
        const int high = block[128 + 32 * half + k] >> (2 * quarter) & 3;
        const int scale = static_cast<int8_t>(block[192 + i / 16]);
        return of_block256((low | high << 4) - 32, f16_at(block + 208), scale, 0.0f, 0);
    }
};

}  // namespace

// out[r] = the elements of the row at address rows[r]. Grid: x covers the columns, y is the row.
#define DEQUANTISE_KERNEL(name, format)                                                \
    extern "C" __global__ void __launch_bounds__(256)                                  \
    dequantise_##name(const uint64_t* rows, float* out, uint32_t columns) {            \
        const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;                      \
        if (i < columns) {                                                             \
            const uint8_t* row = reinterpret_cast<const uint8_t*>(rows[blockIdx.y]);   \
            out[static_cast<size_t>(blockIdx.y) * columns + i] = format::element(row, i); \
        }                                                                              \
    }

DEQUANTISE_KERNEL(f32, F32)
DEQUANTISE_KERNEL(f16, F16)
DEQUANTISE_KERNEL(bf16, BF16)
DEQUANTISE_KERNEL(q4_0, Q4_0)
DEQUANTISE_KERNEL(q4_1, Q4_1)
DEQUANTISE_KERNEL(q5_0, Q5_0)
DEQUANTISE_KERNEL(q5_1, Q5_1)
DEQUANTISE_KERNEL(q8_0, Q8_0)
DEQUANTISE_KERNEL(q2_k, Q2_K)
DEQUANTISE_KERNEL(q3_k, Q3_K)
DEQUANTISE_KERNEL(q4_k, Q4_K)
DEQUANTISE_KERNEL(q5_k, Q5_K)
DEQUANTISE_KERNEL(q6_k, Q6_K)

// out[r] = x[indices[r]], rows of `columns`. Grid: x covers the columns, y is the row.
extern "C" __global__ void __launch_bounds__(256)
gather_rows(const float* x, const uint32_t* indices, float* out, uint32_t columns) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < columns) {
        const float* row = x + static_cast<size_t>(indices[blockIdx.y]) * columns;
        out[static_cast<size_t>(blockIdx.y) * columns + i] = row[i];
    }
}
