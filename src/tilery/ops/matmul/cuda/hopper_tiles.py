"""Configs of products on Hopper by TMA and wgmma: how their kernels cut the work, and what they take of an SM.

The large-M kernel has tiles of 128 rows, two consumer warpgroups and a producer warpgroup. The small-M kernel swaps a
and b: columns of b are where wgmma wants 64 rows, and up to 256 rows of a are on its narrow side. Blocks are
persistent, but for those that split K. The blocks of a cluster split K, or multicast an operand to each other.
The device side is in languages/include. hopper_costs.py says which config should be the fastest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from tilery.base.integers import ceil_div
from tilery.base.launch import Persistent
from tilery.hardware.gpu import gpu
from tilery.languages import tensor_maps

TMA_STORE_ROWS = 64  # of a tile of c, by each consumer warpgroup
MOST_BLOCKS = 8  # of a cluster: more are not promised
SPLIT_K = (1, 2, 4, 8)
SMALL_M_ROWS = tuple(range(8, 257, 8))
SMALL_M_COLUMNS = (24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 192, 256)
MOST_STAGES = 16

_BARRIERS, ALIGNMENT = 16, 1024  # bytes of a stage's barriers; to align the stages with the swizzle's pattern


def blocks_at_once(cluster: int, sms: int) -> int:
    """Blocks in clusters of this size that run at once, one on an SM: a GPC's SMs that fill no cluster stay idle.

    On an H200 (132 SMs) that is 132 in clusters of 2 and 120 in those of 4 or 8. Which SMs a GPC has differs from card
    to card: 40 clusters of 3 ran at once on one and not on another, 39 on all.
    """
    if cluster <= 2:
        return sms
    return sms * 39 // 44 if cluster == 3 else sms * 10 // 11


@dataclass(frozen=True)
class Config:
    kernel: str  # "large_m" or "small_m"
    block_m: int
    block_n: int
    stages: int  # of the pipeline of tiles
    split_k: int = 1  # blocks of a cluster that share a tile of c, each with a part of K
    group_m: int = 8  # rows of tiles that run together and share b in the L2; large_m alone
    tma_store: bool = False  # c goes through shared memory and is stored by TMA under the next tile; large_m alone

    # In files of tuned configs:
    old_names: ClassVar[dict[str, str]] = {
        "form": "kernel", "splits": "split_k", "group": "group_m", "staged": "tma_store", "share": "multicast_b",
        "multicast": "multicast_b",
    }  # fmt: skip
    old_values: ClassVar[dict[str, dict[str, str]]] = {"kernel": {"wide": "large_m", "few": "small_m"}}

    # What a kernel may have besides, as fields or properties:
    multicast_a = multicast_b = 1  # blocks of a cluster side by side, or above each other, that load a or b for all
    k_blocks_per_stage = 1  # of as many bytes as a swizzle spans
    sum_sets = 1  # of registers for the sums of a tile: 2 where partial sums are promoted
    other_registers = 48  # that a consumer thread needs besides
    scale_bytes = 0  # in a stage besides tiles
    producer_warps = 1  # of the small-M kernel
    halves = 1  # of b, whose columns block_n counts: 2 make one column of c of a column of each

    @property
    def large_m(self) -> bool:
        return self.kernel == "large_m"

    @property
    def consumer_warpgroups(self) -> int:
        """In the small-M kernel, one for up to 64 columns."""
        return 2 if self.large_m else ceil_div(self.block_n // self.halves, 64)

    @property
    def warpgroup_n(self) -> int:
        """Columns of c that a warpgroup of the small-M kernel has."""
        return self.block_n // self.halves // self.consumer_warpgroups

    @property
    def tile_bytes(self) -> int:
        """Bytes of the tiles of a and b in a stage."""
        return (self.block_m + self.block_n) * tensor_maps.SWIZZLE_BYTES * self.k_blocks_per_stage

    @property
    def stage_bytes(self) -> int:
        return self.tile_bytes + self.scale_bytes + _BARRIERS

    @property
    def bytes_after_stages(self) -> int:
        """Bytes for a tile of c that is being stored, or for partial sums from the other blocks."""
        received = not self.large_m and self.split_k > 1
        return self.block_m * self.block_n // self.halves * (2 if self.tma_store else 4 if received else 0)

    @property
    def partial_sum_bytes(self) -> int:
        """Bytes of partial sums in the stages' memory with split-K.

        That is a tile of c in the small-M kernel, and in the large-M kernel all that a block receives.
        """
        if not self.large_m:
            return self.block_m * (self.block_n + 4) * 4
        return (self.split_k - 1) * ceil_div(self.block_n // 8, self.split_k) * self.block_m * 8 * 4

    @property
    def overread_bytes(self) -> int:
        """Bytes past the last stage that wgmma reads: it takes 64 rows, and there may be fewer. They do not matter."""
        return 0 if self.large_m else max(64 - self.warpgroup_n - self.block_m, 0) * tensor_maps.SWIZZLE_BYTES

    @property
    def shared(self) -> int:
        return ALIGNMENT + self.bytes_after_stages + self.overread_bytes + self.stages * self.stage_bytes

    @property
    def threads(self) -> int:
        """Those of consumer warpgroups, and of a producer warpgroup or of producer warps."""
        return self.consumer_warpgroups * 128 + (128 if self.large_m else self.producer_warps * 32)

    @property
    def cluster(self) -> int:
        return self.split_k * self.multicast_a * self.multicast_b

    @property
    def sums_per_thread(self) -> int:
        return self.block_n // 2 if self.large_m else self.block_m * self.halves // 2

    @property
    def registers_fit(self) -> bool:
        """Whether the small-M kernel's sums fit; the large-M kernel's always do, by setmaxnreg."""
        threads = ceil_div(self.threads, 128) * 128  # an SM's four parts have as many registers each
        room = min(65536 // threads // 8 * 8, 255)
        return self.large_m or self.sums_per_thread * self.sum_sets + self.other_registers <= room

    def blocks(self, m: int, n: int, batch: int = 1) -> int:
        """Blocks where each has one tile, or its part of one; n counts columns of b."""
        down, across = self.block_m * self.multicast_b, self.block_n * self.multicast_a
        return batch * ceil_div(m, down) * ceil_div(n, across) * self.cluster

    def grid(self, m: int, n: int, batch: int = 1) -> int | Persistent:
        """Persistent blocks, but for those that split K, which have one tile."""
        blocks = self.blocks(m, n, batch)
        return blocks if self.split_k > 1 else Persistent(blocks)


Choices = Mapping[str, Mapping[str, tuple[int, ...]]]  # kernel -> field -> the values that it can be compiled for


def refusal(config: Config, choices: Choices, n: int, itemsize: int, where: torch.device) -> str | None:
    """`n` and `itemsize` are those of c [M, N]."""
    if config.kernel not in choices:
        return f"kernel must be one of {', '.join(choices)}, got {config.kernel!r}"
    for name, values in choices[config.kernel].items():
        if (got := getattr(config, name)) not in values:
            return f"{name} of the {config.kernel} kernel must be one of {', '.join(map(str, values))}, got {got}"
    if not config.registers_fit:
        return f"sums of {config.block_m} × {config.block_n} do not fit the registers of a block"
    for name, rows, by in (
        ("block_m", config.block_m, config.multicast_a),
        ("block_n", config.block_n // config.halves, config.multicast_b),
    ):
        if rows % (8 * by):
            return f"{name} must be a multiple of {8 * by} in each half of b, to be loaded in {by} parts, got {config}"
    if config.multicast_a * config.multicast_b > MOST_BLOCKS:
        return f"a cluster has at most {MOST_BLOCKS} blocks, got multicast_a × multicast_b of {config}"
    if config.split_k > 1 and config.partial_sum_bytes > config.stages * config.tile_bytes:
        return f"partial sums of c must fit the memory of {config.stages} stages, got {config}"
    if config.split_k > 1 and (config.multicast_a * config.multicast_b > 1 or config.tma_store):
        return f"split_k goes with neither multicast nor tma_store, got {config}"
    if config.stages < 2 or config.group_m < 1:
        return f"stages must be at least 2 and group_m at least 1, got {config.stages} and {config.group_m}"
    if config.tma_store and (not config.large_m or config.block_n // config.halves % 64):
        return f"tma_store takes 64 columns of c at a time, in the large_m kernel alone, got {config}"
    if config.tma_store and (itemsize != 2 or n % 8):
        return f"tma_store takes rows of c of 2-byte values, 8 at a time, got {n} of {itemsize} bytes"
    card = gpu(where)
    limit = card.shared_per_block - card.reserved_shared
    if config.shared > limit:
        return f"pipeline of {config.stages} stages takes {config.shared} bytes of shared memory, {limit} are there"
    return None


def small_m_columns(halves: int) -> tuple[int, ...]:
    """Columns of b in small-M tiles: each half has a multiple of the 8 rows after which a swizzle repeats.

    A warpgroup has up to 64 columns of c, and all have the same number of them, a multiple of 8.
    """
    return tuple(n for n in SMALL_M_COLUMNS if n % (8 * halves * ceil_div(n // halves, 64)) == 0)
