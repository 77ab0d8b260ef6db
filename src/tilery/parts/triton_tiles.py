"""Triton kernels around a product of tiles that stays in registers: how a tile is multiplied, and how it is cut."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.spec import TensorSpec
from tilery.hardware import device


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


def refusal(x: TensorSpec, config: Tiles) -> str | None:
    limit = device.shared_limit(device.arch(x.device))
    need = config.num_stages * (config.block_m + config.block_n) * config.block_k * x.dtype.itemsize
    if need > limit:
        return f"{config} needs {need} bytes of shared memory, a block has {limit}"
    return None


def default(x: TensorSpec, weight: TensorSpec, m: int) -> Tiles:
    """fp32 has no tensor cores; rows off 16 bytes go through registers; few rows take narrow tiles."""
    if x.dtype == torch.float32:
        return Tiles(64, 64, 16, num_warps=8, num_stages=3)
    if any(not t.aligned or t.stride(-2) * t.dtype.itemsize % 16 for t in (x, weight) if len(t.shape) > 1):
        return Tiles(64, 64, 32, num_warps=4, num_stages=2)
    if m <= 64:
        return Tiles(64, 64, 128, num_warps=4, num_stages=3)
    return Tiles(128, 128, 64, num_warps=8, num_stages=3)


def cuts(x: TensorSpec) -> list[Tiles]:
    sizes = (
        (64, 64, 16, 8),
        (64, 64, 32, 8),
        (64, 128, 64, 4),
        (128, 128, 64, 8),
        (128, 256, 64, 8),
        (256, 128, 64, 8),
    )
    return [Tiles(*size, stages) for size in sizes for stages in (2, 3, 4)]


def far(*strides: int) -> bool:
    """Whether the offsets inside a tile may pass 2**31 elements; those of the tile itself may always."""
    return max(strides) >= 2**23


@triton.jit
def product(
    a_ptr, b_ptr, m, n, M, N, K, a_row, a_column, b_row, b_column,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FAR: tl.constexpr,
    EVEN_K: tl.constexpr = False,
):  # fmt: skip
    """Rows of a [M, K] from m on times columns of b [K, N] from n on, in fp32. EVEN_K: BLOCK_K divides K."""
    rows, columns, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a_mask, b_mask = rows[:, None] < M - m, columns[None, :] < N - n
    wide = tl.full((), 1, tl.int64)  # row * stride overflows int32 past 2**31 elements
    a_ptr += wide * m * a_row
    b_ptr += wide * n * b_column
    if FAR:
        rows, columns, k = rows * wide, columns * wide, k * wide
    a_tile = rows[:, None] * a_row + k[None, :] * a_column
    b_tile = k[:, None] * b_row + columns[None, :] * b_column
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        a_there = a_mask if EVEN_K else a_mask & (k[None, :] < K - start)
        b_there = b_mask if EVEN_K else b_mask & (k[:, None] < K - start)
        a = tl.load(a_ptr + a_tile, mask=a_there, other=0.0)
        b = tl.load(b_ptr + b_tile, mask=b_there, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")  # fp32 stays fp32: tf32 would lose 13 bits
        a_ptr += wide * BLOCK_K * a_column
        b_ptr += wide * BLOCK_K * b_row
    return acc
