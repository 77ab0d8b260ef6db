"""Rows in parallel over the cores; the sum of a row is read again from the L1 cache for its scales and its values."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import STORAGE, ZERO, at, f32
from tilery.ops.add_rms_norm_fp8 import outputs
from tilery.parts import numba_rows
from tilery.parts.fp8 import LARGEST
from tilery.parts.numba_norms import add_row, group_size, quantise_row, rstd
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(x: TensorSpec, residual, weight, per, layout, pow2, format, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec, residual, weight, per, layout, pow2, format) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec, residual, weight, per, layout, pow2, format) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _rows(first, last, tensors, strides, n, eps, offset, group, largest, pow2, fp8, dtype):
    (x, residual, weight, values, scales, total), (stride, r_stride, s_stride, s_step) = tensors, strides
    for row in range(first, last):
        sum_row = at(total, row * n, dtype)
        add_row(at(x, row * stride, dtype), at(residual, row * r_stride, dtype), sum_row, n, dtype)
        quantise_row(
            sum_row, weight, at(values, row * n, fp8), scales, row * s_stride, s_step,
            rstd(sum_row, f32(0), n, eps, dtype), n, offset, group, largest, pow2, fp8, dtype,
        )  # fmt: skip


@numba_glue.kernel
def _add_rms_norm_fp8(
    threads, x, residual, weight, values, scales, total, stride, r_stride, s_stride, s_step, m, n, eps, offset,
    group, largest, pow2, fp8, dtype,
):  # fmt: skip
    tensors, strides = (x, residual, weight, values, scales, total), (stride, r_stride, s_stride, s_step)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            _rows(first, last, tensors, strides, n, eps, offset, group, largest, pow2, fp8, dtype)
    else:
        _rows(ZERO, m, tensors, strides, n, eps, offset, group, largest, pow2, fp8, dtype)


def _arguments(outs, x, residual, weight, eps, offset, per, layout, pow2, format):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(x)
    values, scales, total = outs
    strides = stride, rows(residual).stride, scales.stride(0), scales.stride(1)
    how = group_size(per, n), LARGEST[format], pow2, STORAGE[values.dtype]
    return (x, residual, weight, values, scales, total), *strides, m, n, float(eps), float(offset), *how


def compile(specs, config: Config, arch: str) -> Artifact:
    *tensors, per, layout, pow2, format = specs
    scalars = 1e-6, 0.0, per, layout, pow2, format
    return numba_glue.legacy_compile(_add_rms_norm_fp8, *_arguments(outputs(*specs), *tensors, *scalars))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_add_rms_norm_fp8, config.parallel, *_arguments(outs, *args))
