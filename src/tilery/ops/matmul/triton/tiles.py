"""Triton kernels around a product of tiles that stays in registers: their configs, and how a tile is multiplied."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilery.base.spec import TensorSpec
from tilery.hardware.gpu import gpu

_BLOCKS = (16, 32, 64, 128, 256)  # `needs_int64` counts on it
GROUP_M = 8  # rows of tiles that run together and share b in L2, where a config does not say it

_HALF = (  # block_m, block_n, block_k, warps
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


class Matrix(NamedTuple):
    """A matrix, as an argument of a kernel; strides in elements."""

    ptr: Any
    row: Any
    column: Any


class Matrices(NamedTuple):
    """Several matrices of one size, as an argument of a kernel; strides in elements."""

    ptr: Any
    batch: Any
    row: Any
    column: Any


@dataclass(frozen=True)
class Tiles:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, Any]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def constants(self) -> dict[str, Any]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}


def shared_memory_refusal(x: TensorSpec, config: Tiles) -> str | None:
    """Tiles of a and b in every stage, of x's dtype, must fit the shared memory of a block on x's device."""
    limit = gpu(x.device).shared_per_block
    need = config.num_stages * (config.block_m + config.block_n) * config.block_k * x.dtype.itemsize
    if need > limit:
        return f"{config} needs {need} bytes of shared memory, a block has {limit}"
    return None


def needs_int64(*strides: int) -> bool:
    """Whether offsets inside a tile may pass 2**31 elements; those of the tile itself always may."""
    return max(strides) >= 2**23


@triton.jit
def product(
    a_ptr, b_ptr, m, n, M, N, K, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, INT64: tl.constexpr,
    EVEN_K: tl.constexpr = False,
):  # fmt: skip
    """Rows of a [M, K] from m on times columns of b [K, N] from n on, in fp32. EVEN_K: BLOCK_K divides K."""
    rows, columns, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a_mask, b_mask = rows[:, None] < M - m, columns[None, :] < N - n
    wide = tl.full((), 1, tl.int64)  # row * stride overflows int32 past 2**31 elements
    a_ptr += wide * m * a_row
    b_ptr += wide * n * b_column
    if INT64:
        rows, columns, k = rows * wide, columns * wide, k * wide
    a_tile = rows[:, None] * a_row + k[None, :] * a_column
    b_tile = k[:, None] * b_row + columns[None, :] * b_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a_inside = a_mask if EVEN_K else a_mask & (k[None, :] < K - start)
        b_inside = b_mask if EVEN_K else b_mask & (k[:, None] < K - start)
        a = tl.load(a_ptr + a_tile, mask=a_inside, other=0.0)
        b = tl.load(b_ptr + b_tile, mask=b_inside, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")  # fp32 stays fp32: tf32 would lose 13 bits
        a_ptr += wide * BLOCK_K * a_column
        b_ptr += wide * BLOCK_K * b_row
    return acc


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile: down the rows of a group of GROUP_M, then on to the group's next column."""
    tiles_in_group = GROUP_M * tiles_n
    first = tile // tiles_in_group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return first + tile % tiles_in_group % height, tile % tiles_in_group // height


# Products of several matrices


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
    return [c for c in found if shared_memory_refusal(a, c) is None]


def refusal(a: TensorSpec, config: Tiles | None) -> str | None:
    if config is None:
        return None
    sizes = config.block_m, config.block_n, config.block_k
    if any(size not in _BLOCKS for size in sizes):
        return f"blocks must be powers of two from 16 to 256, got {config}"
    return shared_memory_refusal(a, config)


def constants(a: TensorSpec, b: TensorSpec, config: Tiles) -> dict[str, Any]:
    """What `store_product` and `grouped_tile` are compiled for."""
    strides = a.stride(-2), a.stride(-1), b.stride(-2), b.stride(-1), b.shape[-1]
    even = a.shape[-1] % config.block_k == 0
    return config.constants() | {"GROUP_M": GROUP_M, "EVEN_K": even, "INT64": needs_int64(*strides)}


@triton.jit
def store_product(
    a_ptr, b_ptr, c_ptr, m, n, M, N, K, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """Writes the tile of c [M, N] = a [M, K] · b [K, N] that begins at row m and column n."""
    acc = product(
        a_ptr, b_ptr, m, n, M, N, K, a_row, a_column, b_row, b_column, BLOCK_M, BLOCK_N, BLOCK_K, INT64, EVEN_K
    )
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    wide = tl.full((), 1, tl.int64)  # row * N overflows int32 past 2**31 elements
    c_ptr += wide * m * N + n
    if INT64:
        rows = rows * wide
    inside = (rows[:, None] < M - m) & (columns[None, :] < N - n)
    tl.store(c_ptr + (rows[:, None] * N + columns[None, :]), acc, mask=inside)
