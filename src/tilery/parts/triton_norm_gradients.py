"""Triton kernels for the gradients of norms: a fixed number of programs take turns at the rows.

Each sums the weight's gradient over its rows and writes the sum to a row of a workspace; a second kernel adds these in
a fixed order, so that every run gives the same bits.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.spec import TensorSpec
from tilery.parts import triton_norms
from tilery.parts.rows import rows

_HELD = 8192  # x, dy, weight and the gradient's sum of a row all sit in registers: 64 of 255 a lane with 16 warps
_ROWS = triton_norms.Rows(held=_HELD, long=triton_norms.LONG_SUMS)
_PROGRAMS = 512  # about four on each processor of an H200, so that they hide each other's latency
_COLUMNS, _PARTS = 32, 64  # of the workspace, that a program of `add_up` takes at a time


@dataclass(frozen=True)
class Config:
    """A program takes `rows` rows, `block` columns at a time, and there are `programs`."""

    rows: int
    block: int
    num_warps: int
    programs: int


def refusal(n: int, config: Config | None) -> str | None:
    if config is None:
        return None
    if config.rows > 1 and n > config.block:
        return f"rows must be 1 where a row of {n} is longer than block, got {config.rows} and {config.block}"
    if config.programs < 1:
        return f"programs must be 1 or more, got {config.programs}"
    return triton_norms.refusal(triton_norms.Config(config.rows, config.block, config.num_warps))


def default(x: TensorSpec) -> Config:
    return _with_programs(x, triton_norms.default(x, _ROWS), _PROGRAMS)


def configs(x: TensorSpec) -> list[Config]:
    base = triton_norms.default(x, _ROWS)
    fewer = [_with_programs(x, base, p) for p in (_PROGRAMS // 4, _PROGRAMS // 2)]
    found = [default(x), *fewer, *(_with_programs(x, c, _PROGRAMS) for c in triton_norms.configs(x, _ROWS))]
    return list(dict.fromkeys(found))


def _with_programs(x: TensorSpec, cut: triton_norms.Config, most: int) -> Config:
    programs = max(min(triton.cdiv(rows(x).m, cut.rows), most), 1)  # one at least: without rows the sum is 0
    return Config(cut.rows, cut.block, cut.num_warps, programs)


def partial_sums(x: TensorSpec, config: Config) -> TensorSpec:
    return TensorSpec.contiguous((config.programs, x.shape[-1]), torch.float32, x.device)


def options(config: Config, n: int) -> dict[str, Any]:
    return {"ROWS": config.rows, "BLOCK": config.block, "LONG": n > config.block}


@triton.jit
def _load(ptr, mask):
    return tl.load(ptr, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _x_gradient(normal, scaled, rstd, dot, mean, r_ptr, r_at, mask):
    """dot is the mean of scaled · normal, mean that of scaled where x was centred, else 0; r is added."""
    dx = (scaled - normal * dot - mean) * rstd
    if r_ptr is not None:
        dx += _load(r_ptr + r_at, mask)
    return dx


@triton.jit
def gradients(
    dy_ptr, x_ptr, w_ptr, r_ptr, dx_ptr, dw_ptr, db_ptr, dy_stride, x_stride, heads, step, r_stride, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr, CENTRED: tl.constexpr = False,
):  # fmt: skip
    """r is a gradient to be added to dx; dw and db are workspaces [programs, n]. What an op has not is None."""
    program, turn = tl.program_id(0), tl.num_programs(0) * ROWS
    own = program.to(tl.int64) * n  # where this program's sums lie
    cols = tl.arange(0, BLOCK)[None, :]
    if LONG:
        tl.static_assert(ROWS == 1)  # two rows would write the same sums
        _clear(dw_ptr + own, n, BLOCK)
        if db_ptr is not None:
            _clear(db_ptr + own, n, BLOCK)
    else:
        w = _load(w_ptr + cols, cols < n) + offset
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    db = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(program * ROWS, m, turn):
        row = tl.arange(0, ROWS)[:, None].to(tl.int64) + start  # int64: row * stride overflows int32
        x_row = x_ptr + (row // heads) * x_stride + (row % heads) * step
        dy_row, dx_row, r_row = dy_ptr + row * dy_stride, dx_ptr + row * n, row * r_stride
        if LONG:
            _long_row(dy_row, x_row, w_ptr, r_ptr, r_row, dx_row, dw_ptr, db_ptr, own, n, eps, offset, BLOCK, CENTRED)
        else:
            mask = (row < m) & (cols < n)
            x, dy = _load(x_row + cols, mask), _load(dy_row + cols, mask)
            scaled, mean = dy * w, 0.0
            if CENTRED:
                x = tl.where(mask, x - tl.sum(x, axis=1, keep_dims=True) / n, 0.0)
                mean = tl.sum(scaled, axis=1, keep_dims=True) / n
            rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / n + eps)
            normal = x * rstd
            dot = tl.sum(scaled * normal, axis=1, keep_dims=True) / n
            dx = _x_gradient(normal, scaled, rstd, dot, mean, r_ptr, r_row + cols, mask)
            tl.store(dx_row + cols, dx, mask=mask)
            dw += tl.where(mask, dy * normal, 0.0)  # 0 · NaN is NaN in rows that are not there
            db += dy
    if not LONG:
        column = tl.arange(0, BLOCK)
        tl.store(dw_ptr + own + column, tl.sum(dw, axis=0), mask=column < n)
        if db_ptr is not None:
            tl.store(db_ptr + own + column, tl.sum(db, axis=0), mask=column < n)


@triton.jit
def _clear(ptr, n, BLOCK: tl.constexpr):
    for first in range(0, n, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        tl.store(ptr + cols, tl.zeros((1, BLOCK), tl.float32), mask=cols < n)


@triton.jit
def _add_to(ptr, value, mask):
    tl.store(ptr, tl.load(ptr, mask=mask) + value, mask=mask)


@triton.jit
def _long_row(
    dy_ptr, x_ptr, w_ptr, r_ptr, r_row, dx_ptr, dw_ptr, db_ptr, own, n, eps, offset,
    BLOCK: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Reads a row block by block, twice or, to centre it, three times; sums over rows wait in the workspace."""
    tl.debug_barrier()  # what other threads wrote there is read below
    centre = tl.zeros((1, 1), tl.float32)
    if CENTRED:
        total = tl.zeros((1, BLOCK), tl.float32)
        for first in range(0, n, BLOCK):
            cols = first + tl.arange(0, BLOCK)[None, :]
            total += _load(x_ptr + cols, cols < n)
        centre = tl.sum(total, axis=1, keep_dims=True) / n
    squares = tl.zeros((1, BLOCK), tl.float32)
    products = tl.zeros((1, BLOCK), tl.float32)
    scaleds = tl.zeros((1, BLOCK), tl.float32)
    for first in range(0, n, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        mask = cols < n
        x = tl.where(mask, _load(x_ptr + cols, mask) - centre, 0.0)
        scaled = _load(dy_ptr + cols, mask) * (_load(w_ptr + cols, mask) + offset)
        squares += x * x
        products += scaled * x
        scaleds += scaled
    rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / n + eps)
    dot = tl.sum(products, axis=1, keep_dims=True) * rstd / n
    mean = tl.sum(scaleds, axis=1, keep_dims=True) / n if CENTRED else 0.0
    for first in range(0, n, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        mask = cols < n
        normal, dy = (_load(x_ptr + cols, mask) - centre) * rstd, _load(dy_ptr + cols, mask)
        scaled = dy * (_load(w_ptr + cols, mask) + offset)
        dx = _x_gradient(normal, scaled, rstd, dot, mean, r_ptr, r_row + cols, mask)
        tl.store(dx_ptr + cols, dx, mask=mask)
        _add_to(dw_ptr + own + cols, dy * normal, mask)
        if db_ptr is not None:
            _add_to(db_ptr + own + cols, dy, mask)


@triton.jit
def _add_up(dw_part_ptr, db_part_ptr, dw_ptr, db_ptr, parts, n, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """dw = Σ of its partial sums, and so for db where there is one."""
    _sum_columns(dw_part_ptr, dw_ptr, parts, n, PARTS, COLUMNS)
    if db_ptr is not None:
        _sum_columns(db_part_ptr, db_ptr, parts, n, PARTS, COLUMNS)


@triton.jit
def _sum_columns(part_ptr, out_ptr, parts, n, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    cols = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((PARTS, COLUMNS), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        mask = (part < parts) & (cols < n)[None, :]
        total += tl.load(part_ptr + part.to(tl.int64) * n + cols[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, axis=0), mask=cols < n)


def run(kernel: Any, arguments: tuple[Any, ...], config: Config, sums: tuple[Any, ...], outs: tuple[Any, ...]) -> None:
    """Launches the op's kernel, then adds its partial `sums` up into `outs`: dweight, or dweight and dbias."""
    n = sums[0].shape[1]
    kernel[(config.programs,)](*arguments, **options(config, n), num_warps=config.num_warps)
    pairs = (*sums, *outs) if len(outs) == 2 else (sums[0], None, outs[0], None)
    _add_up[(triton.cdiv(n, _COLUMNS),)](*pairs, config.programs, n, PARTS=_PARTS, COLUMNS=_COLUMNS)
