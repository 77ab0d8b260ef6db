"""Rows in parallel over the cores; the sum of a row is read again from the L1 cache."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import ZERO, at, f32, load, store
from tilery.ops.add_rms_norm import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_norms import add_row, rstd
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(x: TensorSpec, residual: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec, residual: TensorSpec, weight: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _rows(first, last, x, residual, weight, y, total, x_stride, r_stride, n, eps, shift, dtype):
    for row in range(first, last):
        y_row, sum_row = at(y, row * n, dtype), at(total, row * n, dtype)
        add_row(at(x, row * x_stride, dtype), at(residual, row * r_stride, dtype), sum_row, n, dtype)
        scale = rstd(sum_row, f32(0), n, eps, dtype)
        for j in range(n):
            store(y_row, j, load(sum_row, j, dtype) * scale * (load(weight, j, dtype) + shift), dtype)


@numba_glue.kernel
def _add_rms_norm(threads, x, residual, weight, y, total, x_stride, r_stride, m, n, eps, offset, dtype):
    shift = f32(offset)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            _rows(first, last, x, residual, weight, y, total, x_stride, r_stride, n, eps, shift, dtype)
    else:
        _rows(ZERO, m, x, residual, weight, y, total, x_stride, r_stride, n, eps, shift, dtype)


def _arguments(outs, x, residual, weight, eps=1e-6, offset=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    return (x, residual, weight, *outs), stride, rows(residual).stride, m, n, float(eps), float(offset)


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_add_rms_norm, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_add_rms_norm, config.parallel, *_arguments(outs, *args))
