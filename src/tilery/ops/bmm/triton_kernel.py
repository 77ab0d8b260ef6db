"""A program per tile of c, matrix by matrix; the compiler pipelines the loads."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.ops.bmm import outputs
from tilery.parts import batches, triton_batches
from tilery.parts.triton_batches import BAND, multiply, place
from tilery.parts.triton_tiles import Tiles as Config

archs = ARCHS


def refusal(a: TensorSpec, b: TensorSpec, config: Config | None = None) -> str | None:
    return triton_batches.refusal(a, config)


def default(a: TensorSpec, b: TensorSpec) -> Config:
    return triton_batches.default(a, b, a.shape[1])


def configs(a: TensorSpec, b: TensorSpec) -> list[Config]:
    return triton_batches.configs(a)


def estimate(a: TensorSpec, b: TensorSpec, config: Config) -> Work:
    (_, m, k), n = a.shape, b.shape[2]
    return batches.tiled(_tiles(a, b, config), m, n, k, config.block_m, config.block_n, a.dtype.itemsize)


def _tiles(a, b, config: Config) -> int:
    return a.shape[0] * triton.cdiv(a.shape[1], config.block_m) * triton.cdiv(b.shape[2], config.block_n)


@triton.jit
def _bmm(
    a_ptr, b_ptr, c_ptr, M, N, K, a_batch, a_row, a_column, b_batch, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    EVEN_K: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    i, j = place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, BAND)
    multiply(
        a_ptr + batch * a_batch, b_ptr + batch * b_batch, c_ptr + batch * M * N, i * BLOCK_M, j * BLOCK_N,
        M, N, K, a_row, a_column, b_row, b_column, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, FAR,
    )  # fmt: skip


def _arguments(outs, a, b, config: Config):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    strides = (x.stride(d) for x in (a, b) for d in range(3))
    shapes = a.shape[1], b.shape[2], a.shape[2], *strides
    return (a, b, outs[0], *shapes), triton_batches.constants(a, b, config) | {"BAND": BAND}


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, constants = _arguments(outputs(*specs), *specs, config)
    return triton_glue.legacy_compile(_bmm, arguments, constants, config.options(), arch)


def run(outs, args, config: Config) -> None:
    arguments, constants = _arguments(outs, *args, config)
    _bmm[(_tiles(*args, config),)](*arguments, **constants, **config.options())
