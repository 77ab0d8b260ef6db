"""Triton kernels that multiply several matrices, a program per tile: how tiles are cut, placed and written."""

import torch
import triton
import triton.language as tl

from tilery.base.spec import TensorSpec
from tilery.parts import triton_tiles
from tilery.parts.triton_tiles import Tiles

BAND = 8  # tiles of a column band that run together and share b in L2

_HALF = (  # rows, columns, depth, warps
    (16, 64, 128, 4),
    (16, 128, 128, 4),
    (32, 64, 128, 4),
    (32, 128, 64, 4),
    (64, 64, 128, 4),
    (64, 128, 64, 4),
    (64, 256, 64, 8),
    (128, 64, 64, 4),
    (128, 128, 64, 8),
    (128, 256, 64, 8),
    (256, 128, 64, 8),
)
_FLOAT = ((16, 64, 32, 4), (32, 64, 32, 4), (64, 64, 32, 8))


def default(a: TensorSpec, b: TensorSpec, rows: int) -> Tiles:
    """For matrices of about so many rows; those that lie off 16 bytes go through registers."""
    if a.dtype == torch.float32:
        return Tiles(16 if rows <= 16 else 64, 64, 32, num_warps=4 if rows <= 16 else 8, num_stages=2)
    if not (_on_vectors(a) and _on_vectors(b)):
        return Tiles(16 if rows <= 16 else 64, 64, 32, num_warps=4, num_stages=2)
    if rows <= 32:
        return Tiles(16 if rows <= 16 else 32, 64, 128, num_warps=4, num_stages=4)
    if rows <= 64:
        return Tiles(64, 64, 128, num_warps=4, num_stages=3)
    return Tiles(128, 128, 64, num_warps=8, num_stages=3)


def _on_vectors(x: TensorSpec) -> bool:
    """As Triton knows it: of a stride it is told no more than that 16 divides it."""
    return x.aligned and all(stride == 1 or stride % 16 == 0 for stride in x.strides)


def configs(a: TensorSpec) -> list[Tiles]:
    sizes = _FLOAT if a.dtype == torch.float32 else _HALF
    found = [Tiles(*size, stages) for size in sizes for stages in (2, 3, 4)]
    return [c for c in found if triton_tiles.refusal(a, c) is None]


def refusal(a: TensorSpec, config: Tiles | None) -> str | None:
    if config is None:
        return None
    sizes = config.block_m, config.block_n, config.block_k
    if any(size < 16 or size & (size - 1) for size in sizes):
        return f"blocks must be powers of two from 16 on, got {config}"
    return triton_tiles.refusal(a, config)


def constants(a, b, config: Tiles):
    """What `multiply` takes; of tensors for a launch and of specs for a compile."""
    strides = a.stride(-2), a.stride(-1), b.stride(-2), b.stride(-1), b.shape[-1]
    even = a.shape[-1] % config.block_k == 0
    return config.constants() | {"EVEN_K": even, "FAR": triton_tiles.far(*strides)}


@triton.jit
def place(tile, tiles_m, tiles_n, BAND: tl.constexpr):
    """Row and column of a tile, counted down bands of BAND rows."""
    band = BAND * tiles_n
    first = tile // band * BAND
    height = min(tiles_m - first, BAND)
    return first + tile % band % height, tile % band // height


@triton.jit
def multiply(
    a_ptr, b_ptr, c_ptr, m, n, M, N, K, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Writes the tile of c [M, N] = a [M, K] · b [K, N] that begins at row m and column n."""
    acc = triton_tiles.product(
        a_ptr, b_ptr, m, n, M, N, K, a_row, a_column, b_row, b_column, BLOCK_M, BLOCK_N, BLOCK_K, FAR, EVEN_K
    )
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    wide = tl.full((), 1, tl.int64)  # row * N overflows int32 past 2**31 elements
    c_ptr += wide * m * N + n
    if FAR:
        rows = rows * wide
    inside = (rows[:, None] < M - m) & (columns[None, :] < N - n)
    tl.store(c_ptr + (rows[:, None] * N + columns[None, :]), acc, mask=inside)
