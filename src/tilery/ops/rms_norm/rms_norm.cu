// One block per row, 16 bytes per access; the row waits in registers for its mean, so x is read once.
#include "tilery.cuh"

template <typename T, int VEC, int STEPS, int THREADS>
__global__ void __launch_bounds__(THREADS) rms_norm(
    const T* x, const T* w, T* y, i64 x_stride, i64 n, float eps, float offset) {
    x += blockIdx.x * x_stride;
    y += blockIdx.x * n;
    float row[STEPS][VEC], squares = 0.0f;
    Pack<T, VEC> weight[STEPS];  // under way before the sum waits for the row
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int col = (s * THREADS + threadIdx.x) * VEC;
        if (col < n) {  // VEC divides n: a pack lies inside or outside
            load(row[s], x + col);
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

// For rows that no block's registers hold: x is read twice, the second time from a cache where it fits.
template <typename T, int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS) rms_norm_long(
    const T* x, const T* w, T* y, i64 x_stride, i64 n, float eps, float offset) {
    x += blockIdx.x * x_stride;
    y += blockIdx.x * n;
    float squares = 0.0f;
    for (i64 col = threadIdx.x * VEC; col < n; col += THREADS * VEC) {
        float values[VEC];
        load(values, x + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) squares += values[i] * values[i];
    }
    const float scale = rsqrtf(reduce_block<Sum, THREADS>(squares) / n + eps);
    for (i64 col = threadIdx.x * VEC; col < n; col += THREADS * VEC) {
        float values[VEC], weight[VEC];
        load(values, x + col);
        load(weight, w + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) values[i] *= scale * (weight[i] + offset);
        store(y + col, values);
    }
}
