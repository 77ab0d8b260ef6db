// Attention mainloop of the consumer warpgroups: S = Q · Kᵀ, masks, online softmax, O += P · V, over blocks of keys and
// values that a pipeline brings to shared memory. For sm_90a.
#pragma once
#include "store_tiles.cuh"
#include "tile_pipeline.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

__device__ inline float minus_infinity() { return __int_as_float(0xff800000); }  // the score of a masked key
__device__ inline float quiet_nan() { return __int_as_float(0x7fffffff); }  // the output of rows whose indices are invalid

// Masks the keys that a thread's two rows do not see. first_key and last_key are the first and last visible key of each
// row, counted from the thread's first column. Visible scores are multiplied by `sign`, because a negative softmax
// scale reverses their order.
template <int COUNT>
__device__ void mask_scores(float (&scores)[COUNT], const int (&first_key)[2], const int (&last_key)[2], float sign) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const int column = i / 4 * 8 + i % 2, h = i / 2 % 2;
        scores[i] = column >= first_key[h] && column <= last_key[h] ? scores[i] * sign : minus_infinity();
    }
}

__device__ inline float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// The natural logarithm of a row's sum of exponentials; -inf for a row that saw no key.
__device__ inline float log_sum_exp(float row_max, float row_sum) { return (row_max + log2f(row_sum)) * LN2; }

// Online softmax of a thread's two rows; the four threads of a quad share the rows. row_max is the same in all of them,
// and each has its own part of row_sum. Probabilities are P = 2 ** (score · scale · log2(e) - row_max), so the largest
// is 1, which is not rounded. If row_max were updated only when P exceeds 2 ** 8, the output would be rescaled less
// often, but errors would be up to twice as large: docs/perf/attention.md.
struct OnlineSoftmax {
    float row_max[2] = {minus_infinity(), minus_infinity()}, row_sum[2] = {0.0f, 0.0f};
    float rescale[2];  // factor for the output accumulated so far
    bool max_grew;  // whether a factor is not 1

    // Turns scores into probabilities P and updates row_max, row_sum and the rescale factors.
    template <int COUNT>
    __device__ void update(float (&scores)[COUNT], float scale_log2) {
        max_grew = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float best = fmaxf(scores[2 * h], scores[2 * h + 1]);
#pragma unroll
            for (int i = 4; i < COUNT; i += 4) best = fmaxf(best, fmaxf(scores[i + 2 * h], scores[i + 2 * h + 1]));
            best = fmaxf(best, __shfl_xor_sync(0xffffffff, best, 1));
            best = fmaxf(best, __shfl_xor_sync(0xffffffff, best, 2)) * scale_log2;
            const bool grew = best > row_max[h];
            rescale[h] = exp2_fast(grew ? row_max[h] - best : 0.0f);
            row_max[h] = grew ? best : row_max[h];
            max_grew |= grew;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float offset = row_max[h] == minus_infinity() ? 0.0f : row_max[h];  // -inf: no visible key so far
            row_sum[h] *= rescale[h];
#pragma unroll
            for (int i = 0; i < COUNT; i += 4)
#pragma unroll
                for (int j = i + 2 * h; j < i + 2 * h + 2; ++j) {
                    scores[j] = exp2_fast(scores[j] * scale_log2 - offset);
                    row_sum[h] += scores[j];
                }
        }
    }
    // Whether the maximum of any row of the warp grew.
    __device__ bool any_max_grew() const { return __any_sync(0xffffffff, max_grew); }
    // Keeps the next warpgroup_wait behind the exponentials. ptxas moves a wait up to the last instruction with a side
    // effect, and this store is one that needs all of row_sum. It never happens: no sum of exponentials is negative.
    // (A trap in its place would be a branch, after which ptxas takes warps for diverged: 55 instructions more.)
    __device__ void keep_wait_behind() const {
        const float sum = row_sum[0] + row_sum[1];
        asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000;\n"
                     "@p st.volatile.shared.f32 [%1], %0; }" ::"f"(sum), "r"(0)
                     : "memory");
    }
    template <int COUNT>
    __device__ void rescale_output(float (&acc)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) acc[i] *= rescale[i / 2 % 2];
    }
    // Adds the quad's parts of row_sum: from here on row_sum is that of the whole row.
    __device__ void reduce_row_sum() {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            row_sum[h] += __shfl_xor_sync(0xffffffff, row_sum[h], 1);
            row_sum[h] += __shfl_xor_sync(0xffffffff, row_sum[h], 2);
        }
    }
    // Divides the output by row_sum. Rows without a visible key become zeros.
    template <int COUNT>
    __device__ void finalize(float (&acc)[COUNT]) {
        reduce_row_sum();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float inverse = row_sum[h] == 0.0f ? 0.0f : 1.0f / row_sum[h];
#pragma unroll
            for (int i = 2 * h; i < COUNT; i += 4) acc[i] *= inverse, acc[i + 1] *= inverse;
        }
    }
};

// Rounds probabilities P to T, as the register operand of the next wgmma.
template <typename T, int COUNT>
__device__ void convert_p(unsigned (&p)[COUNT / 8][4], const float (&scores)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 2) p[i / 8][i % 8 / 2] = Vec<T, 2>::from_float({scores[i], scores[i + 1]}).bits();
}

struct Range { int begin, end; };

// Tokens of a packed sequence. The range is inside the tensor whatever cu_seqlens says, and every token belongs to some
// sequence: the first one begins at token 0, and sequence number `sequences`, which does not exist, has all tokens
// behind the last one.
__device__ inline Range sequence_range(const int* cu_seqlens, int sequence, int sequences, int tokens) {
    const int begin = sequence == 0 ? 0 : min(max(cu_seqlens[sequence], 0), tokens);
    return {begin, sequence < sequences ? min(max(cu_seqlens[sequence + 1], begin), tokens) : tokens};
}

// Whether cu_seqlens is invalid for this sequence: its range is not what cu_seqlens says, or is longer than the
// declared max_seqlen. The output rows of such a sequence are NaN.
__device__ inline bool is_invalid_sequence(const int* cu_seqlens, int sequence, int tokens, int max_seqlen) {
    const int begin = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
    return begin < 0 || (sequence == 0 && begin > 0) || end < begin || end > tokens || end - begin > max_seqlen;
}

// Blocks of BLOCK_N keys for a tile of queries: `visible` to at least one query, and `unmasked`, that is visible to all
// of them. A query sees window_left keys to the left of its position and window_right to the right.
struct KeyBlocks {
    Range visible, unmasked;

    // For queries at positions first to last of a sequence with `keys` keys.
    template <int BLOCK_N>
    static __device__ KeyBlocks of(int first, int last, int keys, int window_left, int window_right) {
        const int begin = max(first - window_left, 0), end = min(last + window_right + 1, keys);
        if (begin >= end) return {{0, 0}, {0, 0}};
        return {{begin / BLOCK_N, (end + BLOCK_N - 1) / BLOCK_N},
                {(max(last - window_left, 0) + BLOCK_N - 1) / BLOCK_N,
                 max(min(first + window_right + 1, keys), 0) / BLOCK_N}};
    }
    // Leaves the blocks of one split. The sequence's `all_blocks` blocks, from block `first` on, are split evenly among
    // `splits`; a split has `min_blocks`, and up to twice as many while that leaves eight splits (host: max_splits).
    __device__ void restrict_to_split(int split, int first, int all_blocks, int splits, int min_blocks) {
        const int even = (all_blocks + splits - 1) / splits;
        const int size = max(max(even, min_blocks), min(2 * min_blocks, (all_blocks + 7) / 8));
        const int begin = first + split * size;
        visible = {max(visible.begin, begin), min(visible.end, begin + size)};
        if (visible.begin >= visible.end) visible = {0, 0};
    }
};

// Zeroes the rows of a tile from `first` on: values that do not belong to this sequence. Their P is 0, but 0 · NaN is
// NaN.
template <int ROWS, int CHUNKS>
__device__ void zero_rows(unsigned char* tile, int first, int warpgroup) {
    for (int i = first * 8 + threadIdx.x % 128; i < ROWS * 8; i += 128)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            *reinterpret_cast<uint4*>(tile + c * ROWS * SWIZZLE_BYTES + i * 16) = uint4{0, 0, 0, 0};
    fence_async_proxy();
    warpgroup_sync(warpgroup);
}

// Named barriers that make the consumer warpgroups issue their wgmmas in turns, so that one computes its softmax while
// another uses the tensor cores. Each warpgroup waits for its turn (sync) and lets the next one go (arrive). The last
// warpgroup lets the first go at the start, and the first takes that turn at the end.
template <int WARPGROUPS>
struct OrderBarrier {
    static __device__ void sync(int warpgroup) {
        asm volatile("bar.sync %0, 256;" ::"r"(1 + WARPGROUPS + warpgroup) : "memory");
    }
    static __device__ void arrive(int warpgroup) {
        const int next = warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1;
        asm volatile("bar.arrive %0, 256;" ::"r"(1 + WARPGROUPS + next) : "memory");
    }
    static __device__ void begin(int warpgroup) {
        if (warpgroup == WARPGROUPS - 1) arrive(warpgroup);
    }
    static __device__ void end(int warpgroup) {
        if (warpgroup == 0) sync(warpgroup);
    }
};

template <>
struct OrderBarrier<1> {  // a single warpgroup need not wait
    static __device__ void sync(int) {}
    static __device__ void arrive(int) {}
    static __device__ void begin(int) {}
    static __device__ void end(int) {}
};

// The softmax scale: its magnitude for base-2 logits, which is never 0, and its sign, which reverses the order of scores.
struct ScoreScale {
    float log2, sign;
    bool positive;
    __device__ explicit ScoreScale(float scale)
        : log2(scale == 0.0f ? 1e-30f : fabsf(scale) * LOG2E), sign(scale < 0.0f ? -1.0f : 1.0f), positive(scale > 0.0f) {}
};

// What the mainloop must know of its tile.
struct TileMask {
    KeyBlocks blocks;
    int positions[2];  // of this thread's two rows, among the keys
    int keys, window_left, window_right;
    bool zero_tail;  // rows behind the last key may hold values of another sequence, so they are zeroed

    // Masks the scores of a block of keys, if any row of the tile does not see them all.
    template <int BLOCK_N>
    __device__ void apply(float (&scores)[BLOCK_N / 2], int block, const ScoreScale& scale) const {
        if (block >= blocks.unmasked.begin && block < blocks.unmasked.end && scale.positive) return;
        const int first = block * BLOCK_N + 2 * (threadIdx.x % 4), end = keys - 1 - first;
        const int first_key[2] = {positions[0] - first - window_left, positions[1] - first - window_left};
        const int last_key[2] = {min(positions[0] - first + window_right, end),
                                 min(positions[1] - first + window_right, end)};
        mask_scores(scores, first_key, last_key, scale.sign);
    }
};

// Tiles of BLOCK_M queries, 64 for each warpgroup, and blocks of BLOCK_N keys and values. Heads of Q and K have HEAD_DIM
// columns and those of V VALUE_DIM. A head is cut into chunks of 128 bytes, which is the width of a tile; columns beyond
// its own are zeros. V lies in stages of K's size, so it may be no wider.
template <typename T, int HEAD_DIM, int BLOCK_N, int WARPGROUPS, int VALUE_DIM = HEAD_DIM>
struct Mainloop {
    using In = typename WgmmaType<T>::type;
    static constexpr int CHUNKS = (HEAD_DIM * sizeof(T) + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES;
    static constexpr int VALUE_CHUNKS = (VALUE_DIM * sizeof(T) + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES;
    static constexpr int CHUNK_COLS = SWIZZLE_BYTES / sizeof(T), PADDED_DIM = VALUE_CHUNKS * CHUNK_COLS;  // of O
    static constexpr int BLOCK_M = WARPGROUPS * 64;
    static constexpr int KV_BYTES = BLOCK_N * CHUNKS * SWIZZLE_BYTES, Q_BYTES = BLOCK_M * CHUNKS * SWIZZLE_BYTES;
    static_assert(VALUE_CHUNKS <= CHUNKS, "a stage holds a block of values too");

    // From the last visible block to the first. The pipeline `kv` brings K of the last block; then K of each block
    // followed by V of the block behind it; at the end V of the first block. So S = Q · Kᵀ of one block and O += P · V
    // of the block before are issued together, and the softmax of the first runs while the second is multiplied. Q has
    // arrived when this is called, and is released here. `softmax` and `acc` (the output O) are those of the
    // warpgroup's 64 rows.
    template <typename KvPipeline, typename QPipeline>
    static __device__ __forceinline__ void run(KvPipeline& kv, QPipeline& q, const TileMask& mask, float softmax_scale,
                                               OnlineSoftmax& softmax, float (&acc)[PADDED_DIM / 2]) {
        const ScoreScale scale(softmax_scale);
        const int warpgroup = WARPGROUPS == 1 ? 0 : __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
        const Range blocks = mask.blocks.visible;
        float scores[BLOCK_N / 2];
        unsigned p[BLOCK_N / 16][4];
#pragma unroll
        for (int i = 0; i < PADDED_DIM / 2; ++i) acc[i] = 0.0f;
        if (blocks.begin == blocks.end) {
            q.consumer_release(), q.advance();
            return;
        }
        const auto issue_qk = [&](const KvPipeline& k) {  // S = Q · Kᵀ
            warpgroup_arrive(scores);
#pragma unroll
            for (int s = 0; s < HEAD_DIM / 16; ++s)
                WgmmaSS<In, In, BLOCK_N>::mma(
                    scores, smem_desc_k_major(q.tile() + (s / 4 * BLOCK_M + warpgroup * 64) * SWIZZLE_BYTES) + s % 4 * 2,
                    smem_desc_k_major(k.tile() + s / 4 * BLOCK_N * SWIZZLE_BYTES) + s % 4 * 2, s > 0);
            warpgroup_commit_batch();
        };
        const auto issue_pv = [&](const KvPipeline& v, int block) {  // O += P · V
            if (mask.zero_tail && (block + 1) * BLOCK_N > mask.keys)
                zero_rows<BLOCK_N, VALUE_CHUNKS>(v.tile(), mask.keys - block * BLOCK_N, warpgroup);
            warpgroup_fence_operand(p);
            warpgroup_arrive(acc);
            const u64 values = smem_desc_mn_major(v.tile(), BLOCK_N * SWIZZLE_BYTES);
#pragma unroll
            for (int s = 0; s < BLOCK_N / 16; ++s) WgmmaRS<In, PADDED_DIM>::mma(acc, p[s], values + s * 128);
            warpgroup_commit_batch();
        };
        const auto apply_softmax = [&](int block) {
            if (block == blocks.begin) q.consumer_release(), q.advance();  // these scores are the last that need Q
            mask.apply<BLOCK_N>(scores, block, scale);
            softmax.update(scores, scale.log2);
        };
        kv.consumer_wait();
        issue_qk(kv);
        warpgroup_wait_all(scores);
        kv.consumer_release(), kv.advance();
        apply_softmax(blocks.end - 1);
        convert_p<T>(p, scores);
        for (int b = blocks.end - 2; b >= blocks.begin; --b) {
            KvPipeline k = kv, v = kv;
            v.advance();
            OrderBarrier<WARPGROUPS>::sync(warpgroup);
            k.consumer_wait(), issue_qk(k);
            v.consumer_wait(), issue_pv(v, b + 1);
            OrderBarrier<WARPGROUPS>::arrive(warpgroup);
            warpgroup_wait<1>(), warpgroup_fence_operand(scores), k.consumer_release();
            apply_softmax(b);
            softmax.keep_wait_behind();
            // Not in a branch: all warps of a warpgroup must execute the same wait, and any_max_grew differs among them.
            warpgroup_wait_all(acc);
            if (softmax.any_max_grew()) softmax.rescale_output(acc);
            v.consumer_release();
            warpgroup_fence_operand(p);  // the wgmma read it until now
            convert_p<T>(p, scores);
            kv = v, kv.advance();
        }
        kv.consumer_wait(), issue_pv(kv, blocks.begin);
        warpgroup_wait_all(acc);
        kv.consumer_release(), kv.advance();
    }
};
