// RMS norm over rows: y = x / sqrt(mean(x²) + eps) · (weight + offset). A row belongs to a block or to a cluster of
// blocks.
//
// rms_norm: the row stays in registers and is read once.
// rms_norm_reread: the row is read twice; for rows that do not fit the registers.
// rms_norm_pipelined: persistent blocks; rows go through a pipeline in shared memory and are read once (sm_90).
#include "row_pipeline.cuh"

template <typename T, int VEC, int VECS_PER_THREAD, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS) rms_norm(
    const T* x, const T* weight, T* y, i64 x_stride, i64 m, i64 n, float eps, float offset) {
    using Row = RegisterRow<T, VEC, VECS_PER_THREAD, THREADS, CLUSTER>;
    Row::cluster::begin();
    Row row, weights;
    row.load(x + Row::index() * x_stride, n);
    weights.load(weight, n);  // in flight before the sum of squares waits for the row
    normalise_row(y + Row::index() * n, row, weights, n, eps, offset);
}

// The second read of x comes from the cache where the row fits there.
template <typename T, int VEC, int THREADS, int CLUSTER>
__global__ void __launch_bounds__(THREADS) rms_norm_reread(
    const T* x, const T* weight, T* y, i64 x_stride, i64 m, i64 n, float eps, float offset) {
    Cluster<CLUSTER>::begin();
    x += blockIdx.x / CLUSTER * x_stride;
    y += blockIdx.x / CLUSTER * n;
    float squares = 0.0f;
    for_each_vec<VEC, THREADS, CLUSTER>(x, n, [&](i64, const Vec<T, VEC>& vec) { squares += vec.sum_of_squares(); });
    normalise_row_reread<VEC, THREADS, CLUSTER>(y, x, weight, squares, n, eps, offset);
}

template <typename T, int VECS_PER_THREAD, int THREADS, int CLUSTER, int STAGES>
__global__ void __launch_bounds__(THREADS) rms_norm_pipelined(
    const T* x, const T* weight, T* y, i64 x_stride, i64 m, i64 n, float eps, float offset) {
    constexpr int VEC = 16 / sizeof(T);
    float squares = 0.0f, rstd;
    pipeline_rows<VECS_PER_THREAD, THREADS, CLUSTER, STAGES, 1>(
        {x}, {x_stride}, m, n,
        [&](i64, int, const Vec<T, VEC> (&vecs)[1]) { squares += vecs[0].sum_of_squares(); },
        [&](int iteration) { rstd = row_rstd<THREADS, CLUSTER>(squares, n, eps, iteration), squares = 0.0f; },
        [&](int col) { return Vec<T, VEC>::load(weight + col); },
        [&](i64 row, int col, const Vec<T, VEC>& vec, const Vec<T, VEC>& weights) {
            store_normalised(y + row * n + col, vec, weights, rstd, offset);
        });
}
