"""quantize_fp8, dequantize_fp8 and cast in Triton.

Rows, groups and blocks are quantized in one pass. A tensor with one scale takes two, since the first has to find it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import flat_rows, rows
from tilery.base.spec import TensorSpec, dtype_name
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages.triton_glue import pdl_launch_dependents, pdl_wait
from tilery.ops.gated.triton_activations import activated
from tilery.ops.quantize.formats import GROUP, LARGEST, groups
from tilery.ops.quantize.triton_fp8 import as_bytes, magnitude, native, quantize, scale, widen
from tilery.ops.rows import triton_rows
from tilery.ops.rows.triton_rows import Config, TritonRows, grid_of, own_block, own_columns, within

_GROUP = tl.constexpr(GROUP)
_LONGEST = 16384  # a row that one program holds
_MOST_MAXIMA = 1024  # of a tensor with one scale: as many programs look for its greatest magnitude

# Rows to fp8, of x or of silu(x) · up as it is computed


@triton.jit
def _read(x_ptr, u_ptr, x_at, u_at, mask, GATED: tl.constexpr):
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        x = activated(x, "silu") * tl.load(u_ptr + u_at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def _quantize_groups(
    x_ptr, u_ptr, v_ptr, s_ptr,
    x_stride, u_stride, u_start, s_row, s_column, groups, k,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """A program takes neighbouring groups of a row."""
    pdl_wait()
    row, block = own_block(k, BLOCK, GRID)
    group = block * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    cols = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    mask = within(cols, k, GRID)
    y = _read(x_ptr, u_ptr, row * x_stride + cols, row * u_stride + u_start + cols, mask, GATED)
    pdl_launch_dependents()
    made = scale(tl.max(magnitude(y), axis=1), FORMAT, POW2)
    tl.store(s_ptr + row * s_row + group * s_column, made, mask=within(group, groups, GRID))
    tl.store(v_ptr + row * k + cols, quantize(y * (1 / made)[:, None], FORMAT, NATIVE), mask=mask)


@triton.jit
def _quantize_tokens(
    x_ptr, u_ptr, v_ptr, s_ptr, x_stride, u_stride, u_start, k,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """A program takes a row. It reads the row once where its registers hold it, else twice."""
    pdl_wait()
    row = tl.program_id(0).to(tl.int64)
    x_ptr, u_ptr, v_ptr = x_ptr + row * x_stride, u_ptr + row * u_stride + u_start, v_ptr + row * k
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        y = _read(x_ptr, u_ptr, cols, cols, cols < k, GATED)
        pdl_launch_dependents()
        made = scale(tl.max(magnitude(y), axis=0), FORMAT, POW2)
        tl.store(v_ptr + cols, quantize(y * (1 / made), FORMAT, NATIVE), mask=cols < k)
    else:
        tops = tl.zeros([BLOCK], tl.int32)
        for start in range(0, k, BLOCK):
            at = start + cols
            tops = tl.maximum(tops, magnitude(_read(x_ptr, u_ptr, at, at, at < k, GATED)))
        made = scale(tl.max(tops, axis=0), FORMAT, POW2)
        for start in range(0, k, BLOCK):
            at = start + cols
            y = _read(x_ptr, u_ptr, at, at, at < k, GATED)
            tl.store(v_ptr + at, quantize(y * (1 / made), FORMAT, NATIVE), mask=at < k)
    tl.store(s_ptr + row, made)


class RowsToFp8(Kernel):
    """Rows to fp8, each with its own scale or one for each group of 128 values."""

    archs = ARCHS
    Config = Config
    gated = False  # whether silu(x) · up is quantized, and not x

    def sources(self, call: Call) -> dict[str, Any]:
        """What is read: x_ptr, u_ptr, x_stride, u_stride and u_start, where u is up, if there is one."""
        raise NotImplementedError

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return _group_refusal(config) if call.per == "group" else None

    def default(self, call: Call) -> Config:
        m, k, _ = rows(call.values)
        if call.per == "token":
            block = self._row_block(k)
            return Config(block, num_warps=min(max(block // 512, 1), 16))
        # 8192 × 4096 on an H200: 26.5 µs with 2048 values in 4 warps, 35.5 with 1024
        block = min(2048 if m * k >= 2**21 else 1024, max(triton.next_power_of_2(k), GROUP))
        return Config(block, num_warps=min(max(block // 256, 1), 4))

    def configs(self, call: Call) -> list[Config]:
        if call.per == "token":
            block = self._row_block(call.values.shape[-1])
            return [Config(block, warps) for warps in (2, 4, 8, 16) if block <= 64 * 32 * warps]
        return [Config(block, warps) for block in (256, 512, 1024, 2048, 4096) for warps in (2, 4, 8)]

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, k, _ = rows(call.values)
        args = {**self.sources(call), "v_ptr": as_bytes(call.values), "s_ptr": call.scales, "k": k}
        constants = {**self.format(call), "GATED": self.gated}
        if call.per == "token":
            constants |= {"BLOCK": config.block, "WHOLE": config.block >= k}
            return [Launch(_quantize_tokens, m, args, constants, config.options, pdl=True)]
        args |= {"s_row": call.scales.stride(0), "s_column": call.scales.stride(1), "groups": groups(k)}
        grid, blocks = grid_of(m, k, config)
        return [Launch(_quantize_groups, grid, args, constants | blocks, config.options, pdl=True)]

    def format(self, call: Call) -> dict[str, Any]:
        """The constants that say how a value is quantized."""
        return {"FORMAT": call.format, "POW2": call.pow2, "NATIVE": native(call.values.device)}

    def _row_block(self, k: int) -> int:
        """All of a row, if it fits."""
        return min(triton.next_power_of_2(max(k, 32)), _LONGEST)


def _group_refusal(config: Config | None) -> str | None:
    if config and config.block % GROUP:
        return f"block must be a multiple of {GROUP}, the values of a group, got {config.block}"
    return None


# quantize_fp8


@triton.jit
def _quantize_blocks(
    x_ptr, v_ptr, s_ptr, x_stride, m, k, across,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A program takes a block of 128 × 128."""
    pdl_wait()
    down = tl.program_id(0) // across
    lines = (down * _GROUP + tl.arange(0, _GROUP)).to(tl.int64)[:, None]
    cols = (tl.program_id(0) % across * _GROUP + tl.arange(0, _GROUP))[None, :]
    mask = (lines < m) & (cols < k)
    x = tl.load(x_ptr + lines * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    made = scale(tl.max(tl.max(magnitude(x), axis=1), axis=0), FORMAT, POW2)
    tl.store(s_ptr + tl.program_id(0), made)
    tl.store(v_ptr + lines * k + cols, quantize(x * (1 / made), FORMAT, NATIVE), mask=mask)


@triton.jit
def _find_maxima(x_ptr, maxima_ptr, x_stride, m, n, BLOCK: tl.constexpr):
    """Every program finds the greatest magnitude of some blocks."""
    pdl_wait()
    cols = tl.arange(0, BLOCK)
    tops = tl.zeros([BLOCK], tl.int32)
    blocks = tl.cdiv(n, BLOCK)
    for index in range(tl.program_id(0), m * blocks, tl.num_programs(0)):
        row, start = (index // blocks).to(tl.int64), (index % blocks).to(tl.int64) * BLOCK
        x = tl.load(x_ptr + row * x_stride + start + cols, mask=cols < n - start, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, magnitude(x))
    tl.store(maxima_ptr + tl.program_id(0), tl.max(tops, axis=0))


@triton.jit
def _quantize_tensor(
    x_ptr, maxima_ptr, v_ptr, s_ptr, x_stride, maxima, n,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    """A program takes a block of a row; all find the same scale."""
    pdl_wait()
    every = tl.arange(0, MOST)
    made = scale(tl.max(tl.load(maxima_ptr + every, mask=every < maxima, other=0), axis=0), FORMAT, POW2)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(s_ptr, made)
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(v_ptr + row * n + start + cols, quantize(x * (1 / made), FORMAT, NATIVE), mask=mask)


class QuantizeFp8(RowsToFp8):
    def sources(self, call: Call) -> dict[str, Any]:
        """x alone; where up would be is not read."""
        _, k, stride = rows(call.x)
        return {"x_ptr": call.x, "u_ptr": call.x, "x_stride": stride, "u_stride": stride, "u_start": k}

    def default(self, call: Call) -> Config:
        if call.per == "block":
            return Config(GROUP**2, num_warps=8)
        return super().default(call) if call.per != "tensor" else Config(4096, num_warps=8)

    def configs(self, call: Call) -> list[Config]:
        if call.per == "block":
            return [Config(GROUP**2, warps) for warps in (4, 8, 16)]
        return super().configs(call)

    def workspace(self, call: Call, config: Config) -> dict[str, TensorSpec]:
        if call.per != "tensor":
            return {}
        return {"maxima": TensorSpec.contiguous((_MOST_MAXIMA,), torch.int32, call.x.device)}

    def launches(self, call: Call, config: Config) -> list[Launch]:
        if call.per in ("token", "group"):
            return super().launches(call, config)
        return self._blocks(call, config) if call.per == "block" else self._tensor(call, config)

    def _blocks(self, call: Call, config: Config) -> list[Launch]:
        (m, k, stride), (down, across) = rows(call.x), call.scales.shape
        args = {"x_ptr": call.x, "v_ptr": as_bytes(call.values), "s_ptr": call.scales}
        args |= {"x_stride": stride, "m": m, "k": k, "across": across}
        return [Launch(_quantize_blocks, down * across, args, self.format(call), config.options, pdl=True)]

    def _tensor(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = flat_rows(call.x)
        (across, down), blocks = grid_of(m, n, config)
        programs = across * down
        count = min(max(programs, 1), _MOST_MAXIMA)
        read = {"x_ptr": call.x, "maxima_ptr": call.maxima, "x_stride": stride, "n": n}
        written = {"v_ptr": as_bytes(call.values), "s_ptr": call.scales, "maxima": count}
        constants = {**self.format(call), "MOST": _MOST_MAXIMA, **blocks}
        grid = (across, down) if programs else (1, 1)  # an empty tensor has a scale too
        return [
            Launch(_find_maxima, count, read | {"m": m}, {"BLOCK": config.block}, config.options, pdl=True),
            Launch(_quantize_tensor, grid, read | written, constants, config.options, pdl=True),
        ]


quantize_fp8 = QuantizeFp8()

# silu_mul_fp8, whose contract is in ops/gated


class SiluMulFp8(RowsToFp8):
    """The product is quantized before it leaves registers."""

    gated = True

    def sources(self, call: Call) -> dict[str, Any]:
        gate, up = call.sources
        strides = {"x_stride": rows(gate).stride, "u_stride": rows(up).stride, "u_start": call.up_start}
        return {"x_ptr": gate, "u_ptr": up, **strides}


silu_mul_fp8 = SiluMulFp8()

# dequantize_fp8


@triton.jit
def _dequantize(
    v_ptr, s_ptr, y_ptr, v_stride, s_row, s_column, groups, k,
    HIGH: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """A program takes neighbouring groups of a row; each has one scale, and HIGH rows share it."""
    pdl_wait()
    row, block = own_block(k, BLOCK, GRID)
    group = block * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    columns = group.to(tl.int64) * s_column  # past 2**31 elements int32 overflows
    scales = tl.load(s_ptr + row // HIGH * s_row + columns, mask=within(group, groups, GRID))
    cols = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    mask = within(cols, k, GRID)
    values = widen(tl.load(v_ptr + row * v_stride + cols, mask=mask, other=0), FORMAT, NATIVE)
    tl.store(y_ptr + row * k + cols, values * scales[:, None], mask=mask)


class DequantizeFp8(TritonRows):
    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return _group_refusal(config)

    def default(self, call: Call) -> Config:
        return Config(2048, num_warps=4)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        values, scales, per = call.values, call.scales, call.per
        m, k, stride = rows(values)
        args = {"v_ptr": as_bytes(values), "s_ptr": scales, "y_ptr": call.y, "v_stride": stride}
        args |= {
            "s_row": 0 if per == "tensor" else scales.stride(0),
            "s_column": scales.stride(1) if per in ("group", "block") else 0,
            "groups": groups(k),
            "k": k,
        }
        grid, constants = grid_of(m, k, config)
        constants |= {"HIGH": GROUP if per == "block" else 1}
        constants |= {"FORMAT": dtype_name(values.dtype), "NATIVE": native(values.device)}
        return [Launch(_dequantize, grid, args, constants, config.options, pdl=True)]


dequantize_fp8 = DequantizeFp8()

# cast


@triton.jit
def _cast(
    x_ptr, y_ptr, x_stride, n,
    FROM_FP8: tl.constexpr, TO_FP8: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row, start, cols, mask = own_columns(n, BLOCK, GRID)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask)
    x = x.to(tl.float32) if FROM_FP8 is None else widen(x, FROM_FP8, NATIVE)
    y = x if TO_FP8 is None else quantize(x, TO_FP8, NATIVE)
    tl.store(y_ptr + row * n + start + cols, y, mask=mask)


class Cast(TritonRows):
    def default(self, call: Call) -> Config:
        _, n, _ = flat_rows(call.x)
        return triton_rows.default(n, block=2048)

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = flat_rows(call.x)
        x, y = _fp8_name(call.x), _fp8_name(call.y)
        args = {"x_ptr": as_bytes(call.x) if x else call.x, "y_ptr": as_bytes(call.y) if y else call.y}
        args |= {"x_stride": stride, "n": n}
        grid, constants = grid_of(m, n, config)
        constants |= {"FROM_FP8": x, "TO_FP8": y, "NATIVE": native(call.x.device)}
        return [Launch(_cast, grid, args, constants, config.options, pdl=True)]


def _fp8_name(x: TensorSpec) -> str | None:
    """The name of a tensor's fp8 format; None where it has another dtype."""
    name = dtype_name(x.dtype)
    return name if name in LARGEST else None


cast = Cast()
