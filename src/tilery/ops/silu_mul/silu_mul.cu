// y = silu(gate) · up. A block has a piece of one row: THREADS · VECS_PER_THREAD vectors. All loads of a thread are in
// flight before the first value is used.
#include "common.cuh"

template <typename T, int VEC, int VECS_PER_THREAD, int THREADS>
__global__ void __launch_bounds__(THREADS)
silu_mul(const T* gate, const T* up, T* y, i64 gate_stride, i64 up_stride, i64 n, int blocks_per_row) {
    pdl_wait();
    if (gridDim.x <= 264) pdl_launch_dependents();  // few blocks only: see Cluster::begin
    constexpr int PIECE = THREADS * VECS_PER_THREAD * VEC;
    const i64 row = blockIdx.x / blocks_per_row, start = blockIdx.x % blocks_per_row * static_cast<i64>(PIECE);
    const int size = min(n - start, static_cast<i64>(PIECE));
    gate += row * gate_stride + start;
    up += row * up_stride + start;
    y += row * n + start;
    float g[VECS_PER_THREAD][VEC], u[VECS_PER_THREAD][VEC];
#pragma unroll
    for (int v = 0; v < VECS_PER_THREAD; ++v) {
        const int col = (v * THREADS + threadIdx.x) * VEC;
        if (col < size) {  // VEC divides n: a vector is wholly inside or outside
            load(g[v], gate + col);
            load(u[v], up + col);
        }
    }
#pragma unroll
    for (int v = 0; v < VECS_PER_THREAD; ++v) {
        const int col = (v * THREADS + threadIdx.x) * VEC;
        if (col < size) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) g[v][i] = __fdividef(g[v][i], 1.0f + expf(-g[v][i])) * u[v][i];
            store(y + col, g[v]);
        }
    }
}
