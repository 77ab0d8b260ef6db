"""Products of blocks in fp32 for attention on the CPU, and values of any dtype made fp32 as they are loaded.

Dtypes are numbers at run time, so that one kernel serves them all: each would take many seconds to compile.
"""

import torch

from tilery.languages.numba_elements import COLUMNS, DEPTH, FP32, ROWS, STORAGE, at, f32, load, multiply, store
from tilery.languages.numba_glue import jit

DTYPE_CODES = {dtype: code for code, dtype in enumerate(STORAGE)}
BLOCK = DEPTH  # keys at a time: P of a block is the left side of a product again
BYTES = DTYPE_CODES[torch.float8_e5m2]  # 1, of a bool, is a small positive value there

_FP16, _BF16 = STORAGE[torch.float16], STORAGE[torch.bfloat16]
_E4M3, _E5M2 = STORAGE[torch.float8_e4m3fn], STORAGE[torch.float8_e5m2]


def padded(size: int) -> int:
    """Columns of a sum: whole register tiles."""
    return -(-size // COLUMNS) * COLUMNS


@jit
def padded_size(size):
    """`padded`, in kernels."""
    return (size + COLUMNS - 1) // COLUMNS * COLUMNS


# Values


@jit
def widen(source, target, count, factor, dtype):
    """Store values of a dtype as fp32, times a factor."""
    if dtype == 0:
        for i in range(count):
            store(target, i, load(source, i, FP32) * factor, FP32)
    elif dtype == 1:
        for i in range(count):
            store(target, i, load(source, i, _FP16) * factor, FP32)
    elif dtype == 2:
        for i in range(count):
            store(target, i, load(source, i, _BF16) * factor, FP32)
    elif dtype == 3:
        for i in range(count):
            store(target, i, load(source, i, _E4M3) * factor, FP32)
    else:
        for i in range(count):
            store(target, i, load(source, i, _E5M2) * factor, FP32)


@jit
def narrow(source, target, count, factor, dtype):
    """Store fp32 values, times a factor, as values of a dtype."""
    if dtype == 0:
        for i in range(count):
            store(target, i, load(source, i, FP32) * factor, FP32)
    elif dtype == 1:
        for i in range(count):
            store(target, i, load(source, i, FP32) * factor, _FP16)
    else:
        for i in range(count):
            store(target, i, load(source, i, FP32) * factor, _BF16)


@jit
def fill(target, count, value):
    for i in range(count):
        store(target, i, value, FP32)


@jit
def dot(a, b, count):
    total = f32(0)
    for i in range(count):
        total += load(a, i, FP32) * load(b, i, FP32)
    return total


@jit
def add_scaled(sums, values, count, factor):
    for i in range(count):
        store(sums, i, load(sums, i, FP32) + factor * load(values, i, FP32), FP32)


# Products


@jit
def pack_left_row(values, left, row, rows, count):
    """Row `row` of the left side of a product: pieces of DEPTH columns, one after the other."""
    for start in range(0, count, DEPTH):
        piece = at(left, start * rows + row * DEPTH, FP32)
        widen(at(values, start, FP32), piece, min(DEPTH, count - start), f32(1), 0)


@jit
def pack_right_column(values, panels, column, count):
    """Column `column` of the right side: panels of COLUMNS, each `count` high."""
    panel = at(panels, column // COLUMNS * count * COLUMNS + column % COLUMNS, FP32)
    for i in range(count):
        store(panel, i * COLUMNS, load(values, i, FP32), FP32)


@jit
def pack_right_row(values, panels, row, count):
    """Row `row` of the right side: panels of COLUMNS, each BLOCK high."""
    for start in range(0, count, COLUMNS):
        target = at(panels, start * BLOCK + row * COLUMNS, FP32)
        for i in range(min(COLUMNS, count - start)):
            store(target, i, load(values, start + i, FP32), FP32)


@jit
def add_product(left, panels, sums, rows, columns, depth, gap, pitch):
    """sums += left · panels; panels are `gap` high, rows of the sums `pitch` apart. Past the edges it adds rubbish."""
    for j in range(0, columns, COLUMNS):
        for i in range(0, rows, ROWS):
            multiply(at(left, i * DEPTH, FP32), at(panels, j * gap, FP32), at(sums, i * pitch + j, FP32), pitch, depth)


@jit
def store_product(left, panels, sums, rows, height, columns, depth):
    """sums = left · panels, both `depth` deep; `height` rows are kept for the left side, whatever `rows` there are."""
    fill(sums, (rows + ROWS - 1) // ROWS * ROWS * BLOCK, f32(0))
    for start in range(0, depth, DEPTH):
        panel, piece = at(panels, start * COLUMNS, FP32), at(left, start * height, FP32)
        add_product(piece, panel, sums, rows, columns, min(DEPTH, depth - start), depth, BLOCK)
