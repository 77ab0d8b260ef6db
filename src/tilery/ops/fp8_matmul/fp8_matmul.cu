// fp8_matmul: tiles of many rows. fp8_matmul_few: few rows, whose blocks share K.
//
// wgmma adds fp8 products with few bits. So every 128 of K start a sum of their own, which is scaled and added to the true
// one in fp32, while another warpgroup has the tensor cores.
#include "tilery_tiles.cuh"

constexpr int BK = SPAN, STEPS = BK / 32;  // a block of K has one scale and is as wide as a swizzle

// Persistent: two warps keep tiles and scales coming around a ring, two warpgroups multiply what arrives, 64 rows each. The
// columns come in PARTS of WIDTH that share one partial sum: a second one would not fit the registers. STAGED tiles of c go
// through shared memory, so that the next one is multiplied while they are stored.
template <typename A, typename B, typename T, int PARTS, int WIDTH, int SLOTS, int GROUP, bool STAGED>
__global__ void __launch_bounds__(384) fp8_matmul(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, const float* a_scale, i64 as_row, i64 as_col, const float* b_scale, i64 bs_row,
    i64 bs_col, T* c, int m, int n, int k) {
    constexpr int BM = 128, BN = PARTS * WIDTH, A_BYTES = BM * BK, BYTES = A_BYTES + BN * BK, COUNT = WIDTH / 2;
    constexpr bool ONE = BN % 128 == 0 || 128 % BN == 0;  // a part has one scale of b, else perhaps two
    extern __shared__ __align__(1024) unsigned char memory[];
    TileRing<SLOTS, BYTES, BM + 4> ring(memory, STAGED ? BM * BN * sizeof(T) : 0);
    if (threadIdx.x == 0) ring.init(8), prefetch_map(a_map), prefetch_map(b_map);
    __syncthreads();
    take_over();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4;  // so seen to be a warp's
    const int lane = threadIdx.x % 32, blocks = k / BK, start = blockIdx.x, stride = gridDim.x;
    const int down = (m + BM - 1) / BM, across = (n + BN - 1) / BN, tiles = down * across;
    const auto place = [&](int t, int& top, int& left) {
        int i, j;
        place_of<GROUP>(t, down, across, i, j);
        top = i * BM, left = j * BN;
    };
    int top, left;
    if (warpgroup == 2) {
        give_registers<56>();
        if (warp == 8 && lane == 0) {
            for (int t = start; t < tiles; t += stride) {
                place(t, top, left);
                for (int b = 0; b < blocks; ++b, ring.next()) {
                    Arrival& arrival = ring.ask();
                    load_tile(arrival, ring.tile(), a_map, b * BK, top);
                    load_tile(arrival, ring.tile() + A_BYTES, b_map, b * BK, left);
                }
            }
        } else if (warp == 9) {
            for (int t = start; t < tiles; t += stride) {
                place(t, top, left);
                const float* x[BM / 32];  // past the edges the last scale is read again; what it scales is not stored
#pragma unroll
                for (int q = 0; q < BM / 32; ++q) x[q] = a_scale + min(top + 32 * q + lane, m - 1) * as_row;
                const int column = ONE ? left + lane % PARTS * 128 : left + lane / 2 % PARTS * WIDTH + lane % 2 * 128;
                const float* y = b_scale + min(column, n - 1) / 128 * bs_row;
                for (int b = 0; b < blocks; ++b, ring.next(), y += bs_col) {
                    ring.wait_until_free();
#pragma unroll
                    for (int q = 0; q < BM / 32; ++q, x[q - 1] += as_col) ring.note(32 * q + lane, x[q]);
                    if (lane < (ONE ? PARTS : 2 * PARTS)) ring.note(BM + lane, y);
                    ring.noted();
                }
            }
        }
    } else {
        take_registers<224>();
        const int row = warp * 16 + lane / 4;
        struct Scales { float row0, row8, weight[ONE ? PARTS : 2 * PARTS]; } now, next;
        const auto read = [&](Scales& s, const float* notes) {
            s.row0 = notes[row], s.row8 = notes[row + 8];
#pragma unroll
            for (int i = 0; i < (ONE ? PARTS : 2 * PARTS); ++i) s.weight[i] = notes[BM + i];
        };
        auto ahead = ring;
        if (start < tiles) ring.wait(), read(now, ring.notes());
        for (int t = start; t < tiles; t += stride) {
            if constexpr (!ONE) place(t, top, left);
            float sums[PARTS][COUNT] = {}, part[COUNT];
            for (int b = 0; b < blocks; ++b) {
                const u64 rows = tile_descriptor(ring.tile() + warpgroup * 64 * BK);
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    const u64 columns = tile_descriptor(ring.tile() + A_BYTES + p * WIDTH * BK);
                    product_begin(part);
#pragma unroll
                    for (int s = 0; s < STEPS; ++s) Product<A, B, WIDTH>::add(part, rows + 2 * s, columns + 2 * s, s);
                    product_commit();
                    if (p == PARTS - 1) {  // while that is under way, the next block of K is waited for
                        ahead.next();
                        if (b + 1 < blocks || t + stride < tiles) ahead.wait(), read(next, ahead.notes());
                    }
                    product_end(part);
                    if (p == PARTS - 1) ring.release();
                    const int w = ONE ? p : 2 * p, cut = ONE ? 128 : 128 - (left + p * WIDTH) % 128;  // columns of the first scale
                    const float low0 = now.row0 * now.weight[w], low8 = now.row8 * now.weight[w];
                    const float high0 = ONE ? 0.0f : now.row0 * now.weight[w + 1];
                    const float high8 = ONE ? 0.0f : now.row8 * now.weight[w + 1];
#pragma unroll
                    for (int r = 0; r < COUNT; r += 4) {
                        const bool low = ONE || 2 * r < cut;
                        const float f0 = low ? low0 : high0, f8 = low ? low8 : high8;
                        sums[p][r] += part[r] * f0, sums[p][r + 1] += part[r + 1] * f0;
                        sums[p][r + 2] += part[r + 2] * f8, sums[p][r + 3] += part[r + 3] * f8;
                    }
                }
                now = next;
                ring = ahead;
            }
            place(t, top, left);
            if constexpr (STAGED) {
                unsigned char* const mine = ring.behind() + warpgroup * 64 * BN * sizeof(T);
                store_staged<T>(c_map, mine, sums, warpgroup, left, top + warpgroup * 64);
            } else {
#pragma unroll
                for (int p = 0; p < PARTS; ++p) {
                    store_row(c + i64{top + row} * n, left + p * WIDTH, n, top + row < m, sums[p], 0);
                    store_row(c + i64{top + row + 8} * n, left + p * WIDTH, n, top + row + 8 < m, sums[p], 2);
                }
            }
        }
        if (STAGED && threadIdx.x % 128 == 0) tiles_stored();
    }
}

// Few rows: weights stand where wgmma has its 64 rows, of which WIDTH are used, tokens where it has its columns. The blocks of a
// cluster share K. One block of K is multiplied while the sums of the one before are scaled, where registers allow for both.
template <typename A, typename B, typename T, int TOKENS, int WARPGROUPS, int WIDTH, int SLOTS, int SPLITS>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 64) fp8_matmul_few(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const float* a_scale, i64 as_row,
    i64 as_col, const float* b_scale, i64 bs_row, i64 bs_col, T* c, int m, int n, int k) {
    constexpr int BN = WARPGROUPS * WIDTH, B_BYTES = BN * BK, BYTES = B_BYTES + TOKENS * BK, THREADS = WARPGROUPS * 128 + 64;
    constexpr bool ONE = 128 % WIDTH == 0;  // a warpgroup has one scale of b, else perhaps two
    constexpr int SCALES = 128 % BN == 0 ? 1 : BN % 128 == 0 ? BN / 128 : BN / 128 + 2;  // that a tile may have
    using Tile = SharedTile<T, TOKENS, WARPGROUPS, WIDTH, SPLITS, THREADS>;
    constexpr int COUNT = Tile::COUNT, PARTS = 3 * COUNT + 48 <= 65536 / THREADS ? 2 : 1;
    static_assert(SPLITS == 1 || Tile::OWN_BYTES <= SLOTS * BYTES, "the tile of c passes through the ring");
    static_assert(SCALES <= 4, "notes of a slot");
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ Arrival sent;
    TileRing<SLOTS, BYTES, TOKENS + 4> ring(memory, Tile::SENT_BYTES);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const FewTiles<TOKENS, BN, SPLITS> tiles(m, n, k / BK);
    if (threadIdx.x == WARPGROUPS * 128) {
        ring.init(WARPGROUPS * 4);
        Tile::expect(sent);
        prefetch_map(a_map), prefetch_map(b_map);
    }
    __syncwarp();
    Cluster<SPLITS>::begin(true);
    __syncthreads();
    float sums[COUNT] = {};
    if (warp == WARPGROUPS * 4) {
        if (lane == 0) {
            const u64 policy = once();
            for (int t = tiles.start; t < tiles.count; t += tiles.stride)
                tiles.each(t, [&](int b) {
                    Arrival& arrival = ring.ask();
                    load_tile_once(policy, arrival, ring.tile(), b_map, b * BK, tiles.left(t));
                    load_tile(arrival, ring.tile() + B_BYTES, a_map, b * BK, tiles.first(t));
                    ring.next();
                });
        }
        __syncwarp();
    } else if (warp > WARPGROUPS * 4) {
        constexpr int EACH = (TOKENS + 31) / 32;
        for (int t = tiles.start; t < tiles.count; t += tiles.stride) {
            const float* x[EACH];  // past the edges the last scale is read again; what it scales is not stored
#pragma unroll
            for (int q = 0; q < EACH; ++q) x[q] = a_scale + min(tiles.first(t) + 32 * q + lane, m - 1) * as_row;
            const float* const y = b_scale + min(tiles.left(t) / 128 + lane % SCALES, (n - 1) / 128) * bs_row;
            tiles.each(t, [&](int b) {
                ring.wait_until_free();
#pragma unroll
                for (int q = 0; q < EACH; ++q)
                    if (32 * q + lane < TOKENS) ring.note(32 * q + lane, x[q] + b * as_col);
                if (lane < SCALES) ring.note(TOKENS + lane, y + b * bs_col);
                ring.noted();
                ring.next();
            });
        }
    } else {
        float parts[PARTS][COUNT];
        for (int t = tiles.start; t < tiles.count; t += tiles.stride) {
            const int own = tiles.left(t) % 128 + warpgroup * WIDTH, row = ONE ? 0 : warp % 4 * 16 + lane / 4, quad = lane % 4;
            const int scale0 = TOKENS + (own + row) / 128, scale8 = ONE ? scale0 : TOKENS + (own + row + 8) / 128;
            auto ahead = ring;
            const auto multiply = [&](float(&part)[COUNT]) {
                ahead.wait();
                const u64 rows = tile_descriptor(ahead.tile() + warpgroup * WIDTH * BK);
                const u64 columns = tile_descriptor(ahead.tile() + B_BYTES);
                product_begin(part);
#pragma unroll
                for (int s = 0; s < STEPS; ++s) Product<B, A, TOKENS>::add(part, rows + 2 * s, columns + 2 * s, s);
                product_commit();
                ahead.next();
            };
            const auto promote = [&](float(&part)[COUNT]) {
                pin(part);
                const float weight0 = ring.notes()[scale0], weight8 = ONE ? weight0 : ring.notes()[scale8];
#pragma unroll
                for (int g = 0; g < COUNT; g += 4) {
                    const float2 two = *reinterpret_cast<const float2*>(ring.notes() + g * 2 + quad * 2);
                    sums[g] += part[g] * (two.x * weight0), sums[g + 1] += part[g + 1] * (two.y * weight0);
                    sums[g + 2] += part[g + 2] * (two.x * weight8), sums[g + 3] += part[g + 3] * (two.y * weight8);
                }
                ring.release();
                ring.next();
            };
#pragma unroll
            for (int r = 0; r < COUNT; ++r) sums[r] = 0.0f;
            int b = 0;
            if constexpr (PARTS == 2)
                for (; b + 1 < tiles.slots; b += 2) {
                    multiply(parts[0]), multiply(parts[1]);
                    product_wait<1>(), promote(parts[0]);
                    product_wait<0>(), promote(parts[1]);
                }
            for (; b < tiles.slots; ++b) multiply(parts[0]), product_wait<0>(), promote(parts[0]);
            if constexpr (SPLITS == 1)
                store_columns<WIDTH>(sums, c, tiles.first(t), tiles.left(t) + warpgroup * WIDTH, m, n);
        }
    }
    if constexpr (SPLITS > 1) {
        __syncthreads();  // all have let go of the ring
        Tile::store(sums, reinterpret_cast<float*>(ring.tiles), ring.behind(), sent, c, tiles.first(tiles.start),
                    tiles.left(tiles.start), m, n, [](float (&)[4], int, int) {});
    }
}
