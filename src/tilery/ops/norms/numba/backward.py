"""Backwards of rms_norm, add_rms_norm and layer_norm in Numba.

Each thread takes a share of the rows and sums the weight's gradient over them in rows of a workspace of its own; these
are added in order.
"""

import numpy as np
import torch
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows, two_level_rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, ONE, ZERO, at, f32, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.norms.numba.forward import launch, row_mean, row_rstd, row_start
from tilery.ops.rows.numba_rows import Config, NumbaRows


def _partial_sums(x: TensorSpec, config: Config) -> TensorSpec:
    """Two rows for each thread: a gradient's sum over a few rows, and over all the rows that it takes."""
    shape = 2 * numba_glue.threads(config.parallel), x.shape[-1]
    return TensorSpec.contiguous(shape, torch.float32, x.device)


@jit
def _clear(sums, n):
    """Set both rows of a thread to 0; `sums` is the first of them."""
    for j in range(2 * n):
        store(sums, j, f32(0), FP32)


@jit
def _carry(sums, row, n):
    """Every 64 rows, move the sum over a few rows to that over all: one sum over 2048 rows had an error of 6e-7, so
    it has 2e-7."""
    if row % 64 == 0:
        for j in range(n):
            store(sums, n + j, load(sums, n + j, FP32) + load(sums, j, FP32), FP32)
            store(sums, j, f32(0), FP32)


@jit
def _sum_threads(sums, target, threads, n, dtype):
    """target = what all threads summed, added in their order: the same bits in every run."""
    for j in range(n):
        total = f32(0)
        for i in range(2 * threads):
            total += load(sums, i * n + j, FP32)
        store(target, j, total, dtype)


@jit
def _rms_norm_backward_row(dy, x, weight, dresidual, dx, sums, n, passed, eps, offset, dtype):
    rstd, shift, dot = row_rstd(x, f32(0), n, eps, dtype), f32(offset), f32(0)
    for j in range(n):
        dot += load(dy, j, dtype) * (load(weight, j, dtype) + shift) * load(x, j, dtype)
    projection = dot / f32(n) * rstd
    for j in range(n):
        normal, gradient = load(x, j, dtype) * rstd, load(dy, j, dtype)
        own = rstd * (gradient * (load(weight, j, dtype) + shift) - normal * projection)
        store(dx, j, own + load(dresidual, j, dtype) if passed else own, dtype)
        store(sums, j, load(sums, j, FP32) + gradient * normal, FP32)


@jit
def _rms_norm_backward_rows(part, threads, tensors, strides, m, n, passed, eps, offset, dtype):
    (dy, x, weight, dresidual, dx, sums), (dy_stride, r_stride, x_stride, heads, step) = tensors, strides
    own = at(sums, 2 * part * n, FP32)
    _clear(own, n)
    for row in range(part * m // threads, (part + 1) * m // threads):
        _carry(own, row, n)
        dy_row, r_row = at(dy, row * dy_stride, dtype), at(dresidual, row * r_stride, dtype)
        x_row, dx_row = at(x, row_start(row, x_stride, heads, step), dtype), at(dx, row * n, dtype)
        _rms_norm_backward_row(dy_row, x_row, weight, r_row, dx_row, own, n, passed, eps, offset, dtype)


@kernel
def _rms_norm_backward(threads, dy, x, weight, dresidual, dx, dweight, sums, strides, m, n, passed, eps, offset, dtype):
    """dresidual is added to dx if `passed`."""
    tensors = (dy, x, weight, dresidual, dx, sums)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _rms_norm_backward_rows(part, threads, tensors, strides, m, n, passed, eps, offset, dtype)
    else:
        _rms_norm_backward_rows(ZERO, ONE, tensors, strides, m, n, passed, eps, offset, dtype)
    _sum_threads(sums, dweight, threads, n, dtype)


class RmsNormBackward(NumbaRows):
    least = 2**16

    def workspace(self, call: Call, config: Config) -> dict[str, TensorSpec]:
        return {"sums": _partial_sums(call.dy, config)}

    def launches(self, call: Call, config: Config) -> list[Launch]:
        _, _, stride, heads, step = two_level_rows(call.x)
        args = {"dy": call.dy, "x": call.x, "weight": call.weight, "offset": call.offset}
        args |= {"dresidual": call.dy, "passed": False}  # not read
        args |= {"dx": call.dx, "dweight": call.dweight, "sums": call.sums}
        args |= {"strides": (rows(call.dy).stride, 0, stride, heads, step)}
        return launch(_rms_norm_backward, call.x, call, config, args)


class AddRmsNormBackward(RmsNormBackward):
    def launches(self, call: Call, config: Config) -> list[Launch]:
        x, passed = call.residual_out, call.dresidual is not None
        dresidual = call.dresidual if passed else call.dy  # not read
        args = {"dy": call.dy, "x": x, "weight": call.weight, "offset": call.offset}
        args |= {"dresidual": dresidual, "passed": passed}
        args |= {"dx": call.dx, "dweight": call.dweight, "sums": call.sums}
        args |= {"strides": (rows(call.dy).stride, rows(dresidual).stride, rows(x).stride, 1, 0)}
        return launch(_rms_norm_backward, x, call, config, args)


@jit
def _layer_norm_backward_row(dy, x, weight, dx, dw_sums, db_sums, n, eps, dtype):
    centre = row_mean(x, n, dtype)
    rstd, dot, total = row_rstd(x, centre, n, eps, dtype), f32(0), f32(0)
    for j in range(n):
        scaled = load(dy, j, dtype) * load(weight, j, dtype)
        dot += scaled * (load(x, j, dtype) - centre)
        total += scaled
    projection, middle = dot / f32(n) * rstd, total / f32(n)
    for j in range(n):
        normal, gradient = (load(x, j, dtype) - centre) * rstd, load(dy, j, dtype)
        store(dx, j, rstd * (gradient * load(weight, j, dtype) - normal * projection - middle), dtype)
        store(dw_sums, j, load(dw_sums, j, FP32) + gradient * normal, FP32)
        store(db_sums, j, load(db_sums, j, FP32) + gradient, FP32)


@jit
def _layer_norm_backward_rows(part, threads, tensors, dy_stride, x_stride, m, n, eps, dtype):
    dy, x, weight, dx, dw_sums, db_sums = tensors
    dw_own, db_own = at(dw_sums, 2 * part * n, FP32), at(db_sums, 2 * part * n, FP32)
    _clear(dw_own, n)
    _clear(db_own, n)
    for row in range(part * m // threads, (part + 1) * m // threads):
        _carry(dw_own, row, n)
        _carry(db_own, row, n)
        dy_row, x_row = at(dy, row * dy_stride, dtype), at(x, row * x_stride, dtype)
        _layer_norm_backward_row(dy_row, x_row, weight, at(dx, row * n, dtype), dw_own, db_own, n, eps, dtype)


@kernel
def _layer_norm_backward(
    threads, dy, x, weight, dx, dweight, dbias, dw_sums, db_sums, dy_stride, x_stride, m, n, eps, dtype
):
    tensors = (dy, x, weight, dx, dw_sums, db_sums)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)
            _layer_norm_backward_rows(part, threads, tensors, dy_stride, x_stride, m, n, eps, dtype)
    else:
        _layer_norm_backward_rows(ZERO, ONE, tensors, dy_stride, x_stride, m, n, eps, dtype)
    _sum_threads(dw_sums, dweight, threads, n, dtype)
    _sum_threads(db_sums, dbias, threads, n, dtype)


class LayerNormBackward(NumbaRows):
    least = 2**16

    def workspace(self, call: Call, config: Config) -> dict[str, TensorSpec]:
        return {"dweight_sums": _partial_sums(call.dy, config), "dbias_sums": _partial_sums(call.dy, config)}

    def launches(self, call: Call, config: Config) -> list[Launch]:
        args = {"dy": call.dy, "x": call.x, "weight": call.weight}
        args |= {"dx": call.dx, "dweight": call.dweight, "dbias": call.dbias}
        args |= {"dw_sums": call.dweight_sums, "db_sums": call.dbias_sums}
        args |= {"dy_stride": rows(call.dy).stride, "x_stride": rows(call.x).stride}
        return launch(_layer_norm_backward, call.x, call, config, args)


rms_norm_backward, add_rms_norm_backward = RmsNormBackward(), AddRmsNormBackward()
layer_norm_backward = LayerNormBackward()
