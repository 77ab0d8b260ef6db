"""Rows in parallel over the cores; a block of a row is added up in the L1 cache, part by part."""

import numpy as np
from numba import prange

from tilery.base.spec import DTYPES, Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, f32, load, store
from tilery.ops.splitk_reduce import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_rows import Config, archs
from tilery.parts.numba_stream import BLOCK, buffer

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(parts: TensorSpec, out_dtype: str, config: Config | None = None) -> str | None:
    return numba_rows.refusal(parts._replace(dtype=DTYPES[out_dtype]))


def default(parts: TensorSpec, out_dtype: str) -> Config:
    count, m, n = parts.shape
    return Config(parallel=m > 1 and count * m * n >= 2**16)


def configs(parts: TensorSpec, out_dtype: str) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _rows(parts, c, count, part_stride, row_stride, first, last, n, storage, dtype):
    held, block = buffer(BLOCK)
    for row in range(first, last):
        for start in range(0, n, BLOCK):
            width = min(BLOCK, n - start)
            for j in range(width):
                store(block, j, f32(0), FP32)
            for part in range(count):
                source = at(parts, part * part_stride + row * row_stride + start, dtype)
                for j in range(width):
                    store(block, j, load(block, j, FP32) + load(source, j, dtype), FP32)
            target = at(c, row * n + start, storage)
            for j in range(width):
                store(target, j, load(block, j, FP32), storage)
    held[0] = f32(0)  # only its address was used: without this Numba would free it before the loop


@numba_glue.kernel
def _reduce(threads, parts, c, count, part_stride, row_stride, m, n, storage, dtype):
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = thread * m // threads, (thread + 1) * m // threads
            _rows(parts, c, count, part_stride, row_stride, first, last, n, storage, dtype)
    else:
        _rows(parts, c, count, part_stride, row_stride, ZERO, m, n, storage, dtype)


def _arguments(outs, parts):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    count, m, n = parts.shape
    return (parts, outs[0]), count, parts.stride(0), parts.stride(1), m, n, STORAGE[outs[0].dtype]


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_reduce, *_arguments(outputs(*specs), specs[0]))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_reduce, config.parallel, *_arguments(outs, args[0]))
