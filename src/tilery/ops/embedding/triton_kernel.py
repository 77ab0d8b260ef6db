"""A program copies a block of one row."""

import triton
import triton.language as tl

from tilery.backends import triton_glue
from tilery.ops.embedding import outputs
from tilery.parts import triton_pieces
from tilery.parts.triton_pieces import Config, archs, piece
from tilery.spec import Artifact, TensorSpec

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run"]


def refusal(ids: TensorSpec, table: TensorSpec, config: Config | None = None) -> str | None:
    return None


def default(ids: TensorSpec, table: TensorSpec) -> Config:
    return triton_pieces.default(table.shape[1], block=4096)


def configs(ids: TensorSpec, table: TensorSpec) -> list[Config]:
    return triton_pieces.configs()


@triton.jit
def _embedding(i_ptr, t_ptr, y_ptr, t_stride, v, n, BLOCK: tl.constexpr):
    row, start, cols, mask = piece(n, BLOCK)
    index = tl.load(i_ptr + row).to(tl.int64)
    inside = (index >= 0) & (index < v)
    found = tl.load(t_ptr + index * t_stride + start + cols, mask=mask & inside, other=float("nan"))
    tl.store(y_ptr + row * n + start + cols, found, mask=mask)


def _arguments(outs, ids, table):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    v, n = table.shape
    return ids, table, outs[0], table.stride(0), v, n


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments = _arguments(outputs(*specs), *specs)
    return triton_glue.compile(_embedding, arguments, {"BLOCK": config.block}, config.options, arch)


def run(outs, args, config: Config) -> None:
    grid = triton_pieces.grid(args[0].numel(), args[1].shape[1], config)
    _embedding[grid](*_arguments(outs, *args), BLOCK=config.block, **config.options)
