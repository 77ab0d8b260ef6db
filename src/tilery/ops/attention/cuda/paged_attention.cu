// Attention of chunks, or of a few queries each, to a cache: as ops/attention/hopper.cu, but rows of a tile are queries times the
// heads that share keys, TMA brings keys and values page by page, and a sequence's keys may be cut among blocks (splits),
// combined afterwards.
#include "tilery_attention.cuh"

// What is asked, the same for all blocks.
struct Problem {
    const int *starts, *lengths;  // first queries of sequences, or none where all have as many; and their keys
    int sequences, tokens, kv_heads, group;  // group: heads that share keys; a tile has all of a query's
    int tiles, splits;  // tiles of a sequence of the most queries
    int cuts, least;  // a sequence's keys are cut in so many, never fewer than the splits; a part has so many blocks or more,
                      // twice as many where there are eight parts all the same (paged_attention.most_splits)
    int most, bound, left;  // the most queries and keys of a sequence; how far to the left of its place a query sees

    __device__ Bounds tokens_of(int b) const {
        const int each = tokens / sequences;
        return starts ? bounds_of(starts, b, sequences, tokens) : Bounds{b * each, (b + 1) * each};
    }
    // Whether its queries or keys are not what may be: it has no tiles, and its rows are NaN.
    __device__ bool cut(int b) const {
        return lengths[b] < 0 || lengths[b] > bound || (starts && is_cut(starts, b, tokens, most));
    }
};

// Rows of one kv head from `first` on, and what they see of a split's keys. Row r is query r / group, head r % group. Tiles
// without rows are passed over, but for the last of all, which says that there are no more.
struct __align__(16) Tile {
    int sequence, split, kv_head, first, token, rows, place, keys;  // token and place: of row 0
    Seen seen;

    // A sequence is cut by its own length and queries alone: it gives the same bits in any batch.
    template <int BM, int BN>
    static __device__ Tile of(int t, const Problem& p) {
        const int column = t / p.tiles, b = column / (p.kv_heads * p.splits), split = column / p.kv_heads % p.splits;
        const Bounds q = p.tokens_of(b);
        const int count = p.cut(b) ? 0 : q.end - q.begin, keys = min(max(p.lengths[b], 0), p.bound), place = keys - count;
        Tile tile{b, split, column % p.kv_heads, (p.tiles - 1 - t % p.tiles) * BM, q.begin, count * p.group, place, keys,
                  {{0, 0}, {0, 0}}};
        if (tile.first >= tile.rows) return tile;
        const int last = min(place + (tile.first + BM - 1) / p.group, keys - 1);
        tile.seen = Seen::of<BN>(place + tile.first / p.group, last, keys, p.left, 0);
        const int skipped = min(max(place - p.left, 0), keys) / BN;  // blocks that no query sees
        const int all = (keys + BN - 1) / BN - skipped, fair = (all + p.cuts - 1) / p.cuts;
        const int part = max(max(fair, p.least), min(2 * p.least, (all + 7) / 8)), from = skipped + split * part;
        Bounds& blocks = tile.seen.blocks;
        blocks = {max(blocks.begin, from), min(blocks.end, from + part)};
        if (blocks.begin >= blocks.end) blocks = {0, 0};
        return tile;
    }
};

// Rows of tokens that no tile has, of all heads: 0 or NaN, as `value` is. `step` warps write them, of which this is the one with
// number `first`: to out, or for combine_splits to the stats of splits that saw nothing.
template <int D, typename T>
__device__ void fill_rows(T* out, float* stats, Bounds tokens, const Problem& p, float value, int first, int step) {
    const i64 heads = i64{p.kv_heads} * p.group, all_rows = p.tokens * heads;
    const i64 start = i64{first} * 32 + threadIdx.x % 32, stride = i64{step} * 32;
    if (!stats) {
        constexpr int WORDS = D * sizeof(T) / 16;  // of a row
        const unsigned word = value == 0.0f ? 0 : 0x7fff7fff;  // NaN of fp16 and of bf16
#pragma unroll 1
        for (i64 i = tokens.begin * heads * WORDS + start; i < tokens.end * heads * WORDS; i += stride)
            reinterpret_cast<uint4*>(out)[i] = uint4{word, word, word, word};
        return;
    }
#pragma unroll 1
    for (i64 row = tokens.begin * heads + start; row < tokens.end * heads; row += stride)
#pragma unroll 1
        for (int s = 0; s < p.splits; ++s)
            stats[s * all_rows + row] = nothing(), stats[(p.splits + s) * all_rows + row] = value;
}

// Blocks go from tile to tile. SHARE blocks of a cluster have neighbouring tiles of one kv head, see the keys that any of them
// sees, and fetch a part of each block of keys and values for all. `table` has the pages of a sequence in a row, 16 tokens or
// more in each, a power of two; without one, page b is all of sequence b. Keys of a page that is not there are NaN, which k_map
// fills in: so are the rows that see them. Of a tile's queries so many rows are fetched.
// Without parts, out is written; else (top, total) and sums of each split.
template <typename T, int D, int BN, int WARPGROUPS, int SLOTS, int SHARE>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128, WARPGROUPS == 1 ? 2 : 1) paged_attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    const int* table, const int* starts, const int* lengths, T* out, float* parts, float* stats, i64 table_row, int sequences,
    int tokens, int kv_heads, int group, int tiles, int splits, int cuts, int least, int fetched, int page, int most, int bound,
    int left, float scale) {
    constexpr int PART = BN / SHARE, THREADS = WARPGROUPS * 128 + 128;
    constexpr int FEW = 40, MANY = WARPGROUPS == 1 ? 216 : 232;  // registers: of two blocks, or of one, a processor has all
    using Walk = ::Walk<T, D, BN, WARPGROUPS>;
    constexpr int CHUNKS = Walk::CHUNKS, COLUMNS = Walk::COLUMNS, BM = Walk::BM, Q_BYTES = Walk::Q_BYTES;
    constexpr int MOST = PART & -PART, LEAST = MOST < 16 ? MOST : 16;  // rows of a box: those of a page if it can be
    static_assert(LEAST * SPAN % PATTERN == 0 && PART / LEAST * CHUNKS <= 32, "a lane fetches a box of whole patterns");
    extern __shared__ __align__(1024) unsigned char memory[];
    using Ring = TileRing<SLOTS, Walk::BYTES, 0, SHARE>;
    Ring ring(memory, Q_BYTES + 16 + 2 * sizeof(Tile));
    TileRing<1, Q_BYTES> q(ring.behind());
    Tile* const todo = reinterpret_cast<Tile*>(ring.behind() + Q_BYTES + 16);  // comes with q: this one, and the next
    if (threadIdx.x == 0) {
        ring.init(WARPGROUPS * 4), q.init(WARPGROUPS * 4);
        prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map);
    }
    if (fetched < BM) {  // the other rows stay zeros
        for (int i = threadIdx.x; i < Q_BYTES / 16; i += THREADS) reinterpret_cast<uint4*>(q.tile())[i] = uint4{0, 0, 0, 0};
        tile_written();
    }
    if constexpr (SHARE > 1) Cluster<SHARE>::meet();
    else __syncthreads();
    take_over();
    const Problem p{starts, lengths, sequences, tokens, kv_heads, group, tiles, splits, cuts, least, most, bound, left};
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int all = sequences * splits * kv_heads * tiles, grid = gridDim.x / SHARE;
    const int rank = Cluster<SHARE>::rank(), start = blockIdx.x / SHARE;
    if (warpgroup == WARPGROUPS) {
        give_registers<FEW>();
        if (warp == WARPGROUPS * 4) {  // goes on into the next tiles as long as the ring has room
            const u64 policy = WARPGROUPS == 1 ? once() : 0;
            const int height = min(page, MOST), boxes = PART / height * CHUNKS;  // of a box; of this block
            const int column = lane % CHUNKS, row = rank * PART + lane / CHUNKS * height;  // of this lane's box, in a tile
            for (int t = start; t < all; t += grid) {
                const Tile tile = Tile::of<BM * SHARE, BN>(t, p);
                if (tile.first >= tile.rows) continue;
                const Bounds blocks = tile.seen.blocks;
                const int* const pages = table + tile.sequence * table_row;
                // The page of this lane's rows, or -1, where TMA finds nothing: entries behind the last key are not read.
                const auto page_of = [&](int block) {
                    const int key = block * BN + row;
                    return block < blocks.begin || key >= tile.keys ? -1 : table ? pages[key / page] : tile.sequence;
                };
                const auto load = [&](const TensorMap& map, int block, int number) {
                    ring.wait_until_free();
                    Arrival& arrival = ring.full[ring.slot];
                    if (lane == 0) arrival.expect(Walk::BYTES);
                    __syncwarp();
                    unsigned char* const to = ring.tile() + (column * BN + row) * SPAN;
                    const int inside = (block * BN + row) & (page - 1);
                    if (lane < boxes) {
                        if constexpr (SHARE > 1)
                            load_box_for((1 << SHARE) - 1, arrival, to, map, column * COLUMNS, inside, tile.kv_head, number);
                        else if constexpr (WARPGROUPS == 1)
                            load_box_once(policy, arrival, to, map, column * COLUMNS, inside, tile.kv_head, number);
                        else
                            load_box(arrival, to, map, column * COLUMNS, inside, tile.kv_head, number);
                    }
                    ring.next();
                };
                int number = 0, ahead = page_of(blocks.end - 1);  // looked up a block before it is fetched
#pragma unroll 1
                for (int b = blocks.end - 1; b >= blocks.begin; --b) {
                    const int before = number;
                    number = ahead, ahead = page_of(b - 1);
                    load(k_map, b, number);
                    if (b < blocks.end - 1) load(v_map, b + 1, before);
                    if (b == blocks.begin) load(v_map, b, number);
                }
            }
        } else if (warp == WARPGROUPS * 4 + 1 && lane == 0) {
            for (int t = start;; t += grid) {
                const Tile tile = t < all ? Tile::of<BM * SHARE, BN>(t, p) : Tile{};
                if (t < all && tile.first >= tile.rows) continue;
                q.wait_until_free();
                todo[q.phase] = tile;
                if (tile.seen.blocks.begin == tile.seen.blocks.end) {
                    q.full->arrive();
                } else {
                    q.full->expect(fetched * CHUNKS * SPAN);
                    const int token = tile.token + (tile.first + rank * BM) / group;
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c)
                        load_box(*q.full, q.tile() + c * BM * SPAN, q_map, c * COLUMNS, 0, tile.kv_head, token);
                }
                q.next();
                if (t >= all) break;
            }
        } else if (warp == WARPGROUPS * 4 + 2) {
            float* const kept = parts ? stats : nullptr;
            for (int b = blockIdx.x; b < sequences; b += gridDim.x)
                if (p.cut(b)) fill_rows<D>(out, kept, p.tokens_of(b), p, not_a_number(), 0, 1);
            if (starts)  // tokens that no sequence has
                fill_rows<D>(out, kept, bounds_of(starts, sequences, sequences, tokens), p, 0.0f, blockIdx.x, gridDim.x);
        }
    } else {
        take_registers<MANY>();
        const int own = rank * BM + warp * 16 + lane / 4, quad = lane % 4;
        float sums[Walk::WIDE / 2];
        Turn<WARPGROUPS>::begin(warpgroup);
        for (;;) {
            q.wait();
            const Tile& tile = todo[q.phase];
            if (tile.rows == 0) break;
            const int row = tile.first + own, place = tile.place + row / group, next = tile.place + (row + 8) / group;
            Rows rows;
            Walk::run(ring, q, {tile.seen, {place, next}, tile.keys, left, 0, true}, scale, rows, sums);
            if (parts) rows.add_totals();
            else rows.finish(sums);
            const i64 all_rows = i64{tokens} * kv_heads * group;
            const bool empty = tile.seen.blocks.begin == tile.seen.blocks.end;  // then sums are not asked for
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int mine = row + 8 * h;
                const bool inside = mine < tile.rows;
                const i64 at = (i64{tile.token + mine / group} * kv_heads + tile.kv_head) * group + mine % group;
                const i64 kept = tile.split * all_rows + at;
                if (!parts) {
                    store_row(out + at * D, 0, D, inside, sums, 2 * h);
                } else {
                    store_row(parts + kept * D, 0, D, inside && !empty, sums, 2 * h);
                    if (inside && quad == 0) stats[kept] = rows.top[h], stats[splits * all_rows + kept] = rows.total[h];
                }
            }
        }
        Turn<WARPGROUPS>::end(warpgroup);
    }
    __syncwarp();
    if constexpr (SHARE > 1) Cluster<SHARE>::meet();  // another block may still fetch for this one
}

// What up to 32 splits found of each row, in their order; a warp has a row.
template <typename T, int D>
__global__ void __launch_bounds__(128) combine_splits(const float* parts, const float* stats, T* out, int rows, int splits) {
    constexpr int BATCH = 8;  // splits whose sums are asked for at once, the first before it is known what they count
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    take_over();
    if (row >= rows) return;
    float found[BATCH][4];
    const auto ask = [&](int first, int column) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i < splits && column < D) load(found[i], parts + (i64{first + i} * rows + row) * D + column);
    };
    ask(0, lane * 4);
    float top = nothing(), total = 0.0f;  // of this lane's split
    if (lane < splits) top = stats[i64{lane} * rows + row], total = stats[i64{splits + lane} * rows + row];
    const float best = reduce_warp<Max>(top), share = total == 0.0f ? 0.0f : exp2_fast(top - best);
    const float sum = reduce_warp<Sum>(total * share), factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
    for (int left = 0; left < D; left += 128) {
        const int column = left + lane * 4;
        float four[4] = {};
        for (int first = 0; first < splits; first += BATCH) {
            if (left + first > 0) ask(first, column);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const float weight = __shfl_sync(0xffffffff, share, (first + i) % 32);
                if (first + i >= splits || weight == 0.0f) continue;  // sums of a split that saw nothing were not kept
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] += found[i][j] * weight;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] *= factor;
        if (column < D) store(out + i64{row} * D + column, four);
    }
}
