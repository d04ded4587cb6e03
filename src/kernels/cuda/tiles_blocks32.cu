// Products of many tokens with weights in blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//
// A stage is eight blocks of each row, one for each partial sum. Half of the threads take the even blocks, half the odd
// ones: a thread has four rows and two or four tokens and holds four partial sums of each, whose additions at the end
// are those of the definition; the odd half's follows last. The arithmetic for 64 rows, 32 tokens and a stage of Q4_0:
//   reads        64 * 144 bytes of weights, 32 * 320 of input: 19.5 kB, for
//   multiplies   64 * 32 * 64 dp4a, 2,048 cycles of a multiprocessor: as tiles_blocks256.cu has it.
//   adds         one multiplication, conversion and fused multiply-add for each eight dp4a, beside them.
#include "formats32.cuh"
#include "quantised_input.cuh"
#include "tiles.cuh"

namespace {

constexpr int THREADS = 2 * TILE_THREADS;
constexpr int STAGE_BLOCKS = STAGE_COLUMNS / 32;

// Eight blocks of each row, and of each token. Words inside a block have the order of the quantised input.
template <int TOKENS>
struct Stage32 {
    int4 values[TILE_ROWS][ROW_LOADS];
    int4 quants[TOKENS][ROW_LOADS];
    // Scale, and the scaled sum of quants. A column more than there is keeps those who write out of each other's banks.
    float2 token_scales[STAGE_BLOCKS][TOKENS + 1];
    float scales[STAGE_BLOCKS][TILE_ROWS + 1];
    float minimums[STAGE_BLOCKS][TILE_ROWS + 1];
};

// Fills the stage with `count` blocks of the tile's rows and tokens from block `first` on.
template <class Format, int TOKENS>
__device__ __forceinline__ void load_stage(
    Stage32<TOKENS>& stage, const uint8_t* weights, const Quantised32& input, const Tile& tile, uint32_t first,
    uint32_t count, uint32_t blocks
) {
    // Four lanes for each block, a warp for eight of a row.
    const uint32_t quarter = threadIdx.x % 4;
    const uint32_t block = threadIdx.x % 32 / 4;
    for (int row = threadIdx.x / 32; block < count && row < TILE_ROWS; row += THREADS / 32) {
        const Part32 part =
            Format::load(weights + (tile.row(row) * blocks + first + block) * Format::BYTES, quarter);
        reinterpret_cast<int2*>(stage.values[row])[4 * block + quarter] = make_int2(part.low, part.high);
        if (quarter == 0) {
            stage.scales[block][row] = part.scale;
            if (Format::HAS_MINIMUM) {
                stage.minimums[block][row] = part.minimum;
            }
        }
    }
    for (uint32_t i = threadIdx.x; i < TOKENS * STAGE_LOADS; i += THREADS) {
        const uint32_t token = i / STAGE_LOADS, load = i % STAGE_LOADS;
        if (load / 2 < count) {
            const int8_t* quants = input.quants + (tile.token(token) * blocks + first) * 32;
            stage.quants[token][load] = __ldg(reinterpret_cast<const int4*>(quants) + load);
        }
    }
    for (uint32_t i = threadIdx.x; i < TOKENS * STAGE_BLOCKS; i += THREADS) {
        const uint32_t token = i / STAGE_BLOCKS, index = i % STAGE_BLOCKS;
        if (index < count) {
            const ScaleAndSum* from = input.scales + tile.token(token) * blocks + first + index;
            const int2 both = __ldg(reinterpret_cast<const int2*>(from));
            const float scale = __int_as_float(both.x);
            stage.token_scales[index][token] = make_float2(scale, exact::mul(scale, static_cast<float>(both.y)));
        }
    }
}

// A thread's partial sums: those of even or of odd blocks.
template <class Format, int THREAD_TOKENS>
struct Sums32 {
    float partial[4][THREAD_ROWS][THREAD_TOKENS];

    // Adds block `block` of the stage to partial sum `p`.
    template <int TOKENS>
    __device__ __forceinline__ void add(const Stage32<TOKENS>& stage, const Place& place, int p, int block) {
        int sums[THREAD_ROWS][THREAD_TOKENS] = {};
#pragma unroll
        for (int load = 0; load < 2; load++) {
            int4 values[THREAD_ROWS];
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; r++) {
                values[r] = stage.values[place.row + r * ROW_STEP][2 * block + load];
            }
#pragma unroll
            for (int t = 0; t < THREAD_TOKENS; t++) {
                const int4 quants = stage.quants[place.token + t * TOKEN_STEP][2 * block + load];
#pragma unroll
                for (int r = 0; r < THREAD_ROWS; r++) {
                    sums[r][t] = dot(values[r], quants, sums[r][t]);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < THREAD_TOKENS; t++) {
            const float2 token_scale = stage.token_scales[block][place.token + t * TOKEN_STEP];
#pragma unroll
            for (int r = 0; r < THREAD_ROWS; r++) {
                const int row = place.row + r * ROW_STEP;
                const float scale = exact::mul(stage.scales[block][row], token_scale.x);
                float& sum = partial[p][r][t];
                sum = exact::fma(scale, static_cast<float>(sums[r][t]), sum);
                if (Format::HAS_MINIMUM) {
                    sum = exact::fma(stage.minimums[block][row], token_scale.y, sum);
                }
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
    __shared__ union {
        Stage32<TOKENS> stage;
        // The odd half's sums.
        float odd[THREAD_ROWS * THREAD_TOKENS][TILE_THREADS];
    } shared;
    const Tile tile(TILE_ROWS, TOKENS, rows, tokens);
    const int thread = threadIdx.x % TILE_THREADS;
    const int parity = threadIdx.x / TILE_THREADS;
    const Place place(thread);
    const Quantised32 input(const_cast<uint8_t*>(x), columns, tokens);
    const uint32_t blocks = columns / 32;
    Sums32<Format, THREAD_TOKENS> sums = {};
#pragma unroll 1
    for (uint32_t first = 0; first < blocks; first += STAGE_BLOCKS) {
        const uint32_t count = min(static_cast<uint32_t>(STAGE_BLOCKS), blocks - first);
        // What is there has been used by all.
        __syncthreads();
        load_stage<Format, TOKENS>(shared.stage, weights, input, tile, first, count, blocks);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < 4; p++) {
            if (2 * p + parity < count) {
                sums.add(shared.stage, place, p, 2 * p + parity);
            }
        }
    }
    // p0 .. p3 of this half are partial sums 0, 2, 4, 6 or 1, 3, 5, 7 of the definition.
    float half[THREAD_ROWS][THREAD_TOKENS];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < THREAD_ROWS; r++) {
#pragma unroll
        for (int t = 0; t < THREAD_TOKENS; t++) {
            const float first = exact::add(sums.partial[0][r][t], sums.partial[2][r][t]);
            const float second = exact::add(sums.partial[1][r][t], sums.partial[3][r][t]);
            half[r][t] = exact::add(first, second);
            if (parity == 1) {
                shared.odd[r * THREAD_TOKENS + t][thread] = half[r][t];
            }
        }
    }
    __syncthreads();
    if (parity == 1) {
        return;
    }
#pragma unroll
    for (int t = 0; t < THREAD_TOKENS; t++) {
#pragma unroll
        for (int r = 0; r < THREAD_ROWS; r++) {
            const float sum = exact::add(half[r][t], shared.odd[r * THREAD_TOKENS + t][thread]);
            tile.store(out, place.row + r * ROW_STEP, place.token + t * TOKEN_STEP, sum);
        }
    }
}

}  // namespace

TILE_KERNELS(q4_0, Q4_0, multiply, THREADS)
TILE_KERNELS(q4_1, Q4_1, multiply, THREADS)
TILE_KERNELS(q5_0, Q5_0, multiply, THREADS)
TILE_KERNELS(q5_1, Q5_1, multiply, THREADS)
TILE_KERNELS(q8_0, Q8_0, multiply, THREADS)
