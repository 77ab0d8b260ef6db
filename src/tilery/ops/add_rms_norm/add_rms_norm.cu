// One block per row, 16 bytes per access; the sum waits in registers for its mean, so x and the residual are read once.
#include "tilery.cuh"

// total = x + r rounded to T, as values that T can hold.
template <typename T, int VEC>
__device__ void add(float (&values)[VEC], const T* x, const T* r, T* total) {
    float other[VEC];
    load(values, x);
    load(other, r);
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] += other[i];
    const auto pack = Pack<T, VEC>::rounded(values);
    pack.to_global(total);
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = static_cast<float>(pack.at[i]);
}

template <typename T, int VEC, int STEPS, int THREADS>
__global__ void __launch_bounds__(THREADS) add_rms_norm(
    const T* x, const T* r, const T* w, T* y, T* total, i64 x_stride, i64 r_stride, i64 n, float eps, float offset) {
    x += blockIdx.x * x_stride;
    r += blockIdx.x * r_stride;
    y += blockIdx.x * n;
    total += blockIdx.x * n;
    float row[STEPS][VEC], squares = 0.0f;
    Pack<T, VEC> weight[STEPS];  // under way before the sum waits for the row
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int col = (s * THREADS + threadIdx.x) * VEC;
        if (col < n) {  // VEC divides n: a pack lies inside or outside
            add(row[s], x + col, r + col, total + col);
            weight[s] = Pack<T, VEC>::from(w + col);
#pragma unroll
            for (int i = 0; i < VEC; ++i) squares += row[s][i] * row[s][i];
        }
    }
    const float scale = rsqrtf(reduce_block<Sum, THREADS>(squares) / n + eps);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int col = (s * THREADS + threadIdx.x) * VEC;
        if (col < n) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) row[s][i] *= scale * (static_cast<float>(weight[s].at[i]) + offset);
            store(y + col, row[s]);
        }
    }
}

// For rows that no block's registers hold: a thread reads the sums that it wrote, from a cache where they fit.
template <typename T, int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS) add_rms_norm_long(
    const T* x, const T* r, const T* w, T* y, T* total, i64 x_stride, i64 r_stride, i64 n, float eps, float offset) {
    x += blockIdx.x * x_stride;
    r += blockIdx.x * r_stride;
    y += blockIdx.x * n;
    total += blockIdx.x * n;
    float squares = 0.0f;
    for (i64 col = threadIdx.x * VEC; col < n; col += THREADS * VEC) {
        float values[VEC];
        add(values, x + col, r + col, total + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) squares += values[i] * values[i];
    }
    const float scale = rsqrtf(reduce_block<Sum, THREADS>(squares) / n + eps);
    for (i64 col = threadIdx.x * VEC; col < n; col += THREADS * VEC) {
        float values[VEC], weight[VEC];
        load(values, total + col);
        load(weight, w + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) values[i] *= scale * (weight[i] + offset);
        store(y + col, values);
    }
}
