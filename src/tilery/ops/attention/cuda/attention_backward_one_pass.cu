// Gradients of attention on Hopper in one pass, by TMA and wgmma: five products where two passes take seven.
//
// A block keeps a tile of K and V, 64 keys for each of two consumer warpgroups, and a producer warp streams Q and dO past
// it, from the last block of queries to the first:
//
//   Sᵀ = K · Qᵀ, dPᵀ = V · dOᵀ, dV += Pᵀ · dO, dK += dSᵀ · Q, and this tile's part of dQᵀ = Kᵀ · dSᵀ
//
// Pᵀ and dSᵀ are register operands of the sums. dS goes through shared memory too, for dQ, to which all keys of the tile
// add: a warpgroup has 64 columns of dQ, or half of the queries where a head has no more columns. The parts of dQ are
// added up in memory in fp32, by a warp that waits until the tiles of keys before this one have added theirs. So every
// run gives the same bits. A tile meets the last queries first: there all tiles of a causal head have work, so each is
// one step behind the one before it. With the first queries first, a tile would wait until those before it had come to
// its own first query. A last kernel rounds dQ.
#include "attention_backward.cuh"
#include "ordered_sums.cuh"

// Sums of dQ in fp32. Those of one block of queries lie side by side, as the threads of the consumer warpgroups have them.
struct QueryGradients {
    float* dq_sums;
    int* dq_turns;  // for each block of queries: tiles of keys that have added to it
    int query_heads;
    int query_blocks;  // of a head: of one sequence, or of all packed ones
};

// Which of the sums are those of a sequence's first block of queries. Packed sequences may begin inside of a block.
template <typename Tile>
__device__ i64 first_query_block(const QueryGradients& g, const Tile& tile, bool packed, int head, int step) {
    const int row = packed ? head : tile.sequence * g.query_heads + head;
    return i64{row} * g.query_blocks + (packed ? tile.token_q / step + tile.number : 0);
}

// Which part of dQᵀ a warpgroup has of a block of queries: 64 columns of the head from `column` on, and QUERIES queries
// from `query` on.
template <int PADDED_DIM, int STEP, int WARPGROUPS>
struct PartOfDq {
    static constexpr int CHUNKS = PADDED_DIM / 64, QUERIES = STEP * CHUNKS / WARPGROUPS, BYTES = QUERIES * 64 * 4;
    static_assert(WARPGROUPS % CHUNKS == 0 && QUERIES % 16 == 0, "whole parts");
    int chunk, query;

    __device__ explicit PartOfDq(int warpgroup) : chunk(warpgroup % CHUNKS), query(warpgroup / CHUNKS * QUERIES) {}
};

// Steps of a tile: blocks of queries from the last to the first, and the heads of a group in turns within each, so that
// tiles stay one step apart from head to head.
template <int STEP>
struct BackwardSteps {
    int row, head, count = 0;  // the first query of the block, the head of the group, and how many steps there were
    int last_row, heads;

    template <typename Tile>
    __device__ BackwardSteps(const Tile& tile, int heads_per_kv)
        : row((tile.blocks.end - 1) * STEP), head(0), last_row(tile.blocks.begin * STEP), heads(heads_per_kv) {}
    __device__ bool left() const { return row >= last_row; }
    __device__ void advance() {
        ++count;
        if (++head == heads) head = 0, row -= STEP;
    }
};

// Stores dSᵀ of a warpgroup's 64 keys, as register operands have it, to [STEP queries, 64 keys] in shared memory.
template <int STEP>
__device__ void store_score_gradients(unsigned char* to, const unsigned (&ds16)[STEP / 16][4]) {
    const int lane = threadIdx.x % 32, line = lane % 8, keys = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;  // of eight each
    const unsigned at = smem_address(to) + (lane / 16 * 8 + line) * SWIZZLE_BYTES + (keys ^ line) * 16;
#pragma unroll
    for (int s = 0; s < STEP / 16; ++s)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(at + s * 16 * SWIZZLE_BYTES), "r"(ds16[s][0]), "r"(ds16[s][1]), "r"(ds16[s][2]),
                       "r"(ds16[s][3]) : "memory");
}

template <typename T, int HEAD_DIM, int STEP, int WARPGROUPS, int STAGES, bool SOFTCAP>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128, 1) hopper_attention_backward_one_pass(
    const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap dout_map, const BackwardParams<T> p,
    const QueryGradients g) {
    using Tiles = BackwardTiles<T, HEAD_DIM, STEP, WARPGROUPS>;
    using Part = PartOfDq<Tiles::PADDED_DIM, STEP, WARPGROUPS>;
    constexpr int ROWS = Tiles::ROWS, CHUNKS = Tiles::CHUNKS, PADDED_DIM = Tiles::PADDED_DIM;
    constexpr int KEPT_BYTES = Tiles::KEPT_BYTES, STEP_BYTES = Tiles::STEP_BYTES;
    constexpr int DS_BYTES = WARPGROUPS * STEP * SWIZZLE_BYTES, DQ_BYTES = WARPGROUPS * Part::BYTES;
    using Stream = TilePipeline<STAGES, 2 * STEP_BYTES, 2 * STEP>;  // lse2 and delta beside Q and dO
    // The sum of dV runs while dS is computed, and that of dK while the next step begins, where there are registers for
    // P and dS too. Where there are not, ptxas would let every wgmma end before the next begins.
    constexpr int LEAST = PADDED_DIM + STEP + (SOFTCAP ? STEP / 2 : 0), OPERAND = STEP / 4;
    constexpr bool EARLY_DV = LEAST + OPERAND <= 208, LATE_DK = LEAST + 2 * OPERAND <= 208;
    constexpr bool FULL = LEAST + (EARLY_DV + LATE_DK) * OPERAND > 200;
    extern __shared__ __align__(1024) unsigned char smem[];
    Stream stream(smem, 2 * KEPT_BYTES + 2 * DS_BYTES + DQ_BYTES + 48);
    TilePipeline<1, 2 * KEPT_BYTES> kept(stream.after_tiles(), 2 * DS_BYTES + DQ_BYTES);
    unsigned char *const ds_tiles = kept.after_tiles(), *const dq_tile = ds_tiles + 2 * DS_BYTES;
    Mbarrier *const dq_full = kept.empty + 1, *const dq_empty = dq_full + 2;  // of even and of odd steps
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) dq_full[i].init(WARPGROUPS * 4), dq_empty[i].init(1);
        stream.init(WARPGROUPS * 4), kept.init(WARPGROUPS * 4);
        prefetch_tensor_map(k_map), prefetch_tensor_map(v_map), prefetch_tensor_map(q_map), prefetch_tensor_map(dout_map);
    }
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    const BackwardTile<ROWS, STEP, true> tile(blockIdx.x, p);
    const bool has_queries = tile.blocks.end > tile.blocks.begin;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    if (warpgroup == WARPGROUPS) {
        decrease_registers<FULL ? 24 : 40>();
        const int first_head = tile.head * p.heads_per_kv;
        if (warp == WARPGROUPS * 4 && has_queries) {  // loads tiles
            if (lane == 0) {
                Mbarrier& full = kept.producer_acquire();
                const int row = tile.token_k + tile.first;
                Tiles::template load<ROWS>(full, kept.tile(), k_map, row, tile.head, tile.sequence);
                Tiles::template load<ROWS>(full, kept.tile() + KEPT_BYTES, v_map, row, tile.head, tile.sequence);
            }
#pragma unroll 1
            for (BackwardSteps<STEP> at(tile, p.heads_per_kv); at.left(); at.advance()) {
                const int token = tile.token_q + at.row, head = first_head + at.head;
                if (lane == 0) {
                    Mbarrier& full = stream.producer_acquire();
                    Tiles::template load<STEP>(full, stream.tile(), q_map, token, head, tile.sequence);
                    Tiles::template load<STEP>(full, stream.tile() + STEP_BYTES, dout_map, token, head, tile.sequence);
                }
                stream.advance();
            }
        }
        if (warp == WARPGROUPS * 4 + 1) {  // loads lse and delta
#pragma unroll 1
            for (BackwardSteps<STEP> at(tile, p.heads_per_kv); at.left(); at.advance()) {
                stream.wait_empty();
                load_sums<STEP>(stream, tile, p, at.row, first_head + at.head);
                stream.advance();
            }
        }
        if (warp >= WARPGROUPS * 4 + 2 && lane == 0) {  // add to dQ: one may wait while the other's copy completes
            const int odd = warp % 2;
#pragma unroll 1
            for (BackwardSteps<STEP> at(tile, p.heads_per_kv); at.left(); at.advance()) {
                if (at.count % 2 != odd) continue;
                const i64 sum = first_query_block(g, tile, p.cu_seqlens_q, first_head + at.head, STEP) + at.row / STEP;
                // Tiles of keys that meet this block of queries too and come before.
                const int first_key = max(at.row + tile.keys - tile.queries - p.window_left, 0);
                const int before = tile.first / ROWS - first_key / ROWS;
                const Turns turns{g.dq_turns + sum};
                turns.wait_for(before);
                dq_full[odd].wait(at.count / 2);
                float* const to = g.dq_sums + sum * (STEP * PADDED_DIM);
                if (before == 0)
                    bulk_store(to, dq_tile, DQ_BYTES);
                else
                    bulk_add(to, dq_tile, DQ_BYTES);
                bulk_commit();
                bulk_wait_read();
                dq_empty[odd].arrive();
                bulk_wait();
                turns.pass_on();
            }
        }
        return;
    }
    increase_registers<FULL ? 240 : 232>();
    const int quad_lane = lane % 4, own_row = warp * 16 + lane / 4;
    float acc_k[PADDED_DIM / 2], acc_v[PADDED_DIM / 2];
#pragma unroll
    for (float& each : acc_k) each = 0.0f;
#pragma unroll
    for (float& each : acc_v) each = 0.0f;
    if (has_queries) {
        float scores[STEP / 2], grads[STEP / 2];  // S and dP; then P and dS
        float derivatives[SOFTCAP ? STEP / 2 : 1], dq[Part::QUERIES / 2];
        unsigned p16[STEP / 16][4], ds16[STEP / 16][4];
        const Part part(warpgroup);
        kept.consumer_wait();
        if (p.cu_seqlens_q && tile.first + ROWS > tile.keys) {  // what follows is another sequence's
            zero_rows<ROWS, CHUNKS>(kept.tile(), tile.keys - tile.first, warpgroup);
            zero_rows<ROWS, CHUNKS>(kept.tile() + KEPT_BYTES, tile.keys - tile.first, warpgroup);
        }
        Stream before = stream;  // the step whose dK may be incomplete
#pragma unroll 1
        for (BackwardSteps<STEP> at(tile, p.heads_per_kv); at.left(); at.advance()) {
            stream.consumer_wait();
            unsigned char *const q = stream.tile(), *const dout = q + STEP_BYTES;
            if (p.cu_seqlens_q && at.row + STEP > tile.queries) {
                zero_rows<STEP, CHUNKS>(q, tile.queries - at.row, warpgroup);
                zero_rows<STEP, CHUNKS>(dout, tile.queries - at.row, warpgroup);
            }
            Tiles::issue_rows(scores, kept.tile(), q, warpgroup);
            Tiles::issue_rows(grads, kept.tile() + KEPT_BYTES, dout, warpgroup);
            warpgroup_wait<1>();
            warpgroup_fence_operand(scores);
            if (LATE_DK && at.count > 0) before.consumer_release();
            before = stream;
            const float* const sums = stream.scales() + 2 * quad_lane;
            const auto lse2 = [&](int r) { return lse2_of(sums, r); };
            const auto delta = [&](int r) { return delta_of(sums, r); };
            probabilities<ROWS, STEP, true, SOFTCAP>(scores, derivatives, lse2, tile, p, at.row, own_row);
            if constexpr (EARLY_DV) {
                convert_p<T>(p16, scores);
                Tiles::issue_sum(acc_v, p16, dout);
            }
            warpgroup_wait<EARLY_DV ? 1 : 0>();
            warpgroup_fence_operand(grads);
            score_gradients<SOFTCAP>(grads, scores, derivatives, delta);
            if constexpr (!EARLY_DV) convert_p<T>(p16, scores);
            convert_p<T>(ds16, grads);
            // Two buffers: all have read this one when they have come to the barrier of the step before.
            unsigned char* const ds = ds_tiles + at.count % 2 * DS_BYTES;
            store_score_gradients<STEP>(ds + warpgroup * STEP * SWIZZLE_BYTES, ds16);
            if constexpr (!EARLY_DV) Tiles::issue_sum(acc_v, p16, dout);
            fence_async_proxy();
            asm volatile("bar.sync %0, %1;" ::"n"(1 + WARPGROUPS), "n"(WARPGROUPS * 128) : "memory");
            warpgroup_arrive(dq);
            const u64 keys = smem_desc_mn_major(kept.tile() + part.chunk * ROWS * SWIZZLE_BYTES, 0);
#pragma unroll
            for (int s = 0; s < ROWS / 16; ++s)
                WgmmaSS<typename Tiles::In, typename Tiles::In, Part::QUERIES>::template mma<1, 0>(
                    dq, keys + s * 128,
                    smem_desc_k_major(ds + (s / 4 * STEP + part.query) * SWIZZLE_BYTES) + s % 4 * 2, s > 0);
            warpgroup_commit_batch();
            Tiles::issue_sum(acc_k, ds16, q);
            warpgroup_wait<1>();
            warpgroup_fence_operand(dq);
            if (at.count > 0) dq_empty[1 - at.count % 2].wait((at.count - 1) / 2);
            float4* const to = reinterpret_cast<float4*>(dq_tile + warpgroup * Part::BYTES) + threadIdx.x % 128;
#pragma unroll
            for (int n = 0; n < Part::QUERIES / 8; ++n)
                to[n * 128] = make_float4(dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) dq_full[at.count % 2].arrive();
            if constexpr (!LATE_DK) {
                warpgroup_wait_all(acc_k);
                stream.consumer_release();
            }
            stream.advance();
        }
        warpgroup_wait_all(acc_k);
        warpgroup_fence_operand(acc_v);
    }
#pragma unroll
    for (float& each : acc_k) each = each * p.softmax_scale + tile.poison;
#pragma unroll
    for (float& each : acc_v) each += tile.poison;
    store_rows<HEAD_DIM>(p.out, acc_k, tile, p, own_row, ROWS);
    store_rows<HEAD_DIM>(p.out_v, acc_v, tile, p, own_row, ROWS);
}

// dq = scale · its sums, rounded: a block of queries for each thread block. Queries that no tile of keys has met are zeros.
template <typename T, int HEAD_DIM, int STEP, int WARPGROUPS>
__global__ void __launch_bounds__(WARPGROUPS * 128) attention_round_dq(const BackwardParams<T> p, const QueryGradients g) {
    constexpr int PADDED_DIM = (HEAD_DIM + 63) / 64 * 64;
    using Part = PartOfDq<PADDED_DIM, STEP, WARPGROUPS>;
    pdl_wait();
    pdl_launch_dependents();
    const BackwardTile<STEP, WARPGROUPS * 64, false> tile(blockIdx.x, p);
    const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const Part part(warpgroup);
    float4 sums[Part::QUERIES / 8] = {};
    if (tile.blocks.end > tile.blocks.begin) {
        const i64 at = first_query_block(g, tile, p.cu_seqlens_q, tile.head, STEP) + tile.first / STEP;
        const auto from = reinterpret_cast<const float4*>(g.dq_sums + at * (STEP * PADDED_DIM)) + threadIdx.x % 128;
#pragma unroll
        for (int n = 0; n < Part::QUERIES / 8; ++n) sums[n] = from[warpgroup * (Part::BYTES / 16) + n * 128];
    }
    unsigned words[Part::QUERIES / 8][2];  // of the columns of a thread and of those 8 further on, after a transposition
    const float scale = p.softmax_scale, poison = tile.poison;
#pragma unroll
    for (int n = 0; n < Part::QUERIES / 8; ++n) {
        const float4 x = sums[n];
        words[n][0] = transpose_8x8(Vec<T, 2>::from_float({x.x * scale + poison, x.y * scale + poison}).bits());
        words[n][1] = transpose_8x8(Vec<T, 2>::from_float({x.z * scale + poison, x.w * scale + poison}).bits());
    }
    const int column = part.chunk * 64 + threadIdx.x / 32 % 4 * 16 + lane % 2 * 8;
    // As in store_rows, one block writes all rows of no sequence.
    for (int first = tile.first + part.query; first - part.query < tile.queries; first += p.tiles_per_head * STEP) {
#pragma unroll
        for (int n = 0; n < Part::QUERIES / 8; n += 2) {
            unsigned four[4] = {words[n][0], words[n][1], words[n + 1][0], words[n + 1][1]};
            transpose_quad(four);
            const int row = first + n * 8 + lane % 4 / 2 * 8 + lane / 4;
            T* const to = p.out + tile.sequence * p.out_batch_stride + (tile.token_q + row) * p.out_row_stride +
                          tile.head * p.out_head_stride;
            if (row < tile.queries && column < HEAD_DIM) store_word(to + column, uint4{four[0], four[1], four[2], four[3]});
        }
    }
}
