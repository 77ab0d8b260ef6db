"""matmul in Numba-CUDA: tiles of a and b pass through shared memory, a thread sums a small square in registers."""

import functools

from numba import cuda
from numba.cuda.types import float32, int64, void

from tilery.base.launch import Launch
from tilery.languages import numba_cuda_glue
from tilery.ops.matmul.call import MatmulCall
from tilery.ops.matmul.thread_tiles import Config, ThreadTiles


@functools.cache
def _kernel(dtype, config: Config) -> numba_cuda_glue.Kernel:
    """What a kernel takes from around it is a constant to Numba."""
    BM, BN, BK, R = config.block_m, config.block_n, config.block_k, config.thread_tile
    THREADS = config.threads
    # Both [k][m or n], so that a thread's R values lie together; 4 more spread the columns over the banks.
    A_TILE, B_TILE, SUMS = (BK, BM + 4), (BK, BN + 4), (R, R)
    widen, narrow = numba_cuda_glue.WIDEN[dtype], numba_cuda_glue.NARROW[dtype]

    @cuda.jit(device=True, inline="always")
    def load(tile, width, p, start, k_stride, w_stride, k_left, w_left):
        """tile[k, w] = p[start + k * k_stride + w * w_stride], 0 outside; neighbouring threads read neighbours."""
        for i in range(cuda.threadIdx.x, BK * width, THREADS):
            if k_stride == 1:
                k, w = i % BK, i // BK
            else:
                k, w = i // width, i % width
            if k < k_left and w < w_left:
                tile[k, w] = widen(p[start + k * k_stride + w * w_stride])
            else:
                tile[k, w] = float32(0)

    @cuda.jit
    def matmul(a, b, c, m, n, k, a_m, a_k, b_k, b_n):
        a_tile = cuda.shared.array(A_TILE, float32, alignment=16)
        b_tile = cuda.shared.array(B_TILE, float32, alignment=16)
        sums = cuda.local.array(SUMS, float32)  # in registers: NVVM unrolls the loops over it
        block = int64(cuda.blockIdx.x)  # 64 bits: rows may lie more than 2**31 elements apart
        blocks_n = (n + BN - 1) // BN
        m0, n0 = block // blocks_n * BM, block % blocks_n * BN
        row, column = cuda.threadIdx.x // (BN // R) * R, cuda.threadIdx.x % (BN // R) * R

        for i in range(R):
            for j in range(R):
                sums[i, j] = float32(0)
        for k0 in range(0, k, BK):
            load(a_tile, BM, a, m0 * a_m + k0 * a_k, a_k, a_m, k - k0, m - m0)
            load(b_tile, BN, b, n0 * b_n + k0 * b_k, b_k, b_n, k - k0, n - n0)
            cuda.syncthreads()
            for kk in range(BK):
                for i in range(R):
                    for j in range(R):
                        sums[i, j] += a_tile[kk, row + i] * b_tile[kk, column + j]
            cuda.syncthreads()
        for i in range(R):
            for j in range(R):
                if m0 + row + i < m and n0 + column + j < n:
                    c[(m0 + row + i) * n + n0 + column + j] = narrow(sums[i, j])

    pointer = numba_cuda_glue.POINTERS[dtype]
    return numba_cuda_glue.Kernel(matmul, void(pointer, pointer, pointer, *[int64] * 7), THREADS)


class Matmul(ThreadTiles):
    def launches(self, call: MatmulCall, config: Config) -> list[Launch]:
        return [Launch(_kernel(call.a.dtype, config), config.blocks(call.m, call.n), self.args(call))]


matmul = Matmul()
