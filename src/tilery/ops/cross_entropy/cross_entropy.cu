// Cross entropy over rows of logits, with label smoothing and z-loss; also writes the log-sum-exp. Rows are read once.
//
// A row belongs to a block or to a cluster of blocks. Each thread keeps an online log-sum-exp of its own until the end
// of the row; then every warp sends its result to the first block, whose first warp combines them. With several
// ROWS_PER_BLOCK each warp has a short row of its own. A row whose target is ignore_index is not read, unless
// `read_ignored` is set: then no row has to wait for its target.
#include "rows.cuh"

template <typename T, int VEC, int THREADS, int CLUSTER, int ROWS_PER_BLOCK>
__global__ void __launch_bounds__(THREADS* ROWS_PER_BLOCK) cross_entropy(
    const T* logits, const i64* targets, float* losses, float* lses, i64 logits_stride, i64 m, i64 n, i64 ignore_index,
    float label_smoothing, float z_loss, int read_ignored) {
    constexpr int WARPS = THREADS / 32;
    static_assert(ROWS_PER_BLOCK == 1 || THREADS * CLUSTER == 32);
    __shared__ float4 partials[CLUSTER * WARPS];
    Cluster<CLUSTER>::begin();
    const i64 row = ROWS_PER_BLOCK > 1 ? i64{blockIdx.x} * ROWS_PER_BLOCK + threadIdx.x / 32 : blockIdx.x / CLUSTER;
    if (ROWS_PER_BLOCK > 1 && row >= m) return;
    const i64 target = targets[row];
    logits += row * logits_stride;
    OnlineLogSumExp<T> own;
    float logit_sum = 0.0f, target_logit = __int_as_float(0x7fffffff);  // NaN where the target is not a class
    if (target >= 0 && target < n) target_logit = static_cast<float>(logits[target]);  // in flight before sums wait
    if (read_ignored || target != ignore_index)
        for_each_vec<VEC, THREADS, CLUSTER>(logits, n, [&](i64, const Vec<T, VEC>& vec) {
            own.add(vec);
            if (label_smoothing > 0)
#pragma unroll
                for (int i = 0; i < VEC; ++i) logit_sum += static_cast<float>(vec.data[i]);
        }, threadIdx.x % THREADS);
    float max = warp_reduce<Max>(own.max), sum = warp_reduce<Sum>(own.rescaled_sum(max));
    if (label_smoothing > 0) logit_sum = warp_reduce<Sum>(logit_sum);
    if constexpr (CLUSTER * WARPS > 1) {
        const int warp = Cluster<CLUSTER>::rank() * WARPS + threadIdx.x / 32;
        Cluster<CLUSTER>::gather_to_first(partials + warp, {max, sum, logit_sum}, threadIdx.x % 32 == 0);
        if (warp) return;
        OnlineLogSumExp<T> all;
        logit_sum = 0.0f;
        for (int w = threadIdx.x; w < CLUSTER * WARPS; w += 32) {
            const float new_max = fmaxf(all.max, partials[w].x);
            all.sum = all.rescaled_sum(new_max) + partials[w].y * expf(partials[w].x - new_max);
            all.max = new_max;
            logit_sum += partials[w].z;
        }
        max = warp_reduce<Max>(all.max), sum = warp_reduce<Sum>(all.rescaled_sum(max));
        if (label_smoothing > 0) logit_sum = warp_reduce<Sum>(logit_sum);
    }
    float lse = max + logf(sum);  // if all logits are -inf, max is the lowest finite value and the sum is 0
    if (isinf(max)) {  // both +inf and NaN make the sum NaN, but only NaN may make lse NaN
        bool nan = false;
        for (i64 col = threadIdx.x % 32; col < n; col += 32) nan |= isnan(static_cast<float>(logits[col]));
        lse = __any_sync(0xffffffff, nan) ? __int_as_float(0x7fffffff) : max;
    }
    if (threadIdx.x % 32) return;
    const float smooth = label_smoothing > 0 ? label_smoothing * (logit_sum / n) : 0.0f;
    losses[row] = target == ignore_index ? 0.0f : lse - (1 - label_smoothing) * target_logit - smooth + z_loss * lse * lse;
    lses[row] = target == ignore_index ? 0.0f : lse;
}
