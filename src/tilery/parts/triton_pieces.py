"""Triton kernels of element-wise ops: a program takes a block of one row, or of all rows where they lie end to end."""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tilery.hardware.device import ARCHS

archs = ARCHS

_MOST_ROWS = 65535  # in the second dimension of a grid
_LONGEST = 2**31 - 1  # a row whose places fit 32 bits


@dataclass(frozen=True)
class Config:
    block: int
    num_warps: int

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps}


def default(n: int, block: int = 1024) -> Config:
    """At most 16 bytes of bf16 a thread and tensor: many programs in flight hide the latency."""
    block = min(triton.next_power_of_2(n), block)
    return Config(block, num_warps=min(max(block // 256, 1), 8))


def configs() -> list[Config]:
    return [Config(block, warps) for block in (512, 1024, 2048, 4096) for warps in (4, 8)] + [Config(256, 2)]


def cut(m: int, n: int, config: Config) -> tuple[tuple[int, int], dict[str, Any]]:
    """For kernels that ask for their `piece` or `own_place` in m rows of n: the grid, and the constants that say it."""
    # silu_mul 16 × 14336 on an H200: 2.17 µs with PLACE, 2.28 where programs found their place and masked every block
    blocks = triton.cdiv(n, config.block)
    if m > _MOST_ROWS or n > _LONGEST:
        return (m * blocks, 1), {"BLOCK": config.block, "PLACE": "large"}  # divides; the last block is masked
    even = n > 0 and n % config.block == 0  # a launch on nothing needs its mask
    return (blocks, m), {"BLOCK": config.block, "PLACE": "even" if even else "ragged"}


@triton.jit
def own_place(n, BLOCK: tl.constexpr, PLACE: tl.constexpr):
    """Which row this program has, and which of the row's blocks: a division costs a tenth of a short kernel's time."""
    row, block = tl.program_id(1), tl.program_id(0)
    if PLACE == "large":
        blocks = tl.cdiv(n, BLOCK)
        row = tl.program_id(0) // blocks
        block = tl.program_id(0) % blocks  # of n's type: in 64 bits where a row needs them
    return row.to(tl.int64), block  # int64: row * stride overflows int32 past 2**31 elements


@triton.jit
def within(index, n, PLACE: tl.constexpr):
    """Which indices exist: where all do, a constant, from which the compiler makes accesses without a mask."""
    if PLACE == "even":
        return tl.full(index.shape, True, tl.int1)
    return index < n


@triton.jit
def piece(n, BLOCK: tl.constexpr, PLACE: tl.constexpr):
    """Which row, where in it the block starts, the columns from there on, and which of them exist."""
    row, block = own_place(n, BLOCK, PLACE)
    start = block * BLOCK
    cols = tl.arange(0, BLOCK)
    return row, start, cols, within(cols, n - start, PLACE)
