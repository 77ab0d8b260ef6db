// 3. Register tiles: a thread computes 8 × 8 elements of c, so that 16 reads of shared memory serve 64 multiplications.
//
// Its rows and columns lie 16 apart: neighbouring threads of a warp read neighbouring lines, which are in different
// banks.
#include "common.cuh"

using T = __nv_bfloat16;
constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 32, THREADS = 256;
constexpr int THREAD_TILE = 8, STEP = 16;  // rows and columns of a thread, and the distance between them
constexpr int PITCH = BLOCK_K + 2;  // padded by one bank

__global__ void __launch_bounds__(THREADS, 2) register_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ T a_tile[BLOCK_M][PITCH], b_tile[BLOCK_N][PITCH];
    const int tiles_n = n / BLOCK_N, row0 = blockIdx.x / tiles_n * BLOCK_M, col0 = blockIdx.x % tiles_n * BLOCK_N;
    const int x = threadIdx.x % STEP, y = threadIdx.x / STEP;
    float acc[THREAD_TILE][THREAD_TILE] = {};
    for (int k0 = 0; k0 < k; k0 += BLOCK_K) {
#pragma unroll
        for (int i = threadIdx.x; i < BLOCK_M * BLOCK_K; i += THREADS) {
            const int line = i / BLOCK_K, column = i % BLOCK_K;
            a_tile[line][column] = a[i64{row0 + line} * k + k0 + column];
            b_tile[line][column] = b[i64{col0 + line} * k + k0 + column];
        }
        __syncthreads();
#pragma unroll 4
        for (int i = 0; i < BLOCK_K; ++i) {
            float a_frag[THREAD_TILE], b_frag[THREAD_TILE];
#pragma unroll
            for (int r = 0; r < THREAD_TILE; ++r) a_frag[r] = static_cast<float>(a_tile[y + STEP * r][i]);
#pragma unroll
            for (int s = 0; s < THREAD_TILE; ++s) b_frag[s] = static_cast<float>(b_tile[x + STEP * s][i]);
#pragma unroll
            for (int r = 0; r < THREAD_TILE; ++r)
#pragma unroll
                for (int s = 0; s < THREAD_TILE; ++s) acc[r][s] += a_frag[r] * b_frag[s];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < THREAD_TILE; ++r)
#pragma unroll
        for (int s = 0; s < THREAD_TILE; ++s)
            c[i64{row0 + y + STEP * r} * n + col0 + x + STEP * s] = static_cast<T>(acc[r][s]);
}
