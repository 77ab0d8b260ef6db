// 9. Roles for warps (sm_90): one fetches, eight multiply, and no barrier holds all of them up.
//
// A second barrier for each slot says that it is free. So the fetching thread is as far ahead as the ring is long, also
// across the end of a tile: blocks are persistent, and while c is stored, the next tile is on its way. It needs few
// registers and gives the others its own: enough for sums of 128 × 256, which read shared memory less for as much work.
// A product stays under way while the next is waited for.
#include "tilery_tiles.cuh"

using T = __nv_bfloat16;
constexpr int BM = 128, BN = 256, BK = 64, SLOTS = 4, GROUP = 16;
constexpr int A_BYTES = BM * SPAN, BYTES = A_BYTES + BN * SPAN;

__global__ void __launch_bounds__(384) warp_roles(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    TileRing<SLOTS, BYTES> ring(memory);
    if (threadIdx.x == 0) ring.init(8);
    __syncthreads();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int down = m / BM, across = n / BN, blocks = k / BK;
    int i, j;
    if (warpgroup == 2) {
        give_registers<40>();
        if (warp == 8 && lane == 0) {
            for (int t = blockIdx.x; t < down * across; t += gridDim.x) {
                place_of<GROUP>(t, down, across, i, j);
                for (int b = 0; b < blocks; ++b, ring.next()) {
                    Arrival& arrival = ring.ask();
                    load_tile(arrival, ring.tile(), a_map, b * BK, i * BM);
                    load_tile(arrival, ring.tile() + A_BYTES, b_map, b * BK, j * BN);
                }
            }
        }
    } else {
        take_registers<232>();
        auto done = ring;  // one behind: the slot whose product may still be under way
        for (int t = blockIdx.x; t < down * across; t += gridDim.x) {
            float sums[BN / 2] = {};
            for (int b = 0; b < blocks; ++b, ring.next()) {
                ring.wait();
                const u64 rows = tile_descriptor(ring.tile() + warpgroup * 64 * SPAN);
                const u64 columns = tile_descriptor(ring.tile() + A_BYTES);
                product_begin(sums);
#pragma unroll
                for (int s = 0; s < BK / 16; ++s) Product<bf16, bf16, BN>::add(sums, rows + 2 * s, columns + 2 * s, 1);
                product_commit();
                product_wait<1>();
                if (b > 0) done.release(), done.next();
            }
            product_end(sums);
            done.release(), done.next();
            place_of<GROUP>(t, down, across, i, j);
            const int row = i * BM + warp * 16 + lane / 4;
            store_row(c + i64{row} * n + j * BN, 0, BN, true, sums, 0);
            store_row(c + i64{row + 8} * n + j * BN, 0, BN, true, sums, 2);
        }
    }
}
