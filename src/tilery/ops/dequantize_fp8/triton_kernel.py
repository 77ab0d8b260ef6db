"""A program takes neighbouring stretches of 128 values of a row; each has one scale."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec, dtype_name
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.dequantize_fp8 import outputs
from tilery.parts import fp8, triton_fp8, triton_pieces
from tilery.parts.rows import rows
from tilery.parts.triton_fp8 import widen
from tilery.parts.triton_pieces import Config, archs, cut, own_place, within

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]

_GROUP = tl.constexpr(fp8.GROUP)


def refusal(values: TensorSpec, scales: TensorSpec, per: str, dtype: str, config: Config | None = None) -> str | None:
    if config and config.block % fp8.GROUP:
        return f"block must be a multiple of {fp8.GROUP}, the values of a group, got {config.block}"
    return None


def default(values: TensorSpec, scales: TensorSpec, per: str, dtype: str) -> Config:
    return Config(2048, num_warps=4)


def configs(values: TensorSpec, scales: TensorSpec, per: str, dtype: str) -> list[Config]:
    return triton_pieces.configs()


@triton_glue.early
@triton.jit
def _dequantize(
    v_ptr, s_ptr, y_ptr, v_stride, s_row, s_column, groups, k,
    HIGH: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    take_over()
    row, block = own_place(k, BLOCK, PLACE)
    group = block * (BLOCK // _GROUP) + tl.arange(0, BLOCK // _GROUP)
    scale = tl.load(s_ptr + row // HIGH * s_row + group * s_column, mask=within(group, groups, PLACE))
    cols = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    mask = within(cols, k, PLACE)
    values = widen(tl.load(v_ptr + row * v_stride + cols, mask=mask, other=0), FORMAT, NATIVE)
    tl.store(y_ptr + row * k + cols, values * scale[:, None], mask=mask)


def _call(outs, config: Config, values, scales, per, dtype):
    """Grid, arguments and constants; of tensors for `run` and of specs for `compile`."""
    m, k, stride = rows(values)
    groups = fp8.ceil_div(k, fp8.GROUP)
    s_row = 0 if per == "tensor" else scales.stride(0)
    s_column = scales.stride(1) if per in ("group", "block") else 0
    arguments = triton_fp8.as_bytes(values), scales, outs[0], stride, s_row, s_column, groups, k
    high = fp8.GROUP if per == "block" else 1
    grid, constants = cut(m, k, config)
    constants |= {"HIGH": high, "FORMAT": dtype_name(values.dtype), "NATIVE": triton_fp8.native(values.device)}
    return grid, arguments, constants


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _call(outputs(*specs), config, *specs)
    return triton_glue.legacy_compile(_dequantize, arguments, constants, config.options, arch)


def run(outs, args, config: Config) -> None:
    grid, arguments, constants = _call(outs, config, *args)
    triton_glue.legacy_launch(_dequantize, grid, arguments, constants, config.options)
