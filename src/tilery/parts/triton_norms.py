"""Triton kernels that normalise rows: a program holds a few short rows or one long one in registers, and reads x once.

A row too long for that is read block by block: for its mean, if it is centred; for its squares; and to be written.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tilery.base.spec import TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages.triton_glue import hand_over
from tilery.parts import fp8
from tilery.parts.rows import rows
from tilery.parts.triton_fp8 import magnitude, quantise, scale

archs = ARCHS

_GROUP = tl.constexpr(fp8.GROUP)
_WARPS = (1, 2, 4, 8, 16, 32)
_MANY = 16  # warps of a long row
_HELD = 32768  # values in the registers of 16 warps: 64 of 255 a lane, the rest are weights and addresses
_VALUES_PER_LANE = 128
_L1_BYTES = 208 * 1024  # of an H200's 256 kB a processor, with room for shared memory
_PART = 4096  # of a row that is read again from the L1 cache, so that registers are left for more programs
_HIDING = 528  # programs past which one waits while others work: weights loaded early would only take registers


@dataclass(frozen=True)
class Config:
    """A program takes `rows` rows, `block` columns at a time."""

    rows: int
    block: int
    num_warps: int


_LONG = Config(1, 8192, 32)  # 512 × 65536 on an H200: 41.6 µs, 46.4 with 16384 and 16 warps
LONG_SUMS = Config(1, 16384, 16)  # add_rms_norm of as many: 74.6 µs, 79.2 with 8192 and 32 warps


@dataclass(frozen=True)
class Rows:
    """What an op does with its rows."""

    inputs: int = 1  # tensors with rows that it reads
    one_sum: bool = False  # it needs one sum of a row before it can write, no more
    least: int = 1  # the smallest block that will do
    held: int = _HELD  # the longest row that registers hold
    long: Config = _LONG  # for longer rows
    wide: int = _HELD + 1  # where rows are many and this long, a lane holds twice as much


def least_block(per: str) -> int:
    """The smallest block for an op that quantises: whole groups."""
    return fp8.GROUP if per == "group" else 1


def to_fp8(per: str, inputs: int) -> Rows:
    """Of an op that quantises."""
    return Rows(inputs, least=least_block(per), long=_LONG if per == "token" else LONG_SUMS)


def refusal(config: Config | None, least: int = 1) -> str | None:
    if config is None:
        return None
    if config.block < least:
        return f"block must be {least} or more, got {config.block}"
    for name, size in (("rows", config.rows), ("block", config.block)):
        if size < 1 or size & (size - 1):
            return f"{name} must be a power of two, got {size}"
    if config.num_warps not in _WARPS:
        return f"num_warps must be one of {', '.join(map(str, _WARPS))}, got {config.num_warps}"
    lane = _VALUES_PER_LANE // (4 if config.num_warps > _MANY else 1)  # of 64 registers
    values, most = config.rows * config.block, 32 * config.num_warps * lane
    return f"tile of {values} values does not fit the registers of {config.num_warps} warps" if values > most else None


def default(x: TensorSpec, of: Rows) -> Config:
    """Sixteen values a lane, eight where each is an access of its own, with an address and a mask, or rows are few.

    Several short rows are one program's as long as that leaves many programs. Many long rows of which one sum must be
    known are read in parts, twice, the second time from L1: 32768 × 8192 took 255 µs so on an H200, 261 in registers.
    """
    m, n, _ = rows(x)
    if of.one_sum and m > _HIDING and m * n >= 2**22 and n >= 4096:
        fitting = _l1_rows(n, x.dtype.itemsize, of.inputs)  # of programs on a processor: four of 16 warps, two of 32
        if fitting >= 4:
            part = min(triton.next_power_of_2(n) // 2, _PART)
            return Config(1, part, part // 256)
        if fitting >= 2 and n > 2 * _PART:
            return Config(1, 2 * _PART, _WARPS[-1])
    return _at_once(x, of)


def _at_once(x: TensorSpec, of: Rows) -> Config:
    m, n, _ = rows(x)
    block, count = max(triton.next_power_of_2(max(n, 1)), of.least), 1
    if block > of.held:
        return Config(1, min(of.long.block, of.held), of.long.num_warps)
    while 2 * count * block <= 2048 and m >= 512 * count:
        count *= 2
    # One waits while others work: of two inputs 512 × 8192 took 9.6 µs on an H200 with eight warps, 10.3 with sixteen.
    each = 1024 if n >= of.wide and m > _HIDING // 2 else 512
    return Config(count, block, _warps(count * block, n, each, few=m <= _HIDING))


def _warps(values: int, n: int, each: int = 512, few: bool = False) -> int:
    """`few`: 1 × 1024 on an H200 takes 1.25 µs with four warps, 1.31 with two."""
    alone = each if n % 16 == 0 else 256
    return min(max(values // alone, min(values // 256, 4) if few else 1, 1), _MANY)


def configs(x: TensorSpec, of: Rows) -> list[Config]:
    """The default first, then what is near it, then shorter parts."""
    base, n = _at_once(x, of), x.shape[-1]
    warps = [Config(base.rows, base.block, w) for w in (base.num_warps // 2, base.num_warps * 2)]
    counts = [Config(c, base.block, _warps(c * base.block, n)) for c in (1, base.rows * 4)]
    cuts = [Config(1, b, w) for b in (2048, 4096, 8192, 16384) if of.least <= b < n for w in (4, 8, 16)]
    found = dict.fromkeys((default(x, of), base, *warps, *counts, *cuts))
    return [c for c in found if refusal(c) is None and c.rows * c.block <= of.held]


def options(config: Config, m: int, n: int, itemsize: int, inputs: int) -> dict[str, Any]:
    """READ: when the weights are read, before or after the sums; or where a row is read again from: from L1, or long.

    `inputs` are what has rows.
    """
    if n > config.block:
        read = "again" if _l1_rows(n, itemsize, inputs) >= 2 else "long"
    else:
        read = "early" if triton.cdiv(m, config.rows) <= _HIDING else "late"
    return {"ROWS": config.rows, "BLOCK": config.block, "READ": read}


def _l1_rows(n: int, itemsize: int, inputs: int) -> int:
    """How many rows L1 holds at a time."""
    return _L1_BYTES // max(n * itemsize * inputs, 1)


def grid(m: int, config: Config) -> tuple[int]:
    return (triton.cdiv(m, config.rows),)


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


@triton.jit
def _greatest(y, mask):
    """[ROWS, 1]: of the magnitudes in each row."""
    return tl.max(tl.where(mask, magnitude(y), 0), axis=1, keep_dims=True)


@triton.jit
def _write_groups(
    y, y_ptr, s_ptr, s_col, first, n, inside, mask,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantises groups of 128; `s_ptr` [ROWS, 1] points to each row's first scale, `first` is the block's column."""
    ROWS: tl.constexpr = y.shape[0]
    GROUPS: tl.constexpr = y.shape[1] // _GROUP
    y = tl.reshape(tl.where(mask, y, 0.0), (ROWS, GROUPS, _GROUP))
    made = scale(tl.max(magnitude(y), axis=2), FORMAT, POW2)
    group = first // _GROUP + tl.arange(0, GROUPS)[None, :]
    tl.store(s_ptr + group * s_col, made, mask=inside & (group * _GROUP < n))
    y = tl.reshape(y * (1.0 / made)[:, :, None], (ROWS, GROUPS * _GROUP))
    tl.store(y_ptr, quantise(y, FORMAT, NATIVE), mask=mask)


@triton.jit
def normalise(
    x_ptr, r_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, s_ptr, s_col, inside, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, READ: tl.constexpr, CENTRED: tl.constexpr = False,
    PER: tl.constexpr = None, FORMAT: tl.constexpr = None, POW2: tl.constexpr = False, NATIVE: tl.constexpr = False,
):  # fmt: skip
    """Pointers to x, residual, y, sum and scales are [ROWS, 1]: the starts of rows. What an op has not is None."""
    cols = tl.arange(0, BLOCK)[None, :]
    if READ == "early" or READ == "late":
        mask = inside & (cols < n)
        x = _read(x_ptr, r_ptr, sum_ptr, cols, mask, "")
        if READ == "early":
            w, b = _columns(w_ptr, b_ptr, cols, n)  # under way before the sums wait for the row
        hand_over()
        if CENTRED:
            x = tl.where(mask, x - tl.sum(x, axis=1, keep_dims=True) / n, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / n + eps)
        if READ == "late":
            w, b = _columns(w_ptr, b_ptr, cols, n)
        y = _weighted(x * rstd, w, b, b_ptr, offset)
        if PER == "token":
            made = scale(_greatest(y, mask), FORMAT, POW2)
            tl.store(s_ptr, made, mask=inside)
            tl.store(y_ptr + cols, quantise(y * (1.0 / made), FORMAT, NATIVE), mask=mask)
        elif PER == "group":
            _write_groups(y, y_ptr + cols, s_ptr, s_col, 0, n, inside, mask, FORMAT, POW2, NATIVE)
        else:
            tl.store(y_ptr + cols, y, mask=mask)
    else:
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
        hand_over()
        if PER == "token":
            top = tl.max(tops, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
            made = scale(magnitude(top * rstd), FORMAT, POW2)  # rstd is the whole row's: it changes no order
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
                y = quantise(y * (1.0 / made), FORMAT, NATIVE)
                tl.store(y_ptr + first + cols, y, mask=mask, eviction_policy=WRITE)
            elif PER == "group":
                _write_groups(y, y_ptr + first + cols, s_ptr, s_col, first, n, inside, mask, FORMAT, POW2, NATIVE)
            else:
                tl.store(y_ptr + first + cols, y, mask=mask, eviction_policy=WRITE)
