// Which tile of c [m, n] comes when, and which part of K a block has.
#pragma once
#include "cluster.cuh"

// Row and column of tile t. Tiles are numbered in groups of GROUP_M rows of tiles, column by column within a group, so
// that tiles which run at the same time share tiles of b in the L2.
template <int GROUP_M>
__device__ void tile_coordinates(int t, int tiles_m, int tiles_n, int& tile_m, int& tile_n) {
    const int group_size = GROUP_M * tiles_n, first_m = t / group_size * GROUP_M, rows = min(tiles_m - first_m, GROUP_M);
    tile_m = first_m + t % group_size % rows;
    tile_n = t % group_size / rows;
}

// Tiles of BLOCK_M × BLOCK_N of the small-M kernels, in `batch` products. SPLIT_K blocks of a cluster split K of one
// tile, and have no other. Without split-K blocks are persistent. The MULTICAST blocks of a cluster have tiles side by
// side, with the same rows; t counts such groups. A k-block is here what one pipeline stage holds of K.
template <int BLOCK_M, int BLOCK_N, int SPLIT_K, int MULTICAST = 1>
struct SmallMScheduler {
    static_assert(SPLIT_K == 1 || MULTICAST == 1, "a cluster splits K or shares rows");
    int rank, first_tile, tile_stride, tiles_n, tiles_m, tiles;
    int k_begin, k_blocks;  // the k-blocks of this block

    __device__ SmallMScheduler(int m, int n, int all_k_blocks, int batch = 1)
        : rank(Cluster<SPLIT_K * MULTICAST>::rank()), first_tile(blockIdx.x / (SPLIT_K * MULTICAST)),
          tile_stride(gridDim.x / (SPLIT_K * MULTICAST)), tiles_n((n + BLOCK_N * MULTICAST - 1) / (BLOCK_N * MULTICAST)),
          tiles_m((m + BLOCK_M - 1) / BLOCK_M), tiles(tiles_n * tiles_m * batch),
          k_begin(SPLIT_K == 1 ? 0 : all_k_blocks * rank / SPLIT_K),
          k_blocks(SPLIT_K == 1 ? all_k_blocks : all_k_blocks * (rank + 1) / SPLIT_K - k_begin) {}
    __device__ int batch(int t) const { return t / (tiles_n * tiles_m); }
    __device__ int row(int t) const { return t % tiles_m * BLOCK_M; }  // tiles that read the same rows of b run together
    __device__ int column(int t) const {
        return (t / tiles_m % tiles_n * MULTICAST + (MULTICAST > 1 ? rank : 0)) * BLOCK_N;
    }
    // Calls visit(k_block) for every k-block of tile t. With up to 16 rows each tile begins at another k-block, so that
    // the blocks do not read the same columns, and so the same memory banks, at once. With more rows all begin at the
    // first: then a is found in the L2, where other blocks have just loaded it.
    template <typename Visit>
    __device__ void for_each_k_block(int t, Visit visit) const {
        int i = BLOCK_M <= 16 && k_blocks > 0 ? t % k_blocks : 0;
        for (int count = 0; count < k_blocks; ++count) {
            visit(k_begin + i);
            if (++i == k_blocks) i = 0;
        }
    }
};
