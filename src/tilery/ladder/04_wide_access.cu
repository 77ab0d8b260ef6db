// 4. Wide accesses: 16 bytes a thread from global to shared memory, 8 bytes from there, an eighth and a quarter as many.
//
// 16 bytes must lie at multiples of 16, so lines cannot be padded by a bank. Instead the chunks of a line are permuted by
// an xor with its number: 8 neighbouring lines have the same chunk in 8 different places of the 128 bytes of all banks.
#include "tilery.cuh"

using T = __nv_bfloat16;
constexpr int BM = 128, BN = 128, BK = 32, THREADS = 256, EACH = 8, STEP = 16;
constexpr int VEC = 8, CHUNKS = BK / VEC, LINES = THREADS / CHUNKS, COPIES = BM / LINES;  // LINES at once

// Where a line has its i-th value: two lines fill all banks.
__device__ int swizzled(int line, int i) { return line * BK + (i / VEC ^ line / 2 % CHUNKS) * VEC + i % VEC; }

__global__ void __launch_bounds__(THREADS, 2) wide_access(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ __align__(128) T rows[BM * BK], columns[BN * BK];
    const int across = n / BN, top = blockIdx.x / across * BM, left = blockIdx.x % across * BN;
    // A warp has 4 × 8 threads: 16 of them, which read 8 bytes at once, find 8 different lines at most.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, x = warp % 2 * 8 + lane % 8, y = warp / 2 * 4 + lane / 8;
    // What this thread copies: a chunk of every LINES-th line.
    const int line = threadIdx.x / CHUNKS, at = threadIdx.x % CHUNKS * VEC, place = swizzled(line, at);
    const T *const from_a = a + i64{top + line} * k + at, *const from_b = b + i64{left + line} * k + at;
    float sums[EACH][EACH] = {};
    for (int k0 = 0; k0 < k; k0 += BK) {
        Pack<T, VEC> chunks[COPIES][2];
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            chunks[i][0] = Pack<T, VEC>::from(from_a + i64{i * LINES} * k + k0);
            chunks[i][1] = Pack<T, VEC>::from(from_b + i64{i * LINES} * k + k0);
        }
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            chunks[i][0].to_shared(rows + place + i * LINES * BK);
            chunks[i][1].to_shared(columns + place + i * LINES * BK);
        }
        __syncthreads();
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
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < EACH; ++r)
#pragma unroll
        for (int s = 0; s < EACH; ++s)
            c[i64{top + y + STEP * r} * n + left + x + STEP * s] = static_cast<T>(sums[r][s]);
}
