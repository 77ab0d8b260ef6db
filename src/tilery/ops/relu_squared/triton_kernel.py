"""A program takes a block of one row: nothing is shared between elements, so any cut will do."""

import triton
import triton.language as tl

from tilery.backends import triton_glue
from tilery.ops.relu_squared import outputs
from tilery.parts import triton_pieces
from tilery.parts.rows import joined
from tilery.parts.triton_pieces import Config, archs, piece
from tilery.spec import Artifact, TensorSpec

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return None


def default(x: TensorSpec) -> Config:
    return triton_pieces.default(joined(x)[1], block=2048)


def configs(x: TensorSpec) -> list[Config]:
    return triton_pieces.configs()


@triton.jit
def _relu_squared(x_ptr, y_ptr, x_stride, n, BLOCK: tl.constexpr):
    row, start, cols, mask = piece(n, BLOCK)
    x = tl.load(x_ptr + row * x_stride + start + cols, mask=mask).to(tl.float32)
    positive = tl.where(x < 0, 0.0, x)  # tl.maximum would drop NaN
    tl.store(y_ptr + row * n + start + cols, positive * positive, mask=mask)


def compile(specs, config: Config, arch: str) -> Artifact:
    (x,) = specs
    _, n, stride = joined(x)
    arguments = x, *outputs(x), stride, n
    return triton_glue.compile(_relu_squared, arguments, {"BLOCK": config.block}, config.options, arch)


def run(outs, args, config: Config) -> None:
    m, n, stride = joined(args[0])
    grid = triton_pieces.grid(m, n, config)
    _relu_squared[grid](args[0], outs[0], stride, n, BLOCK=config.block, **config.options)
