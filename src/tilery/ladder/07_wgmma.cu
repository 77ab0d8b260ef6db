// 7. wgmma (sm_90): a warpgroup of four warps multiplies 64 × 16 by 16 × 128 in one instruction, straight from shared
// memory.
//
// The fragments of rung 6 and the instructions that load them are gone: a descriptor says where a tile lies and that
// its lines are swizzled, just as rung 6 swizzles them. The instruction is asynchronous, and warpgroup_wait_all waits
// for it.
#include "store_tiles.cuh"
#include "tile_scheduler.cuh"

using T = __nv_bfloat16;
constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 64, STAGES = 3, THREADS = 256, GROUP_M = 16;
constexpr int VEC = 8, VECS = BLOCK_K / VEC;  // elements of 16 bytes; vectors of a line
constexpr int LINES = THREADS / VECS, COPIES = BLOCK_M / LINES;  // lines that the block copies at once; copies of a thread
constexpr int TILE_BYTES = BLOCK_M * SWIZZLE_BYTES;

__device__ int swizzled(int line, int i) { return line * SWIZZLE_BYTES + (i / VEC ^ line % VECS) * 16; }  // in bytes

__device__ void cp_async(void* to, const T* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(smem_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__global__ void __launch_bounds__(THREADS, 2) wgmma(const T* a, const T* b, T* c, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char smem[];
    unsigned char* const stages = smem + (-smem_address(smem) & (SWIZZLE_ATOM - 1));
    const int k_blocks = k / BLOCK_K;
    int tile_m, tile_n;
    tile_coordinates<GROUP_M>(blockIdx.x, m / BLOCK_M, n / BLOCK_N, tile_m, tile_n);
    const int row0 = tile_m * BLOCK_M, col0 = tile_n * BLOCK_N;
    // This thread copies one vector of every LINES-th line.
    const int line = threadIdx.x / VECS, column = threadIdx.x % VECS * VEC, place = swizzled(line, column);
    const T *const from_a = a + i64{row0 + line} * k + column, *const from_b = b + i64{col0 + line} * k + column;
    const auto load_stage = [&](int kb) {
        if (kb < k_blocks) {
            unsigned char* const tiles = stages + kb % STAGES * 2 * TILE_BYTES;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                cp_async(tiles + place + i * LINES * SWIZZLE_BYTES, from_a + i64{i * LINES} * k + kb * BLOCK_K);
                cp_async(tiles + TILE_BYTES + place + i * LINES * SWIZZLE_BYTES, from_b + i64{i * LINES} * k + kb * BLOCK_K);
            }
        }
        cp_async_commit();
    };
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[BLOCK_N / 2] = {};
    for (int kb = 0; kb < STAGES - 1; ++kb) load_stage(kb);
    for (int kb = 0; kb < k_blocks; ++kb) {
        cp_async_wait<STAGES - 2>();
        fence_async_proxy();  // makes what threads wrote visible to wgmma
        __syncthreads();
        load_stage(kb + STAGES - 1);
        const unsigned char* const tiles = stages + kb % STAGES * 2 * TILE_BYTES;
        const u64 a_desc = smem_desc_k_major(tiles + warpgroup * 64 * SWIZZLE_BYTES);
        const u64 b_desc = smem_desc_k_major(tiles + TILE_BYTES);
        warpgroup_arrive(acc);
#pragma unroll
        for (int s = 0; s < BLOCK_K / 16; ++s) WgmmaSS<bf16, bf16, BLOCK_N>::mma(acc, a_desc + 2 * s, b_desc + 2 * s, 1);
        warpgroup_commit_batch();
        warpgroup_wait_all(acc);
    }
    const int row = row0 + warp * 16 + lane / 4;  // a thread has pairs of neighbours in each of two rows
    store_row(c + i64{row} * n + col0, 0, BLOCK_N, true, acc, 0);
    store_row(c + i64{row + 8} * n + col0, 0, BLOCK_N, true, acc, 2);
}
