"""Rows to fp8 in Numba, each with its own scale or one per 128 values; of x, or of silu(x) · up as it is computed."""

from typing import Any

import numpy as np
from numba import prange

from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, f32, load, store
from tilery.parts import fp8
from tilery.parts.numba_fp8 import magnitude, scale
from tilery.parts.numba_gated import ACTS, share
from tilery.parts.rows import rows

_SILU = ACTS["silu"]


@numba_glue.jit
def _quantise(values, start, count, row, made, storage):
    """`count` values from `start` on; `row` holds them in fp32."""
    inverse = f32(1) / made
    row, values = at(row, start, FP32), at(values, start, storage)
    for j in range(count):
        store(values, j, load(row, j, FP32) * inverse, storage)


@numba_glue.jit
def _part(first, last, tensors, strides, up_start, shape, gated, largest, pow2, storage, dtype):
    """Some rows; each waits in fp32 for its scales."""
    (x, up, values, scales), (x_stride, up_stride, s_row, s_column), (k, wide) = tensors, strides, shape
    held = np.empty(max(k, 1), np.float32)
    row = np.int64(held.ctypes.data)
    for i in range(first, last):
        x_row, up_row = at(x, i * x_stride, dtype), at(up, i * up_stride + up_start, dtype)
        if gated:
            for j in range(k):
                g = load(x_row, j, dtype)
                store(row, j, g * share(g, _SILU) * load(up_row, j, dtype), FP32)
        else:
            for j in range(k):
                store(row, j, load(x_row, j, dtype), FP32)
        for c in range((k + wide - 1) // wide if k else 1):
            start, count = c * wide, min(wide, k - c * wide)
            top = magnitude(f32(0))
            part = at(row, start, FP32)
            for j in range(count):
                top = max(top, magnitude(load(part, j, FP32)))
            made = scale(top, largest, pow2)
            store(scales, i * s_row + c * s_column, made, FP32)
            _quantise(at(values, i * k, storage), start, count, row, made, storage)
    held[0] = f32(0)  # only its address was used: without this Numba would free it before the loop


@numba_glue.kernel
def _rows(
    threads, x, up, values, scales, x_stride, up_stride, up_start, s_row, s_column, m, k, wide,
    gated, largest, pow2, storage, dtype,
):  # fmt: skip
    tensors, strides, shape = (x, up, values, scales), (x_stride, up_stride, s_row, s_column), (k, wide)
    if threads > 1:
        for i in prange(threads):
            p = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = p * m // threads, (p + 1) * m // threads
            _part(first, last, tensors, strides, up_start, shape, gated, largest, pow2, storage, dtype)
    else:
        _part(ZERO, m, tensors, strides, up_start, shape, gated, largest, pow2, storage, dtype)


def call(outs: Any, x: Any, up: Any, gated: bool, per: str, pow2: bool, format: str) -> tuple[Any, ...]:
    """Kernel and launch arguments, of tensors and of specs; without `up`, gated, x holds both halves."""
    values, scales = outs
    (m, k, _), stride = rows(values), rows(x).stride
    up_stride, up_start = (stride, k) if up is None else (rows(up).stride, 0)
    strides = stride, up_stride, up_start, scales.stride(0), scales.stride(1)
    wide = fp8.GROUP if per == "group" else max(k, 1)
    how = gated, fp8.LARGEST[format], pow2, STORAGE[values.dtype]
    return _rows, (x, x if up is None else up, values, scales), *strides, m, k, wide, *how
