// 2. Shared memory: a block brings a tile of a and one of b near, and each value is used 32 times from there.
//
// The loads from global memory are coalesced now: a warp reads 64 bytes of one row. A thread still has one element of c,
// so every multiplication takes two reads of shared memory, and those are the limit.
#include "tilery.cuh"

using T = __nv_bfloat16;
constexpr int TILE = 32, LINE = TILE + 2;  // longer by a bank, so that a warp finds a column in 32 banks

__global__ void __launch_bounds__(TILE * TILE) shared_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ T rows[TILE][LINE], columns[TILE][LINE];
    const int across = n / TILE, top = blockIdx.x / across * TILE, left = blockIdx.x % across * TILE;
    const int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    float sum = 0.0f;
    for (int k0 = 0; k0 < k; k0 += TILE) {
        rows[y][x] = a[i64{top + y} * k + k0 + x];
        columns[y][x] = b[i64{left + y} * k + k0 + x];
        __syncthreads();  // the tiles are here
#pragma unroll
        for (int i = 0; i < TILE; ++i) sum += static_cast<float>(rows[y][i]) * static_cast<float>(columns[x][i]);
        __syncthreads();  // all have read them
    }
    c[i64{top + y} * n + left + x] = static_cast<T>(sum);
}
