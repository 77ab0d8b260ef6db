"""Triton kernels of the backwards of softmax and log_softmax: rows in registers, or in blocks that are read twice."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.parts.rows import rows

archs = ARCHS

_MOST_VALUES = 64  # a lane, of each of the two rows
_WHOLE = 16384  # the longest rows that wait in registers: 32 values a lane of each with 16 warps
_BLOCK = 8192  # of rows too long for that


@dataclass(frozen=True)
class Config:
    block: int  # columns that a program holds at a time; rows that are longer are read twice
    num_warps: int


def refusal(dy: TensorSpec, y: TensorSpec, config: Config | None = None) -> str | None:
    if config is None:
        return None
    if min(config.block, config.num_warps) < 1 or any(v & (v - 1) for v in (config.block, config.num_warps)):
        return f"block and num_warps must be powers of two, got {config}"
    most = 32 * config.num_warps * _MOST_VALUES
    if config.block > most:
        return f"block of {config.block} does not fit the registers of {config.num_warps} warps ({most} values)"
    return None


def default(dy: TensorSpec, y: TensorSpec) -> Config:
    block = triton.next_power_of_2(max(dy.shape[-1], 1))
    return Config(block, min(max(block // 512, 1), 16)) if block <= _WHOLE else Config(_BLOCK, 16)


def configs(dy: TensorSpec, y: TensorSpec) -> list[Config]:
    block = triton.next_power_of_2(max(dy.shape[-1], 1))
    found = [Config(block, warps) for warps in (1, 2, 4, 8, 16) if block <= 2 * _WHOLE]
    found += [Config(part, warps) for part in (512, 4096, 8192) for warps in (4, 8, 16) if part < block]
    return [c for c in dict.fromkeys([default(dy, y), *found]) if refusal(dy, y, c) is None]


@triton.jit
def _part(dy, y, LOG: tl.constexpr):
    """What of a row's sum these elements make."""
    return dy if LOG else dy * y


@triton.jit
def _result(dy, y, total, LOG: tl.constexpr):
    return dy - tl.exp(y) * total if LOG else y * (dy - total)


@triton_glue.early
@triton.jit
def _whole(dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, n, BLOCK: tl.constexpr, LOG: tl.constexpr):
    take_over()
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    dy = tl.load(dy_ptr + row * dy_stride + cols, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + cols, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(_part(dy, y, LOG), axis=0)
    tl.store(dx_ptr + row * n + cols, _result(dy, y, total, LOG), mask=mask)


@triton_glue.early
@triton.jit
def _blocks(dy_ptr, y_ptr, dx_ptr, dy_stride, y_stride, n, BLOCK: tl.constexpr, LOG: tl.constexpr):
    take_over()
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * y_stride
    dx_ptr += row * n
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        dy = tl.load(dy_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        sums += _part(dy, y, LOG)
    total = tl.sum(sums, axis=0)
    blocks = tl.cdiv(n, BLOCK)
    for i in range(blocks):
        cols = (blocks - 1 - i) * BLOCK + tl.arange(0, BLOCK)  # backwards: what was read last is still near
        dy = tl.load(dy_ptr + cols, mask=cols < n).to(tl.float32)
        y = tl.load(y_ptr + cols, mask=cols < n).to(tl.float32)
        tl.store(dx_ptr + cols, _result(dy, y, total, LOG), mask=cols < n)


def _launch(outs: Any, dy: Any, y: Any, config: Config, log: bool) -> tuple[Any, Any, dict[str, Any]]:
    """Kernel, arguments and constants, of tensors for `run` and of specs for `compile`."""
    _, n, stride = rows(dy)
    kernel = _whole if n <= config.block else _blocks
    return kernel, (dy, y, outs[0], stride, rows(y).stride, n), {"BLOCK": config.block, "LOG": log}


def compile(outs: Any, dy: TensorSpec, y: TensorSpec, config: Config, arch: str, log: bool) -> Artifact:
    kernel, arguments, constants = _launch(outs, dy, y, config, log)
    return triton_glue.legacy_compile(kernel, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs: Any, dy: Any, y: Any, config: Config, log: bool) -> None:
    kernel, arguments, constants = _launch(outs, dy, y, config, log)
    triton_glue.legacy_launch(kernel, (rows(dy).m,), arguments, constants, {"num_warps": config.num_warps})
