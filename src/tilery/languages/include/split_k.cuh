// Split-K within a cluster: SPLIT_K blocks have partial sums of one tile in their registers. Each block reduces its own
// part of the tile; the others send it their partial sums by st.async. The order of the additions is fixed.
#pragma once
#include "cluster.cuh"
#include "mbarrier.cuh"

// Stores to the shared memory of block `rank`, at the addresses that `place` and `barrier` have in this block. The
// bytes complete on that block's barrier.
__device__ inline void store_async_remote(float4* place, Mbarrier& barrier, int rank, float4 value) {
    asm volatile("{ .reg .b32 remote, tx; mapa.shared::cluster.u32 remote, %0, %2; mapa.shared::cluster.u32 tx, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%3, %4, %5, %6}, [tx]; }"
                 ::"r"(smem_address(place)), "r"(smem_address(&barrier.state)), "r"(rank),
                   "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
}

// Large-M kernels: a tile of BLOCK_N columns over the 256 threads of two consumer warpgroups. A block owns some groups
// of eight columns and adds its own partial sums first, then the others' in the order of their ranks.
template <int BLOCK_N, int SPLIT_K>
struct LargeMSplitK {
    static constexpr int GROUPS = BLOCK_N / 8, MAX_GROUPS = (GROUPS + SPLIT_K - 1) / SPLIT_K, THREADS = 256;
    static constexpr int BYTES = (SPLIT_K - 1) * MAX_GROUPS * THREADS * 16;  // shared memory for what the others send

    // Calls visit(groups, rank) for every rank. The groups are a type: the compiler must know which accumulators they
    // are.
    template <int RANK>
    struct OwnedGroups {
        static constexpr int BEGIN = GROUPS * RANK / SPLIT_K, END = GROUPS * (RANK + 1) / SPLIT_K;
    };
    template <int RANK = 0, typename Visit>
    static __device__ __forceinline__ void for_each_rank(Visit visit) {
        visit(OwnedGroups<RANK>{}, RANK);
        if constexpr (RANK + 1 < SPLIT_K) for_each_rank<RANK + 1>(visit);
    }

    // One thread calls this before the cluster syncs.
    static __device__ void init(Mbarrier& received, int rank) {
        received.init();
        received.arrive_expect_tx((SPLIT_K - 1) * (GROUPS * (rank + 1) / SPLIT_K - GROUPS * rank / SPLIT_K) * THREADS * 16);
    }
    // All consumer threads call this while the producers call Cluster::sync. After that sync `buffer` is free in all
    // blocks.
    static __device__ __forceinline__ void reduce(float (&acc)[BLOCK_N / 2], int rank, float4* buffer, Mbarrier& received) {
        float4* const mine = buffer + threadIdx.x;
        Cluster<SPLIT_K>::sync();
        for_each_rank([&](auto groups, int to) {
            if (to == rank) return;
            float4* const place = mine + (rank - (rank > to)) * MAX_GROUPS * THREADS;
#pragma unroll
            for (int g = groups.BEGIN; g < groups.END; ++g)
                store_async_remote(place + (g - groups.BEGIN) * THREADS, received, to,
                                   {acc[4 * g], acc[4 * g + 1], acc[4 * g + 2], acc[4 * g + 3]});
        });
        received.wait(0);
        for_each_rank([&](auto groups, int owner) {
            if (owner != rank) return;
#pragma unroll
            for (int g = groups.BEGIN; g < groups.END; ++g)
#pragma unroll
                for (int p = 0; p < SPLIT_K - 1; ++p) {
                    const float4 other = mine[(p * MAX_GROUPS + g - groups.BEGIN) * THREADS];
                    acc[4 * g] += other.x, acc[4 * g + 1] += other.y, acc[4 * g + 2] += other.z, acc[4 * g + 3] += other.w;
                }
        });
    }
};

// Small-M kernels (swap-AB): a transposed tile of BLOCK_M × BLOCK_N, where each of WARPGROUPS warpgroups has
// WARPGROUP_N of the columns. The tile goes through shared memory. A block owns 1 / SPLIT_K of its float4s and adds the
// partial sums in the order of the ranks.
template <typename T, int BLOCK_M, int WARPGROUPS, int WARPGROUP_N, int SPLIT_K, int THREADS>
struct SmallMSplitK {
    static constexpr int BLOCK_N = WARPGROUPS * WARPGROUP_N, COUNT = BLOCK_M / 2;  // COUNT: accumulators of a thread
    static constexpr int PITCH = BLOCK_N + 4;  // floats from row to row of c: a warp writes to 32 banks
    static constexpr int FLOAT4S = BLOCK_M * BLOCK_N / 4 / SPLIT_K;  // that a block owns
    static constexpr int OWN_BYTES = BLOCK_M * PITCH * 4, RECEIVED_BYTES = SPLIT_K > 1 ? SPLIT_K * FLOAT4S * 16 : 0;
    using cluster = Cluster<SPLIT_K>;

    // One thread calls this before Cluster::begin.
    static __device__ void init(Mbarrier& received) {
        if constexpr (SPLIT_K > 1) {
            received.init();
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            received.arrive_expect_tx((SPLIT_K - 1) * FLOAT4S * 16);
        }
    }
    // All threads call this. The tile begins at (row0, col0) of c [m, n]. own_buffer takes the tile of this block and
    // recv_buffer what the others send. epilogue(four, row, column) may change four sums before they are stored.
    template <typename Epilogue>
    static __device__ void reduce_and_store(const float (&acc)[COUNT], float* own_buffer, void* recv_buffer,
                                            Mbarrier& received, T* c, int row0, int col0, int m, int n, Epilogue epilogue) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster::rank();
        const auto partials = reinterpret_cast<float4(*)[FLOAT4S]>(recv_buffer);
        const auto own = [&](int e) {
            return reinterpret_cast<float4*>(own_buffer + e / (BLOCK_N / 4) * PITCH + e % (BLOCK_N / 4) * 4);
        };
        if (warp < WARPGROUPS * 4) {
            const int line = warp % 4 * 16 + lane / 4, quad_lane = lane % 4;
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                const int col = line + r % 4 / 2 * 8;
                if (col < WARPGROUP_N)
                    own_buffer[(r / 4 * 8 + quad_lane * 2 + r % 2) * PITCH + warp / 4 * WARPGROUP_N + col] = acc[r];
            }
        }
        __syncthreads();
        if constexpr (SPLIT_K > 1) {
            cluster::wait_started();
#pragma unroll
            for (int p = 1; p < SPLIT_K; ++p) {
                const int to = (rank + p) % SPLIT_K;
                for (int e = threadIdx.x; e < FLOAT4S; e += THREADS)
                    store_async_remote(partials[rank] + e, received, to, *own(to * FLOAT4S + e));
            }
            received.wait(0);
        }
        for (int e = threadIdx.x; e < FLOAT4S; e += THREADS) {
            const int at = rank * FLOAT4S + e, row = row0 + at / (BLOCK_N / 4), col = col0 + at % (BLOCK_N / 4) * 4;
            float four[4] = {};
#pragma unroll
            for (int p = 0; p < SPLIT_K; ++p) {
                const float4 one = p == rank ? *own(at) : partials[p][e];
                four[0] += one.x, four[1] += one.y, four[2] += one.z, four[3] += one.w;
            }
            if (row >= m) continue;
            epilogue(four, row, col);
            T* const to = c + i64{row} * n + col;
            if (n % 4 == 0) {
                if (col < n) store(to, four);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (col + i < n) to[i] = static_cast<T>(four[i]);
            }
        }
    }
};
