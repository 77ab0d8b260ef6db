// hopper_matmul: tiles of many rows. hopper_matmul_few: few rows, whose blocks share K.
#include "tilery_tiles.cuh"

constexpr int STEPS = SPAN / 32;  // of 16 along K, in rows of a tile, which are as wide as a swizzle
template <typename T>
constexpr int BK = SPAN / sizeof(T);

template <typename T> struct Format;
template <> struct Format<__half> { using type = f16; };
template <> struct Format<__nv_bfloat16> { using type = bf16; };

// Persistent: one thread keeps tiles coming around a ring, two warpgroups multiply what arrives, 64 rows each. While they
// multiply one block of K they wait for the next: the tensor cores always have one more to do. SHARE blocks of a cluster have
// tiles one above the other, and each fetches a part of their tile of b for all. STAGED tiles of c go through shared memory.
// SPLITS 2: two blocks have halves of K of one tile, and each ends up with the 64 rows of one of its warpgroups.
template <typename T, int BN, int SLOTS, int GROUP, int SHARE, int SPLITS, bool STAGED>
__global__ void __launch_bounds__(384) hopper_matmul(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, T* c, int m, int n, int k) {
    using In = typename Format<T>::type;
    constexpr int BM = 128, A_BYTES = BM * SPAN, BYTES = A_BYTES + BN * SPAN;
    static_assert(SPLITS == 1 || (SHARE == 1 && !STAGED && 64 * BN * 4 <= SLOTS * BYTES), "a part of c passes through the ring");
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ Arrival sent;
    using cluster = Cluster<SHARE * SPLITS>;
    TileRing<SLOTS, BYTES, 0, SHARE> ring(memory, STAGED ? BM * BN * sizeof(T) : 0);
    if (threadIdx.x == 0) {
        if constexpr (SPLITS > 1) sent.init(), sent.expect(64 * BN * 4);
        ring.init(8), prefetch_map(a_map), prefetch_map(b_map);
    }
    if constexpr (SHARE * SPLITS > 1) cluster::meet();
    else __syncthreads();
    take_over();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4;  // so seen to be a warp's
    const int lane = threadIdx.x % 32, rank = cluster::rank(), all = (k + BK<T> - 1) / BK<T>;
    const int begin = SPLITS == 1 ? 0 : all * rank / SPLITS, blocks = SPLITS == 1 ? all : all * (rank + 1) / SPLITS - begin;
    const int start = blockIdx.x / (SHARE * SPLITS), stride = gridDim.x / (SHARE * SPLITS);
    const int down = (m + BM * SHARE - 1) / (BM * SHARE), across = (n + BN - 1) / BN, tiles = down * across;
    const auto place = [&](int t, int& top, int& left) {
        int i, j;
        place_of<GROUP>(t, down, across, i, j);
        top = (i * SHARE + (SHARE > 1 ? rank : 0)) * BM, left = j * BN;
    };
    int top, left;
    if (warpgroup == 2) {
        give_registers<40>();
        if (warp == 8 && lane == 0) {
            for (int t = start; t < tiles; t += stride) {
                place(t, top, left);
                for (int b = 0; b < blocks; ++b, ring.next()) {
                    Arrival& arrival = ring.ask();
                    load_tile(arrival, ring.tile(), a_map, (begin + b) * BK<T>, top);
                    load_rows<BN, SHARE>(arrival, ring.tile() + A_BYTES, b_map, (begin + b) * BK<T>, left);
                }
            }
        }
        __syncwarp();
        if constexpr (SPLITS > 1) cluster::meet();  // as in add_up
    } else {
        take_registers<232>();
        for (int t = start; t < tiles; t += stride) {
            float sums[1][BN / 2];
            auto before = ring;
            for (int b = 0; b < blocks; ++b, ring.next()) {
                ring.wait();
                const u64 rows = tile_descriptor(ring.tile() + warpgroup * 64 * SPAN);
                const u64 columns = tile_descriptor(ring.tile() + A_BYTES);
                product_begin(sums[0]);
#pragma unroll
                for (int s = 0; s < STEPS; ++s)
                    Product<In, In, BN>::add(sums[0], rows + 2 * s, columns + 2 * s, s > 0 || b > 0);
                product_commit();
                product_wait<1>();
                if (b > 0) before.release(), before.next();
            }
            product_end(sums[0]);
            before.release();
            place(t, top, left);
            if constexpr (SPLITS > 1) add_up(sums[0], warpgroup, rank, reinterpret_cast<float4*>(ring.tiles), sent);
            if constexpr (STAGED) {
                unsigned char* const mine = ring.behind() + warpgroup * 64 * BN * sizeof(T);
                store_staged<T>(c_map, mine, sums, warpgroup, left, top + warpgroup * 64);
            } else if (SPLITS == 1 || warpgroup == rank) {
                const int row = top + warp * 16 + lane / 4;
                store_row(c + i64{row} * n, left, n, row < m, sums[0], 0);
                store_row(c + i64{row + 8} * n, left, n, row + 8 < m, sums[0], 2);
            }
        }
        if (STAGED && threadIdx.x % 128 == 0) tiles_stored();
    }
    __syncwarp();
    if constexpr (SHARE > 1) cluster::meet();  // another block may still fetch for this one
}

// Few rows: weights stand where wgmma has its 64 rows, of which WIDTH are used, tokens where it has its columns; a slot has
// two blocks of K of them. The blocks of a cluster share K.
template <typename T, int TOKENS, int WARPGROUPS, int WIDTH, int SLOTS, int SPLITS>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 32) hopper_matmul_few(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, T* c, int m, int n, int k) {
    using In = typename Format<T>::type;
    constexpr int BN = WARPGROUPS * WIDTH, ROWS = BN + TOKENS, DEPTH = 2, BYTES = DEPTH * ROWS * SPAN;
    constexpr int THREADS = WARPGROUPS * 128 + 32;
    using Tile = SharedTile<T, TOKENS, WARPGROUPS, WIDTH, SPLITS, THREADS>;
    static_assert(SPLITS == 1 || Tile::OWN_BYTES <= SLOTS * BYTES, "the tile of c passes through the ring");
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ Arrival sent;
    TileRing<SLOTS, BYTES> ring(memory, Tile::SENT_BYTES);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const FewTiles<TOKENS, BN, SPLITS> tiles(m, n, (k + DEPTH * BK<T> - 1) / (DEPTH * BK<T>));  // past K are zeros
    if (threadIdx.x == WARPGROUPS * 128) {
        ring.init(WARPGROUPS * 4);
        Tile::expect(sent);
        prefetch_map(a_map), prefetch_map(b_map);
    }
    __syncwarp();
    Cluster<SPLITS>::begin();
    __syncthreads();
    take_over();
    float sums[Tile::COUNT];
    if (warp == WARPGROUPS * 4) {
        if (lane == 0) {
            const u64 policy = once();
            for (int t = tiles.start; t < tiles.count; t += tiles.stride)
                tiles.each(t, [&](int b) {
                    Arrival& arrival = ring.ask();
#pragma unroll
                    for (int d = 0; d < DEPTH; ++d) {
                        unsigned char* const to = ring.tile() + d * ROWS * SPAN;
                        load_tile_once(policy, arrival, to, b_map, (b * DEPTH + d) * BK<T>, tiles.left(t));
                        load_tile(arrival, to + BN * SPAN, a_map, (b * DEPTH + d) * BK<T>, tiles.first(t));
                    }
                    ring.next();
                });
        }
        __syncwarp();
    } else {
        auto before = ring;
        for (int t = tiles.start; t < tiles.count; t += tiles.stride) {
            for (int b = 0; b < tiles.slots; ++b, ring.next()) {
                ring.wait();
                product_begin(sums);
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    const u64 rows = tile_descriptor(ring.tile() + (d * ROWS + warpgroup * WIDTH) * SPAN);
                    const u64 columns = tile_descriptor(ring.tile() + (d * ROWS + BN) * SPAN);
#pragma unroll
                    for (int s = 0; s < STEPS; ++s)
                        Product<In, In, TOKENS>::add(sums, rows + 2 * s, columns + 2 * s, s > 0 || d > 0 || b > 0);
                }
                product_commit();
                product_wait<1>();
                if (b > 0) before.release(), before.next();
            }
            product_end(sums);
            if (tiles.slots > 0) before.release(), before.next();
            if constexpr (SPLITS == 1)
                store_columns<WIDTH>(sums, c, tiles.first(t), tiles.left(t) + warpgroup * WIDTH, m, n);
        }
        if (tiles.slots == 0)
#pragma unroll
            for (int r = 0; r < Tile::COUNT; ++r) sums[r] = 0.0f;
    }
    if constexpr (SPLITS > 1) {
        __syncthreads();  // all have let go of the ring
        Tile::store(sums, reinterpret_cast<float*>(ring.tiles), ring.behind(), sent, c, tiles.first(tiles.start),
                    tiles.left(tiles.start), m, n);
    }
}
