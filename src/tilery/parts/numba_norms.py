"""What Numba kernels that normalise rows share: where a row starts, its scale, and gradients summed over rows."""

import numpy as np
import torch
from numba import prange

from tilery.base.spec import TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, ONE, ZERO, at, f32, load, store
from tilery.parts import fp8
from tilery.parts.numba_fp8 import magnitude, scale
from tilery.parts.numba_rows import Config


@numba_glue.jit
def start(row, stride, heads, step):
    """Elements before a row that lies as ops.rows.Heads says."""
    return row // heads * stride + row % heads * step


@numba_glue.jit
def add_row(x, residual, total, n, dtype):
    """total = x + residual, rounded."""
    for j in range(n):
        store(total, j, load(x, j, dtype) + load(residual, j, dtype), dtype)


@numba_glue.jit
def mean(x, n, dtype):
    total = f32(0)
    for j in range(n):
        total += load(x, j, dtype)
    return total / f32(n)


@numba_glue.jit
def rstd(x, centre, n, eps, dtype):
    """1 / sqrt(mean((x - centre)²) + eps) of a row."""
    squares = f32(0)
    for j in range(n):
        value = load(x, j, dtype) - centre
        squares += value * value
    return f32(1) / np.sqrt(squares / f32(n) + f32(eps))


def group_size(per: str, n: int) -> int:
    """Values that share a scale; a row of nothing has one too."""
    return fp8.GROUP if per == "group" else max(n, 1)


@numba_glue.jit
def quantise_row(x, weight, values, scales, first, step, norm, n, offset, group, largest, pow2, format, dtype):
    """x · norm · (weight + offset) as fp8; the row's scales begin at `first` and are `step` apart."""
    shift = f32(offset)
    for g in range(max((n + group - 1) // group, 1)):
        start, stop = g * group, min((g + 1) * group, n)
        top = magnitude(f32(0))
        for j in range(start, stop):
            top = max(top, magnitude(load(x, j, dtype) * norm * (load(weight, j, dtype) + shift)))
        made = scale(top, largest, pow2)
        store(scales, first + g * step, made, FP32)
        inverse = f32(1) / made
        for j in range(start, stop):
            y = load(x, j, dtype) * norm * (load(weight, j, dtype) + shift)
            store(values, j, y * inverse, format)


def partial_sums(x: TensorSpec, config: Config) -> TensorSpec:
    """Two rows for each thread: a gradient's sum over a few rows, and over all the rows that it takes."""
    shape = 2 * numba_glue.threads(config.parallel), x.shape[-1]
    return TensorSpec.contiguous(shape, torch.float32, x.device)


@numba_glue.jit
def clear(sums, n):
    """`sums` is the first of a thread's two rows."""
    for j in range(2 * n):
        store(sums, j, f32(0), FP32)


@numba_glue.jit
def settle(sums, rows, n):
    """Moves the sum over a few rows to that over all; one sum over 2048 rows had an error of 6e-7, so it has 2e-7."""
    if rows % 64 == 0:
        for j in range(n):
            store(sums, n + j, load(sums, n + j, FP32) + load(sums, j, FP32), FP32)
            store(sums, j, f32(0), FP32)


@numba_glue.jit
def add_up(sums, target, count, n, dtype):
    """target = the sum of what `count` threads summed, in their order: the same bits in every run."""
    for j in range(n):
        total = f32(0)
        for i in range(2 * count):
            total += load(sums, i * n + j, FP32)
        store(target, j, total, dtype)


@numba_glue.jit
def _gradients_of_row(dy, x, weight, dresidual, dx, sums, n, passed, eps, offset, dtype):
    scale, shift, dot = rstd(x, f32(0), n, eps, dtype), f32(offset), f32(0)
    for j in range(n):
        dot += load(dy, j, dtype) * (load(weight, j, dtype) + shift) * load(x, j, dtype)
    share = dot / f32(n) * scale
    for j in range(n):
        normal, gradient = load(x, j, dtype) * scale, load(dy, j, dtype)
        own = scale * (gradient * (load(weight, j, dtype) + shift) - normal * share)
        store(dx, j, own + load(dresidual, j, dtype) if passed else own, dtype)
        store(sums, j, load(sums, j, FP32) + gradient * normal, FP32)


@numba_glue.jit
def _gradients_of_rows(part, threads, tensors, strides, heads, m, n, passed, eps, offset, dtype):
    (dy, x, weight, dresidual, dx, sums), (dy_stride, r_stride, stride, step) = tensors, strides
    own = at(sums, 2 * part * n, FP32)
    clear(own, n)
    for row in range(part * m // threads, (part + 1) * m // threads):
        settle(own, row, n)
        dy_row, r_row = at(dy, row * dy_stride, dtype), at(dresidual, row * r_stride, dtype)
        x_row, dx_row = at(x, start(row, stride, heads, step), dtype), at(dx, row * n, dtype)
        _gradients_of_row(dy_row, x_row, weight, r_row, dx_row, own, n, passed, eps, offset, dtype)


@numba_glue.kernel
def rms_norm_backward(
    threads, dy, x, weight, dresidual, dx, dweight, sums,
    dy_stride, r_stride, stride, heads, step, m, n, passed, eps, offset, dtype,
):  # fmt: skip
    """Each thread takes a share of the rows and sums dweight in a row of its own; dresidual is added if `passed`."""
    tensors, strides = (dy, x, weight, dresidual, dx, sums), (dy_stride, r_stride, stride, step)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _gradients_of_rows(part, threads, tensors, strides, heads, m, n, passed, eps, offset, dtype)
    else:
        _gradients_of_rows(ZERO, ONE, tensors, strides, heads, m, n, passed, eps, offset, dtype)
    add_up(sums, dweight, threads, n, dtype)
