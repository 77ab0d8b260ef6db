// 6. Tensor cores (mma.sync, sm_80): a warp multiplies 16 × 16 by 16 × 8 in one instruction.
//
// Its operands are fragments, spread over the registers of a warp. ldmatrix loads them: 8 lines of 16 bytes for each of
// 4 matrices. Lines are 128 bytes now, which is all banks, so the swizzle is an xor with the line's number. The product
// is so much faster that memory becomes a limit: tiles of c are numbered in groups of GROUP_M rows of tiles, so that
// blocks which run together share tiles in the L2.
#include "common.cuh"

using T = __nv_bfloat16;
constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 64, STAGES = 3, THREADS = 128, GROUP_M = 16;
constexpr int VEC = 8, VECS = BLOCK_K / VEC;  // elements of 16 bytes; vectors of a line
constexpr int LINES = THREADS / VECS, COPIES = BLOCK_M / LINES;  // lines that the block copies at once; copies of a thread
constexpr int TILE_SIZE = BLOCK_M * BLOCK_K, WARP_M = 64, WARP_N = 64;  // a warp's part of the tile of c

__device__ int swizzled(int line, int i) { return line * BLOCK_K + (i / VEC ^ line % VECS) * VEC + i % VEC; }

__device__ void cp_async(T* to, const T* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(smem_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads 16 lines from `line` on by 16 values from `i` on: words 0 and 2 are of the first 8 lines, 1 and 3 of the
// others.
__device__ void load_fragment(unsigned (&words)[4], const T* tile, int line, int i) {
    const int lane = threadIdx.x % 32;
    const T* const from = tile + swizzled(line + lane % 16, i + lane / 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(smem_address(from)) : "memory");
}

// c [16, 8] += a [16, 16] · b [16, 8].
__device__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__global__ void __launch_bounds__(THREADS, 2) tensor_cores(const T* a, const T* b, T* c, int m, int n, int k) {
    extern __shared__ __align__(128) unsigned char smem[];
    T* const stages = reinterpret_cast<T*>(smem);
    const int tiles_m = m / BLOCK_M, tiles_n = n / BLOCK_N, k_blocks = k / BLOCK_K;
    const int first_m = blockIdx.x / (GROUP_M * tiles_n) * GROUP_M, in_group = blockIdx.x % (GROUP_M * tiles_n);
    const int group_rows = min(tiles_m - first_m, GROUP_M);
    const int row0 = (first_m + in_group % group_rows) * BLOCK_M, col0 = in_group / group_rows * BLOCK_N;
    // This thread copies one vector of every LINES-th line.
    const int line = threadIdx.x / VECS, column = threadIdx.x % VECS * VEC, place = swizzled(line, column);
    const T *const from_a = a + i64{row0 + line} * k + column, *const from_b = b + i64{col0 + line} * k + column;
    const auto load_stage = [&](int kb) {
        if (kb < k_blocks) {
            T* const tiles = stages + kb % STAGES * 2 * TILE_SIZE;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                cp_async(tiles + place + i * LINES * BLOCK_K, from_a + i64{i * LINES} * k + kb * BLOCK_K);
                cp_async(tiles + TILE_SIZE + place + i * LINES * BLOCK_K, from_b + i64{i * LINES} * k + kb * BLOCK_K);
            }
        }
        cp_async_commit();
    };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp / 2 * WARP_M, warp_col = warp % 2 * WARP_N;
    float acc[WARP_M / 16][WARP_N / 8][4] = {};
    for (int kb = 0; kb < STAGES - 1; ++kb) load_stage(kb);
    for (int kb = 0; kb < k_blocks; ++kb) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load_stage(kb + STAGES - 1);
        const T* const tiles = stages + kb % STAGES * 2 * TILE_SIZE;
#pragma unroll
        for (int i = 0; i < BLOCK_K; i += 16) {
            unsigned a_frag[WARP_M / 16][4], b_frag[WARP_N / 16][4];
#pragma unroll
            for (int r = 0; r < WARP_M / 16; ++r) load_fragment(a_frag[r], tiles, warp_row + 16 * r, i);
#pragma unroll
            for (int s = 0; s < WARP_N / 16; ++s) load_fragment(b_frag[s], tiles + TILE_SIZE, warp_col + 16 * s, i);
#pragma unroll
            for (int r = 0; r < WARP_M / 16; ++r)
#pragma unroll
                for (int s = 0; s < WARP_N / 8; ++s)
                    mma(acc[r][s], a_frag[r], b_frag[s / 2][s % 2], b_frag[s / 2][s % 2 + 2]);
        }
    }
#pragma unroll
    for (int r = 0; r < WARP_M / 16; ++r)
#pragma unroll
        for (int s = 0; s < WARP_N / 8; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // a thread has two neighbours in each of two rows
                const int row = row0 + warp_row + 16 * r + 8 * half + lane / 4, col = col0 + warp_col + 8 * s + lane % 4 * 2;
                store(c + i64{row} * n + col, {acc[r][s][2 * half], acc[r][s][2 * half + 1]});
            }
}
