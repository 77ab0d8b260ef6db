"""Tiles of c over the cores: packed into caches as fp32, multiplied in registers; few rows of a take dot products."""

from dataclasses import dataclass
from math import ceil, gcd

import numpy as np
import torch
from numba import prange

from tilery.backends import numba_glue
from tilery.backends.numba_glue import COLUMNS, DEPTH, FP32, ROWS, at, f32, load, multiply, store
from tilery.ops.matmul import outputs
from tilery.parts.numba_tiles import pack
from tilery.spec import Artifact, TensorSpec

archs = ("cpu",)

_BLOCK_M = 96  # rows of a packed at a time


@dataclass(frozen=True)
class Config:
    tile_m: int  # of c, in multiples of the register tile; 0 x 0 for dot products
    tile_n: int
    parallel: bool


def refusal(a: TensorSpec, b: TensorSpec, config: Config | None = None) -> str | None:
    tile_m, tile_n = (config.tile_m, config.tile_n) if config else (ROWS, COLUMNS)
    if tile_m == tile_n == 0 and not _contiguous_k(a, b):
        return f"dot products need rows of a and columns of b contiguous, got strides {a.strides} and {b.strides}"
    if tile_m % ROWS or tile_n % COLUMNS or min(tile_m, tile_n) < 0 or (tile_m == 0) != (tile_n == 0):
        return f"tile of {tile_m} x {tile_n} is not made of register tiles of {ROWS} x {COLUMNS}"
    return numba_glue.refusal(a)


def default(a: TensorSpec, b: TensorSpec) -> Config:
    return _even(a, b, *((0, 0) if a.shape[0] <= 8 and _contiguous_k(a, b) else (528, 512)))


def configs(a: TensorSpec, b: TensorSpec) -> list[Config]:
    sizes = [(m, n) for m in (264, 528, 1056) for n in (128, 256, 512, 1024)]
    sizes += [(0, 0)] if a.shape[0] <= 16 and _contiguous_k(a, b) else []
    return list(dict.fromkeys(_even(a, b, *size) for size in sizes))


def _contiguous_k(a: TensorSpec, b: TensorSpec) -> bool:
    return a.stride(1) == 1 and b.stride(0) == 1


def _even(a: TensorSpec, b: TensorSpec, most_m: int, most_n: int) -> Config:
    """Equal tiles of about the given size, and as many as keep every thread busy."""
    m, k, n = max(a.shape[0], 1), a.shape[1], max(b.shape[1], 1)
    parallel = m * n * k >= 2**19  # less work does not pay for waking threads
    if most_m == 0:
        return Config(0, 0, parallel)
    tiles_m, threads = ceil(m / most_m), numba_glue.threads(parallel)
    step = threads // gcd(threads, tiles_m)
    tiles_n = min(ceil(n / most_n / step) * step, ceil(n / COLUMNS))
    return Config(ceil(m / tiles_m / ROWS) * ROWS, ceil(n / tiles_n / COLUMNS) * COLUMNS, parallel)


def workspace(a: TensorSpec, b: TensorSpec, config: Config) -> tuple[TensorSpec, ...]:
    """For each thread a block of a, a block of b and a tile of c."""
    floats = _BLOCK_M * DEPTH + DEPTH * config.tile_n + config.tile_m * config.tile_n
    return (TensorSpec.contiguous((numba_glue.threads(config.parallel), floats), torch.float32, a.device),)


@numba_glue.jit
def _dots(first, last, a, b, c, m, n, k, a0, b1, dtype):
    for j in range(first, last):
        for i in range(m):
            total = f32(0)
            for p in range(k):
                total += load(a, i * a0 + p, dtype) * load(b, j * b1 + p, dtype)
            store(c, i * n + j, total, dtype)


@numba_glue.jit
def _part(first, step, a, b, c, work, size, m, n, k, a0, a1, b0, b1, tile_m, tile_n, dtype):
    """Every `step`-th tile of c; what lies in the blocks past the edges of a and b reaches only what is past c's."""
    if tile_m == 0:
        _dots(first * n // step, (first + 1) * n // step, a, b, c, m, n, k, a0, b1, dtype)
        return
    a_block = at(work, first * size, FP32)
    b_block = at(a_block, _BLOCK_M * DEPTH, FP32)
    tile = at(b_block, DEPTH * tile_n, FP32)
    tiles_m, tiles_n = (m + tile_m - 1) // tile_m, (n + tile_n - 1) // tile_n
    for t in range(first, tiles_m * tiles_n, step):
        i0, j0 = t % tiles_m * tile_m, t // tiles_m * tile_n
        height, width = min(tile_m, m - i0), min(tile_n, n - j0)
        for i in range(tile_m * tile_n):
            store(tile, i, f32(0), FP32)
        for k0 in range(0, k, DEPTH):
            depth = min(DEPTH, k - k0)
            for j in range(0, width, COLUMNS):
                corner, panel = at(b, k0 * b0 + (j0 + j) * b1, dtype), at(b_block, j * DEPTH, FP32)
                pack(corner, panel, depth, min(COLUMNS, width - j), b0, b1, COLUMNS, dtype)
            for i in range(0, height, _BLOCK_M):
                corner, rows = at(a, (i0 + i) * a0 + k0 * a1, dtype), min(_BLOCK_M, height - i)
                pack(corner, a_block, rows, depth, a0, a1, DEPTH, dtype)
                for j in range(0, width, COLUMNS):
                    panel = at(b_block, j * DEPTH, FP32)
                    for r in range(0, rows, ROWS):
                        target = at(tile, (i + r) * tile_n + j, FP32)
                        multiply(at(a_block, r * DEPTH, FP32), panel, target, tile_n, depth)
        for i in range(height):
            for j in range(width):
                store(c, (i0 + i) * n + j0 + j, load(tile, i * tile_n + j, FP32), dtype)


@numba_glue.kernel
def _matmul(threads, a, b, c, work, size, m, n, k, a0, a1, b0, b1, tile_m, tile_n, dtype):
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _part(thread, threads, a, b, c, work, size, m, n, k, a0, a1, b0, b1, tile_m, tile_n, dtype)
    else:
        _part(0, 1, a, b, c, work, size, m, n, k, a0, a1, b0, b1, tile_m, tile_n, dtype)


def _arguments(outs, a, b, config, work):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    (m, k), n = a.shape, b.shape[1]
    strides = a.stride(0), a.stride(1), b.stride(0), b.stride(1)
    return (a, b, outs[0], work), work.shape[1], m, n, k, *strides, config.tile_m, config.tile_n


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.compile(_matmul, *_arguments(outputs(*specs), *specs, config, *workspace(*specs, config)))


def run(outs, args, config: Config, work) -> None:
    numba_glue.launch(_matmul, config.parallel, *_arguments(outs, *args, config, work))
