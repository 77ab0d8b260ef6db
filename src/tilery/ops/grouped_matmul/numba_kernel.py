"""Tiles of all groups in turn over the cores; a group of few rows takes dot products."""

from dataclasses import dataclass

import numpy as np
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import COLUMNS, FP32, ONE, ZERO, at, f32, integer, store
from tilery.ops.grouped_matmul import outputs
from tilery.parts import numba_batches
from tilery.parts.numba_batches import tile_product

archs = ("cpu",)

_MOST_M = 264  # rows of a tile


@dataclass(frozen=True)
class Config:
    tile_m: int  # of c, in multiples of the register tile
    tile_n: int
    parallel: bool


def refusal(a: TensorSpec, b: TensorSpec, offsets: TensorSpec, config: Config | None = None) -> str | None:
    why = numba_batches.tile_refusal(config.tile_m, config.tile_n) if config else None
    return why or numba_elements.refusal(a)


def default(a: TensorSpec, b: TensorSpec, offsets: TensorSpec) -> Config:
    (rows, k), n = a.shape, b.shape[2]
    parallel = rows * n * k >= 2**19  # less work does not pay for waking threads
    most_n = min(512, max(-(-n // numba_glue.threads(parallel)), COLUMNS))  # a group alone keeps every thread busy
    return Config(*numba_batches.tile_sizes(rows, n, _MOST_M, most_n), parallel)


def configs(a: TensorSpec, b: TensorSpec, offsets: TensorSpec) -> list[Config]:
    rows, n, base = a.shape[0], b.shape[2], default(a, b, offsets)
    sizes = [
        numba_batches.tile_sizes(rows, n, most_m, most_n) for most_m in (132, 264, 528) for most_n in (128, 256, 512)
    ]
    return list(dict.fromkeys([base, *(Config(*size, base.parallel) for size in sizes)]))


def workspace(a: TensorSpec, b: TensorSpec, offsets: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    return numba_batches.workspace(config.tile_m, config.tile_n, config.parallel, a.device)


@numba_glue.jit
def _rise(offsets, groups, total):
    """Whether offsets never fall and lie between 0 and `total`."""
    before = np.int64(0)
    for group in range(groups):
        end = integer(offsets, group, 4)
        if end < before:
            return False
        before = end
    return before <= total


@numba_glue.jit
def _part(
    thread, threads, a, b, offsets, c, work, size, total, groups, n, k, a0, a1, b_group, b0, b1, tile_m, tile_n, dtype
):  # fmt: skip
    """Every `threads`-th tile, counted through all groups; every `threads`-th row that no group has."""
    own, tiles_n = at(work, thread * size, FP32), (n + tile_n - 1) // tile_n
    turn = start = np.int64(0)
    sound = _rise(offsets, groups, total)
    for group in range(groups if sound else 0):
        end = integer(offsets, group, 4)
        for i in range(start, end, tile_m):
            for t in range(tiles_n):
                if turn % threads == thread:
                    j = t * tile_n
                    a_corner, b_corner = at(a, i * a0, dtype), at(b, group * b_group + j * b1, dtype)
                    target, height, width = at(c, i * n + j, dtype), min(tile_m, end - i), min(tile_n, n - j)
                    tile_product(a_corner, b_corner, target, own, height, width, k, a0, a1, b0, b1, n, tile_n, dtype)
                turn += 1
        start = end
    for i in range(start + thread, total, threads):
        for j in range(n):
            store(c, i * n + j, f32(0) if sound else f32(np.nan), dtype)


@numba_glue.kernel
def _grouped(
    threads, a, b, offsets, c, work, size, total, groups, n, k, a0, a1, b_group, b0, b1, tile_m, tile_n, dtype
):  # fmt: skip
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _part(
                thread, threads, a, b, offsets, c, work, size, total, groups, n, k,
                a0, a1, b_group, b0, b1, tile_m, tile_n, dtype,
            )  # fmt: skip
    else:
        _part(
            ZERO, ONE, a, b, offsets, c, work, size, total, groups, n, k, a0, a1, b_group, b0, b1, tile_m, tile_n, dtype
        )  # fmt: skip


def _arguments(outs, a, b, offsets, config: Config, work):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    (total, k), (groups, _, n) = a.shape, b.shape
    strides = a.stride(0), a.stride(1), b.stride(0), b.stride(1), b.stride(2)
    sizes = work.shape[1], total, groups, n, k
    return (a, b, offsets, outs[0], work), *sizes, *strides, config.tile_m, config.tile_n


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_grouped, *_arguments(outputs(*specs), *specs, config, *workspace(*specs, config)))


def run(outs, args, config: Config, work) -> None:
    numba_glue.legacy_launch(_grouped, config.parallel, *_arguments(outs, *args, config, work))
