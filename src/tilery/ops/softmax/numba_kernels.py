"""softmax and log_softmax in Numba, with their backwards: rows in parallel over the cores."""

from dataclasses import dataclass

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages import numba_stream
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, exp, f32, load, rank, row_max, store, unrank
from tilery.languages.numba_glue import jit, kernel
from tilery.languages.numba_stream import BLOCK, ahead, buffer, finish, stream, too_large
from tilery.ops.rows.numba_rows import Config, NumbaRows


@jit
def base(top):
    """What log(sum(exp(x))) subtracts before exp: the maximum, or 0 where it is infinite and inf - inf would be NaN."""
    return f32(0) if abs(top) == f32(np.inf) else top


@jit
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


@jit
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


@jit
def _results(x, exponentials, y, count, top, by, log, dtype):
    """`by` is 1 / sum(exp(x - top)), or the logarithm of that sum."""
    if log:
        for j in range(count):
            store(y, j, load(x, j, dtype) - top - by, dtype)
    else:
        for j in range(count):
            store(y, j, load(exponentials, j, FP32) * by, dtype)


@jit
def _rows(x, y, x_stride, first, last, n, past, log, dtype):
    held, block = buffer(BLOCK)
    row_held, exponentials = buffer(n)  # they wait in fp32 for their sum, so that each is computed once
    for row in range(first, last):
        x_row, y_row = at(x, row * x_stride, dtype), at(y, row * n, dtype)
        top = row_max(x_row, n, dtype)
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


@kernel
def _softmax(threads, x, y, x_stride, m, n, least, log, dtype):
    past = too_large(y, m, n, least, dtype)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _rows(x, y, x_stride, part * m // threads, (part + 1) * m // threads, n, past, log, dtype)
    else:
        _rows(x, y, x_stride, ZERO, m, n, past, log, dtype)


@jit
def _sum_backward(dy, y, n, log, dtype):
    total = f32(0)
    if log:
        for j in range(n):
            total += load(dy, j, dtype)
    else:
        for j in range(n):
            total += load(dy, j, dtype) * load(y, j, dtype)
    return total


@jit
def _gradients(dy, y, dx, count, total, log, dtype):
    if log:
        for j in range(count):
            store(dx, j, load(dy, j, dtype) - exp(load(y, j, dtype)) * total, dtype)
    else:
        for j in range(count):
            store(dx, j, load(y, j, dtype) * (load(dy, j, dtype) - total), dtype)


@jit
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


@kernel
def _softmax_backward(threads, dy, y, dx, dy_stride, y_stride, m, n, least, log, dtype):
    past = too_large(dx, m, n, least, dtype)
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)
            first, last = part * m // threads, (part + 1) * m // threads
            _rows_backward(dy, y, dx, dy_stride, y_stride, first, last, n, past, log, dtype)
    else:
        _rows_backward(dy, y, dx, dy_stride, y_stride, ZERO, m, n, past, log, dtype)


@dataclass(frozen=True)
class Softmax(NumbaRows):
    log: bool

    least = 2**16

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.x)
        args = {"x": call.x, "y": call.y, "x_stride": stride, "m": m, "n": n, "least": numba_stream.LEAST}
        args |= {"log": self.log, "dtype": STORAGE[call.x.dtype]}
        return [Launch(_softmax, 1, args, options={"parallel": config.parallel})]


@dataclass(frozen=True)
class SoftmaxBackward(NumbaRows):
    log: bool

    least = 2**17

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.dy)
        args = {"dy": call.dy, "y": call.y, "dx": call.dx, "dy_stride": stride, "y_stride": rows(call.y).stride}
        args |= {"m": m, "n": n, "least": numba_stream.LEAST, "log": self.log, "dtype": STORAGE[call.dy.dtype]}
        return [Launch(_softmax_backward, 1, args, options={"parallel": config.parallel})]


softmax, log_softmax = Softmax(log=False), Softmax(log=True)
softmax_backward, log_softmax_backward = SoftmaxBackward(log=False), SoftmaxBackward(log=True)
