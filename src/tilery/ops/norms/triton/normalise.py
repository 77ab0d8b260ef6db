"""The device code of norms in Triton: a program reads its rows, normalises them and writes them, in fp8 if asked."""

from typing import NamedTuple

import triton
import triton.language as tl

from tilery.languages.triton_glue import pdl_launch_dependents
from tilery.ops.quantize import formats, triton_fp8
from tilery.ops.quantize.triton_fp8 import magnitude

_GROUP = tl.constexpr(formats.GROUP)


class Fp8(NamedTuple):
    """How a kernel quantises: a constant of it."""

    per: str  # token or group
    format: str  # e4m3 or e5m2
    pow2: bool  # whether scales are powers of two
    native: bool  # whether the device rounds to fp8 itself


@triton.jit
def own_rows(m, ROWS: tl.constexpr):
    """[ROWS, 1]: this program's rows, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # int64: row * stride overflows int32
    return row, row < m


@triton.jit
def _read(x_ptr, r_ptr, sum_ptr, cols, mask, POLICY: tl.constexpr):
    """x in fp32, or the rounded sum of x and a residual, which is written if it has a place."""
    x = tl.load(x_ptr + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if r_ptr is not None:
        r = tl.load(r_ptr + cols, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)
        total = (x + r).to(x_ptr.dtype.element_ty)
        if sum_ptr is not None:
            tl.store(sum_ptr + cols, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def _columns(w_ptr, b_ptr, cols, n):
    """Weight and bias of columns; the weight again where there is no bias: Triton 3.6 keeps no None."""
    w = tl.load(w_ptr + cols, mask=cols < n, other=0.0)
    b = w
    if b_ptr is not None:
        b = tl.load(b_ptr + cols, mask=cols < n, other=0.0)
    return w, b


@triton.jit
def _weighted(x, w, b, b_ptr, offset):
    y = x * (w.to(tl.float32) + offset)
    if b_ptr is not None:
        y += b.to(tl.float32)
    return y


# Triton 3.6 passes a constant's field on only once it is a constant itself.


@triton.jit
def _scale(top, FP8: tl.constexpr):
    FORMAT: tl.constexpr = FP8.format
    POW2: tl.constexpr = FP8.pow2
    return triton_fp8.scale(top, FORMAT, POW2)


@triton.jit
def _quantize(y, FP8: tl.constexpr):
    FORMAT: tl.constexpr = FP8.format
    NATIVE: tl.constexpr = FP8.native
    return triton_fp8.quantize(y, FORMAT, NATIVE)


@triton.jit
def _greatest(y, mask):
    """[ROWS, 1]: the greatest of the magnitudes in each row."""
    return tl.max(tl.where(mask, magnitude(y), 0), axis=1, keep_dims=True)


@triton.jit
def _write_groups(y, y_ptr, s_ptr, s_step, first, n, inside, mask, FP8: tl.constexpr):
    """Quantises groups of 128; `s_ptr` [ROWS, 1] points to each row's first scale, `first` is the block's column."""
    ROWS: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1] // _GROUP
    y = tl.reshape(tl.where(mask, y, 0.0), (ROWS, GROUPS, _GROUP))
    made = _scale(tl.max(magnitude(y), axis=2), FP8)
    group = first // _GROUP + tl.arange(0, GROUPS)[None, :]
    tl.store(s_ptr + group * s_step, made, mask=inside & (group * _GROUP < n))
    y = tl.reshape(y * (1.0 / made)[:, :, None], (ROWS, GROUPS * _GROUP))
    tl.store(y_ptr, _quantize(y, FP8), mask=mask)


@triton.jit
def normalise(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr, CENTRED: tl.constexpr = False,
    FP8: tl.constexpr = None,
):  # fmt: skip
    """Pointers to x, residual, y, sum and scales are [ROWS, 1]: the starts of rows. What an op does not have is None.

    `tiles.Tiling.constants` says what READ means.
    """
    if READ == "early" or READ == "late":
        _normalise_kept(
            x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
            BLOCK, READ, CENTRED, FP8,
        )  # fmt: skip
    else:
        _normalise_reread(
            x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
            ROWS, BLOCK, READ, CENTRED, FP8,
        )  # fmt: skip


@triton.jit
def _normalise_kept(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
    BLOCK: tl.constexpr, READ: tl.constexpr, CENTRED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Rows wait in registers for their sums."""
    cols = tl.arange(0, BLOCK)[None, :]
    mask = inside & (cols < n)
    x = _read(x_ptr, r_ptr, sum_ptr, cols, mask, "")
    if READ == "early":
        w, b = _columns(w_ptr, b_ptr, cols, n)  # in flight before the sums wait for the row
    pdl_launch_dependents()
    if CENTRED:
        x = tl.where(mask, x - tl.sum(x, axis=1, keep_dims=True) / n, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / n + eps)
    if READ == "late":
        w, b = _columns(w_ptr, b_ptr, cols, n)
    y = _weighted(x * rstd, w, b, b_ptr, offset)
    if FP8 is None:
        tl.store(y_ptr + cols, y, mask=mask)
    elif FP8.per == "token":
        made = _scale(_greatest(y, mask), FP8)
        tl.store(s_ptr, made, mask=inside)
        tl.store(y_ptr + cols, _quantize(y * (1.0 / made), FP8), mask=mask)
    else:
        _write_groups(y, y_ptr + cols, s_ptr, s_step, 0, n, inside, mask, FP8)


@triton.jit
def _normalise_reread(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_step, inside, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr, CENTRED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Rows are read block by block, for their mean if they are centred, for their squares, and to be written."""
    PER: tl.constexpr = None if FP8 is None else FP8.per
    cols = tl.arange(0, BLOCK)[None, :]
    # Of two inputs the sum is read again, half of what was read first.
    SUMMED: tl.constexpr = READ == "long" and r_ptr is not None
    # What will not be read again leaves L2 to what will: 512 × 131072 took 147 µs so on an H200, 161 without.
    WRITE: tl.constexpr = "evict_first" if READ == "long" else ""
    if CENTRED:
        total = tl.zeros((ROWS, BLOCK), tl.float32)
        for first in range(0, n, BLOCK):
            total += _read(x_ptr, None, None, first + cols, inside & (first + cols < n), "evict_last")
        mean = tl.sum(total, axis=1, keep_dims=True) / n
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    tops = tl.zeros((ROWS, BLOCK), tl.int32)
    for first in range(0, n, BLOCK):
        mask = inside & (first + cols < n)
        if SUMMED:
            x = _read(x_ptr, r_ptr, sum_ptr, first + cols, mask, "evict_first")
        else:
            x = _read(x_ptr, r_ptr, None, first + cols, mask, "evict_last")
        if CENTRED:
            x = tl.where(mask, x - mean, 0.0)
        squares += x * x
        if PER == "token":
            w, b = _columns(w_ptr, b_ptr, first + cols, n)
            tops = tl.maximum(tops, magnitude(_weighted(x, w, b, b_ptr, offset)))
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / n + eps)
    if SUMMED:
        tl.debug_barrier()  # what other threads wrote is read below
    pdl_launch_dependents()
    if PER == "token":
        top = tl.max(tops, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
        made = _scale(magnitude(top * rstd), FP8)  # rstd is the whole row's: it changes no order
        tl.store(s_ptr, made, mask=inside)
    for first in range(0, n, BLOCK):
        mask = inside & (first + cols < n)
        if SUMMED:
            x = _read(sum_ptr, None, None, first + cols, mask, "evict_first")
        else:
            x = _read(x_ptr, r_ptr, sum_ptr, first + cols, mask, "evict_first")
        if CENTRED:
            x = x - mean
        w, b = _columns(w_ptr, b_ptr, first + cols, n)
        y = _weighted(x * rstd, w, b, b_ptr, offset)
        if PER == "token":
            y = _quantize(y * (1.0 / made), FP8)
            tl.store(y_ptr + first + cols, y, mask=mask, eviction_policy=WRITE)
        elif PER == "group":
            _write_groups(y, y_ptr + first + cols, s_ptr, s_step, first, n, inside, mask, FP8)
        else:
            tl.store(y_ptr + first + cols, y, mask=mask, eviction_policy=WRITE)
