// Operations on activations, element by element: the norm, the gate, biases and rotary positions. Rows are tokens.
#include "exact.cuh"

namespace {

// Elements of a row that are at hand at once.
constexpr uint32_t NORM_CHUNK = 2048;
constexpr uint32_t NORM_THREADS = 256;

}  // namespace

// x += delta, where `delta` is not null; out = x / sqrt(mean of x^2 + epsilon) * weight, where `out` may be x. Grid: a block
// for each row.
//
// Squares are added as a row of float weights is: sixteen partial sums, a chain of fused multiply-adds each. The chains
// are one half-warp's; the others fetch the next chunk meanwhile.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
add_rms_norm(float* x, const float* delta, const float* weight, float* out, uint32_t columns, float epsilon) {
    __shared__ float chunks[2][NORM_CHUNK];
    __shared__ float shared_scale;
    const uint32_t lane = threadIdx.x;
    float* row = x + static_cast<size_t>(blockIdx.x) * columns;
    const float* added = delta + static_cast<size_t>(blockIdx.x) * columns;
    float* normal = out + static_cast<size_t>(blockIdx.x) * columns;
    float sum = 0.0f;
    for (uint32_t start = 0, turn = 0; start < columns; start += NORM_CHUNK, turn ^= 1) {
        float* chunk = chunks[turn];
        const uint32_t count = min(NORM_CHUNK, columns - start);
        // Whole vectors of sixteen: zeros follow the end of a row.
        const uint32_t padded = (count + 15) / 16 * 16;
        for (uint32_t i = lane; i < padded; i += NORM_THREADS) {
            float value = 0.0f;
            if (i < count) {
                value = row[start + i];
                if (delta != nullptr) {
                    value = exact::add(value, added[start + i]);
                    row[start + i] = value;
                }
            }
            chunk[i] = value;
        }
        // The other chunk is free by now: whoever adds it up passes here only when that is done.
        __syncthreads();
        if (lane < 16) {
#pragma unroll 8
            for (uint32_t i = lane; i < padded; i += 16) {
                sum = exact::fma(chunk[i], chunk[i], sum);
            }
        }
    }
    if (lane < 32) {
        for (int distance = 8; distance > 0; distance /= 2) {
            sum = exact::add(sum, __shfl_xor_sync(ALL_LANES, sum, distance));
        }
        if (lane == 0) {
            const float mean = exact::div(sum, static_cast<float>(columns));
            shared_scale = exact::div(1.0f, exact::root(exact::add(mean, epsilon)));
        }
    }
    __syncthreads();
    const float scale = shared_scale;
    // Each thread reads what it has written itself.
    for (uint32_t start = 0; start < columns; start += NORM_CHUNK) {
        const uint32_t count = min(NORM_CHUNK, columns - start);
        for (uint32_t i = lane; i < count; i += NORM_THREADS) {
            normal[start + i] = exact::mul(exact::mul(row[start + i], scale), __ldg(weight + start + i));
        }
    }
}

// gate = silu(gate) * up, where silu(x) = x / (1 + e^-x). Grid: x covers the elements.
extern "C" __global__ void __launch_bounds__(256) silu_mul(float* gate, const float* up, uint64_t count) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) {
        const float x = gate[i];
        const float denominator = exact::add(1.0f, exact::exp(exact::sub(0.0f, x)));
        gate[i] = exact::mul(exact::div(x, denominator), __ldg(up + i));
    }
}

// gate = gelu(gate) * up, where gelu(x) = x / (1 + e^-t) with t = 2 sqrt(2 / pi) (x + 0.044715 x^3): the approximation by a
// hyperbolic tangent. Grid: x covers the elements.
extern "C" __global__ void __launch_bounds__(256) gelu_mul(float* gate, const float* up, uint64_t count) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) {
        const float x = gate[i];
        const float exponent = exact::mul(x, exact::fma(exact::mul(x, x), 0.071354814f, 1.5957692f));
        const float denominator = exact::add(1.0f, exact::exp(exact::sub(0.0f, exponent)));
        gate[i] = exact::mul(exact::div(x, denominator), __ldg(up + i));
    }
}

// x *= factor. Grid: x covers the elements.
extern "C" __global__ void __launch_bounds__(256) scale(float* x, float factor, uint64_t count) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] = exact::mul(x[i], factor);
    }
}

// y[token][i] += bias[i]. Grid: x covers the columns, y is the token.
extern "C" __global__ void __launch_bounds__(256) add_bias(float* y, const float* bias, uint32_t columns) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < columns) {
        float* value = y + static_cast<size_t>(blockIdx.y) * columns + i;
        *value = exact::add(*value, __ldg(bias + i));
    }
}

// Rotates the first 2 * pairs elements of each head of x, [tokens][heads][head_length], by `rotations`,
// [tokens][pairs] of cosine and sine. Pair i is the elements 2i and 2i + 1 or, with `halves`, i and i + pairs. Grid: x
// covers heads * pairs, y is the token.
extern "C" __global__ void __launch_bounds__(256) rope(
    float* x, const float2* rotations, uint32_t heads, uint32_t head_length, uint32_t pairs, uint32_t halves
) {
    const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= heads * pairs) {
        return;
    }
    const uint32_t head = index / pairs;
    const uint32_t pair = index % pairs;
    const float2 rotation = __ldg(rotations + static_cast<size_t>(blockIdx.y) * pairs + pair);
    float* elements = x + (static_cast<size_t>(blockIdx.y) * heads + head) * head_length;
    float* first = elements + (halves ? pair : 2 * pair);
    float* second = elements + (halves ? pair + pairs : 2 * pair + 1);
    const float a = *first, b = *second;
    *first = exact::sub(exact::mul(a, rotation.x), exact::mul(b, rotation.y));
    *second = exact::add(exact::mul(a, rotation.y), exact::mul(b, rotation.x));
}
