// Rows that a block or a cluster of blocks works on: in registers, or read again, or sums alone.
#pragma once
#include "tilery.cuh"

// Blocks of a cluster share a row through each other's shared memory; sm_90 is the first that has them.
template <int BLOCKS>
struct Cluster {
    // Of every block, first of all: waits for the kernel before, and says that this block runs, which exchange waits for. Many
    // blocks let the next kernel start when they have ended: its own would be spread unevenly, where these leave room.
    static __device__ void begin(bool few = gridDim.x <= 264) {
        if constexpr (BLOCKS > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
        take_over(few);
    }
    static __device__ int rank() {
        int rank = 0;
        if constexpr (BLOCKS > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        return rank;
    }
    // Writes to `place` of another block's shared memory, which is this block's with that rank.
    static __device__ void give(float4* place, int rank, float4 own) {
        asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
                     "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }"
                     ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(place))), "r"(rank),
                       "f"(own.x), "f"(own.y), "f"(own.z), "f"(own.w) : "memory");
    }
    static __device__ void wait_for_start() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
    static __device__ void meet() {
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
    // Fills all[b] with what block b gives, in every block. Calls are counted by `turn`, from 0.
    static __device__ void exchange(float4 (&all)[BLOCKS], float4 own, int turn) {
        if constexpr (BLOCKS == 1) {
            all[0] = own;
        } else {
            __shared__ float4 parts[2][BLOCKS];  // a fast block gives again while a slow one still reads
            if (turn == 0) wait_for_start();
            if (threadIdx.x < BLOCKS) give(parts[turn % 2] + rank(), threadIdx.x, own);
            meet();
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) all[b] = parts[turn % 2][b];
        }
    }
    // Threads that are `giving` write to `place` in the first block; all of its threads may read it then.
    static __device__ void give_first(float4* place, float4 own, bool giving) {
        if constexpr (BLOCKS == 1) {
            if (giving) *place = own;
            __syncthreads();
        } else {
            wait_for_start();
            if (giving) give(place, 0, own);
            meet();
        }
    }
};

// A row of n in registers as it came, STEPS packs a thread: two values of 16 bits take one register.
template <typename T, int VEC, int STEPS, int THREADS, int BLOCKS>
struct Row {
    using cluster = Cluster<BLOCKS>;
    Pack<T, VEC> packs[STEPS];

    static __device__ i64 index() { return blockIdx.x / BLOCKS; }
    // VEC divides n: a pack lies inside or outside.
    static __device__ int column(int step) { return ((step * BLOCKS + cluster::rank()) * THREADS + threadIdx.x) * VEC; }

    __device__ void load(const T* from, i64 n) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            if (column(s) < n) packs[s] = Pack<T, VEC>::from(from + column(s));
    }
    // visit(step, column) of all that is inside.
    template <typename Visit>
    static __device__ void each(i64 n, Visit visit) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            if (column(s) < n) visit(s, column(s));
    }
};

// visit(column, pack) of this thread's share of a row of n, with 64 bytes of loads under way at once.
template <int VEC, int THREADS, int BLOCKS, typename T, typename Visit>
__device__ void stream(const T* x, i64 n, Visit visit, int thread = threadIdx.x) {
    constexpr int AHEAD = 64 / (VEC * sizeof(T));
    const i64 step = i64{THREADS} * BLOCKS * VEC;
    for (i64 col = (Cluster<BLOCKS>::rank() * THREADS + thread) * VEC; col < n; col += AHEAD * step) {
        Pack<T, VEC> packs[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (col + a * step < n) packs[a] = Pack<T, VEC>::from(x + col + a * step);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (col + a * step < n) visit(col + a * step, packs[a]);
    }
}

// A maximum, and the sum of exponentials below it, which is rescaled as the maximum grows.
template <typename T>
struct Exponentials {
    float top = Max::start, sum = 0.0f;

    template <int N>
    __device__ void add(const Pack<T, N>& pack) {
        float values[N];
        pack.widen(values);
        const float before = top;
#pragma unroll
        for (int i = 0; i < N; ++i) top = fmaxf(top, values[i]);
        float added = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) added += exponential<T>(values[i] - top);
        sum = sum * exponential<T>(before - top) + added;
    }
    // The sum below another maximum.
    __device__ float below(float other) const { return sum * expf(top - other); }
};

// x + r, rounded and written.
template <typename T, int VEC>
__device__ Pack<T, VEC> add(const Pack<T, VEC>& x, const Pack<T, VEC>& r, T* total) {
    float values[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = static_cast<float>(x.at[i]) + static_cast<float>(r.at[i]);
    const auto sum = Pack<T, VEC>::rounded(values);
    sum.to_global(total);
    return sum;
}

// RMS norms: 1 / sqrt(mean + eps) over the row, from every thread's share of its squares.
template <int THREADS, int BLOCKS>
__device__ float row_scale(float squares, i64 n, float eps, int turn = 0) {
    float4 all[BLOCKS];
    Cluster<BLOCKS>::exchange(all, {reduce_block<Sum, THREADS>(squares)}, turn);
    float sum = 0.0f;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) sum += all[b].x;
    return rsqrtf(sum / n + eps);
}

template <typename T, int VEC>
__device__ void write_scaled(T* y, const Pack<T, VEC>& row, const Pack<T, VEC>& weights, float scale, float offset) {
    float values[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i)
        values[i] = static_cast<float>(row.at[i]) * (scale * (static_cast<float>(weights.at[i]) + offset));
    store(y, values);
}

// y = row / sqrt(mean(row²) + eps) · (weights + offset), of a row in registers.
template <typename T, int VEC, int STEPS, int THREADS, int BLOCKS>
__device__ void write_normalised(T* y, const Row<T, VEC, STEPS, THREADS, BLOCKS>& row,
                                 const Row<T, VEC, STEPS, THREADS, BLOCKS>& weights, i64 n, float eps, float offset) {
    float squares = 0.0f;
    row.each(n, [&](int step, int) { squares += row.packs[step].squares(); });
    const float scale = row_scale<THREADS, BLOCKS>(squares, n, eps);
    row.each(n, [&](int step, int col) { write_scaled(y + col, row.packs[step], weights.packs[step], scale, offset); });
}

// The same of a row that is read again; `squares` is this thread's share of their sum.
template <int VEC, int THREADS, int BLOCKS, typename T>
__device__ void write_normalised_long(T* y, const T* x, const T* w, float squares, i64 n, float eps, float offset) {
    const float scale = row_scale<THREADS, BLOCKS>(squares, n, eps);
    stream<VEC, THREADS, BLOCKS>(x, n, [&](i64 col, const Pack<T, VEC>& pack) {
        write_scaled(y + col, pack, Pack<T, VEC>::from(w + col), scale, offset);
    });
}
