"""Rows in parallel over the cores, each copied."""

from math import prod

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import at, f32, integer, move, store
from tilery.ops.embedding import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_rows import Config, archs

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(ids: TensorSpec, table: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(table)


def default(ids: TensorSpec, table: TensorSpec) -> Config:
    return numba_rows.default(*outputs(ids, table), least=2**16)


def configs(ids: TensorSpec, table: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(row, table, ids, y, t_stride, v, n, size, dtype):
    index = integer(ids, row, size)
    y = at(y, row * n, dtype)
    if 0 <= index < v:
        found = at(table, index * t_stride, dtype)
        for j in range(n):
            move(found, j, y, j, dtype)
    else:
        for j in range(n):
            store(y, j, f32(np.nan), dtype)


@numba_glue.kernel
def _embedding(threads, table, ids, y, t_stride, m, v, n, size, dtype):
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _row(np.int64(i), table, ids, y, t_stride, v, n, size, dtype)
    else:
        for i in range(m):
            _row(i, table, ids, y, t_stride, v, n, size, dtype)


def _arguments(outs, ids, table):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    v, n = table.shape
    return (table, ids, outs[0]), table.stride(0), prod(ids.shape), v, n, ids.dtype.itemsize


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_embedding, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_embedding, config.parallel, *_arguments(outs, *args))
