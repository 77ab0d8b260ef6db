// 4. Vectorised accesses: 16 bytes a thread from global to shared memory, and 8 bytes from there: an eighth and a
// quarter as many instructions.
//
// Accesses of 16 bytes need addresses that are multiples of 16, so lines cannot be padded by one bank. Instead they are
// swizzled: the 16-byte vectors of a line are permuted by an xor with the line's number, so that the same column of 8
// neighbouring lines lies in different banks.
#include "common.cuh"

using T = __nv_bfloat16;
constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 32, THREADS = 256;
constexpr int THREAD_TILE = 8, STEP = 16;  // rows and columns of a thread, and the distance between them
constexpr int VEC = 8, VECS = BLOCK_K / VEC;  // elements of 16 bytes; vectors of a line
constexpr int LINES = THREADS / VECS, COPIES = BLOCK_M / LINES;  // lines that the block copies at once; copies of a thread

// Index of element i of a line. Two lines fill all banks.
__device__ int swizzled(int line, int i) { return line * BLOCK_K + (i / VEC ^ line / 2 % VECS) * VEC + i % VEC; }

__global__ void __launch_bounds__(THREADS, 2) wide_access(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ __align__(128) T a_tile[BLOCK_M * BLOCK_K], b_tile[BLOCK_N * BLOCK_K];
    const int tiles_n = n / BLOCK_N, row0 = blockIdx.x / tiles_n * BLOCK_M, col0 = blockIdx.x % tiles_n * BLOCK_N;
    // A warp has 4 × 8 threads: the 16 of them that read 8 bytes at once access at most 8 different lines.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, x = warp % 2 * 8 + lane % 8, y = warp / 2 * 4 + lane / 8;
    // This thread copies one vector of every LINES-th line.
    const int line = threadIdx.x / VECS, column = threadIdx.x % VECS * VEC, place = swizzled(line, column);
    const T *const from_a = a + i64{row0 + line} * k + column, *const from_b = b + i64{col0 + line} * k + column;
    float acc[THREAD_TILE][THREAD_TILE] = {};
    for (int k0 = 0; k0 < k; k0 += BLOCK_K) {
        Vec<T, VEC> vecs[COPIES][2];
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            vecs[i][0] = Vec<T, VEC>::load(from_a + i64{i * LINES} * k + k0);
            vecs[i][1] = Vec<T, VEC>::load(from_b + i64{i * LINES} * k + k0);
        }
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            vecs[i][0].store_shared(a_tile + place + i * LINES * BLOCK_K);
            vecs[i][1].store_shared(b_tile + place + i * LINES * BLOCK_K);
        }
        __syncthreads();
#pragma unroll 1  // unrolled by two it would spill
        for (int i = 0; i < BLOCK_K; i += 4) {
            float b_frag[THREAD_TILE][4];
#pragma unroll
            for (int s = 0; s < THREAD_TILE; ++s) load(b_frag[s], b_tile + swizzled(x + STEP * s, i));
#pragma unroll
            for (int r = 0; r < THREAD_TILE; ++r) {
                float a_frag[4];
                load(a_frag, a_tile + swizzled(y + STEP * r, i));
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int s = 0; s < THREAD_TILE; ++s) acc[r][s] += a_frag[j] * b_frag[s][j];
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < THREAD_TILE; ++r)
#pragma unroll
        for (int s = 0; s < THREAD_TILE; ++s)
            c[i64{row0 + y + STEP * r} * n + col0 + x + STEP * s] = static_cast<T>(acc[r][s]);
}
