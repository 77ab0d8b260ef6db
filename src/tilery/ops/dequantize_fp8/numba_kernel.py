"""Rows in parallel over the cores, each in one pass."""

import numpy as np
from numba import prange

from tilery.base.spec import DTYPES, Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, STORAGE, at, load, store
from tilery.ops.dequantize_fp8 import outputs
from tilery.parts import fp8, numba_rows
from tilery.parts.numba_rows import Config, archs
from tilery.parts.rows import rows

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(values: TensorSpec, scales: TensorSpec, per: str, dtype: str, config: Config | None = None) -> str | None:
    return numba_rows.refusal(values._replace(dtype=DTYPES[dtype]))


def default(values: TensorSpec, scales: TensorSpec, per: str, dtype: str) -> Config:
    return numba_rows.default(values, least=2**16)


def configs(values: TensorSpec, scales: TensorSpec, per: str, dtype: str) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _row(row, values, scales, y, stride, s_row, s_column, k, high, wide, storage, dtype):
    scales = at(scales, row // high * s_row, FP32)
    values, y = at(values, row * stride, dtype), at(y, row * k, storage)
    for c in range((k + wide - 1) // wide):
        scale, start = load(scales, c * s_column, FP32), c * wide
        part, y_part = at(values, start, dtype), at(y, start, storage)
        for j in range(min(wide, k - start)):
            store(y_part, j, load(part, j, dtype) * scale, storage)


@numba_glue.kernel
def _dequantize(threads, values, scales, y, stride, s_row, s_column, m, k, high, wide, storage, dtype):
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _row(np.int64(i), values, scales, y, stride, s_row, s_column, k, high, wide, storage, dtype)
    else:
        for i in range(m):
            _row(i, values, scales, y, stride, s_row, s_column, k, high, wide, storage, dtype)


def _arguments(outs, values, scales, per, dtype):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, k, stride = rows(values)
    s_row, s_column = scales.stride(0), scales.stride(-1)
    high = {"block": fp8.GROUP, "tensor": max(m, 1)}.get(per, 1)
    wide = fp8.GROUP if per in ("group", "block") else max(k, 1)
    return (values, scales, outs[0]), stride, s_row, s_column, m, k, high, wide, STORAGE[outs[0].dtype]


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_dequantize, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_dequantize, config.parallel, *_arguments(outs, *args))
