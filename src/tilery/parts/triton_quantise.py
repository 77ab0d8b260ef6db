"""Rows to fp8 in Triton, each with its own scale or one per 128 values; of x, or of silu(x) · up as it is computed."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.base.spec import Artifact
from tilery.languages import triton_glue
from tilery.languages.triton_glue import hand_over, take_over
from tilery.parts import fp8, triton_fp8
from tilery.parts.rows import rows
from tilery.parts.triton_fp8 import magnitude, quantise, scale
from tilery.parts.triton_gated import share
from tilery.parts.triton_pieces import Config, cut, own_place, within

_GROUP = tl.constexpr(fp8.GROUP)
_LONGEST = 16384  # a row that one program holds


class Call(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    def compile(self, config: Config, arch: str) -> Artifact:
        return triton_glue.legacy_compile(self.kernel, self.arguments, self.constants, config.options, arch)

    def run(self, config: Config) -> None:
        triton_glue.legacy_launch(self.kernel, self.grid, self.arguments, self.constants, config.options)


def _block(k: int) -> int:
    """Of a row, all of it if it fits."""
    return min(triton.next_power_of_2(max(k, 32)), _LONGEST)


def default(m: int, k: int, per: str) -> Config:
    if per == "token":
        block = _block(k)
        return Config(block, num_warps=min(max(block // 512, 1), 16))
    # 8192 × 4096 on an H200: 26.5 µs with 2048 values in 4 warps, 35.5 with 1024
    block = min(2048 if m * k >= 2**21 else 1024, max(triton.next_power_of_2(k), fp8.GROUP))
    return Config(block, num_warps=min(max(block // 256, 1), 4))


def configs(k: int, per: str) -> list[Config]:
    if per == "token":
        block = _block(k)
        return [Config(block, warps) for warps in (2, 4, 8, 16) if block <= 64 * 32 * warps]
    return [Config(block, warps) for block in (256, 512, 1024, 2048, 4096) for warps in (2, 4, 8)]


def refusal(per: str, config: Config | None) -> str | None:
    if config and per != "token" and config.block % fp8.GROUP:
        return f"block must be a multiple of {fp8.GROUP}, the values of a group, got {config.block}"
    return None


@triton.jit
def _read(x_ptr, u_ptr, x_at, u_at, mask, GATED: tl.constexpr):
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        x = x * share(x, "silu") * tl.load(u_ptr + u_at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton_glue.early
@triton.jit
def _groups(
    x_ptr, u_ptr, v_ptr, s_ptr,
    x_stride, u_stride, u_start, s_row, s_column, groups, k,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    PLACE: tl.constexpr,
):  # fmt: skip
    """A program takes neighbouring groups of a row."""
    take_over()
    row, block = own_place(k, BLOCK, PLACE)
    group = block * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    cols = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    mask = within(cols, k, PLACE)
    y = _read(x_ptr, u_ptr, row * x_stride + cols, row * u_stride + u_start + cols, mask, GATED)
    hand_over()
    made = scale(tl.max(magnitude(y), axis=1), FORMAT, POW2)
    tl.store(s_ptr + row * s_row + group * s_column, made, mask=within(group, groups, PLACE))
    tl.store(v_ptr + row * k + cols, quantise(y * (1 / made)[:, None], FORMAT, NATIVE), mask=mask)


@triton_glue.early
@triton.jit
def _tokens(
    x_ptr, u_ptr, v_ptr, s_ptr, x_stride, u_stride, u_start, k,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """A program takes a row: once where its registers hold it, else twice."""
    take_over()
    row = tl.program_id(0).to(tl.int64)
    x_ptr, u_ptr, v_ptr = x_ptr + row * x_stride, u_ptr + row * u_stride + u_start, v_ptr + row * k
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        y = _read(x_ptr, u_ptr, cols, cols, cols < k, GATED)
        hand_over()
        made = scale(tl.max(magnitude(y), axis=0), FORMAT, POW2)
        tl.store(v_ptr + cols, quantise(y * (1 / made), FORMAT, NATIVE), mask=cols < k)
    else:
        tops = tl.zeros([BLOCK], tl.int32)
        for start in range(0, k, BLOCK):
            at = start + cols
            tops = tl.maximum(tops, magnitude(_read(x_ptr, u_ptr, at, at, at < k, GATED)))
        made = scale(tl.max(tops, axis=0), FORMAT, POW2)
        for start in range(0, k, BLOCK):
            at = start + cols
            y = _read(x_ptr, u_ptr, at, at, at < k, GATED)
            tl.store(v_ptr + at, quantise(y * (1 / made), FORMAT, NATIVE), mask=at < k)
    tl.store(s_ptr + row, made)


def constants(x: Any, format: str, pow2: bool) -> dict[str, Any]:
    return {"FORMAT": format, "POW2": pow2, "NATIVE": triton_fp8.native(x.device)}


def call(outs: Any, x: Any, up: Any, gated: bool, per: str, pow2: bool, format: str, config: Config) -> Call:
    """Of tensors for a launch and of specs for a compile; without `up`, gated, x holds both halves."""
    values, scales = triton_fp8.as_bytes(outs[0]), outs[1]
    (m, k, _), stride = rows(outs[0]), rows(x).stride
    u_stride, u_start = (stride, k) if up is None else (rows(up).stride, 0)
    how = {**constants(x, format, pow2), "GATED": gated}
    tensors = x, x if up is None else up, values, scales
    if per == "token":
        how |= {"BLOCK": config.block, "WHOLE": config.block >= k}
        return Call(_tokens, (m,), (*tensors, stride, u_stride, u_start, k), how)
    groups = fp8.ceil_div(k, fp8.GROUP)
    grid, blocks = cut(m, k, config)
    strides = stride, u_stride, u_start, scales.stride(0), scales.stride(1)
    return Call(_groups, grid, (*tensors, *strides, groups, k), how | blocks)
