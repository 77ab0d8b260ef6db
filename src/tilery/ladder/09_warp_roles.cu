// 9. Warp specialisation (sm_90): one producer warp loads, two consumer warpgroups multiply, and no barrier stops all
// of them.
//
// An empty barrier for each stage says that the consumers have released it. So the producer is ahead by the whole
// pipeline, also across the end of a tile: blocks are persistent, and while c is stored, the next tile is loaded. The
// producer needs few registers and gives the others to the consumers (setmaxnreg): enough for tiles of 128 × 256, which
// read shared memory less for the same work. One batch of wgmmas stays in flight while a consumer waits for the next
// stage.
#include "store_tiles.cuh"
#include "tile_pipeline.cuh"
#include "tile_scheduler.cuh"

using T = __nv_bfloat16;
constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 64, STAGES = 4, GROUP_M = 16;
constexpr int A_BYTES = BLOCK_M * SWIZZLE_BYTES, STAGE_BYTES = A_BYTES + BLOCK_N * SWIZZLE_BYTES;

__global__ void __launch_bounds__(384) warp_roles(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char smem[];
    TilePipeline<STAGES, STAGE_BYTES> pipeline(smem);
    if (threadIdx.x == 0) pipeline.init(8);
    __syncthreads();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int tiles_m = m / BLOCK_M, tiles_n = n / BLOCK_N, k_blocks = k / BLOCK_K;
    int tile_m, tile_n;
    if (warpgroup == 2) {
        decrease_registers<40>();
        if (warp == 8 && lane == 0) {
            for (int t = blockIdx.x; t < tiles_m * tiles_n; t += gridDim.x) {
                tile_coordinates<GROUP_M>(t, tiles_m, tiles_n, tile_m, tile_n);
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                    Mbarrier& full = pipeline.producer_acquire();
                    tma_load_2d(full, pipeline.tile(), a_map, kb * BLOCK_K, tile_m * BLOCK_M);
                    tma_load_2d(full, pipeline.tile() + A_BYTES, b_map, kb * BLOCK_K, tile_n * BLOCK_N);
                }
            }
        }
    } else {
        increase_registers<232>();
        auto release = pipeline;  // one stage behind: its wgmmas may still be in flight
        for (int t = blockIdx.x; t < tiles_m * tiles_n; t += gridDim.x) {
            float acc[BLOCK_N / 2] = {};
            for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                pipeline.consumer_wait();
                const u64 a_desc = smem_desc_k_major(pipeline.tile() + warpgroup * 64 * SWIZZLE_BYTES);
                const u64 b_desc = smem_desc_k_major(pipeline.tile() + A_BYTES);
                warpgroup_arrive(acc);
#pragma unroll
                for (int s = 0; s < BLOCK_K / 16; ++s)
                    WgmmaSS<bf16, bf16, BLOCK_N>::mma(acc, a_desc + 2 * s, b_desc + 2 * s, 1);
                warpgroup_commit_batch();
                warpgroup_wait<1>();
                if (kb > 0) release.consumer_release(), release.advance();
            }
            warpgroup_wait_all(acc);
            release.consumer_release(), release.advance();
            tile_coordinates<GROUP_M>(t, tiles_m, tiles_n, tile_m, tile_n);
            const int row = tile_m * BLOCK_M + warp * 16 + lane / 4;
            store_row(c + i64{row} * n + tile_n * BLOCK_N, 0, BLOCK_N, true, acc, 0);
            store_row(c + i64{row + 8} * n + tile_n * BLOCK_N, 0, BLOCK_N, true, acc, 2);
        }
    }
}
