"""Matrix products in Numba: tiles of c over the cores, packed into caches as fp32, multiplied in registers.

Few rows of a take dot products. A tile is finished (bias, activation, addend) while it is in a cache. `kernel` makes an
op's module of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

import numpy as np
import torch
from numba import prange

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import numba_elements, numba_glue
from tilery.languages.numba_elements import COLUMNS, DEPTH, FP32, ONE, ROWS, ZERO, at, f32, load, multiply, store
from tilery.parts import numba_gated
from tilery.parts.numba_gated import share
from tilery.parts.numba_tiles import pack
from tilery.parts.products import ACTIVATIONS, Product

archs = ("cpu",)

_BLOCK_M = 96  # rows of a packed at a time, and the most that dot products take
_NONE, _RELU, _GELU, _GELU_TANH, _SILU = range(5)
_ACTS = dict(zip(ACTIVATIONS, (_NONE, _RELU, _GELU, _GELU_TANH, _SILU), strict=True))
_SILU_SHARE, _TANH_SHARE, _GELU_SHARE = (numba_gated.ACTS[act] for act in ("silu", "tanh", "none"))


@dataclass(frozen=True)
class Config:
    tile_m: int  # of c, in multiples of the register tile; 0 x 0 for dot products
    tile_n: int
    parallel: bool


def _refusal(p: Product, config: Config | None) -> str | None:
    tile_m, tile_n = (config.tile_m, config.tile_n) if config else (ROWS, COLUMNS)
    if tile_m == tile_n == 0 and not _takes_dots(p, _BLOCK_M):
        return (
            f"dot products need at most {_BLOCK_M} rows, and rows of a and columns of b contiguous, got {p.m} rows "
            f"and strides {p.a_row, p.a_column} and {p.b_row, p.b_column}"
        )
    if tile_m % ROWS or tile_n % COLUMNS or min(tile_m, tile_n) < 0 or (tile_m == 0) != (tile_n == 0):
        return f"tile of {tile_m} x {tile_n} is not made of register tiles of {ROWS} x {COLUMNS}"
    return numba_elements.refusal(p.a)


def _default(p: Product) -> Config:
    return _even(p, *((0, 0) if _takes_dots(p, 8) else (528, 512)))


def _configs(p: Product) -> list[Config]:
    sizes = [(m, n) for m in (264, 528, 1056) for n in (128, 256, 512, 1024)]
    sizes += [(0, 0)] if _takes_dots(p, 16) else []
    return list(dict.fromkeys(_even(p, *size) for size in sizes))


def _takes_dots(p: Product, most_rows: int) -> bool:
    return p.m <= most_rows and p.a_column == 1 and p.b_row == 1


def _even(p: Product, most_m: int, most_n: int) -> Config:
    """Equal tiles of about the given size, halves together, and as many as keep every thread busy."""
    m, n = max(p.m, 1), max(p.n, 1)
    parallel = m * n * p.k * p.halves >= 2**19  # less work does not pay for waking threads
    if most_m == 0:
        return Config(0, 0, parallel)
    tiles_m, threads = ceil(m / most_m), numba_glue.threads(parallel)
    step = threads // gcd(threads, tiles_m)
    tiles_n = min(ceil(n * p.halves / most_n / step) * step, ceil(n / COLUMNS))
    return Config(ceil(m / tiles_m / ROWS) * ROWS, ceil(n / tiles_n / COLUMNS) * COLUMNS, parallel)


def _workspace(p: Product, config: Config) -> tuple[TensorSpec, ...]:
    """For each thread a tile of c, and for what is no dot product a block of a and one of b."""
    tile_m, tile_n, dots = _tile(p, config)
    floats = tile_m * p.halves * tile_n + (0 if dots else (_BLOCK_M + p.halves * tile_n) * DEPTH)
    return (TensorSpec.contiguous((numba_glue.threads(config.parallel), floats), torch.float32, p.a.device),)


# Epilogues


@numba_glue.jit
def _activate(row, width, act):
    if act == _RELU:
        for j in range(width):
            y = load(row, j, FP32)
            store(row, j, f32(0) if y < f32(0) else y, FP32)  # written so that NaN stays
    elif act == _GELU:
        for j in range(width):
            y = load(row, j, FP32)
            store(row, j, y * share(y, _GELU_SHARE), FP32)
    elif act == _GELU_TANH:
        for j in range(width):
            y = load(row, j, FP32)
            store(row, j, y * share(y, _TANH_SHARE), FP32)
    elif act == _SILU:
        for j in range(width):
            y = load(row, j, FP32)
            store(row, j, y * share(y, _SILU_SHARE), FP32)


@numba_glue.jit
def _finish(row, gap, target, bias, addend, addend_step, width, epilogue, dtype):
    """Sums of a row, up's `gap` after gate's where there are halves; bias and addend are 0 where there is none."""
    alpha, beta, act, halves = epilogue
    if alpha != f32(1):
        for j in range(width):
            store(row, j, alpha * load(row, j, FP32), FP32)
    if bias != 0:
        for j in range(width):
            store(row, j, load(row, j, FP32) + load(bias, j, dtype), FP32)
    _activate(row, width, act)
    if halves == 2:
        for j in range(width):
            store(row, j, load(row, j, FP32) * load(row, gap + j, FP32), FP32)
    if addend != 0:
        for j in range(width):
            store(row, j, load(row, j, FP32) + beta * load(addend, j * addend_step, dtype), FP32)
    for j in range(width):
        store(target, j, load(row, j, FP32), dtype)


# Products


@numba_glue.jit
def _dots(tile, pitch, gap, height, width, i0, j0, a, b, sizes, strides, halves, dtype):
    (_, n, k), (a0, _, _, b1) = sizes, strides
    for t in range(halves * width):  # one loop: LLVM would make code for each number of halves
        h, j = t // width, t % width
        column = at(b, (h * n + j0 + j) * b1, dtype)
        for i in range(height):
            total, row = f32(0), at(a, (i0 + i) * a0, dtype)
            for p in range(k):
                total += load(row, p, dtype) * load(column, p, dtype)
            store(tile, i * pitch + h * gap + j, total, FP32)


@numba_glue.jit
def _multiply(tile, pitch, gap, height, width, i0, j0, a, b, blocks, sizes, strides, halves, dtype):
    """What lies in the blocks past the edges of a and b reaches only what is past the tile's."""
    (_, n, k), (a0, a1, b0, b1), b_block = sizes, strides, at(blocks, _BLOCK_M * DEPTH, FP32)
    panels = (width + COLUMNS - 1) // COLUMNS  # of b's columns in each half
    for i in range((height + ROWS - 1) // ROWS * ROWS * pitch):
        store(tile, i, f32(0), FP32)
    for k0 in range(0, k, DEPTH):
        depth = min(DEPTH, k - k0)
        for t in range(halves * panels):
            h, j = t // panels, t % panels * COLUMNS
            corner, panel = at(b, k0 * b0 + (h * n + j0 + j) * b1, dtype), at(b_block, t * DEPTH * COLUMNS, FP32)
            pack(corner, panel, depth, min(COLUMNS, width - j), b0, b1, COLUMNS, dtype)
        for i in range(0, height, _BLOCK_M):
            corner, rows = at(a, (i0 + i) * a0 + k0 * a1, dtype), min(_BLOCK_M, height - i)
            pack(corner, blocks, rows, depth, a0, a1, DEPTH, dtype)
            for t in range(halves * panels):
                column, panel = t // panels * gap + t % panels * COLUMNS, at(b_block, t * DEPTH * COLUMNS, FP32)
                for r in range(0, rows, ROWS):
                    target = at(tile, (i + r) * pitch + column, FP32)
                    multiply(at(blocks, r * DEPTH, FP32), panel, target, pitch, depth)


@numba_glue.jit
def _part(first, step, work, tensors, sizes, strides, added, epilogue, tile_m, tile_n, dots, dtype):
    """Every `step`-th tile of c; up's sums lie beside gate's in the rows of a tile."""
    (a, b, c, bias, addend), (m, n, _), (d0, d1), halves = tensors, sizes, added, epilogue[3]
    tiles_m, tiles_n, pitch = (m + tile_m - 1) // tile_m, (n + tile_n - 1) // tile_n, tile_n * halves
    blocks = at(work, tile_m * pitch, FP32)
    for t in range(first, tiles_m * tiles_n, step):
        i0, j0 = t % tiles_m * tile_m, t // tiles_m * tile_n
        height, width = min(tile_m, m - i0), min(tile_n, n - j0)
        if dots:
            _dots(work, pitch, tile_n, height, width, i0, j0, a, b, sizes, strides, halves, dtype)
        else:
            _multiply(work, pitch, tile_n, height, width, i0, j0, a, b, blocks, sizes, strides, halves, dtype)
        for i in range(i0, i0 + height):
            row, target = at(work, (i - i0) * pitch, FP32), at(c, i * n + j0, dtype)
            bias_row = at(bias, j0, dtype) if bias != 0 else 0
            addend_row = at(addend, i * d0 + j0 * d1, dtype) if addend != 0 else 0
            _finish(row, tile_n, target, bias_row, addend_row, d1, width, epilogue, dtype)


@numba_glue.kernel
def _product(
    threads, a, b, c, bias, addend, work, has_bias, has_addend, size, m, n, k, a0, a1, b0, b1, d0, d1,
    alpha, beta, act, halves, tile_m, tile_n, dots, dtype,
):  # fmt: skip
    tensors, sizes, strides = (a, b, c, bias * has_bias, addend * has_addend), (m, n, k), (a0, a1, b0, b1)
    added, epilogue = (d0, d1), (f32(alpha), f32(beta), act, halves)
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            own = at(work, thread * size, FP32)
            _part(thread, threads, own, tensors, sizes, strides, added, epilogue, tile_m, tile_n, dots, dtype)
    else:
        _part(ZERO, ONE, work, tensors, sizes, strides, added, epilogue, tile_m, tile_n, dots, dtype)


def _tile(p: Product, config: Config) -> tuple[int, int, bool]:
    """Rows and columns of a tile, and whether it is made of dot products: those take equal shares of the columns."""
    if config.tile_m:
        return config.tile_m, config.tile_n, False
    threads = numba_glue.threads(config.parallel)
    shares = threads * ceil(p.n / threads / DEPTH)
    return p.m, ceil(p.n / shares) if p.n else 1, True


def _arguments(p: Product, config: Config, work: Any) -> tuple[Any, ...]:
    """The launch arguments, of tensors for a launch and of specs for a compile; c stands for what is not there."""
    has_bias, has_addend = p.bias is not None, p.addend is not None and p.beta != 0
    tensors = p.a, p.b, p.c, p.bias if has_bias else p.c, p.addend if has_addend else p.c, work
    shapes = work.shape[1], p.m, p.n, p.k, p.a_row, p.a_column, p.b_row, p.b_column, p.addend_row, p.addend_column
    factors = 1.0 if p.alpha is None else p.alpha, 1.0 if p.beta is None else p.beta
    tile = _tile(p, config)
    return tensors, int(has_bias), int(has_addend), *shapes, *factors, _ACTS[p.act], p.halves, *tile


def _compile(p: Product, config: Config) -> Artifact:
    return numba_glue.legacy_compile(_product, *_arguments(p, config, *_workspace(p, config)))


def _run(p: Product, config: Config, work: Any) -> None:
    numba_glue.legacy_launch(_product, config.parallel, *_arguments(p, config, work))


def kernel(product: Callable[..., Product], outputs: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """An op's refusal, default, configs, workspace, compile and run; `product(outs, *args)` is what it multiplies."""
    return (
        lambda *specs, config=None: _refusal(product(None, *specs), config),
        lambda *specs: _default(product(None, *specs)),
        lambda *specs: _configs(product(None, *specs)),
        lambda *specs, config: _workspace(product(None, *specs), config),
        lambda specs, config, arch: _compile(product(outputs(*specs), *specs), config),
        lambda outs, args, config, work: _run(product(outs, *args), config, work),
    )
