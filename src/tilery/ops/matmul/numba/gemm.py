"""matmul, matmul_add, linear and linear_silu_mul in Numba: tiles of the output over the cores.

Tiles of a and b are packed into caches as fp32 and multiplied in registers; few rows of a take dot products. A tile is
finished (bias, activation, addend) while it is in a cache.
"""

from dataclasses import dataclass
from math import ceil, gcd

import numpy as np
import torch
from numba import prange

from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
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
)  # fmt: skip
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.gated import numba_activations
from tilery.ops.gated.numba_activations import factor
from tilery.ops.matmul.call import MatmulCall
from tilery.ops.matmul.numba.tiles import pack

_BLOCK_M = 96  # rows of a packed at a time, and the most that dot products take
_NONE, _RELU, _GELU, _GELU_TANH, _SILU = range(5)
_ACTS = {"none": _NONE, "relu": _RELU, "gelu": _GELU, "gelu_tanh": _GELU_TANH, "silu": _SILU}
_SILU_SHARE, _TANH_SHARE, _GELU_SHARE = (numba_activations.ACTS[act] for act in ("silu", "tanh", "none"))


# Epilogues


@jit
def _activate(row, width, act):
    if act == _RELU:
        for j in range(width):
            y = load(row, j, FP32)
            store(row, j, f32(0) if y < f32(0) else y, FP32)  # written so that NaN stays
    elif act == _GELU:
        for j in range(width):
            y = load(row, j, FP32)
            store(row, j, y * factor(y, _GELU_SHARE), FP32)
    elif act == _GELU_TANH:
        for j in range(width):
            y = load(row, j, FP32)
            store(row, j, y * factor(y, _TANH_SHARE), FP32)
    elif act == _SILU:
        for j in range(width):
            y = load(row, j, FP32)
            store(row, j, y * factor(y, _SILU_SHARE), FP32)


@jit
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


@jit
def _dots(tile, pitch, gap, height, width, i0, j0, a, b, sizes, strides, halves, dtype):
    (_, n, k), (a_row, _, _, b_column) = sizes, strides
    for t in range(halves * width):  # one loop: LLVM would make code for each number of halves
        h, j = t // width, t % width
        column = at(b, (h * n + j0 + j) * b_column, dtype)
        for i in range(height):
            total, row = f32(0), at(a, (i0 + i) * a_row, dtype)
            for p in range(k):
                total += load(row, p, dtype) * load(column, p, dtype)
            store(tile, i * pitch + h * gap + j, total, FP32)


@jit
def _multiply(tile, pitch, gap, height, width, i0, j0, a, b, blocks, sizes, strides, halves, dtype):
    """What lies in the blocks past the edges of a and b reaches only what is past the tile's."""
    (_, n, k), (a_row, a_column, b_row, b_column) = sizes, strides
    b_block = at(blocks, _BLOCK_M * DEPTH, FP32)
    panels = (width + COLUMNS - 1) // COLUMNS  # of b's columns in each half
    for i in range((height + ROWS - 1) // ROWS * ROWS * pitch):
        store(tile, i, f32(0), FP32)
    for k0 in range(0, k, DEPTH):
        depth = min(DEPTH, k - k0)
        for t in range(halves * panels):
            h, j = t // panels, t % panels * COLUMNS
            corner = at(b, k0 * b_row + (h * n + j0 + j) * b_column, dtype)
            panel = at(b_block, t * DEPTH * COLUMNS, FP32)
            pack(corner, panel, depth, min(COLUMNS, width - j), b_row, b_column, COLUMNS, dtype)
        for i in range(0, height, _BLOCK_M):
            corner, rows = at(a, (i0 + i) * a_row + k0 * a_column, dtype), min(_BLOCK_M, height - i)
            pack(corner, blocks, rows, depth, a_row, a_column, DEPTH, dtype)
            for t in range(halves * panels):
                column, panel = t // panels * gap + t % panels * COLUMNS, at(b_block, t * DEPTH * COLUMNS, FP32)
                for r in range(0, rows, ROWS):
                    target = at(tile, (i + r) * pitch + column, FP32)
                    multiply(at(blocks, r * DEPTH, FP32), panel, target, pitch, depth)


@jit
def _tiles(first, step, work, tensors, sizes, strides, addend_strides, epilogue, tile_m, tile_n, dots, dtype):
    """Every `step`-th tile of the output; up's sums lie beside gate's in the rows of a tile."""
    (a, b, out, bias, addend), (m, n, _), (addend_row, addend_column) = tensors, sizes, addend_strides
    halves = epilogue[3]
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
            row, target = at(work, (i - i0) * pitch, FP32), at(out, i * n + j0, dtype)
            bias_at = at(bias, j0, dtype) if bias != 0 else 0
            addend_at = at(addend, i * addend_row + j0 * addend_column, dtype) if addend != 0 else 0
            _finish(row, tile_n, target, bias_at, addend_at, addend_column, width, epilogue, dtype)


@kernel
def _gemm(threads, tensors, work, work_size, sizes, strides, addend_strides, epilogue, tile, dots, dtype):
    """tensors: a, b, out, bias and addend, 0 where there is none; sizes: m, n, k; strides: of a and b, rows first.

    epilogue: alpha, beta, act and halves; tile: its rows and columns.
    """
    (a, b, out, bias, addend), (alpha, beta, act, halves), (tile_m, tile_n) = tensors, epilogue, tile
    given = a, b, out, bias, addend if beta != 0 else 0  # where beta is 0, the addend is not read
    finish = f32(alpha), f32(beta), act, halves
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            own = at(work, thread * work_size, FP32)
            _tiles(thread, threads, own, given, sizes, strides, addend_strides, finish, tile_m, tile_n, dots, dtype)
    else:
        _tiles(ZERO, ONE, work, given, sizes, strides, addend_strides, finish, tile_m, tile_n, dots, dtype)


@dataclass(frozen=True)
class Config:
    tile_m: int  # of the output, in multiples of the register tile; 0 x 0 for dot products
    tile_n: int
    parallel: bool


class Gemm(Kernel):
    archs = ("cpu",)
    Config = Config

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        tile_m, tile_n = (config.tile_m, config.tile_n) if config else (ROWS, COLUMNS)
        if tile_m == tile_n == 0 and not _takes_dots(call, _BLOCK_M):
            return (
                f"dot products need at most {_BLOCK_M} rows, and rows of a and columns of b contiguous, got {call.m} "
                f"rows and strides {tuple(call.a_strides)} and {tuple(call.b_strides)}"
            )
        if tile_m % ROWS or tile_n % COLUMNS or min(tile_m, tile_n) < 0 or (tile_m == 0) != (tile_n == 0):
            return f"tile of {tile_m} x {tile_n} is not made of register tiles of {ROWS} x {COLUMNS}"
        return numba_elements.refusal(call.a)

    def default(self, call: MatmulCall) -> Config:
        return _even(call, *((0, 0) if _takes_dots(call, 8) else (528, 512)))

    def configs(self, call: MatmulCall) -> list[Config]:
        sizes = [(m, n) for m in (264, 528, 1056) for n in (128, 256, 512, 1024)]
        sizes += [(0, 0)] if _takes_dots(call, 16) else []
        return list(dict.fromkeys(_even(call, *size) for size in sizes))

    def workspace(self, call: MatmulCall, config: Config) -> dict[str, TensorSpec]:
        """For each thread a tile of the output, and for what is no dot product a block of a and one of b."""
        tile_m, tile_n = _tile(call, config)
        floats = tile_m * call.halves * tile_n
        if config.tile_m:
            floats += (_BLOCK_M + call.halves * tile_n) * DEPTH
        shape = (numba_glue.threads(config.parallel), floats)
        return {"work": TensorSpec.contiguous(shape, torch.float32, call.a.device)}

    def launches(self, call: MatmulCall, config: Config) -> list[Launch]:
        bias, addend = (0 if x is None else x for x in (call.bias, call.addend))
        alpha, beta = (1.0 if x is None else x for x in (call.alpha, call.beta))
        args = {
            "tensors": (call.a, call.b, call.out, bias, addend), "work": call.work, "work_size": call.work.shape[1],
            "sizes": (call.m, call.n, call.k), "strides": (*call.a_strides, *call.b_strides),
            "addend_strides": tuple(call.addend_strides), "epilogue": (alpha, beta, _ACTS[call.act], call.halves),
            "tile": _tile(call, config), "dots": config.tile_m == 0, "dtype": STORAGE[call.a.dtype],
        }  # fmt: skip
        return [Launch(_gemm, 1, args, options={"parallel": config.parallel})]


def _takes_dots(call: MatmulCall, most_rows: int) -> bool:
    return call.m <= most_rows and call.a_strides.column == 1 and call.b_strides.row == 1


def _even(call: MatmulCall, most_m: int, most_n: int) -> Config:
    """Equal tiles of about the given size, halves together, and as many as keep every thread busy."""
    m, n = max(call.m, 1), max(call.n, 1)
    parallel = m * n * call.k * call.halves >= 2**19  # less work does not pay for waking threads
    if most_m == 0:
        return Config(0, 0, parallel)
    tiles_m, threads = ceil(m / most_m), numba_glue.threads(parallel)
    step = threads // gcd(threads, tiles_m)
    tiles_n = min(ceil(n * call.halves / most_n / step) * step, ceil(n / COLUMNS))
    return Config(ceil(m / tiles_m / ROWS) * ROWS, ceil(n / tiles_n / COLUMNS) * COLUMNS, parallel)


def _tile(call: MatmulCall, config: Config) -> tuple[int, int]:
    """Rows and columns of a tile; one of dot products has all rows and an equal share of the columns."""
    if config.tile_m:
        return config.tile_m, config.tile_n
    threads = numba_glue.threads(config.parallel)
    shares = threads * ceil(call.n / threads / DEPTH)
    return call.m, ceil(call.n / shares) if call.n else 1


gemm = Gemm()
