"""Rows in parallel over the cores; each row is read twice, the second time from the L1 cache."""

import numpy as np
from numba import prange

from tilery.backends import numba_glue
from tilery.backends.numba_glue import at, f32, load, store
from tilery.ops import numba_rows
from tilery.ops.numba_rows import Config
from tilery.ops.rms_norm import outputs
from tilery.ops.rows import rows
from tilery.spec import Artifact, TensorSpec

archs = numba_rows.archs


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**17)


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(x, weight, y, n, eps, dtype):
    squares = f32(0)
    for j in range(n):
        value = load(x, j, dtype)
        squares += value * value
    scale = f32(1) / np.sqrt(squares / f32(n) + f32(eps))
    for j in range(n):
        store(y, j, load(x, j, dtype) * scale * load(weight, j, dtype), dtype)


@numba_glue.kernel
def _rms_norm(threads, x, weight, y, x_stride, m, n, eps, dtype):
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row(at(x, row * x_stride, dtype), weight, at(y, row * n, dtype), n, eps, dtype)
    else:
        for row in range(m):
            _row(at(x, row * x_stride, dtype), weight, at(y, row * n, dtype), n, eps, dtype)


def _arguments(outs, x, weight, eps):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, weight, outs[0]), stride, m, n, float(eps)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.compile(_rms_norm, *_arguments(outputs(*specs), *specs, 1e-6))


def run(outs, args, config: Config) -> None:
    numba_glue.launch(_rms_norm, config.parallel, *_arguments(outs, *args))
