"""One pass for rows, groups and blocks; two for a tensor, since its scale is known only then."""

import torch
import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.quantize_fp8 import outputs
from tilery.parts import fp8, triton_fp8, triton_quantise
from tilery.parts.rows import joined, rows
from tilery.parts.triton_fp8 import magnitude, quantise, scale
from tilery.parts.triton_pieces import Config, cut, piece
from tilery.parts.triton_quantise import Call

archs = ARCHS

_MOST_PARTS = 1024
_GROUP = tl.constexpr(fp8.GROUP)


def refusal(x: TensorSpec, per: str, layout: str, pow2: bool, format: str, config: Config | None = None) -> str | None:
    return triton_quantise.refusal(per, config) if per in ("token", "group") else None


def default(x: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> Config:
    if per == "block":
        return Config(fp8.GROUP**2, num_warps=8)
    m, k, _ = rows(x)
    return triton_quantise.default(m, k, per) if per != "tensor" else Config(4096, num_warps=8)


def configs(x: TensorSpec, per: str, layout: str, pow2: bool, format: str) -> list[Config]:
    if per == "block":
        return [Config(fp8.GROUP**2, warps) for warps in (4, 8, 16)]
    return triton_quantise.configs(x.shape[-1], per)


def workspace(x: TensorSpec, per: str, layout: str, pow2: bool, format: str, config: Config) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous((_MOST_PARTS,), torch.int32, x.device),) if per == "tensor" else ()


@triton_glue.early
@triton.jit
def _blocks(
    x_ptr, v_ptr, s_ptr, x_stride, m, k, across,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    take_over()
    down = tl.program_id(0) // across
    lines = (down * _GROUP + tl.arange(0, _GROUP)).to(tl.int64)[:, None]
    cols = (tl.program_id(0) % across * _GROUP + tl.arange(0, _GROUP))[None, :]
    mask = (lines < m) & (cols < k)
    x = tl.load(x_ptr + lines * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    made = scale(tl.max(tl.max(magnitude(x), axis=1), axis=0), FORMAT, POW2)
    tl.store(s_ptr + tl.program_id(0), made)
    tl.store(v_ptr + lines * k + cols, quantise(x * (1 / made), FORMAT, NATIVE), mask=mask)


@triton_glue.early
@triton.jit
def _greatest(x_ptr, part_ptr, x_stride, m, n, BLOCK: tl.constexpr):
    take_over()
    cols = tl.arange(0, BLOCK)
    tops = tl.zeros([BLOCK], tl.int32)
    blocks = tl.cdiv(n, BLOCK)
    for index in range(tl.program_id(0), m * blocks, tl.num_programs(0)):
        row, start = (index // blocks).to(tl.int64), (index % blocks).to(tl.int64) * BLOCK
        x = tl.load(x_ptr + row * x_stride + start + cols, mask=cols < n - start, other=0.0).to(tl.float32)
        tops = tl.maximum(tops, magnitude(x))
    tl.store(part_ptr + tl.program_id(0), tl.max(tops, axis=0))


@triton_glue.early
@triton.jit
def _with_one_scale(
    x_ptr, part_ptr, v_ptr, s_ptr, x_stride, parts, n,
    FORMAT: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    PLACE: tl.constexpr,
):  # fmt: skip
    take_over()
    every = tl.arange(0, MOST)
    made = scale(tl.max(tl.load(part_ptr + every, mask=every < parts, other=0), axis=0), FORMAT, POW2)
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(s_ptr, made)
    row, start, cols, mask = piece(n, BLOCK, PLACE)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(v_ptr + row * n + start + cols, quantise(x * (1 / made), FORMAT, NATIVE), mask=mask)


def _calls(outs, config: Config, parts, x, per, layout, pow2, format) -> list[Call]:
    """What is launched, in turn; of tensors for `run` and of specs for `compile`."""
    if per in ("token", "group"):
        return [triton_quantise.call(outs, x, None, False, per, pow2, format, config)]
    values, scales, how = triton_fp8.as_bytes(outs[0]), outs[1], triton_quantise.constants(x, format, pow2)
    if per == "block":
        (m, k, stride), (down, across) = rows(x), scales.shape
        return [Call(_blocks, (down * across,), (x, values, scales, stride, m, k, across), how)]
    m, n, stride = joined(x)
    grid, blocks = cut(m, n, config)
    pieces = grid[0] * grid[1]
    count = min(max(pieces, 1), _MOST_PARTS)
    how |= {"MOST": _MOST_PARTS, **blocks}
    return [
        Call(_greatest, (count,), (x, parts, stride, m, n), {"BLOCK": config.block}),
        Call(_with_one_scale, grid if pieces else (1,), (x, parts, values, scales, stride, count, n), how),
    ]


def compile(specs, config: Config, arch: str) -> Artifact:
    space = workspace(*specs, config=config)
    calls = _calls(outputs(*specs), config, space[0] if space else None, *specs)
    return triton_glue.greediest([call.compile(config, arch) for call in calls])


def run(outs, args, config: Config, parts=None) -> None:
    for call in _calls(outs, config, parts, *args):
        call.run(config)
