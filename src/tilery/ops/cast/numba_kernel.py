"""Rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange

from tilery.base.spec import DTYPES, Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import STORAGE, ZERO, at, f32, load, store
from tilery.ops.cast import outputs
from tilery.parts import numba_rows, numba_stream
from tilery.parts.numba_rows import Config, archs
from tilery.parts.numba_stream import BLOCK, buffer, finish, stream, too_large
from tilery.parts.rows import rows

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(x: TensorSpec, dtype: str, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x) or numba_rows.refusal(x._replace(dtype=DTYPES[dtype]))


def default(x: TensorSpec, dtype: str) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec, dtype: str) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _convert(x, y, count, storage, dtype):
    for j in range(count):
        store(y, j, load(x, j, dtype), storage)


@numba_glue.jit
def _rows(x, y, x_stride, first, last, n, past, storage, dtype):
    held, block = buffer(BLOCK)
    for row in range(first, last):
        x_row, y_row = at(x, row * x_stride, dtype), at(y, row * n, storage)
        if past:
            for start in range(0, n, BLOCK):
                count = min(BLOCK, n - start)
                _convert(at(x_row, start, dtype), block, count, storage, dtype)
                stream(block, at(y_row, start, storage), count, storage)
        else:
            _convert(x_row, y_row, n, storage, dtype)
    if past:
        finish()
    held[0] = f32(0)  # only its address was used: without this Numba would free it before the loop


@numba_glue.kernel
def _cast(threads, x, y, x_stride, m, n, least, storage, dtype):
    past = too_large(y, m, n, least, storage)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _rows(x, y, x_stride, part * m // threads, (part + 1) * m // threads, n, past, storage, dtype)
    else:
        _rows(x, y, x_stride, ZERO, m, n, past, storage, dtype)


def _arguments(outs, x):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, outs[0]), stride, m, n, numba_stream.LEAST, STORAGE[outs[0].dtype]


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_cast, *_arguments(outputs(*specs), specs[0]))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_cast, config.parallel, *_arguments(outs, args[0]))
