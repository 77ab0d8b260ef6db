"""Numba kernels of softmax, its logarithm and their backwards: rows in parallel over the cores."""

import numpy as np
from numba import prange

from tilery.backends import numba_glue
from tilery.backends.numba_glue import at, exp, f32, load, rank, store, unrank
from tilery.parts import numba_rows
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows
from tilery.spec import Artifact, TensorSpec

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
def row_sums(x, n, dtype):
    """max(x), sum(exp(x - max(x))) and sum(x)."""
    top = rank(f32(-np.inf))
    plain, total = f32(0), f32(0)
    for j in range(n):
        value = load(x, j, dtype)
        plain += value
        top = max(top, rank(value))
    top_value = unrank(top)
    for j in range(n):
        total += exp(load(x, j, dtype) - top_value)
    return top_value, total, plain


@numba_glue.jit
def _rows(x, y, x_stride, first, last, n, log, dtype):
    exponentials = np.empty(n, np.float32)  # they wait in fp32 for their sum, so that each is computed once
    for row in range(first, last):
        x_row, y_row = at(x, row * x_stride, dtype), at(y, row * n, dtype)
        top = row_top(x_row, n, dtype)
        total = f32(0)
        if log:
            for j in range(n):
                total += exp(load(x_row, j, dtype) - top)
            shift = f32(np.log(total))
            for j in range(n):
                store(y_row, j, load(x_row, j, dtype) - top - shift, dtype)
        else:
            for j in range(n):
                exponentials[j] = exp(load(x_row, j, dtype) - top)
                total += exponentials[j]
            scale = f32(1) / total
            for j in range(n):
                store(y_row, j, exponentials[j] * scale, dtype)


@numba_glue.kernel
def _softmax(threads, x, y, x_stride, m, n, log, dtype):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _rows(x, y, x_stride, part * m // threads, (part + 1) * m // threads, n, log, dtype)
    else:
        _rows(x, y, x_stride, 0, m, n, log, dtype)


@numba_glue.jit
def _row_backward(dy, y, dx, n, log, dtype):
    total = f32(0)
    if log:
        for j in range(n):
            total += load(dy, j, dtype)
        for j in range(n):
            store(dx, j, load(dy, j, dtype) - exp(load(y, j, dtype)) * total, dtype)
    else:
        for j in range(n):
            total += load(dy, j, dtype) * load(y, j, dtype)
        for j in range(n):
            store(dx, j, load(y, j, dtype) * (load(dy, j, dtype) - total), dtype)


@numba_glue.kernel
def _softmax_backward(threads, dy, y, dx, dy_stride, y_stride, m, n, log, dtype):
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)
            _row_backward(
                at(dy, row * dy_stride, dtype), at(y, row * y_stride, dtype), at(dx, row * n, dtype), n, log, dtype
            )
    else:
        for row in range(m):
            _row_backward(
                at(dy, row * dy_stride, dtype), at(y, row * y_stride, dtype), at(dx, row * n, dtype), n, log, dtype
            )


def _forward(outs, args, log):
    """Kernel and launch arguments, of tensors for a run and of specs for a compile."""
    (x,) = args
    m, n, stride = rows(x)
    return _softmax, (x, outs[0]), stride, m, n, log


def _backward(outs, args, log):
    dy, y = args
    m, n, stride = rows(dy)
    return _softmax_backward, (dy, y, outs[0]), stride, rows(y).stride, m, n, log


def compile(outs, specs, log: bool) -> Artifact:
    return numba_glue.compile(*_forward(outs, specs, log))


def run(outs, args, config: Config, log: bool) -> None:
    kernel, *arguments = _forward(outs, args, log)
    numba_glue.launch(kernel, config.parallel, *arguments)


def compile_backward(outs, specs, log: bool) -> Artifact:
    return numba_glue.compile(*_backward(outs, specs, log))


def run_backward(outs, args, config: Config, log: bool) -> None:
    kernel, *arguments = _backward(outs, args, log)
    numba_glue.launch(kernel, config.parallel, *arguments)
