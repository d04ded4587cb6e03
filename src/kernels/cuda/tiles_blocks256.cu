// Products of many tokens with weights in blocks of 256: Q2_K to Q6_K.
//
// A stage is one block of each row. A thread has four rows and two or four tokens and holds their four partial sums
// each; in between, a block's sum stays in integers. The arithmetic for 64 rows, 32 tokens and one block of Q4_K:
//   reads        64 * 144 bytes of weights, 32 * 292 of input: 18.6 kB, for
//   multiplies   64 * 32 * 64 dp4a, at 64 a cycle 2,048 cycles: 9 bytes a cycle, where a multiprocessor gets 32 or
//                more from the second cache. Memory gives the weights once for all tiles of a step: it would be the
//                limit below some 20 tokens of a card with 1 TB/s and 9 * 10^12 dp4a/s.
//   loads        eight times 16 bytes of shared memory for 64 dp4a of a thread.
#include "formats256.cuh"
#include "quantised_input.cuh"
#include "tiles.cuh"

namespace {

// A block of each row, and of each token.
template <int TOKENS>
struct Stage256 {
    int4 values[TILE_ROWS][ROW_LOADS];
    int4 quants[TOKENS][ROW_LOADS];
    // Of each 16 elements, or of each 32 where the format has no more.
    alignas(16) int8_t scales[TILE_ROWS][16];
    // Of each 16 elements.
    alignas(16) int8_t minimums[TILE_ROWS][16];
    // Of each 16 quants, 16 bits.
    int4 sums[TOKENS][2];
    // Scale and minimum.
    float2 row_scales[TILE_ROWS];
    float token_scales[TOKENS];
};

// What a lane has of a block, to a row of a stage.
__device__ __forceinline__ void unpack(const NibblesK& block, int4* values, int8_t* scales, int8_t* minimums) {
    const int at = 4 * block.pair + block.half;
    values[at] = make_int4(block.low[0], block.low[1], block.low[2], block.low[3]);
    values[at + 2] = make_int4(block.high[0], block.high[1], block.high[2], block.high[3]);
    if (block.half == 0) {
        const int first = block.minimum_factors[0], second = block.minimum_factors[1];
        reinterpret_cast<char2*>(scales)[block.pair] = make_char2(block.scales[0], block.scales[1]);
        reinterpret_cast<char4*>(minimums)[block.pair] = make_char4(first, first, second, second);
    }
}

__device__ __forceinline__ void unpack(const QuartersK& block, int4* values, int8_t* scales, int8_t*) {
    int2* eights = reinterpret_cast<int2*>(values) + 16 * block.half + block.eighth;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        eights[4 * q] = make_int2(block.values[q][0], block.values[q][1]);
        if (block.eighth % 2 == 0) {
            scales[block.sub_block(q)] = static_cast<int8_t>(block.scales[q]);
        }
    }
}

__device__ __forceinline__ void unpack(const Q2_K& block, int4* values, int8_t* scales, int8_t* minimums) {
    unpack(static_cast<const QuartersK&>(block), values, scales, minimums);
    reinterpret_cast<char2*>(minimums + block.first_sum)[0] =
        make_char2(block.minimum_factors[0], block.minimum_factors[1]);
}

// Fills the stage with block `index` of the tile's rows and tokens.
template <class Format, int TOKENS>
__device__ __forceinline__ void load_stage(
    Stage256<TOKENS>& stage, const uint8_t* weights, const Quantised256& input, const Tile& tile, uint32_t index,
    uint32_t blocks
) {
    // Eight lanes for each block.
    const int lane = threadIdx.x % 8;
    for (int row = threadIdx.x / 8; row < TILE_ROWS; row += TILE_THREADS / 8) {
        Format block;
        block.load(weights + (tile.row(row) * blocks + index) * Format::BYTES, lane);
        unpack(block, stage.values[row], stage.scales[row], stage.minimums[row]);
        if (lane == 0) {
            stage.row_scales[row] = make_float2(block.scale, block.minimum);
        }
    }
    for (int i = threadIdx.x; i < TOKENS * STAGE_LOADS; i += TILE_THREADS) {
        const int token = i / STAGE_LOADS, load = i % STAGE_LOADS;
        const int8_t* quants = input.quants + (tile.token(token) * blocks + index) * 256;
        stage.quants[token][load] = __ldg(reinterpret_cast<const int4*>(quants) + load);
    }
    if (Format::HAS_MINIMUM && threadIdx.x < TOKENS * 2) {
        const int token = threadIdx.x / 2, load = threadIdx.x % 2;
        const int16_t* sums = input.sums + (tile.token(token) * blocks + index) * 16;
        stage.sums[token][load] = __ldg(reinterpret_cast<const int4*>(sums) + load);
    }
    if (threadIdx.x < TOKENS) {
        stage.token_scales[threadIdx.x] = __ldg(input.scales + tile.token(threadIdx.x) * blocks + index);
    }
}

// The sum of minimum * sum of quants over a block.
__device__ __forceinline__ int minimum_sum(const int4& minimums, const int4 (&sums)[2]) {
    int sum = __dp2a_lo(sums[0].x, minimums.x, 0);
    sum = __dp2a_hi(sums[0].y, minimums.x, sum);
    sum = __dp2a_lo(sums[0].z, minimums.y, sum);
    sum = __dp2a_hi(sums[0].w, minimums.y, sum);
    sum = __dp2a_lo(sums[1].x, minimums.z, sum);
    sum = __dp2a_hi(sums[1].y, minimums.z, sum);
    sum = __dp2a_lo(sums[1].z, minimums.w, sum);
    return __dp2a_hi(sums[1].w, minimums.w, sum);
}

// A thread's partial sums. Which of the four the next block is added to would be an index into registers, which
// there is not: it is always the first, and they move up after each block.
template <class Format, int THREAD_TOKENS>
struct Sums256 {
    float partial[4][THREAD_ROWS][THREAD_TOKENS];

    template <int TOKENS>
    __device__ __forceinline__ void add(const Stage256<TOKENS>& stage, const Place& place) {
        constexpr int SCALE_ELEMENTS = Format::SCALE_ELEMENTS;
        int products[THREAD_ROWS][THREAD_TOKENS] = {};
#pragma unroll 1
        for (int part = 0; part < 256 / SCALE_ELEMENTS; part++) {
            int sums[THREAD_ROWS][THREAD_TOKENS] = {};
#pragma unroll
            for (int load = 0; load < SCALE_ELEMENTS / 16; load++) {
                const int at = part * (SCALE_ELEMENTS / 16) + load;
                int4 values[THREAD_ROWS];
#pragma unroll
                for (int r = 0; r < THREAD_ROWS; r++) {
                    values[r] = stage.values[place.row + r * ROW_STEP][at];
                }
#pragma unroll
                for (int t = 0; t < THREAD_TOKENS; t++) {
                    const int4 quants = stage.quants[place.token + t * TOKEN_STEP][at];
#pragma unroll
                    for (int r = 0; r < THREAD_ROWS; r++) {
                        sums[r][t] = dot(values[r], quants, sums[r][t]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; r++) {
                const int scale = stage.scales[place.row + r * ROW_STEP][part];
#pragma unroll
                for (int t = 0; t < THREAD_TOKENS; t++) {
                    products[r][t] += scale * sums[r][t];
                }
            }
        }
#pragma unroll
        for (int t = 0; t < THREAD_TOKENS; t++) {
            const int token = place.token + t * TOKEN_STEP;
            const float token_scale = stage.token_scales[token];
            const int4 sums[2] = {stage.sums[token][0], stage.sums[token][1]};
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; r++) {
                const int row = place.row + r * ROW_STEP;
                const float2 row_scale = stage.row_scales[row];
                float& sum = partial[0][r][t];
                sum = exact::fma(exact::mul(row_scale.x, token_scale), static_cast<float>(products[r][t]), sum);
                if (Format::HAS_MINIMUM) {
                    const int4 minimums = *reinterpret_cast<const int4*>(stage.minimums[row]);
                    const float minimum = exact::mul(row_scale.y, token_scale);
                    sum = exact::fma(-minimum, static_cast<float>(minimum_sum(minimums, sums)), sum);
                }
            }
        }
        move_up();
    }

    __device__ __forceinline__ void move_up() {
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; r++) {
#pragma unroll
            for (int t = 0; t < THREAD_TOKENS; t++) {
                const float first = partial[0][r][t];
                partial[0][r][t] = partial[1][r][t];
                partial[1][r][t] = partial[2][r][t];
                partial[2][r][t] = partial[3][r][t];
                partial[3][r][t] = first;
            }
        }
    }
};

// Grid: x covers the tokens, y the rows.
template <class Format, int TOKENS>
__device__ __forceinline__ void multiply(
    const uint8_t* weights, const uint8_t* x, const Output& out, uint32_t rows, uint32_t columns, uint32_t tokens
) {
    constexpr int THREAD_TOKENS = TOKENS / TOKEN_STEP;
    __shared__ Stage256<TOKENS> stage;
    const Tile tile(TILE_ROWS, TOKENS, rows, tokens);
    const Place place(threadIdx.x);
    const Quantised256 input(const_cast<uint8_t*>(x), columns, tokens);
    const uint32_t blocks = columns / 256;
    Sums256<Format, THREAD_TOKENS> sums = {};
#pragma unroll 1
    for (uint32_t index = 0; index < blocks; index++) {
        // What is there has been used by all.
        __syncthreads();
        load_stage<Format, TOKENS>(stage, weights, input, tile, index, blocks);
        __syncthreads();
        sums.add(stage, place);
    }
    // Back to their places.
    for (uint32_t index = blocks; index % 4 != 0; index++) {
        sums.move_up();
    }
#pragma unroll
    for (int t = 0; t < THREAD_TOKENS; t++) {
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; r++) {
            const float low = exact::add(sums.partial[0][r][t], sums.partial[1][r][t]);
            const float high = exact::add(sums.partial[2][r][t], sums.partial[3][r][t]);
            tile.store(out, place.row + r * ROW_STEP, place.token + t * TOKEN_STEP, exact::add(low, high));
        }
    }
}

}  // namespace

TILE_KERNELS(q2_k, Q2_K, multiply, TILE_THREADS)
TILE_KERNELS(q3_k, Q3_K, multiply, TILE_THREADS)
TILE_KERNELS(q4_k, Q4_K, multiply, TILE_THREADS)
TILE_KERNELS(q5_k, Q5_K, multiply, TILE_THREADS)
TILE_KERNELS(q6_k, Q6_K, multiply, TILE_THREADS)
