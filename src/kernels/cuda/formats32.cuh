// The formats with blocks of 32 as four lanes read them: lane q has elements 4q .. 4q + 3 (`low`) and 16 + 4q ..
// 16 + 4q + 3 (`high`), signed and with the format's offset subtracted. Layouts are ggml's; see blocks.rs.
//
// Rows follow one another without gaps, so a block lies at any multiple of `ALIGNMENT` bytes, and no load is wider.
#pragma once

#include "exact.cuh"

struct Part32 {
    int low;
    int high;
    float scale;
    // 0 where the format has none.
    float minimum;
};

__device__ __forceinline__ uint16_t load_u16(const uint8_t* at) {
    return __ldg(reinterpret_cast<const unsigned short*>(at));
}

__device__ __forceinline__ uint32_t load_u32(const uint8_t* at) {
    return __ldg(reinterpret_cast<const unsigned int*>(at));
}

// A word at an even address.
__device__ __forceinline__ uint32_t load_word(const uint8_t* at) {
    return load_u16(at) | static_cast<uint32_t>(load_u16(at + 2)) << 16;
}

// Unsigned bytes less an offset, as signed bytes: adding 128 - offset sets bit 7 where the result is not negative, and
// no byte overflows into the next.
template <uint32_t OFFSET>
__device__ __forceinline__ int less(uint32_t bytes) {
    static_assert(OFFSET <= 128, "an offset of at most 128");
    return static_cast<int>((bytes + (128 - OFFSET) * 0x01010101u) ^ 0x80808080u);
}

// Four bits, of which bit i goes to bit 4 of byte i.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits) {
    // The product has bit i at i + 4, i + 11, i + 18 and i + 25: no two in one place. Those at 8 * i + 4 are kept.
    return ((bits & 15) * 0x02040810u) & 0x10101010u;
}

struct Q4_0 {
    static constexpr int BYTES = 18;
    static constexpr bool HAS_MINIMUM = false;

    __device__ __forceinline__ static Part32 load(const uint8_t* block, int quarter) {
        const uint32_t nibbles = load_word(block + 2 + 4 * quarter);
        return {less<8>(nibbles & 0x0f0f0f0f), less<8>(nibbles >> 4 & 0x0f0f0f0f),
                exact::from_f16(load_u16(block)), 0.0f};
    }
};

struct Q4_1 {
    static constexpr int BYTES = 20;
    static constexpr bool HAS_MINIMUM = true;

    __device__ __forceinline__ static Part32 load(const uint8_t* block, int quarter) {
        const uint32_t nibbles = load_u32(block + 4 + 4 * quarter);
        const uint32_t header = load_u32(block);
        return {static_cast<int>(nibbles & 0x0f0f0f0f), static_cast<int>(nibbles >> 4 & 0x0f0f0f0f),
                exact::from_f16(header & 0xffff), exact::from_f16(header >> 16)};
    }
};

struct Q5_0 {
    static constexpr int BYTES = 22;
    static constexpr bool HAS_MINIMUM = false;

    __device__ __forceinline__ static Part32 load(const uint8_t* block, int quarter) {
        const uint32_t nibbles = load_word(block + 6 + 4 * quarter);
        const uint32_t bits = load_word(block + 2) >> (4 * quarter);
        const uint32_t low = (nibbles & 0x0f0f0f0f) | fifth_bits(bits);
        const uint32_t high = (nibbles >> 4 & 0x0f0f0f0f) | fifth_bits(bits >> 16);
        return {less<16>(low), less<16>(high), exact::from_f16(load_u16(block)), 0.0f};
    }
};

struct Q5_1 {
    static constexpr int BYTES = 24;
    static constexpr bool HAS_MINIMUM = true;

    __device__ __forceinline__ static Part32 load(const uint8_t* block, int quarter) {
        const uint32_t nibbles = load_u32(block + 8 + 4 * quarter);
        const uint32_t bits = load_u32(block + 4) >> (4 * quarter);
        const uint32_t header = load_u32(block);
        return {static_cast<int>((nibbles & 0x0f0f0f0f) | fifth_bits(bits)),
                static_cast<int>((nibbles >> 4 & 0x0f0f0f0f) | fifth_bits(bits >> 16)),
                exact::from_f16(header & 0xffff), exact::from_f16(header >> 16)};
    }
};

struct Q8_0 {
    static constexpr int BYTES = 34;
    static constexpr bool HAS_MINIMUM = false;

    __device__ __forceinline__ static Part32 load(const uint8_t* block, int quarter) {
        return {static_cast<int>(load_word(block + 2 + 4 * quarter)),
                static_cast<int>(load_word(block + 18 + 4 * quarter)), exact::from_f16(load_u16(block)), 0.0f};
    }
};
