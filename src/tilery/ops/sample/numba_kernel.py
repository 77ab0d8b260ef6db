"""Rows in parallel over the cores: thresholds are found by halving the values between, then one wins.

A row waits as ranks, integers that order as its values do: to halve between two is exact, and NaN is out of the way.
"""

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import ZERO, at, exp, f32, load, rank, store_integer, unrank
from tilery.ops.sample import outputs, quarter
from tilery.parts import numba_rows
from tilery.parts.numba_rows import Config
from tilery.parts.rows import rows

archs = numba_rows.archs

_LOW = np.uint64(0xFFFFFFFF)
_CLOSEST = 1 - 2.0**-24  # to 1, in fp32


def refusal(logits: TensorSpec, config: Config | None = None) -> str | None:
    return numba_rows.refusal(logits)


def default(logits: TensorSpec) -> Config:
    return numba_rows.default(logits, least=2**14)


def configs(logits: TensorSpec) -> list[Config]:
    return numba_rows.configs()


@numba_glue.jit
def _amount(ranks, n, least, top, scale, count):
    """Of values whose rank is at least `least`: how many, or the sum of exp((x - top) · scale)."""
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


@numba_glue.jit
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


@numba_glue.jit
def _philox(seed, column, row):
    """Four words of 32 bits, in uint64: the op says which."""
    key, other_key = seed & _LOW, seed >> np.uint64(32)
    a, b, c, d = np.uint64(column), np.uint64(row), np.uint64(0), np.uint64(0)
    for _ in range(10):
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b = (y >> np.uint64(32)) ^ b ^ key, y & _LOW
        c, d = (x >> np.uint64(32)) ^ d ^ other_key, x & _LOW
        key, other_key = (key + np.uint64(0x9E3779B9)) & _LOW, (other_key + np.uint64(0xBB67AE85)) & _LOW
    return a, b, c, d


@numba_glue.jit
def _winner(ranks, n, q, least, cutoff, seed, row, scale):
    best, index = -np.inf, 0
    for counter in range(q):
        words = _philox(seed, counter, row)
        for j in range(4):
            column = j * q + counter
            if column < n and ranks[column] >= least and unrank(ranks[column]) >= cutoff:
                score = np.float64(unrank(ranks[column]))
                if scale > 0:
                    u = min((np.float64(words[j]) + 0.5) * 2.0**-32, _CLOSEST)
                    score = score * scale - np.log(-np.log1p(-u))
                if score > best or (score == best and column < index):
                    best, index = score, column
    return index


@numba_glue.jit
def _rows(x, y, x_stride, first, last, n, q, seed, temperature, top_k, top_p, min_p, dtype):
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


@numba_glue.kernel
def _sample(threads, x, y, x_stride, m, n, q, seed, temperature, top_k, top_p, min_p, dtype):
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            first, last = part * m // threads, (part + 1) * m // threads
            _rows(x, y, x_stride, first, last, n, q, np.uint64(seed), temperature, top_k, top_p, min_p, dtype)
    else:
        _rows(x, y, x_stride, ZERO, m, n, q, np.uint64(seed), temperature, top_k, top_p, min_p, dtype)


def _arguments(outs, logits, seed=0, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    m, n, stride = rows(logits)
    numbers = float(temperature), top_k, float(top_p), float(min_p)
    return (logits, outs[0]), stride, m, n, quarter(n), seed, *numbers


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_sample, *_arguments(outputs(*specs), *specs))


def run(outs, args, config: Config) -> None:
    numba_glue.legacy_launch(_sample, config.parallel, *_arguments(outs, *args))
