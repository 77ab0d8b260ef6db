// 10. Clusters (sm_90): two blocks with the same columns of b load half of them each, and TMA multicasts each half to
// both.
//
// A third of the traffic from the L2 is gone, and its power is left for the tensor cores. The blocks wait for each
// other: a stage is empty when the consumers of both have released it, and neither block exits while the other may
// still send to it.
#include "store_tiles.cuh"
#include "tile_pipeline.cuh"
#include "tile_scheduler.cuh"

using T = __nv_bfloat16;
constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 64, STAGES = 4, GROUP_M = 8, CLUSTER = 2;
constexpr int A_BYTES = BLOCK_M * SWIZZLE_BYTES, STAGE_BYTES = A_BYTES + BLOCK_N * SWIZZLE_BYTES, HALF_N = BLOCK_N / CLUSTER;

__global__ void __launch_bounds__(384) clusters(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char smem[];
    TilePipeline<STAGES, STAGE_BYTES, 0, CLUSTER> pipeline(smem);
    if (threadIdx.x == 0) pipeline.init(8);
    __syncwarp();
    Cluster<CLUSTER>::sync();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int rank = Cluster<CLUSTER>::rank(), first_tile = blockIdx.x / CLUSTER, tile_stride = gridDim.x / CLUSTER;
    const int tiles_m = m / (CLUSTER * BLOCK_M), tiles_n = n / BLOCK_N, k_blocks = k / BLOCK_K;
    int tile_m, tile_n;
    if (warpgroup == 2) {
        decrease_registers<40>();
        if (warp == 8 && lane == 0) {
            for (int t = first_tile; t < tiles_m * tiles_n; t += tile_stride) {
                tile_coordinates<GROUP_M>(t, tiles_m, tiles_n, tile_m, tile_n);
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                    Mbarrier& full = pipeline.producer_acquire();  // expects the bytes that the other block sends too
                    tma_load_2d(full, pipeline.tile(), a_map, kb * BLOCK_K, (tile_m * CLUSTER + rank) * BLOCK_M);
                    unsigned char* const half = pipeline.tile() + A_BYTES + rank * HALF_N * SWIZZLE_BYTES;
                    tma_load_2d_multicast((1 << CLUSTER) - 1, full, half, b_map, kb * BLOCK_K,
                                          tile_n * BLOCK_N + rank * HALF_N);
                }
            }
        }
        __syncwarp();
    } else {
        increase_registers<232>();
        auto release = pipeline;  // one stage behind: its wgmmas may still be in flight
        for (int t = first_tile; t < tiles_m * tiles_n; t += tile_stride) {
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
            const int row = (tile_m * CLUSTER + rank) * BLOCK_M + warp * 16 + lane / 4;
            store_row(c + i64{row} * n + tile_n * BLOCK_N, 0, BLOCK_N, true, acc, 0);
            store_row(c + i64{row + 8} * n + tile_n * BLOCK_N, 0, BLOCK_N, true, acc, 2);
        }
    }
    Cluster<CLUSTER>::sync();
}
