// Residual addition and RMS norm over rows: total = x + residual,
// y = total / sqrt(mean(total²) + eps) · (weight + offset). A row belongs to a block or to a cluster of blocks.
//
// add_rms_norm: the sums stay in registers.
// add_rms_norm_reread: the sums are read again; for rows that do not fit the registers.
// add_rms_norm_pipelined: persistent blocks; rows go through a pipeline in shared memory, where the sums stay (sm_90).
#include "row_pipeline.cuh"

template <typename T, int VEC, int VECS_PER_THREAD, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS) add_rms_norm(
    const T* x, const T* residual, const T* weight, T* y, T* total, i64 x_stride, i64 residual_stride, i64 m, i64 n,
    float eps, float offset) {
    using Row = RegisterRow<T, VEC, VECS_PER_THREAD, THREADS, CLUSTER>;
    Row::cluster::begin();
    total += Row::index() * n;
    Row row, other;
    row.load(x + Row::index() * x_stride, n);
    other.load(residual + Row::index() * residual_stride, n);
#pragma unroll
    for (int v = 0; v < VECS_PER_THREAD; ++v)
        if (Row::column(v) < n) row.vecs[v] = add_and_store(row.vecs[v], other.vecs[v], total + Row::column(v));
    other.load(weight, n);  // in flight before the sum of squares waits for the row
    normalise_row(y + Row::index() * n, row, other, n, eps, offset);
}

// A thread reads the sums that it wrote itself, from the cache where they fit there.
template <typename T, int VEC, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS) add_rms_norm_reread(
    const T* x, const T* residual, const T* weight, T* y, T* total, i64 x_stride, i64 residual_stride, i64 m, i64 n,
    float eps, float offset) {
    Cluster<CLUSTER>::begin();
    const i64 row = blockIdx.x / CLUSTER;
    residual += row * residual_stride;
    total += row * n;
    float squares = 0.0f;
    for_each_vec<VEC, THREADS, CLUSTER>(x + row * x_stride, n, [&](i64 col, const Vec<T, VEC>& vec) {
        squares += add_and_store(vec, Vec<T, VEC>::load(residual + col), total + col).sum_of_squares();
    });
    normalise_row_reread<VEC, THREADS, CLUSTER>(y + row * n, total, weight, squares, n, eps, offset);
}

template <typename T, int VECS_PER_THREAD, int THREADS, int CLUSTER, int STAGES>
__global__ void __launch_bounds__(THREADS) add_rms_norm_pipelined(
    const T* x, const T* residual, const T* weight, T* y, T* total, i64 x_stride, i64 residual_stride, i64 m, i64 n,
    float eps, float offset) {
    constexpr int VEC = 16 / sizeof(T);
    float squares = 0.0f, rstd;
    pipeline_rows<VECS_PER_THREAD, THREADS, CLUSTER, STAGES, 2>(
        {x, residual}, {x_stride, residual_stride}, m, n,
        [&](i64 row, int col, Vec<T, VEC> (&vecs)[2]) {
            vecs[0] = add_and_store(vecs[0], vecs[1], total + row * n + col);
            squares += vecs[0].sum_of_squares();
        },
        [&](int iteration) { rstd = row_rstd<THREADS, CLUSTER>(squares, n, eps, iteration), squares = 0.0f; },
        [&](int col) { return Vec<T, VEC>::load(weight + col); },
        [&](i64 row, int col, const Vec<T, VEC>& vec, const Vec<T, VEC>& weights) {
            store_normalised(y + row * n + col, vec, weights, rstd, offset);
        });
}
