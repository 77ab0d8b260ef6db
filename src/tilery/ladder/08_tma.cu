// 8. TMA (sm_90): one thread loads a whole tile by one instruction; the hardware computes addresses, swizzles and
// counts bytes.
//
// The other threads only multiply. Each pipeline stage has a full barrier (an mbarrier in shared memory), which
// completes when the expected bytes have arrived; its phase alternates every time round.
#include "store_tiles.cuh"
#include "tile_scheduler.cuh"

using T = __nv_bfloat16;
constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 64, STAGES = 3, THREADS = 256, GROUP_M = 16;
constexpr int A_BYTES = BLOCK_M * SWIZZLE_BYTES, STAGE_BYTES = A_BYTES + BLOCK_N * SWIZZLE_BYTES;

__global__ void __launch_bounds__(THREADS, 2) tma(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ Mbarrier full[STAGES];
    unsigned char* const stages = smem + (-smem_address(smem) & (SWIZZLE_ATOM - 1));
    const int k_blocks = k / BLOCK_K;
    int tile_m, tile_n;
    tile_coordinates<GROUP_M>(blockIdx.x, m / BLOCK_M, n / BLOCK_N, tile_m, tile_n);
    const int row0 = tile_m * BLOCK_M, col0 = tile_n * BLOCK_N;
    const auto load_stage = [&](int kb) {
        Mbarrier& barrier = full[kb % STAGES];
        unsigned char* const tiles = stages + kb % STAGES * STAGE_BYTES;
        barrier.arrive_expect_tx(STAGE_BYTES);
        tma_load_2d(barrier, tiles, a_map, kb * BLOCK_K, row0);
        tma_load_2d(barrier, tiles + A_BYTES, b_map, kb * BLOCK_K, col0);
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) full[s].init();
        fence_mbarrier_init();
        for (int kb = 0; kb < min(STAGES, k_blocks); ++kb) load_stage(kb);
    }
    __syncthreads();
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[BLOCK_N / 2] = {};
    for (int kb = 0; kb < k_blocks; ++kb) {
        full[kb % STAGES].wait(kb / STAGES);
        const unsigned char* const tiles = stages + kb % STAGES * STAGE_BYTES;
        const u64 a_desc = smem_desc_k_major(tiles + warpgroup * 64 * SWIZZLE_BYTES);
        const u64 b_desc = smem_desc_k_major(tiles + A_BYTES);
        warpgroup_arrive(acc);
#pragma unroll
        for (int s = 0; s < BLOCK_K / 16; ++s) WgmmaSS<bf16, bf16, BLOCK_N>::mma(acc, a_desc + 2 * s, b_desc + 2 * s, 1);
        warpgroup_commit_batch();
        warpgroup_wait_all(acc);
        __syncthreads();  // all threads are done with the stage
        if (threadIdx.x == 0 && kb + STAGES < k_blocks) load_stage(kb + STAGES);
    }
    const int row = row0 + warp * 16 + lane / 4;
    store_row(c + i64{row} * n + col0, 0, BLOCK_N, true, acc, 0);
    store_row(c + i64{row + 8} * n + col0, 0, BLOCK_N, true, acc, 2);
}
