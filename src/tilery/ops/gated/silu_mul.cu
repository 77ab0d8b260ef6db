// Every block takes a piece of one row; a thread's STEPS loads of 16 bytes are all under way before one is used.
#include "tilery.cuh"

template <typename T, int VEC, int STEPS, int THREADS>
__global__ void __launch_bounds__(THREADS)
silu_mul(const T* gate, const T* up, T* y, i64 gate_stride, i64 up_stride, i64 n, int pieces) {
    take_over(gridDim.x <= 264);
    constexpr int PIECE = THREADS * STEPS * VEC;
    const i64 row = blockIdx.x / pieces, start = blockIdx.x % pieces * static_cast<i64>(PIECE);
    const int size = min(n - start, static_cast<i64>(PIECE));
    gate += row * gate_stride + start;
    up += row * up_stride + start;
    y += row * n + start;
    float g[STEPS][VEC], u[STEPS][VEC];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int col = (s * THREADS + threadIdx.x) * VEC;
        if (col < size) {  // VEC divides n: a pack lies inside or outside
            load(g[s], gate + col);
            load(u[s], up + col);
        }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const int col = (s * THREADS + threadIdx.x) * VEC;
        if (col < size) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[s][i] = __fdividef(g[s][i], 1.0f + expf(-g[s][i])) * u[s][i];
            store(y + col, g[s]);
        }
    }
}
