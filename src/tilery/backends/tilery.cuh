// What several kernels share: values moved 16 bytes at a time and widened to float, and sums and maxima over a block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using i64 = long long;  // offsets: row * stride overflows int past 2**31 elements

// N neighbours that one instruction moves; N * sizeof(T) is 16, or N is 1 where addresses allow no more.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T at[N];
};

template <typename T, int N>
__device__ void load(float (&values)[N], const T* from) {
    const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = static_cast<float>(pack.at[i]);
}

template <typename T, int N>
__device__ void store(T* to, const float (&values)[N]) {
    Pack<T, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = static_cast<T>(values[i]);
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

struct Sum {
    static constexpr float start = 0.0f;
    static __device__ float join(float a, float b) { return a + b; }
};

struct Max {  // starts finite: -inf - (-inf) would make a NaN where a row begins with -inf; drops NaN, which a sum carries
    static constexpr float start = -3.402823466e38f;
    static __device__ float join(float a, float b) { return fmaxf(a, b); }
};

template <typename Op>
__device__ float reduce_warp(float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = Op::join(value, __shfl_xor_sync(0xffffffff, value, mask));
    return value;
}

// Every thread of the block gets the result. Once per Op in a kernel: each Op has its own memory, so none waits for another.
template <typename Op, int THREADS>
__device__ float reduce_block(float value) {
    __shared__ float parts[THREADS / 32];
    const int lane = threadIdx.x % 32;
    value = reduce_warp<Op>(value);
    if (lane == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    return reduce_warp<Op>(lane < THREADS / 32 ? parts[lane] : Op::start);
}
