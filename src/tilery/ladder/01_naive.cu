// 1. Naive: a thread computes one element of c and reads a row of a and a column of b from global memory, 2 bytes at a
// time.
//
// All rungs compute c [m, n] = a [m, k] · b [k, n] in bf16 with sums in fp32. The columns of b are contiguous, as the
// rows of a weight [n, k] are. Here every value is read as often as it is used. Neighbouring threads of a warp read
// different columns, 2 k bytes apart, so each load of a warp is 32 memory accesses.
#include "common.cuh"

using T = __nv_bfloat16;

__global__ void __launch_bounds__(256) naive(const T* a, const T* b, T* c, int m, int n, int k) {
    const int tiles_n = (n + 31) / 32, row0 = blockIdx.x / tiles_n * 8, col0 = blockIdx.x % tiles_n * 32;
    const int row = row0 + threadIdx.x / 32, col = col0 + threadIdx.x % 32;
    if (row >= m || col >= n) return;
    float acc = 0.0f;
    for (int i = 0; i < k; ++i)
        acc += static_cast<float>(a[i64{row} * k + i]) * static_cast<float>(b[i64{col} * k + i]);
    c[i64{row} * n + col] = static_cast<T>(acc);
}
