// Attention to a paged KV cache on Hopper by TMA and wgmma: chunked prefill and decode. It has the mainloop of
// attention.cu, with these differences:
//
// - a row of a tile is a (query, head) pair: the query heads that share a KV head are rows of one tile;
// - TMA loads keys and values page by page;
// - the keys of a sequence may be split among blocks (split-KV); combine_splits.cu then combines the partial results.
#include "attention_mainloop.cuh"

template <typename T>
struct PagedAttentionParams {
    const int* page_table;  // [sequences, pages of a sequence]; null: the keys of sequence b are page b
    const int* cu_seqlens_q;  // null: all sequences have the same number of queries
    const int* seqlens_k;
    T* out;  // written if there are no splits
    float* partial_out;  // [splits, rows, HEAD_DIM]; null if there are no splits
    float* partial_stats;  // [2, splits, rows]: maxima and sums
    i64 page_table_stride;
    int sequences;
    int tokens;  // queries of all sequences
    int kv_heads;
    int heads_per_kv;  // query heads that share a KV head; a tile has all of a query's
    int tiles_per_head;  // tiles of a sequence with max_seqlen_q queries
    int splits;
    int target_splits;  // a sequence's keys are split so many ways; never fewer than `splits`
    int min_blocks_per_split;  // key blocks; up to twice as many while that leaves eight splits (host: max_splits)
    int q_rows;  // rows of a tile of queries that TMA loads
    int page_size;  // 16 or more, a power of two
    int max_seqlen_q;
    int max_seqlen_k;
    int window_left;  // a query sees so many keys to the left of its position
    float softmax_scale;
};

template <typename T>
__device__ Range query_range(const PagedAttentionParams<T>& p, int sequence) {
    const int each = p.tokens / p.sequences;
    return p.cu_seqlens_q ? sequence_range(p.cu_seqlens_q, sequence, p.sequences, p.tokens)
                          : Range{sequence * each, (sequence + 1) * each};
}

// Whether seqlens_k or cu_seqlens_q is invalid for this sequence: then it has no tiles, and its rows are NaN.
template <typename T>
__device__ bool is_invalid(const PagedAttentionParams<T>& p, int sequence) {
    return p.seqlens_k[sequence] < 0 || p.seqlens_k[sequence] > p.max_seqlen_k ||
           (p.cu_seqlens_q && is_invalid_sequence(p.cu_seqlens_q, sequence, p.tokens, p.max_seqlen_q));
}

// Rows of one KV head from `first` on, and the keys of one split that they see. Row r is query r / heads_per_kv and
// head r % heads_per_kv. Tiles without rows are skipped; a last one, with rows = 0, tells the consumers that there are
// no more.
struct __align__(16) Tile {
    int sequence, split, kv_head, first, token, rows, position, keys;  // token, position: of row 0
    KeyBlocks blocks;

    // How a sequence is split depends on its own length and queries alone, so its result has the same bits in any
    // batch.
    template <int BLOCK_M, int BLOCK_N, typename T>
    static __device__ Tile of(int t, const PagedAttentionParams<T>& p) {
        const int column = t / p.tiles_per_head, sequence = column / (p.kv_heads * p.splits);
        const int split = column / p.kv_heads % p.splits;
        const Range q = query_range(p, sequence);
        const int queries = is_invalid(p, sequence) ? 0 : q.end - q.begin;
        const int keys = min(max(p.seqlens_k[sequence], 0), p.max_seqlen_k), position = keys - queries;
        Tile tile{sequence, split, column % p.kv_heads, (p.tiles_per_head - 1 - t % p.tiles_per_head) * BLOCK_M, q.begin,
                  queries * p.heads_per_kv, position, keys, {{0, 0}, {0, 0}}};
        if (tile.first >= tile.rows) return tile;
        const int last = min(position + (tile.first + BLOCK_M - 1) / p.heads_per_kv, keys - 1);
        tile.blocks = KeyBlocks::of<BLOCK_N>(position + tile.first / p.heads_per_kv, last, keys, p.window_left, 0);
        const int skipped = min(max(position - p.window_left, 0), keys) / BLOCK_N;  // blocks that no query sees
        const int all_blocks = (keys + BLOCK_N - 1) / BLOCK_N - skipped;
        tile.blocks.restrict_to_split(split, skipped, all_blocks, p.target_splits, p.min_blocks_per_split);
        return tile;
    }
};

// Fills the rows of tokens that are in no tile, for all heads, with `value`, which is 0 or NaN. `warps` warps share the
// work, and this one has number `warp`. Without `stats` it writes to out; else it writes the stats of splits that saw
// no keys, for combine_splits.
template <int HEAD_DIM, typename T>
__device__ void fill_rows(const PagedAttentionParams<T>& p, float* stats, Range tokens, float value, int warp, int warps) {
    const i64 heads = i64{p.kv_heads} * p.heads_per_kv, all_rows = p.tokens * heads;
    const i64 start = i64{warp} * 32 + threadIdx.x % 32, stride = i64{warps} * 32;
    if (!stats) {
        constexpr int WORDS = HEAD_DIM * sizeof(T) / 16;  // of a row
        const unsigned word = value == 0.0f ? 0 : 0x7fff7fff;  // NaN in fp16 and in bf16
#pragma unroll 1
        for (i64 i = tokens.begin * heads * WORDS + start; i < tokens.end * heads * WORDS; i += stride)
            reinterpret_cast<uint4*>(p.out)[i] = uint4{word, word, word, word};
        return;
    }
#pragma unroll 1
    for (i64 row = tokens.begin * heads + start; row < tokens.end * heads; row += stride)
#pragma unroll 1
        for (int s = 0; s < p.splits; ++s)
            stats[s * all_rows + row] = minus_infinity(), stats[(p.splits + s) * all_rows + row] = value;
}

// Blocks go from tile to tile. Of the last warpgroup, one warp loads keys and values, one thread loads
// queries and hands tiles to the consumers, and one warp fills the rows that no tile has. Each consumer warpgroup has
// 64 rows. MULTICAST blocks of a cluster have neighbouring tiles of one KV head. They all visit the keys that any of
// them sees, and each loads a part of every block of keys and values for all. Keys of a page that is not in the cache
// are NaN, which k_map fills in, so rows that see them are NaN too. The params are __grid_constant__: without it some
// instances spill (NVRTC 13.4, HEAD_DIM 256).
template <typename T, int HEAD_DIM, int BLOCK_N, int WARPGROUPS, int STAGES, int MULTICAST>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128, WARPGROUPS == 1 ? 2 : 1) paged_attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    const __grid_constant__ PagedAttentionParams<T> params) {
    const PagedAttentionParams<T> p = params;
    constexpr int PART_N = BLOCK_N / MULTICAST, THREADS = WARPGROUPS * 128 + 128;  // PART_N: keys that a block loads for all
    // All registers of an SM are used, by one block or by two.
    constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = WARPGROUPS == 1 ? 216 : 232;
    using Mainloop = ::Mainloop<T, HEAD_DIM, BLOCK_N, WARPGROUPS>;
    constexpr int CHUNKS = Mainloop::CHUNKS, CHUNK_COLS = Mainloop::CHUNK_COLS, BLOCK_M = Mainloop::BLOCK_M;
    constexpr int Q_BYTES = Mainloop::Q_BYTES;
    // Rows of a TMA box: those of a page, up to MAX_BOX_ROWS.
    constexpr int MAX_BOX_ROWS = PART_N & -PART_N, MIN_BOX_ROWS = MAX_BOX_ROWS < 16 ? MAX_BOX_ROWS : 16;
    static_assert(MIN_BOX_ROWS * SWIZZLE_BYTES % SWIZZLE_ATOM == 0 && PART_N / MIN_BOX_ROWS * CHUNKS <= 32,
                  "each lane loads one box, which is whole swizzle atoms");
    extern __shared__ __align__(1024) unsigned char smem[];
    using KvPipeline = TilePipeline<STAGES, Mainloop::KV_BYTES, 0, MULTICAST>;
    KvPipeline kv(smem, Q_BYTES + 16 + 2 * sizeof(Tile));
    TilePipeline<1, Q_BYTES> q(kv.after_tiles());
    // Tiles are handed to the consumers with q: the current tile and the next.
    Tile* const tile_queue = reinterpret_cast<Tile*>(kv.after_tiles() + Q_BYTES + 16);
    if (threadIdx.x == 0) {
        kv.init(WARPGROUPS * 4), q.init(WARPGROUPS * 4);
        prefetch_tensor_map(q_map), prefetch_tensor_map(k_map), prefetch_tensor_map(v_map);
    }
    if (p.q_rows < BLOCK_M) {  // the other rows stay zeros
        for (int i = threadIdx.x; i < Q_BYTES / 16; i += THREADS) reinterpret_cast<uint4*>(q.tile())[i] = uint4{0, 0, 0, 0};
        fence_async_proxy();
    }
    if constexpr (MULTICAST > 1) Cluster<MULTICAST>::sync();
    else __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int tiles = p.sequences * p.splits * p.kv_heads * p.tiles_per_head, clusters = gridDim.x / MULTICAST;
    const int rank = Cluster<MULTICAST>::rank(), cluster = blockIdx.x / MULTICAST;
    if (warpgroup == WARPGROUPS) {
        decrease_registers<PRODUCER_REGISTERS>();
        if (warp == WARPGROUPS * 4) {  // loads keys and values, into the next tiles as far as there are empty stages
            const u64 policy = WARPGROUPS == 1 ? evict_first_policy() : 0;
            const int box_rows = min(p.page_size, MAX_BOX_ROWS), boxes = PART_N / box_rows * CHUNKS;  // boxes of this block
            const int chunk = lane % CHUNKS, row = rank * PART_N + lane / CHUNKS * box_rows;  // this lane's box, in a tile
            for (int t = cluster; t < tiles; t += clusters) {
                const Tile tile = Tile::of<BLOCK_M * MULTICAST, BLOCK_N>(t, p);
                if (tile.first >= tile.rows) continue;
                const Range blocks = tile.blocks.visible;
                const int* const pages = p.page_table + tile.sequence * p.page_table_stride;
                // The page of this lane's rows, or -1, which is outside the cache. Entries behind the last key are not
                // read.
                const auto page_of = [&](int block) {
                    const int key = block * BLOCK_N + row;
                    return block < blocks.begin || key >= tile.keys ? -1
                           : p.page_table                           ? pages[key / p.page_size]
                                                                    : tile.sequence;
                };
                const auto load_kv = [&](const TensorMap& map, int block, int page) {
                    kv.wait_empty();
                    Mbarrier& full = kv.full[kv.stage];
                    if (lane == 0) full.arrive_expect_tx(Mainloop::KV_BYTES);
                    __syncwarp();
                    unsigned char* const to = kv.tile() + (chunk * BLOCK_N + row) * SWIZZLE_BYTES;
                    const int row_in_page = (block * BLOCK_N + row) & (p.page_size - 1);
                    if (lane < boxes) {
                        if constexpr (MULTICAST > 1)
                            tma_load_4d_multicast((1 << MULTICAST) - 1, full, to, map, chunk * CHUNK_COLS, row_in_page,
                                                  tile.kv_head, page);
                        else if constexpr (WARPGROUPS == 1)
                            tma_load_4d_hint(policy, full, to, map, chunk * CHUNK_COLS, row_in_page, tile.kv_head, page);
                        else
                            tma_load_4d(full, to, map, chunk * CHUNK_COLS, row_in_page, tile.kv_head, page);
                    }
                    kv.advance();
                };
                int page = 0, next_page = page_of(blocks.end - 1);  // looked up one block before it is loaded
#pragma unroll 1
                for (int b = blocks.end - 1; b >= blocks.begin; --b) {  // in the order in which the mainloop takes them
                    const int previous_page = page;
                    page = next_page, next_page = page_of(b - 1);
                    load_kv(k_map, b, page);
                    if (b < blocks.end - 1) load_kv(v_map, b + 1, previous_page);
                    if (b == blocks.begin) load_kv(v_map, b, page);
                }
            }
        } else if (warp == WARPGROUPS * 4 + 1 && lane == 0) {  // loads queries and hands tiles to the consumers
            for (int t = cluster;; t += clusters) {
                const Tile tile = t < tiles ? Tile::of<BLOCK_M * MULTICAST, BLOCK_N>(t, p) : Tile{};
                if (t < tiles && tile.first >= tile.rows) continue;
                q.wait_empty();
                tile_queue[q.phase] = tile;
                if (tile.blocks.visible.begin == tile.blocks.visible.end) {
                    q.full->arrive();
                } else {
                    q.full->arrive_expect_tx(p.q_rows * CHUNKS * SWIZZLE_BYTES);
                    const int token = tile.token + (tile.first + rank * BLOCK_M) / p.heads_per_kv;
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c)
                        tma_load_4d(*q.full, q.tile() + c * BLOCK_M * SWIZZLE_BYTES, q_map, c * CHUNK_COLS, 0, tile.kv_head,
                                    token);
                }
                q.advance();
                if (t >= tiles) break;
            }
        } else if (warp == WARPGROUPS * 4 + 2) {  // fills rows that no tile has
            float* const stats = p.partial_out ? p.partial_stats : nullptr;
            for (int b = blockIdx.x; b < p.sequences; b += gridDim.x)
                if (is_invalid(p, b)) fill_rows<HEAD_DIM>(p, stats, query_range(p, b), quiet_nan(), 0, 1);
            if (p.cu_seqlens_q)  // tokens of no sequence
                fill_rows<HEAD_DIM>(p, stats, sequence_range(p.cu_seqlens_q, p.sequences, p.sequences, p.tokens), 0.0f,
                                    blockIdx.x, gridDim.x);
        }
    } else {
        increase_registers<CONSUMER_REGISTERS>();
        const int own_row = rank * BLOCK_M + warp * 16 + lane / 4, quad_lane = lane % 4;
        float acc[Mainloop::PADDED_DIM / 2];
        OrderBarrier<WARPGROUPS>::begin(warpgroup);
        for (;;) {
            q.consumer_wait();
            const Tile& tile = tile_queue[q.phase];
            if (tile.rows == 0) break;
            const int row = tile.first + own_row, position0 = tile.position + row / p.heads_per_kv;
            const int position8 = tile.position + (row + 8) / p.heads_per_kv;
            OnlineSoftmax softmax;
            Mainloop::run(kv, q, {tile.blocks, {position0, position8}, tile.keys, p.window_left, 0, true}, p.softmax_scale,
                          softmax, acc);
            if (p.partial_out) softmax.reduce_row_sum();
            else softmax.finalize(acc);
            const i64 all_rows = i64{p.tokens} * p.kv_heads * p.heads_per_kv;
            const bool no_keys = tile.blocks.visible.begin == tile.blocks.visible.end;  // then combine_splits skips acc
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int tile_row = row + 8 * h;
                const bool inside = tile_row < tile.rows;
                const i64 token = tile.token + tile_row / p.heads_per_kv;
                const i64 out_row = (token * p.kv_heads + tile.kv_head) * p.heads_per_kv + tile_row % p.heads_per_kv;
                const i64 partial_row = tile.split * all_rows + out_row;
                if (!p.partial_out) {
                    store_row(p.out + out_row * HEAD_DIM, 0, HEAD_DIM, inside, acc, 2 * h);
                } else {
                    store_row(p.partial_out + partial_row * HEAD_DIM, 0, HEAD_DIM, inside && !no_keys, acc, 2 * h);
                    if (inside && quad_lane == 0) {
                        p.partial_stats[partial_row] = softmax.row_max[h];
                        p.partial_stats[p.splits * all_rows + partial_row] = softmax.row_sum[h];
                    }
                }
            }
        }
        OrderBarrier<WARPGROUPS>::end(warpgroup);
    }
    __syncwarp();
    if constexpr (MULTICAST > 1) Cluster<MULTICAST>::sync();  // another block may still multicast to this one
}
