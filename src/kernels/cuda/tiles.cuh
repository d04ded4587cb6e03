// What the products of many tokens share. A block of threads takes a tile of rows and of tokens: it unpacks a stretch
// of columns of both into shared memory, where every thread finds its operands for several rows and tokens, and goes on
// to the next. So weights are read and unpacked once for all tokens of a tile. Tiles of the same rows are neighbours
// along the grid's x and run at the same time: from memory, their weights come once for all tokens of the step.
//
// Where a tile is larger than what is left, the last row and the last token are computed again and not stored.
#pragma once

#include "matmul.cuh"

// Rows of a tile.
constexpr int TILE_ROWS = 64;
// A thread's rows, and how far apart they lie: neighbouring threads have neighbouring rows.
constexpr int THREAD_ROWS = 4;
constexpr int ROW_STEP = TILE_ROWS / THREAD_ROWS;
// How far apart a thread's tokens lie.
constexpr int TOKEN_STEP = 8;
// Threads that cover a tile.
constexpr int TILE_THREADS = ROW_STEP * TOKEN_STEP;

// Columns that are in shared memory at once, of 8 bits each.
constexpr int STAGE_COLUMNS = 256;
// Loads of 16 bytes that read them, and how many of these a row of shared memory has room for: with one more, the same
// columns of eight rows lie in different banks.
constexpr int STAGE_LOADS = STAGE_COLUMNS / 16;
constexpr int ROW_LOADS = STAGE_LOADS + 1;

// A thread's first row and first token in a tile. A warp has eight rows and four tokens: a load of weights reads eight
// places, one of input four.
struct Place {
    int row;
    int token;

    __device__ __forceinline__ explicit Place(int thread) {
        const int warp = thread / 32;
        row = thread % 8 + 8 * (warp % 2);
        token = thread % 32 / 8 + 4 * (warp / 2);
    }
};

// Which part of a product a block of threads computes.
struct Tile {
    uint32_t first_row;
    uint32_t first_token;
    uint32_t last_row;
    uint32_t last_token;

    // `tile_rows` and `tile_tokens` are the sizes of a tile, `rows` and `tokens` those of the product.
    __device__ __forceinline__ Tile(int tile_rows, int tile_tokens, uint32_t rows, uint32_t tokens)
        : first_row(blockIdx.y * tile_rows), first_token(blockIdx.x * tile_tokens), last_row(rows - 1),
          last_token(tokens - 1) {}

    // Rows and tokens of the product, where the tile's are.
    __device__ __forceinline__ size_t row(int index) const { return min(first_row + index, last_row); }
    __device__ __forceinline__ size_t token(int index) const { return min(first_token + index, last_token); }

    __device__ __forceinline__ void store(const Output& out, int row, int token, float sum) const {
        if (first_row + row <= last_row && first_token + token <= last_token) {
            out.y[static_cast<size_t>(first_token + token) * out.stride + first_row + row] = sum;
        }
    }
};

// a . b + c, for 16 signed bytes of each.
__device__ __forceinline__ int dot(const int4& a, const int4& b, int c) {
    return __dp4a(a.w, b.w, __dp4a(a.z, b.z, __dp4a(a.y, b.y, __dp4a(a.x, b.x, c))));
}

// The kernels of one type: `matmul_NAME_tile_TOKENS` for each size of a tile. Two blocks of threads are to fit a
// multiprocessor: while one waits for memory, the other computes.
#define TILE_KERNEL(name, format, function, threads, count)                                                       \
    extern "C" __global__ void __launch_bounds__(threads, 2) matmul_##name##_tile_##count(                           \
        const uint8_t* weights, const uint8_t* x, float* y, uint32_t rows, uint32_t columns, uint32_t tokens,     \
        uint32_t stride                                                                                           \
    ) {                                                                                                           \
        function<format, count>(weights, x, Output{y, stride}, rows, columns, tokens);                            \
    }
#define TILE_KERNELS(name, format, function, threads)  \
    TILE_KERNEL(name, format, function, threads, 16)   \
    TILE_KERNEL(name, format, function, threads, 32)
