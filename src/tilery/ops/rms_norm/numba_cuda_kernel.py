"""One block per row: threads stride along it, halve their sums in shared memory, then scale what they read again."""

import functools
import math

from numba import cuda
from numba.cuda.types import float32, float64, int64, void

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_cuda_glue
from tilery.parts import block_rows
from tilery.parts.block_rows import Config
from tilery.parts.rows import heads_refusal, rows

archs = block_rows.archs


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return heads_refusal(x) or block_rows.refusal(config)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return block_rows.default(x.shape[-1])


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return block_rows.configs()


@functools.cache
def _kernel(dtype, threads: int) -> numba_cuda_glue.Kernel:
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

        scale = float32(1) / math.sqrt(sums[0] / float32(n) + float32(eps))
        for i in range(thread, n, threads):
            y[row * n + i] = narrow(widen(x[row * x_stride + i]) * scale * (widen(weight[i]) + float32(offset)))

    pointer = numba_cuda_glue.POINTERS[dtype]
    return numba_cuda_glue.Kernel(rms_norm, void(pointer, pointer, pointer, int64, int64, float64, float64), threads)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_cuda_glue.legacy_compile(_kernel(specs[0].dtype, config.threads), arch)


def run(outs, args, config: Config) -> None:
    x, weight, eps, offset = args
    m, n, stride = rows(x)
    arguments = (x.data_ptr(), weight.data_ptr(), outs[0].data_ptr(), stride, n, float(eps), float(offset))
    numba_cuda_glue.legacy_launch(_kernel(x.dtype, config.threads), m, arguments)
