"""Numba kernels of softmax, its logarithm and their backwards: rows in parallel over the cores."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, ZERO, at, exp, f32, load, rank, store, unrank
from tilery.parts import numba_rows, numba_stream
from tilery.parts.numba_rows import Config
from tilery.parts.numba_stream import BLOCK, ahead, buffer, finish, stream, too_large
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(first: TensorSpec, *_, config: Config | None = None) -> str | None:
    return numba_rows.refusal(first)


def default(x: TensorSpec) -> Config:
    return numba_rows.default(x, least=2**16)


def default_backward(dy: TensorSpec, y: TensorSpec) -> Config:
    return numba_rows.default(dy, least=2**17)


def configs(*specs) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def row_top(x, n, dtype):
    """The maximum; NaN of either sign may come out of a row that has one, and goes into its sum."""
    top = rank(f32(-np.inf))
    for j in range(n):
        top = max(top, rank(load(x, j, dtype)))
    return unrank(top)


@numba_glue.jit
def base(top):
    """What log(sum(exp(x))) subtracts before exp: the maximum, or 0 where it is infinite and inf - inf would be NaN."""
    return f32(0) if abs(top) == f32(np.inf) else top


@numba_glue.jit
def row_sums(x, n, based, dtype):
    """max(x), sum(exp(x - max(x))) and sum(x); `based`: sum(exp(x - base(max(x))))."""
    top = rank(f32(-np.inf))
    plain, total = f32(0), f32(0)
    for j in range(n):
        value = load(x, j, dtype)
        plain += value
        top = max(top, rank(value))
    top_value = unrank(top)
    below = base(top_value) if based else top_value
    for j in range(n):
        total += exp(load(x, j, dtype) - below)
    return top_value, total, plain


@numba_glue.jit
def _exponentials(x, y, n, step, top, log, dtype):
    """sum(exp(x - top)); y gets them in fp32, but not for the logarithm. Asks for the next row, `step` elements on."""
    total = 0.0  # of blocks, in fp64: in fp32 a row of 128256 had three times the error
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        x_block, y_block = at(x, start, dtype), at(y, start, FP32)
        ahead(at(x_block, step, dtype), count, dtype)
        part = f32(0)
        if log:
            for j in range(count):
                part += exp(load(x_block, j, dtype) - top)
        else:
            for j in range(count):
                value = exp(load(x_block, j, dtype) - top)
                store(y_block, j, value, FP32)
                part += value
        total += part
    return f32(total)


@numba_glue.jit
def _results(x, exponentials, y, count, top, by, log, dtype):
    """`by` is 1 / sum(exp(x - top)), or the logarithm of that sum."""
    if log:
        for j in range(count):
            store(y, j, load(x, j, dtype) - top - by, dtype)
    else:
        for j in range(count):
            store(y, j, load(exponentials, j, FP32) * by, dtype)


@numba_glue.jit
def _rows(x, y, x_stride, first, last, n, past, log, dtype):
    held, block = buffer(BLOCK)
    row_held, exponentials = buffer(n)  # they wait in fp32 for their sum, so that each is computed once
    for row in range(first, last):
        x_row, y_row = at(x, row * x_stride, dtype), at(y, row * n, dtype)
        top = row_top(x_row, n, dtype)
        total = _exponentials(x_row, exponentials, n, x_stride, top, log, dtype)
        by = f32(np.log(total)) if log else f32(1) / total
        if past:
            for start in range(0, n, BLOCK):
                count, x_block, e_block = min(BLOCK, n - start), at(x_row, start, dtype), at(exponentials, start, FP32)
                _results(x_block, e_block, block, count, top, by, log, dtype)
                stream(block, at(y_row, start, dtype), count, dtype)
        else:
            _results(x_row, exponentials, y_row, n, top, by, log, dtype)
    if past:
        finish()
    held[0] = row_held[0] = f32(0)  # only addresses were used: without this Numba would free them before the loop


@numba_glue.kernel
def _softmax(threads, x, y, x_stride, m, n, least, log, dtype):
    past = too_large(y, m, n, least, dtype)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _rows(x, y, x_stride, part * m // threads, (part + 1) * m // threads, n, past, log, dtype)
    else:
        _rows(x, y, x_stride, ZERO, m, n, past, log, dtype)


@numba_glue.jit
def _sum_backward(dy, y, n, log, dtype):
    total = f32(0)
    if log:
        for j in range(n):
            total += load(dy, j, dtype)
    else:
        for j in range(n):
            total += load(dy, j, dtype) * load(y, j, dtype)
    return total


@numba_glue.jit
def _gradients(dy, y, dx, count, total, log, dtype):
    if log:
        for j in range(count):
            store(dx, j, load(dy, j, dtype) - exp(load(y, j, dtype)) * total, dtype)
    else:
        for j in range(count):
            store(dx, j, load(y, j, dtype) * (load(dy, j, dtype) - total), dtype)


@numba_glue.jit
def _rows_backward(dy, y, dx, dy_stride, y_stride, first, last, n, past, log, dtype):
    held, block = buffer(BLOCK)
    for row in range(first, last):
        dy_row, y_row, dx_row = at(dy, row * dy_stride, dtype), at(y, row * y_stride, dtype), at(dx, row * n, dtype)
        total = _sum_backward(dy_row, y_row, n, log, dtype)
        if past:
            for start in range(0, n, BLOCK):
                count = min(BLOCK, n - start)
                ahead(at(dy_row, start + dy_stride, dtype), count, dtype)
                ahead(at(y_row, start + y_stride, dtype), count, dtype)
                _gradients(at(dy_row, start, dtype), at(y_row, start, dtype), block, count, total, log, dtype)
                stream(block, at(dx_row, start, dtype), count, dtype)
        else:
            _gradients(dy_row, y_row, dx_row, n, total, log, dtype)
    if past:
        finish()
    held[0] = f32(0)  # only its address was used: without this Numba would free it before the loop


@numba_glue.kernel
def _softmax_backward(threads, dy, y, dx, dy_stride, y_stride, m, n, least, log, dtype):
    past = too_large(dx, m, n, least, dtype)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)
            first, last = part * m // threads, (part + 1) * m // threads
            _rows_backward(dy, y, dx, dy_stride, y_stride, first, last, n, past, log, dtype)
    else:
        _rows_backward(dy, y, dx, dy_stride, y_stride, ZERO, m, n, past, log, dtype)


def _forward(outs, args, log):
    """Kernel and launch arguments, of tensors for a run and of specs for a compile."""
    (x,) = args
    m, n, stride = rows(x)
    return _softmax, (x, outs[0]), stride, m, n, numba_stream.LEAST, log


def _backward(outs, args, log):
    dy, y = args
    m, n, stride = rows(dy)
    return _softmax_backward, (dy, y, outs[0]), stride, rows(y).stride, m, n, numba_stream.LEAST, log


def compile(outs, specs, log: bool) -> Artifact:
    return numba_glue.legacy_compile(*_forward(outs, specs, log))


def run(outs, args, config: Config, log: bool) -> None:
    kernel, *arguments = _forward(outs, args, log)
    numba_glue.legacy_launch(kernel, config.parallel, *arguments)


def compile_backward(outs, specs, log: bool) -> Artifact:
    return numba_glue.legacy_compile(*_backward(outs, specs, log))


def run_backward(outs, args, config: Config, log: bool) -> None:
    kernel, *arguments = _backward(outs, args, log)
    numba_glue.legacy_launch(kernel, config.parallel, *arguments)
