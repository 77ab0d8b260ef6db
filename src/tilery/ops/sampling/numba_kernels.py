"""argmax, sample and topk_softmax in Numba: rows in parallel over the cores."""

import numpy as np
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages.numba_elements import (
    FP32,
    STORAGE,
    ZERO,
    at,
    exp,
    f32,
    load,
    rank,
    store,
    store_integer,
    unrank,
)
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.memory.numba_philox import words
from tilery.ops.memory.philox import BELOW_ONE, quarter
from tilery.ops.rows.numba_rows import Config, NumbaRows
from tilery.ops.sampling.numba_topk import order, pick
from tilery.ops.softmax.numba_kernels import row_sums

# argmax: a row's maximum, then the first place that has it


@jit
def _argmax_row(x, y, row, n, dtype):
    top = np.int32(-(2**31))
    for j in range(n):
        top = max(top, order(load(x, j, dtype)))
    j = 0
    while order(load(x, j, dtype)) != top:
        j += 1
    store_integer(y, row, j, 8)


@kernel
def _argmax(threads, x, y, x_stride, m, n, dtype):
    if threads > 1:
        for i in prange(m):
            row = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _argmax_row(at(x, row * x_stride, dtype), y, row, n, dtype)
    else:
        for row in range(m):
            _argmax_row(at(x, row * x_stride, dtype), y, row, n, dtype)


class Argmax(NumbaRows):
    least = 2**17

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"x": call.logits, "y": call.index, "x_stride": stride, "m": m, "n": n}
        args |= {"dtype": STORAGE[call.logits.dtype]}
        return [Launch(_argmax, 1, args, options={"parallel": config.parallel})]


# sample: thresholds are found by bisection over ranks, then one wins. A row waits as ranks, integers that order as its
# values do: bisection between two is exact, and NaN is out of the way.


@jit
def _amount(ranks, n, least, top, scale, count):
    """Count of the values whose rank is at least `least`, or the sum of their exp((x - top) · scale)."""
    if count:
        found = 0
        for j in range(n):
            found += 1 if ranks[j] >= least else 0
        return f32(found)
    total = f32(0)
    for j in range(n):
        worth = exp((unrank(ranks[j]) - top) * scale)
        total += worth if ranks[j] >= least else f32(0)
    return total


@jit
def _threshold(ranks, n, low, wanted, top, scale, count):
    """The largest rank from `low` on whose amount is `wanted` at least."""
    high = np.int64(rank(top)) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if _amount(ranks, n, np.int32(middle), top, scale, count) >= wanted:
            low = middle
        else:
            high = middle
    return low


@jit
def _words(seed, column, row):
    """Four words of 32 bits, all of one type: the op says which."""
    a, b, c, d = words(seed, seed >> 32, column, row)
    return np.uint64(a), np.uint64(b), np.uint64(c), np.uint64(d)


@jit
def _winner(ranks, n, q, least, cutoff, seed, row, scale):
    best, index = -np.inf, 0
    for counter in range(q):
        drawn = _words(seed, counter, row)
        for j in range(4):
            column = j * q + counter
            if column < n and ranks[column] >= least and unrank(ranks[column]) >= cutoff:
                score = np.float64(unrank(ranks[column]))
                if scale > 0:
                    u = min((np.float64(drawn[j]) + 0.5) * 2.0**-32, BELOW_ONE)
                    score = score * scale - np.log(-np.log1p(-u))
                if score > best or (score == best and column < index):
                    best, index = score, column
    return index


@jit
def _sample_rows(x, y, x_stride, first, last, n, q, seed, temperature, top_k, top_p, min_p, dtype):
    ranks = np.empty(n, np.int32)
    lowest = rank(f32(-np.inf))
    scale = 1 / temperature if temperature > 0 else 0.0
    for row in range(first, last):
        x_row, top = at(x, row * x_stride, dtype), lowest
        for j in range(n):
            value = load(x_row, j, dtype)
            known = lowest if value != value else rank(value)
            ranks[j] = np.int32(0) if value == 0 else known
            top = max(top, ranks[j])
        least, cutoff, top_value = np.int64(lowest), -np.inf, unrank(top)
        if temperature > 0:
            if 0 < top_k < n:
                least = _threshold(ranks, n, least, f32(top_k), top_value, f32(scale), True)
            if top_p < 1:
                total = _amount(ranks, n, np.int32(least), top_value, f32(scale), False)
                least = _threshold(ranks, n, least, f32(top_p * total), top_value, f32(scale), False)
            if min_p > 0:
                cutoff = top_value + temperature * np.log(min_p)
        store_integer(y, row, _winner(ranks, n, q, np.int32(least), cutoff, seed, row, scale), 8)


@kernel
def _sample(threads, x, y, x_stride, m, n, q, seed, temperature, top_k, top_p, min_p, dtype):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            _sample_rows(x, y, x_stride, first, last, n, q, seed, temperature, top_k, top_p, min_p, dtype)
    else:
        _sample_rows(x, y, x_stride, ZERO, m, n, q, seed, temperature, top_k, top_p, min_p, dtype)


class Sample(NumbaRows):
    least = 2**14

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"x": call.logits, "y": call.index, "x_stride": stride, "m": m, "n": n, "q": quarter(n)}
        args |= {"seed": call.seed, "temperature": call.temperature, "top_k": call.top_k, "top_p": call.top_p}
        args |= {"min_p": call.min_p, "dtype": STORAGE[call.logits.dtype]}
        return [Launch(_sample, 1, args, options={"parallel": config.parallel})]


# topk_softmax: the k largest so far are kept in order, and few logits get in among them


@jit
def _topk_rows(x, weights, indices, x_stride, first, last, n, k, renormalize, dtype):
    found, places = np.empty(k, np.int32), np.empty(k, np.int64)
    for row in range(first, last):
        x_row = at(x, row * x_stride, dtype)
        pick(x_row, n, k, found, places, dtype)
        top, total, _ = row_sums(x_row, n, False, dtype)
        if renormalize:
            total = f32(0)
            for i in range(k):
                total += exp(load(x_row, places[i], dtype) - top)
        for i in range(k):
            store(weights, row * k + i, exp(load(x_row, places[i], dtype) - top) / total, FP32)
            store_integer(indices, row * k + i, places[i], 4)


@kernel
def _topk_softmax(threads, x, weights, indices, x_stride, m, n, k, renormalize, dtype):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            _topk_rows(x, weights, indices, x_stride, first, last, n, k, renormalize, dtype)
    else:
        _topk_rows(x, weights, indices, x_stride, ZERO, m, n, k, renormalize, dtype)


class TopkSoftmax(NumbaRows):
    least = 2**15

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"x": call.logits, "weights": call.weights, "indices": call.indices, "x_stride": stride, "m": m, "n": n}
        args |= {"k": call.k, "renormalize": call.renormalize, "dtype": STORAGE[call.logits.dtype]}
        return [Launch(_topk_softmax, 1, args, options={"parallel": config.parallel})]


argmax, sample, topk_softmax = Argmax(), Sample(), TopkSoftmax()
