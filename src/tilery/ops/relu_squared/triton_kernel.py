"""A program takes a block of one row: nothing is shared between elements, so any cut will do."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.relu_squared import outputs
from tilery.parts import triton_pieces
from tilery.parts.rows import joined
from tilery.parts.triton_pieces import Config, archs, piece

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return None


def default(x: TensorSpec) -> Config:
    return triton_pieces.default(joined(x)[1], block=2048)


def configs(x: TensorSpec) -> list[Config]:
    return triton_pieces.configs()


@triton_glue.early
@triton.jit
def _relu_squared(x_ptr, y_ptr, x_stride, n, BLOCK: tl.constexpr, PLACE: tl.constexpr):
    take_over()
    row, start, cols, mask = piece(n, BLOCK, PLACE)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask).to(tl.float32)
    positive = tl.where(x < 0, 0.0, x)  # tl.maximum would drop NaN
    tl.store(y_ptr + row * n + start + cols, positive * positive, mask=mask)


def _call(outs, config: Config, x):
    """Grid, arguments and constants; of tensors for `run` and of specs for `compile`."""
    m, n, stride = joined(x)
    grid, constants = triton_pieces.cut(m, n, config)
    return grid, (x, outs[0], stride, n), constants


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _call(outputs(*specs), config, *specs)
    return triton_glue.legacy_compile(_relu_squared, arguments, constants, config.options, arch)


def run(outs, args, config: Config) -> None:
    grid, arguments, constants = _call(outs, config, *args)
    triton_glue.legacy_launch(_relu_squared, grid, arguments, constants, config.options)
