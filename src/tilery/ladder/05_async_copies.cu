// 5. cp.async (sm_80): asynchronous copies to shared memory, two k-blocks ahead, while the oldest stage is multiplied.
//
// The copies need no registers, and no thread waits for them before it needs the data. The tiles are a pipeline of
// three stages. One barrier for each k-block says two things: its stage has been loaded, and the stage before, which is
// loaded next, has been read.
#include "common.cuh"

using T = __nv_bfloat16;
constexpr int BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 32, STAGES = 3, THREADS = 256;
constexpr int THREAD_TILE = 8, STEP = 16;  // rows and columns of a thread, and the distance between them
constexpr int VEC = 8, VECS = BLOCK_K / VEC;  // elements of 16 bytes; vectors of a line
constexpr int LINES = THREADS / VECS, COPIES = BLOCK_M / LINES;  // lines that the block copies at once; copies of a thread

__device__ int swizzled(int line, int i) { return line * BLOCK_K + (i / VEC ^ line / 2 % VECS) * VEC + i % VEC; }

__device__ void cp_async(T* to, const T* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(smem_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING groups of this thread's copies have not landed.
template <int PENDING>
__device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__global__ void __launch_bounds__(THREADS, 2) async_copies(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ __align__(128) T stages[STAGES][2][BLOCK_M * BLOCK_K];
    const int tiles_n = n / BLOCK_N, row0 = blockIdx.x / tiles_n * BLOCK_M, col0 = blockIdx.x % tiles_n * BLOCK_N;
    const int k_blocks = k / BLOCK_K;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, x = warp % 2 * 8 + lane % 8, y = warp / 2 * 4 + lane / 8;
    // This thread copies one vector of every LINES-th line.
    const int line = threadIdx.x / VECS, column = threadIdx.x % VECS * VEC, place = swizzled(line, column);
    const T *const from_a = a + i64{row0 + line} * k + column, *const from_b = b + i64{col0 + line} * k + column;
    const auto load_stage = [&](int kb) {
        if (kb < k_blocks) {
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                cp_async(stages[kb % STAGES][0] + place + i * LINES * BLOCK_K, from_a + i64{i * LINES} * k + kb * BLOCK_K);
                cp_async(stages[kb % STAGES][1] + place + i * LINES * BLOCK_K, from_b + i64{i * LINES} * k + kb * BLOCK_K);
            }
        }
        cp_async_commit();  // an empty group too: the number of groups tells which stage has been loaded
    };
    float acc[THREAD_TILE][THREAD_TILE] = {};
    for (int kb = 0; kb < STAGES - 1; ++kb) load_stage(kb);
    for (int kb = 0; kb < k_blocks; ++kb) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load_stage(kb + STAGES - 1);
        const T *const a_tile = stages[kb % STAGES][0], *const b_tile = stages[kb % STAGES][1];
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
    }
#pragma unroll
    for (int r = 0; r < THREAD_TILE; ++r)
#pragma unroll
        for (int s = 0; s < THREAD_TILE; ++s)
            c[i64{row0 + y + STEP * r} * n + col0 + x + STEP * s] = static_cast<T>(acc[r][s]);
}
