// Activations to 8 bits, in blocks of 32 and of 256; see activations.rs for the definition and quantised_input.cuh for
// where everything goes.
#include "exact.cuh"
#include "quantised_input.cuh"

namespace {

// Scale of a block by the bits of its largest magnitude: they compare as integers, a NaN above all others.
struct BlockScale {
    float scale;
    // 0 where all quants are 0.
    float inverse;

    __device__ __forceinline__ explicit BlockScale(int largest_bits) {
        const float smallest_normal = 1.17549435e-38f;
        const float largest_finite = 3.402823466e38f;
        scale = exact::div(__int_as_float(largest_bits), 127.0f);
        inverse = 0.0f;
        if (!(scale <= largest_finite)) {
            // An infinity or a NaN makes every result that uses the block a NaN.
            scale = __int_as_float(0x7fc00000);
        } else if (scale < smallest_normal) {
            scale = 0.0f;
        } else {
            inverse = exact::div(1.0f, scale);
        }
    }

    __device__ __forceinline__ int quant(float value) const {
        if (inverse == 0.0f) {
            return 0;
        }
        // Adding 1.5 * 2^23 leaves no fraction bits: the low byte is the rounded integer, ties to even.
        return static_cast<int8_t>(__float_as_int(exact::add(exact::mul(value, inverse), 12582912.0f)));
    }

    // Four quants as a word; their sum is added to `sum`.
    __device__ __forceinline__ uint32_t word(float4 values, int& sum) const {
        const int a = quant(values.x), b = quant(values.y), c = quant(values.z), d = quant(values.w);
        sum += a + b + c + d;
        return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | static_cast<uint32_t>(d) << 24;
    }
};

__device__ __forceinline__ int magnitude(float value) { return __float_as_int(value) & 0x7fffffff; }

__device__ __forceinline__ int largest_magnitude(float4 values) {
    return max(max(magnitude(values.x), magnitude(values.y)), max(magnitude(values.z), magnitude(values.w)));
}

}  // namespace

// One lane for each four elements, eight for each block. Grid: x covers columns / 4, y is the token.
extern "C" __global__ void __launch_bounds__(256)
quantise_blocks32(const float* input, uint8_t* output, uint32_t columns, uint32_t tokens) {
    const Quantised32 out(output, columns, tokens);
    const uint32_t token = blockIdx.y;
    const uint32_t four = blockIdx.x * blockDim.x + threadIdx.x;
    // Blocks are whole, so the eight lanes of one leave together; the others still take part in the shuffles.
    const bool is_inside = four < columns / 4;
    float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (is_inside) {
        values = reinterpret_cast<const float4*>(input + static_cast<size_t>(token) * columns)[four];
    }
    int largest = largest_magnitude(values);
    for (int distance = 4; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    }
    const BlockScale block(largest);
    int sum = 0;
    const uint32_t word = block.word(values, sum);
    for (int distance = 4; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    }
    if (!is_inside) {
        return;
    }
    const uint32_t index = four / 8;
    const uint32_t place = four % 4 * 2 + four % 8 / 4;
    uint32_t* quants = reinterpret_cast<uint32_t*>(out.quants + static_cast<size_t>(token) * columns);
    quants[8 * index + place] = word;
    if (four % 8 == 0) {
        ScaleAndSum* scales = out.scales + static_cast<size_t>(token) * (columns / 32);
        scales[index] = {block.scale, sum};
    }
}

// One warp for each block, eight elements a lane. Grid: x covers columns / 8, y is the token.
extern "C" __global__ void __launch_bounds__(256)
quantise_blocks256(const float* input, uint8_t* output, uint32_t columns, uint32_t tokens) {
    const Quantised256 out(output, columns, tokens);
    const uint32_t token = blockIdx.y;
    const uint32_t eight = blockIdx.x * blockDim.x + threadIdx.x;
    if (eight >= columns / 8) {
        // Whole warps only.
        return;
    }
    const float4* values = reinterpret_cast<const float4*>(input + static_cast<size_t>(token) * columns);
    const float4 first = values[2 * eight];
    const float4 second = values[2 * eight + 1];
    int largest = max(largest_magnitude(first), largest_magnitude(second));
    for (int distance = 16; distance > 0; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    }
    const BlockScale block(largest);
    int sum = 0;
    uint2 words;
    words.x = block.word(first, sum);
    words.y = block.word(second, sum);
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    reinterpret_cast<uint2*>(out.quants + static_cast<size_t>(token) * columns)[eight] = words;
    if (eight % 2 == 0) {
        out.sums[static_cast<size_t>(token) * (columns / 16) + eight / 2] = static_cast<int16_t>(sum);
    }
    if (eight % 32 == 0) {
        out.scales[static_cast<size_t>(token) * (columns / 256) + eight / 32] = block.scale;
    }
}
