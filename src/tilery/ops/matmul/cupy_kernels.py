"""matmul in CuPy: tiles of a and b pass through shared memory, a thread sums a small square in registers."""

from tilery.base.launch import Launch
from tilery.languages import cupy_glue
from tilery.languages.cupy_glue import Template
from tilery.ops.matmul.call import MatmulCall
from tilery.ops.matmul.thread_tiles import Config, ThreadTiles

_SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// tile[k][w] = p[k * k_stride + w * w_stride] in fp32, 0 outside. Neighbouring threads read neighbouring elements.
template <int BK, int WIDTH, int THREADS, typename T>
__device__ void load(
    float (&tile)[BK][WIDTH + 4], const T* p,
    long long k_stride, long long w_stride, long long k_left, long long w_left)
{
    const bool along_k = k_stride == 1;
    for (int i = threadIdx.x; i < BK * WIDTH; i += THREADS) {
        const int k = along_k ? i % BK : i / WIDTH;
        const int w = along_k ? i / BK : i % WIDTH;
        tile[k][w] = k < k_left && w < w_left ? float(p[k * k_stride + w * w_stride]) : 0.0f;
    }
}

template <typename T, int BM, int BN, int BK, int R>
__global__ void __launch_bounds__(BM / R * (BN / R)) matmul(
    const T* a, const T* b, T* c, long long m, long long n, long long k,
    long long a_m, long long a_k, long long b_k, long long b_n)
{
    constexpr int THREADS = BM / R * (BN / R);
    // Both [k][m or n], so that a thread's R values lie together; 4 more spread the columns over the banks.
    alignas(16) __shared__ float a_tile[BK][BM + 4], b_tile[BK][BN + 4];
    const long long blocks_n = (n + BN - 1) / BN;
    const long long m0 = blockIdx.x / blocks_n * BM, n0 = blockIdx.x % blocks_n * BN;
    const int row = threadIdx.x / (BN / R) * R, column = threadIdx.x % (BN / R) * R;

    float sum[R][R] = {};
    for (long long k0 = 0; k0 < k; k0 += BK) {
        load<BK, BM, THREADS>(a_tile, a + m0 * a_m + k0 * a_k, a_k, a_m, k - k0, m - m0);
        load<BK, BN, THREADS>(b_tile, b + n0 * b_n + k0 * b_k, b_k, b_n, k - k0, n - n0);
        __syncthreads();
        for (int kk = 0; kk < BK; ++kk)
            for (int i = 0; i < R; ++i)
                for (int j = 0; j < R; ++j) sum[i][j] += a_tile[kk][row + i] * b_tile[kk][column + j];
        __syncthreads();
    }
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < R; ++j)
            if (m0 + row + i < m && n0 + column + j < n) c[(m0 + row + i) * n + n0 + column + j] = T(sum[i][j]);
}
"""


class Matmul(ThreadTiles):
    def launches(self, call: MatmulCall, config: Config) -> list[Launch]:
        constants = {"T": cupy_glue.TYPES[call.a.dtype], "BM": config.block_m, "BN": config.block_n}
        constants |= {"BK": config.block_k, "R": config.thread_tile}
        grid, options = config.blocks(call.m, call.n), {"threads": config.threads}
        return [Launch(Template(_SOURCE, "matmul"), grid, self.args(call), constants, options)]


matmul = Matmul()
