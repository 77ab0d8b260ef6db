// 7. wgmma (sm_90): four warps multiply 64 × 16 by 16 × 128 in one instruction, straight from shared memory.
//
// The fragments of rung 6 and the instructions that read them are gone: a descriptor says where a tile lies and that its
// lines are swizzled, just as rung 6 swizzles them. The product runs by itself, until `product_end` waits for it.
#include "tilery_tiles.cuh"

using T = __nv_bfloat16;
constexpr int BM = 128, BN = 128, BK = 64, STAGES = 3, THREADS = 256, GROUP = 16;
constexpr int VEC = 8, CHUNKS = BK / VEC, LINES = THREADS / CHUNKS, COPIES = BM / LINES, BYTES = BM * SPAN;

__device__ int swizzled(int line, int i) { return line * SPAN + (i / VEC ^ line % CHUNKS) * 16; }  // bytes

__device__ void copy_async(void* to, const T* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__global__ void __launch_bounds__(THREADS, 2) wgmma(const T* a, const T* b, T* c, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char* const ring = memory + (-shared_address(memory) & (PATTERN - 1));
    const int blocks = k / BK;
    int i, j;
    place_of<GROUP>(blockIdx.x, m / BM, n / BN, i, j);
    const int top = i * BM, left = j * BN;
    // What this thread copies: a chunk of every LINES-th line.
    const int line = threadIdx.x / CHUNKS, at = threadIdx.x % CHUNKS * VEC, place = swizzled(line, at);
    const T *const from_a = a + i64{top + line} * k + at, *const from_b = b + i64{left + line} * k + at;
    const auto fetch = [&](int t) {
        if (t < blocks) {
            unsigned char* const tiles = ring + t % STAGES * 2 * BYTES;
#pragma unroll
            for (int q = 0; q < COPIES; ++q) {
                copy_async(tiles + place + q * LINES * SPAN, from_a + i64{q * LINES} * k + t * BK);
                copy_async(tiles + BYTES + place + q * LINES * SPAN, from_b + i64{q * LINES} * k + t * BK);
            }
        }
        commit_copies();
    };
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sums[BN / 2] = {};
    for (int t = 0; t < STAGES - 1; ++t) fetch(t);
    for (int t = 0; t < blocks; ++t) {
        wait_for_copies<STAGES - 2>();
        tile_written();  // what threads wrote is to be seen by the tensor cores
        __syncthreads();
        fetch(t + STAGES - 1);
        const unsigned char* const tiles = ring + t % STAGES * 2 * BYTES;
        const u64 rows = tile_descriptor(tiles + warpgroup * 64 * SPAN), columns = tile_descriptor(tiles + BYTES);
        product_begin(sums);
#pragma unroll
        for (int s = 0; s < BK / 16; ++s) Product<bf16, bf16, BN>::add(sums, rows + 2 * s, columns + 2 * s, 1);
        product_commit();
        product_end(sums);
    }
    const int row = top + warp * 16 + lane / 4;  // a thread has pairs of neighbours in each of two rows
    store_row(c + i64{row} * n + left, 0, BN, true, sums, 0);
    store_row(c + i64{row + 8} * n + left, 0, BN, true, sums, 2);
}
