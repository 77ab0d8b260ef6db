// Attention: tiles of queries against blocks of keys and values, which TMA brings around a ring.
//
// A warpgroup has 64 queries. It multiplies them with one block of keys, and in the same go its weights of the block before
// with that one's values; while the second product is under way it makes weights of the scores of the first. Warpgroups take
// turns to hand their products to the tensor cores, so that one makes weights while another multiplies.
#include "tilery_attention.cuh"

// What is asked, the same for all blocks; packed sequences have ends, and begin and end among all tokens.
struct Problem {
    const int *ends_q, *ends_k;
    int sequences, heads, group;  // group: heads that share keys
    int queries, keys;  // of a sequence, or all tokens of packed ones
    int most_queries, most_keys;  // of a packed sequence, as declared
    int tiles, band;  // tiles of a sequence of the most queries; heads whose tiles run together and find their keys in the L2
    int left, right;  // a query sees keys so far to the left and right of its place
};

// Queries of one head from `first` on, and what they see. `poison` is 0, or NaN where a packed sequence is cut: then its rows
// see nothing and are NaN.
struct __align__(16) Tile {
    int sequence, head, first, queries, keys, from_q, from_k;
    float poison;
    Seen seen;

    template <int BM, int BN>
    static __device__ Tile of(int t, const Problem& p) {
        const int pairs = (p.ends_q ? p.sequences + 1 : p.sequences) * p.heads;
        const int before = t / (p.band * p.tiles) * p.band, height = min(pairs - before, p.band), rest = t % (p.band * p.tiles);
        const int pair = before + rest % height;
        Tile tile{pair / p.heads, pair % p.heads, (p.tiles - 1 - rest / height) * BM, p.queries, p.keys, 0, 0, 0.0f,
                  {{0, 0}, {0, 0}}};
        if (p.ends_q) {
            const Bounds q = bounds_of(p.ends_q, tile.sequence, p.sequences, p.queries);
            Bounds k{0, 0};
            if (tile.sequence < p.sequences) {
                if (is_cut(p.ends_q, tile.sequence, p.queries, p.most_queries) ||
                    is_cut(p.ends_k, tile.sequence, p.keys, p.most_keys))
                    tile.poison = not_a_number();
                else
                    k = bounds_of(p.ends_k, tile.sequence, p.sequences, p.keys);
            }
            tile.from_q = q.begin, tile.queries = q.end - q.begin, tile.from_k = k.begin, tile.keys = k.end - k.begin;
            tile.sequence = 0;  // all tokens are one
        }
        if (tile.first >= tile.queries) return tile;
        const int place = tile.first + tile.keys - tile.queries;
        tile.seen = Seen::of<BN>(place, min(place + BM, tile.keys) - 1, tile.keys, p.left, p.right);
        return tile;
    }
};

// Blocks go from tile to tile. SHARE blocks of a cluster have neighbouring tiles of one head, see the keys that any of them
// sees, and fetch a part of each block of keys and values for all.
template <typename T, int D, int BN, int WARPGROUPS, int SLOTS, int SHARE>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128) hopper_attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    T* out, float* lse, const int* ends_q, const int* ends_k, i64 out_batch, i64 out_row, i64 out_head, i64 lse_batch,
    i64 lse_head, int sequences, int heads, int group, int queries, int keys, int most_queries, int most_keys, int tiles,
    int band, int left, int right, float scale) {
    using Walk = ::Walk<T, D, BN, WARPGROUPS>;
    constexpr int CHUNKS = Walk::CHUNKS, COLUMNS = Walk::COLUMNS, BM = Walk::BM, Q_BYTES = Walk::Q_BYTES;
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(BN / SHARE * SPAN % PATTERN == 0, "parts start at multiples of the swizzle's pattern");
    using Ring = TileRing<SLOTS, Walk::BYTES, 0, SHARE>;
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
    const Problem p{ends_q, ends_k, sequences, heads, group, queries, keys, most_queries, most_keys, tiles, band, left, right};
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int all = (ends_q ? sequences + 1 : sequences) * heads * tiles, grid = gridDim.x / SHARE;
    const int rank = Cluster<SHARE>::rank(), start = blockIdx.x / SHARE;
    // The heaviest tiles come first; there and back, so that all blocks have as much to do.
    const auto nth = [&](int round) { return round * grid + (round % 2 ? grid - 1 - start : start); };
    if (warpgroup == WARPGROUPS) {
        give_registers<WARPGROUPS == 2 ? 40 : 32>();
        if (warp == WARPGROUPS * 4 && lane == 0) {
            constexpr int PART = BN / SHARE;
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
                const Bounds blocks = tile.seen.blocks;
                if (blocks.begin == blocks.end) begin(tile, true);
#pragma unroll 1
                for (int b = blocks.end - 1; b >= blocks.begin; --b) {
                    load(k_map, tile.from_k + b * BN, kv_head, tile.sequence);
                    if (b == blocks.end - 1) begin(tile, false);
                    else load(v_map, tile.from_k + (b + 1) * BN, kv_head, tile.sequence);
                    if (b == blocks.begin) load(v_map, tile.from_k + b * BN, kv_head, tile.sequence);
                }
            }
        }
    } else {
        take_registers<WARPGROUPS == 2 ? 232 : 160>();
        const int own = rank * BM + warp * 16 + lane / 4, quad = lane % 4;
        float sums[Walk::WIDE / 2];
        Turn<WARPGROUPS>::begin(warpgroup);
        for (int round = 0; round * grid < all; ++round) {
            if (nth(round) >= all) continue;
            q.wait();
            const Tile& tile = todo[q.phase];
            const int place = tile.first + own + tile.keys - tile.queries;
            Rows rows;
            Walk::run(ring, q, {tile.seen, {place, place + 8}, tile.keys, left, right, ends_k != nullptr}, scale, rows, sums);
            rows.total[0] += tile.poison, rows.total[1] += tile.poison;
            rows.finish(sums);
            // Tokens that no sequence has may be more than the most queries, as may those of a sequence that is cut.
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
        Turn<WARPGROUPS>::end(warpgroup);
    }
    __syncwarp();
    if constexpr (SHARE > 1) Cluster<SHARE>::meet();  // another block may still fetch for this one
}
