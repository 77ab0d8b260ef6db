"""rms_norm, add_rms_norm and layer_norm in Numba, and the first two to fp8: rows in parallel over the cores.

A row is read again from the L1 cache once its sums are known.
"""

from typing import Any

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows, two_level_rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, f32, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.quantize import formats
from tilery.ops.quantize.numba_fp8 import magnitude, scale
from tilery.ops.rows.numba_rows import Config, NumbaRows


@jit
def row_start(row, stride, heads, step):
    """Elements before a row that lies as base/rows.py's TwoLevelRows says."""
    return row // heads * stride + row % heads * step


@jit
def _add_row(x, residual, total, n, dtype):
    """total = x + residual, rounded."""
    for j in range(n):
        store(total, j, load(x, j, dtype) + load(residual, j, dtype), dtype)


@jit
def row_mean(x, n, dtype):
    total = f32(0)
    for j in range(n):
        total += load(x, j, dtype)
    return total / f32(n)


@jit
def row_rstd(x, centre, n, eps, dtype):
    """1 / sqrt(mean((x - centre)²) + eps) of a row."""
    squares = f32(0)
    for j in range(n):
        value = load(x, j, dtype) - centre
        squares += value * value
    return f32(1) / np.sqrt(squares / f32(n) + f32(eps))


def launch(kernel: Any, x: TensorSpec, call: Call, config: Config, args: dict[str, Any]) -> list[Launch]:
    """The launch of a kernel on rows of x, with what all kernels here take besides `args`."""
    m, n, _ = rows(x)
    args = {**args, "m": m, "n": n, "eps": call.eps, "dtype": STORAGE[x.dtype]}
    return [Launch(kernel, 1, args, options={"parallel": config.parallel})]


# RMS norm


@jit
def _rms_norm_row(x, weight, y, n, eps, offset, dtype):
    rstd, shift = row_rstd(x, f32(0), n, eps, dtype), f32(offset)
    for j in range(n):
        store(y, j, load(x, j, dtype) * rstd * (load(weight, j, dtype) + shift), dtype)


@kernel
def _rms_norm(threads, x, weight, y, stride, heads, step, m, n, eps, offset, dtype):
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            x_row = at(x, row_start(row, stride, heads, step), dtype)
            _rms_norm_row(x_row, weight, at(y, row * n, dtype), n, eps, offset, dtype)
    else:
        for row in range(m):
            x_row = at(x, row_start(row, stride, heads, step), dtype)
            _rms_norm_row(x_row, weight, at(y, row * n, dtype), n, eps, offset, dtype)


class RmsNorm(NumbaRows):
    least = 2**17

    def launches(self, call: Call, config: Config) -> list[Launch]:
        _, _, stride, heads, step = two_level_rows(call.x)
        args = {"x": call.x, "weight": call.weight, "y": call.y, "offset": call.offset}
        args |= {"stride": stride, "heads": heads, "step": step}
        return launch(_rms_norm, call.x, call, config, args)


@jit
def _add_rms_norm_rows(first, last, x, residual, weight, y, total, x_stride, r_stride, n, eps, shift, dtype):
    for row in range(first, last):
        y_row, sum_row = at(y, row * n, dtype), at(total, row * n, dtype)
        _add_row(at(x, row * x_stride, dtype), at(residual, row * r_stride, dtype), sum_row, n, dtype)
        rstd = row_rstd(sum_row, f32(0), n, eps, dtype)
        for j in range(n):
            store(y_row, j, load(sum_row, j, dtype) * rstd * (load(weight, j, dtype) + shift), dtype)


@kernel
def _add_rms_norm(threads, x, residual, weight, y, total, x_stride, r_stride, m, n, eps, offset, dtype):
    shift = f32(offset)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)
            first, last = part * m // threads, (part + 1) * m // threads
            _add_rms_norm_rows(first, last, x, residual, weight, y, total, x_stride, r_stride, n, eps, shift, dtype)
    else:
        _add_rms_norm_rows(ZERO, m, x, residual, weight, y, total, x_stride, r_stride, n, eps, shift, dtype)


class AddRmsNorm(NumbaRows):
    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        args = {"x": call.x, "residual": call.residual, "weight": call.weight, "y": call.y, "total": call.residual_out}
        args |= {"x_stride": rows(call.x).stride, "r_stride": rows(call.residual).stride, "offset": call.offset}
        return launch(_add_rms_norm, call.x, call, config, args)


# Layer norm


@jit
def _layer_norm_rows(first, last, x, weight, bias, y, stride, n, eps, dtype):
    for row in range(first, last):
        x_row, y_row = at(x, row * stride, dtype), at(y, row * n, dtype)
        centre = row_mean(x_row, n, dtype)
        rstd = row_rstd(x_row, centre, n, eps, dtype)
        for j in range(n):
            normal = (load(x_row, j, dtype) - centre) * rstd
            store(y_row, j, normal * load(weight, j, dtype) + load(bias, j, dtype), dtype)


@kernel
def _layer_norm(threads, x, weight, bias, y, stride, m, n, eps, dtype):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)
            first, last = part * m // threads, (part + 1) * m // threads
            _layer_norm_rows(first, last, x, weight, bias, y, stride, n, eps, dtype)
    else:
        _layer_norm_rows(ZERO, m, x, weight, bias, y, stride, n, eps, dtype)


class LayerNorm(NumbaRows):
    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        args = {"x": call.x, "weight": call.weight, "bias": call.bias, "y": call.y, "stride": rows(call.x).stride}
        return launch(_layer_norm, call.x, call, config, args)


# RMS norm to fp8


@jit
def _quantise_row(x, weight, values, scales, first, step, rstd, n, offset, group, largest, pow2, format, dtype):
    """x · rstd · (weight + offset) as fp8; the row's scales begin at `first` and are `step` apart."""
    shift = f32(offset)
    for g in range(max((n + group - 1) // group, 1)):
        start, stop = g * group, min((g + 1) * group, n)
        top = magnitude(f32(0))
        for j in range(start, stop):
            top = max(top, magnitude(load(x, j, dtype) * rstd * (load(weight, j, dtype) + shift)))
        made = scale(top, largest, pow2)
        store(scales, first + g * step, made, FP32)
        inverse = f32(1) / made
        for j in range(start, stop):
            y = load(x, j, dtype) * rstd * (load(weight, j, dtype) + shift)
            store(values, j, y * inverse, format)


@jit
def _rms_norm_fp8_rows(first, last, tensors, strides, n, eps, offset, group, largest, pow2, format, dtype):
    (x, weight, values, scales), (x_stride, s_stride, s_step) = tensors, strides
    for row in range(first, last):
        x_row = at(x, row * x_stride, dtype)
        _quantise_row(
            x_row, weight, at(values, row * n, format), scales, row * s_stride, s_step,
            row_rstd(x_row, f32(0), n, eps, dtype), n, offset, group, largest, pow2, format, dtype,
        )  # fmt: skip


@kernel
def _rms_norm_fp8(threads, x, weight, values, scales, strides, m, n, eps, offset, group, largest, pow2, format, dtype):
    tensors = (x, weight, values, scales)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)
            first, last = part * m // threads, (part + 1) * m // threads
            _rms_norm_fp8_rows(first, last, tensors, strides, n, eps, offset, group, largest, pow2, format, dtype)
    else:
        _rms_norm_fp8_rows(ZERO, m, tensors, strides, n, eps, offset, group, largest, pow2, format, dtype)


@jit
def _add_rms_norm_fp8_rows(first, last, tensors, strides, n, eps, offset, group, largest, pow2, format, dtype):
    (x, residual, weight, values, scales, total), (x_stride, r_stride, s_stride, s_step) = tensors, strides
    for row in range(first, last):
        sum_row = at(total, row * n, dtype)
        _add_row(at(x, row * x_stride, dtype), at(residual, row * r_stride, dtype), sum_row, n, dtype)
        _quantise_row(
            sum_row, weight, at(values, row * n, format), scales, row * s_stride, s_step,
            row_rstd(sum_row, f32(0), n, eps, dtype), n, offset, group, largest, pow2, format, dtype,
        )  # fmt: skip


@kernel
def _add_rms_norm_fp8(
    threads, x, residual, weight, values, scales, total, strides, m, n, eps, offset, group, largest, pow2, format, dtype
):
    tensors = (x, residual, weight, values, scales, total)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)
            first, last = part * m // threads, (part + 1) * m // threads
            _add_rms_norm_fp8_rows(first, last, tensors, strides, n, eps, offset, group, largest, pow2, format, dtype)
    else:
        _add_rms_norm_fp8_rows(ZERO, m, tensors, strides, n, eps, offset, group, largest, pow2, format, dtype)


def _fp8_args(call: Call) -> dict[str, Any]:
    """What both kernels take, but for what a residual adds."""
    group = formats.GROUP if call.per == "group" else max(call.x.shape[-1], 1)  # a row of nothing has a scale too
    args = {"x": call.x, "weight": call.weight, "values": call.values, "scales": call.scales, "offset": call.offset}
    return args | {
        "group": group, "largest": formats.LARGEST[call.format], "pow2": call.pow2, "format": STORAGE[call.values.dtype]
    }  # fmt: skip


class RmsNormFp8(NumbaRows):
    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        args = _fp8_args(call) | {"strides": (rows(call.x).stride, *call.scales.strides)}
        return launch(_rms_norm_fp8, call.x, call, config, args)


class AddRmsNormFp8(NumbaRows):
    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        strides = (rows(call.x).stride, rows(call.residual).stride, *call.scales.strides)
        args = _fp8_args(call) | {"residual": call.residual, "total": call.residual_out, "strides": strides}
        return launch(_add_rms_norm_fp8, call.x, call, config, args)


rms_norm, add_rms_norm, layer_norm = RmsNorm(), AddRmsNorm(), LayerNorm()
rms_norm_fp8, add_rms_norm_fp8 = RmsNormFp8(), AddRmsNormFp8()
