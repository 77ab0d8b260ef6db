"""Rows in parallel over the cores; four neighbours share a counter of Philox, but for the ends of a row."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import ZERO, at, f32, load, store
from tilery.ops.dropout import factor, outputs
from tilery.parts import numba_rows, philox
from tilery.parts.numba_philox import words
from tilery.parts.numba_rows import Config, archs
from tilery.parts.rows import rows

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]

_BYTE, _STEP = np.uint32(8), f32(2.0**-24)


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**14)


def configs(x: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _uniform(word):
    return f32(np.int32(word >> _BYTE)) * _STEP


@numba_glue.jit
def _numbers(counter, key0, key1):
    """Four in [0, 1)."""
    w0, w1, w2, w3 = words(key0, key1, counter, counter >> 32)
    return _uniform(w0), _uniform(w1), _uniform(w2), _uniform(w3)


@numba_glue.jit
def _one(x, y, j, uniform, p, scale, dtype):
    value = load(x, j, dtype) * scale
    store(y, j, value if uniform >= p else f32(0), dtype)


@numba_glue.jit
def _end(x, y, first, start, stop, key0, key1, p, scale, dtype):
    """Elements `start` to `stop` of a row, one by one."""
    for j in range(start, stop):
        u0, u1, u2, u3 = _numbers((first + j) // 4, key0, key1)
        lane = (first + j) % 4
        uniform = (u0 if lane == 0 else u1) if lane < 2 else (u2 if lane == 2 else u3)
        _one(x, y, j, uniform, p, scale, dtype)


@numba_glue.jit
def _row(row, x, y, x_stride, n, key0, key1, p, scale, dtype):
    first = row * n
    x, y = at(x, row * x_stride, dtype), at(y, first, dtype)
    head = min(-first % 4, n)
    quads = (n - head) // 4
    _end(x, y, first, ZERO, head, key0, key1, p, scale, dtype)
    x_quads, y_quads, counter = at(x, head, dtype), at(y, head, dtype), (first + head) // 4
    for q in range(quads):
        u0, u1, u2, u3 = _numbers(counter + q, key0, key1)
        _one(x_quads, y_quads, 4 * q, u0, p, scale, dtype)
        _one(x_quads, y_quads, 4 * q + 1, u1, p, scale, dtype)
        _one(x_quads, y_quads, 4 * q + 2, u2, p, scale, dtype)
        _one(x_quads, y_quads, 4 * q + 3, u3, p, scale, dtype)
    _end(x, y, first, head + 4 * quads, n, key0, key1, p, scale, dtype)


@numba_glue.kernel
def _dropout(threads, x, y, x_stride, m, n, key0, key1, p, scale, dtype):
    p, scale = f32(p), f32(scale)
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _row(np.int64(i), x, y, x_stride, n, key0, key1, p, scale, dtype)
    else:
        for i in range(m):
            _row(i, x, y, x_stride, n, key0, key1, p, scale, dtype)


def _arguments(outs, x, p, seed):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, outs[0]), stride, m, n, *philox.key(seed), float(p), factor(p)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_dropout, *_arguments(outputs(*specs), *specs, 0.5, 0))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_dropout, config.parallel, *_arguments(outs, *args))
