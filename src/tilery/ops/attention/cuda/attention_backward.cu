// Gradients of attention on Hopper by TMA and wgmma: dk and dv by tiles of keys, dq by tiles of queries, causal, with a
// window, packed or not.
//
// Both passes are one kernel. A block keeps a tile of rows of two tensors, 64 rows for each consumer warpgroup, and a
// producer warp streams the other two past it:
//
//   OF_KEYS: keeps K and V, streams Q and dO. Sᵀ = K · Qᵀ, dPᵀ = V · dOᵀ, dV += Pᵀ · dO, dK += dSᵀ · Q
//   else:    keeps Q and dO, streams K and V. S = Q · Kᵀ, dP = dO · Vᵀ, dQ += dS · K
//
// P = exp(scale · S - lse) and dS = P · (dP - delta) are computed anew in both passes, so no two blocks add to one sum:
// every run gives the same bits, and nothing but lse and delta is kept in memory between them. Accumulators of the first
// two products are the register operands of the others, so P and dS never pass through shared memory.
#include "attention_mainloop.cuh"

// delta = sum(dout · out) - dlse and lse in base 2 of every query and head. LANES threads have a row.
template <typename T, int HEAD_DIM, int LANES>
__global__ void __launch_bounds__(256) attention_delta(
    const T* dout, const T* out, const float* lse, const float* dlse, float* lse2, float* delta, i64 dout_batch_stride,
    i64 dout_row_stride, i64 dout_head_stride, i64 out_batch_stride, i64 out_row_stride, i64 out_head_stride,
    i64 heads, i64 tokens, i64 rows) {
    pdl_wait();
    pdl_launch_dependents();
    const i64 row = i64{blockIdx.x} * (256 / LANES) + threadIdx.x / LANES;  // as lse lies: [sequence, head, token]
    const int column = threadIdx.x % LANES * 8;
    float sum = 0.0f;
    if (row < rows && column < HEAD_DIM) {
        const i64 token = row % tokens, head = row / tokens % heads, sequence = row / tokens / heads;
        float a[8], b[8];
        const T* const from_dout = dout + sequence * dout_batch_stride + token * dout_row_stride + head * dout_head_stride;
        const T* const from_out = out + sequence * out_batch_stride + token * out_row_stride + head * out_head_stride;
        Vec<T, 8>::load(from_dout + column).to_float(a);
        Vec<T, 8>::load(from_out + column).to_float(b);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += a[i] * b[i];
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    if (row >= rows || column > 0) return;
    delta[row] = sum - (dlse ? dlse[row] : 0.0f);
    lse2[row] = lse[row] * LOG2E;
}

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
    int window_left;  // a query sees so many keys to the left of its position, and window_right to the right
    int window_right;
    float softcap;
    float softmax_scale;
};

// Rows of one head from `first` on that a block keeps, and the blocks of the other side that it meets. `poison` is 0, or
// NaN where cu_seqlens is invalid.
template <int ROWS, int STEP, bool OF_KEYS>
struct BackwardTile {
    int sequence, head, first, queries = 0, keys = 0, token_q = 0, token_k = 0;
    float poison = 0.0f;
    Range blocks{0, 0};

    template <typename T>
    __device__ BackwardTile(int t, const BackwardParams<T>& p) : queries(p.seqlen_q), keys(p.seqlen_k) {
        const int pairs = (p.cu_seqlens_q ? p.sequences + 1 : p.sequences) * p.heads, pair = t % pairs, index = t / pairs;
        sequence = pair / p.heads, head = pair % p.heads;
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

// The maps are those of the tensors that are kept, a and b (K and V, or Q and dO), and of those that are streamed, c and d.
template <typename T, int HEAD_DIM, int STEP, int WARPGROUPS, int STAGES, bool OF_KEYS, bool SOFTCAP>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128, 1) hopper_attention_backward(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, const __grid_constant__ TensorMap d_map, const BackwardParams<T> p) {
    using In = typename WgmmaType<T>::type;
    constexpr int CHUNKS = (HEAD_DIM * sizeof(T) + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES;
    constexpr int CHUNK_COLS = SWIZZLE_BYTES / sizeof(T), PADDED_DIM = CHUNKS * CHUNK_COLS;
    constexpr int ROWS = WARPGROUPS * 64, KEPT_BYTES = ROWS * CHUNKS * SWIZZLE_BYTES;
    constexpr int STEP_BYTES = STEP * CHUNKS * SWIZZLE_BYTES;
    using Stream = TilePipeline<STAGES, 2 * STEP_BYTES, OF_KEYS ? 2 * STEP : 0>;  // lse2 and delta beside Q and dO
    extern __shared__ __align__(1024) unsigned char smem[];
    Stream stream(smem, 2 * KEPT_BYTES + 16);
    TilePipeline<1, 2 * KEPT_BYTES> kept(stream.after_tiles());
    if (threadIdx.x == 0) {
        stream.init(WARPGROUPS * 4), kept.init(WARPGROUPS * 4);
        prefetch_tensor_map(a_map), prefetch_tensor_map(b_map), prefetch_tensor_map(c_map), prefetch_tensor_map(d_map);
    }
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    const BackwardTile<ROWS, STEP, OF_KEYS> tile(blockIdx.x, p);
    const int per_head = tile.blocks.end - tile.blocks.begin, total = OF_KEYS ? per_head * p.heads_per_kv : per_head;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    if (warpgroup == WARPGROUPS) {
        decrease_registers<WARPGROUPS == 2 ? 40 : 32>();
        if (warp == WARPGROUPS * 4 && total > 0) {
            const auto load = [&](Mbarrier& full, unsigned char* to, const TensorMap& map, int rows, int row, int head) {
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c)
                    tma_load_4d(full, to + c * rows * SWIZZLE_BYTES, map, c * CHUNK_COLS, row, head, tile.sequence);
            };
            if (lane == 0) {
                Mbarrier& full = kept.producer_acquire();
                load(full, kept.tile(), a_map, ROWS, tile.token() + tile.first, tile.head);
                load(full, kept.tile() + KEPT_BYTES, b_map, ROWS, tile.token() + tile.first, tile.head);
            }
#pragma unroll 1
            for (int i = 0; i < total; ++i) {
                const int row = (tile.blocks.begin + i % per_head) * STEP;
                const int head = OF_KEYS ? tile.head * p.heads_per_kv + i / per_head : tile.head / p.heads_per_kv;
                if (lane == 0) {
                    Mbarrier& full = stream.producer_acquire();
                    load(full, stream.tile(), c_map, STEP, tile.streamed_token() + row, head);
                    load(full, stream.tile() + STEP_BYTES, d_map, STEP, tile.streamed_token() + row, head);
                }
                if constexpr (OF_KEYS) {
                    stream.wait_empty();
                    const i64 sums = tile.sequence * p.sums_batch_stride + head * p.sums_head_stride + tile.token_q;
#pragma unroll
                    for (int j = lane; j < STEP; j += 32) {
                        const int query = min(row + j, tile.queries - 1);
                        stream.load_scale_or_zero(j, p.lse2 + sums + query, row + j < tile.queries);
                        stream.load_scale_or_zero(STEP + j, p.delta + sums + query, row + j < tile.queries);
                    }
                    stream.commit_scales();
                }
                stream.advance();
            }
        }
    } else {
    increase_registers<WARPGROUPS == 2 ? 232 : 160>();
    const int quad_lane = lane % 4, own_row = warp * 16 + lane / 4;
    const int shift = tile.keys - tile.queries;
    const float scale_log2 = p.softmax_scale * LOG2E;
    float acc[PADDED_DIM / 2], acc_v[OF_KEYS ? PADDED_DIM / 2 : 4];
#pragma unroll
    for (float& each : acc) each = 0.0f;
#pragma unroll
    for (float& each : acc_v) each = 0.0f;
    if (total > 0) {
        float scores[STEP / 2], grads[STEP / 2];  // S and dP; then P and dS
        float derivatives[SOFTCAP ? STEP / 2 : 1];
        unsigned p16[STEP / 16][4], ds16[STEP / 16][4];
        float lse2[2], delta[2];
        if constexpr (!OF_KEYS) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int query = min(tile.first + own_row + 8 * h, tile.queries - 1);
                const i64 at = tile.sequence * p.sums_batch_stride + tile.head * p.sums_head_stride + tile.token_q + query;
                lse2[h] = p.lse2[at], delta[h] = p.delta[at];
            }
        }
        const auto issue_rows = [&](float(&to)[STEP / 2], const unsigned char* kept_tile, const unsigned char* streamed) {
            warpgroup_arrive(to);
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 16; ++s)
                WgmmaSS<In, In, STEP>::mma(
                    to, smem_desc_k_major(kept_tile + (s / 4 * ROWS + warpgroup * 64) * SWIZZLE_BYTES) + s % 4 * 2,
                    smem_desc_k_major(streamed + s / 4 * STEP * SWIZZLE_BYTES) + s % 4 * 2, s > 0);
            warpgroup_commit_batch();
        };
        const auto issue_sum = [&](auto& sum, unsigned(&factors)[STEP / 16][4], const unsigned char* streamed) {
            warpgroup_fence_operand(factors);
            warpgroup_arrive(sum);
            const u64 desc = smem_desc_mn_major(streamed, STEP * SWIZZLE_BYTES);
#pragma unroll
            for (int s = 0; s < STEP / 16; ++s) WgmmaRS<In, PADDED_DIM>::mma(sum, factors[s], desc + s * 128);
            warpgroup_commit_batch();
        };
        kept.consumer_wait();
        Stream before = stream;  // the step whose sums may be incomplete
        const auto step = [&](int first, bool is_first) {
            stream.consumer_wait();
            unsigned char *const c = stream.tile(), *const d = c + STEP_BYTES;
            if (p.cu_seqlens_q && first + STEP > tile.streamed_rows()) {  // what follows is another sequence's
                zero_rows<STEP, CHUNKS>(c, tile.streamed_rows() - first, warpgroup);
                zero_rows<STEP, CHUNKS>(d, tile.streamed_rows() - first, warpgroup);
            }
            issue_rows(scores, kept.tile(), c);
            issue_rows(grads, kept.tile() + KEPT_BYTES, d);
            warpgroup_wait<1>();
            warpgroup_fence_operand(scores);
            if (!is_first) before.consumer_release();
            before = stream;
            const float* const sums = stream.scales() + 2 * quad_lane;
#pragma unroll
            for (int r = 0; r < STEP / 2; ++r) {
                const float own_lse = OF_KEYS ? sums[r / 4 * 8 + r % 2] : lse2[r / 2 % 2];
                if constexpr (SOFTCAP)
                    scores[r] = soft_cap(scores[r] * p.softmax_scale, p.softcap, derivatives[r]) * LOG2E;
                else
                    scores[r] *= scale_log2;
                scores[r] = exp2_fast(scores[r] - own_lse);
            }
            // From a key to the position of a query: of the pair of first rows, and over all pairs.
            const int apart = shift + (OF_KEYS ? first - tile.first : tile.first - first);
            const int least = apart - (OF_KEYS ? ROWS : STEP) + 1, most = apart + (OF_KEYS ? STEP : ROWS) - 1;
            if (least < -p.window_right || most > p.window_left || (!OF_KEYS && first + STEP > tile.keys)) {
                const int own = apart + (OF_KEYS ? 2 * quad_lane - own_row : own_row - 2 * quad_lane);
                const int last = OF_KEYS ? STEP : tile.keys - 1 - first - 2 * quad_lane;
#pragma unroll
                for (int r = 0; r < STEP / 2; ++r) {
                    const int row = r / 2 % 2 * 8, column = r / 4 * 8 + r % 2;
                    const int distance = own + (OF_KEYS ? column - row : row - column);
                    if (distance < -p.window_right || distance > p.window_left || column > last) scores[r] = 0.0f;
                }
            }
            if constexpr (OF_KEYS) {
                convert_p<T>(p16, scores);
                issue_sum(acc_v, p16, d);
                warpgroup_wait<1>();
            } else {
                warpgroup_wait<0>();
            }
            warpgroup_fence_operand(grads);
#pragma unroll
            for (int r = 0; r < STEP / 2; ++r) {
                grads[r] = scores[r] * (grads[r] - (OF_KEYS ? sums[STEP + r / 4 * 8 + r % 2] : delta[r / 2 % 2]));
                if constexpr (SOFTCAP) grads[r] *= derivatives[r];
            }
            convert_p<T>(ds16, grads);
            issue_sum(acc, ds16, c);
            stream.advance();
        };
#pragma unroll 1
        for (int h = 0; h < (OF_KEYS ? p.heads_per_kv : 1); ++h)
#pragma unroll 1
            for (int b = tile.blocks.begin; b < tile.blocks.end; ++b) step(b * STEP, h == 0 && b == tile.blocks.begin);
        warpgroup_wait_all(acc);
        if constexpr (OF_KEYS) warpgroup_fence_operand(acc_v);
    }
#pragma unroll
    for (float& each : acc) each = each * p.softmax_scale + tile.poison;
#pragma unroll
    for (float& each : acc_v) each += tile.poison;
    // Tokens of no sequence, or of an invalid one, may be more than max_seqlen: one tile writes all their rows.
    for (int row = tile.first + own_row; row - own_row < tile.rows(); row += p.tiles_per_head * ROWS) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 at = tile.sequence * p.out_batch_stride + (tile.token() + row + 8 * h) * p.out_row_stride +
                           tile.head * p.out_head_stride;
            const bool inside = row + 8 * h < tile.rows();
            store_row(p.out + at, 0, HEAD_DIM, inside, acc, 2 * h);
            if constexpr (OF_KEYS) store_row(p.out_v + at, 0, HEAD_DIM, inside, acc_v, 2 * h);
        }
    }
    }
}
