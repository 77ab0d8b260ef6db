// 10. Clusters (sm_90): two blocks with the same columns of b fetch half of them each, and TMA brings it to both.
//
// A third of the traffic from the L2 is gone, and the power it took is left for tensor cores. The blocks wait for each
// other: a slot is free when the readers of both have let go, and neither leaves while the other may still send to it.
#include "tilery_tiles.cuh"

using T = __nv_bfloat16;
constexpr int BM = 128, BN = 256, BK = 64, SLOTS = 4, GROUP = 8, BLOCKS = 2;
constexpr int A_BYTES = BM * SPAN, BYTES = A_BYTES + BN * SPAN, HALF = BN / BLOCKS;

__global__ void __launch_bounds__(384) clusters(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    extern __shared__ __align__(1024) unsigned char memory[];
    TileRing<SLOTS, BYTES, 0, BLOCKS> ring(memory);
    if (threadIdx.x == 0) ring.init(8);
    __syncwarp();
    Cluster<BLOCKS>::meet();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int rank = Cluster<BLOCKS>::rank(), start = blockIdx.x / BLOCKS, stride = gridDim.x / BLOCKS;
    const int down = m / (BLOCKS * BM), across = n / BN, blocks = k / BK;
    int i, j;
    if (warpgroup == 2) {
        give_registers<40>();
        if (warp == 8 && lane == 0) {
            for (int t = start; t < down * across; t += stride) {
                place_of<GROUP>(t, down, across, i, j);
                for (int b = 0; b < blocks; ++b, ring.next()) {
                    Arrival& arrival = ring.ask();  // expects the bytes that the other block sends too
                    load_tile(arrival, ring.tile(), a_map, b * BK, (i * BLOCKS + rank) * BM);
                    unsigned char* const half = ring.tile() + A_BYTES + rank * HALF * SPAN;
                    load_tile_for((1 << BLOCKS) - 1, arrival, half, b_map, b * BK, j * BN + rank * HALF);
                }
            }
        }
        __syncwarp();
    } else {
        take_registers<232>();
        auto done = ring;
        for (int t = start; t < down * across; t += stride) {
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
            const int row = (i * BLOCKS + rank) * BM + warp * 16 + lane / 4;
            store_row(c + i64{row} * n + j * BN, 0, BN, true, sums, 0);
            store_row(c + i64{row + 8} * n + j * BN, 0, BN, true, sums, 2);
        }
    }
    Cluster<BLOCKS>::meet();
}
