"""Products on Hopper by TMA and wgmma: how their kernels cut the work.

The large-M kernel has tiles of 128 rows, two consumer warpgroups and a producer warpgroup. The small-M kernel swaps a
and b: columns of b are where wgmma wants 64 rows, as many as give every SM the same, and a's rows are on its narrow
side. Blocks are persistent, but for those that split K. The blocks of a cluster split K, or multicast b to each other.
The device side is in languages/include.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from tilery.base.integers import ceil_div
from tilery.base.launch import Persistent
from tilery.hardware.gpu import Gpu, gpu
from tilery.languages import tensor_maps

TMA_STORE_ROWS = 64  # of a tile of c, by each consumer warpgroup
SPLIT_K = (1, 2, 4, 8)  # a cluster of more than 8 is not promised
SMALL_M_ROWS = (8, 16, 32, 48, 64, 96, 128)
SMALL_M_COLUMNS = (24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 256)
NARROW = (32, 48, 64, 96)  # columns of large-M tiles where rows are so few that wider ones would leave SMs idle

_BARRIERS, _ALIGNMENT = 16, 1024  # bytes of a stage's barriers; to align the stages with the swizzle's pattern
_GROUPS = (4, 8, 16)
_BOTH = 512  # up to so many rows configs have both kernels
_LEAST_K_BLOCKS = 4  # of a split, by default
_MOST_STAGES = 16
_SMALL_M_TRIED = 10  # small-M configs that a tuner tries, and
_SPLIT_TRIED = 6  # large-M ones that split K
# Times, as the number of rows of a k-block that an SM could load meanwhile:
_STAGE_TIME = 12  # to go on to the next stage
_REDUCE_TIME = 40  # until a block's partial sums reach another block, and
_REDUCED_PER_ROW = 8  # partial sums that are exchanged in the time of one row
_LARGE_M_REDUCE_TIME = 600  # columns of k-blocks that are multiplied while blocks of the large-M kernel add up a tile


def blocks_at_once(cluster: int, sms: int) -> int:
    """Blocks in clusters of this size that run at once, one on an SM: a GPC's SMs that fill no cluster stay idle.

    On an H200 (132 SMs) that is 132 in clusters of 2, at least 126 of 3, and 120 of 4 or 8.
    """
    if cluster <= 2:
        return sms
    return sms * 21 // 22 if cluster == 3 else sms * 10 // 11


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
        "form": "kernel", "splits": "split_k", "group": "group_m", "staged": "tma_store", "share": "multicast",
    }  # fmt: skip
    old_values: ClassVar[dict[str, dict[str, str]]] = {"kernel": {"wide": "large_m", "few": "small_m"}}

    # What a kernel may have besides, as fields or properties:
    multicast = 1  # blocks of a cluster, one above the other, each of which loads a part of b for all
    k_blocks_per_stage = 1  # of as many bytes as a swizzle spans
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
        return _ALIGNMENT + self.bytes_after_stages + self.overread_bytes + self.stages * self.stage_bytes

    @property
    def threads(self) -> int:
        """Those of consumer warpgroups, and of a producer warpgroup or of producer warps."""
        return self.consumer_warpgroups * 128 + (128 if self.large_m else self.producer_warps * 32)

    @property
    def cluster(self) -> int:
        return self.split_k * self.multicast

    def blocks(self, m: int, n: int) -> int:
        """Blocks where each has one tile, or its part of one."""
        return ceil_div(m, self.block_m * self.multicast) * ceil_div(n, self.block_n) * self.cluster

    def grid(self, m: int, n: int) -> int | Persistent:
        """Persistent blocks, but for those that split K, which have one tile."""
        blocks = self.blocks(m, n)
        return blocks if self.split_k > 1 else Persistent(blocks)


C = TypeVar("C", bound=Config)
Choices = Mapping[str, Mapping[str, tuple[int, ...]]]  # kernel -> field -> the values that it can be compiled for


def refusal(config: Config, choices: Choices, n: int, itemsize: int, where: torch.device) -> str | None:
    """`n` and `itemsize` are those of c [M, N]."""
    if config.kernel not in choices:
        return f"kernel must be one of {', '.join(choices)}, got {config.kernel!r}"
    for name, values in choices[config.kernel].items():
        if (got := getattr(config, name)) not in values:
            return f"{name} of the {config.kernel} kernel must be one of {', '.join(map(str, values))}, got {got}"
    if not config.large_m and config.block_m * config.block_n > 64 * 256:
        return f"sums of {config.block_m} × {config.block_n} do not fit the registers of a block"
    if config.split_k > 1 and config.partial_sum_bytes > config.stages * config.tile_bytes:
        return f"partial sums of c must fit the memory of {config.stages} stages, got {config}"
    if config.split_k > 1 and (config.multicast > 1 or config.tma_store):
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
    """Columns of b in small-M tiles: each half has a multiple of the 8 rows after which a swizzle repeats."""
    return tuple(columns for columns in SMALL_M_COLUMNS if columns % (8 * halves) == 0)


@dataclass(frozen=True)
class ConfigSpace(Generic[C]):
    """Configs for one product, and what they should cost.

    `options` are fields of large-M configs.
    """

    config: type[C]
    card: Gpu
    m: int
    n: int  # columns of b
    k_blocks: int  # of 128 values
    columns: tuple[int, ...]  # that a large-M tile may have
    tile_time: int = 0  # columns whose time a large-M tile takes besides its own
    large_m_split_k: tuple[int, ...] = ()

    def default(self, options: dict[str, Any]) -> C:
        """The config that should take the least time; the first of `large_m_split_k` alone is considered."""
        tiles_m, sms = ceil_div(self.m, 128), self.card.sms
        if self.m <= 64 or tiles_m * ceil_div(self.n, min(self.columns)) < sms // 2:
            return self.small_m()[0]

        def waves(columns: int) -> int:
            return ceil_div(tiles_m * ceil_div(self.n, columns), sms)

        def time(columns: int) -> tuple[int, int]:
            return waves(columns) * (columns + self.tile_time) + (waves(columns) > 1), columns

        columns = min((columns for columns in self.columns if columns >= 128 or waves(columns) == 1), key=time)
        overlapped = waves(columns) > 1  # TMA stores while the next tile is multiplied
        whole = self._large_m(columns, options | {"tma_store": options["tma_store"] and overlapped})
        split = [c for c in self._split(self.columns, self.large_m_split_k[:1]) if c.block_n >= 128]
        return min([whole, *split], key=self._large_m_time)

    def candidates(self, options: Iterable[dict[str, Any]]) -> list[C]:
        """All that may be worth trying, some of which may be refused."""
        found = []
        if self.m > 64:
            groups = _GROUPS if self.m > 128 * _GROUPS[0] else _GROUPS[-1:]
            grouped = [each | {"group_m": group} for each in options for group in groups]
            columns = [columns for columns in self.columns if (columns < 128) <= (self.m <= _BOTH)]
            found += [self._large_m(each, more) for each in columns for more in grouped]
            found += self._split(columns, self.large_m_split_k)[:_SPLIT_TRIED]
        if self.m <= _BOTH:
            for config in self.small_m()[:_SMALL_M_TRIED]:
                found += [config, self._with_stages(config, 2)]
        return found

    def small_m(self) -> list[C]:
        """Configs of the small-M kernel, the one that should take the least time first."""
        rows = next((size for size in SMALL_M_ROWS if size >= self.m), SMALL_M_ROWS[-1])
        known = small_m_columns(self.config.halves)
        fitting = [columns for columns in known if rows * columns <= 64 * 256 and columns < self.n + 8]
        found = [
            self._with_stages(self.config("small_m", rows, columns, 1, split), 2 if split > 2 else 1)
            for columns in fitting or known[:1]
            for split in (SPLIT_K if self.config.halves == 1 else (1,))
            if split == 1 or split * _LEAST_K_BLOCKS <= self.k_blocks
        ]
        found = [c for c in found if c.stages > 1 and self._runs_at_once(c)]
        return sorted(found, key=self._small_m_time)

    def _large_m(self, columns: int, options: dict[str, Any]) -> C:
        tma_store = options.get("tma_store", False) and columns // self.config.halves % 64 == 0
        return self._with_stages(self.config("large_m", 128, columns, 1, **options | {"tma_store": tma_store}))

    def _split(self, columns: Iterable[int], splits: Iterable[int]) -> list[C]:
        """Configs of the large-M kernel that split K, the one that should take the least time first."""
        found = [self._large_m(each, {"split_k": split}) for split in splits for each in columns]
        found = [c for c in found if c.split_k * _LEAST_K_BLOCKS <= self.k_blocks and self._runs_at_once(c)]
        return sorted(found, key=self._large_m_time)

    def _with_stages(self, config: C, per_sm: int = 1) -> C:
        """With as many stages as so many blocks on an SM leave room for."""
        room = self.card.shared_per_block // per_sm - self.card.reserved_shared - _ALIGNMENT
        room -= config.bytes_after_stages + config.overread_bytes
        return replace(config, stages=min(room // config.stage_bytes, _MOST_STAGES))

    def _runs_at_once(self, config: C) -> bool:
        """Whether blocks that split K, which have one tile each, all run at once."""
        blocks = config.blocks(self.m, self.n)
        return config.split_k == 1 or blocks <= blocks_at_once(config.split_k, self.card.sms)

    def _large_m_time(self, config: C) -> tuple[float, float]:
        """In columns of k-blocks. 1024 × 1280 × 8192 on an H200: 34 µs where two blocks split K, else 43."""
        waves = ceil_div(config.blocks(self.m, self.n), self.card.sms)
        columns = waves * config.block_n / config.split_k  # that the busiest SM multiplies, over all of K
        return columns * self.k_blocks + (_LARGE_M_REDUCE_TIME if config.split_k > 1 else 0), config.block_n

    def _small_m_time(self, config: C) -> float:
        """In rows of k-blocks that the busiest SM loads: b from memory, a from the L2, which gives twice as much."""
        m, n, waves = config.block_m, config.block_n, ceil_div(config.blocks(self.m, self.n), self.card.sms)
        loaded = max(n, (n + m) / 2) + m / 8 + _STAGE_TIME
        reduced = _REDUCE_TIME * (config.split_k - 1) + m * n / _REDUCED_PER_ROW
        return waves * loaded * self.k_blocks / config.split_k + (reduced if config.split_k > 1 else 0)
