// The formats with blocks of 256 as eight lanes read them: a lane has 32 of the elements and the scales that belong to
// them. Layouts are ggml's; see blocks.rs. `add` adds a lane's share of a block's integer sums, for one token:
// `products`, of scale * (value - offset) * quant, and `minimums`, of minimum * quant.
//
// Blocks of Q4_K and Q5_K lie at multiples of 16 bytes, of Q2_K of 4, of Q3_K and Q6_K of 2: no load is wider.
#pragma once

#include "formats32.cuh"

// The input's block: 256 quants, and the sums of each 16.
struct InputBlock {
    const int8_t* quants;
    const int16_t* sums;
};

struct IntegerSums {
    int products;
    int minimums;
};

__device__ __forceinline__ int byte_of(uint32_t word, int index) { return word >> (8 * index) & 255; }

__device__ __forceinline__ int dot8(const int (&values)[2], const int8_t* quants) {
    const int2 x = __ldg(reinterpret_cast<const int2*>(quants));
    return __dp4a(values[1], x.y, __dp4a(values[0], x.x, 0));
}

__device__ __forceinline__ int dot16(const int (&values)[4], const int8_t* quants) {
    const int4 x = __ldg(reinterpret_cast<const int4*>(quants));
    const int low = __dp4a(values[1], x.y, __dp4a(values[0], x.x, 0));
    return __dp4a(values[3], x.w, __dp4a(values[2], x.z, low));
}

// Q4_K and Q5_K: lane (pair, half) has half of sub-block 2 * pair, stored in low nibbles, and of sub-block
// 2 * pair + 1, in the high nibbles of the same bytes.
struct NibblesK {
    // How many elements have one scale.
    static constexpr int SCALE_ELEMENTS = 32;

    int low[4];
    int high[4];
    int scales[2];
    int minimum_factors[2];
    float scale;
    float minimum;
    int pair;
    int half;

    __device__ __forceinline__ void load_header(const uint8_t* block, int lane) {
        pair = lane / 2;
        half = lane % 2;
        const uint4 header = __ldg(reinterpret_cast<const uint4*>(block));
        scale = exact::from_f16(header.x & 0xffff);
        minimum = exact::from_f16(header.x >> 16);
        // Twelve bytes hold eight scales and eight minimums of 6 bits: those of sub-blocks 0 to 3 in the bytes of the
        // first two words, the low halves of the others in the third, their upper bits atop the first two.
        const int shift = 16 * (pair % 2);
        const uint32_t first = header.y >> shift, second = header.z >> shift, third = header.w >> shift;
        uint32_t both = first & 0x3f3f, minimums = second & 0x3f3f;
        if (pair >= 2) {
            both = (third & 0x0f0f) | (first >> 2 & 0x3030);
            minimums = (third >> 4 & 0x0f0f) | (second >> 2 & 0x3030);
        }
        scales[0] = byte_of(both, 0);
        scales[1] = byte_of(both, 1);
        minimum_factors[0] = byte_of(minimums, 0);
        minimum_factors[1] = byte_of(minimums, 1);
    }

    __device__ __forceinline__ void load_nibbles(const uint8_t* at) {
        const uint4 nibbles = __ldg(reinterpret_cast<const uint4*>(at));
        const uint32_t words[4] = {nibbles.x, nibbles.y, nibbles.z, nibbles.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            low[i] = words[i] & 0x0f0f0f0f;
            high[i] = words[i] >> 4 & 0x0f0f0f0f;
        }
    }

    __device__ __forceinline__ void add(const InputBlock& x, IntegerSums& sums) const {
        const int8_t* quants = x.quants + 64 * pair + 16 * half;
        sums.products += scales[0] * dot16(low, quants) + scales[1] * dot16(high, quants + 32);
        // The sums of both sub-blocks' halves, of which this lane has one each.
        const uint2 halves = __ldg(reinterpret_cast<const uint2*>(x.sums + 4 * pair));
        const int first = static_cast<int16_t>(halves.x >> (16 * half));
        const int second = static_cast<int16_t>(halves.y >> (16 * half));
        sums.minimums += minimum_factors[0] * first + minimum_factors[1] * second;
    }
};

struct Q4_K : NibblesK {
    static constexpr int BYTES = 144;
    static constexpr bool HAS_MINIMUM = true;

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        load_header(block, lane);
        load_nibbles(block + 16 + 16 * lane);
    }
};

struct Q5_K : NibblesK {
    static constexpr int BYTES = 176;
    static constexpr bool HAS_MINIMUM = true;

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        load_header(block, lane);
        load_nibbles(block + 48 + 16 * lane);
        const uint4 bits = __ldg(reinterpret_cast<const uint4*>(block + 16 + 16 * half));
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t both = words[i] >> (2 * pair);
            low[i] |= (both & 0x01010101) << 4;
            high[i] |= (both & 0x02020202) << 3;
        }
    }
};

// Q2_K, Q3_K and Q6_K: lane (half, eighth) has eight elements of each quarter of a half of the block: those from
// 128 * half + 32 * quarter + 8 * eighth on. A sub-block of 16 has one scale.
struct QuartersK {
    static constexpr int SCALE_ELEMENTS = 16;

    int values[4][2];
    int scales[4];
    float scale;
    float minimum;
    int half;
    int eighth;

    __device__ __forceinline__ void set_lane(int lane) {
        half = lane / 4;
        eighth = lane % 4;
    }

    // The sub-block of quarter q.
    __device__ __forceinline__ int sub_block(int q) const { return 8 * half + 2 * q + eighth / 2; }

    __device__ __forceinline__ void add(const InputBlock& x, IntegerSums& sums) const {
        const int8_t* quants = x.quants + 128 * half + 8 * eighth;
#pragma unroll
        for (int q = 0; q < 4; q++) {
            sums.products += scales[q] * dot8(values[q], quants + 32 * q);
        }
    }
};

struct Q2_K : QuartersK {
    static constexpr int BYTES = 84;
    static constexpr bool HAS_MINIMUM = true;

    // Those of sub-blocks 2 * lane and 2 * lane + 1.
    int minimum_factors[2];
    int first_sum;

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        set_lane(lane);
        first_sum = 2 * lane;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t bits = load_u32(block + 16 + 32 * half + 8 * eighth + 4 * i);
#pragma unroll
            for (int q = 0; q < 4; q++) {
                values[q][i] = bits >> (2 * q) & 0x03030303;
            }
        }
#pragma unroll
        for (int q = 0; q < 4; q++) {
            scales[q] = __ldg(block + sub_block(q)) & 15;
        }
        const uint32_t both = load_u16(block + 2 * lane);
        minimum_factors[0] = both >> 4 & 15;
        minimum_factors[1] = both >> 12;
        const uint32_t header = load_u32(block + 80);
        scale = exact::from_f16(header & 0xffff);
        minimum = exact::from_f16(header >> 16);
    }

    __device__ __forceinline__ void add(const InputBlock& x, IntegerSums& sums) const {
        QuartersK::add(x, sums);
        const int both = __ldg(reinterpret_cast<const int*>(x.sums + first_sum));
        sums.minimums += minimum_factors[0] * static_cast<int16_t>(both) + minimum_factors[1] * (both >> 16);
    }
};

struct Q3_K : QuartersK {
    static constexpr int BYTES = 110;
    static constexpr bool HAS_MINIMUM = false;

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        set_lane(lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t high = load_word(block + 8 * eighth + 4 * i) >> (4 * half);
            const uint32_t bits = load_word(block + 32 + 32 * half + 8 * eighth + 4 * i);
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const uint32_t third = (high >> q & 0x01010101) << 2;
                values[q][i] = less<4>((bits >> (2 * q) & 0x03030303) | third);
            }
        }
        // Sixteen scales of 6 bits: low halves in the nibbles of eight bytes, upper bits in four more.
#pragma unroll
        for (int q = 0; q < 4; q++) {
            const int i = 2 * q + eighth / 2;
            const int low = __ldg(block + 96 + i) >> (4 * half) & 15;
            const int high = __ldg(block + 104 + i % 4) >> (4 * half + i / 4 * 2) & 3;
            scales[q] = (low | high << 4) - 32;
        }
        scale = exact::from_f16(load_u16(block + 108));
        minimum = 0.0f;
    }
};

struct Q6_K : QuartersK {
    static constexpr int BYTES = 210;
    static constexpr bool HAS_MINIMUM = false;

    __device__ __forceinline__ void load(const uint8_t* block, int lane) {
        set_lane(lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = 8 * eighth + 4 * i;
            const uint32_t first = load_word(block + 64 * half + at);
            const uint32_t second = load_word(block + 64 * half + 32 + at);
            const uint32_t high = load_word(block + 128 + 32 * half + at);
            values[0][i] = less<32>((first & 0x0f0f0f0f) | (high & 0x03030303) << 4);
            values[1][i] = less<32>((second & 0x0f0f0f0f) | (high & 0x0c0c0c0c) << 2);
            values[2][i] = less<32>((first >> 4 & 0x0f0f0f0f) | (high & 0x30303030));
            values[3][i] = less<32>((second >> 4 & 0x0f0f0f0f) | (high >> 2 & 0x30303030));
        }
#pragma unroll
        for (int q = 0; q < 4; q++) {
            scales[q] = static_cast<int8_t>(__ldg(block + 192 + sub_block(q)));
        }
        scale = exact::from_f16(load_u16(block + 208));
        minimum = 0.0f;
    }
};
