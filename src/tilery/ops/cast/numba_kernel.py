"""Rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange

from tilery.backends import numba_glue
from tilery.backends.numba_glue import STORAGE, at, load, store
from tilery.ops.cast import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_rows import Config, archs
from tilery.parts.rows import rows
from tilery.spec import DTYPES, Artifact, TensorSpec

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(x: TensorSpec, dtype: str, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x) or numba_rows.refusal(x._replace(dtype=DTYPES[dtype]))


def default(x: TensorSpec, dtype: str) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec, dtype: str) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(row, x, y, x_stride, n, storage, dtype):
    x, y = at(x, row * x_stride, dtype), at(y, row * n, storage)
    for j in range(n):
        store(y, j, load(x, j, dtype), storage)


@numba_glue.kernel
def _cast(threads, x, y, x_stride, m, n, storage, dtype):
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _row(np.int64(i), x, y, x_stride, n, storage, dtype)
    else:
        for i in range(m):
            _row(i, x, y, x_stride, n, storage, dtype)


def _arguments(outs, x):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, outs[0]), stride, m, n, STORAGE[outs[0].dtype]


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.compile(_cast, *_arguments(outputs(*specs), specs[0]))


def run(outs, args, config: Config) -> None:
    numba_glue.launch(_cast, config.parallel, *_arguments(outs, args[0]))
