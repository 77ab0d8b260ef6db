"""Backwards of rms_norm, add_rms_norm and layer_norm in Triton: a fixed number of programs take turns at the rows.

Each sums the weight's gradient over its rows and writes the sum to a row of a workspace; a second kernel adds these in
a fixed order, so that every run gives the same bits.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import rows, two_level_rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.ops.norms.triton import tiles
from tilery.ops.norms.triton.tiles import LONG_SUM, Tiling

# x, dy, weight and the gradient's sum of a row all sit in registers: 64 of 255 a lane with 16 warps.
_TILING = Tiling(longest_kept=8192, long=LONG_SUM)
_PROGRAMS_PER_SM = 4  # about, so that they hide each other's latency
_COLUMNS, _PARTS = 32, 64  # of the workspace, that a program of `_sum_programs` takes at a time


class Strided(NamedTuple):
    """Where the rows of a tensor lie; without a pointer there are none."""

    ptr: Any
    stride: Any


class TwoLevelStrided(NamedTuple):
    """Rows at two distances: row r begins at r // heads · stride + r % heads · step."""

    ptr: Any
    stride: Any
    heads: Any
    step: Any


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
def _gradients(
    dy, x, w_ptr, r, dx_ptr, dw_ptr, db_ptr, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr, CENTRED: tl.constexpr = False,
):  # fmt: skip
    """dy and r are `Strided`, x is `TwoLevelStrided`; r is a gradient to be added to dx. dw and db are workspaces
    [programs, n]. What an op does not have is None."""
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
        x_row = x.ptr + (row // x.heads) * x.stride + (row % x.heads) * x.step
        dy_row, dx_row, r_row = dy.ptr + row * dy.stride, dx_ptr + row * n, row * r.stride
        if LONG:
            _long_row(dy_row, x_row, w_ptr, r.ptr, r_row, dx_row, dw_ptr, db_ptr, own, n, eps, offset, BLOCK, CENTRED)
        else:
            mask = (row < m) & (cols < n)
            value, dy_value = _load(x_row + cols, mask), _load(dy_row + cols, mask)
            scaled, mean = dy_value * w, 0.0
            if CENTRED:
                value = tl.where(mask, value - tl.sum(value, axis=1, keep_dims=True) / n, 0.0)
                mean = tl.sum(scaled, axis=1, keep_dims=True) / n
            rstd = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / n + eps)
            normal = value * rstd
            dot = tl.sum(scaled * normal, axis=1, keep_dims=True) / n
            dx = _x_gradient(normal, scaled, rstd, dot, mean, r.ptr, r_row + cols, mask)
            tl.store(dx_row + cols, dx, mask=mask)
            dw += tl.where(mask, dy_value * normal, 0.0)  # 0 · NaN is NaN in rows that are not there
            db += dy_value
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


@triton.jit(do_not_specialize=["m"])
def _rms_norm_backward(
    dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, dy_stride, x_stride, heads, step, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    dy, x, r = Strided(dy_ptr, dy_stride), TwoLevelStrided(x_ptr, x_stride, heads, step), Strided(None, 0)
    _gradients(dy, x, w_ptr, r, dx_ptr, dw_ptr, None, m, n, eps, offset, ROWS, BLOCK, LONG)


@triton.jit(do_not_specialize=["m"])
def _add_rms_norm_backward(
    dy_ptr, r_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, dy_stride, r_stride, x_stride, m, n, eps, offset,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    dy, x, r = Strided(dy_ptr, dy_stride), TwoLevelStrided(x_ptr, x_stride, 1, 0), Strided(r_ptr, r_stride)
    _gradients(dy, x, w_ptr, r, dx_ptr, dw_ptr, None, m, n, eps, offset, ROWS, BLOCK, LONG)


@triton.jit(do_not_specialize=["m"])
def _layer_norm_backward(
    dy_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, db_ptr, dy_stride, x_stride, m, n, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    dy, x, r = Strided(dy_ptr, dy_stride), TwoLevelStrided(x_ptr, x_stride, 1, 0), Strided(None, 0)
    _gradients(dy, x, w_ptr, r, dx_ptr, dw_ptr, db_ptr, m, n, eps, 0.0, ROWS, BLOCK, LONG, CENTRED=True)


@triton.jit
def _sum_programs(dw_part_ptr, db_part_ptr, dw_ptr, db_ptr, parts, n, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """dw is the sum of what the programs summed; so is db where there is one."""
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


@dataclass(frozen=True)
class Config:
    """A program takes `rows` rows, `block` columns at a time, and there are `programs`."""

    rows: int
    block: int
    num_warps: int
    programs: int


class NormBackward(Kernel):
    """A kernel whose programs take turns at rows of x and sum over them, and one that adds their sums up."""

    archs = ARCHS
    Config = Config
    kernel: Any

    def x(self, call: Call) -> TensorSpec:
        """What was normalised."""
        x: TensorSpec = call.x
        return x

    def args(self, call: Call) -> dict[str, Any]:
        """The arguments of the kernel but m, n and eps, by name."""
        raise NotImplementedError

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        if config is None:
            return None
        n = self.x(call).shape[-1]
        if config.rows > 1 and n > config.block:
            return f"rows must be 1 where a row of {n} is longer than block, got {config.rows} and {config.block}"
        if config.programs < 1:
            return f"programs must be 1 or more, got {config.programs}"
        return tiles.refusal(tiles.Config(config.rows, config.block, config.num_warps))

    def default(self, call: Call) -> Config:
        return _with_programs(self.x(call), _TILING.default(self.x(call)), self._programs(call))

    def _programs(self, call: Call) -> int:
        return _PROGRAMS_PER_SM * gpu(self.x(call).device).sms_power_of_2

    def configs(self, call: Call) -> list[Config]:
        x, most = self.x(call), self._programs(call)
        base = _TILING.default(x)
        fewer = [_with_programs(x, base, programs) for programs in (most // 4, most // 2)]
        found = [self.default(call), *fewer, *(_with_programs(x, cut, most) for cut in _TILING.configs(x))]
        return list(dict.fromkeys(found))

    def workspace(self, call: Call, config: Config) -> dict[str, TensorSpec]:
        return {"dweight_sums": _sums(self.x(call), config)}

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, _ = rows(self.x(call))
        args = {**self.args(call), "m": m, "n": n, "eps": call.eps}
        constants = {"ROWS": config.rows, "BLOCK": config.block, "LONG": n > config.block}
        sums = {**self.sums(call), "parts": config.programs, "n": n}
        return [
            Launch(self.kernel, config.programs, args, constants, {"num_warps": config.num_warps}),
            Launch(_sum_programs, triton.cdiv(n, _COLUMNS), sums, {"PARTS": _PARTS, "COLUMNS": _COLUMNS}),
        ]

    def sums(self, call: Call) -> dict[str, Any]:
        """What the programs summed, and where it is added up."""
        return {"dw_part_ptr": call.dweight_sums, "db_part_ptr": None, "dw_ptr": call.dweight, "db_ptr": None}


def _with_programs(x: TensorSpec, cut: tiles.Config, most: int) -> Config:
    programs = max(min(triton.cdiv(rows(x).m, cut.rows), most), 1)  # one at least: without rows the sum is 0
    return Config(cut.rows, cut.block, cut.num_warps, programs)


def _sums(x: TensorSpec, config: Config) -> TensorSpec:
    return TensorSpec.contiguous((config.programs, x.shape[-1]), torch.float32, x.device)


class RmsNormBackward(NormBackward):
    kernel = _rms_norm_backward

    def args(self, call: Call) -> dict[str, Any]:
        _, _, stride, heads, step = two_level_rows(call.x)
        tensors = {"dy_ptr": call.dy, "x_ptr": call.x, "w_ptr": call.weight}
        tensors |= {"dx_ptr": call.dx, "dw_ptr": call.dweight_sums}
        strides = {"dy_stride": rows(call.dy).stride, "x_stride": stride, "heads": heads, "step": step}
        return tensors | strides | {"offset": call.offset}


class AddRmsNormBackward(NormBackward):
    kernel = _add_rms_norm_backward

    def x(self, call: Call) -> TensorSpec:
        x: TensorSpec = call.residual_out
        return x

    def args(self, call: Call) -> dict[str, Any]:
        r, x = call.dresidual, call.residual_out
        tensors = {"dy_ptr": call.dy, "r_ptr": r, "x_ptr": x, "w_ptr": call.weight}
        tensors |= {"dx_ptr": call.dx, "dw_ptr": call.dweight_sums}
        strides = {"dy_stride": rows(call.dy).stride, "r_stride": 0 if r is None else rows(r).stride}
        return tensors | strides | {"x_stride": rows(x).stride, "offset": call.offset}


class LayerNormBackward(NormBackward):
    kernel = _layer_norm_backward

    def workspace(self, call: Call, config: Config) -> dict[str, TensorSpec]:
        return {"dweight_sums": _sums(call.x, config), "dbias_sums": _sums(call.x, config)}

    def args(self, call: Call) -> dict[str, Any]:
        tensors = {"dy_ptr": call.dy, "x_ptr": call.x, "w_ptr": call.weight}
        tensors |= {"dx_ptr": call.dx, "dw_ptr": call.dweight_sums, "db_ptr": call.dbias_sums}
        return tensors | {"dy_stride": rows(call.dy).stride, "x_stride": rows(call.x).stride}

    def sums(self, call: Call) -> dict[str, Any]:
        return super().sums(call) | {"db_part_ptr": call.dbias_sums, "db_ptr": call.dbias}


rms_norm_backward, add_rms_norm_backward = RmsNormBackward(), AddRmsNormBackward()
layer_norm_backward = LayerNormBackward()
