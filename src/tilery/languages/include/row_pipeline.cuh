// Row-wise kernels whose rows pass through a pipeline in shared memory: while a block works on one row, bulk copies
// load the next ones. From sm_90 on.
#pragma once
#include "mbarrier.cuh"
#include "rows.cuh"

// Persistent blocks go from row to row of INPUTS tensors [m, n]. A block, or a cluster that splits each row evenly, has
// one row at a time. A row is cut into chunks of VECS_PER_THREAD vectors of 16 bytes for each thread; a pipeline stage
// holds one chunk of every input. All chunks of a block's part of a row must fit the STAGES, because each row is
// visited twice:
//
// - first_pass(row, col, vecs) sees every vector, one of each input, and may replace vecs[0];
// - reduce(iteration) combines what the threads found in the first pass;
// - second_pass(row, col, vecs[0], prefetch(col)) sees them again. prefetch(col) loads what else it needs there, such as
//   the weight, one chunk ahead.
//
// Each stage has a full barrier, on which its bulk copies complete. There are no empty barriers: a __syncthreads after
// the second pass over a chunk frees its stage, and thread 0, the producer, loads the next chunk into it.
template <int VECS_PER_THREAD, int THREADS, int CLUSTER, int STAGES, int INPUTS, typename T, typename FirstPass,
          typename Reduce, typename Prefetch, typename SecondPass>
__device__ void pipeline_rows(const T* const (&inputs)[INPUTS], const i64 (&strides)[INPUTS], i64 m, i64 n,
                              FirstPass first_pass, Reduce reduce, Prefetch prefetch, SecondPass second_pass) {
    constexpr int VEC = 16 / sizeof(T), CHUNK = VECS_PER_THREAD * THREADS * VEC;
    extern __shared__ __align__(128) unsigned char smem[];
    const auto stages = reinterpret_cast<T(*)[INPUTS][CHUNK]>(smem);
    __shared__ Mbarrier full[STAGES];
    Cluster<CLUSTER>::begin();
    // This block's columns of every row are start ... start + length.
    const int columns = static_cast<int>((n / VEC + CLUSTER - 1) / CLUSTER) * VEC;
    const int start = Cluster<CLUSTER>::rank() * columns, length = min(static_cast<int>(n) - start, columns);
    const int chunks = max(length + CHUNK - 1, 0) / CHUNK, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const int rows = static_cast<int>((m - cluster + clusters - 1) / clusters);

    int next_row = 0, next_chunk = 0, next_stage = 0;  // what thread 0 loads next
    const auto load_next = [&] {
        if (next_row == rows || chunks == 0) return;
        const i64 row = cluster + i64{next_row} * clusters;
        const int col = next_chunk * CHUNK;
        const unsigned bytes = min(CHUNK, length - col) * sizeof(T);
        full[next_stage].arrive_expect_tx(bytes * INPUTS);
#pragma unroll
        for (int i = 0; i < INPUTS; ++i)
            full[next_stage].bulk_load(stages[next_stage][i], inputs[i] + row * strides[i] + start + col, bytes);
        if (++next_stage == STAGES) next_stage = 0;
        if (++next_chunk == chunks) next_chunk = 0, ++next_row;
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) full[s].init();
        fence_mbarrier_init();
        for (int s = 0; s < STAGES; ++s) load_next();
    }
    __syncthreads();

    int stage = 0, phase = 0;  // of the row's first chunk that the second pass has not finished
    for (int r = 0; r < rows; ++r) {
        const i64 row = cluster + i64{r} * clusters;
        int ahead = stage;
        for (int c = 0; c < chunks; ++c) {
            full[ahead].wait(phase + (ahead < stage));
#pragma unroll
            for (int v = 0; v < VECS_PER_THREAD; ++v) {
                const int place = (v * THREADS + threadIdx.x) * VEC, col = c * CHUNK + place;
                if (col < length) {
                    Vec<T, VEC> vecs[INPUTS];
#pragma unroll
                    for (int i = 0; i < INPUTS; ++i) vecs[i] = Vec<T, VEC>::load(stages[ahead][i] + place);
                    first_pass(row, start + col, vecs);
                    if constexpr (INPUTS > 1) vecs[0].store_shared(stages[ahead][0] + place);
                }
            }
            if (++ahead == STAGES) ahead = 0;
        }
        decltype(prefetch(0)) prefetched[VECS_PER_THREAD];
#pragma unroll
        for (int v = 0; v < VECS_PER_THREAD; ++v) {
            const int col = (v * THREADS + threadIdx.x) * VEC;
            if (col < length) prefetched[v] = prefetch(start + col);
        }
        reduce(r);
        for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int v = 0; v < VECS_PER_THREAD; ++v) {
                const int place = (v * THREADS + threadIdx.x) * VEC, col = c * CHUNK + place;
                const auto now = prefetched[v];
                if (col + CHUNK < length) prefetched[v] = prefetch(start + col + CHUNK);
                if (col < length) second_pass(row, start + col, Vec<T, VEC>::load(stages[stage][0] + place), now);
            }
            // The first pass wrote to the stage; a bulk copy (async proxy) overwrites it next.
            if constexpr (INPUTS > 1) fence_async_proxy();
            __syncthreads();  // all threads have read the stage
            if (threadIdx.x == 0) load_next();
            if (++stage == STAGES) stage = 0, ++phase;
        }
    }
}
