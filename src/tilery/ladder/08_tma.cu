// 8. TMA (sm_90): one thread asks for a whole tile, and the copy engine computes addresses, swizzles and counts bytes.
//
// The other threads do nothing but multiply. Each slot of the ring has a barrier in shared memory that is complete when
// the bytes asked for have arrived; its phase alternates every time round.
#include "tilery_tiles.cuh"

using T = __nv_bfloat16;
constexpr int BM = 128, BN = 128, BK = 64, STAGES = 3, THREADS = 256, GROUP = 16;
constexpr int A_BYTES = BM * SPAN, BYTES = A_BYTES + BN * SPAN;

__global__ void __launch_bounds__(THREADS, 2) tma(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ Arrival full[STAGES];
    unsigned char* const ring = memory + (-shared_address(memory) & (PATTERN - 1));
    const int blocks = k / BK;
    int i, j;
    place_of<GROUP>(blockIdx.x, m / BM, n / BN, i, j);
    const int top = i * BM, left = j * BN;
    const auto fetch = [&](int t) {
        Arrival& arrival = full[t % STAGES];
        unsigned char* const tiles = ring + t % STAGES * BYTES;
        arrival.expect(BYTES);
        load_tile(arrival, tiles, a_map, t * BK, top);
        load_tile(arrival, tiles + A_BYTES, b_map, t * BK, left);
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) full[s].init();
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
        for (int t = 0; t < min(STAGES, blocks); ++t) fetch(t);
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[BN / 2] = {};
    for (int t = 0; t < blocks; ++t) {
        full[t % STAGES].wait(t / STAGES);
        const unsigned char* const tiles = ring + t % STAGES * BYTES;
        const u64 rows = tile_descriptor(tiles + warpgroup * 64 * SPAN), columns = tile_descriptor(tiles + A_BYTES);
        product_begin(sums);
#pragma unroll
        for (int s = 0; s < BK / 16; ++s) Product<bf16, bf16, BN>::add(sums, rows + 2 * s, columns + 2 * s, 1);
        product_commit();
        product_end(sums);
        __syncthreads();  // all are done with the slot
        if (threadIdx.x == 0 && t + STAGES < blocks) fetch(t + STAGES);
    }
    const int row = top + warp * 16 + lane / 4;
    store_row(c + i64{row} * n + left, 0, BN, true, sums, 0);
    store_row(c + i64{row + 8} * n + left, 0, BN, true, sums, 2);
}
