"""cuTile kernels that take a row as one tile, or as several where it is too long: how the tiles are cut."""

from dataclasses import dataclass, replace

import cuda.tile as ct

from tilery.base.rows import rows, two_level_refusal
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages import cutile_glue

_VALUES_PER_WARP = 4096  # 128 a lane: softmax takes 255 registers then and spills nothing, compiled for sm_90


@dataclass(frozen=True)
class Config:
    """A block takes `rows` rows, `tile` columns at a time."""

    rows: int
    tile: int
    num_worker_warps: int = 4
    occupancy: int | None = None  # blocks on an SM that the compiler saves registers for

    @property
    def hints(self) -> dict[str, int | None]:
        return {"num_worker_warps": self.num_worker_warps, "occupancy": self.occupancy}


def width(n: int) -> int:
    """The width of a tile that holds a row; a block has 128 threads and more, so no narrower."""
    return max(1 << (n - 1).bit_length(), 128)


def blocks(config: Config, m: int, n: int) -> int:
    """Where a block takes one tile."""
    return ct.cdiv(m, config.rows) * ct.cdiv(n, config.tile)


def refusal(x: TensorSpec, config: Config) -> str | None:
    values, most = config.rows * config.tile, config.num_worker_warps * _VALUES_PER_WARP
    if values > most:
        return f"tile of {values} values does not fit the registers of {config.num_worker_warps} warps ({most} values)"
    m, n, _ = rows(x)
    why = cutile_glue.hint_refusal(config.num_worker_warps, config.occupancy, rows=config.rows, tile=config.tile)
    return why or cutile_glue.grid_refusal(blocks(config, m, n))


def default(x: TensorSpec) -> Config:
    """One tile of up to 4096 where that holds the row; several short rows a block as long as that leaves many blocks.

    On an H200, rms_norm of 8192 × 4096: 42 µs with 8 warps and occupancy 8, 53 with 4 and none; of 4096 × 16384: 78 µs
    in tiles of 4096, 117 in one.
    """
    m, n, _ = rows(x)
    tile, count = width(n), 1
    if tile > 2048:
        return Config(1, min(tile, 4096), num_worker_warps=8, occupancy=8 if tile <= 4096 else None)
    while 2 * count * tile <= 2048 and m >= 512 * count:
        count *= 2
    return Config(count, tile)


def configs(x: TensorSpec) -> list[Config]:
    base, n = default(x), x.shape[-1]
    occupancies = (None, 8) if max(base.rows * base.tile, n) <= 4096 else (None,)  # 8 blocks of more would spill
    hints = [replace(base, num_worker_warps=w, occupancy=o) for w in (4, 8) for o in occupancies]
    cuts = [
        replace(base, rows=4 * base.rows),
        Config(1, width(n), 8),
        Config(1, min(base.tile, 2048)),
    ]
    return [c for c in dict.fromkeys((base, *hints, *cuts)) if refusal(x, c) is None]


class CutileRows(Kernel):
    """A kernel whose tiles have some rows and columns."""

    archs = ARCHS
    Config = Config


class WholeRows(CutileRows):
    """A kernel whose blocks take whole rows of x."""

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        return two_level_refusal(call.x) or refusal(call.x, config or self.default(call))

    def default(self, call: Call) -> Config:
        return default(call.x)

    def configs(self, call: Call) -> list[Config]:
        return configs(call.x)
