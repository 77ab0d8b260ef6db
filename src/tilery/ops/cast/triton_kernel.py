"""A program takes a block of one row: nothing is shared between elements, so any cut will do."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec, dtype_name
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.cast import outputs
from tilery.parts import fp8, triton_fp8, triton_pieces
from tilery.parts.rows import joined
from tilery.parts.triton_fp8 import quantise, widen
from tilery.parts.triton_pieces import Config, archs, piece

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(x: TensorSpec, dtype: str, config: Config | None = None) -> str | None:
    return None


def default(x: TensorSpec, dtype: str) -> Config:
    return triton_pieces.default(joined(x)[1], block=2048)


def configs(x: TensorSpec, dtype: str) -> list[Config]:
    return triton_pieces.configs()


@triton_glue.early
@triton.jit
def _cast(
    x_ptr, y_ptr, x_stride, n,
    FROM_FP8: tl.constexpr, TO_FP8: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    take_over()
    row, start, cols, mask = piece(n, BLOCK, PLACE)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask)
    x = x.to(tl.float32) if FROM_FP8 is None else widen(x, FROM_FP8, NATIVE)
    y = x if TO_FP8 is None else quantise(x, TO_FP8, NATIVE)
    tl.store(y_ptr + row * n + start + cols, y, mask=mask)


def _format(t) -> str | None:
    name = dtype_name(t.dtype)
    return name if name in fp8.LARGEST else None


def _call(outs, config: Config, x):
    """Grid, arguments and constants; of tensors for `run` and of specs for `compile`."""
    (m, n, stride), y = joined(x), outs[0]
    given, made = _format(x), _format(y)
    grid, constants = triton_pieces.cut(m, n, config)
    constants |= {"FROM_FP8": given, "TO_FP8": made, "NATIVE": triton_fp8.native(x.device)}
    tensors = triton_fp8.as_bytes(x) if given else x, triton_fp8.as_bytes(y) if made else y
    return grid, (*tensors, stride, n), constants


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _call(outputs(*specs), config, specs[0])
    return triton_glue.legacy_compile(_cast, arguments, constants, config.options, arch)


def run(outs, args, config: Config) -> None:
    grid, arguments, constants = _call(outs, config, args[0])
    triton_glue.legacy_launch(_cast, grid, arguments, constants, config.options)
