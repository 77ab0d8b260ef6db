"""A program takes a block of one row and adds up all its parts; up to eight of them are on their way at a time."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.splitk_reduce import lines, outputs
from tilery.parts import triton_pieces
from tilery.parts.triton_pieces import Config, archs, piece

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]

_AT_ONCE = 8


def refusal(parts: TensorSpec, out_dtype: str, config: Config | None = None) -> str | None:
    return None


def default(parts: TensorSpec, out_dtype: str) -> Config:
    return triton_pieces.default(lines(parts)[1], block=512)


def configs(parts: TensorSpec, out_dtype: str) -> list[Config]:
    return triton_pieces.configs()


@triton_glue.early
@triton.jit
def _reduce(
    part_ptr, c_ptr, parts, part_stride, row_stride, n,
    AT_ONCE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    take_over()
    row, start, cols, mask = piece(n, BLOCK, PLACE)
    part_ptr += row * row_stride + start
    step = tl.cast(part_stride, tl.int64)  # part * stride overflows int32 past 2**31 elements
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            there = mask if EVEN else mask & (first + i < parts)
            total += tl.load(part_ptr + (first + i) * step + cols, mask=there, other=0.0)
    tl.store(c_ptr + row * n + start + cols, total, mask=mask)


def _call(outs, config: Config, parts):
    """Grid, arguments and constants; of tensors for `run` and of specs for `compile`."""
    (m, n, stride), count = lines(parts), parts.shape[0]
    grid, constants = triton_pieces.cut(m, n, config)
    at_once = min(triton.next_power_of_2(count), _AT_ONCE) if count else 1
    constants |= {"AT_ONCE": at_once, "EVEN": count % at_once == 0}
    return grid, (parts, outs[0], count, parts.stride(0), stride, n), constants


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _call(outputs(*specs), config, specs[0])
    return triton_glue.legacy_compile(_reduce, arguments, constants, config.options, arch)


def run(outs, args, config: Config) -> None:
    grid, arguments, constants = _call(outs, config, args[0])
    triton_glue.legacy_launch(_reduce, grid, arguments, constants, config.options)
