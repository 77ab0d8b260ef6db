// c [m, n] = act(alpha · a [m, k] · b [n, k]ᵀ + bias) + beta · addend of a few rows of a, in fp16 and bf16, without tensor
// cores; or silu(a · gateᵀ) · (a · upᵀ), with gate and up stacked in b (HALVES = 2). A warp has COLUMNS columns of c, or
// with SPLIT_K a part of K of them: it reads their rows of b once, 16 bytes a thread, and those of a from the L1.
#include "epilogue.cuh"

template <typename T>
struct GemvParams {
    const T* a;
    const T* b;
    T* c;
    int m;
    int n;
    int k;  // a multiple of 8
    i64 a_stride;  // from row to row
    i64 b_stride;
    i64 a_batch;  // from product to product, 0 where all have the same
    i64 b_batch;
    const T* bias;
    const T* addend;
    i64 addend_row_stride;
    i64 addend_col_stride;
    float alpha;
    float beta;
};

constexpr int VALUES = 8;  // of 16 bits in a load

// Sums of COUNT values, each over all lanes of a warp. Half of the values go to each half of the lanes, and so on: lane i
// gets the sum of value i / (32 / COUNT).
template <int COUNT>
__device__ __forceinline__ float reduce_many(float (&values)[COUNT]) {
    static_assert(COUNT <= 32 && (COUNT & (COUNT - 1)) == 0, "a power of two");
    int mask = 16;
#pragma unroll
    for (int left = COUNT / 2; left > 0; left /= 2, mask /= 2) {
        const bool upper = threadIdx.x & mask;
#pragma unroll
        for (int i = 0; i < left; ++i) {
            const float sent = upper ? values[i] : values[i + left], kept = upper ? values[i + left] : values[i];
            values[i] = kept + __shfl_xor_sync(0xffffffff, sent, mask);
        }
    }
#pragma unroll
    for (; mask > 0; mask /= 2) values[0] += __shfl_xor_sync(0xffffffff, values[0], mask);
    return values[0];
}

template <typename T, int ROWS, int COLUMNS, int WARPS, int SPLIT_K, int IN_FLIGHT, int HALVES, Activation ACT, bool HAS_BIAS,
          bool HAS_ADDEND, bool HAS_ALPHA_BETA>
__global__ void __launch_bounds__(WARPS * 32) gemv(const GemvParams<T> p) {
    constexpr int SUMS = ROWS * COLUMNS, GROUPS = WARPS / SPLIT_K;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / SPLIT_K, part = warp % SPLIT_K;
    const int blocks = (p.n + GROUPS * COLUMNS - 1) / (GROUPS * COLUMNS), product = blockIdx.x / blocks;
    const int col0 = (blockIdx.x % blocks * GROUPS + group) * COLUMNS, vectors = p.k / VALUES;
    const T* const a = p.a + product * p.a_batch;
    const T* const b = p.b + product * p.b_batch;
    float acc[HALVES][SUMS] = {};  // of column i / ROWS and row i % ROWS
    pdl_wait();
    for (int first = part * 32 + lane; first < vectors; first += 32 * SPLIT_K * IN_FLIGHT) {
        Vec<T, VALUES> weights[IN_FLIGHT][HALVES][COLUMNS];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int v = min(first + i * 32 * SPLIT_K, vectors - 1);
#pragma unroll
            for (int h = 0; h < HALVES; ++h)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) {
                    const i64 row = h * p.n + min(col0 + j, p.n - 1);  // past the end the last one, which is not stored
                    weights[i][h][j] = Vec<T, VALUES>::load(b + row * p.b_stride + v * VALUES);
                }
        }
        asm volatile("" ::: "memory");  // else the compiler loads weights where they are used, one after another
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int v = first + i * 32 * SPLIT_K;
            if (v >= vectors) continue;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float x[VALUES];
                load(x, a + min(r, p.m - 1) * p.a_stride + v * VALUES);
#pragma unroll
                for (int h = 0; h < HALVES; ++h)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
                        for (int e = 0; e < VALUES; ++e)
                            acc[h][j * ROWS + r] += x[e] * static_cast<float>(weights[i][h][j].data[e]);
            }
        }
    }
    pdl_launch_dependents();
    float sums[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; ++h) sums[h] = reduce_many(acc[h]);
    if constexpr (SPLIT_K > 1) {
        __shared__ float partial[WARPS][HALVES][32];
#pragma unroll
        for (int h = 0; h < HALVES; ++h) partial[warp][h][lane] = sums[h];
        __syncthreads();
        if (part > 0) return;
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
#pragma unroll
            for (int other = 1; other < SPLIT_K; ++other) sums[h] += partial[warp + other][h][lane];
    }
    constexpr int LANES = 32 / SUMS;  // that have the same sum
    const int row = lane / LANES % ROWS, col = col0 + lane / LANES / ROWS;
    if (lane % LANES > 0 || row >= p.m || col >= p.n) return;
    const Epilogue<T, ACT, HAS_BIAS, HAS_ADDEND, HAS_ALPHA_BETA, false> epilogue{
        p.bias, p.addend, p.addend_row_stride, p.addend_col_stride, p.alpha, p.beta, p.m, p.n};
    const float value = HALVES == 2 ? activate<silu>(sums[0]) * sums[HALVES - 1] : epilogue.applied(sums[0], row, col);
    p.c[(i64{product} * p.m + row) * p.n + col] = static_cast<T>(value);
}
