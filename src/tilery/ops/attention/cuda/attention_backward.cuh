// What both forms of attention's backward share: its parameters, tiles and their order, loads, products, P and dS.
#pragma once
#include "attention_mainloop.cuh"

template <typename T>
struct BackwardParams {
    T* out;  // dk, or dq
    T* out_v;  // dv, or null
    const float* lse2;
    const float* delta;
    const int* cu_seqlens_q;  // null if sequences are not packed
    const int* cu_seqlens_k;
    i64 out_batch_stride;
    i64 out_row_stride;
    i64 out_head_stride;
    i64 sums_batch_stride;  // of lse2 and delta, whose tokens lie side by side
    i64 sums_head_stride;
    int sequences;
    int heads;  // of the tensors that are kept
    int heads_per_kv;
    int seqlen_q;  // queries of a sequence; of packed sequences, all tokens
    int seqlen_k;
    int max_seqlen_q;  // of a packed sequence, as declared
    int max_seqlen_k;
    int tiles_per_head;
    int pairs_per_group;  // pairs of a sequence and a head whose tiles take turns; the next group follows
    int window_left;  // a query sees so many keys to the left of its position, and window_right to the right
    int window_right;
    float softcap;
    float softmax_scale;
};

// Rows of one head from `first` on that a block keeps, and the blocks of the other side that it meets. `poison` is 0, or
// NaN where cu_seqlens is invalid.
template <int ROWS, int STEP, bool OF_KEYS>
struct BackwardTile {
    int sequence, head, number, first, queries = 0, keys = 0, token_q = 0, token_k = 0;  // number: of a packed sequence
    float poison = 0.0f;
    Range blocks{0, 0};

    template <typename T>
    __device__ BackwardTile(int t, const BackwardParams<T>& p) : queries(p.seqlen_q), keys(p.seqlen_k) {
        const int pairs = (p.cu_seqlens_q ? p.sequences + 1 : p.sequences) * p.heads;
        const int group = t / (p.pairs_per_group * p.tiles_per_head), first_pair = group * p.pairs_per_group;
        const int turn = t - first_pair * p.tiles_per_head, in_turn = min(pairs - first_pair, p.pairs_per_group);
        const int pair = first_pair + turn % in_turn, index = turn / in_turn;
        sequence = number = pair / p.heads, head = pair % p.heads;
        first = (OF_KEYS ? index : p.tiles_per_head - 1 - index) * ROWS;  // those that meet most come first
        bool exists = true;
        if (p.cu_seqlens_q) {
            const Range q = sequence_range(p.cu_seqlens_q, sequence, p.sequences, p.seqlen_q);
            const Range k = sequence_range(p.cu_seqlens_k, sequence, p.sequences, p.seqlen_k);
            token_q = q.begin, queries = q.end - q.begin, token_k = k.begin, keys = k.end - k.begin;
            exists = sequence < p.sequences;
            if (exists && (is_invalid_sequence(p.cu_seqlens_q, sequence, p.seqlen_q, p.max_seqlen_q) ||
                           is_invalid_sequence(p.cu_seqlens_k, sequence, p.seqlen_k, p.max_seqlen_k)))
                poison = quiet_nan(), exists = false;
            sequence = 0;  // packed tensors have no batch dimension
        }
        if (!exists || first >= rows()) return;
        const int shift = keys - queries;  // the last query is at the last key
        const int last = min(first + ROWS, rows()) - 1;
        const int begin = OF_KEYS ? first - p.window_right - shift : first + shift - p.window_left;
        const int end = OF_KEYS ? last + p.window_left - shift : last + shift + p.window_right;  // the last row that counts
        blocks.begin = max(begin, 0) / STEP;
        blocks.end = max((min(end + 1, streamed_rows()) + STEP - 1) / STEP, blocks.begin);
    }
    __device__ int rows() const { return OF_KEYS ? keys : queries; }
    __device__ int token() const { return OF_KEYS ? token_k : token_q; }
    __device__ int streamed_rows() const { return OF_KEYS ? queries : keys; }
    __device__ int streamed_token() const { return OF_KEYS ? token_q : token_k; }
};

// A score after its soft cap, cap · tanh(score / cap), and the derivative of that. 1 - tanh² is 4 · small / (1 + small)²:
// exact where tanh is 1 in fp32.
__device__ inline float soft_cap(float score, float cap, float& derivative) {
    const float small = exp2_fast(fabsf(score) * (-2.0f * LOG2E) / cap), inverse = 1.0f / (1.0f + small);
    derivative = 4.0f * small * inverse * inverse;
    return copysignf((1.0f - small) * inverse * cap, score);
}


// Tiles in shared memory: a block keeps ROWS rows of two tensors, 64 for each consumer warpgroup, and STEP rows of two
// others stream past them. A head is cut into chunks of 128 bytes; columns beyond HEAD_DIM are zeros.
template <typename T, int HEAD_DIM, int STEP, int WARPGROUPS>
struct BackwardTiles {
    using In = typename WgmmaType<T>::type;
    static constexpr int CHUNKS = (HEAD_DIM * sizeof(T) + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES;
    static constexpr int CHUNK_COLS = SWIZZLE_BYTES / sizeof(T), PADDED_DIM = CHUNKS * CHUNK_COLS;
    static constexpr int ROWS = WARPGROUPS * 64, KEPT_BYTES = ROWS * CHUNKS * SWIZZLE_BYTES;
    static constexpr int STEP_BYTES = STEP * CHUNKS * SWIZZLE_BYTES;

    // Loads the COUNT rows of a tile from `row` on.
    template <int COUNT>
    static __device__ void load(Mbarrier& full, unsigned char* to, const TensorMap& map, int row, int head, int sequence) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            tma_load_4d(full, to + c * COUNT * SWIZZLE_BYTES, map, c * CHUNK_COLS, row, head, sequence);
    }
    // to = kept · streamedᵀ, of this warpgroup's rows.
    static __device__ void issue_rows(float (&to)[STEP / 2], const unsigned char* kept, const unsigned char* streamed,
                                      int warpgroup) {
        warpgroup_arrive(to);
#pragma unroll
        for (int s = 0; s < HEAD_DIM / 16; ++s)
            WgmmaSS<In, In, STEP>::mma(
                to, smem_desc_k_major(kept + (s / 4 * ROWS + warpgroup * 64) * SWIZZLE_BYTES) + s % 4 * 2,
                smem_desc_k_major(streamed + s / 4 * STEP * SWIZZLE_BYTES) + s % 4 * 2, s > 0);
        warpgroup_commit_batch();
    }
    // sum += factors · streamed.
    static __device__ void issue_sum(float (&sum)[PADDED_DIM / 2], unsigned (&factors)[STEP / 16][4],
                                     const unsigned char* streamed) {
        warpgroup_fence_operand(factors);
        warpgroup_arrive(sum);
        const u64 desc = smem_desc_mn_major(streamed, STEP * SWIZZLE_BYTES);
#pragma unroll
        for (int s = 0; s < STEP / 16; ++s) WgmmaRS<In, PADDED_DIM>::mma(sum, factors[s], desc + s * 128);
        warpgroup_commit_batch();
    }
};

// lse2 and delta of the STEP queries from `row` on, which a warp copies beside their tiles, those of 16 queries at a time;
// 0 behind the last query.
template <int STEP, typename Stream, typename Tile, typename T>
__device__ void load_sums(Stream& stream, const Tile& tile, const BackwardParams<T>& p, int row, int head) {
    const int lane = threadIdx.x % 32;
    const float* const from = (lane < 16 ? p.lse2 : p.delta) + tile.sequence * p.sums_batch_stride +
                              head * p.sums_head_stride + tile.token_q;
#pragma unroll
    for (int j = 0; j < STEP; j += 16) {
        const int query = row + j + lane % 16;
        stream.load_scale_or_zero(2 * j + lane, from + min(query, tile.queries - 1), query < tile.queries);
    }
    stream.commit_scales();
}
// lse2 of the query of accumulator r, if `sums` begins with those of the thread's first column; and delta.
__device__ inline float lse2_of(const float* sums, int r) { return sums[r / 8 * 32 + r / 4 % 2 * 8 + r % 2]; }
__device__ inline float delta_of(const float* sums, int r) { return lse2_of(sums + 16, r); }

// Turns scores S into P = exp(scale · S - lse), and into 0 where a query does not see a key or there is no such key.
// `first` is the first of the rows that stream past, `own_row` the thread's first row of the tile, and lse2(r) is lse in
// base 2 of the query of scores[r].
template <int ROWS, int STEP, bool OF_KEYS, bool SOFTCAP, int CAPPED, typename Lse, typename T>
__device__ __forceinline__ void probabilities(float (&scores)[STEP / 2], float (&derivatives)[CAPPED], Lse lse2,
                                              const BackwardTile<ROWS, STEP, OF_KEYS>& tile, const BackwardParams<T>& p,
                                              int first, int own_row) {
    const float scale_log2 = p.softmax_scale * LOG2E;
#pragma unroll
    for (int r = 0; r < STEP / 2; ++r) {
        if constexpr (SOFTCAP)
            scores[r] = soft_cap(scores[r] * p.softmax_scale, p.softcap, derivatives[r]) * LOG2E;
        else
            scores[r] *= scale_log2;
        scores[r] = exp2_fast(scores[r] - lse2(r));
    }
    // From a key to the position of a query: of the pair of first rows, and over all pairs.
    const int apart = tile.keys - tile.queries + (OF_KEYS ? first - tile.first : tile.first - first);
    const int least = apart - (OF_KEYS ? ROWS : STEP) + 1, most = apart + (OF_KEYS ? STEP : ROWS) - 1;
    const int first_key = OF_KEYS ? tile.first : first;
    if (least >= -p.window_right && most <= p.window_left && first_key + (OF_KEYS ? ROWS : STEP) <= tile.keys) return;
    const int own_column = threadIdx.x % 4 * 2;
    const int own = apart + (OF_KEYS ? own_column - own_row : own_row - own_column);
    const int last_key = tile.keys - 1 - first_key - (OF_KEYS ? own_row : own_column);
#pragma unroll
    for (int r = 0; r < STEP / 2; ++r) {
        const int row = r / 2 % 2 * 8, column = r / 4 * 8 + r % 2;
        const int distance = own + (OF_KEYS ? column - row : row - column);
        if (distance < -p.window_right || distance > p.window_left || (OF_KEYS ? row : column) > last_key)
            scores[r] = 0.0f;
    }
}

// Turns dP into dS = P · (dP - delta), times the derivative of a soft cap.
template <bool SOFTCAP, int COUNT, int CAPPED, typename Delta>
__device__ __forceinline__ void score_gradients(float (&grads)[COUNT], const float (&scores)[COUNT],
                                                const float (&derivatives)[CAPPED], Delta delta) {
#pragma unroll
    for (int r = 0; r < COUNT; ++r) {
        grads[r] = scores[r] * (grads[r] - delta(r));
        if constexpr (SOFTCAP) grads[r] *= derivatives[r];
    }
}

// Stores the warpgroup's rows of an output. Tokens of no sequence, or of an invalid one, may be more than max_seqlen: one
// tile writes all their rows.
template <int HEAD_DIM, typename T, typename Tile, int COUNT>
__device__ __forceinline__ void store_rows(T* out, const float (&acc)[COUNT], const Tile& tile, const BackwardParams<T>& p,
                                           int own_row, int rows_of_tile) {
    for (int row = tile.first + own_row; row - own_row < tile.rows(); row += p.tiles_per_head * rows_of_tile) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 at = tile.sequence * p.out_batch_stride + (tile.token() + row + 8 * h) * p.out_row_stride +
                           tile.head * p.out_head_stride;
            store_row(out + at, 0, HEAD_DIM, row + 8 * h < tile.rows(), acc, 2 * h);
        }
    }
}
