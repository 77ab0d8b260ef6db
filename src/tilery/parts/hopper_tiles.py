"""Products on Hopper by TMA and wgmma: how their kernels cut the work. backends/tilery_wgmma.cuh is the device side.

The wide form is persistent: tiles of 128 rows, two warpgroups that multiply and one that fetches. The few form has b's
columns where wgmma wants 64 rows and a's rows on its narrow side; the blocks of a cluster share K.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tilery import device
from tilery.backends import tensor_maps
from tilery.parts.fp8 import ceil_div

PROCESSORS = 132  # of an H200
STORED_ROWS = 64  # of a staged tile of c, by each warpgroup
SPLITS = (1, 2, 4, 8)  # a cluster of more than 8 is not promised
FEW_ROWS = (8, 16, 32, 64, 128)
FEW_COLUMNS = (64, 128, 256)
NARROW = (32, 48, 64, 96)  # tiles of the wide form where rows are so few that wider ones would leave processors idle

_BARRIERS, _PATTERN, _RESERVED = 16, 1024, 1024  # bytes for a slot, to align the ring, that the driver takes of a block
_GROUPS = (4, 8, 16)
_BOTH = 512  # up to so many rows configs have both forms
_LEAST_SLOTS = 4  # of K in a part, by default
_MOST_STAGES = 12
_ENTRY = 48  # columns whose time a tile takes besides its own


@dataclass(frozen=True)
class Config:
    form: str  # "wide" or "few"
    block_m: int
    block_n: int
    stages: int  # slots of the ring
    splits: int = 1  # blocks of a cluster, which share K; of the few form
    group: int = 8  # tiles of M that run together and share b in the L2; of the wide form
    staged: bool = False  # c goes through shared memory; of the wide form

    # What a kernel may have besides, as fields:
    depth = 1  # spans of K in a slot
    share = 1  # blocks of a cluster that fetch b for each other
    notes = 0  # bytes in a slot besides tiles
    fetching_warps = 1  # of the few form

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
        return self.block_m * self.block_n * (2 if self.staged else 4 if self.splits > 1 else 0)

    @property
    def shared(self) -> int:
        return _PATTERN + self.behind + self.stages * self.slot

    @property
    def threads(self) -> int:
        """Two warpgroups and one that fetches; a warpgroup for 64 columns of b and warps that fetch."""
        return 384 if self.form == "wide" else self.block_n // 64 * 128 + self.fetching_warps * 32

    @property
    def cluster(self) -> int:
        return self.splits * self.share

    def blocks(self, m: int, n: int) -> int:
        return ceil_div(m, self.block_m * self.share) * self.share * ceil_div(n, self.block_n) * self.splits


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
    if config.form == "few" and config.block_m * (config.block_n + 4) * 4 > config.stages * config.tiles:
        return f"the tile of c must fit the ring of {config.stages} stages, got {config}"
    if config.stages < 2 or config.group < 1:
        return f"stages must be at least 2 and group at least 1, got {config.stages} and {config.group}"
    if config.staged and (config.form != "wide" or config.block_n % 64):
        return f"tiles of c are staged 64 columns at a time, in the wide form alone, got {config}"
    if config.staged and (itemsize != 2 or n % 8):
        return f"rows of c must be of 2-byte values, 8 at a time, to be staged, got {n} of {itemsize} bytes"
    limit = device.shared_limit(device.arch(where)) - _RESERVED
    if config.shared > limit:
        return f"ring of {config.stages} stages takes {config.shared} bytes of shared memory, {limit} are there"
    return None


def with_ring(one: Kind, resident: int = 1) -> Kind:
    """As many stages as so many blocks on a processor leave room for."""
    room = device.shared_limit("sm_90") // resident - _RESERVED - _PATTERN - one.behind
    return replace(one, stages=min(room // one.slot, _MOST_STAGES))


def default(
    kind: type[Kind], m: int, n: int, slots: int, widths: Sequence[int], wide: dict[str, Any], few: dict[str, Any]
) -> Kind:
    """`slots` of K there are; `widths` are tiles' of the wide form; `wide` and `few` what else its configs have."""
    down = ceil_div(m, 128)
    if m > 64 and down * ceil_div(n, min(widths)) >= PROCESSORS // 2:

        def time(width: int) -> int:
            return ceil_div(down * ceil_div(n, width), PROCESSORS) * (width + _ENTRY)

        return _wide(kind, min(sorted(widths, reverse=True), key=time), wide)
    block_m = next((size for size in FEW_ROWS if size >= m), FEW_ROWS[-1])
    down = ceil_div(m, block_m)
    block_n = 64 if down * ceil_div(n, 64) <= PROCESSORS else 128
    tiles, parts = down * ceil_div(n, block_n), max(slots // _LEAST_SLOTS, 1)
    splits = max(s for s in SPLITS if s == 1 or (s <= parts and tiles * s <= PROCESSORS))
    two = tiles > PROCESSORS and block_m < FEW_ROWS[-1]  # sums of 128 rows leave no registers for a second block
    return with_ring(kind("few", block_m, block_n, 1, splits, **few), resident=2 if two else 1)


def _wide(kind: type[Kind], width: int, more: dict[str, Any]) -> Kind:
    staged = more.get("staged", False) and width % 64 == 0
    return with_ring(kind("wide", 128, width, 1, **more | {"staged": staged}))


def candidates(
    kind: type[Kind], m: int, widths: Iterable[int], wide: Iterable[dict[str, Any]], few: dict[str, Any]
) -> list[Kind]:
    """All that may be worth trying for m rows, some of which may be refused."""
    found = []
    if m > 64:
        groups = _GROUPS if m > 128 * _GROUPS[0] else _GROUPS[-1:]
        options = [more | {"group": group} for more in wide for group in groups]
        chosen = [width for width in widths if (width < 128) <= (m <= _BOTH)]
        found += [_wide(kind, width, more) for width in chosen for more in options]
    if m <= _BOTH:
        enough = next((i for i, size in enumerate(FEW_ROWS) if size >= m), len(FEW_ROWS) - 1)
        found += [
            with_ring(kind("few", block_m, block_n, 1, splits, **few), resident)
            for block_m in FEW_ROWS[max(enough - 1, 0) : enough + 1]
            for block_n in FEW_COLUMNS[: 2 if m > 64 else 3]
            for splits in SPLITS
            for resident in ((2, 1) if block_n <= 128 else (1,))
        ]
    return found
