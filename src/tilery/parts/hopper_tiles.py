"""Products on Hopper by TMA and wgmma: how their kernels cut the work (device side: tile_pipeline.cuh).

Blocks go from tile to tile. The wide form has tiles of 128 rows, two warpgroups that multiply and one that fetches. The
few form has b's columns where wgmma wants 64 rows, as many as give every processor the same, and a's rows on its narrow
side. The blocks of a cluster share K, or fetch b for each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tilery.hardware import device
from tilery.languages import tensor_maps
from tilery.parts.fp8 import ceil_div

PROCESSORS = 132  # of an H200
STORED_ROWS = 64  # of a staged tile of c, by each warpgroup
SPLITS = (1, 2, 4, 8)  # a cluster of more than 8 is not promised
FEW_ROWS = (8, 16, 32, 48, 64, 96, 128)
FEW_COLUMNS = (24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 256)
NARROW = (32, 48, 64, 96)  # tiles of the wide form where rows are so few that wider ones would leave processors idle

_BARRIERS, _PATTERN, _RESERVED = 16, 1024, 1024  # bytes for a slot, to align the ring, that the driver takes of a block
_GROUPS = (4, 8, 16)
_BOTH = 512  # up to so many rows configs have both forms
_LEAST_SLOTS = 4  # of K in a part, by default
_MOST_STAGES = 16
_SLOT = 12  # rows of a slot whose time it takes to go on to the next
_EXCHANGE = 40  # slots' rows that could be fetched while a block gives its part of a tile to another, and
_EXCHANGED = 8  # sums that are exchanged while another row is
_CLUSTERED = {2: PROCESSORS, 3: 126, 4: 120, 8: 120}  # blocks that run at once, by their clusters; 3 is a bound
_WIDE_EXCHANGE = 600  # columns of slots that are multiplied while blocks of the wide form add up a tile
_TRIED = 10  # cuts of few rows that a tuner tries, and
_TRIED_SHARED = 6  # of the wide form where blocks share K


@dataclass(frozen=True)
class Config:
    form: str  # "wide" or "few"
    block_m: int
    block_n: int
    stages: int  # slots of the ring
    splits: int = 1  # blocks of a cluster, which share K
    group: int = 8  # tiles of M that run together and share b in the L2; of the wide form
    staged: bool = False  # c goes through shared memory; of the wide form

    # What a kernel may have besides, as fields:
    depth = 1  # spans of K in a slot
    share = 1  # blocks of a cluster, one above the other, that fetch b for each other
    notes = 0  # bytes in a slot besides tiles
    fetching_warps = 1  # of the few form
    halves = 1  # of b, whose columns block_n counts: 2 make one column of c of a column of each

    @property
    def warpgroups(self) -> int:
        """That multiply; of the few form for up to 64 columns each."""
        return 2 if self.form == "wide" else ceil_div(self.block_n // self.halves, 64)

    @property
    def width(self) -> int:
        """Columns of c that a warpgroup has, of the few form."""
        return self.block_n // self.halves // self.warpgroups

    @property
    def tiles(self) -> int:
        """Bytes of tiles of a and b in a slot."""
        return (self.block_m + self.block_n) * tensor_maps.SPAN * self.depth

    @property
    def slot(self) -> int:
        return self.tiles + self.notes + _BARRIERS

    @property
    def behind(self) -> int:
        """Bytes for a tile of c that is being stored, or for parts of it from the other blocks."""
        parts = self.form == "few" and self.splits > 1
        return self.block_m * self.block_n // self.halves * (2 if self.staged else 4 if parts else 0)

    @property
    def passing(self) -> int:
        """Bytes that pass through the ring where K is shared: a tile of c, or all parts of a block's share of it."""
        if self.form == "few":
            return self.block_m * (self.block_n + 4) * 4
        return (self.splits - 1) * ceil_div(self.block_n // 8, self.splits) * self.block_m * 8 * 4

    @property
    def past(self) -> int:
        """Bytes past the last slot that wgmma reads, whose 64 rows may be more than there are; of no consequence."""
        return max(64 - self.width - self.block_m, 0) * tensor_maps.SPAN if self.form == "few" else 0

    @property
    def shared(self) -> int:
        return _PATTERN + self.behind + self.past + self.stages * self.slot

    @property
    def threads(self) -> int:
        """Of those that multiply and of a warpgroup that fetches, or of warps that do."""
        return self.warpgroups * 128 + (128 if self.form == "wide" else self.fetching_warps * 32)

    @property
    def cluster(self) -> int:
        return self.splits * self.share

    def blocks(self, m: int, n: int) -> int:
        return ceil_div(m, self.block_m * self.share) * ceil_div(n, self.block_n) * self.cluster

    def launched(self, m: int, n: int, resident: int) -> int:
        """Blocks that go from tile to tile; those that share K have one each."""
        blocks = self.blocks(m, n)
        return blocks if self.splits > 1 else min(blocks, resident // self.cluster * self.cluster)


Kind = TypeVar("Kind", bound=Config)
Forms = Mapping[str, Mapping[str, tuple[int, ...]]]  # form -> field -> the values that there are kernels for


def refusal(config: Config, forms: Forms, n: int, itemsize: int, where: Any) -> str | None:
    """`n` and `itemsize` are those of c [M, N]."""
    if config.form not in forms:
        return f"form must be one of {', '.join(forms)}, got {config.form!r}"
    for name, values in forms[config.form].items():
        if (got := getattr(config, name)) not in values:
            return f"{name} of the {config.form} form must be one of {', '.join(map(str, values))}, got {got}"
    if config.form == "few" and config.block_m * config.block_n > 64 * 256:
        return f"sums of {config.block_m} × {config.block_n} do not fit the registers of a block"
    if config.splits > 1 and config.passing > config.stages * config.tiles:
        return f"parts of c must fit the ring of {config.stages} stages, got {config}"
    if config.splits > 1 and (config.share > 1 or config.staged):
        return f"blocks that share K do not fetch for each other and stage nothing, got {config}"
    if config.stages < 2 or config.group < 1:
        return f"stages must be at least 2 and group at least 1, got {config.stages} and {config.group}"
    if config.staged and (config.form != "wide" or config.block_n // config.halves % 64):
        return f"tiles of c are staged 64 columns at a time, in the wide form alone, got {config}"
    if config.staged and (itemsize != 2 or n % 8):
        return f"rows of c must be of 2-byte values, 8 at a time, to be staged, got {n} of {itemsize} bytes"
    limit = device.shared_limit(device.arch(where)) - _RESERVED
    if config.shared > limit:
        return f"ring of {config.stages} stages takes {config.shared} bytes of shared memory, {limit} are there"
    return None


def with_ring(one: Kind, resident: int = 1) -> Kind:
    """As many stages as so many blocks on a processor leave room for."""
    room = device.shared_limit("sm_90") // resident - _RESERVED - _PATTERN - one.behind - one.past
    return replace(one, stages=min(room // one.slot, _MOST_STAGES))


def default(
    kind: type[Kind], m: int, n: int, slots: int, widths: Sequence[int], entry: int, wide: dict[str, Any],
    splits: Sequence[int] = (),
) -> Kind:  # fmt: skip
    """`slots` of K there are; `widths` are tiles' of the wide form, which take the time of `entry` columns besides.

    `splits` are those of the wide form that may share K.
    """
    down = ceil_div(m, 128)
    if m <= 64 or down * ceil_div(n, min(widths)) < PROCESSORS // 2:
        return few_cuts(kind, m, n, slots)[0]

    def waves(width: int) -> int:
        return ceil_div(down * ceil_div(n, width), PROCESSORS)

    def time(width: int) -> tuple[int, int]:
        return waves(width) * (width + entry) + (waves(width) > 1), width

    width = min((width for width in widths if width >= 128 or waves(width) == 1), key=time)
    whole = _wide(kind, width, wide | {"staged": wide["staged"] and waves(width) > 1})  # while the next is multiplied
    shared = [cut for cut in _shared_cuts(kind, m, n, slots, widths, splits) if cut.block_n >= 128]
    return min([whole, *shared], key=lambda cut: _wide_time(cut, m, n, slots))


def few_columns(kind: type[Config]) -> tuple[int, ...]:
    """Of b, in tiles of the few form: each half is a multiple of the 8 rows after which a swizzle repeats."""
    return tuple(width for width in FEW_COLUMNS if width % (8 * kind.halves) == 0)


def few_cuts(kind: type[Kind], m: int, n: int, slots: int) -> list[Kind]:
    """Ways to cut few rows, the one that should take the least time first."""
    block_m = next((size for size in FEW_ROWS if size >= m), FEW_ROWS[-1])
    columns = few_columns(kind)
    widths = [width for width in columns if block_m * width <= 64 * 256 and width < n + 8]
    cuts = [
        with_ring(kind("few", block_m, width, 1, splits), resident=2 if splits > 2 else 1)
        for width in widths or columns[:1]
        for splits in (SPLITS if kind.halves == 1 else (1,))
        if splits == 1 or splits * _LEAST_SLOTS <= slots
    ]
    fit = [cut for cut in cuts if cut.stages > 1 and _at_once(cut, m, n)]
    return sorted(fit, key=lambda cut: _few_time(cut, m, n, slots))


def _at_once(cut: Config, m: int, n: int) -> bool:
    """Whether blocks that share K, which have one tile each, all run at once."""
    return cut.splits == 1 or cut.blocks(m, n) <= _CLUSTERED[cut.splits]


def _load(cut: Config, m: int, n: int) -> float:
    """Columns of the wide form that the busiest processor multiplies, over all of K."""
    return ceil_div(cut.blocks(m, n), PROCESSORS) * cut.block_n / cut.splits


def _wide_time(cut: Config, m: int, n: int, slots: int) -> tuple[float, float]:
    """In columns of slots. 1024 × 1280 × 8192 on an H200: 34 µs where two blocks share K, else 43."""
    return _load(cut, m, n) * slots + (_WIDE_EXCHANGE if cut.splits > 1 else 0), cut.block_n


def _few_time(cut: Config, m: int, n: int, slots: int) -> float:
    """Rows of slots that the busiest processor fetches: b from memory, a from the L2, which gives twice as much."""
    waves = ceil_div(cut.blocks(m, n), PROCESSORS)
    fetched = max(cut.block_n, (cut.block_n + cut.block_m) / 2) + cut.block_m / 8 + _SLOT
    exchange = _EXCHANGE * (cut.splits - 1) + cut.block_m * cut.block_n / _EXCHANGED
    return waves * fetched * slots / cut.splits + (exchange if cut.splits > 1 else 0)


def _shared_cuts(
    kind: type[Kind], m: int, n: int, slots: int, widths: Iterable[int], splits: Iterable[int]
) -> list[Kind]:
    """Ways to share K in the wide form, the one that should take the least time first."""
    cuts = [_wide(kind, width, {"splits": parts}) for parts in splits for width in widths]
    fit = [cut for cut in cuts if cut.splits * _LEAST_SLOTS <= slots and _at_once(cut, m, n)]
    return sorted(fit, key=lambda cut: _wide_time(cut, m, n, slots))


def _wide(kind: type[Kind], width: int, more: dict[str, Any]) -> Kind:
    staged = more.get("staged", False) and width // kind.halves % 64 == 0
    return with_ring(kind("wide", 128, width, 1, **more | {"staged": staged}))


def candidates(
    kind: type[Kind], m: int, n: int, slots: int, widths: Iterable[int], wide: Iterable[dict[str, Any]],
    splits: Iterable[int] = (),
) -> list[Kind]:  # fmt: skip
    """All that may be worth trying for m rows, some of which may be refused."""
    found = []
    if m > 64:
        groups = _GROUPS if m > 128 * _GROUPS[0] else _GROUPS[-1:]
        options = [more | {"group": group} for more in wide for group in groups]
        chosen = [width for width in widths if (width < 128) <= (m <= _BOTH)]
        found += [_wide(kind, width, more) for width in chosen for more in options]
        found += _shared_cuts(kind, m, n, slots, chosen, splits)[:_TRIED_SHARED]
    if m <= _BOTH:
        for cut in few_cuts(kind, m, n, slots)[:_TRIED]:
            found += [cut, with_ring(cut, 2)]
    return found
