"""Rows in parallel over the cores; the k largest so far are kept in order, and few logits get in among them."""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, ZERO, at, exp, f32, load, store, store_integer
from tilery.ops.topk_softmax import outputs
from tilery.parts import numba_rows
from tilery.parts.numba_order import order
from tilery.parts.numba_rows import Config
from tilery.parts.numba_softmax import row_sums
from tilery.parts.rows import rows

archs = numba_rows.archs


def refusal(logits: TensorSpec, k: int, renormalize: bool, config: Config | None = None) -> str | None:
    return numba_rows.refusal(logits)


def default(logits: TensorSpec, k: int, renormalize: bool) -> Config:
    return numba_rows.default(logits, least=2**15)


def configs(logits: TensorSpec, k: int, renormalize: bool) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _pick(x, n, k, found, places, dtype):
    """The k largest of a row in order, the lower index first of equals."""
    count = 0
    for j in range(n):
        value = order(load(x, j, dtype))
        if count == k and value <= found[k - 1]:
            continue
        count = min(count + 1, k)
        i = count - 1
        while i > 0 and found[i - 1] < value:
            found[i], places[i] = found[i - 1], places[i - 1]
            i -= 1
        found[i], places[i] = value, j


@numba_glue.jit
def _rows(x, weights, indices, x_stride, first, last, n, k, renormalize, dtype):
    found, places = np.empty(k, np.int32), np.empty(k, np.int64)
    for row in range(first, last):
        x_row = at(x, row * x_stride, dtype)
        _pick(x_row, n, k, found, places, dtype)
        top, total, _ = row_sums(x_row, n, False, dtype)
        if renormalize:
            total = f32(0)
            for i in range(k):
                total += exp(load(x_row, places[i], dtype) - top)
        for i in range(k):
            store(weights, row * k + i, exp(load(x_row, places[i], dtype) - top) / total, FP32)
            store_integer(indices, row * k + i, places[i], 4)


@numba_glue.kernel
def _topk_softmax(threads, x, weights, indices, x_stride, m, n, k, renormalize, dtype):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            _rows(x, weights, indices, x_stride, first, last, n, k, renormalize, dtype)
    else:
        _rows(x, weights, indices, x_stride, ZERO, m, n, k, renormalize, dtype)


def _arguments(outs, logits, k, renormalize):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(logits)
    return (logits, *outs), stride, m, n, k, renormalize


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_topk_softmax, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_topk_softmax, config.parallel, *_arguments(outs, *args))
