// 5. cp.async (sm_80): copies that go to shared memory by themselves, two tiles ahead, while the oldest is multiplied.
//
// They pass no registers and no thread waits for them, until it needs what they bring. The tiles are a ring: one barrier
// for a block of K says both that its tiles are here and that those before, whose place is filled next, have been read.
#include "tilery.cuh"

using T = __nv_bfloat16;
constexpr int BM = 128, BN = 128, BK = 32, STAGES = 3, THREADS = 256, EACH = 8, STEP = 16;
constexpr int VEC = 8, CHUNKS = BK / VEC, LINES = THREADS / CHUNKS, COPIES = BM / LINES;  // LINES at once

__device__ int swizzled(int line, int i) { return line * BK + (i / VEC ^ line / 2 % CHUNKS) * VEC + i % VEC; }

__device__ void copy_async(T* to, const T* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ void wait_for_copies() {  // this thread's, of all commits but the LEFT latest
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__global__ void __launch_bounds__(THREADS, 2) async_copies(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ __align__(128) T ring[STAGES][2][BM * BK];
    const int across = n / BN, top = blockIdx.x / across * BM, left = blockIdx.x % across * BN, blocks = k / BK;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, x = warp % 2 * 8 + lane % 8, y = warp / 2 * 4 + lane / 8;
    // What this thread copies: a chunk of every LINES-th line.
    const int line = threadIdx.x / CHUNKS, at = threadIdx.x % CHUNKS * VEC, place = swizzled(line, at);
    const T *const from_a = a + i64{top + line} * k + at, *const from_b = b + i64{left + line} * k + at;
    const auto fetch = [&](int t) {
        if (t < blocks) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                copy_async(ring[t % STAGES][0] + place + i * LINES * BK, from_a + i64{i * LINES} * k + t * BK);
                copy_async(ring[t % STAGES][1] + place + i * LINES * BK, from_b + i64{i * LINES} * k + t * BK);
            }
        }
        commit_copies();  // of nothing too: the count of commits tells which tiles are here
    };
    float sums[EACH][EACH] = {};
    for (int t = 0; t < STAGES - 1; ++t) fetch(t);
    for (int t = 0; t < blocks; ++t) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        fetch(t + STAGES - 1);
        const T *const rows = ring[t % STAGES][0], *const columns = ring[t % STAGES][1];
#pragma unroll 1  // two at once would spill
        for (int i = 0; i < BK; i += 4) {
            float v[EACH][4];
#pragma unroll
            for (int s = 0; s < EACH; ++s) load(v[s], columns + swizzled(x + STEP * s, i));
#pragma unroll
            for (int r = 0; r < EACH; ++r) {
                float u[4];
                load(u, rows + swizzled(y + STEP * r, i));
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int s = 0; s < EACH; ++s) sums[r][s] += u[j] * v[s][j];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < EACH; ++r)
#pragma unroll
        for (int s = 0; s < EACH; ++s)
            c[i64{top + y + STEP * r} * n + left + x + STEP * s] = static_cast<T>(sums[r][s]);
}
