// Attention: tiles of queries against blocks of keys and values, which TMA brings around a ring.
//
// A warpgroup has 64 queries. It multiplies them with one block of keys, and in the same go its weights of the block before
// with that one's values; while the second product is under way it makes weights of the scores of the first. Warpgroups take
// turns to hand their products to the tensor cores, so that one makes weights while another multiplies.
#include "tilery_attention.cuh"

template <typename T> struct Format;
template <> struct Format<__half> { using type = f16; };
template <> struct Format<__nv_bfloat16> { using type = bf16; };

// What is asked, the same for all blocks; packed sequences have ends, and begin and end among all tokens.
struct Problem {
    const int *ends_q, *ends_k;
    int sequences, heads, group;  // group: heads that share keys
    int queries, keys;  // of a sequence, or all tokens of packed ones
    int tiles, band;  // tiles of a sequence of the most queries; heads whose tiles run together and find their keys in the L2
    int left, right;  // a query sees keys so far to the left and right of its place
};

struct Bounds { int begin, end; };

// Inside of what is there whatever the numbers say. One sequence more than there are has the tokens that are left.
__device__ inline Bounds bounds_of(const int* ends, int sequence, int sequences, int tokens) {
    const int begin = min(max(ends[sequence], 0), tokens);
    return {begin, sequence < sequences ? min(max(ends[sequence + 1], begin), tokens) : tokens};
}

// Queries of one head from `first` on, and the blocks of keys that any of them sees. All of them see all of the `plain` ones.
struct __align__(16) Tile {
    int sequence, head, first, queries, keys, from_q, from_k;
    Bounds blocks, plain;

    template <int BM, int BN>
    static __device__ Tile of(int t, const Problem& p) {
        const int pairs = (p.ends_q ? p.sequences + 1 : p.sequences) * p.heads;
        const int before = t / (p.band * p.tiles) * p.band, height = min(pairs - before, p.band), rest = t % (p.band * p.tiles);
        const int pair = before + rest % height;
        Tile tile{pair / p.heads, pair % p.heads, (p.tiles - 1 - rest / height) * BM, p.queries, p.keys, 0, 0, {0, 0}, {0, 0}};
        if (p.ends_q) {
            const Bounds q = bounds_of(p.ends_q, tile.sequence, p.sequences, p.queries);
            Bounds k{0, 0};
            if (tile.sequence < p.sequences) k = bounds_of(p.ends_k, tile.sequence, p.sequences, p.keys);
            tile.from_q = q.begin, tile.queries = q.end - q.begin, tile.from_k = k.begin, tile.keys = k.end - k.begin;
            tile.sequence = 0;  // all tokens are one
        }
        if (tile.first >= tile.queries) return tile;
        const int place = tile.first + tile.keys - tile.queries, last = min(place + BM, tile.keys) - 1;
        const int begin = max(place - p.left, 0), end = min(last + p.right + 1, tile.keys);
        if (begin >= end) return tile;
        tile.blocks = {begin / BN, (end + BN - 1) / BN};
        tile.plain = {(max(last - p.left, 0) + BN - 1) / BN, max(min(place + p.right + 1, tile.keys), 0) / BN};
        return tile;
    }
};

// Rows from `first` on of a tile of ROWS are not this sequence's. Their weights are 0, but 0 times NaN is NaN.
template <int ROWS, int CHUNKS>
__device__ void clear_rows(unsigned char* tile, int first, int warpgroup) {
    for (int i = first * 8 + threadIdx.x % 128; i < ROWS * 8; i += 128)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) *reinterpret_cast<uint4*>(tile + c * ROWS * SPAN + i * 16) = uint4{0, 0, 0, 0};
    tile_written();
    warpgroup_meet(warpgroup);
}

// Whose turn it is to hand products to the tensor cores: each of COUNT warpgroups lets the next go.
template <int COUNT>
struct Turn {
    static __device__ void sync(int warpgroup) { asm volatile("bar.sync %0, 256;" ::"r"(1 + COUNT + warpgroup) : "memory"); }
    static __device__ void pass(int warpgroup) {
        asm volatile("bar.arrive %0, 256;" ::"r"(1 + COUNT + (warpgroup + 1 == COUNT ? 0 : warpgroup + 1)) : "memory");
    }
};

// Blocks go from tile to tile. SHARE blocks of a cluster have neighbouring tiles of one head, see the keys that any of them
// sees, and fetch a part of each block of keys and values for all.
template <typename T, int D, int BN, int WARPGROUPS, int SLOTS, int SHARE>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128) hopper_attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    T* out, float* lse, const int* ends_q, const int* ends_k, i64 out_batch, i64 out_row, i64 out_head, i64 lse_batch,
    i64 lse_head, int sequences, int heads, int group, int queries, int keys, int tiles, int band, int left, int right,
    float scale) {
    using In = typename Format<T>::type;
    constexpr int CHUNKS = (D * sizeof(T) + SPAN - 1) / SPAN, WIDE = CHUNKS * SPAN / sizeof(T);  // past D are zeros
    constexpr int BM = WARPGROUPS * 64, BYTES = BN * CHUNKS * SPAN, Q_BYTES = BM * CHUNKS * SPAN;
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(BN / SHARE * SPAN % PATTERN == 0, "parts start at multiples of the swizzle's pattern");
    using Ring = TileRing<SLOTS, BYTES, 0, SHARE>;
    Ring ring(memory, Q_BYTES + 16 + 2 * sizeof(Tile));
    TileRing<1, Q_BYTES> q(ring.behind());
    Tile* const todo = reinterpret_cast<Tile*>(ring.behind() + Q_BYTES + 16);  // comes with q: this one, and the next
    if (threadIdx.x == 0) {
        ring.init(WARPGROUPS * 4), q.init(WARPGROUPS * 4);
        prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map);
    }
    if constexpr (SHARE > 1) Cluster<SHARE>::meet();
    else __syncthreads();
    take_over();
    const Problem p{ends_q, ends_k, sequences, heads, group, queries, keys, tiles, band, left, right};
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int all = (ends_q ? sequences + 1 : sequences) * heads * tiles, grid = gridDim.x / SHARE;
    const int rank = Cluster<SHARE>::rank(), start = blockIdx.x / SHARE;
    // The heaviest tiles come first; there and back, so that all blocks have as much to do.
    const auto nth = [&](int round) { return round * grid + (round % 2 ? grid - 1 - start : start); };
    if (warpgroup == WARPGROUPS) {
        give_registers<WARPGROUPS == 2 ? 40 : 32>();
        if (warp == WARPGROUPS * 4 && lane == 0) {
            constexpr int COLUMNS = SPAN / sizeof(T), PART = BN / SHARE;
            const auto load = [&](const TensorMap& map, int row, int head, int sequence) {
                Arrival& arrival = ring.ask();
                unsigned char* const to = ring.tile() + rank * PART * SPAN;
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    if constexpr (SHARE == 1)
                        load_box(arrival, to + c * BN * SPAN, map, c * COLUMNS, row, head, sequence);
                    else
                        load_box_for((1 << SHARE) - 1, arrival, to + c * BN * SPAN, map, c * COLUMNS, row + rank * PART, head,
                                     sequence);
                }
                ring.next();
            };
            const auto begin = [&](const Tile& tile, bool empty) {
                q.wait_until_free();
                todo[q.phase] = tile;
                if (empty) {
                    q.full->arrive();
                } else {
                    q.full->expect(Q_BYTES);
                    const int row = tile.from_q + tile.first + rank * BM;
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c)
                        load_box(*q.full, q.tile() + c * BM * SPAN, q_map, c * COLUMNS, row, tile.head, tile.sequence);
                }
                q.next();
            };
            for (int round = 0; round * grid < all; ++round) {
                if (nth(round) >= all) continue;
                const Tile tile = Tile::of<BM * SHARE, BN>(nth(round), p);
                const int kv_head = tile.head / group;
                if (tile.blocks.begin == tile.blocks.end) begin(tile, true);
#pragma unroll 1
                for (int b = tile.blocks.end - 1; b >= tile.blocks.begin; --b) {
                    load(k_map, tile.from_k + b * BN, kv_head, tile.sequence);
                    if (b == tile.blocks.end - 1) begin(tile, false);
                    else load(v_map, tile.from_k + (b + 1) * BN, kv_head, tile.sequence);
                    if (b == tile.blocks.begin) load(v_map, tile.from_k + b * BN, kv_head, tile.sequence);
                }
            }
        }
    } else {
        take_registers<WARPGROUPS == 2 ? 232 : 160>();
        const float factor = scale == 0.0f ? 1e-30f : fabsf(scale) * LOG2E, sign = scale < 0.0f ? -1.0f : 1.0f;
        const int own = rank * BM + warp * 16 + lane / 4, quad = lane % 4;
        float scores[BN / 2], sums[WIDE / 2];
        unsigned weights[BN / 16][4];
        if (warpgroup == WARPGROUPS - 1) Turn<WARPGROUPS>::pass(warpgroup);
        for (int round = 0; round * grid < all; ++round) {
            if (nth(round) >= all) continue;
            q.wait();
            const Tile& tile = todo[q.phase];
            const int keys = tile.keys, own_place = tile.first + own + keys - tile.queries;
            const Bounds blocks = tile.blocks, plain = tile.plain;
            Rows rows;
#pragma unroll
            for (int i = 0; i < WIDE / 2; ++i) sums[i] = 0.0f;
            const auto multiply_keys = [&](const Ring& at) {
                product_begin(scores);
#pragma unroll
                for (int s = 0; s < D / 16; ++s)
                    Product<In, In, BN>::add(
                        scores, tile_descriptor(q.tile() + (s / 4 * BM + warpgroup * 64) * SPAN) + s % 4 * 2,
                        tile_descriptor(at.tile() + s / 4 * BN * SPAN) + s % 4 * 2, s > 0);
                product_commit();
            };
            const auto multiply_values = [&](const Ring& at, int block) {
                if (ends_k && (block + 1) * BN > keys)
                    clear_rows<BN, CHUNKS>(at.tile(), keys - block * BN, warpgroup);
                pin(weights);
                product_begin(sums);
                const u64 values = held_descriptor(at.tile(), BN * SPAN);
#pragma unroll
                for (int s = 0; s < BN / 16; ++s) HeldProduct<In, WIDE>::add(sums, weights[s], values + s * 128);
                product_commit();
            };
            const auto weigh = [&](int block) {
                if (block == blocks.begin) q.release(), q.next();  // its scores are the last
                if (block < plain.begin || block >= plain.end || !(scale > 0.0f)) {
                    const int mine = block * BN + 2 * quad, place = own_place - mine;
                    const int low[2] = {place - left, place + 8 - left}, end = keys - 1 - mine;
                    const int high[2] = {min(place + right, end), min(place + 8 + right, end)};
                    hide(scores, low, high, sign);
                }
                rows.weigh(scores, factor);
            };
            if (blocks.begin == blocks.end) {
                q.release(), q.next();
            } else {
                ring.wait();
                multiply_keys(ring);
                product_end(scores);
                ring.release(), ring.next();
                weigh(blocks.end - 1);
                round_to<T>(weights, scores);
                for (int b = blocks.end - 2; b >= blocks.begin; --b) {
                    Ring k = ring, v = ring;
                    v.next();
                    Turn<WARPGROUPS>::sync(warpgroup);
                    k.wait(), multiply_keys(k);
                    v.wait(), multiply_values(v, b + 1);
                    Turn<WARPGROUPS>::pass(warpgroup);
                    product_wait<1>(), pin(scores), k.release();
                    weigh(b);
                    if (rows.any_grown()) {
                        product_end(sums), rows.shrink_sums(sums);
                    } else {
                        product_end(sums);
                    }
                    v.release();
                    pin(weights);  // they were read until now
                    round_to<T>(weights, scores);
                    ring = v, ring.next();
                }
                ring.wait(), multiply_values(ring, blocks.begin);
                product_end(sums);
                ring.release(), ring.next();
            }
            rows.finish(sums);
            // Tokens that no sequence has may be more than the most queries.
            for (int row = tile.first + own; row - own < tile.queries; row += tiles * BM * SHARE) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const i64 at = tile.from_q + row + 8 * h;
                    const bool inside = row + 8 * h < tile.queries;
                    store_row(out + tile.sequence * out_batch + at * out_row + tile.head * out_head, 0, D, inside, sums, 2 * h);
                    if (lse && inside && quad == 0)
                        lse[tile.sequence * lse_batch + tile.head * lse_head + at] = (rows.top[h] + log2f(rows.total[h])) * LN2;
                }
            }
        }
        if (warpgroup == 0) Turn<WARPGROUPS>::sync(warpgroup);  // the last turn is nobody's
    }
    __syncwarp();
    if constexpr (SHARE > 1) Cluster<SHARE>::meet();  // another block may still fetch for this one
}
