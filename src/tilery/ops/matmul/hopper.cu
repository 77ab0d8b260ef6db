// c [m, n] = a [m, k] · b [n, k]ᵀ on Hopper by TMA and wgmma, in fp16 and bf16. Each product has two kernels:
//
// - large-M: tiles of 128 × BLOCK_N, a producer warp and two consumer warpgroups;
// - small-M (swap-AB): columns of c are on the side where wgmma has 64 rows, rows of c on its narrow side; split-K in a
//   cluster if tiles are few.
//
// hopper_matmul and hopper_matmul_small_m store the sums, hopper_linear and hopper_linear_small_m have an epilogue,
// hopper_silu_mul and hopper_silu_mul_small_m compute silu(gate) · up from the stacked weights of gate and up.
#include "epilogue.cuh"
#include "split_k.cuh"
#include "tile_pipeline.cuh"
#include "tile_scheduler.cuh"

template <typename T>
constexpr int BLOCK_K = SWIZZLE_BYTES / sizeof(T);  // a k-block is as wide as the swizzle
constexpr int WGMMAS = SWIZZLE_BYTES / 32;  // along K in a k-block, each over 32 bytes

// Loads the tile of b: BLOCK_N rows from `row` on. With HALVES = 2 it is BLOCK_N / 2 rows of gate from `row` on and as
// many of up, from row + up_offset on. MULTICAST blocks of a cluster need the same tile: each loads a part and
// multicasts it to all.
template <int BLOCK_N, int MULTICAST, int HALVES>
__device__ void load_b(Mbarrier& barrier, unsigned char* to, const TensorMap& map, int k, int row, int up_offset) {
    if constexpr (HALVES == 1) {
        tma_load_rows<BLOCK_N, MULTICAST>(barrier, to, map, k, row);
    } else if constexpr (MULTICAST == 1) {
        tma_load_2d(barrier, to, map, k, row);
        tma_load_2d(barrier, to + BLOCK_N / 2 * SWIZZLE_BYTES, map, k, row + up_offset);
    } else {
        static_assert(MULTICAST == 2, "a half each");
        const int half = Cluster<MULTICAST>::rank();
        tma_load_2d_multicast((1 << MULTICAST) - 1, barrier, to + half * (BLOCK_N / 2) * SWIZZLE_BYTES, map, k,
                              row + half * up_offset);
    }
}

// Large-M product. Persistent blocks; the last warpgroup's first thread is the producer, two consumer warpgroups have
// 64 rows each. A consumer always leaves one batch of wgmmas in flight while it waits for the next stage.
//
// MULTICAST: blocks of a cluster whose tiles lie one above the other; each loads a part of their tile of b for all.
// SPLIT_K: blocks of a cluster that split K of one tile; each reduces and stores some of its columns.
// TMA_STORE: c goes through shared memory and is stored by TMA while the next tile is multiplied.
// HALVES = 2: b is n rows of gate and then n rows of up; c [m, n] is silu(gate) · up.
template <typename T, int BLOCK_N, int STAGES, int GROUP_M, int MULTICAST, int SPLIT_K, bool TMA_STORE, int HALVES,
          typename Epilogue>
__device__ __forceinline__ void gemm_large_m(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& c_map, T* c,
                                             int m, int n, int k, const Epilogue& epilogue) {
    using In = typename WgmmaType<T>::type;
    constexpr int BLOCK_M = 128, A_BYTES = BLOCK_M * SWIZZLE_BYTES, STAGE_BYTES = A_BYTES + BLOCK_N * SWIZZLE_BYTES;
    constexpr int OUT_N = BLOCK_N / HALVES;  // columns of c in a tile
    using SplitK = LargeMSplitK<OUT_N, SPLIT_K>;
    static_assert(SPLIT_K == 1 || HALVES == 1, "gate and up of a column are in one block");
    static_assert(SPLIT_K == 1 || (MULTICAST == 1 && !TMA_STORE && SplitK::BYTES <= STAGES * STAGE_BYTES),
                  "partial sums are received in the memory of the stages");
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ Mbarrier received;
    using cluster = Cluster<MULTICAST * SPLIT_K>;
    TilePipeline<STAGES, STAGE_BYTES, 0, MULTICAST> pipeline(smem, TMA_STORE ? BLOCK_M * OUT_N * sizeof(T) : 0);
    if (threadIdx.x == 0) {
        if constexpr (SPLIT_K > 1) SplitK::init(received, cluster::rank());
        pipeline.init(8), prefetch_tensor_map(a_map), prefetch_tensor_map(b_map);
    }
    if constexpr (MULTICAST * SPLIT_K > 1) cluster::sync();
    else __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    // The shuffle tells the compiler that the warp's number is the same in all lanes.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const int lane = threadIdx.x % 32, rank = cluster::rank(), all_k_blocks = (k + BLOCK_K<T> - 1) / BLOCK_K<T>;
    const int k_begin = SPLIT_K == 1 ? 0 : all_k_blocks * rank / SPLIT_K;
    const int k_blocks = SPLIT_K == 1 ? all_k_blocks : all_k_blocks * (rank + 1) / SPLIT_K - k_begin;
    const int first_tile = blockIdx.x / (MULTICAST * SPLIT_K), tile_stride = gridDim.x / (MULTICAST * SPLIT_K);
    const int tiles_m = (m + BLOCK_M * MULTICAST - 1) / (BLOCK_M * MULTICAST), tiles_n = (n + OUT_N - 1) / OUT_N;
    const int tiles = tiles_m * tiles_n;
    const auto locate = [&](int t, int& row0, int& col0) {
        int i, j;
        tile_coordinates<GROUP_M>(t, tiles_m, tiles_n, i, j);
        row0 = (i * MULTICAST + (MULTICAST > 1 ? rank : 0)) * BLOCK_M, col0 = j * OUT_N;
    };
    int row0, col0;
    if (warpgroup == 2) {
        decrease_registers<40>();
        if (warp == 8 && lane == 0) {
            for (int t = first_tile; t < tiles; t += tile_stride) {
                locate(t, row0, col0);
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                    Mbarrier& full = pipeline.producer_acquire();
                    tma_load_2d(full, pipeline.tile(), a_map, (k_begin + kb) * BLOCK_K<T>, row0);
                    load_b<BLOCK_N, MULTICAST, HALVES>(full, pipeline.tile() + A_BYTES, b_map, (k_begin + kb) * BLOCK_K<T>,
                                                       col0, n);
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
                const u64 a_desc = smem_desc_k_major(pipeline.tile() + warpgroup * 64 * SWIZZLE_BYTES);
                const u64 b_desc = smem_desc_k_major(pipeline.tile() + A_BYTES);
                warpgroup_arrive(acc[0]);
#pragma unroll
                for (int s = 0; s < WGMMAS; ++s)
                    WgmmaSS<In, In, BLOCK_N>::mma(acc[0], a_desc + 2 * s, b_desc + 2 * s, s > 0 || kb > 0);
                warpgroup_commit_batch();
                warpgroup_wait<1>();
                if (kb > 0) release.consumer_release(), release.advance();
            }
            warpgroup_wait_all(acc[0]);
            release.consumer_release();
            locate(t, row0, col0);
            if constexpr (SPLIT_K > 1) SplitK::reduce(acc[0], rank, reinterpret_cast<float4*>(pipeline.tiles), received);
            const auto store = [&](float(&out)[1][OUT_N / 2]) {
                const int row = row0 + warp * 16 + lane / 4;
                SplitK::for_each_rank([&](auto groups, int owner) {
                    if (SPLIT_K > 1 && owner != rank) return;
                    epilogue.template apply_rows<groups.BEGIN, groups.END>(out[0], row, col0);
                    if constexpr (!TMA_STORE) {
                        store_row<groups.BEGIN, groups.END>(c + i64{row} * n, col0, n, row < m, out[0], 0);
                        store_row<groups.BEGIN, groups.END>(c + i64{row + 8} * n, col0, n, row + 8 < m, out[0], 2);
                    }
                });
                if constexpr (TMA_STORE) {
                    unsigned char* const staging = pipeline.after_tiles() + warpgroup * 64 * OUT_N * sizeof(T);
                    store_tile_tma<T>(c_map, staging, out, warpgroup, col0, row0 + warpgroup * 64);
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
    if constexpr (MULTICAST > 1) cluster::sync();  // another block may still multicast to this one
}

// Small-M product (swap-AB): rows of b are on the side where wgmma has 64 rows, of which WARPGROUP_N are used; rows of
// a, up to BLOCK_M, are on its narrow side. The last warp is the producer, WARPGROUPS consumer warpgroups have
// WARPGROUP_N columns of c each. A stage has two k-blocks. SPLIT_K blocks of a cluster split K. HALVES as above: a
// warpgroup has WARPGROUP_N rows of gate and as many of up.
template <typename T, int BLOCK_M, int WARPGROUPS, int WARPGROUP_N, int STAGES, int SPLIT_K, int HALVES, typename Epilogue>
__device__ __forceinline__ void gemm_small_m(const TensorMap& a_map, const TensorMap& b_map, T* c, int m, int n, int k,
                                             const Epilogue& epilogue) {
    using In = typename WgmmaType<T>::type;
    constexpr int BLOCK_N = WARPGROUPS * WARPGROUP_N, B_ROWS = HALVES * BLOCK_N, ROWS = B_ROWS + BLOCK_M;
    constexpr int K_BLOCKS_PER_STAGE = 2, STAGE_BYTES = K_BLOCKS_PER_STAGE * ROWS * SWIZZLE_BYTES;
    constexpr int STAGE_K = K_BLOCKS_PER_STAGE * BLOCK_K<T>, THREADS = WARPGROUPS * 128 + 32;
    using SplitK = SmallMSplitK<T, BLOCK_M, WARPGROUPS, WARPGROUP_N, SPLIT_K, THREADS>;
    static_assert(SPLIT_K == 1 || SplitK::OWN_BYTES <= STAGES * STAGE_BYTES, "the tile of c takes the memory of the stages");
    static_assert(SPLIT_K == 1 || HALVES == 1, "gate and up of a column are in one block");
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ Mbarrier received;
    TilePipeline<STAGES, STAGE_BYTES> pipeline(smem, SplitK::RECEIVED_BYTES);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const SmallMScheduler<BLOCK_M, BLOCK_N, SPLIT_K> scheduler(m, n, (k + STAGE_K - 1) / STAGE_K);  // zeros beyond K
    if (threadIdx.x == WARPGROUPS * 128) {
        pipeline.init(WARPGROUPS * 4);
        SplitK::init(received);
        prefetch_tensor_map(a_map), prefetch_tensor_map(b_map);
    }
    __syncwarp();
    Cluster<SPLIT_K>::begin(true);
    __syncthreads();
    float acc[HALVES][SplitK::COUNT];
    if (warp == WARPGROUPS * 4) {
        if (lane == 0) {
            const u64 policy = evict_first_policy();
            for (int t = scheduler.first_tile; t < scheduler.tiles; t += scheduler.tile_stride)
                scheduler.for_each_k_block(t, [&](int kb) {
                    Mbarrier& full = pipeline.producer_acquire();
#pragma unroll
                    for (int d = 0; d < K_BLOCKS_PER_STAGE; ++d) {
                        unsigned char* const to = pipeline.tile() + d * ROWS * SWIZZLE_BYTES;
                        const int k0 = (kb * K_BLOCKS_PER_STAGE + d) * BLOCK_K<T>;
#pragma unroll
                        for (int h = 0; h < HALVES; ++h)
                            tma_load_2d_hint(policy, full, to + h * BLOCK_N * SWIZZLE_BYTES, b_map, k0,
                                             scheduler.column(t) + h * n);
                        tma_load_2d(full, to + B_ROWS * SWIZZLE_BYTES, a_map, k0, scheduler.row(t));
                    }
                    pipeline.advance();
                });
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
                for (int d = 0; d < K_BLOCKS_PER_STAGE; ++d) {
                    const int first_row = d * ROWS;
                    const u64 b_desc =
                        smem_desc_k_major(pipeline.tile() + (first_row + warpgroup * WARPGROUP_N) * SWIZZLE_BYTES);
                    const u64 a_desc = smem_desc_k_major(pipeline.tile() + (first_row + B_ROWS) * SWIZZLE_BYTES);
#pragma unroll
                    for (int s = 0; s < WGMMAS; ++s)
#pragma unroll
                        for (int h = 0; h < HALVES; ++h)
                            WgmmaSS<In, In, BLOCK_M>::mma(acc[h], b_desc + h * (BLOCK_N * SWIZZLE_BYTES >> 4) + 2 * s,
                                                          a_desc + 2 * s, s > 0 || d > 0 || kb > 0);
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
                store_transposed<WARPGROUP_N>(acc[0], c, scheduler.row(t), col0, m, n);
            }
        }
        if (scheduler.k_blocks == 0)
#pragma unroll
            for (int r = 0; r < SplitK::COUNT; ++r) acc[0][r] = 0.0f;
    }
    if constexpr (SPLIT_K > 1) {
        __syncthreads();  // all warps are done with the stages
        SplitK::reduce_and_store(acc[0], reinterpret_cast<float*>(pipeline.tiles), pipeline.after_tiles(), received, c,
                                 scheduler.row(scheduler.first_tile), scheduler.column(scheduler.first_tile), m, n,
                                 [&](float(&four)[4], int row, int col) { epilogue.apply_four(four, row, col); });
    }
}

template <typename T, int BLOCK_N, int STAGES, int GROUP_M, int MULTICAST, int SPLIT_K, bool TMA_STORE>
__global__ void __launch_bounds__(384) hopper_matmul(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, T* c, int m, int n, int k) {
    gemm_large_m<T, BLOCK_N, STAGES, GROUP_M, MULTICAST, SPLIT_K, TMA_STORE, 1>(
        a_map, b_map, c_map, c, m, n, k, IdentityEpilogue{});
}
template <typename T, int BLOCK_N, int STAGES, int GROUP_M, int MULTICAST, int SPLIT_K, bool TMA_STORE, Activation ACT,
          bool HAS_BIAS, bool HAS_ADDEND, bool HAS_ALPHA_BETA>
__global__ void __launch_bounds__(384) hopper_linear(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, T* c, int m, int n, int k, const T* bias, const T* addend, i64 addend_stride,
    float alpha, float beta) {
    const Epilogue<T, ACT, HAS_BIAS, HAS_ADDEND, HAS_ALPHA_BETA> epilogue{bias, addend, addend_stride, alpha, beta, m, n};
    gemm_large_m<T, BLOCK_N, STAGES, GROUP_M, MULTICAST, SPLIT_K, TMA_STORE, 1>(a_map, b_map, c_map, c, m, n, k, epilogue);
}
template <typename T, int BLOCK_N, int STAGES, int GROUP_M, int MULTICAST, int SPLIT_K, bool TMA_STORE>
__global__ void __launch_bounds__(384) hopper_silu_mul(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, T* c, int m, int n, int k) {
    gemm_large_m<T, BLOCK_N, STAGES, GROUP_M, MULTICAST, SPLIT_K, TMA_STORE, 2>(
        a_map, b_map, c_map, c, m, n, k, IdentityEpilogue{});
}
template <typename T, int BLOCK_M, int WARPGROUPS, int WARPGROUP_N, int STAGES, int SPLIT_K>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 32) hopper_matmul_small_m(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    gemm_small_m<T, BLOCK_M, WARPGROUPS, WARPGROUP_N, STAGES, SPLIT_K, 1>(a_map, b_map, c, m, n, k, IdentityEpilogue{});
}
template <typename T, int BLOCK_M, int WARPGROUPS, int WARPGROUP_N, int STAGES, int SPLIT_K, Activation ACT, bool HAS_BIAS,
          bool HAS_ADDEND, bool HAS_ALPHA_BETA>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 32) hopper_linear_small_m(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k,
    const T* bias, const T* addend, i64 addend_stride, float alpha, float beta) {
    const Epilogue<T, ACT, HAS_BIAS, HAS_ADDEND, HAS_ALPHA_BETA> epilogue{bias, addend, addend_stride, alpha, beta, m, n};
    gemm_small_m<T, BLOCK_M, WARPGROUPS, WARPGROUP_N, STAGES, SPLIT_K, 1>(a_map, b_map, c, m, n, k, epilogue);
}
template <typename T, int BLOCK_M, int WARPGROUPS, int WARPGROUP_N, int STAGES, int SPLIT_K>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 32) hopper_silu_mul_small_m(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    gemm_small_m<T, BLOCK_M, WARPGROUPS, WARPGROUP_N, STAGES, SPLIT_K, 2>(a_map, b_map, c, m, n, k, IdentityEpilogue{});
}
