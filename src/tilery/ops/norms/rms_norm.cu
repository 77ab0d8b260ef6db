// Rows in registers, rms_norm; read again, rms_norm_long; or passing through shared memory, rms_norm_ring.
#include "tilery_ring.cuh"

template <typename T, int VEC, int STEPS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS) rms_norm(
    const T* x, const T* w, T* y, i64 x_stride, i64 m, i64 n, float eps, float offset) {
    using Row = Row<T, VEC, STEPS, THREADS, BLOCKS>;
    Row::cluster::begin();
    Row row, weights;
    row.load(x + Row::index() * x_stride, n);
    weights.load(w, n);  // under way before the sum waits for the row
    write_normalised(y + Row::index() * n, row, weights, n, eps, offset);
}

// For rows that no registers hold: x is read twice, the second time from the cache where it fits.
template <typename T, int VEC, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS) rms_norm_long(
    const T* x, const T* w, T* y, i64 x_stride, i64 m, i64 n, float eps, float offset) {
    Cluster<BLOCKS>::begin();
    x += blockIdx.x / BLOCKS * x_stride;
    y += blockIdx.x / BLOCKS * n;
    float squares = 0.0f;
    stream<VEC, THREADS, BLOCKS>(x, n, [&](i64, const Pack<T, VEC>& pack) { squares += pack.squares(); });
    write_normalised_long<VEC, THREADS, BLOCKS>(y, x, w, squares, n, eps, offset);
}

template <typename T, int STEPS, int THREADS, int BLOCKS, int SLOTS>
__global__ void __launch_bounds__(THREADS) rms_norm_ring(
    const T* x, const T* w, T* y, i64 x_stride, i64 m, i64 n, float eps, float offset) {
    constexpr int VEC = 16 / sizeof(T);
    float squares = 0.0f, scale;
    pass_rows<STEPS, THREADS, BLOCKS, SLOTS, 1>(
        {x}, {x_stride}, m, n,
        [&](i64, int, const Pack<T, VEC> (&packs)[1]) { squares += packs[0].squares(); },
        [&](int turn) { scale = row_scale<THREADS, BLOCKS>(squares, n, eps, turn), squares = 0.0f; },
        [&](int col) { return Pack<T, VEC>::from(w + col); },
        [&](i64 row, int col, const Pack<T, VEC>& pack, const Pack<T, VEC>& weights) {
            write_scaled(y + row * n + col, pack, weights, scale, offset);
        });
}
