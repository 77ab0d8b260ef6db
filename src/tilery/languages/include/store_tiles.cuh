// Stores of wgmma accumulators to global memory: row by row from registers, transposed from registers (small-M
// kernels), or by TMA through shared memory.
#pragma once
#include "tma.cuh"

// Transposes 4 × 4 words over the four threads of a quad: thread q gets word q of each thread, in the order of the
// threads.
__device__ inline void transpose_quad(unsigned (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const unsigned received = __shfl_xor_sync(0xffffffff, upper ? words[i] : words[i | bit], bit);
            (upper ? words[i] : words[i | bit]) = received;
        }
    }
}

// Transposes an 8 × 8 matrix of 16-bit values over a warp: thread 4 i + j has elements (i, 2 j) and (i, 2 j + 1).
__device__ inline unsigned transpose_8x8(unsigned pair) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// Stores one row of accumulators to the 2 · COUNT columns from col0 on. A thread has pairs of columns, at acc[first],
// acc[first + 4] and so on; first is 0 for its upper row and 2 for its lower one. Only column groups (of eight columns)
// BEGIN to END are stored; END = -1 means all. All threads of a warp call this; `inside` is false for a row beyond c.
template <int BEGIN = 0, int END = -1, typename T, int COUNT>
__device__ __forceinline__ void store_row(T* row, int col0, int n, bool inside, const float (&acc)[COUNT], int first) {
    constexpr int GROUPS = END < 0 ? COUNT / 4 : END;
    const int quad_lane = threadIdx.x % 4;
    int g = BEGIN;
    if constexpr (sizeof(T) == 2) {
        if (n % 8 == 0) {  // 16 bytes a thread, 64 a quad
#pragma unroll
            for (; g + 4 <= GROUPS; g += 4) {
                unsigned words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    words[i] = Vec<T, 2>::from_float({acc[4 * (g + i) + first], acc[4 * (g + i) + first + 1]}).bits();
                transpose_quad(words);
                const int col = col0 + 8 * (g + quad_lane);
                if (inside && col < n) store_word(row + col, uint4{words[0], words[1], words[2], words[3]});
            }
        }
    }
#pragma unroll
    for (int rest = BEGIN; rest < GROUPS; ++rest) {
        if (rest < g) continue;
        const int col = col0 + 8 * rest + 2 * quad_lane;
        const float pair[2] = {acc[4 * rest + first], acc[4 * rest + first + 1]};
        if (!inside || col >= n) continue;
        if (n % 2 == 0) {
            store(row + col, pair);
        } else {
            row[col] = static_cast<T>(pair[0]);
            if (col + 1 < n) row[col + 1] = static_cast<T>(pair[1]);
        }
    }
}

// Rounds a warpgroup's accumulators to T and writes them to shared memory, from column col0 on, as tiles of TMA and
// wgmma: 64 rows of 128 bytes, swizzled, side by side. `thread` is that of the warpgroup.
template <typename T, int COUNT>
__device__ __forceinline__ void store_swizzled(unsigned char* to, const float (&acc)[COUNT], int col0, int thread) {
    constexpr int TILE_COLS = SWIZZLE_BYTES / sizeof(T), TILE_BYTES = 64 * SWIZZLE_BYTES;
#pragma unroll
    for (int r = 0; r < COUNT; r += 2) {  // a quad writes 16 bytes; the 8 rows of a warp lie in different banks
        const int column = col0 + r / 4 * 8, line = thread / 32 * 16 + thread % 32 / 4 + r % 4 * 4;
        unsigned char* const word = to + column / TILE_COLS * TILE_BYTES + line * SWIZZLE_BYTES +
                                    ((column % TILE_COLS / 8) ^ (line % 8)) * 16 + thread % 4 * 4;
        *reinterpret_cast<unsigned*>(word) = Vec<T, 2>::from_float({acc[r], acc[r + 1]}).bits();
    }
}

// Stores the 64 rows of a warpgroup by TMA, from (row0, col0) on, through a staging buffer of as many bytes in shared
// memory. The next tile is multiplied meanwhile. At the end of the kernel the warpgroup's first thread calls
// tma_store_wait_read.
template <typename T, int N_PARTS, int COUNT>
__device__ void store_tile_tma(const TensorMap& map, unsigned char* staging, const float (&acc)[N_PARTS][COUNT],
                               int warpgroup, int col0, int row0) {
    constexpr int PART_N = 2 * COUNT, BOX_COLS = SWIZZLE_BYTES / sizeof(T), BOX_BYTES = 64 * SWIZZLE_BYTES;
    static_assert(sizeof(T) == 2 && N_PARTS * PART_N % BOX_COLS == 0, "boxes of 64 columns");
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));  // else the compiler keeps the addresses in registers through the whole mainloop
    if (thread == 0) tma_store_wait_read();
    warpgroup_sync(warpgroup);
#pragma unroll
    for (int p = 0; p < N_PARTS; ++p) store_swizzled<T>(staging, acc[p], p * PART_N, thread);
    fence_async_proxy();
    warpgroup_sync(warpgroup);
    if (thread == 0) {
#pragma unroll
        for (int j = 0; j < N_PARTS * PART_N / BOX_COLS; ++j)
            tma_store_2d(map, staging + j * BOX_BYTES, col0 + j * BOX_COLS, row0);
        tma_store_commit();
    }
}

// Stores the transposed tile of a warpgroup (swap-AB): rows of the accumulators are WARPGROUP_N columns of c, from col0
// on, and columns of the accumulators are rows of c, from row0 on.
template <int WARPGROUP_N, typename T, int COUNT>
__device__ void store_transposed(const float (&acc)[COUNT], T* c, int row0, int col0, int m, int n) {
    const int warp_col = threadIdx.x / 32 % 4 * 16, line = threadIdx.x % 32 / 4, quad_lane = threadIdx.x % 4;
    if (warp_col >= WARPGROUP_N) return;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
            const int row = row0 + r / 4 * 8 + quad_lane * 2 + r % 2, col = warp_col + r % 4 / 2 * 8 + line;
            if (col < WARPGROUP_N && col0 + col < n && row < m) c[i64{row} * n + col0 + col] = acc[r];
        }
    } else {
        constexpr int GROUPS = COUNT / 4;  // of eight rows of c, which are stored two at a time
#pragma unroll
        for (int g = 0; g < GROUPS; g += 2) {
            const bool two = g + 1 < GROUPS;
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < (two ? 4 : 2); ++i)
                words[i] = transpose_8x8(Vec<T, 2>::from_float({acc[4 * g + 2 * i], acc[4 * g + 2 * i + 1]}).bits());
            if (two && n % 8 == 0) {  // 16 bytes a thread
                transpose_quad(words);
                const int row = row0 + (g + quad_lane / 2) * 8 + line, col = warp_col + quad_lane % 2 * 8;
                if (col < WARPGROUP_N && col0 + col < n && row < m)
                    store_word(c + i64{row} * n + col0 + col, uint4{words[0], words[1], words[2], words[3]});
                continue;
            }
#pragma unroll
            for (int i = 0; i < (two ? 4 : 2); ++i) {
                const int row = row0 + (g + i / 2) * 8 + line, col = warp_col + i % 2 * 8 + quad_lane * 2;
                if (col >= WARPGROUP_N || col0 + col >= n || row >= m) continue;
                T* const to = c + i64{row} * n + col0 + col;
                Vec<T, 2> pair;
                memcpy(&pair, &words[i], sizeof(pair));
                if (n % 2 == 0) {
                    pair.store_global(to);
                } else {
                    to[0] = pair.data[0];
                    if (col0 + col + 1 < n) to[1] = pair.data[1];
                }
            }
        }
    }
}
