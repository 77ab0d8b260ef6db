// Tiles of a product's operands in shared memory: how TMA loads them and where wgmma finds them. For sm_90a.
#pragma once
#include "tma.cuh"

// A tile of ROWS rows of an operand [rows, K] and one k-block: SWIZZLE_BYTES bytes along K, K_PER_BLOCK values.
//
// K-major: the tile has ROWS rows of SWIZZLE_BYTES bytes. MN_MAJOR (16-bit types): the operand lies in memory as
// [K, rows], and the tile has chunks of K_PER_BLOCK rows along K, each with 64 of the operand's rows side by side. Chunks
// begin STEP rows of the operand apart.
//
// MULTICAST blocks of a cluster need the same tile: each loads a part and multicasts it to those in `mask`.
template <bool MN_MAJOR, int ROWS, int MULTICAST = 1, int STEP = 64>
struct OperandTile {
    static constexpr int K_PER_BLOCK = 64, CHUNKS = (ROWS + STEP - 1) / STEP, CHUNK_BYTES = K_PER_BLOCK * SWIZZLE_BYTES;
    static constexpr int PART = (MN_MAJOR ? K_PER_BLOCK : ROWS) / MULTICAST;  // lines of 128 bytes that a block loads
    static constexpr int BYTES = MN_MAJOR ? CHUNKS * CHUNK_BYTES : ROWS * SWIZZLE_BYTES;
    static constexpr int K_STEP = MN_MAJOR ? 16 * SWIZZLE_BYTES >> 4 : 32 >> 4;  // of the descriptor, for each wgmma
    static_assert(PART * SWIZZLE_BYTES % SWIZZLE_ATOM == 0, "parts start at multiples of the swizzle atom");

    // `part`: which of the blocks that need the tile this one is.
    static __device__ void load(u64 policy, int part, unsigned mask, Mbarrier& barrier, unsigned char* to,
                                const TensorMap& map, int k_block, int row, int batch) {
        const int k = k_block * K_PER_BLOCK, skip = MULTICAST > 1 ? part * PART : 0;
        if constexpr (MN_MAJOR) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
                tma_load_3d<(MULTICAST > 1)>(policy, mask, barrier, to + c * CHUNK_BYTES + skip * SWIZZLE_BYTES, map,
                                             row + c * STEP, k + skip, batch);
        } else {
            tma_load_3d<(MULTICAST > 1)>(policy, mask, barrier, to + skip * SWIZZLE_BYTES, map, k, row + skip, batch);
        }
    }
    // From `row` of the tile on: a multiple of 8, or of STEP if the tile is MN-major.
    static __device__ u64 descriptor(const unsigned char* tile, int row = 0) {
        if constexpr (MN_MAJOR) return smem_desc_mn_major(tile + row / STEP * CHUNK_BYTES, CHUNK_BYTES);
        else return smem_desc_k_major(tile + row * SWIZZLE_BYTES);
    }
};
