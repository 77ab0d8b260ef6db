// 2. Shared memory: a block loads a tile of a and a tile of b, and uses each value 32 times.
//
// The loads from global memory are coalesced now: a warp reads 64 bytes of one row. A thread still computes one element
// of c, so every multiplication takes two reads of shared memory, and those are the limit.
#include "common.cuh"

using T = __nv_bfloat16;
constexpr int TILE = 32, PITCH = TILE + 2;  // padded by one bank, so that a warp reads a column from 32 banks

__global__ void __launch_bounds__(TILE * TILE) shared_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ T a_tile[TILE][PITCH], b_tile[TILE][PITCH];
    const int tiles_n = n / TILE, row0 = blockIdx.x / tiles_n * TILE, col0 = blockIdx.x % tiles_n * TILE;
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    float acc = 0.0f;
    for (int k0 = 0; k0 < k; k0 += TILE) {
        a_tile[y][x] = a[i64{row0 + y} * k + k0 + x];
        b_tile[y][x] = b[i64{col0 + y} * k + k0 + x];
        __syncthreads();  // the tiles are loaded
#pragma unroll
        for (int i = 0; i < TILE; ++i) acc += static_cast<float>(a_tile[y][i]) * static_cast<float>(b_tile[x][i]);
        __syncthreads();  // all threads have read them
    }
    c[i64{row0 + y} * n + col0 + x] = static_cast<T>(acc);
}
