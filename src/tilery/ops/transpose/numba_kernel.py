"""Stripes of rows of the result in parallel over the cores, in squares that stay in the first cache."""

import numpy as np
from numba import prange

from tilery.backends import numba_glue
from tilery.backends.numba_glue import at, f32, move
from tilery.ops.transpose import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_rows import Config, archs
from tilery.parts.rows import rows
from tilery.spec import Artifact, TensorSpec

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]

_SIDE = 64
_STEP = _SIDE + 1  # so that a column's values lie in different lines of the cache


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _stripe(stripe, x, y, x_stride, m, n, dtype):
    """_SIDE columns of one matrix become rows, by way of a square that is read and written in whole lines."""
    stripes = (n + _SIDE - 1) // _SIDE
    batch, first = stripe // stripes, stripe % stripes * _SIDE
    x, y = at(x, batch * m * x_stride + first, dtype), at(y, (batch * n + first) * m, dtype)
    width = min(_SIDE, n - first)
    held = np.empty(_SIDE * _STEP, np.float32)
    square = np.int64(held.ctypes.data)
    for start in range(0, m, _SIDE):
        height = min(_SIDE, m - start)
        for i in range(height):
            row = at(x, (start + i) * x_stride, dtype)
            for j in range(width):
                move(row, j, square, i * _STEP + j, dtype)
        for j in range(width):
            row = at(y, j * m + start, dtype)
            for i in range(height):
                move(square, i * _STEP + j, row, i, dtype)
    held[0] = f32(0)  # only its address was used: without this Numba would free it before the loop


@numba_glue.kernel
def _transpose(threads, x, y, x_stride, batch, m, n, dtype):
    stripes = batch * ((n + _SIDE - 1) // _SIDE)
    if threads > 1:
        for i in prange(stripes):  # it counts unsigned, and unsigned times signed is a float
            _stripe(np.int64(i), x, y, x_stride, m, n, dtype)
    else:
        for i in range(stripes):
            _stripe(i, x, y, x_stride, m, n, dtype)


def _arguments(outs, x):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    (count, n, stride), m = rows(x), x.shape[-2]
    return (x, outs[0]), stride, count // max(m, 1), m, n


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.compile(_transpose, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.launch(_transpose, config.parallel, *_arguments(outs, *args))
