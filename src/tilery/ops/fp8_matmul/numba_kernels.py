"""fp8_matmul and fp8_matmul_rowwise in Numba: widened and scaled while packed, then fp32 products of tiles.

Few rows of a are widened once for all; each row of b then meets them in stretches that stay in the first cache.
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
from tilery.ops.fp8_matmul.call import Fp8MatmulCall, ScaleStrides
from tilery.ops.quantize.formats import GROUP

_BLOCK_M = 96  # rows of a packed at a time
_FEW = 16  # rows of a; n=4096, k=1024 on a Zen 4 core: 3.8 ms by dot products, 4.6 by tiles; 24 rows: 5.4 and 4.7
_FP16, _BF16 = STORAGE[torch.float16], STORAGE[torch.bfloat16]
_E4M3, _E5M2 = STORAGE[torch.float8_e4m3fn], STORAGE[torch.float8_e5m2]
# Formats are numbers at run time: a kernel for each of the twelve combinations would be compiled for minutes.
_FORMATS = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
_OUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@jit
def _widen(source, target, count, scale, kind):
    """fp8 values, times the scale."""
    if kind == 0:
        for i in range(count):
            store(target, i, load(source, i, _E4M3) * scale, FP32)
    else:
        for i in range(count):
            store(target, i, load(source, i, _E5M2) * scale, FP32)


@jit
def _write(value, c, index, kind):
    if kind == 0:
        store(c, index, value, FP32)
    elif kind == 1:
        store(c, index, value, _FP16)
    else:
        store(c, index, value, _BF16)


@jit
def _widen_rows(x, scales, target, i0, k0, rows, depth, operand, target_stride):
    """Widens and scales `rows` × `depth` values from row i0 and column k0, a multiple of 128, on.

    `operand`: the format, the stride of rows, and the fields of `ScaleStrides`.
    """
    kind, x_row, rows_per_scale, scale_row, scale_column = operand
    for i in range(i0, i0 + rows):
        for start in range(0, depth, GROUP):
            scale = load(scales, i // rows_per_scale * scale_row + (k0 + start) // GROUP * scale_column, FP32)
            source, goal = at(x, i * x_row + k0 + start, _E4M3), at(target, (i - i0) * target_stride + start, FP32)
            _widen(source, goal, min(GROUP, depth - start), scale, kind)


@jit
def _widen_panel(x, scales, panel, stretch, j0, k0, columns, depth, operand):
    """The same of rows that become columns; through a stretch: 0.5 ns a value on a Zen 4 core, 1.1 without."""
    for j in range(columns):
        _widen_rows(x, scales, stretch, j0 + j, k0, 1, depth, operand, 0)
        for p in range(depth):
            store(panel, p * COLUMNS + j, load(stretch, p, FP32), FP32)


@jit
def _dots(first, last, tensors, work, sizes, a_operand, b_operand, out):
    """Columns of c from `first` to `last`."""
    (a, a_scale, b, b_scale, c), (m, n, k) = tensors, sizes
    wide, stretch, sums = work, at(work, m * k, FP32), at(work, m * k + GROUP, FP32)
    if first < last:
        _widen_rows(a, a_scale, wide, 0, 0, m, k, a_operand, k)
    for j in range(first, last):
        for i in range(m):
            store(sums, i, f32(0), FP32)
        for k0 in range(0, k, GROUP):
            depth = min(GROUP, k - k0)
            _widen_rows(b, b_scale, stretch, j, k0, 1, depth, b_operand, 0)
            for i in range(m):
                total = f32(0)
                for p in range(depth):
                    total += load(wide, i * k + k0 + p, FP32) * load(stretch, p, FP32)
                store(sums, i, load(sums, i, FP32) + total, FP32)
        for i in range(m):
            _write(load(sums, i, FP32), c, i * n + j, out)


@jit
def _tiles(first, step, tensors, work, sizes, a_operand, b_operand, out, tile_m, tile_n):
    """Every `step`-th tile of c; what lies in the blocks past the edges of a and b reaches only what is past c's."""
    (a, a_scale, b, b_scale, c), (m, n, k) = tensors, sizes
    if tile_m == 0:
        _dots(first * n // step, (first + 1) * n // step, tensors, work, sizes, a_operand, b_operand, out)
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
                _widen_panel(b, b_scale, panel, stretch, j0 + j, k0, min(COLUMNS, width - j), depth, b_operand)
            for i in range(0, height, _BLOCK_M):
                rows = min(_BLOCK_M, height - i)
                _widen_rows(a, a_scale, a_block, i0 + i, k0, rows, depth, a_operand, DEPTH)
                for j in range(0, width, COLUMNS):
                    panel = at(b_block, j * DEPTH, FP32)
                    for r in range(0, rows, ROWS):
                        target = at(tile, (i + r) * tile_n + j, FP32)
                        multiply(at(a_block, r * DEPTH, FP32), panel, target, tile_n, depth)
        for i in range(height):
            for j in range(width):
                _write(load(tile, i * tile_n + j, FP32), c, (i0 + i) * n + j0 + j, out)


@kernel
def _fp8_gemm(threads, tensors, work, work_size, sizes, a_operand, b_operand, out, tile_m, tile_n):
    """tensors: a, a_scale, b, b_scale, c; sizes: m, n, k; `out` says how c is stored; operands as in `_widen_rows`."""
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            own = at(work, thread * work_size, FP32)
            _tiles(thread, threads, tensors, own, sizes, a_operand, b_operand, out, tile_m, tile_n)
    else:
        _tiles(ZERO, ONE, tensors, work, sizes, a_operand, b_operand, out, tile_m, tile_n)


@dataclass(frozen=True)
class Config:
    tile_m: int  # of c, in multiples of the register tile; 0 x 0 for dot products
    tile_n: int
    parallel: bool


class Fp8Gemm(Kernel):
    archs = ("cpu",)
    Config = Config

    def refusal(self, call: Fp8MatmulCall, config: Config | None = None) -> str | None:
        tile_m, tile_n = (config.tile_m, config.tile_n) if config else (ROWS, COLUMNS)
        if tile_m % ROWS or tile_n % COLUMNS or min(tile_m, tile_n) < 0 or (tile_m == 0) != (tile_n == 0):
            return f"tile of {tile_m} x {tile_n} is not made of register tiles of {ROWS} x {COLUMNS}"
        return numba_elements.refusal(call.a._replace(dtype=torch.float16))  # one kernel writes every dtype

    def default(self, call: Fp8MatmulCall) -> Config:
        return _even(call, *((0, 0) if call.m <= _FEW else (528, 512)))

    def configs(self, call: Fp8MatmulCall) -> list[Config]:
        sizes = [(m, n) for m in (264, 528, 1056) for n in (128, 256, 512, 1024)]
        sizes += [(0, 0)] if call.m <= 4 * _FEW else []
        return list(dict.fromkeys(_even(call, *size) for size in sizes))

    def workspace(self, call: Fp8MatmulCall, config: Config) -> dict[str, TensorSpec]:
        """For each thread blocks of a and b, a tile of c, a stretch of b, or for dot products a, a stretch, sums."""
        floats = _BLOCK_M * DEPTH + DEPTH * config.tile_n + config.tile_m * config.tile_n + DEPTH
        if config.tile_m == 0:
            floats = call.m * call.k + GROUP + call.m
        shape = (numba_glue.threads(config.parallel), floats)
        return {"work": TensorSpec.contiguous(shape, torch.float32, call.a.device)}

    def launches(self, call: Fp8MatmulCall, config: Config) -> list[Launch]:
        args = {
            "tensors": (call.a, call.a_scale, call.b, call.b_scale, call.c),
            "work": call.work, "work_size": call.work.shape[1], "sizes": (call.m, call.n, call.k),
            "a_operand": _operand(call.a, call.a_scale_strides), "b_operand": _operand(call.b, call.b_scale_strides),
            "out": _OUTS[call.c.dtype], "tile_m": config.tile_m, "tile_n": config.tile_n,
        }  # fmt: skip
        return [Launch(_fp8_gemm, 1, args, options={"parallel": config.parallel})]


def _operand(x: TensorSpec, scales: ScaleStrides) -> tuple[int, ...]:
    return _FORMATS[x.dtype], x.stride(0), *scales


def _even(call: Fp8MatmulCall, most_m: int, most_n: int) -> Config:
    """Equal tiles of about the given size, and as many as keep every thread busy."""
    m, n = max(call.m, 1), max(call.n, 1)
    parallel = m * n * call.k >= 2**19  # less work does not pay for waking threads
    if most_m == 0:
        return Config(0, 0, parallel)
    tiles_m, threads = ceil(m / most_m), numba_glue.threads(parallel)
    step = threads // gcd(threads, tiles_m)
    tiles_n = min(ceil(n / most_n / step) * step, ceil(n / COLUMNS))
    return Config(ceil(m / tiles_m / ROWS) * ROWS, ceil(n / tiles_n / COLUMNS) * COLUMNS, parallel)


fp8_gemm = Fp8Gemm()
