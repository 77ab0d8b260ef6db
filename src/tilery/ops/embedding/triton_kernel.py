"""A program copies a block of one row."""

import math

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.embedding import outputs
from tilery.parts import triton_pieces
from tilery.parts.triton_pieces import Config, archs, piece

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(ids: TensorSpec, table: TensorSpec, config: Config | None = None) -> str | None:
    return None


def default(ids: TensorSpec, table: TensorSpec) -> Config:
    return triton_pieces.default(table.shape[1], block=4096)


def configs(ids: TensorSpec, table: TensorSpec) -> list[Config]:
    return triton_pieces.configs()


@triton_glue.early
@triton.jit
def _embedding(i_ptr, t_ptr, y_ptr, t_stride, v, n, BLOCK: tl.constexpr, PLACE: tl.constexpr):
    take_over()
    row, start, cols, mask = piece(n, BLOCK, PLACE)
    index = tl.load(i_ptr + row).to(tl.int64)
    inside = (index >= 0) & (index < v)
    found = tl.load(t_ptr + index * t_stride + start + cols, mask=mask & inside, other=float("nan"))
    tl.store(y_ptr + row * n + start + cols, found, mask=mask)


def _call(outs, config: Config, ids, table):
    """Grid, arguments and constants; of tensors for `run` and of specs for `compile`."""
    v, n = table.shape
    grid, constants = triton_pieces.cut(math.prod(ids.shape), n, config)
    return grid, (ids, table, outs[0], table.stride(0), v, n), constants


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _call(outputs(*specs), config, *specs)
    return triton_glue.legacy_compile(_embedding, arguments, constants, config.options, arch)


def run(outs, args, config: Config) -> None:
    grid, arguments, constants = _call(outs, config, *args)
    triton_glue.legacy_launch(_embedding, grid, arguments, constants, config.options)
