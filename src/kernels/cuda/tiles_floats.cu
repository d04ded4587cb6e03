// Products of many tokens with F32, F16 and BF16 weights.
//
// Half a warp holds the sixteen partial sums of each of its outputs, one a lane, as the narrow kernels do: eight rows
// and four or eight tokens. A stage is 64 columns, as f32. The arithmetic for 32 rows, 32 tokens and a stage of F16:
//   reads        32 * 128 bytes of weights, 32 * 256 of input: 12.3 kB, for
//   multiplies   32 * 32 * 64 fused multiply-adds, 512 or 1,024 cycles at 128 or 64 a cycle: 24 or 12 bytes a cycle.
//   loads        sixteen words of shared memory for 64 multiply-adds of a thread.
#include "floats.cuh"
#include "tiles.cuh"

namespace {

constexpr int THREADS = 256;
// Lanes, and so partial sums, of an output.
constexpr int LANES = 16;
// Half warps along the rows and along the tokens of a tile. The two of a warp have the same tokens.
constexpr int GROUPS = 4;
constexpr int GROUP_ROWS = 8;
constexpr int FLOAT_TILE_ROWS = GROUPS * GROUP_ROWS;
constexpr int FLOAT_STAGE_COLUMNS = 64;
// Two more than there are: rows of two half warps, eight apart, then lie in different banks.
constexpr int FLOAT_STAGE_STRIDE = FLOAT_STAGE_COLUMNS + 2;

template <int TOKENS>
struct FloatStage {
    float weights[FLOAT_TILE_ROWS][FLOAT_STAGE_STRIDE];
    float inputs[TOKENS][FLOAT_STAGE_STRIDE];
};

// Fills the stage from column `first` on; zeros follow the last.
template <class Format, int TOKENS>
__device__ __forceinline__ void load_stage(
    FloatStage<TOKENS>& stage, const uint8_t* weights, const float* x, const Tile& tile, uint32_t first,
    uint32_t columns
) {
    const uint32_t column = threadIdx.x % FLOAT_STAGE_COLUMNS;
    const bool is_inside = first + column < columns;
    for (int row = threadIdx.x / FLOAT_STAGE_COLUMNS; row < FLOAT_TILE_ROWS; row += THREADS / FLOAT_STAGE_COLUMNS) {
        const uint8_t* from = weights + tile.row(row) * columns * Format::BYTES;
        stage.weights[row][column] = is_inside ? Format::load(from, first + column) : 0.0f;
    }
    for (int token = threadIdx.x / FLOAT_STAGE_COLUMNS; token < TOKENS; token += THREADS / FLOAT_STAGE_COLUMNS) {
        const float* from = x + tile.token(token) * columns;
        stage.inputs[token][column] = is_inside ? __ldg(from + first + column) : 0.0f;
    }
}

// Grid: x covers the tokens, y the rows.
template <class Format, int TOKENS>
__device__ __forceinline__ void multiply(
    const uint8_t* weights, const uint8_t* x, const Output& out, uint32_t rows, uint32_t columns, uint32_t tokens
) {
    constexpr int GROUP_TOKENS = TOKENS / GROUPS;
    __shared__ FloatStage<TOKENS> stage;
    const Tile tile(FLOAT_TILE_ROWS, TOKENS, rows, tokens);
    const int lane = threadIdx.x % LANES;
    const int first_row = threadIdx.x / LANES % GROUPS * GROUP_ROWS;
    const int first_token = threadIdx.x / LANES / GROUPS * GROUP_TOKENS;
    float sums[GROUP_ROWS][GROUP_TOKENS] = {};
#pragma unroll 1
    for (uint32_t first = 0; first < columns; first += FLOAT_STAGE_COLUMNS) {
        // What is there has been used by all.
        __syncthreads();
        load_stage<Format, TOKENS>(stage, weights, reinterpret_cast<const float*>(x), tile, first, columns);
        __syncthreads();
        // No sixteen more than the row has: adding zeros once more could turn -0 to 0.
        const uint32_t end = min(static_cast<uint32_t>(FLOAT_STAGE_COLUMNS), columns - first);
#pragma unroll 1
        for (uint32_t element = lane; element - lane < end; element += LANES) {
            float inputs[GROUP_TOKENS];
#pragma unroll
            for (int t = 0; t < GROUP_TOKENS; t++) {
                inputs[t] = stage.inputs[first_token + t][element];
            }
#pragma unroll
            for (int r = 0; r < GROUP_ROWS; r++) {
                const float weight = stage.weights[first_row + r][element];
#pragma unroll
                for (int t = 0; t < GROUP_TOKENS; t++) {
                    sums[r][t] = exact::fma(weight, inputs[t], sums[r][t]);
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < GROUP_TOKENS; t++) {
        // Lane r stores row r.
        float mine = 0.0f;
#pragma unroll
        for (int r = 0; r < GROUP_ROWS; r++) {
            float sum = sums[r][t];
            for (int distance = LANES / 2; distance > 0; distance /= 2) {
                sum = exact::add(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
            }
            mine = lane == r ? sum : mine;
        }
        if (lane < GROUP_ROWS) {
            tile.store(out, first_row + lane, first_token + t, mine);
        }
    }
}

}  // namespace

TILE_KERNELS(f32, F32, multiply, THREADS)
TILE_KERNELS(f16, F16, multiply, THREADS)
TILE_KERNELS(bf16, BF16, multiply, THREADS)
