// Grouped product on Hopper by TMA and wgmma: c [rows, n] = a [rows, k] · b[g], where group g of rows has its own
// b [k, n]. Groups end where `offsets` say, on the device; rows of no group are zero, and all of c is NaN if the offsets
// lead outside or fall. See gemm_large_m.cuh, whose roles this kernel has.
#include "gemm.cuh"

constexpr int GROUPED_BLOCK_M = 128;

// Ends of groups and of their tiles, in shared memory. Group number `groups` has the rows of none. Tiles begin at
// multiples of ALIGNMENT rows, so the first of a group may have rows of the group before.
template <int ALIGNMENT>
struct GroupedTiles {
    int *row_ends, *tile_ends;  // of tiles of GROUPED_BLOCK_M rows
    int groups;
    bool sound = true;

    // All threads of the block call this; `memory` has 2 · (groups + 1) + 1 numbers.
    __device__ GroupedTiles(int* memory, const int* offsets, int groups, int rows)
        : row_ends(memory), tile_ends(memory + groups + 1), groups(groups) {
        int& wrong = memory[2 * (groups + 1)];
        if (threadIdx.x == 0) wrong = 0;
        __syncthreads();
        for (int g = threadIdx.x; g < groups; g += blockDim.x) {
            const int begin = g > 0 ? offsets[g - 1] : 0, end = offsets[g];
            if (begin < 0 || end < begin || end > rows) wrong = 1;
            row_ends[g] = end;
        }
        __syncthreads();
        sound = wrong == 0;
        if (threadIdx.x < 32) {
            const int lane = threadIdx.x;
            int tiles = 0;  // of the groups before
            for (int first = 0; first <= groups; first += 32) {
                const int g = first + lane;
                const int begin = g > 0 && g <= groups && sound ? row_ends[g - 1] : 0;
                const int end = g == groups ? rows : g < groups && sound ? row_ends[g] : begin;
                int sum = begin < end ? (end - aligned(begin) + GROUPED_BLOCK_M - 1) / GROUPED_BLOCK_M : 0;
#pragma unroll
                for (int distance = 1; distance < 32; distance *= 2) {
                    const int before = __shfl_up_sync(0xffffffff, sum, distance);
                    if (lane >= distance) sum += before;
                }
                if (g <= groups) tile_ends[g] = tiles + sum;
                tiles += __shfl_sync(0xffffffff, sum, 31);
            }
        }
        __syncthreads();
        for (int g = threadIdx.x; g <= groups; g += blockDim.x)
            if (g == groups) row_ends[g] = rows;
            else if (!sound) row_ends[g] = 0;
        __syncthreads();
    }
    static __device__ int aligned(int row) { return row / ALIGNMENT * ALIGNMENT; }
    __device__ int tiles() const { return tile_ends[groups]; }

    // Rows from `row` on, of which those from `begin` to `end` are the group's; and the number of the column of tiles.
    struct Tile {
        int group, row, begin, end, column;
        __device__ bool has(int row) const { return begin <= row && row < end; }
    };
    // Tile t: group by group, within a group column by column, so that tiles which run together share b.
    __device__ Tile tile(int t, int tiles_n) const {
        int group = 0, last = groups;  // the first group that ends behind this tile's row of tiles
        while (group < last) {
            const int middle = (group + last) / 2;
            if (tile_ends[middle] > t / tiles_n) last = middle;
            else group = middle + 1;
        }
        const int first = group > 0 ? tile_ends[group - 1] : 0, count = tile_ends[group] - first;
        const int i = t - first * tiles_n, begin = group > 0 ? row_ends[group - 1] : 0;
        return {group, aligned(begin) + i % count * GROUPED_BLOCK_M, begin, row_ends[group], i / count};
    }
};

// Persistent blocks; the last warpgroup's first thread is the producer, two consumer warpgroups have 64 rows each. Rows
// of a tile that are not the group's are loaded and multiplied with the others, and not stored. TMA reads from multiples
// of 16 bytes on, which are 8 rows of an MN-major a.
template <typename T, bool A_MN, bool B_MN, int BLOCK_N, int STAGES>
__global__ void __launch_bounds__(384) hopper_grouped_gemm(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, const int* offsets, int rows,
    int n, int k, int groups) {
    using In = typename WgmmaType<T>::type;
    using A = OperandTile<A_MN, GROUPED_BLOCK_M>;
    using B = OperandTile<B_MN, BLOCK_N>;
    using Tiles = GroupedTiles<A_MN ? 16 / sizeof(T) : 1>;
    static_assert(!B_MN || BLOCK_N % 64 == 0, "an MN-major tile of b has whole chunks");
    extern __shared__ __align__(1024) unsigned char smem[];
    TilePipeline<STAGES, A::BYTES + B::BYTES> pipeline(smem, (groups + 3) / 2 * 16);
    if (threadIdx.x == 0) pipeline.init(8), prefetch_tensor_map(a_map), prefetch_tensor_map(b_map);
    pdl_wait();
    const Tiles all(reinterpret_cast<int*>(pipeline.after_tiles()), offsets, groups, rows);
    pdl_launch_dependents();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int k_blocks = (k + A::K_PER_BLOCK - 1) / A::K_PER_BLOCK, tiles_n = (n + BLOCK_N - 1) / BLOCK_N;
    const int tiles = all.tiles() * tiles_n;
    if (warpgroup == 2) {
        decrease_registers<40>();
        if (warp == 8 && lane == 0) {
            const u64 policy = evict_normal_policy();
            for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
                const typename Tiles::Tile tile = all.tile(t, tiles_n);
                if (tile.group == groups) continue;
                for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                    Mbarrier& full = pipeline.producer_acquire();
                    A::load(policy, 0, 0, full, pipeline.tile(), a_map, kb, tile.row, 0);
                    B::load(policy, 0, 0, full, pipeline.tile() + A::BYTES, b_map, kb, tile.column * BLOCK_N, tile.group);
                }
            }
        }
    } else {
        increase_registers<232>();
        for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
            const typename Tiles::Tile tile = all.tile(t, tiles_n);
            const int row = tile.row + warp * 16 + lane / 4, column = tile.column * BLOCK_N;
            if (tile.group == groups) {
                const T fill = all.sound ? 0.0f : __int_as_float(0x7fffffff);
                for (int i = threadIdx.x; i < GROUPED_BLOCK_M * BLOCK_N; i += 256)
                    if (tile.has(tile.row + i / BLOCK_N) && column + i % BLOCK_N < n)
                        c[i64{tile.row + i / BLOCK_N} * n + column + i % BLOCK_N] = fill;
                continue;
            }
            float acc[BLOCK_N / 2];
            auto release = pipeline;  // one stage behind: its wgmmas may still be in flight
            for (int kb = 0; kb < k_blocks; ++kb, pipeline.advance()) {
                pipeline.consumer_wait();
                const u64 a_desc = A::descriptor(pipeline.tile(), warpgroup * 64);
                const u64 b_desc = B::descriptor(pipeline.tile() + A::BYTES);
                warpgroup_arrive(acc);
#pragma unroll
                for (int s = 0; s < WGMMAS; ++s)
                    WgmmaSS<In, In, BLOCK_N>::template mma<A_MN, B_MN>(acc, a_desc + s * A::K_STEP, b_desc + s * B::K_STEP,
                                                                       s > 0 || kb > 0);
                warpgroup_commit_batch();
                warpgroup_wait<1>();
                if (kb > 0) release.consumer_release(), release.advance();
            }
            warpgroup_wait_all(acc);
            release.consumer_release();
            store_row(c + i64{row} * n, column, n, tile.has(row), acc, 0);
            store_row(c + i64{row + 8} * n, column, n, tile.has(row + 8), acc, 2);
        }
    }
}
