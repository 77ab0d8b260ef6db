"""rms_norm in Numba-CUDA: a block takes a row.

Its threads stride along the row, halve their sums in shared memory, and scale what they read again.
"""

import functools
import math

import torch
from numba import cuda
from numba.cuda.types import float32, float64, int64, void

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages import numba_cuda_glue
from tilery.ops.rows.thread_blocks import BlockRows, Blocks


@functools.cache
def _kernel(dtype: torch.dtype, threads: int) -> numba_cuda_glue.Kernel:
    """What a kernel takes from around it is a constant to Numba."""
    widen, narrow = numba_cuda_glue.WIDEN[dtype], numba_cuda_glue.NARROW[dtype]

    @cuda.jit
    def rms_norm(x, weight, y, x_stride, n, eps, offset):
        sums = cuda.shared.array(threads, float32)
        thread = cuda.threadIdx.x
        row = int64(cuda.blockIdx.x)  # 64 bits: row * x_stride may pass 2**31

        total = float32(0)
        for i in range(thread, n, threads):
            value = widen(x[row * x_stride + i])
            total += value * value
        sums[thread] = total
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if thread < half:
                sums[thread] += sums[thread + half]
            cuda.syncthreads()
            half //= 2

        rstd = float32(1) / math.sqrt(sums[0] / float32(n) + float32(eps))
        for i in range(thread, n, threads):
            y[row * n + i] = narrow(widen(x[row * x_stride + i]) * rstd * (widen(weight[i]) + float32(offset)))

    pointer = numba_cuda_glue.POINTERS[dtype]
    return numba_cuda_glue.Kernel(rms_norm, void(pointer, pointer, pointer, int64, int64, float64, float64), threads)


class RmsNorm(BlockRows):
    def launches(self, call: Call, config: Blocks) -> list[Launch]:
        m, n, stride = rows(call.x)
        args = {"x": call.x, "weight": call.weight, "y": call.y, "x_stride": stride, "n": n}
        args |= {"eps": call.eps, "offset": call.offset}
        return [Launch(_kernel(call.x.dtype, config.threads), m, args)]


rms_norm = RmsNorm()
