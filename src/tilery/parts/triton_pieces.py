"""Triton kernels of element-wise ops: a program takes a block of one row, or of all rows where they lie end to end."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tilery.device import ARCHS

archs = ARCHS

_MOST_ROWS = 65535  # in the second dimension of a grid


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


def grid(m: int, n: int, config: Config) -> tuple[int, int]:
    return grid_of(m, triton.cdiv(n, config.block))


def grid_of(m: int, blocks: int) -> tuple[int, int]:
    """For `own_place`: rows have a dimension of their own as long as it holds them."""
    return (blocks, m) if m <= _MOST_ROWS else (m * blocks, 1)


@triton.jit
def own_place(blocks):
    """Which row this program has, and which of the row's blocks: a division costs a tenth of a short kernel's time."""
    row, block = tl.program_id(1), tl.program_id(0)
    if tl.num_programs(0) != blocks:
        row = tl.program_id(0) // blocks
        block = tl.program_id(0) % blocks
    return row.to(tl.int64), block  # int64: row * stride overflows int32 past 2**31 elements


@triton.jit
def piece(n, BLOCK: tl.constexpr):
    """Which row, where in it the block starts, the columns from there on, and which of them exist."""
    row, block = own_place(tl.cdiv(n, BLOCK))
    start = block.to(tl.int64) * BLOCK
    cols = tl.arange(0, BLOCK)
    return row, start, cols, cols < n - start
