"""quantize_fp8, dequantize_fp8 and cast in Numba: rows, or rows of blocks, in parallel over the cores.

A row waits in fp32 for its scales. A tensor with one scale is read twice, the first time for its greatest magnitude.
"""

from typing import Any

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages import numba_elements, numba_stream
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, f32, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.languages.numba_stream import BLOCK, buffer, finish, stream, too_large
from tilery.ops.gated.numba_activations import ACTS, activated
from tilery.ops.quantize.formats import GROUP, LARGEST, shared_by
from tilery.ops.quantize.numba_fp8 import magnitude, scale
from tilery.ops.rows.numba_rows import Config, NumbaRows

_SILU = ACTS["silu"]

# Rows to fp8, of x or of silu(x) · up as it is computed


@jit
def _quantize(values, start, count, row, made, storage):
    """`count` values from `start` on; `row` holds them in fp32."""
    inverse = f32(1) / made
    row, values = at(row, start, FP32), at(values, start, storage)
    for j in range(count):
        store(values, j, load(row, j, FP32) * inverse, storage)


@jit
def _quantize_some(first, last, tensors, strides, up_start, k, wide, gated, largest, pow2, storage, dtype):
    """Rows `first` to `last`; each waits in fp32 for its scales, of which it has one for `wide` values."""
    (x, up, values, scales), (x_stride, up_stride, s_row, s_column) = tensors, strides
    held = np.empty(max(k, 1), np.float32)
    row = np.int64(held.ctypes.data)
    for i in range(first, last):
        x_row, up_row = at(x, i * x_stride, dtype), at(up, i * up_stride + up_start, dtype)
        if gated:
            for j in range(k):
                store(row, j, activated(load(x_row, j, dtype), _SILU) * load(up_row, j, dtype), FP32)
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
            _quantize(at(values, i * k, storage), start, count, row, made, storage)
    held[0] = f32(0)  # only its address was used: without this Numba would free it before the loop


@kernel
def _quantize_rows(threads, tensors, strides, up_start, m, k, wide, gated, largest, pow2, storage, dtype):
    """tensors: x, up, values, scales. strides: of rows of x and up, of rows and columns of scales."""
    if threads > 1:
        for i in prange(threads):
            p = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = p * m // threads, (p + 1) * m // threads
            _quantize_some(first, last, tensors, strides, up_start, k, wide, gated, largest, pow2, storage, dtype)
    else:
        _quantize_some(ZERO, m, tensors, strides, up_start, k, wide, gated, largest, pow2, storage, dtype)


class RowsToFp8(NumbaRows):
    """Rows to fp8, each with its own scale or one for each group of 128 values."""

    least = 2**16
    gated = False  # whether silu(x) · up is quantized, and not x

    def sources(self, call: Call) -> tuple[Any, Any, tuple[int, int], int]:
        """What is read: x, up, their strides, and where up starts; without up, x again."""
        raise NotImplementedError

    def launches(self, call: Call, config: Config) -> list[Launch]:
        x, up, strides, up_start = self.sources(call)
        m, k, _ = rows(call.values)
        args = {
            "tensors": (x, up, call.values, call.scales),
            "strides": (*strides, call.scales.stride(0), call.scales.stride(1)),
            "up_start": up_start, "m": m, "k": k, "wide": GROUP if call.per == "group" else max(k, 1),
            "gated": self.gated, **_format(call), "dtype": STORAGE[x.dtype],
        }  # fmt: skip
        return [Launch(_quantize_rows, 1, args, options={"parallel": config.parallel})]


def _format(call: Call) -> dict[str, Any]:
    """The arguments that say how a value is quantized."""
    return {"largest": LARGEST[call.format], "pow2": call.pow2, "storage": STORAGE[call.values.dtype]}


# quantize_fp8


@jit
def _greatest(x, x_stride, first, last, start, count, dtype):
    """The greatest magnitude in `count` columns from `start` on of rows `first` to `last`."""
    top = magnitude(f32(0))
    for i in range(first, last):
        row = at(x, i * x_stride + start, dtype)
        for j in range(count):
            top = max(top, magnitude(load(row, j, dtype)))
    return top


@jit
def _write(x, values, x_stride, k, first, last, start, count, made, storage, dtype):
    inverse = f32(1) / made
    for i in range(first, last):
        x_row, v_row = at(x, i * x_stride + start, dtype), at(values, i * k + start, storage)
        for j in range(count):
            store(v_row, j, load(x_row, j, dtype) * inverse, storage)


@jit
def _row_of_blocks(b, x, values, scales, x_stride, m, k, side, largest, pow2, storage, dtype):
    first, last, across = b * side, min(b * side + side, m), (k + side - 1) // side
    for c in range(across):
        start, count = c * side, min(side, k - c * side)
        made = scale(_greatest(x, x_stride, first, last, start, count, dtype), largest, pow2)
        store(scales, b * across + c, made, FP32)
        _write(x, values, x_stride, k, first, last, start, count, made, storage, dtype)


@kernel
def _quantize_blocks(threads, x, values, scales, x_stride, m, k, side, largest, pow2, storage, dtype):
    down = (m + side - 1) // side
    if threads > 1:
        for i in prange(down):
            b = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _row_of_blocks(b, x, values, scales, x_stride, m, k, side, largest, pow2, storage, dtype)
    else:
        for b in range(down):
            _row_of_blocks(b, x, values, scales, x_stride, m, k, side, largest, pow2, storage, dtype)


# Outside of the kernel: in it Numba would make parallel loops of them, also for one thread.
@jit
def _zeros(count):
    return np.zeros(count, np.int32)


@jit
def _top(values):
    return values.max()


@kernel
def _quantize_tensor(threads, x, values, scales, x_stride, m, k, largest, pow2, storage, dtype):
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


class QuantizeFp8(RowsToFp8):
    def sources(self, call: Call) -> tuple[Any, Any, tuple[int, int], int]:
        _, k, stride = rows(call.x)
        return call.x, call.x, (stride, stride), k

    def launches(self, call: Call, config: Config) -> list[Launch]:
        if call.per in ("token", "group"):
            return super().launches(call, config)
        m, k, stride = rows(call.x)
        args = {"x": call.x, "values": call.values, "scales": call.scales, "x_stride": stride, "m": m, "k": k}
        args |= {**_format(call), "dtype": STORAGE[call.x.dtype]}
        options = {"parallel": config.parallel}
        if call.per == "tensor":
            return [Launch(_quantize_tensor, 1, args, options=options)]
        return [Launch(_quantize_blocks, 1, args | {"side": GROUP}, options=options)]


quantize_fp8 = QuantizeFp8()

# silu_mul_fp8, whose contract is in ops/gated


class SiluMulFp8(RowsToFp8):
    """A row of the product waits in fp32 for its scales."""

    gated = True

    def sources(self, call: Call) -> tuple[Any, Any, tuple[int, int], int]:
        gate, up = call.sources
        return gate, up, (rows(gate).stride, rows(up).stride), call.up_start


silu_mul_fp8 = SiluMulFp8()

# dequantize_fp8


@jit
def _dequantize_row(row, values, scales, y, stride, s_row, s_column, k, high, wide, storage, dtype):
    scales = at(scales, row // high * s_row, FP32)
    values, y = at(values, row * stride, dtype), at(y, row * k, storage)
    for c in range((k + wide - 1) // wide):
        scale, start = load(scales, c * s_column, FP32), c * wide
        part, y_part = at(values, start, dtype), at(y, start, storage)
        for j in range(min(wide, k - start)):
            store(y_part, j, load(part, j, dtype) * scale, storage)


@kernel
def _dequantize(threads, values, scales, y, stride, s_row, s_column, m, k, high, wide, storage, dtype):
    """`high` rows and `wide` columns share a scale."""
    if threads > 1:
        for i in prange(m):  # it counts unsigned, and unsigned times signed is a float
            _dequantize_row(np.int64(i), values, scales, y, stride, s_row, s_column, k, high, wide, storage, dtype)
    else:
        for i in range(m):
            _dequantize_row(i, values, scales, y, stride, s_row, s_column, k, high, wide, storage, dtype)


class DequantizeFp8(NumbaRows):
    least = 2**16

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return numba_elements.refusal(call.y)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        values, scales = call.values, call.scales
        m, k, stride = rows(values)
        high, wide = shared_by(m, k, call.per)
        args = {"values": values, "scales": scales, "y": call.y, "stride": stride}
        args |= {"s_row": scales.stride(0), "s_column": scales.stride(-1), "m": m, "k": k}
        args |= {"high": max(high, 1), "wide": max(wide, 1)}
        args |= {"storage": STORAGE[call.y.dtype], "dtype": STORAGE[values.dtype]}
        return [Launch(_dequantize, 1, args, options={"parallel": config.parallel})]


dequantize_fp8 = DequantizeFp8()

# cast


@jit
def _convert(x, y, count, storage, dtype):
    for j in range(count):
        store(y, j, load(x, j, dtype), storage)


@jit
def _cast_rows(x, y, x_stride, first, last, n, past, storage, dtype):
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


@kernel
def _cast(threads, x, y, x_stride, m, n, least, storage, dtype):
    past = too_large(y, m, n, least, storage)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _cast_rows(x, y, x_stride, part * m // threads, (part + 1) * m // threads, n, past, storage, dtype)
    else:
        _cast_rows(x, y, x_stride, ZERO, m, n, past, storage, dtype)


class Cast(NumbaRows):
    least = 2**16

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return numba_elements.refusal(call.x) or numba_elements.refusal(call.y)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.x)
        args = {"x": call.x, "y": call.y, "x_stride": stride, "m": m, "n": n, "least": numba_stream.LEAST}
        args |= {"storage": STORAGE[call.y.dtype], "dtype": STORAGE[call.x.dtype]}
        return [Launch(_cast, 1, args, options={"parallel": config.parallel})]


cast = Cast()
