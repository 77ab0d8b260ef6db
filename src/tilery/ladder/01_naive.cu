// 1. A thread has one element of c and reads a row of a and a column of b from global memory, 2 bytes at a time.
//
// All rungs: c [m, n] = a [m, k] · b [k, n] in bf16 with sums in fp32, where b's columns are contiguous as the rows of
// a weight [n, k] are. Here every value is read as often as it is used, and neighbours in a warp read different columns,
// 2 k bytes apart: each access of a warp is 32 accesses.
#include "tilery.cuh"

using T = __nv_bfloat16;

__global__ void __launch_bounds__(256) naive(const T* a, const T* b, T* c, int m, int n, int k) {
    const int across = (n + 31) / 32, top = blockIdx.x / across * 8, left = blockIdx.x % across * 32;
    const int row = top + threadIdx.x / 32, col = left + threadIdx.x % 32;
    if (row >= m || col >= n) return;
    float sum = 0.0f;
    for (int i = 0; i < k; ++i)
        sum += static_cast<float>(a[i64{row} * k + i]) * static_cast<float>(b[i64{col} * k + i]);
    c[i64{row} * n + col] = static_cast<T>(sum);
}
