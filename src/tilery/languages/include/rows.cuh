// Row-wise kernels (softmax, norms, cross entropy): a row belongs to a block or to a cluster of blocks. It is held in
// registers (RegisterRow), or streamed from global memory, once or twice (for_each_vec).
#pragma once
#include "cluster.cuh"

// A row of n elements in registers, in its own dtype: VECS_PER_THREAD vectors of VEC elements in each thread.
template <typename T, int VEC, int VECS_PER_THREAD, int THREADS, int CLUSTER>
struct RegisterRow {
    using cluster = Cluster<CLUSTER>;
    Vec<T, VEC> vecs[VECS_PER_THREAD];

    static __device__ i64 index() { return blockIdx.x / CLUSTER; }
    // First column of this thread's v-th vector. VEC divides n, so a vector is wholly inside or outside the row.
    static __device__ int column(int v) { return ((v * CLUSTER + cluster::rank()) * THREADS + threadIdx.x) * VEC; }

    __device__ void load(const T* from, i64 n) {
#pragma unroll
        for (int v = 0; v < VECS_PER_THREAD; ++v)
            if (column(v) < n) vecs[v] = Vec<T, VEC>::load(from + column(v));
    }
    // Calls visit(v, column) for every vector that is inside the row.
    template <typename Visit>
    static __device__ void for_each(i64 n, Visit visit) {
#pragma unroll
        for (int v = 0; v < VECS_PER_THREAD; ++v)
            if (column(v) < n) visit(v, column(v));
    }
};

// Streams a row of n elements from global memory: calls visit(column, vec) for this thread's vectors. Each thread has
// 64 bytes of loads in flight.
template <int VEC, int THREADS, int CLUSTER, typename T, typename Visit>
__device__ void for_each_vec(const T* x, i64 n, Visit visit, int thread = threadIdx.x) {
    constexpr int IN_FLIGHT = 64 / (VEC * sizeof(T));
    const i64 step = i64{THREADS} * CLUSTER * VEC;
    for (i64 col = (Cluster<CLUSTER>::rank() * THREADS + thread) * VEC; col < n; col += IN_FLIGHT * step) {
        Vec<T, VEC> vecs[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i)
            if (col + i * step < n) vecs[i] = Vec<T, VEC>::load(x + col + i * step);
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i)
            if (col + i * step < n) visit(col + i * step, vecs[i]);
    }
}

// Online log-sum-exp: the running maximum, and the sum of exp(x - max), which is rescaled when the maximum grows.
template <typename T>
struct OnlineLogSumExp {
    float max = Max::identity, sum = 0.0f;

    template <int N>
    __device__ void add(const Vec<T, N>& vec) {
        float values[N];
        vec.to_float(values);
        const float old_max = max;
#pragma unroll
        for (int i = 0; i < N; ++i) max = fmaxf(max, values[i]);
        float added = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) added += exp_for<T>(values[i] - max);
        sum = sum * exp_for<T>(old_max - max) + added;
    }
    // The sum of exp(x - other_max).
    __device__ float rescaled_sum(float other_max) const { return sum * expf(max - other_max); }
};

// Returns x + residual, rounded to T, and stores it.
template <typename T, int VEC>
__device__ Vec<T, VEC> add_and_store(const Vec<T, VEC>& x, const Vec<T, VEC>& residual, T* to) {
    float values[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = static_cast<float>(x.data[i]) + static_cast<float>(residual.data[i]);
    const auto sum = Vec<T, VEC>::from_float(values);
    sum.store_global(to);
    return sum;
}

// RMS norm: rstd = 1 / sqrt(mean(x²) + eps) of the row, from each thread's sum of squares.
template <int THREADS, int CLUSTER>
__device__ float row_rstd(float squares, i64 n, float eps, int iteration = 0) {
    float4 all[CLUSTER];
    Cluster<CLUSTER>::all_gather(all, {block_reduce<Sum, THREADS>(squares)}, iteration);
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < CLUSTER; ++b) sum += all[b].x;
    return rsqrtf(sum / n + eps);
}

// y = x · rstd · (weight + offset) of one vector.
template <typename T, int VEC>
__device__ void store_normalised(T* y, const Vec<T, VEC>& x, const Vec<T, VEC>& weight, float rstd, float offset) {
    float values[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i)
        values[i] = static_cast<float>(x.data[i]) * (rstd * (static_cast<float>(weight.data[i]) + offset));
    store(y, values);
}

// y = x / sqrt(mean(x²) + eps) · (weight + offset) of a row in registers.
template <typename T, int VEC, int VECS_PER_THREAD, int THREADS, int CLUSTER>
__device__ void normalise_row(T* y, const RegisterRow<T, VEC, VECS_PER_THREAD, THREADS, CLUSTER>& x,
                              const RegisterRow<T, VEC, VECS_PER_THREAD, THREADS, CLUSTER>& weight, i64 n, float eps,
                              float offset) {
    float squares = 0.0f;
    x.for_each(n, [&](int v, int) { squares += x.vecs[v].sum_of_squares(); });
    const float rstd = row_rstd<THREADS, CLUSTER>(squares, n, eps);
    x.for_each(n, [&](int v, int col) { store_normalised(y + col, x.vecs[v], weight.vecs[v], rstd, offset); });
}

// The same of a row that is read again from global memory; `squares` is this thread's sum of squares.
template <int VEC, int THREADS, int CLUSTER, typename T>
__device__ void normalise_row_reread(T* y, const T* x, const T* weight, float squares, i64 n, float eps, float offset) {
    const float rstd = row_rstd<THREADS, CLUSTER>(squares, n, eps);
    for_each_vec<VEC, THREADS, CLUSTER>(x, n, [&](i64 col, const Vec<T, VEC>& vec) {
        store_normalised(y + col, vec, Vec<T, VEC>::load(weight + col), rstd, offset);
    });
}
