// A block or a cluster of blocks per row, which is read once: threads keep a maximum and sums of their own until its end,
// where every warp gives its own to the first block. Of short rows a block takes several, each warp its own. A row to ignore
// is not read, unless `eager`: then no row waits for its target.
#include "tilery_rows.cuh"

template <typename T, int VEC, int THREADS, int BLOCKS, int ROWS>
__global__ void __launch_bounds__(THREADS* ROWS) cross_entropy(
    const T* logits, const i64* targets, float* losses, float* lses, i64 stride, i64 m, i64 n, i64 ignored,
    float smoothing, float z_loss, int eager) {
    constexpr int WARPS = THREADS / 32;
    static_assert(ROWS == 1 || THREADS * BLOCKS == 32);
    __shared__ float4 parts[BLOCKS * WARPS];
    Cluster<BLOCKS>::begin();
    const i64 row = ROWS > 1 ? i64{blockIdx.x} * ROWS + threadIdx.x / 32 : blockIdx.x / BLOCKS;
    if (ROWS > 1 && row >= m) return;
    const i64 target = targets[row];
    logits += row * stride;
    Exponentials<T> own;
    float plain = 0.0f, picked = __int_as_float(0x7fffffff);  // NaN, where the target is no class
    if (target >= 0 && target < n) picked = static_cast<float>(logits[target]);  // under way before sums wait
    if (eager || target != ignored)
        stream<VEC, THREADS, BLOCKS>(logits, n, [&](i64, const Pack<T, VEC>& pack) {
            own.add(pack);
            if (smoothing > 0)
#pragma unroll
                for (int i = 0; i < VEC; ++i) plain += static_cast<float>(pack.at[i]);
        }, threadIdx.x % THREADS);
    float top = reduce_warp<Max>(own.top), sum = reduce_warp<Sum>(own.below(top));
    if (smoothing > 0) plain = reduce_warp<Sum>(plain);
    if constexpr (BLOCKS * WARPS > 1) {
        const int warp = Cluster<BLOCKS>::rank() * WARPS + threadIdx.x / 32;
        Cluster<BLOCKS>::give_first(parts + warp, {top, sum, plain}, threadIdx.x % 32 == 0);
        if (warp) return;
        Exponentials<T> all;
        plain = 0.0f;
        for (int w = threadIdx.x; w < BLOCKS * WARPS; w += 32) {
            const float more = fmaxf(all.top, parts[w].x);
            all.sum = all.below(more) + parts[w].y * expf(parts[w].x - more);
            all.top = more;
            plain += parts[w].z;
        }
        top = reduce_warp<Max>(all.top), sum = reduce_warp<Sum>(all.below(top));
        if (smoothing > 0) plain = reduce_warp<Sum>(plain);
    }
    float lse = top + logf(sum);  // of -inf alone: top is then the least finite value, and the sum 0
    if (isinf(top)) {  // +inf and NaN both make NaN of the sum: only NaN makes NaN of lse
        bool nan = false;
        for (i64 col = threadIdx.x % 32; col < n; col += 32) nan |= isnan(static_cast<float>(logits[col]));
        lse = __any_sync(0xffffffff, nan) ? __int_as_float(0x7fffffff) : top;
    }
    if (threadIdx.x % 32) return;
    const float smooth = smoothing > 0 ? smoothing * (plain / n) : 0.0f;
    losses[row] = target == ignored ? 0.0f : lse - (1 - smoothing) * picked - smooth + z_loss * lse * lse;
    lses[row] = target == ignored ? 0.0f : lse;
}
