// One block per row, 16 bytes per access; the row waits in registers for its maximum and its sum, so x is read once.
#include "tilery.cuh"

template <typename T, int VEC, int STEPS, int THREADS>
__global__ void __launch_bounds__(THREADS) softmax(const T* x, T* y, i64 x_stride, i64 n) {
    x += blockIdx.x * x_stride;
    y += blockIdx.x * n;
    float row[STEPS][VEC], top = Max::start, sum = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int col = (s * THREADS + threadIdx.x) * VEC;
        if (col < n) {  // VEC divides n: a pack lies inside or outside
            load(row[s], x + col);
#pragma unroll
            for (int i = 0; i < VEC; ++i) top = fmaxf(top, row[s][i]);
        }
    }
    top = reduce_block<Max, THREADS>(top);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        if ((s * THREADS + threadIdx.x) * VEC < n) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) sum += row[s][i] = expf(row[s][i] - top);
        }
    }
    const float scale = 1.0f / reduce_block<Sum, THREADS>(sum);
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int col = (s * THREADS + threadIdx.x) * VEC;
        if (col < n) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) row[s][i] *= scale;
            store(y + col, row[s]);
        }
    }
}

// For rows that no block's registers hold: the first reading keeps a running maximum and rescales the sum as it grows.
template <typename T, int VEC, int THREADS>
__global__ void __launch_bounds__(THREADS) softmax_long(const T* x, T* y, i64 x_stride, i64 n) {
    x += blockIdx.x * x_stride;
    y += blockIdx.x * n;
    float own_top = Max::start, sum = 0.0f;
    for (i64 col = threadIdx.x * VEC; col < n; col += THREADS * VEC) {
        float values[VEC], before = own_top, added = 0.0f;
        load(values, x + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) own_top = fmaxf(own_top, values[i]);
#pragma unroll
        for (int i = 0; i < VEC; ++i) added += expf(values[i] - own_top);
        sum = sum * expf(before - own_top) + added;
    }
    const float top = reduce_block<Max, THREADS>(own_top);
    const float scale = 1.0f / reduce_block<Sum, THREADS>(sum * expf(own_top - top));
    for (i64 col = threadIdx.x * VEC; col < n; col += THREADS * VEC) {
        float values[VEC];
        load(values, x + col);
#pragma unroll
        for (int i = 0; i < VEC; ++i) values[i] = expf(values[i] - top) * scale;
        store(y + col, values);
    }
}
