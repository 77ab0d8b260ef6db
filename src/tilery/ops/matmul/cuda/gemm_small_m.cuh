// Small-M product (swap-AB): c = epilogue(a · bᵀ) with tiles of up to 256 rows. See hopper.cu. For sm_90a.
#pragma once
#include "gemm.cuh"

// Rows of b are on the side where wgmma has 64 rows, of which WARPGROUP_N are used; rows of a, up to BLOCK_M, are on its
// narrow side. The last warp is the producer, WARPGROUPS consumer warpgroups have WARPGROUP_N columns of c each. A stage
// has K_BLOCKS k-blocks.
//
// A_MN, B_MN: a and b are MN-major.
// DOWN, ACROSS: rows and columns of tiles that a cluster has, as in the large-M product.
// SPLIT_K: blocks of a cluster that split K of one tile.
// HALVES as in the large-M product: a warpgroup has WARPGROUP_N rows of gate and as many of up.
template <typename T, bool A_MN, bool B_MN, int BLOCK_M, int WARPGROUPS, int WARPGROUP_N, int STAGES, int K_BLOCKS,
          int DOWN, int ACROSS, int SPLIT_K, int HALVES, typename Epilogue>
__device__ __forceinline__ void gemm_small_m(const TensorMap& a_map, const TensorMap& b_map, const GemmParams<T>& p,
                                             const Epilogue& epilogue) {
    using In = typename WgmmaType<T>::type;
    constexpr int BLOCK_N = WARPGROUPS * WARPGROUP_N, THREADS = WARPGROUPS * 128 + 32;
    using A = OperandTile<A_MN, BLOCK_M, ACROSS>;
    using B = OperandTile<B_MN, BLOCK_N, DOWN, WARPGROUP_N>;  // of each half; MN-major a chunk a warpgroup
    constexpr int B_BYTES = HALVES * B::BYTES, K_BLOCK_BYTES = B_BYTES + A::BYTES, STAGE_BYTES = K_BLOCKS * K_BLOCK_BYTES;
    constexpr int STAGE_K = K_BLOCKS * A::K_PER_BLOCK;
    using SplitK = SmallMSplitK<T, BLOCK_M, WARPGROUPS, WARPGROUP_N, SPLIT_K, THREADS>;
    static_assert(SPLIT_K == 1 || SplitK::OWN_BYTES <= STAGES * STAGE_BYTES, "the tile of c takes the memory of the stages");
    static_assert(SPLIT_K == 1 || HALVES == 1, "gate and up of a column are in one block");
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ Mbarrier received;
    TilePipeline<STAGES, STAGE_BYTES, 0, DOWN, ACROSS> pipeline(smem, SplitK::RECEIVED_BYTES);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const SmallMScheduler<BLOCK_M, BLOCK_N, SPLIT_K, DOWN, ACROSS> scheduler(
        p.m, p.n, (p.k + STAGE_K - 1) / STAGE_K, p.batch);  // zeros beyond K
    if (threadIdx.x == WARPGROUPS * 128) {
        pipeline.init(WARPGROUPS * 4);
        SplitK::init(received);
        prefetch_tensor_map(a_map), prefetch_tensor_map(b_map);
    }
    __syncwarp();
    if constexpr (DOWN * ACROSS > 1) Cluster<DOWN * ACROSS>::sync();  // all barriers are there before another block's tiles arrive
    Cluster<SPLIT_K>::begin(true);
    __syncthreads();
    float acc[HALVES][SplitK::COUNT];
    if (warp == WARPGROUPS * 4) {
        if (lane == 0) {
            const u64 normal = evict_normal_policy(), b_policy = scheduler.tiles_m == 1 ? evict_first_policy() : normal;
            const auto at = scheduler.at;
            const int stage_bytes = STAGE_BYTES - K_BLOCKS * (A::BYTES - (A_MN ? A::BYTES : p.a_rows * SWIZZLE_BYTES));
            for (int t = scheduler.first_tile; t < scheduler.tiles; t += scheduler.tile_stride) {
                const int row = scheduler.row(t), column = scheduler.column(t), batch = scheduler.batch(t);
                const int a_batch = batch * p.a_batch, b_batch = batch * p.b_batch;
                scheduler.for_each_k_block(t, [&](int kb) {
                    Mbarrier& full = pipeline.producer_acquire(stage_bytes);
#pragma unroll
                    for (int d = 0; d < K_BLOCKS; ++d) {
                        unsigned char* const to = pipeline.tile() + d * K_BLOCK_BYTES;
                        const int k_block = kb * K_BLOCKS + d;
#pragma unroll
                        for (int h = 0; h < HALVES; ++h)
                            B::load(b_policy, at.row, at.b_mask(), full, to + h * B::BYTES, b_map, k_block, column + h * p.n,
                                    b_batch);
                        A::load(normal, at.column, at.a_mask(), full, to + B_BYTES, a_map, k_block, row, a_batch);
                    }
                    pipeline.advance();
                });
            }
        }
        __syncwarp();
    } else {
        auto release = pipeline;  // one stage behind: its wgmmas may still be in flight
        for (int t = scheduler.first_tile; t < scheduler.tiles; t += scheduler.tile_stride) {
            for (int kb = 0; kb < scheduler.k_blocks; ++kb, pipeline.advance()) {
                pipeline.consumer_wait();
                if constexpr (HALVES == 2) warpgroup_fence_operand(acc[1]);
                warpgroup_arrive(acc[0]);
#pragma unroll
                for (int d = 0; d < K_BLOCKS; ++d) {
                    const unsigned char* const tile = pipeline.tile() + d * K_BLOCK_BYTES;
                    const u64 b_desc = B::descriptor(tile, warpgroup * WARPGROUP_N), a_desc = A::descriptor(tile + B_BYTES);
#pragma unroll
                    for (int s = 0; s < WGMMAS; ++s)
#pragma unroll
                        for (int h = 0; h < HALVES; ++h)
                            WgmmaSS<In, In, BLOCK_M>::template mma<B_MN, A_MN>(
                                acc[h], b_desc + h * (B::BYTES >> 4) + s * B::K_STEP, a_desc + s * A::K_STEP,
                                s > 0 || d > 0 || kb > 0);
                }
                warpgroup_commit_batch();
                warpgroup_wait<1>();
                if (kb > 0) release.consumer_release(), release.advance();
            }
            warpgroup_wait_all(acc[0]);
            if constexpr (HALVES == 2) {
                warpgroup_fence_operand(acc[1]);
#pragma unroll
                for (int r = 0; r < SplitK::COUNT; ++r) acc[0][r] = activate<silu>(acc[0][r]) * acc[1][r];
            }
            if (scheduler.k_blocks > 0) release.consumer_release(), release.advance();
            if constexpr (SPLIT_K == 1) {
                const int col0 = scheduler.column(t) + warpgroup * WARPGROUP_N;
                epilogue.template apply_transposed<WARPGROUP_N>(acc[0], scheduler.row(t), col0);
                T* const c = p.c + i64{scheduler.batch(t)} * p.m * p.n;
                store_transposed<WARPGROUP_N>(acc[0], c, scheduler.row(t), col0, p.m, p.n);
            }
        }
        if (scheduler.k_blocks == 0)
#pragma unroll
            for (int r = 0; r < SplitK::COUNT; ++r) acc[0][r] = 0.0f;
    }
    if constexpr (SPLIT_K > 1) {
        __syncthreads();  // all warps are done with the stages
        const int t = scheduler.first_tile;
        T* const c = p.c + i64{scheduler.batch(t)} * p.m * p.n;
        SplitK::reduce_and_store(acc[0], reinterpret_cast<float*>(pipeline.tiles), pipeline.after_tiles(), received, c,
                                 scheduler.row(t), scheduler.column(t), p.m, p.n,
                                 [&](float(&four)[4], int row, int col) { epilogue.apply_four(four, row, col); });
    }
    __syncwarp();
    if constexpr (DOWN * ACROSS > 1) Cluster<DOWN * ACROSS>::sync();  // another block may still multicast to this one
}
