"""Rows or rows of blocks in parallel over the cores; a tensor twice, once for its greatest."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, f32, load, store
from tilery.ops.quantize_fp8 import outputs
from tilery.parts import fp8, numba_quantise, numba_rows
from tilery.parts.numba_fp8 import magnitude, scale
from tilery.parts.numba_rows import Config, archs
from tilery.parts.rows import rows

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(x: TensorSpec, per: str, layout: str, pow2: bool, format: str, config: Config | None = None) -> str | None:
    return numba_rows.refusal(x)


def default(x: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> Config:
    return numba_rows.default(x, least=2**16)


def configs(x: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _greatest(x, x_stride, first, last, start, count, dtype):
    """Of rows `first` to `last`, columns from `start` on."""
    top = magnitude(f32(0))
    for i in range(first, last):
        row = at(x, i * x_stride + start, dtype)
        for j in range(count):
            top = max(top, magnitude(load(row, j, dtype)))
    return top


@numba_glue.jit
def _write(x, values, x_stride, k, first, last, start, count, made, storage, dtype):
    inverse = f32(1) / made
    for i in range(first, last):
        x_row, v_row = at(x, i * x_stride + start, dtype), at(values, i * k + start, storage)
        for j in range(count):
            store(v_row, j, load(x_row, j, dtype) * inverse, storage)


@numba_glue.jit
def _row_of_blocks(b, x, values, scales, x_stride, m, k, side, largest, pow2, storage, dtype):
    first, last, across = b * side, min(b * side + side, m), (k + side - 1) // side
    for c in range(across):
        start, count = c * side, min(side, k - c * side)
        made = scale(_greatest(x, x_stride, first, last, start, count, dtype), largest, pow2)
        store(scales, b * across + c, made, FP32)
        _write(x, values, x_stride, k, first, last, start, count, made, storage, dtype)


@numba_glue.kernel
def _blocks(threads, x, values, scales, x_stride, m, k, side, largest, pow2, storage, dtype):
    down = (m + side - 1) // side
    if threads > 1:
        for i in prange(down):
            b = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row_of_blocks(b, x, values, scales, x_stride, m, k, side, largest, pow2, storage, dtype)
    else:
        for b in range(down):
            _row_of_blocks(b, x, values, scales, x_stride, m, k, side, largest, pow2, storage, dtype)


# Outside of the kernel: in it Numba would make parallel loops of them, also for one thread.
@numba_glue.jit
def _zeros(count):
    return np.zeros(count, np.int32)


@numba_glue.jit
def _top(values):
    return values.max()


@numba_glue.kernel
def _tensor(threads, x, values, scales, x_stride, m, k, largest, pow2, storage, dtype):
    tops = _zeros(threads)
    if threads > 1:
        for i in prange(threads):
            p = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            tops[p] = _greatest(x, x_stride, p * m // threads, (p + 1) * m // threads, ZERO, k, dtype)
    else:
        tops[0] = _greatest(x, x_stride, ZERO, m, ZERO, k, dtype)
    made = scale(_top(tops), largest, pow2)
    store(scales, 0, made, FP32)
    if threads > 1:
        for i in prange(threads):
            p = np.int64(i)
            _write(x, values, x_stride, k, p * m // threads, (p + 1) * m // threads, ZERO, k, made, storage, dtype)
    else:
        _write(x, values, x_stride, k, ZERO, m, ZERO, k, made, storage, dtype)


def _call(outs, x, per, layout, pow2, format):
    """Kernel and launch arguments; of tensors for `run` and of specs for `compile`."""
    if per in ("token", "group"):
        return numba_quantise.call(outs, x, None, False, per, pow2, format)
    m, k, stride = rows(x)
    how = fp8.LARGEST[format], pow2, STORAGE[outs[0].dtype]
    if per == "block":
        return _blocks, (x, *outs), stride, m, k, fp8.GROUP, *how
    return _tensor, (x, *outs), stride, m, k, *how


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(*_call(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    kernel, *arguments = _call(outs, *args)
    numba_glue.legacy_launch(kernel, config.parallel, *arguments)
