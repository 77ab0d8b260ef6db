// Sums in registers, add_rms_norm; read again, add_rms_norm_long; or in shared memory, add_rms_norm_ring.
#include "tilery_ring.cuh"

template <typename T, int VEC, int STEPS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS) add_rms_norm(
    const T* x, const T* r, const T* w, T* y, T* total, i64 x_stride, i64 r_stride, i64 m, i64 n, float eps,
    float offset) {
    using Row = Row<T, VEC, STEPS, THREADS, BLOCKS>;
    Row::cluster::begin();
    total += Row::index() * n;
    Row row, other;
    row.load(x + Row::index() * x_stride, n);
    other.load(r + Row::index() * r_stride, n);
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
        if (Row::column(s) < n) row.packs[s] = add(row.packs[s], other.packs[s], total + Row::column(s));
    other.load(w, n);  // under way before the sum waits for the row
    write_normalised(y + Row::index() * n, row, other, n, eps, offset);
}

// For rows that no registers hold: a thread reads the sums that it wrote, from the cache where they fit.
template <typename T, int VEC, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS) add_rms_norm_long(
    const T* x, const T* r, const T* w, T* y, T* total, i64 x_stride, i64 r_stride, i64 m, i64 n, float eps,
    float offset) {
    Cluster<BLOCKS>::begin();
    const i64 row = blockIdx.x / BLOCKS;
    r += row * r_stride;
    total += row * n;
    float squares = 0.0f;
    stream<VEC, THREADS, BLOCKS>(x + row * x_stride, n, [&](i64 col, const Pack<T, VEC>& pack) {
        squares += add(pack, Pack<T, VEC>::from(r + col), total + col).squares();
    });
    write_normalised_long<VEC, THREADS, BLOCKS>(y + row * n, total, w, squares, n, eps, offset);
}

template <typename T, int STEPS, int THREADS, int BLOCKS, int SLOTS>
__global__ void __launch_bounds__(THREADS) add_rms_norm_ring(
    const T* x, const T* r, const T* w, T* y, T* total, i64 x_stride, i64 r_stride, i64 m, i64 n, float eps,
    float offset) {
    constexpr int VEC = 16 / sizeof(T);
    float squares = 0.0f, scale;
    pass_rows<STEPS, THREADS, BLOCKS, SLOTS, 2>(
        {x, r}, {x_stride, r_stride}, m, n,
        [&](i64 row, int col, Pack<T, VEC> (&packs)[2]) {
            packs[0] = add(packs[0], packs[1], total + row * n + col);
            squares += packs[0].squares();
        },
        [&](int turn) { scale = row_scale<THREADS, BLOCKS>(squares, n, eps, turn), squares = 0.0f; },
        [&](int col) { return Pack<T, VEC>::from(w + col); },
        [&](i64 row, int col, const Pack<T, VEC>& pack, const Pack<T, VEC>& weights) {
            write_scaled(y + row * n + col, pack, weights, scale, offset);
        });
}
