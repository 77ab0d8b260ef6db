"""Products of scaled fp8 matrices on the CPU: widened and scaled while packed, then fp32 products of tiles.

Few rows of a are widened once for all; each row of b then meets them in stretches that stay in the first cache.
"""

from dataclasses import dataclass
from math import ceil, gcd

import numpy as np
import torch
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import (
    COLUMNS,
    DEPTH,
    FP32,
    ONE,
    ROWS,
    STORAGE,
    ZERO,
    at,
    f32,
    load,
    multiply,
    store,
)
from tilery.parts.fp8 import GROUP
from tilery.parts.fp8_products import outputs, scale_steps

archs = ("cpu",)

_BLOCK_M = 96  # rows of a packed at a time
_FEW = 16  # rows of a; n=4096, k=1024 on a Zen 4 core: 3.8 ms by dot products, 4.6 by tiles; 24 rows: 5.4 and 4.7
_FP16, _BF16 = STORAGE[torch.float16], STORAGE[torch.bfloat16]
_E4M3, _E5M2 = STORAGE[torch.float8_e4m3fn], STORAGE[torch.float8_e5m2]
# Formats are numbers at run time: a kernel for each of the twelve combinations would be compiled for minutes.
_FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
_OUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@dataclass(frozen=True)
class Config:
    tile_m: int  # of c, in multiples of the register tile; 0 x 0 for dot products
    tile_n: int
    parallel: bool


def refusal(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config | None = None
) -> str | None:
    tile_m, tile_n = (config.tile_m, config.tile_n) if config else (ROWS, COLUMNS)
    if tile_m % ROWS or tile_n % COLUMNS or min(tile_m, tile_n) < 0 or (tile_m == 0) != (tile_n == 0):
        return f"tile of {tile_m} x {tile_n} is not made of register tiles of {ROWS} x {COLUMNS}"
    return numba_elements.refusal(a._replace(dtype=torch.float16))  # one kernel writes every dtype


def default(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> Config:
    return _even(a, b, *((0, 0) if a.shape[0] <= _FEW else (528, 512)))


def configs(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> list[Config]:
    sizes = [(m, n) for m in (264, 528, 1056) for n in (128, 256, 512, 1024)]
    sizes += [(0, 0)] if a.shape[0] <= 4 * _FEW else []
    return list(dict.fromkeys(_even(a, b, *size) for size in sizes))


def _even(a: TensorSpec, b: TensorSpec, most_m: int, most_n: int) -> Config:
    """Equal tiles of about the given size, and as many as keep every thread busy."""
    m, k, n = max(a.shape[0], 1), a.shape[1], max(b.shape[0], 1)
    parallel = m * n * k >= 2**19  # less work does not pay for waking threads
    if most_m == 0:
        return Config(0, 0, parallel)
    tiles_m, threads = ceil(m / most_m), numba_glue.threads(parallel)
    step = threads // gcd(threads, tiles_m)
    tiles_n = min(ceil(n / most_n / step) * step, ceil(n / COLUMNS))
    return Config(ceil(m / tiles_m / ROWS) * ROWS, ceil(n / tiles_n / COLUMNS) * COLUMNS, parallel)


def workspace(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config
) -> tuple[TensorSpec, ...]:
    """For each thread blocks of a and b, a tile of c, a stretch of b; for dot products all of a, a stretch, sums."""
    m, k = a.shape
    floats = _BLOCK_M * DEPTH + DEPTH * config.tile_n + config.tile_m * config.tile_n + DEPTH
    if config.tile_m == 0:
        floats = m * k + GROUP + m
    return (TensorSpec.contiguous((numba_glue.threads(config.parallel), floats), torch.float32, a.device),)


@numba_glue.jit
def _widen(source, target, count, scale, kind):
    """fp8 values, times the scale."""
    if kind == 0:
        for i in range(count):
            store(target, i, load(source, i, _E4M3) * scale, FP32)
    else:
        for i in range(count):
            store(target, i, load(source, i, _E5M2) * scale, FP32)


@numba_glue.jit
def _write(value, c, index, kind):
    if kind == 0:
        store(c, index, value, FP32)
    elif kind == 1:
        store(c, index, value, _FP16)
    else:
        store(c, index, value, _BF16)


@numba_glue.jit
def _widen_rows(x, scales, target, i0, k0, rows, depth, how, target_stride):
    """Scales a block of `rows` × `depth` values from row i0 and column k0, a multiple of 128, on."""
    kind, x_row, high, s_row, s_column = how
    for i in range(i0, i0 + rows):
        for start in range(0, depth, GROUP):
            scale = load(scales, i // high * s_row + (k0 + start) // GROUP * s_column, FP32)
            source, goal = at(x, i * x_row + k0 + start, _E4M3), at(target, (i - i0) * target_stride + start, FP32)
            _widen(source, goal, min(GROUP, depth - start), scale, kind)


@numba_glue.jit
def _widen_panel(x, scales, panel, stretch, j0, k0, columns, depth, how):
    """The same of rows that become columns; through a stretch: 0.5 ns a value on a Zen 4 core, 1.1 without."""
    for j in range(columns):
        _widen_rows(x, scales, stretch, j0 + j, k0, 1, depth, how, 0)
        for p in range(depth):
            store(panel, p * COLUMNS + j, load(stretch, p, FP32), FP32)


@numba_glue.jit
def _dots(first, last, a, a_scale, b, b_scale, c, work, m, n, k, a_how, b_how, out):
    wide, stretch, sums = work, at(work, m * k, FP32), at(work, m * k + GROUP, FP32)
    if first < last:
        _widen_rows(a, a_scale, wide, 0, 0, m, k, a_how, k)
    for j in range(first, last):
        for i in range(m):
            store(sums, i, f32(0), FP32)
        for k0 in range(0, k, GROUP):
            depth = min(GROUP, k - k0)
            _widen_rows(b, b_scale, stretch, j, k0, 1, depth, b_how, 0)
            for i in range(m):
                total = f32(0)
                for p in range(depth):
                    total += load(wide, i * k + k0 + p, FP32) * load(stretch, p, FP32)
                store(sums, i, load(sums, i, FP32) + total, FP32)
        for i in range(m):
            _write(load(sums, i, FP32), c, i * n + j, out)


@numba_glue.jit
def _part(first, step, a, a_scale, b, b_scale, c, work, size, m, n, k, a_how, b_how, out, tile_m, tile_n):
    """Every `step`-th tile of c; what lies in the blocks past the edges of a and b reaches only what is past c's."""
    work = at(work, first * size, FP32)
    if tile_m == 0:
        _dots(first * n // step, (first + 1) * n // step, a, a_scale, b, b_scale, c, work, m, n, k, a_how, b_how, out)
        return
    a_block, b_block = work, at(work, _BLOCK_M * DEPTH, FP32)
    tile = at(b_block, DEPTH * tile_n, FP32)
    stretch = at(tile, tile_m * tile_n, FP32)
    tiles_m, tiles_n = (m + tile_m - 1) // tile_m, (n + tile_n - 1) // tile_n
    for t in range(first, tiles_m * tiles_n, step):
        i0, j0 = t % tiles_m * tile_m, t // tiles_m * tile_n
        height, width = min(tile_m, m - i0), min(tile_n, n - j0)
        for i in range(tile_m * tile_n):
            store(tile, i, f32(0), FP32)
        for k0 in range(0, k, DEPTH):
            depth = min(DEPTH, k - k0)
            for j in range(0, width, COLUMNS):
                panel = at(b_block, j * DEPTH, FP32)
                _widen_panel(b, b_scale, panel, stretch, j0 + j, k0, min(COLUMNS, width - j), depth, b_how)
            for i in range(0, height, _BLOCK_M):
                rows = min(_BLOCK_M, height - i)
                _widen_rows(a, a_scale, a_block, i0 + i, k0, rows, depth, a_how, DEPTH)
                for j in range(0, width, COLUMNS):
                    panel = at(b_block, j * DEPTH, FP32)
                    for r in range(0, rows, ROWS):
                        target = at(tile, (i + r) * tile_n + j, FP32)
                        multiply(at(a_block, r * DEPTH, FP32), panel, target, tile_n, depth)
        for i in range(height):
            for j in range(width):
                _write(load(tile, i * tile_n + j, FP32), c, (i0 + i) * n + j0 + j, out)


@numba_glue.kernel
def _product(threads, a_scale, a, b_scale, b, c, work, size, m, n, k, a_how, b_how, out, tile_m, tile_n, dtype):
    if threads > 1:
        for i in prange(threads):
            one = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _part(one, threads, a, a_scale, b, b_scale, c, work, size, m, n, k, a_how, b_how, out, tile_m, tile_n)
    else:
        _part(ZERO, ONE, a, a_scale, b, b_scale, c, work, size, m, n, k, a_how, b_how, out, tile_m, tile_n)


def _arguments(outs, args, config, work):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    a, a_scale, b, b_scale, _ = args
    (m, k), n = a.shape, b.shape[0]
    a_how, b_how = (
        (_FORMATS[x.dtype], x.stride(0), *scale_steps(scale, x.shape[0])) for x, scale in ((a, a_scale), (b, b_scale))
    )
    sizes = work.shape[1], m, n, k, a_how, b_how, _OUTS[outs[0].dtype], config.tile_m, config.tile_n
    return (a_scale, a, b_scale, b, outs[0], work), *sizes  # fp32 first: it is what the kernel is specialised on


def _planned(specs, config):
    return _arguments(outputs(*specs), specs, config, *workspace(*specs, config=config))


def compile(specs, config: Config, arch: str) -> Artifact:
    return numba_glue.legacy_compile(_product, *_planned(specs, config))


def run(outs, args, config: Config, work) -> None:
    numba_glue.legacy_launch(_product, config.parallel, *_arguments(outs, args, config, work))
