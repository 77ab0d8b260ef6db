"""Which config of a product on Hopper should be the fastest: candidates, and a cost model fitted to measurements.

benchmarks/fit_products.py measures configs on a GPU and writes hopper_costs.json.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tilery.base.integers import ceil_div
from tilery.hardware.gpu import Gpu
from tilery.ops.matmul.cuda.hopper_tiles import (
    ALIGNMENT,
    MOST_STAGES,
    SMALL_M_ROWS,
    SPLIT_K,
    Config,
    blocks_at_once,
    small_m_columns,
)

FITTED = Path(__file__).with_name("hopper_costs.json")

_SMALL_M = 1024  # rows, up to which the small-M kernel takes part
_LARGE_M = 64  # rows, from which the large-M kernel takes part
_MANY = 1024  # rows, beyond which the large-M kernel does not split K
_LEAST_K_BLOCKS = 8  # of a split: 512 values of 16 bits
_LEAST_DEPTH = 4  # k-blocks in the pipeline of a small-M config, whose k-blocks take little time
_DEEP = 6  # k-blocks in the pipeline, fewer of which do not hide the latency of memory
_GROUPS = (4, 8, 16)
_TUNED = 32  # configs that a tuner tries
# Where power limits the clock, the coolest tiles are ahead of others, which the short runs that costs are fitted to do
# not show.
_POWER = 1.3
_LONG, _MANY_WAVES = 1e11, 7  # FLOPs of such products, and waves of those tiles
_MANY_ROWS = 1024  # of such products: with fewer, b comes from memory too often for power to be the limit


@dataclass(frozen=True)
class Costs:
    """Coefficients of the cost model, in ns unless said otherwise."""

    launch: float  # of the kernel, with its first loads
    line: float  # to load 128 bytes into an SM
    shared_line: float  # and more where all SMs load at once
    read: float  # to read 128 bytes of a tile from shared memory
    mma: float  # to multiply 64 rows by one column over a k-block
    step: float  # of a k-block besides
    stage: float  # of a pipeline stage besides
    tile: float  # of a tile besides its k-blocks
    store: float  # of 1000 values of c that a block stores while it multiplies nothing
    memory: float  # bytes a ns from memory
    reduce: float  # of split-K, for each block that sends its partial sums
    exchange: float  # of 1000 partial sums that a block receives
    multicast: float  # of a k-block in a cluster, whose blocks wait for each other
    warpgroup: float  # part by which each more than one in a block of the small-M kernel slows memory down


@functools.cache
def fitted(kind: str) -> Costs:
    """The coefficients for products of 16-bit values ("16-bit") or of fp8 with scales ("fp8")."""
    return Costs(**json.loads(FITTED.read_text(encoding="utf-8"))["costs"][kind])


C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Problem(Generic[C]):
    """A product, and what configs for it may be."""

    config: type[C]
    costs: Costs
    card: Gpu
    m: int
    n: int  # columns of b
    k_blocks: int  # of 128 bytes
    columns: tuple[int, ...]  # that a large-M tile may have
    taken: Callable[[C], bool]  # whether the kernel takes a config for this call
    batch: int = 1
    itemsize: int = 2  # of c
    large_m_split_k: tuple[int, ...] = (1,)
    multicasts: tuple[tuple[int, int], ...] = ((1, 1),)  # of a and of b
    group_m: int = 8  # of large-M tiles that are not multicast
    coolest: dict[str, int] | None = None  # fields of the config to take where power limits the clock

    def ranked(self) -> list[C]:
        """All configs that the kernel takes, the one that should take the least time first."""
        deep = (c for c in self._small_m() if c.stages * c.k_blocks_per_stage >= _LEAST_DEPTH)
        found = (c for c in (*deep, *self._large_m()) if c.stages > 1 and self.taken(c))
        return sorted(found, key=lambda c: (self.expected_us(c), c.cluster, c.block_m * c.block_n))

    def candidates(self) -> list[C]:
        """What a tuner tries: the best by the model, with other groups of tiles and other ways to store."""
        best = self.ranked()[: _TUNED // 2]
        found = dict.fromkeys(best)
        for config in best:
            if config.large_m and self.m > 128 * _GROUPS[0]:
                found |= dict.fromkeys(replace(config, group_m=group) for group in _GROUPS)
        found |= dict.fromkeys(replace(c, stages=c.stages // 2) for c in best[:4] if not c.large_m and c.stages > 3)
        return [c for c in found if self.taken(c)][:_TUNED]

    def expected_us(self, config: C) -> float:
        """The time that a config should take with operands in memory, on the GPU that the costs were fitted on."""
        costs, split, each = self.costs, config.split_k, config.block_n // config.halves
        at_once, blocks = blocks_at_once(config.cluster, self.card.sms), config.blocks(self.m, self.n, self.batch)
        waves, busy_sms = ceil_div(blocks, at_once), min(blocks, at_once) / self.card.sms
        lines = config.block_m / config.multicast_a + config.block_n / config.multicast_b
        width = config.block_n if config.large_m else config.block_m * config.halves
        mma, read = (config.consumer_warpgroups * each for each in (width * costs.mma, (64 + width) * costs.read))
        step = _longer(lines * (costs.line + costs.shared_line * busy_sms), mma, read) + costs.step
        step += costs.stage / config.k_blocks_per_stage
        step += costs.multicast * (config.multicast_a * config.multicast_b > 1)
        stored = config.block_m * each / 1000 * costs.store
        if config.large_m and config.tma_store and waves > 1:
            stored /= waves  # all but the last under the next tile
        busy = waves * (ceil_div(self.k_blocks, split) * step + costs.tile + stored)
        nbytes = self.batch * (
            128 * self.k_blocks * (self.m + self.n) + self.m * self.n // config.halves * self.itemsize
        )
        exchanged = config.block_m * config.block_n * (split - 1) / split / 1000
        reduced = costs.reduce * (split - 1) + costs.exchange * exchanged
        if self.coolest is not None and self._limited_by_power(self.coolest) and not self._is_coolest(config):
            busy *= _POWER
        slower = 1 if config.large_m else 1 + costs.warpgroup * (config.consumer_warpgroups - 1)
        return (costs.launch + _longer(busy, nbytes / costs.memory * slower) + reduced) / 1000

    def _limited_by_power(self, coolest: dict[str, int]) -> bool:
        flops = 2 * 64 * self.batch * self.m * self.n * self.k_blocks
        tiles = self.batch * ceil_div(self.m, 128) * ceil_div(self.n, coolest["block_n"])
        return self.m >= _MANY_ROWS and flops > _LONG and tiles >= _MANY_WAVES * self.card.sms

    def _is_coolest(self, config: C) -> bool:
        return all(getattr(config, name) == value for name, value in (self.coolest or {}).items())

    def _small_m(self) -> Iterator[C]:
        if self.m > _SMALL_M:
            return
        halves = self.config.halves
        columns = [n for n in small_m_columns(halves) if n < max(self.n, halves) + 64 * halves]  # also of no columns
        for rows in self._row_counts():
            for width in columns:
                for split in SPLIT_K if halves == 1 else (1,):
                    if split == 1:
                        for shared in self._clusters():
                            yield self._with_stages(self.config("small_m", rows, width, 1, **shared))
                    elif split * _LEAST_K_BLOCKS <= self.k_blocks:
                        config = self.config("small_m", rows, width, 1, split_k=split)
                        if self._runs_at_once(config):
                            half = self._with_stages(
                                config, 2
                            )  # so that the next kernel's blocks may start beside them
                            deep = split > 2 and half.stages * half.k_blocks_per_stage >= _DEEP
                            yield half if deep else self._with_stages(config)

    def _clusters(self) -> list[dict[str, int]]:
        """How blocks of a cluster share operands, as fields of a config."""
        return [{"multicast_a": a, "multicast_b": b} if a * b > 1 else {} for a, b in self.multicasts]

    def _row_counts(self) -> list[int]:
        """Rows of small-M tiles that divide m evenly, or with few to spare."""
        m, most = max(self.m, 1), SMALL_M_ROWS[-1]
        least = ceil_div(m, most)
        multiples = 8, 16, 32, 64  # of 16 or 32 rows, for multicast; of 64, for MN-major
        each = (ceil_div(ceil_div(m, tiles), by) * by for tiles in range(least, least + 3) for by in multiples)
        return sorted({rows for rows in each if rows <= most})

    def _large_m(self) -> Iterator[C]:
        if self.m <= _LARGE_M:
            return
        for width in self.columns:
            for split in self.large_m_split_k if self.m <= _MANY else (1,):
                for shared in self._clusters() if split == 1 else [{}]:
                    for tma_store in (
                        (True, False) if split == 1 and width // self.config.halves % 64 == 0 else (False,)
                    ):
                        group = 4 if shared.get("multicast_b", 1) > 1 else self.group_m
                        more: dict[str, Any] = {"split_k": split, "group_m": group, "tma_store": tma_store, **shared}
                        config = self._with_stages(self.config("large_m", 128, width, 1, **more))
                        if split == 1 or (split * _LEAST_K_BLOCKS <= self.k_blocks and self._runs_at_once(config)):
                            yield config

    def _with_stages(self, config: C, per_sm: int = 1) -> C:
        """With as many stages as so many blocks on an SM leave room for."""
        room = self.card.shared_per_block // per_sm - self.card.reserved_shared - ALIGNMENT
        room -= config.bytes_after_stages + config.overread_bytes
        return replace(config, stages=min(room // config.stage_bytes, MOST_STAGES))

    def _runs_at_once(self, config: C) -> bool:
        """Whether blocks that split K, which have one tile each, all run at once."""
        return config.blocks(self.m, self.n, self.batch) <= blocks_at_once(config.split_k, self.card.sms)


def _longer(*times: float) -> float:
    """The longest of times that overlap, and a little more where they are alike."""
    return float(sum(time**4 for time in times) ** 0.25)


def names() -> tuple[str, ...]:
    """The coefficients, in order."""
    return tuple(field.name for field in dataclasses.fields(Costs))
