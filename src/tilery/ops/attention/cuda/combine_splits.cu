// The results of splits (split-KV) of paged_attention.cu and mla_decode.cu, combined.
#include "attention_mainloop.cuh"

// Combines the partial results of up to 32 splits of each row, in the order of the splits. A warp has a row; a lane has
// the maximum and the sum of one split. A row is a token and a head. Where lse is given it is [sequences, heads,
// queries], and all sequences have as many queries.
template <typename T, int HEAD_DIM>
__global__ void __launch_bounds__(128) combine_splits(const float* partial_out, const float* partial_stats, T* out,
                                                      float* lse, int rows, int splits, int heads, int queries) {
    constexpr int BATCH = 8;  // splits that are loaded at once, the first batch before it is known which of them count
    const int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_wait();
    pdl_launch_dependents();
    if (row >= rows) return;
    float loaded[BATCH][4];
    const auto load_batch = [&](int first, int column) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i < splits && column < HEAD_DIM)
                load(loaded[i], partial_out + (i64{first + i} * rows + row) * HEAD_DIM + column);
    };
    load_batch(0, lane * 4);
    float split_max = minus_infinity(), split_sum = 0.0f;
    if (lane < splits)
        split_max = partial_stats[i64{lane} * rows + row], split_sum = partial_stats[i64{splits + lane} * rows + row];
    const float row_max = warp_reduce<Max>(split_max), rescale = split_sum == 0.0f ? 0.0f : exp2_fast(split_max - row_max);
    const float row_sum = warp_reduce<Sum>(split_sum * rescale), inverse = row_sum == 0.0f ? 0.0f : 1.0f / row_sum;
    if (lse && lane == 0) {
        const int token = row / heads, head = row % heads;
        lse[(token / queries * i64{heads} + head) * queries + token % queries] = log_sum_exp(row_max, row_sum);
    }
#pragma unroll
    for (int col0 = 0; col0 < HEAD_DIM; col0 += 128) {
        const int column = col0 + lane * 4;
        float four[4] = {};
        for (int first = 0; first < splits; first += BATCH) {
            if (col0 + first > 0) load_batch(first, column);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const float factor = __shfl_sync(0xffffffff, rescale, (first + i) % 32);
                if (first + i >= splits || factor == 0.0f) continue;  // a split that saw no keys has not written partial_out
#pragma unroll
                for (int j = 0; j < 4; ++j) four[j] += loaded[i][j] * factor;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) four[j] *= inverse;
        if (column < HEAD_DIM) store(out + i64{row} * HEAD_DIM + column, four);
    }
}
