"""Tiles of products of several matrices on the CPU: packed into caches as fp32 and multiplied in registers."""

from math import ceil

import torch

from tilery.base.spec import TensorSpec
from tilery.languages import numba_glue
from tilery.languages.numba_elements import COLUMNS, DEPTH, FP32, ROWS, at, f32, load, multiply, store
from tilery.parts.numba_tiles import pack

_BLOCK_M = 8 * ROWS  # rows of a packed at a time
FEW = 8  # up to so many rows take dot products, where K is contiguous on both sides
_MOST_M, _MOST_N = 528, 512


def tile_refusal(tile_m: int, tile_n: int) -> str | None:
    if tile_m < 1 or tile_n < 1 or tile_m % ROWS or tile_n % COLUMNS:
        return f"tile of {tile_m} x {tile_n} is not made of register tiles of {ROWS} x {COLUMNS}"
    return None


def even(size: int, most: int, unit: int) -> int:
    """Equal tiles, in multiples of `unit`, of about `most` at most."""
    size = max(size, 1)
    return ceil(size / ceil(size / most) / unit) * unit


def tile_sizes(m: int, n: int, most_m: int = _MOST_M, most_n: int = _MOST_N) -> tuple[int, int]:
    return even(m, most_m, ROWS), even(n, most_n, COLUMNS)


def workspace(tile_m: int, tile_n: int, parallel: bool, where: torch.device) -> tuple[TensorSpec, ...]:
    """For each thread a block of a, a block of b and a tile of c."""
    floats = _BLOCK_M * DEPTH + DEPTH * tile_n + tile_m * tile_n
    return (TensorSpec.contiguous((numba_glue.threads(parallel), floats), torch.float32, where),)


@numba_glue.jit
def dots(a, b, c, height, width, k, a0, b1, n, dtype):
    """c [height, width] = a · b, K contiguous in both; rows of c are n apart."""
    for j in range(width):
        for i in range(height):
            total = f32(0)
            for p in range(k):
                total += load(a, i * a0 + p, dtype) * load(b, j * b1 + p, dtype)
            store(c, i * n + j, total, dtype)


@numba_glue.jit
def tile_product(a, b, c, work, height, width, k, a0, a1, b0, b1, n, tile_n, dtype):
    """The same of any strides. What lies in the blocks past the edges of a and b reaches only what is past c's."""
    if height <= FEW and a1 == 1 and b0 == 1:
        dots(a, b, c, height, width, k, a0, b1, n, dtype)
        return
    b_block = at(work, _BLOCK_M * DEPTH, FP32)
    tile = at(b_block, DEPTH * tile_n, FP32)
    for i in range((height + ROWS - 1) // ROWS * ROWS * tile_n):
        store(tile, i, f32(0), FP32)
    for k0 in range(0, k, DEPTH):
        depth = min(DEPTH, k - k0)
        for j in range(0, width, COLUMNS):
            corner, panel = at(b, k0 * b0 + j * b1, dtype), at(b_block, j * DEPTH, FP32)
            pack(corner, panel, depth, min(COLUMNS, width - j), b0, b1, COLUMNS, dtype)
        for i in range(0, height, _BLOCK_M):
            corner, rows = at(a, i * a0 + k0 * a1, dtype), min(_BLOCK_M, height - i)
            pack(corner, work, rows, depth, a0, a1, DEPTH, dtype)
            for j in range(0, width, COLUMNS):
                panel = at(b_block, j * DEPTH, FP32)
                for r in range(0, rows, ROWS):
                    target = at(tile, (i + r) * tile_n + j, FP32)
                    multiply(at(work, r * DEPTH, FP32), panel, target, tile_n, depth)
    for i in range(height):
        for j in range(width):
            store(c, i * n + j, load(tile, i * tile_n + j, FP32), dtype)
