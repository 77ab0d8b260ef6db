"""One block per row, kept in registers: TileLang spreads the fragment over the threads and finds the vector width."""

import math
from dataclasses import dataclass

import tilelang.language as T

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import tilelang_glue
from tilery.parts.rows import heads_refusal, rows

archs = ARCHS

_THREADS = (32, 64, 128, 256, 512)
_BYTES_PER_THREAD = 256  # of the row: 64 of the 128 registers that a thread of 512 has


@dataclass(frozen=True)
class Config:
    threads: int


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    if config and config.threads not in _THREADS:
        return f"threads must be one of {', '.join(map(str, _THREADS))}, got {config.threads}"
    n = x.shape[-1]
    most = (config.threads if config else _THREADS[-1]) * _BYTES_PER_THREAD // x.dtype.itemsize
    if n > most:
        return f"row of {n} does not fit the registers of one block ({most} values)"
    return heads_refusal(x)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    pieces = x.shape[-1] * x.dtype.itemsize // 32  # two 16-byte loads a thread
    return Config(next((t for t in _THREADS if t >= pieces), _THREADS[-1]))


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    pieces = x.shape[-1] * x.dtype.itemsize // 16
    found = [Config(t) for t in _THREADS if t <= max(pieces, _THREADS[0])]
    return [c for c in found if refusal(x, weight, c) is None]


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
            scale = T.alloc_fragment((1,), "float32")
            T.copy(x[row, 0:block], x_row)  # zeros past n
            for i in T.Parallel(block):
                square[i] = T.cast(x_row[i], "float32") * T.cast(x_row[i], "float32")
            T.reduce_sum(square, scale, dim=0)
            scale[0] = T.rsqrt(scale[0] / n + eps)
            for i in T.Parallel(block):
                y[row, i] = x_row[i] * scale[0] * (T.cast(weight[i], "float32") + offset)

    return rms_norm


def _constants(x, aligned: bool, config: Config):
    _, n, stride = rows(x)
    vector = math.gcd(n, stride, 16 // x.dtype.itemsize) if aligned else 1
    return n, tilelang_glue.NAMES[x.dtype], vector, config.threads


def compile(specs, config: Config, arch: str) -> Artifact:
    x, weight = specs
    return tilelang_glue.legacy_compile(_rms_norm, _constants(x, x.aligned and weight.aligned, config), arch)


def run(outs, args, config: Config) -> None:
    (y,), (x, weight, eps, offset) = outs, args
    constants = _constants(x, (x.data_ptr() | weight.data_ptr()) % 16 == 0, config)
    if x.dim() != 2:
        m, n, stride = rows(x)
        x, y = x.as_strided((m, n), (stride, 1)), y.view(m, n)
    tilelang_glue.legacy_launch(_rms_norm, constants, (x, weight, y, float(eps), float(offset)))
