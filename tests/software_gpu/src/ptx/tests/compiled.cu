// Kernels that make a compiler use much of PTX. compiled.ptx is what nvcc 13.0 makes of them:
// nvcc -ptx -arch=compute_75 -O3 -std=c++17 compiled.cu -o compiled.ptx (its headers need those of nvidia-cuda-cccl).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

__constant__ float weights[4] = {0.5f, 1.5f, -2.0f, 4.0f};
__device__ const uint8_t table[16] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};

__device__ float reduce(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// One block: softmax of n values, and their logarithms' sum.
extern "C" __global__ void softmax(const float *x, float *y, int n) {
    __shared__ float partial[32];
    float largest = -INFINITY;
    for (int i = threadIdx.x; i < n; i += blockDim.x) largest = fmaxf(largest, x[i]);
    for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_down_sync(~0u, largest, offset));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = largest;
    __syncthreads();
    largest = partial[0];
    for (int i = 1; i < blockDim.x / 32; i++) largest = fmaxf(largest, partial[i]);
    __syncthreads();
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += expf(x[i] - largest);
    sum = reduce(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < blockDim.x / 32; i++) sum += partial[i];
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = expf(x[i] - largest) / sum;
}

// Each thread: 12 functions of one value.
extern "C" __global__ void functions(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float a = x[i];
    float *out = y + i * 12;
    out[0] = sinf(a);
    out[1] = cosf(a * 1000.0f);
    out[2] = expf(a);
    out[3] = logf(fabsf(a) + 1e-3f);
    out[4] = tanhf(a);
    out[5] = powf(fabsf(a) + 0.1f, 1.7f);
    out[6] = sqrtf(fabsf(a));
    out[7] = rsqrtf(fabsf(a) + 1.0f);
    out[8] = erff(a);
    out[9] = rintf(a) + floorf(a) + ceilf(a) + truncf(a);
    out[10] = (float)(sin((double)a) / 3.0);
    out[11] = fmodf(a, 0.7f);
}

// Each thread: integers of all widths; divisions, shifts, switches and local arrays.
extern "C" __global__ void integers(const uint32_t *x, uint64_t *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    uint32_t a = x[i], b = x[(i + 1) % n];
    uint64_t wide = ((uint64_t)a << 32) | b;
    uint64_t sum = wide / (b | 1) + wide % 1000003 + (int64_t)(int32_t)a / 7 + (int32_t)b % 13;
    switch (a % 7) {
    case 0: sum += __popc(b); break;
    case 1: sum ^= __brev(a); break;
    case 2: sum += __clz(b) + __ffs(a); break;
    case 3: sum -= __umulhi(a, b); break;
    case 4: sum += (int8_t)a * (int16_t)b; break;
    case 5: sum += __byte_perm(a, b, 0x2541); break;
    default: sum += __funnelshift_l(a, b, 5);
    }
    uint32_t local[8];
    for (int k = 0; k < 8; k++) local[k] = a * k + b;
    for (uint32_t k = 0; k < (b & 15); k++) local[(a + k) & 7] ^= local[k & 7] + table[(a + k) & 15];
    for (int k = 0; k < 8; k++) sum = sum * 31 + local[(k + b) & 7];
    sum += (uint64_t)__dp4a((int)a, (int)b, (int)i) + max((int)a, (int)b) + min(a, b);
    y[i] = sum;
}

// Half floats of both kinds.
extern "C" __global__ void halves(const __half *x, const __nv_bfloat16 *z, float *y, __half *h, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __half a = x[i], b = x[(i + 7) % n];
    __half2 pair = __halves2half2(a, b);
    pair = __hfma2(pair, pair, __float2half2_rn(0.25f));
    float bf = __bfloat162float(z[i]);
    y[i] = __half2float(__hadd(a, b)) + __low2float(pair) * __high2float(pair) + bf + weights[i & 3];
    h[i] = __hmax(__float2half(bf), __hmul(a, b));
}

// A histogram in shared memory, merged with atomics, and a count of those above a limit by votes.
extern "C" __global__ void histogram(const uint8_t *x, unsigned *bins, unsigned *above, float *total, int n) {
    __shared__ unsigned counts[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) counts[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&counts[x[i]], 1u);
        unsigned votes = __ballot_sync(__activemask(), x[i] >= 128);
        if (votes != 0 && (threadIdx.x & 31) == __ffs(votes) - 1) atomicAdd(above, __popc(votes));
        atomicAdd(total, (float)x[i]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (counts[i] != 0) atomicAdd(&bins[i], counts[i]);
}

// A product of two matrices with tiles in shared memory whose size the launch gives.
extern "C" __global__ void product(const float *a, const float *b, float *c, int n) {
    extern __shared__ float tiles[];
    float *ta = tiles, *tb = tiles + 16 * 16;
    int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int k = 0; k < n; k += 16) {
        ta[threadIdx.y * 16 + threadIdx.x] = row < n && k + threadIdx.x < n ? a[row * n + k + threadIdx.x] : 0;
        tb[threadIdx.y * 16 + threadIdx.x] = column < n && k + threadIdx.y < n ? b[(k + threadIdx.y) * n + column] : 0;
        __syncthreads();
        for (int j = 0; j < 16; j++) sum = fmaf(ta[threadIdx.y * 16 + j], tb[j * 16 + threadIdx.x], sum);
        __syncthreads();
    }
    if (row < n && column < n) c[row * n + column] = sum;
}
