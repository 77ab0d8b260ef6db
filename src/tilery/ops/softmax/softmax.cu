// Rows in registers, softmax; read again, softmax_long; or passing through shared memory, softmax_ring.
#include "tilery_ring.cuh"

// The row's maximum, and 1 / sum(exp(x - maximum)), from the block's maximum and every thread's sum below it.
template <int THREADS, int BLOCKS>
__device__ float2 row_sums(float own_top, float own_sum, int turn = 0) {
    float4 all[BLOCKS];
    Cluster<BLOCKS>::exchange(all, {own_top, reduce_block<Sum, THREADS>(own_sum)}, turn);
    float top = Max::start, sum = 0.0f;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) top = fmaxf(top, all[b].x);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) sum += all[b].y * expf(all[b].x - top);
    return {top, 1.0f / sum};
}

template <typename T, int VEC>
__device__ void write(T* y, const Pack<T, VEC>& x, float2 sums) {
    float values[VEC];
    x.widen(values);
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = exponential<T>(values[i] - sums.x) * sums.y;
    store(y, values);
}

template <typename T, int VEC, int STEPS, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS) softmax(const T* x, T* y, i64 x_stride, i64 m, i64 n) {
    using Row = Row<T, VEC, STEPS, THREADS, BLOCKS>;
    Row::cluster::begin();
    Row row;
    row.load(x + Row::index() * x_stride, n);
    y += Row::index() * n;
    float own_top = Max::start, own_sum = 0.0f, values[VEC];
    row.each(n, [&](int step, int) {
        row.packs[step].widen(values);
#pragma unroll
        for (int i = 0; i < VEC; ++i) own_top = fmaxf(own_top, values[i]);
    });
    own_top = reduce_block<Max, THREADS>(own_top);
    row.each(n, [&](int step, int) {
        row.packs[step].widen(values);
#pragma unroll
        for (int i = 0; i < VEC; ++i) own_sum += exponential<T>(values[i] - own_top);
    });
    const float2 sums = row_sums<THREADS, BLOCKS>(own_top, own_sum);
    row.each(n, [&](int step, int col) { write(y + col, row.packs[step], sums); });
}

// For rows that no registers hold: x is read twice, the second time from the cache where it fits.
template <typename T, int VEC, int THREADS, int BLOCKS>
__global__ void __launch_bounds__(THREADS) softmax_long(const T* x, T* y, i64 x_stride, i64 m, i64 n) {
    Cluster<BLOCKS>::begin();
    x += blockIdx.x / BLOCKS * x_stride;
    y += blockIdx.x / BLOCKS * n;
    Exponentials<T> own;
    stream<VEC, THREADS, BLOCKS>(x, n, [&](i64, const Pack<T, VEC>& pack) { own.add(pack); });
    const float own_top = reduce_block<Max, THREADS>(own.top);
    const float2 sums = row_sums<THREADS, BLOCKS>(own_top, own.below(own_top));
    stream<VEC, THREADS, BLOCKS>(x, n, [&](i64 col, const Pack<T, VEC>& pack) { write(y + col, pack, sums); });
}

template <typename T, int STEPS, int THREADS, int BLOCKS, int SLOTS>
__global__ void __launch_bounds__(THREADS) softmax_ring(const T* x, T* y, i64 x_stride, i64 m, i64 n) {
    constexpr int VEC = 16 / sizeof(T);
    Exponentials<T> own;
    float2 sums;
    pass_rows<STEPS, THREADS, BLOCKS, SLOTS, 1>(
        {x}, {x_stride}, m, n,
        [&](i64, int, const Pack<T, VEC> (&packs)[1]) { own.add(packs[0]); },
        [&](int turn) {
            const float own_top = reduce_block<Max, THREADS>(own.top);
            sums = row_sums<THREADS, BLOCKS>(own_top, own.below(own_top), turn);
            own = {};
        },
        [](int) { return 0; },
        [&](i64 row, int col, const Pack<T, VEC>& pack, int) { write(y + row * n + col, pack, sums); });
}
