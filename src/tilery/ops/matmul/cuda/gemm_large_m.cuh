// Large-M product: c = epilogue(a · bᵀ) with tiles of 128 × BLOCK_N. See hopper.cu. For sm_90a.
#pragma once
#include "gemm.cuh"

// Persistent blocks; the last warpgroup's first thread is the producer, two consumer warpgroups have 64 rows each. A
// consumer always leaves one batch of wgmmas in flight while it waits for the next stage.
//
// A_MN, B_MN: a and b are MN-major.
// DOWN, ACROSS: rows and columns of tiles that a cluster has. Blocks one above the other load b for each other, those
// side by side a.
// SPLIT_K: blocks of a cluster that split K of one tile; each reduces and stores some of its columns.
// TMA_STORE: c goes through shared memory and is stored by TMA while the next tile is multiplied.
// HALVES = 2: b is n rows of gate and then n rows of up; c [m, n] is silu(gate) · up.
template <typename T, bool A_MN, bool B_MN, int BLOCK_N, int STAGES, int GROUP_M, int DOWN, int ACROSS, int SPLIT_K,
          bool TMA_STORE, int HALVES, typename Epilogue>
__device__ __forceinline__ void gemm_large_m(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& c_map,
                                             const GemmParams<T>& p, const Epilogue& epilogue) {
    using In = typename WgmmaType<T>::type;
    constexpr int COLUMNS_APART = 16;  // k-blocks that the columns of tiles are apart at most, so that the L2 holds them
    constexpr int BLOCK_M = 128, OUT_N = BLOCK_N / HALVES;  // OUT_N: columns of c in a tile
    using A = OperandTile<A_MN, BLOCK_M, ACROSS>;
    using B = OperandTile<B_MN, OUT_N, DOWN>;  // of each half
    static_assert(!B_MN || OUT_N % 64 == 0, "an MN-major tile of b has whole chunks");
    constexpr int STAGE_BYTES = A::BYTES + HALVES * B::BYTES;
    using SplitK = LargeMSplitK<OUT_N, SPLIT_K>;
    static_assert(SPLIT_K == 1 || HALVES == 1, "gate and up of a column are in one block");
    static_assert(SPLIT_K == 1 || (DOWN * ACROSS == 1 && !TMA_STORE && SplitK::BYTES <= STAGES * STAGE_BYTES),
                  "partial sums are received in the memory of the stages");
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ Mbarrier received;
    constexpr int CLUSTER = DOWN * ACROSS * SPLIT_K;
    using cluster = Cluster<CLUSTER>;
    TilePipeline<STAGES, STAGE_BYTES, 0, DOWN, ACROSS> pipeline(smem, TMA_STORE ? BLOCK_M * OUT_N * sizeof(T) : 0);
    if (threadIdx.x == 0) {
        if constexpr (SPLIT_K > 1) SplitK::init(received, cluster::rank());
        pipeline.init(8), prefetch_tensor_map(a_map), prefetch_tensor_map(b_map);
    }
    if constexpr (CLUSTER > 1) cluster::sync();
    else __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    // The shuffle tells the compiler that the warp's number is the same in all lanes.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const int lane = threadIdx.x % 32, rank = cluster::rank(), all_k_blocks = (p.k + A::K_PER_BLOCK - 1) / A::K_PER_BLOCK;
    const int k_begin = SPLIT_K == 1 ? 0 : all_k_blocks * rank / SPLIT_K;
    const int k_blocks = SPLIT_K == 1 ? all_k_blocks : all_k_blocks * (rank + 1) / SPLIT_K - k_begin;
    const ClusterTiles<DOWN, ACROSS> at;
    const int first_tile = blockIdx.x / CLUSTER, tile_stride = gridDim.x / CLUSTER;
    const int tiles_m = (p.m + BLOCK_M * DOWN - 1) / (BLOCK_M * DOWN);
    const int tiles_n = (p.n + OUT_N * ACROSS - 1) / (OUT_N * ACROSS);
    const int tiles_of_one = tiles_m * tiles_n, tiles = tiles_of_one * p.batch;
    const auto locate = [&](int t, int& batch, int& row0, int& col0) {
        int i, j;
        batch = t / tiles_of_one;
        tile_coordinates<GROUP_M>(t % tiles_of_one, tiles_m, tiles_n, i, j);
        row0 = (i * DOWN + at.row) * BLOCK_M, col0 = (j * ACROSS + at.column) * OUT_N;
    };
    int batch, row0, col0;
    if (warpgroup == 2) {
        decrease_registers<40>();
        if (warp == 8 && lane == 0) {
            const u64 policy = evict_normal_policy();
            for (int t = first_tile; t < tiles; t += tile_stride) {
                locate(t, batch, row0, col0);
                const KOrder order(col0 / (OUT_N * ACROSS), k_blocks, COLUMNS_APART);
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                    Mbarrier& full = pipeline.producer_acquire();
                    const int k_block = k_begin + order(kb);
                    A::load(policy, at.column, at.a_mask(), full, pipeline.tile(), a_map, k_block, row0,
                            batch * p.a_batch);
#pragma unroll
                    for (int h = 0; h < HALVES; ++h)
                        B::load(policy, at.row, at.b_mask(), full, pipeline.tile() + A::BYTES + h * B::BYTES, b_map,
                                k_block, col0 + h * p.n, batch * p.b_batch);
                }
            }
        }
        __syncwarp();
        if constexpr (SPLIT_K > 1) cluster::sync();  // the one in SplitK::reduce
    } else {
        increase_registers<232>();
        for (int t = first_tile; t < tiles; t += tile_stride) {
            float acc[1][BLOCK_N / 2];
            auto release = pipeline;  // one stage behind: its wgmmas may still be in flight
            for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                pipeline.consumer_wait();
                const u64 a_desc = A::descriptor(pipeline.tile(), warpgroup * 64);
                const u64 b_desc = B::descriptor(pipeline.tile() + A::BYTES);
                warpgroup_arrive(acc[0]);
#pragma unroll
                for (int s = 0; s < WGMMAS; ++s)
                    WgmmaSS<In, In, BLOCK_N>::template mma<A_MN, B_MN>(acc[0], a_desc + s * A::K_STEP,
                                                                       b_desc + s * B::K_STEP, s > 0 || kb > 0);
                warpgroup_commit_batch();
                warpgroup_wait<1>();
                if (kb > 0) release.consumer_release(), release.advance();
            }
            warpgroup_wait_all(acc[0]);
            release.consumer_release();
            locate(t, batch, row0, col0);
            if constexpr (SPLIT_K > 1) SplitK::reduce(acc[0], rank, reinterpret_cast<float4*>(pipeline.tiles), received);
            const auto store = [&](float(&out)[1][OUT_N / 2]) {
                const int row = row0 + warp * 16 + lane / 4;
                T* const c = p.c + i64{batch} * p.m * p.n;
                SplitK::for_each_rank([&](auto groups, int owner) {
                    if (SPLIT_K > 1 && owner != rank) return;
                    epilogue.template apply_rows<groups.BEGIN, groups.END>(out[0], row, col0);
                    if constexpr (!TMA_STORE) {
                        store_row<groups.BEGIN, groups.END>(c + i64{row} * p.n, col0, p.n, row < p.m, out[0], 0);
                        store_row<groups.BEGIN, groups.END>(c + i64{row + 8} * p.n, col0, p.n, row + 8 < p.m, out[0], 2);
                    }
                });
                if constexpr (TMA_STORE) {  // one matrix to its map: m of several products is a multiple of DOWN tiles
                    unsigned char* const staging = pipeline.after_tiles() + warpgroup * 64 * OUT_N * sizeof(T);
                    store_tile_tma<T>(c_map, staging, out, warpgroup, col0, batch * p.m + row0 + warpgroup * 64);
                }
            };
            if constexpr (HALVES == 1) {
                store(acc);
            } else {
                float out[1][OUT_N / 2];
#pragma unroll
                for (int i = 0; i < OUT_N / 2; ++i) out[0][i] = activate<silu>(acc[0][i]) * acc[0][OUT_N / 2 + i];
                store(out);
            }
        }
        if (TMA_STORE && threadIdx.x % 128 == 0) tma_store_wait_read();
    }
    __syncwarp();
    if constexpr (DOWN * ACROSS > 1) cluster::sync();  // another block may still multicast to this one
}
