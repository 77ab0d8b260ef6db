"""Triton kernels that work on rows element by element: a program takes a block of one row.

Rows that lie end to end are one long row to these kernels (`base.rows.flat_rows`).
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS

_MOST_ROWS = 65535  # in the second dimension of a grid
_LONGEST = 2**31 - 1  # a row whose columns are counted in 32 bits


@dataclass(frozen=True)
class Config:
    block: int  # columns of a program
    num_warps: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps}


class TritonRows(Kernel):
    """A kernel whose elements depend on no others, so that any block will do."""

    archs = ARCHS
    Config = Config

    def configs(self, call: Call) -> list[Config]:
        return configs()


def default(n: int, block: int = 1024) -> Config:
    """At most 16 bytes of bf16 a thread and tensor: many programs in flight hide the latency."""
    block = min(triton.next_power_of_2(max(n, 1)), block)
    return Config(block, num_warps=min(max(block // 256, 1), 8))


def configs() -> list[Config]:
    return [Config(block, warps) for block in (512, 1024, 2048, 4096) for warps in (4, 8)] + [Config(256, 2)]


def grid_of(m: int, n: int, config: Config) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid for m rows of n, and the constants by which a program finds its `own_block` or `own_columns`.

    GRID is "even" where blocks fill rows, "ragged" where the last block of a row is masked, and "large" where the grid
    has one dimension, so that a program has to divide to find its row.
    """
    # silu_mul 16 × 14336 on an H200: 2.17 µs so, 2.28 where every program divides and masks
    blocks = triton.cdiv(n, config.block)
    if m > _MOST_ROWS or n > _LONGEST:
        return (m * blocks, 1), {"BLOCK": config.block, "GRID": "large"}
    even = n > 0 and n % config.block == 0  # a launch on nothing needs its mask
    return (blocks, m), {"BLOCK": config.block, "GRID": "even" if even else "ragged"}


@triton.jit
def own_block(n, BLOCK: tl.constexpr, GRID: tl.constexpr):
    """Which row this program has, and which of the row's blocks: a division costs a tenth of a short kernel's time."""
    row, block = tl.program_id(1), tl.program_id(0)
    if GRID == "large":
        blocks = tl.cdiv(n, BLOCK)
        row = tl.program_id(0) // blocks
        block = tl.program_id(0) % blocks  # of n's type: in 64 bits where a row needs them
    return row.to(tl.int64), block  # int64: row * stride overflows int32 past 2**31 elements


@triton.jit
def within(index, n, GRID: tl.constexpr):
    """Which indices exist: where all do, a constant, from which the compiler makes accesses without a mask."""
    if GRID == "even":
        return tl.full(index.shape, True, tl.int1)
    return index < n


@triton.jit
def own_columns(n, BLOCK: tl.constexpr, GRID: tl.constexpr):
    """Which row, where in it the block starts, the columns from there on, and which of them exist."""
    row, block = own_block(n, BLOCK, GRID)
    start = block * BLOCK
    cols = tl.arange(0, BLOCK)
    return row, start, cols, within(cols, n - start, GRID)
