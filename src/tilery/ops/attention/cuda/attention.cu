// Attention (prefill) on Hopper by TMA and wgmma: softmax(q · kᵀ · softmax_scale) · v, causal, with a window, packed or
// not. In latent attention (MLA) the last columns of q and k are tensors of their own, and those of k are shared by all
// heads.
//
// Blocks go from tile to tile of BLOCK_M queries of one head. The last warpgroup's first thread is the producer: it
// loads q, and blocks of keys and values through a pipeline. Each consumer warpgroup has 64 queries. It issues
// S = Q · Kᵀ of one block together with O += P · V of the block before, and computes the softmax of the first while the
// second runs. Warpgroups issue their wgmmas in turns, so that one computes its softmax while another uses the tensor
// cores.
#include "attention_mainloop.cuh"

template <typename T>
struct AttentionParams {
    T* out;
    float* lse;  // or null
    const int* cu_seqlens_q;  // null if sequences are not packed
    const int* cu_seqlens_k;
    i64 out_batch_stride;
    i64 out_row_stride;
    i64 out_head_stride;
    i64 lse_batch_stride;
    i64 lse_head_stride;
    int sequences;
    int heads;
    int heads_per_kv;  // query heads that share a KV head
    int seqlen_q;  // queries of a sequence; of packed sequences, all tokens
    int seqlen_k;
    int max_seqlen_q;  // of a packed sequence, as declared
    int max_seqlen_k;
    int tiles_per_head;  // tiles of a sequence with max_seqlen_q queries
    int heads_per_group;  // (sequence, head) pairs whose tiles run together and find their keys in the L2
    int window_left;  // a query sees so many keys to the left of its position, and window_right to the right
    int window_right;
    float softmax_scale;
};

// Queries of one head from `first` on, and the keys that they see. `poison` is 0, or NaN where cu_seqlens is invalid:
// the rows of such a sequence see no keys and are NaN.
struct __align__(16) Tile {
    int sequence, head, first, queries, keys, token_q, token_k;  // token_q, token_k: where a packed sequence begins
    float poison;
    KeyBlocks blocks;

    template <int BLOCK_M, int BLOCK_N, typename T>
    static __device__ Tile of(int t, const AttentionParams<T>& p) {
        const int pairs = (p.cu_seqlens_q ? p.sequences + 1 : p.sequences) * p.heads;
        const int group_size = p.heads_per_group * p.tiles_per_head, first_pair = t / group_size * p.heads_per_group;
        const int group_pairs = min(pairs - first_pair, p.heads_per_group), in_group = t % group_size;
        const int pair = first_pair + in_group % group_pairs;
        Tile tile{pair / p.heads, pair % p.heads, (p.tiles_per_head - 1 - in_group / group_pairs) * BLOCK_M, p.seqlen_q,
                  p.seqlen_k, 0, 0, 0.0f, {{0, 0}, {0, 0}}};
        if (p.cu_seqlens_q) {
            const Range q = sequence_range(p.cu_seqlens_q, tile.sequence, p.sequences, p.seqlen_q);
            Range k{0, 0};
            if (tile.sequence < p.sequences) {
                if (is_invalid_sequence(p.cu_seqlens_q, tile.sequence, p.seqlen_q, p.max_seqlen_q) ||
                    is_invalid_sequence(p.cu_seqlens_k, tile.sequence, p.seqlen_k, p.max_seqlen_k))
                    tile.poison = quiet_nan();
                else
                    k = sequence_range(p.cu_seqlens_k, tile.sequence, p.sequences, p.seqlen_k);
            }
            tile.token_q = q.begin, tile.queries = q.end - q.begin, tile.token_k = k.begin, tile.keys = k.end - k.begin;
            tile.sequence = 0;  // packed tensors have no batch dimension
        }
        if (tile.first >= tile.queries) return tile;
        const int position = tile.first + tile.keys - tile.queries;  // of the first query: the last query is at the last key
        tile.blocks = KeyBlocks::of<BLOCK_N>(position, min(position + BLOCK_M, tile.keys) - 1, tile.keys, p.window_left,
                                             p.window_right);
        return tile;
    }
};

// What TMA loads. The columns of q and k from ROPE_COL on are those of q_rope and k_rope.
struct Maps { const TensorMap &q, &q_rope, &k, &k_rope, &v; };

// What a block does. MULTICAST blocks of a cluster have neighbouring tiles of one head. They all visit the keys that any
// of them sees, and each loads a part of every block of keys and values for all. Heads of q and k have HEAD_DIM columns,
// of which those from ROPE_COL on come from the maps of rope; where these are equal there are none.
template <int HEAD_DIM, int ROPE_COL, int VALUE_DIM, int BLOCK_N, int WARPGROUPS, int STAGES, int MULTICAST, typename T>
__device__ __forceinline__ void attend(const Maps& maps, const AttentionParams<T>& p) {
    using Mainloop = ::Mainloop<T, HEAD_DIM, BLOCK_N, WARPGROUPS, VALUE_DIM>;
    constexpr int CHUNKS = Mainloop::CHUNKS, CHUNK_COLS = Mainloop::CHUNK_COLS, BLOCK_M = Mainloop::BLOCK_M;
    constexpr int Q_BYTES = Mainloop::Q_BYTES, PART_N = BLOCK_N / MULTICAST;  // PART_N: keys that a block loads for all
    constexpr bool HAS_ROPE = ROPE_COL < HEAD_DIM;
    static_assert(!HAS_ROPE || ROPE_COL % CHUNK_COLS == 0, "a chunk comes from one tensor");
    extern __shared__ __align__(1024) unsigned char smem[];
    static_assert(PART_N * SWIZZLE_BYTES % SWIZZLE_ATOM == 0, "parts start at multiples of the swizzle atom");
    using KvPipeline = TilePipeline<STAGES, Mainloop::KV_BYTES, 0, MULTICAST>;
    KvPipeline kv(smem, Q_BYTES + 16 + 2 * sizeof(Tile));
    TilePipeline<1, Q_BYTES> q(kv.after_tiles());
    // The producer computes each tile once and hands it to the consumers with q: the current tile and the next.
    Tile* const tile_queue = reinterpret_cast<Tile*>(kv.after_tiles() + Q_BYTES + 16);
    if (threadIdx.x == 0) {
        kv.init(WARPGROUPS * 4), q.init(WARPGROUPS * 4);
        prefetch_tensor_map(maps.q), prefetch_tensor_map(maps.k), prefetch_tensor_map(maps.v);
        if constexpr (HAS_ROPE) prefetch_tensor_map(maps.q_rope), prefetch_tensor_map(maps.k_rope);
    }
    if constexpr (MULTICAST > 1) Cluster<MULTICAST>::sync();
    else __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const int tiles = (p.cu_seqlens_q ? p.sequences + 1 : p.sequences) * p.heads * p.tiles_per_head;
    const int clusters = gridDim.x / MULTICAST, rank = Cluster<MULTICAST>::rank(), cluster = blockIdx.x / MULTICAST;
    // The tile of this cluster in each round. The heaviest tiles come first. Every other round goes in reverse order,
    // so that all blocks have about the same work.
    const auto tile_index = [&](int round) { return round * clusters + (round % 2 ? clusters - 1 - cluster : cluster); };
    if (warpgroup == WARPGROUPS) {
        decrease_registers<WARPGROUPS == 2 ? 40 : 32>();
        if (warp == WARPGROUPS * 4 && lane == 0) {
            const auto load_chunk = [&](Mbarrier& full, int c, const TensorMap& map, int column, int row, int head,
                                        int sequence) {
                unsigned char* const to = kv.tile() + (c * BLOCK_N + rank * PART_N) * SWIZZLE_BYTES;
                if constexpr (MULTICAST == 1)
                    tma_load_4d(full, to, map, column, row, head, sequence);
                else
                    tma_load_4d_multicast((1 << MULTICAST) - 1, full, to, map, column, row + rank * PART_N, head,
                                          sequence);
            };
            const auto load_k = [&](int row, int head, int sequence) {
                Mbarrier& full = kv.producer_acquire();
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const int column = c * CHUNK_COLS;
                    if (!HAS_ROPE || column < ROPE_COL) load_chunk(full, c, maps.k, column, row, head, sequence);
                    else load_chunk(full, c, maps.k_rope, column - ROPE_COL, row, 0, sequence);  // one head for all
                }
                kv.advance();
            };
            const auto load_v = [&](int row, int head, int sequence) {
                Mbarrier& full = kv.producer_acquire(Mainloop::VALUE_CHUNKS * BLOCK_N * SWIZZLE_BYTES);
#pragma unroll
                for (int c = 0; c < Mainloop::VALUE_CHUNKS; ++c)
                    load_chunk(full, c, maps.v, c * CHUNK_COLS, row, head, sequence);
                kv.advance();
            };
            const auto begin_tile = [&](const Tile& tile, bool no_keys) {
                q.wait_empty();
                tile_queue[q.phase] = tile;
                if (no_keys) {
                    q.full->arrive();
                } else {
                    q.full->arrive_expect_tx(Q_BYTES);
                    const int row = tile.token_q + tile.first + rank * BLOCK_M;
#pragma unroll
                    for (int c = 0; c < CHUNKS; ++c) {
                        const int column = c * CHUNK_COLS;
                        const bool rope = HAS_ROPE && column >= ROPE_COL;
                        tma_load_4d(*q.full, q.tile() + c * BLOCK_M * SWIZZLE_BYTES, rope ? maps.q_rope : maps.q,
                                    rope ? column - ROPE_COL : column, row, tile.head, tile.sequence);
                    }
                }
                q.advance();
            };
            for (int round = 0; round * clusters < tiles; ++round) {
                if (tile_index(round) >= tiles) continue;
                const Tile tile = Tile::of<BLOCK_M * MULTICAST, BLOCK_N>(tile_index(round), p);
                const int kv_head = tile.head / p.heads_per_kv;
                const Range blocks = tile.blocks.visible;
                if (blocks.begin == blocks.end) begin_tile(tile, true);
#pragma unroll 1
                for (int b = blocks.end - 1; b >= blocks.begin; --b) {  // in the order in which the mainloop takes them
                    load_k(tile.token_k + b * BLOCK_N, kv_head, tile.sequence);
                    if (b == blocks.end - 1) begin_tile(tile, false);
                    else load_v(tile.token_k + (b + 1) * BLOCK_N, kv_head, tile.sequence);
                    if (b == blocks.begin) load_v(tile.token_k + b * BLOCK_N, kv_head, tile.sequence);
                }
            }
        }
    } else {
        increase_registers<WARPGROUPS == 2 ? 232 : 160>();
        const int own_row = rank * BLOCK_M + warp * 16 + lane / 4, quad_lane = lane % 4;
        float acc[Mainloop::PADDED_DIM / 2];
        OrderBarrier<WARPGROUPS>::begin(warpgroup);
        for (int round = 0; round * clusters < tiles; ++round) {
            if (tile_index(round) >= tiles) continue;
            q.consumer_wait();
            const Tile& tile = tile_queue[q.phase];
            const int position = tile.first + own_row + tile.keys - tile.queries;
            OnlineSoftmax softmax;
            const bool packed = p.cu_seqlens_k != nullptr;
            Mainloop::run(kv, q,
                          {tile.blocks, {position, position + 8}, tile.keys, p.window_left, p.window_right, packed},
                          p.softmax_scale, softmax, acc);
            softmax.row_sum[0] += tile.poison, softmax.row_sum[1] += tile.poison;
            softmax.finalize(acc);
            // Tokens of no sequence, or of an invalid one, may be more than max_seqlen_q: one tile writes all their
            // rows.
            for (int row = tile.first + own_row; row - own_row < tile.queries;
                 row += p.tiles_per_head * BLOCK_M * MULTICAST) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const i64 token = tile.token_q + row + 8 * h;
                    const bool inside = row + 8 * h < tile.queries;
                    store_row(p.out + tile.sequence * p.out_batch_stride + token * p.out_row_stride +
                                  tile.head * p.out_head_stride,
                              0, VALUE_DIM, inside, acc, 2 * h);
                    if (p.lse && inside && quad_lane == 0)
                        p.lse[tile.sequence * p.lse_batch_stride + tile.head * p.lse_head_stride + token] =
                            log_sum_exp(softmax.row_max[h], softmax.row_sum[h]);
                }
            }
        }
        OrderBarrier<WARPGROUPS>::end(warpgroup);
    }
    __syncwarp();
    if constexpr (MULTICAST > 1) Cluster<MULTICAST>::sync();  // another block may still multicast to this one
}

// The params are not __grid_constant__: with it some instances spill (NVRTC 13.4, HEAD_DIM 16 and 32).
template <typename T, int HEAD_DIM, int BLOCK_N, int WARPGROUPS, int STAGES, int MULTICAST>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128) hopper_attention(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
    const __grid_constant__ TensorMap v_map,
    const AttentionParams<T> p) {
    const Maps maps{q_map, q_map, k_map, k_map, v_map};
    attend<HEAD_DIM, HEAD_DIM, HEAD_DIM, BLOCK_N, WARPGROUPS, STAGES, MULTICAST>(maps, p);
}

// Latent attention: heads of q and k have ROPE_COL columns and then ROPE_DIM of q_rope and k_rope. ROPE_COL is a multiple
// of 64; where q and k have fewer columns, TMA loads zeros between theirs and those of rope.
template <typename T, int ROPE_COL, int ROPE_DIM, int VALUE_DIM, int BLOCK_N, int WARPGROUPS, int STAGES, int MULTICAST>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128) hopper_mla(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap q_rope_map,
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap k_rope_map,
    const __grid_constant__ TensorMap v_map,
    const AttentionParams<T> p) {
    const Maps maps{q_map, q_rope_map, k_map, k_rope_map, v_map};
    attend<ROPE_COL + ROPE_DIM, ROPE_COL, VALUE_DIM, BLOCK_N, WARPGROUPS, STAGES, MULTICAST>(maps, p);
}
