// hopper_matmul: tiles of many rows. hopper_matmul_few: few rows, whose blocks share K. hopper_linear and hopper_linear_few: the same
// with an ending. hopper_silu_mul and hopper_silu_mul_few: gate and up at once.
#include "tilery_ending.cuh"

constexpr int STEPS = SPAN / 32;  // of 16 along K, in rows of a tile, which are as wide as a swizzle
template <typename T>
constexpr int BK = SPAN / sizeof(T);

template <typename T> struct Format;
template <> struct Format<__half> { using type = f16; };
template <> struct Format<__nv_bfloat16> { using type = bf16; };

// The rows of b in a tile: BN from `row` on, or half as many and then as many of the other half of b, `further` on. SHARE blocks of
// a cluster need the same, and each fetches a part for all.
template <int BN, int SHARE, int HALVES>
__device__ void load_b(Arrival& arrival, unsigned char* to, const TensorMap& map, int k, int row, int further) {
    if constexpr (HALVES == 1) {
        load_rows<BN, SHARE>(arrival, to, map, k, row);
    } else if constexpr (SHARE == 1) {
        load_tile(arrival, to, map, k, row), load_tile(arrival, to + BN / 2 * SPAN, map, k, row + further);
    } else {
        static_assert(SHARE == 2, "a half each");
        const int half = Cluster<SHARE>::rank();
        load_tile_for((1 << SHARE) - 1, arrival, to + half * (BN / 2) * SPAN, map, k, row + half * further);
    }
}

// Persistent: one thread keeps tiles coming around a ring, two warpgroups multiply what arrives, 64 rows each. While they
// multiply one block of K they wait for the next: the tensor cores always have one more to do. SHARE blocks of a cluster have
// tiles one above the other, and each fetches a part of their tile of b for all. STAGED tiles of c go through shared memory.
// SPLITS blocks of a cluster have parts of K of one tile, and each ends up with a share of its columns. HALVES 2: b has rows of gate
// and then as many of up, tiles have columns of both, and c, of half the width, is silu(gate) · up.
template <typename T, int BN, int SLOTS, int GROUP, int SHARE, int SPLITS, bool STAGED, int HALVES, typename End>
__device__ __forceinline__ void multiply(const TensorMap& a_map, const TensorMap& b_map, const TensorMap& c_map, T* c, int m,
                                         int n, int k, const End& ending) {
    using In = typename Format<T>::type;
    constexpr int BM = 128, A_BYTES = BM * SPAN, BYTES = A_BYTES + BN * SPAN, OUT = BN / HALVES;  // columns of c
    using Columns = SharedColumns<OUT, SPLITS>;
    static_assert(SPLITS == 1 || HALVES == 1, "gate and up of a column are in one block");
    static_assert(SPLITS == 1 || (SHARE == 1 && !STAGED && Columns::BYTES <= SLOTS * BYTES), "parts of c pass through the ring");
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ Arrival sent;
    using cluster = Cluster<SHARE * SPLITS>;
    TileRing<SLOTS, BYTES, 0, SHARE> ring(memory, STAGED ? BM * OUT * sizeof(T) : 0);
    if (threadIdx.x == 0) {
        if constexpr (SPLITS > 1) Columns::expect(sent, cluster::rank());
        ring.init(8), prefetch_map(a_map), prefetch_map(b_map);
    }
    if constexpr (SHARE * SPLITS > 1) cluster::meet();
    else __syncthreads();
    take_over();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4;  // so seen to be a warp's
    const int lane = threadIdx.x % 32, rank = cluster::rank(), all = (k + BK<T> - 1) / BK<T>;
    const int begin = SPLITS == 1 ? 0 : all * rank / SPLITS, blocks = SPLITS == 1 ? all : all * (rank + 1) / SPLITS - begin;
    const int start = blockIdx.x / (SHARE * SPLITS), stride = gridDim.x / (SHARE * SPLITS);
    const int down = (m + BM * SHARE - 1) / (BM * SHARE), across = (n + OUT - 1) / OUT, tiles = down * across;
    const auto place = [&](int t, int& top, int& left) {
        int i, j;
        place_of<GROUP>(t, down, across, i, j);
        top = (i * SHARE + (SHARE > 1 ? rank : 0)) * BM, left = j * OUT;
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
                    load_b<BN, SHARE, HALVES>(arrival, ring.tile() + A_BYTES, b_map, (begin + b) * BK<T>, left, n);
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
            if constexpr (SPLITS > 1) Columns::add_up(sums[0], rank, reinterpret_cast<float4*>(ring.tiles), sent);
            const auto store = [&](float(&made)[1][OUT / 2]) {
                const int row = top + warp * 16 + lane / 4;
                Columns::each([&](auto share, int own) {
                    if (SPLITS > 1 && own != rank) return;
                    ending.template rows<share.BEGIN, share.END>(made[0], row, left);
                    if constexpr (!STAGED) {
                        store_row<share.BEGIN, share.END>(c + i64{row} * n, left, n, row < m, made[0], 0);
                        store_row<share.BEGIN, share.END>(c + i64{row + 8} * n, left, n, row + 8 < m, made[0], 2);
                    }
                });
                if constexpr (STAGED) {
                    unsigned char* const mine = ring.behind() + warpgroup * 64 * OUT * sizeof(T);
                    store_staged<T>(c_map, mine, made, warpgroup, left, top + warpgroup * 64);
                }
            };
            if constexpr (HALVES == 1) {
                store(sums);
            } else {
                float made[1][OUT / 2];
#pragma unroll
                for (int i = 0; i < OUT / 2; ++i) made[0][i] = activated<silu>(sums[0][i]) * sums[0][OUT / 2 + i];
                store(made);
            }
        }
        if (STAGED && threadIdx.x % 128 == 0) tiles_stored();
    }
    __syncwarp();
    if constexpr (SHARE > 1) cluster::meet();  // another block may still fetch for this one
}

// Few rows: weights stand where wgmma has its 64 rows, of which WIDTH are used, tokens where it has its columns; a slot has
// two blocks of K of them. The blocks of a cluster share K. HALVES as above: a warpgroup has WIDTH rows of gate and of up.
template <typename T, int TOKENS, int WARPGROUPS, int WIDTH, int SLOTS, int SPLITS, int HALVES, typename End>
__device__ __forceinline__ void multiply_few(const TensorMap& a_map, const TensorMap& b_map, T* c, int m, int n, int k,
                                             const End& ending) {
    using In = typename Format<T>::type;
    constexpr int BN = WARPGROUPS * WIDTH, WEIGHTS = HALVES * BN, ROWS = WEIGHTS + TOKENS, DEPTH = 2, BYTES = DEPTH * ROWS * SPAN;
    constexpr int THREADS = WARPGROUPS * 128 + 32;
    using Tile = SharedTile<T, TOKENS, WARPGROUPS, WIDTH, SPLITS, THREADS>;
    static_assert(SPLITS == 1 || Tile::OWN_BYTES <= SLOTS * BYTES, "the tile of c passes through the ring");
    static_assert(SPLITS == 1 || HALVES == 1, "gate and up of a column are in one block");
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
    Cluster<SPLITS>::begin(true);
    __syncthreads();
    float sums[HALVES][Tile::COUNT];
    if (warp == WARPGROUPS * 4) {
        if (lane == 0) {
            const u64 policy = once();
            for (int t = tiles.start; t < tiles.count; t += tiles.stride)
                tiles.each(t, [&](int b) {
                    Arrival& arrival = ring.ask();
#pragma unroll
                    for (int d = 0; d < DEPTH; ++d) {
                        unsigned char* const to = ring.tile() + d * ROWS * SPAN;
#pragma unroll
                        for (int h = 0; h < HALVES; ++h)
                            load_tile_once(policy, arrival, to + h * BN * SPAN, b_map, (b * DEPTH + d) * BK<T>, tiles.left(t) + h * n);
                        load_tile(arrival, to + WEIGHTS * SPAN, a_map, (b * DEPTH + d) * BK<T>, tiles.first(t));
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
                if constexpr (HALVES == 2) pin(sums[1]);
                product_begin(sums[0]);
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) {
                    const u64 rows = tile_descriptor(ring.tile() + (d * ROWS + warpgroup * WIDTH) * SPAN);
                    const u64 columns = tile_descriptor(ring.tile() + (d * ROWS + WEIGHTS) * SPAN);
#pragma unroll
                    for (int s = 0; s < STEPS; ++s)
#pragma unroll
                        for (int h = 0; h < HALVES; ++h)
                            Product<In, In, TOKENS>::add(sums[h], rows + h * (BN * SPAN >> 4) + 2 * s, columns + 2 * s,
                                                         s > 0 || d > 0 || b > 0);
                }
                product_commit();
                product_wait<1>();
                if (b > 0) before.release(), before.next();
            }
            product_end(sums[0]);
            if constexpr (HALVES == 2) {
                pin(sums[1]);
#pragma unroll
                for (int r = 0; r < Tile::COUNT; ++r) sums[0][r] = activated<silu>(sums[0][r]) * sums[1][r];
            }
            if (tiles.slots > 0) before.release(), before.next();
            if constexpr (SPLITS == 1) {
                const int left = tiles.left(t) + warpgroup * WIDTH;
                ending.template columns<WIDTH>(sums[0], tiles.first(t), left);
                store_columns<WIDTH>(sums[0], c, tiles.first(t), left, m, n);
            }
        }
        if (tiles.slots == 0)
#pragma unroll
            for (int r = 0; r < Tile::COUNT; ++r) sums[0][r] = 0.0f;
    }
    if constexpr (SPLITS > 1) {
        __syncthreads();  // all have let go of the ring
        Tile::store(sums[0], reinterpret_cast<float*>(ring.tiles), ring.behind(), sent, c, tiles.first(tiles.start),
                    tiles.left(tiles.start), m, n, [&](float(&four)[4], int t, int col) { ending.four(four, t, col); });
    }
}

#define TILERY_MAP const __grid_constant__ TensorMap
template <typename T, int BN, int SLOTS, int GROUP, int SHARE, int SPLITS, bool STAGED>
__global__ void __launch_bounds__(384) hopper_matmul(TILERY_MAP a, TILERY_MAP b, TILERY_MAP to, T* c, int m, int n, int k) {
    multiply<T, BN, SLOTS, GROUP, SHARE, SPLITS, STAGED, 1>(a, b, to, c, m, n, k, Plain{});
}
template <typename T, int BN, int SLOTS, int GROUP, int SHARE, int SPLITS, bool STAGED, Activation ACT, bool BIAS, bool ADD,
          bool SCALED>
__global__ void __launch_bounds__(384) hopper_linear(TILERY_MAP a, TILERY_MAP b, TILERY_MAP to, T* c, int m, int n, int k,
                                                     const T* bias, const T* addend, i64 stride, float alpha, float beta) {
    const Ending<T, ACT, BIAS, ADD, SCALED> ending{bias, addend, stride, alpha, beta, m, n};
    multiply<T, BN, SLOTS, GROUP, SHARE, SPLITS, STAGED, 1>(a, b, to, c, m, n, k, ending);
}
template <typename T, int BN, int SLOTS, int GROUP, int SHARE, int SPLITS, bool STAGED>
__global__ void __launch_bounds__(384) hopper_silu_mul(TILERY_MAP a, TILERY_MAP b, TILERY_MAP to, T* c, int m, int n, int k) {
    multiply<T, BN, SLOTS, GROUP, SHARE, SPLITS, STAGED, 2>(a, b, to, c, m, n, k, Plain{});
}
template <typename T, int TOKENS, int WARPGROUPS, int WIDTH, int SLOTS, int SPLITS>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 32) hopper_matmul_few(TILERY_MAP a, TILERY_MAP b, T* c, int m, int n, int k) {
    multiply_few<T, TOKENS, WARPGROUPS, WIDTH, SLOTS, SPLITS, 1>(a, b, c, m, n, k, Plain{});
}
template <typename T, int TOKENS, int WARPGROUPS, int WIDTH, int SLOTS, int SPLITS, Activation ACT, bool BIAS, bool ADD, bool SCALED>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 32) hopper_linear_few(
    TILERY_MAP a, TILERY_MAP b, T* c, int m, int n, int k, const T* bias, const T* addend, i64 stride, float alpha, float beta) {
    const Ending<T, ACT, BIAS, ADD, SCALED> ending{bias, addend, stride, alpha, beta, m, n};
    multiply_few<T, TOKENS, WARPGROUPS, WIDTH, SLOTS, SPLITS, 1>(a, b, c, m, n, k, ending);
}
template <typename T, int TOKENS, int WARPGROUPS, int WIDTH, int SLOTS, int SPLITS>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 32) hopper_silu_mul_few(TILERY_MAP a, TILERY_MAP b, T* c, int m, int n, int k) {
    multiply_few<T, TOKENS, WARPGROUPS, WIDTH, SLOTS, SPLITS, 2>(a, b, c, m, n, k, Plain{});
}
