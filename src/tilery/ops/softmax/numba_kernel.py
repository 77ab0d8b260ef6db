"""Rows in parallel over the cores; a row's exponentials wait in fp32 for their sum, so that each is computed once."""

import numpy as np
from numba import prange

from tilery.backends import numba_glue
from tilery.backends.numba_glue import at, exp, f32, load, rank, store, unrank
from tilery.ops import numba_rows
from tilery.ops.numba_rows import Config
from tilery.ops.rows import rows
from tilery.ops.softmax import outputs
from tilery.spec import Artifact, TensorSpec

archs = numba_rows.archs


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _rows(x, y, x_stride, first, last, n, dtype):
    exponentials = np.empty(n, np.float32)
    for row in range(first, last):
        x_row, y_row = at(x, row * x_stride, dtype), at(y, row * n, dtype)
        top = rank(f32(-np.inf))
        for j in range(n):
            top = max(top, rank(load(x_row, j, dtype)))
        top_value = unrank(top)
        total = f32(0)
        for j in range(n):
            exponentials[j] = exp(load(x_row, j, dtype) - top_value)
            total += exponentials[j]
        scale = f32(1) / total
        for j in range(n):
            store(y_row, j, exponentials[j] * scale, dtype)


@numba_glue.kernel
def _softmax(threads, x, y, x_stride, m, n, dtype):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _rows(x, y, x_stride, part * m // threads, (part + 1) * m // threads, n, dtype)
    else:
        _rows(x, y, x_stride, 0, m, n, dtype)


def _arguments(outs, x):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, outs[0]), stride, m, n


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.compile(_softmax, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.launch(_softmax, config.parallel, *_arguments(outs, *args))
