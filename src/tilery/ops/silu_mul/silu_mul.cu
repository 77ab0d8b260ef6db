// Every block takes a piece of one row: STEPS accesses of 16 bytes a thread, all of them under way before the first is used.
#include "tilery.cuh"

template <typename T, int VEC, int STEPS, int THREADS>
__global__ void __launch_bounds__(THREADS)
silu_mul(const T* gate, const T* up, T* y, i64 gate_stride, i64 up_stride, i64 n, int pieces) {
    const i64 row = blockIdx.x / pieces;
    const i64 first = (static_cast<i64>(blockIdx.x % pieces) * STEPS * THREADS + threadIdx.x) * VEC;
    gate += row * gate_stride;
    up += row * up_stride;
    y += row * n;
    float g[STEPS][VEC], u[STEPS][VEC];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const i64 col = first + s * THREADS * VEC;
        if (col < n) {  // VEC divides n: a pack lies inside or outside
            load(g[s], gate + col);
            load(u[s], up + col);
        }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const i64 col = first + s * THREADS * VEC;
        if (col < n) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[s][i] = g[s][i] / (1.0f + expf(-g[s][i])) * u[s][i];
            store(y + col, g[s]);
        }
    }
}
