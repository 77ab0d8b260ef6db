"""Cross entropy in Numba: a row's loss from its sums, the gradient of a logit, and tiles of logits = x · weightᵀ."""

import numpy as np

from tilery.languages import numba_glue
from tilery.languages.numba_elements import COLUMNS, DEPTH, FP32, ROWS, at, exp, f32, multiply, store
from tilery.parts.numba_softmax import base
from tilery.parts.numba_tiles import pack

BLOCK = 96  # rows of a tile: a multiple of ROWS, whichever it is
assert BLOCK % ROWS == 0


@numba_glue.jit
def log_sum(top, total):
    """log(sum(exp(x))) from max(x) and sum(exp(x - base(max(x))))."""
    return base(top) + f32(np.log(total))


@numba_glue.jit
def loss(lse, picked, plain, n, label_smoothing, z_loss):
    """Return the loss of a row that is not ignored; `plain` is the sum of its n logits, `picked` its target's."""
    value = lse - (f32(1) - label_smoothing) * picked + z_loss * lse * lse
    if label_smoothing > 0:
        value -= label_smoothing * (plain / f32(n))
    return f32(value)


@numba_glue.jit
def gradient(logit, hit, n, dloss, dlse, lse, label_smoothing, z_loss):
    """Return the gradient of a logit of a row whose target is a class; `hit`: it is the target's own logit."""
    scale = dloss * (f32(1) + f32(2) * z_loss * lse) + dlse
    share = (f32(1) - label_smoothing if hit else f32(0)) + label_smoothing / f32(n)
    return exp(logit - lse) * scale - dloss * share


@numba_glue.jit
def tile_of_products(a, b, tile, blocks, height, width, k, a_stride, b_stride, dtype):
    """tile [height, width] = a [height, k] · b [width, k]ᵀ, in fp32, its rows DEPTH apart; up to BLOCK x DEPTH.

    What lies in the blocks past the edges of a and b reaches only what is past the tile's.
    """
    a_block, b_block = blocks, at(blocks, BLOCK * DEPTH, FP32)
    for i in range(BLOCK * DEPTH):
        store(tile, i, f32(0), FP32)
    for k0 in range(0, k, DEPTH):
        depth = min(DEPTH, k - k0)
        pack(at(a, k0, dtype), a_block, height, depth, a_stride, 1, DEPTH, dtype)
        for j in range(0, width, COLUMNS):
            pack(at(b, j * b_stride + k0, dtype), b_block, depth, min(COLUMNS, width - j), 1, b_stride, COLUMNS, dtype)
            for r in range(0, height, ROWS):
                multiply(at(a_block, r * DEPTH, FP32), b_block, at(tile, r * DEPTH + j, FP32), DEPTH, depth)


@numba_glue.jit
def add_products(tile, b, sums, blocks, height, width, k, b_stride, sums_stride, dtype):
    """sums [height, k] += tile [height, width] · b [width, k], in fp32."""
    b_block = at(blocks, BLOCK * DEPTH, FP32)
    for j in range(0, k, COLUMNS):
        pack(at(b, j, dtype), b_block, width, min(COLUMNS, k - j), b_stride, 1, COLUMNS, dtype)
        for r in range(0, height, ROWS):
            multiply(at(tile, r * DEPTH, FP32), b_block, at(sums, r * sums_stride + j, FP32), sums_stride, width)


def floats(k: int = 0) -> int:
    """Of a thread's workspace: a block of a, a panel of b, a tile, and where k is given a row of sums for each row."""
    return 2 * BLOCK * DEPTH + DEPTH * COLUMNS + BLOCK * padded(k)


def padded(k: int) -> int:
    return -(-k // COLUMNS) * COLUMNS
