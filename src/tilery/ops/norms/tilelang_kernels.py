"""rms_norm in TileLang: a block keeps a row in registers.

TileLang spreads the fragment over the threads and finds the vector width.
"""

import math
from dataclasses import dataclass

import tilelang.language as T

from tilery.base.launch import Launch
from tilery.base.rows import matrix, rows, two_level_refusal
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages import tilelang_glue

_THREADS = (32, 64, 128, 256, 512)
_BYTES_PER_THREAD = 256  # of the row: 64 of the 128 registers that a thread of 512 has


@dataclass(frozen=True)
class Config:
    threads: int


def _rms_norm(n: int, dtype: str, vector: int, threads: int):
    m, stride = T.dynamic("m"), T.dynamic("stride", "int64")  # int64: row * stride overflows int32 past 2**31 elements
    step = 1 if vector > 1 else T.dynamic("step", "int64")  # it is 1, but not knowing that keeps TileLang from vectors
    block = math.ceil(n / (threads * vector)) * threads * vector

    @T.prim_func
    def rms_norm(
        x: T.StridedTensor((m, n), (stride, 1), dtype),
        weight: T.StridedTensor((n,), (step,), dtype),
        y: T.Tensor((m, n), dtype),
        eps: T.float32,
        offset: T.float32,
    ):
        with T.Kernel(m, threads=threads) as row:
            T.assume(stride % vector == 0)
            x_row = T.alloc_fragment((block,), dtype)
            square = T.alloc_fragment((block,), "float32")
            rstd = T.alloc_fragment((1,), "float32")
            T.copy(x[row, 0:block], x_row)  # zeros past n
            for i in T.Parallel(block):
                square[i] = T.cast(x_row[i], "float32") * T.cast(x_row[i], "float32")
            T.reduce_sum(square, rstd, dim=0)
            rstd[0] = T.rsqrt(rstd[0] / n + eps)
            for i in T.Parallel(block):
                y[row, i] = x_row[i] * rstd[0] * (T.cast(weight[i], "float32") + offset)

    return rms_norm


class RmsNorm(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        if config and config.threads not in _THREADS:
            return f"threads must be one of {', '.join(map(str, _THREADS))}, got {config.threads}"
        n = call.x.shape[-1]
        most = (config.threads if config else _THREADS[-1]) * _BYTES_PER_THREAD // call.x.dtype.itemsize
        if n > most:
            return f"row of {n} does not fit the registers of one block ({most} values)"
        return two_level_refusal(call.x)

    def default(self, call: Call) -> Config:
        wanted = call.x.shape[-1] * call.x.dtype.itemsize // 32  # two 16-byte loads a thread
        return Config(next((t for t in _THREADS if t >= wanted), _THREADS[-1]))

    def configs(self, call: Call) -> list[Config]:
        most = call.x.shape[-1] * call.x.dtype.itemsize // 16  # one 16-byte load a thread
        found = [Config(t) for t in _THREADS if t <= max(most, _THREADS[0])]
        return [c for c in found if self.refusal(call, c) is None]

    def launches(self, call: Call, config: Config) -> list[Launch]:
        x, weight = call.x, call.weight
        m, n, stride = rows(x)
        vector = math.gcd(n, stride, 16 // x.dtype.itemsize) if x.aligned and weight.aligned else 1
        constants = {"n": n, "dtype": tilelang_glue.NAMES[x.dtype], "vector": vector, "threads": config.threads}
        args = {"x": matrix(x), "weight": weight, "y": matrix(call.y), "eps": call.eps, "offset": call.offset}
        return [Launch(_rms_norm, m, args, constants)]


rms_norm = RmsNorm()
