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
#include "attention_backward.cuh"

// delta = sum(dout · out) - dlse and lse in base 2 of every query and head. LANES threads have a row. Counters are zeroed.
template <typename T, int HEAD_DIM, int LANES>
__global__ void __launch_bounds__(256) attention_delta(
    const T* dout, const T* out, const float* lse, const float* dlse, float* lse2, float* delta, i64 dout_batch_stride,
    i64 dout_row_stride, i64 dout_head_stride, i64 out_batch_stride, i64 out_row_stride, i64 out_head_stride,
    i64 heads, i64 tokens, i64 rows, int* counters, i64 counter_count) {
    pdl_wait();
    pdl_launch_dependents();
    for (i64 i = i64{blockIdx.x} * 256 + threadIdx.x; i < counter_count; i += i64{gridDim.x} * 256) counters[i] = 0;
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
    const bool saw_nothing = lse[row] == minus_infinity();  // then no key has a probability
    lse2[row] = saw_nothing ? -minus_infinity() : lse[row] * LOG2E;
}

// The maps are those of the tensors that are kept, a and b (K and V, or Q and dO), and of those that are streamed, c and d.
template <typename T, int HEAD_DIM, int STEP, int WARPGROUPS, int STAGES, bool OF_KEYS, bool SOFTCAP>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 128, 1) hopper_attention_backward(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, const __grid_constant__ TensorMap d_map, const BackwardParams<T> p) {
    using Tiles = BackwardTiles<T, HEAD_DIM, STEP, WARPGROUPS>;
    constexpr int ROWS = Tiles::ROWS, CHUNKS = Tiles::CHUNKS, PADDED_DIM = Tiles::PADDED_DIM;
    constexpr int KEPT_BYTES = Tiles::KEPT_BYTES, STEP_BYTES = Tiles::STEP_BYTES;
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
            if (lane == 0) {
                Mbarrier& full = kept.producer_acquire();
                const int row = tile.token() + tile.first;
                Tiles::template load<ROWS>(full, kept.tile(), a_map, row, tile.head, tile.sequence);
                Tiles::template load<ROWS>(full, kept.tile() + KEPT_BYTES, b_map, row, tile.head, tile.sequence);
            }
#pragma unroll 1
            for (int i = 0; i < total; ++i) {
                const int row = (tile.blocks.begin + i % per_head) * STEP, token = tile.streamed_token() + row;
                const int head = OF_KEYS ? tile.head * p.heads_per_kv + i / per_head : tile.head / p.heads_per_kv;
                if (lane == 0) {
                    Mbarrier& full = stream.producer_acquire();
                    Tiles::template load<STEP>(full, stream.tile(), c_map, token, head, tile.sequence);
                    Tiles::template load<STEP>(full, stream.tile() + STEP_BYTES, d_map, token, head, tile.sequence);
                }
                if constexpr (OF_KEYS) {
                    stream.wait_empty();
                    load_sums<STEP>(stream, tile, p, row, head);
                }
                stream.advance();
            }
        }
        return;
    }
    increase_registers<WARPGROUPS == 2 ? 232 : 160>();
    const int quad_lane = lane % 4, own_row = warp * 16 + lane / 4;
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
        kept.consumer_wait();
        Stream before = stream;  // the step whose sums may be incomplete
        const auto step = [&](int first, bool is_first) {
            stream.consumer_wait();
            unsigned char *const c = stream.tile(), *const d = c + STEP_BYTES;
            if (p.cu_seqlens_q && first + STEP > tile.streamed_rows()) {  // what follows is another sequence's
                zero_rows<STEP, CHUNKS>(c, tile.streamed_rows() - first, warpgroup);
                zero_rows<STEP, CHUNKS>(d, tile.streamed_rows() - first, warpgroup);
            }
            Tiles::issue_rows(scores, kept.tile(), c, warpgroup);
            Tiles::issue_rows(grads, kept.tile() + KEPT_BYTES, d, warpgroup);
            warpgroup_wait<1>();
            warpgroup_fence_operand(scores);
            if (!is_first) before.consumer_release();
            before = stream;
            const float* const sums = stream.scales() + 2 * quad_lane;
            const auto own_lse = [&](int r) { return OF_KEYS ? lse2_of(sums, r) : lse2[r / 2 % 2]; };
            const auto own_delta = [&](int r) { return OF_KEYS ? delta_of(sums, r) : delta[r / 2 % 2]; };
            probabilities<ROWS, STEP, OF_KEYS, SOFTCAP>(scores, derivatives, own_lse, tile, p, first, own_row);
            if constexpr (OF_KEYS) {
                convert_p<T>(p16, scores);
                Tiles::issue_sum(acc_v, p16, d);
                warpgroup_wait<1>();
            } else {
                warpgroup_wait<0>();
            }
            warpgroup_fence_operand(grads);
            score_gradients<SOFTCAP>(grads, scores, derivatives, own_delta);
            convert_p<T>(ds16, grads);
            Tiles::issue_sum(acc, ds16, c);
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
    store_rows<HEAD_DIM>(p.out, acc, tile, p, own_row, ROWS);
    if constexpr (OF_KEYS) store_rows<HEAD_DIM>(p.out_v, acc_v, tile, p, own_row, ROWS);
}
