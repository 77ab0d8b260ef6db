// softmax over rows: y = exp(x - max(x)) / sum(exp(x - max(x))). A row belongs to a block or to a cluster of blocks.
//
// softmax: the row stays in registers and is read once.
// softmax_reread: the row is read twice; for rows that do not fit the registers.
// softmax_pipelined: persistent blocks; rows go through a pipeline in shared memory and are read once (sm_90).
#include "row_pipeline.cuh"

struct RowStats { float max, inverse_sum; };  // inverse_sum: 1 / sum(exp(x - max))

// Statistics of the row, from the block's maximum and each thread's sum of exp(x - own_max).
template <int THREADS, int CLUSTER>
__device__ RowStats row_stats(float own_max, float own_sum, int iteration = 0) {
    float4 all[CLUSTER];
    Cluster<CLUSTER>::all_gather(all, {own_max, block_reduce<Sum, THREADS>(own_sum)}, iteration);
    float max = Max::identity, sum = 0.0f;
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) max = fmaxf(max, all[b].x);
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) sum += all[b].y * expf(all[b].x - max);
    return {max, 1.0f / sum};
}

template <typename T, int VEC>
__device__ void store_softmax(T* y, const Vec<T, VEC>& x, RowStats stats) {
    float values[VEC];
    x.to_float(values);
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = exp_for<T>(values[i] - stats.max) * stats.inverse_sum;
    store(y, values);
}

template <typename T, int VEC, int VECS_PER_THREAD, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS) softmax(const T* x, T* y, i64 x_stride, i64 m, i64 n) {
    using Row = RegisterRow<T, VEC, VECS_PER_THREAD, THREADS, CLUSTER>;
    Row::cluster::begin();
    Row row;
    row.load(x + Row::index() * x_stride, n);
    y += Row::index() * n;
    float own_max = Max::identity, own_sum = 0.0f, values[VEC];
    row.for_each(n, [&](int v, int) {
        row.vecs[v].to_float(values);
#pragma unroll
        for (int i = 0; i < VEC; ++i) own_max = fmaxf(own_max, values[i]);
    });
    own_max = block_reduce<Max, THREADS>(own_max);
    row.for_each(n, [&](int v, int) {
        row.vecs[v].to_float(values);
#pragma unroll
        for (int i = 0; i < VEC; ++i) own_sum += exp_for<T>(values[i] - own_max);
    });
    const RowStats stats = row_stats<THREADS, CLUSTER>(own_max, own_sum);
    row.for_each(n, [&](int v, int col) { store_softmax(y + col, row.vecs[v], stats); });
}

// The second read of x comes from the cache where the row fits there.
template <typename T, int VEC, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS) softmax_reread(const T* x, T* y, i64 x_stride, i64 m, i64 n) {
    Cluster<CLUSTER>::begin();
    x += blockIdx.x / CLUSTER * x_stride;
    y += blockIdx.x / CLUSTER * n;
    OnlineLogSumExp<T> own;
    for_each_vec<VEC, THREADS, CLUSTER>(x, n, [&](i64, const Vec<T, VEC>& vec) { own.add(vec); });
    const float own_max = block_reduce<Max, THREADS>(own.max);
    const RowStats stats = row_stats<THREADS, CLUSTER>(own_max, own.rescaled_sum(own_max));
    for_each_vec<VEC, THREADS, CLUSTER>(x, n, [&](i64 col, const Vec<T, VEC>& vec) { store_softmax(y + col, vec, stats); });
}

template <typename T, int VECS_PER_THREAD, int THREADS, int CLUSTER, int STAGES>
__global__ void __launch_bounds__(THREADS) softmax_pipelined(const T* x, T* y, i64 x_stride, i64 m, i64 n) {
    constexpr int VEC = 16 / sizeof(T);
    OnlineLogSumExp<T> own;
    RowStats stats;
    pipeline_rows<VECS_PER_THREAD, THREADS, CLUSTER, STAGES, 1>(
        {x}, {x_stride}, m, n,
        [&](i64, int, const Vec<T, VEC> (&vecs)[1]) { own.add(vecs[0]); },
        [&](int iteration) {
            const float own_max = block_reduce<Max, THREADS>(own.max);
            stats = row_stats<THREADS, CLUSTER>(own_max, own.rescaled_sum(own_max), iteration);
            own = {};
        },
        [](int) { return 0; },  // nothing to prefetch
        [&](i64 row, int col, const Vec<T, VEC>& vec, int) { store_softmax(y + row * n + col, vec, stats); });
}
