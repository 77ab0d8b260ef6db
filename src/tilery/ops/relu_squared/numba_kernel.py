"""Rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import at, f32, load, store
from tilery.ops.relu_squared import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_rows import Config, archs
from tilery.parts.rows import rows

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(row, x, y, x_stride, n, dtype):
    x, y = at(x, row * x_stride, dtype), at(y, row * n, dtype)
    for j in range(n):
        value = load(x, j, dtype)
        positive = f32(0) if value < f32(0) else value  # written so that NaN stays
        store(y, j, positive * positive, dtype)


@numba_glue.kernel
def _relu_squared(threads, x, y, x_stride, m, n, dtype):
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _row(np.int64(i), x, y, x_stride, n, dtype)
    else:
        for i in range(m):
            _row(i, x, y, x_stride, n, dtype)


def _arguments(outs, x):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, outs[0]), stride, m, n


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_relu_squared, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_relu_squared, config.parallel, *_arguments(outs, *args))
