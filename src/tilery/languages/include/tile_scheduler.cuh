// Which tile of c [m, n] comes when, and which part of K a block has.
#pragma once
#include "cluster.cuh"

// Blocks of a cluster with tiles of c in DOWN rows and ACROSS columns.
template <int DOWN, int ACROSS>
struct ClusterTiles {
    int row, column;  // of this block's tile

    __device__ ClusterTiles() {
        const int rank = Cluster<DOWN * ACROSS>::rank();
        row = rank / ACROSS, column = rank % ACROSS;
    }
    // The ranks of the blocks in this row and then of the others in this column.
    __device__ int partner(int i) const {
        if (i < ACROSS) return row * ACROSS + i;
        const int other = i - ACROSS;
        return (other + (other >= row)) * ACROSS + column;
    }
    // Which blocks need this block's tile of a, and which its tile of b, as bits.
    __device__ unsigned a_mask() const { return ((1u << ACROSS) - 1) << (row * ACROSS); }
    __device__ unsigned b_mask() const {
        unsigned mask = 0;
#pragma unroll
        for (int r = 0; r < DOWN; ++r) mask |= 1u << (r * ACROSS + column);
        return mask;
    }
};

// The order in which a block goes through its k-blocks: from another one on in each column of tiles. Blocks that have
// the same rows of a would else load the same lines at the same time, and wait for the few slices of the L2 that have
// them. Blocks that share rows of b go through it in the same order, so that it comes from memory once.
struct KOrder {
    int first, count;

    __device__ KOrder(int tile_n, int count, int most) : first(count > 0 ? tile_n % min(count, most) : 0), count(count) {}
    __device__ int operator()(int i) const { return i + first < count ? i + first : i + first - count; }
};

// Row and column of tile t. Tiles are numbered in groups of GROUP_M rows of tiles, column by column within a group, so
// that tiles which run at the same time share tiles of b in the L2.
template <int GROUP_M>
__device__ void tile_coordinates(int t, int tiles_m, int tiles_n, int& tile_m, int& tile_n) {
    const int group_size = GROUP_M * tiles_n, first_m = t / group_size * GROUP_M, rows = min(tiles_m - first_m, GROUP_M);
    tile_m = first_m + t % group_size % rows;
    tile_n = t % group_size / rows;
}

// Tiles of BLOCK_M × BLOCK_N of the small-M kernels, in `batch` products. SPLIT_K blocks of a cluster split K of one
// tile, and have no other. Without split-K blocks are persistent. A cluster may have DOWN × ACROSS tiles; t counts such
// groups. A k-block is here what one pipeline stage holds of K.
template <int BLOCK_M, int BLOCK_N, int SPLIT_K, int DOWN = 1, int ACROSS = 1>
struct SmallMScheduler {
    static constexpr int CLUSTER = SPLIT_K * DOWN * ACROSS;
    static_assert(SPLIT_K == 1 || DOWN * ACROSS == 1, "a cluster splits K or shares operands");
    ClusterTiles<DOWN, ACROSS> at;
    int first_tile, tile_stride, tiles_n, tiles_m, tiles;
    int k_begin, k_blocks;  // the k-blocks of this block

    __device__ SmallMScheduler(int m, int n, int all_k_blocks, int batch = 1)
        : first_tile(blockIdx.x / CLUSTER), tile_stride(gridDim.x / CLUSTER),
          tiles_n((n + BLOCK_N * ACROSS - 1) / (BLOCK_N * ACROSS)),
          tiles_m((m + BLOCK_M * DOWN - 1) / (BLOCK_M * DOWN)), tiles(tiles_n * tiles_m * batch),
          k_begin(all_k_blocks * Cluster<SPLIT_K>::rank() / SPLIT_K),
          k_blocks(all_k_blocks * (Cluster<SPLIT_K>::rank() + 1) / SPLIT_K - k_begin) {}
    __device__ int batch(int t) const { return t / (tiles_n * tiles_m); }
    __device__ int row(int t) const { return (t % tiles_m * DOWN + at.row) * BLOCK_M; }
    __device__ int tile_n(int t) const { return t / tiles_m % tiles_n; }  // tiles with the same rows of b run together
    __device__ int column(int t) const { return (tile_n(t) * ACROSS + at.column) * BLOCK_N; }
    // Calls visit(k_block) for every k-block of tile t.
    template <typename Visit>
    __device__ void for_each_k_block(int t, Visit visit) const {
        const KOrder order(tile_n(t), k_blocks, k_blocks);
        for (int i = 0; i < k_blocks; ++i) visit(k_begin + order(i));
    }
};
