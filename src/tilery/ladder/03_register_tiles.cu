// 3. Registers: a thread has 8 × 8 elements of c, so that 16 reads of shared memory serve 64 multiplications.
//
// Its rows and columns lie 16 apart: neighbours in a warp read neighbouring lines, which are in different banks.
#include "tilery.cuh"

using T = __nv_bfloat16;
constexpr int BM = 128, BN = 128, BK = 32, THREADS = 256, EACH = 8, STEP = 16;
constexpr int LINE = BK + 2;  // longer by a bank

__global__ void __launch_bounds__(THREADS, 2) register_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ T rows[BM][LINE], columns[BN][LINE];
    const int across = n / BN, top = blockIdx.x / across * BM, left = blockIdx.x % across * BN;
    const int x = threadIdx.x % STEP, y = threadIdx.x / STEP;
    float sums[EACH][EACH] = {};
    for (int k0 = 0; k0 < k; k0 += BK) {
#pragma unroll
        for (int i = threadIdx.x; i < BM * BK; i += THREADS) {
            const int line = i / BK, at = i % BK;
            rows[line][at] = a[i64{top + line} * k + k0 + at];
            columns[line][at] = b[i64{left + line} * k + k0 + at];
        }
        __syncthreads();
#pragma unroll 4
        for (int i = 0; i < BK; ++i) {
            float u[EACH], v[EACH];
#pragma unroll
            for (int r = 0; r < EACH; ++r) u[r] = static_cast<float>(rows[y + STEP * r][i]);
#pragma unroll
            for (int s = 0; s < EACH; ++s) v[s] = static_cast<float>(columns[x + STEP * s][i]);
#pragma unroll
            for (int r = 0; r < EACH; ++r)
#pragma unroll
                for (int s = 0; s < EACH; ++s) sums[r][s] += u[r] * v[s];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < EACH; ++r)
#pragma unroll
        for (int s = 0; s < EACH; ++s)
            c[i64{top + y + STEP * r} * n + left + x + STEP * s] = static_cast<T>(sums[r][s]);
}
