"""Tiles of all matrices over the cores."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import COLUMNS, FP32, ONE, ZERO, at
from tilery.ops.bmm import outputs
from tilery.parts import numba_batches
from tilery.parts.numba_batches import tile_product

archs = ("cpu",)


@dataclass(frozen=True)
class Config:
    tile_m: int  # of c, in multiples of the register tile
    tile_n: int
    parallel: bool


def refusal(a: TensorSpec, b: TensorSpec, config: Config | None = None) -> str | None:
    why = numba_batches.tile_refusal(config.tile_m, config.tile_n) if config else None
    return why or numba_elements.refusal(a)


def default(a: TensorSpec, b: TensorSpec) -> Config:
    (count, m, k), n = a.shape, b.shape[2]
    parallel = count * m * n * k >= 2**19  # less work does not pay for waking threads
    tile_m, tile_n = numba_batches.tile_sizes(m, n)
    threads = numba_glue.threads(parallel)
    if count * ceil(m / tile_m) * ceil(n / tile_n) < threads:  # fewer tiles than threads: narrower ones
        tile_n = numba_batches.even(n, max(ceil(n / threads), COLUMNS), COLUMNS)
    return Config(tile_m, tile_n, parallel)


def configs(a: TensorSpec, b: TensorSpec) -> list[Config]:
    (_, m, _), n, base = a.shape, b.shape[2], default(a, b)
    sizes = [
        numba_batches.tile_sizes(m, n, most_m, most_n) for most_m in (264, 528) for most_n in (128, 256, 512, 1024)
    ]
    return list(dict.fromkeys([base, *(Config(*size, base.parallel) for size in sizes)]))


def workspace(a: TensorSpec, b: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    return numba_batches.workspace(config.tile_m, config.tile_n, config.parallel, a.device)


@numba_glue.jit
def _part(
    first, step, a, b, c, work, size, count, m, n, k, a_batch, a0, a1, b_batch, b0, b1, tile_m, tile_n, dtype
):  # fmt: skip
    """Every `step`-th tile."""
    tiles_m, tiles_n = (m + tile_m - 1) // tile_m, (n + tile_n - 1) // tile_n
    for t in range(first, count * tiles_m * tiles_n, step):
        batch, rest = t // (tiles_m * tiles_n), t % (tiles_m * tiles_n)
        i, j = rest % tiles_m * tile_m, rest // tiles_m * tile_n
        a_corner, b_corner = at(a, batch * a_batch + i * a0, dtype), at(b, batch * b_batch + j * b1, dtype)
        target, own = at(c, (batch * m + i) * n + j, dtype), at(work, first * size, FP32)
        height, width = min(tile_m, m - i), min(tile_n, n - j)
        tile_product(a_corner, b_corner, target, own, height, width, k, a0, a1, b0, b1, n, tile_n, dtype)


@numba_glue.kernel
def _bmm(threads, a, b, c, work, size, count, m, n, k, a_batch, a0, a1, b_batch, b0, b1, tile_m, tile_n, dtype):
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _part(
                thread, threads, a, b, c, work, size, count, m, n, k,
                a_batch, a0, a1, b_batch, b0, b1, tile_m, tile_n, dtype,
            )  # fmt: skip
    else:
        _part(ZERO, ONE, a, b, c, work, size, count, m, n, k, a_batch, a0, a1, b_batch, b0, b1, tile_m, tile_n, dtype)


def _arguments(outs, a, b, config: Config, work):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    (count, m, k), n = a.shape, b.shape[2]
    strides = [x.stride(d) for x in (a, b) for d in range(3)]
    return (a, b, outs[0], work), work.shape[1], count, m, n, k, *strides, config.tile_m, config.tile_n


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_bmm, *_arguments(outputs(*specs), *specs, config, *workspace(*specs, config)))


def run(outs, args, config: Config, work) -> None:
    numba_glue.legacy_launch(_bmm, config.parallel, *_arguments(outs, *args, config, work))
