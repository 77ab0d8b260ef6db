"""A program takes a tile, reads it by rows and writes it by columns; it turns in shared memory."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.languages.triton_glue import take_over
from tilery.ops.transpose import outputs
from tilery.parts import triton_fp8
from tilery.parts.rows import rows

archs = ARCHS


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    num_warps: int


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return None


def default(x: TensorSpec) -> Config:
    """Sides of 128 bytes, the least that reads whole lines of the cache both ways."""
    side = max(128 // x.dtype.itemsize, 32)
    m, n = (min(side, max(triton.next_power_of_2(size), 16)) for size in x.shape[-2:])
    return Config(m, n, num_warps=min(max(m * n // 1024, 1), 8))


def configs(x: TensorSpec) -> list[Config]:
    return [Config(m, n, w) for m, n in ((32, 32), (32, 128), (64, 64), (128, 32), (64, 128)) for w in (4, 8)]


@triton_glue.early
@triton.jit
def _transpose(x_ptr, y_ptr, x_stride, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    take_over()
    down, across = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile = tl.program_id(0) % (down * across)
    batch = (tl.program_id(0) // (down * across)).to(tl.int64)
    i = (tile // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    j = (tile % across * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (i < m)[:, None] & (j < n)[None, :]
    x = tl.load(x_ptr + ((batch * m + i) * x_stride)[:, None] + j[None, :], mask=mask)
    tl.store(y_ptr + ((batch * n + j) * m)[:, None] + i[None, :], tl.trans(x), mask=tl.trans(mask))


def _call(outs, config: Config, x):
    """Grid, arguments and constants; of tensors for `run` and of specs for `compile`."""
    m, n = x.shape[-2:]
    count, _, stride = rows(x)
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    tensors = (x, outs[0]) if x.dtype.itemsize > 1 else (triton_fp8.as_bytes(x), triton_fp8.as_bytes(outs[0]))
    return (
        (count // max(m, 1) * tiles,),
        (*tensors, stride, m, n),
        {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n},
    )


def compile(specs, config: Config, arch: str) -> Artifact:
    _, arguments, constants = _call(outputs(*specs), config, *specs)
    return triton_glue.legacy_compile(_transpose, arguments, constants, {"num_warps": config.num_warps}, arch)


def run(outs, args, config: Config) -> None:
    grid, arguments, constants = _call(outs, config, *args)
    triton_glue.legacy_launch(_transpose, grid, arguments, constants, {"num_warps": config.num_warps})
