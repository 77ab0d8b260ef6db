// c [m, n] = a [m, k] · b [n, k]ᵀ in fp8 on Hopper by TMA and wgmma. a has a scale for every row and 128 of K, b for
// every 128 × 128 block. There is a large-M kernel, fp8_matmul, and a small-M (swap-AB) kernel, fp8_matmul_small_m.
//
// wgmma accumulates fp8 products with few bits. So every k-block of 128 starts new partial sums, which are then scaled
// and added to the accumulators in fp32 (promotion), while another warpgroup uses the tensor cores.
#include "split_k.cuh"
#include "store_tiles.cuh"
#include "tile_pipeline.cuh"
#include "tile_scheduler.cuh"

constexpr int BLOCK_K = SWIZZLE_BYTES;  // a k-block has one scale and is as wide as the swizzle
constexpr int WGMMAS = BLOCK_K / 32;  // along K in a k-block

// The kernels take it by value and not as __grid_constant__, with which some instances need up to 4 registers more
// (NVRTC 13.4).
template <typename T>
struct Fp8MatmulParams {
    const float* a_scale;
    i64 a_scale_row_stride;
    i64 a_scale_col_stride;
    const float* b_scale;
    i64 b_scale_row_stride;
    i64 b_scale_col_stride;
    T* c;
    int m;
    int n;
    int k;
};

// Large-M kernel. Persistent blocks with tiles of 128 × BLOCK_N. Of the last warpgroup, one warp loads tiles by TMA and
// one loads scales by cp.async; two consumer warpgroups have 64 rows each. The columns are cut into N_PARTS of WGMMA_N
// that share one set of partial sums: a second set would not fit the registers. TMA_STORE: c goes through shared memory
// and is stored by TMA while the next tile is multiplied. TA and TB are the fp8 types of a and b, as in PTX.
template <typename TA, typename TB, typename T, int N_PARTS, int WGMMA_N, int STAGES, int GROUP_M, bool TMA_STORE>
__global__ void __launch_bounds__(384) fp8_matmul(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, const Fp8MatmulParams<T> p) {
    constexpr int BLOCK_M = 128, BLOCK_N = N_PARTS * WGMMA_N, COUNT = WGMMA_N / 2;
    constexpr int A_BYTES = BLOCK_M * BLOCK_K, STAGE_BYTES = A_BYTES + BLOCK_N * BLOCK_K;
    // Whether all columns of a part have the same scale of b; else they may have two.
    constexpr bool ONE_SCALE = BLOCK_N % 128 == 0 || 128 % BLOCK_N == 0;
    constexpr int B_SCALES = ONE_SCALE ? N_PARTS : 2 * N_PARTS;
    extern __shared__ __align__(1024) unsigned char smem[];
    TilePipeline<STAGES, STAGE_BYTES, BLOCK_M + 4> pipeline(smem, TMA_STORE ? BLOCK_M * BLOCK_N * sizeof(T) : 0);
    if (threadIdx.x == 0) pipeline.init(8), prefetch_tensor_map(a_map), prefetch_tensor_map(b_map);
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    // The shuffle tells the compiler that the warp's number is the same in all lanes.
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const int lane = threadIdx.x % 32, k_blocks = p.k / BLOCK_K, first_tile = blockIdx.x, tile_stride = gridDim.x;
    const int tiles_m = (p.m + BLOCK_M - 1) / BLOCK_M, tiles_n = (p.n + BLOCK_N - 1) / BLOCK_N, tiles = tiles_m * tiles_n;
    const auto locate = [&](int t, int& row0, int& col0) {
        int i, j;
        tile_coordinates<GROUP_M>(t, tiles_m, tiles_n, i, j);
        row0 = i * BLOCK_M, col0 = j * BLOCK_N;
    };
    int row0, col0;
    if (warpgroup == 2) {
        decrease_registers<56>();
        if (warp == 8 && lane == 0) {  // loads tiles
            for (int t = first_tile; t < tiles; t += tile_stride) {
                locate(t, row0, col0);
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                    Mbarrier& full = pipeline.producer_acquire();
                    tma_load_2d(full, pipeline.tile(), a_map, kb * BLOCK_K, row0);
                    tma_load_2d(full, pipeline.tile() + A_BYTES, b_map, kb * BLOCK_K, col0);
                }
            }
        } else if (warp == 9) {  // loads scales
            for (int t = first_tile; t < tiles; t += tile_stride) {
                locate(t, row0, col0);
                // Beyond the edges the last scale is read again; what it scales is not stored.
                const float* a_scale_at[BLOCK_M / 32];
#pragma unroll
                for (int q = 0; q < BLOCK_M / 32; ++q)
                    a_scale_at[q] = p.a_scale + min(row0 + 32 * q + lane, p.m - 1) * p.a_scale_row_stride;
                const int column =
                    ONE_SCALE ? col0 + lane % N_PARTS * 128 : col0 + lane / 2 % N_PARTS * WGMMA_N + lane % 2 * 128;
                const float* b_scale_at = p.b_scale + min(column, p.n - 1) / 128 * p.b_scale_row_stride;
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance(), b_scale_at += p.b_scale_col_stride) {
                    pipeline.wait_empty();
#pragma unroll
                    for (int q = 0; q < BLOCK_M / 32; ++q, a_scale_at[q - 1] += p.a_scale_col_stride)
                        pipeline.load_scale(32 * q + lane, a_scale_at[q]);
                    if (lane < B_SCALES) pipeline.load_scale(BLOCK_M + lane, b_scale_at);
                    pipeline.commit_scales();
                }
            }
        }
    } else {
        increase_registers<224>();
        const int row = warp * 16 + lane / 4;
        struct Scales { float row0, row8, b[B_SCALES]; } now, next;  // of a: this thread's two rows, 8 apart
        const auto read = [&](Scales& s, const float* scales) {
            s.row0 = scales[row], s.row8 = scales[row + 8];
#pragma unroll
            for (int i = 0; i < B_SCALES; ++i) s.b[i] = scales[BLOCK_M + i];
        };
        auto ahead = pipeline;  // one stage ahead
        if (first_tile < tiles) pipeline.consumer_wait(), read(now, pipeline.scales());
        for (int t = first_tile; t < tiles; t += tile_stride) {
            if constexpr (!ONE_SCALE) locate(t, row0, col0);
            float acc[N_PARTS][COUNT] = {}, partial[COUNT];
            for (int kb = 0; kb < k_blocks; ++kb) {
                const u64 a_desc = smem_desc_k_major(pipeline.tile() + warpgroup * 64 * BLOCK_K);
#pragma unroll
                for (int part = 0; part < N_PARTS; ++part) {
                    const u64 b_desc = smem_desc_k_major(pipeline.tile() + A_BYTES + part * WGMMA_N * BLOCK_K);
                    warpgroup_arrive(partial);
#pragma unroll
                    for (int s = 0; s < WGMMAS; ++s)
                        WgmmaSS<TA, TB, WGMMA_N>::mma(partial, a_desc + 2 * s, b_desc + 2 * s, s);
                    warpgroup_commit_batch();
                    if (part == N_PARTS - 1) {  // wait for the next stage and read its scales while the wgmmas run
                        ahead.advance();
                        if (kb + 1 < k_blocks || t + tile_stride < tiles) ahead.consumer_wait(), read(next, ahead.scales());
                    }
                    warpgroup_wait_all(partial);
                    if (part == N_PARTS - 1) pipeline.consumer_release();
                    // Columns of this part from `cut` on have the second scale of b.
                    const int w = ONE_SCALE ? part : 2 * part, cut = ONE_SCALE ? 128 : 128 - (col0 + part * WGMMA_N) % 128;
                    const float low0 = now.row0 * now.b[w], low8 = now.row8 * now.b[w];
                    const float high0 = ONE_SCALE ? 0.0f : now.row0 * now.b[w + 1];
                    const float high8 = ONE_SCALE ? 0.0f : now.row8 * now.b[w + 1];
#pragma unroll
                    for (int r = 0; r < COUNT; r += 4) {
                        const bool low = ONE_SCALE || 2 * r < cut;
                        const float scale0 = low ? low0 : high0, scale8 = low ? low8 : high8;
                        acc[part][r] += partial[r] * scale0, acc[part][r + 1] += partial[r + 1] * scale0;
                        acc[part][r + 2] += partial[r + 2] * scale8, acc[part][r + 3] += partial[r + 3] * scale8;
                    }
                }
                now = next;
                pipeline = ahead;
            }
            locate(t, row0, col0);
            if constexpr (TMA_STORE) {
                unsigned char* const staging = pipeline.after_tiles() + warpgroup * 64 * BLOCK_N * sizeof(T);
                store_tile_tma<T>(c_map, staging, acc, warpgroup, col0, row0 + warpgroup * 64);
            } else {
#pragma unroll
                for (int part = 0; part < N_PARTS; ++part) {
                    const int col = col0 + part * WGMMA_N;
                    store_row(p.c + i64{row0 + row} * p.n, col, p.n, row0 + row < p.m, acc[part], 0);
                    store_row(p.c + i64{row0 + row + 8} * p.n, col, p.n, row0 + row + 8 < p.m, acc[part], 2);
                }
            }
        }
        if (TMA_STORE && threadIdx.x % 128 == 0) tma_store_wait_read();
    }
}

// Small-M kernel (swap-AB): rows of b are on the side where wgmma has 64 rows, of which WARPGROUP_N are used; rows of
// a, up to BLOCK_M, are on its narrow side. WARPGROUPS consumer warpgroups have WARPGROUP_N columns of c each; behind
// them one warp loads tiles and one loads scales. SPLIT_K blocks of a cluster split K. Where the registers allow two
// sets of partial sums, one k-block is multiplied while the partial sums of the one before are promoted.
template <typename TA, typename TB, typename T, int BLOCK_M, int WARPGROUPS, int WARPGROUP_N, int STAGES, int SPLIT_K>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 64) fp8_matmul_small_m(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const Fp8MatmulParams<T> p) {
    constexpr int BLOCK_N = WARPGROUPS * WARPGROUP_N, THREADS = WARPGROUPS * 128 + 64;
    constexpr int B_BYTES = BLOCK_N * BLOCK_K, STAGE_BYTES = B_BYTES + BLOCK_M * BLOCK_K;
    constexpr bool ONE_SCALE = 128 % WARPGROUP_N == 0;  // all columns of a warpgroup have one scale of b; else maybe two
    constexpr int B_SCALES = 128 % BLOCK_N == 0 ? 1 : BLOCK_N % 128 == 0 ? BLOCK_N / 128 : BLOCK_N / 128 + 2;  // of a tile
    using SplitK = SmallMSplitK<T, BLOCK_M, WARPGROUPS, WARPGROUP_N, SPLIT_K, THREADS>;
    constexpr int COUNT = SplitK::COUNT, REGISTERS = 65536 / ((THREADS + 127) / 128 * 128);
    constexpr int PARTIALS = 3 * COUNT + 40 <= REGISTERS ? 2 : 1;  // sets of partial sums
    static_assert(SPLIT_K == 1 || SplitK::OWN_BYTES <= STAGES * STAGE_BYTES, "the tile of c takes the memory of the stages");
    static_assert(B_SCALES <= 4, "a stage has room for four");
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ Mbarrier received;
    TilePipeline<STAGES, STAGE_BYTES, BLOCK_M + 4> pipeline(smem, SplitK::RECEIVED_BYTES);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const SmallMScheduler<BLOCK_M, BLOCK_N, SPLIT_K> scheduler(p.m, p.n, p.k / BLOCK_K);
    if (threadIdx.x == WARPGROUPS * 128) {
        pipeline.init(WARPGROUPS * 4);
        SplitK::init(received);
        prefetch_tensor_map(a_map), prefetch_tensor_map(b_map);
    }
    __syncwarp();
    Cluster<SPLIT_K>::begin(true);
    __syncthreads();
    float acc[COUNT] = {};
    if (warp == WARPGROUPS * 4) {  // loads tiles
        if (lane == 0) {
            const u64 policy = scheduler.tiles_m == 1 ? evict_first_policy() : evict_normal_policy();
            for (int t = scheduler.first_tile; t < scheduler.tiles; t += scheduler.tile_stride) {
                const int row = scheduler.row(t), column = scheduler.column(t);
                scheduler.for_each_k_block(t, [&](int kb) {
                    Mbarrier& full = pipeline.producer_acquire();
                    tma_load_2d_hint(policy, full, pipeline.tile(), b_map, kb * BLOCK_K, column);
                    tma_load_2d(full, pipeline.tile() + B_BYTES, a_map, kb * BLOCK_K, row);
                    pipeline.advance();
                });
            }
        }
        __syncwarp();
    } else if (warp > WARPGROUPS * 4) {  // loads scales
        constexpr int SCALES_PER_LANE = (BLOCK_M + 31) / 32;
        for (int t = scheduler.first_tile; t < scheduler.tiles; t += scheduler.tile_stride) {
            // Beyond the edges the last scale is read again; what it scales is not stored.
            const float* a_scale_at[SCALES_PER_LANE];
#pragma unroll
            for (int q = 0; q < SCALES_PER_LANE; ++q)
                a_scale_at[q] = p.a_scale + min(scheduler.row(t) + 32 * q + lane, p.m - 1) * p.a_scale_row_stride;
            const float* const b_scale_at =
                p.b_scale + min(scheduler.column(t) / 128 + lane % B_SCALES, (p.n - 1) / 128) * p.b_scale_row_stride;
            scheduler.for_each_k_block(t, [&](int kb) {
                pipeline.wait_empty();
#pragma unroll
                for (int q = 0; q < SCALES_PER_LANE; ++q)
                    if (32 * q + lane < BLOCK_M) pipeline.load_scale(32 * q + lane, a_scale_at[q] + kb * p.a_scale_col_stride);
                if (lane < B_SCALES) pipeline.load_scale(BLOCK_M + lane, b_scale_at + kb * p.b_scale_col_stride);
                pipeline.commit_scales();
                pipeline.advance();
            });
        }
    } else {
        float partials[PARTIALS][COUNT];
        for (int t = scheduler.first_tile; t < scheduler.tiles; t += scheduler.tile_stride) {
            // Which scales of b this thread's two columns of c have, counted from the tile's first.
            const int col = scheduler.column(t) % 128 + warpgroup * WARPGROUP_N;
            const int line = ONE_SCALE ? 0 : warp % 4 * 16 + lane / 4, quad_lane = lane % 4;
            const int scale0 = BLOCK_M + (col + line) / 128, scale8 = ONE_SCALE ? scale0 : BLOCK_M + (col + line + 8) / 128;
            auto ahead = pipeline;  // stages that are multiplied; `pipeline` is at those that are promoted
            const auto multiply = [&](float(&partial)[COUNT]) {
                ahead.consumer_wait();
                const u64 b_desc = smem_desc_k_major(ahead.tile() + warpgroup * WARPGROUP_N * BLOCK_K);
                const u64 a_desc = smem_desc_k_major(ahead.tile() + B_BYTES);
                warpgroup_arrive(partial);
#pragma unroll
                for (int s = 0; s < WGMMAS; ++s) WgmmaSS<TB, TA, BLOCK_M>::mma(partial, b_desc + 2 * s, a_desc + 2 * s, s);
                warpgroup_commit_batch();
                ahead.advance();
            };
            const auto promote = [&](float(&partial)[COUNT]) {
                warpgroup_fence_operand(partial);
                const float b0 = pipeline.scales()[scale0], b8 = ONE_SCALE ? b0 : pipeline.scales()[scale8];
#pragma unroll
                for (int g = 0; g < COUNT; g += 4) {
                    const float2 a = *reinterpret_cast<const float2*>(pipeline.scales() + g * 2 + quad_lane * 2);
                    acc[g] += partial[g] * (a.x * b0), acc[g + 1] += partial[g + 1] * (a.y * b0);
                    acc[g + 2] += partial[g + 2] * (a.x * b8), acc[g + 3] += partial[g + 3] * (a.y * b8);
                }
                pipeline.consumer_release();
                pipeline.advance();
            };
#pragma unroll
            for (int r = 0; r < COUNT; ++r) acc[r] = 0.0f;
            int kb = 0;
            if constexpr (PARTIALS == 2)
                for (; kb + 1 < scheduler.k_blocks; kb += 2) {
                    multiply(partials[0]), multiply(partials[1]);
                    warpgroup_wait<1>(), promote(partials[0]);
                    warpgroup_wait<0>(), promote(partials[1]);
                }
            for (; kb < scheduler.k_blocks; ++kb) multiply(partials[0]), warpgroup_wait<0>(), promote(partials[0]);
            if constexpr (SPLIT_K == 1)
                store_transposed<WARPGROUP_N>(acc, p.c, scheduler.row(t), scheduler.column(t) + warpgroup * WARPGROUP_N,
                                              p.m, p.n);
        }
    }
    if constexpr (SPLIT_K > 1) {
        __syncthreads();  // all warps are done with the stages
        SplitK::reduce_and_store(acc, reinterpret_cast<float*>(pipeline.tiles), pipeline.after_tiles(), received, p.c,
                                 scheduler.row(scheduler.first_tile), scheduler.column(scheduler.first_tile), p.m, p.n,
                                 [](float (&)[4], int, int) {});
    }
}
