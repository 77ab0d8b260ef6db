"""cuTile kernels that multiply matrices, a block per tile: how tiles are chosen and in which order they run."""

from dataclasses import dataclass

import torch

from tilery.base.spec import TensorSpec
from tilery.hardware.gpu import gpu
from tilery.languages import cutile_glue

_GROUP_M = 8  # rows of tiles that run together and share b in L2


def grouped_tile(tile, tiles_m, tiles_n):
    """Row and column of a tile: down the rows of a group of _GROUP_M, then on to the group's next column."""
    tiles_in_group = _GROUP_M * tiles_n
    first = tile // tiles_in_group * _GROUP_M
    height = min(tiles_m - first, _GROUP_M)
    return first + tile % tiles_in_group % height, tile % tiles_in_group // height


def enough_tiles(where: torch.device) -> int:
    """Tiles that keep the SMs busy: 120 on the 132 SMs of an H200."""
    return gpu(where).sms * 10 // 11


# Products of several matrices


@dataclass(frozen=True)
class Config:
    tile_m: int
    tile_n: int
    tile_k: int
    num_worker_warps: int = 4  # those that multiply; the compiler adds others that load

    @property
    def constants(self) -> dict[str, int]:
        return {"TILE_M": self.tile_m, "TILE_N": self.tile_n, "TILE_K": self.tile_k}


# From many rows to few. What of these spills registers, compiled for sm_90, is left out.
_HALF = (
    Config(128, 256, 64, num_worker_warps=8),
    Config(128, 128, 64, num_worker_warps=8),
    Config(128, 64, 64),
    Config(64, 64, 128),
    Config(64, 32, 128),
    Config(32, 32, 256),
    Config(16, 64, 128),
    Config(16, 32, 256),
)
_HALF_UNALIGNED = (Config(128, 128, 64, num_worker_warps=8), Config(64, 64, 32), Config(32, 32, 64), Config(16, 32, 64))
_FLOAT = (
    Config(64, 64, 16, num_worker_warps=8),
    Config(64, 32, 16, num_worker_warps=8),
    Config(32, 32, 16, num_worker_warps=8),
)


def candidates(*operands: TensorSpec) -> tuple[Config, ...]:
    if operands[0].dtype == torch.float32:
        return _FLOAT
    return _HALF if all(map(_tma_loads, operands)) else _HALF_UNALIGNED


def _tma_loads(x: TensorSpec) -> bool:
    """Whether every row, or column where those are contiguous, starts on 16 bytes."""
    return x.aligned and all(stride == 1 or stride * x.dtype.itemsize % 16 == 0 for stride in x.strides)


def default(found: tuple[Config, ...], rows: int) -> Config:
    """The largest tile that matrices of so many rows fill."""
    return next((c for c in found if c.tile_m < 2 * rows), found[-1])


def configs(found: tuple[Config, ...], rows: int) -> list[Config]:
    return [c for c in found if c.tile_m < 8 * max(rows, 16) and min(rows, 4096) <= 64 * c.tile_m]


def refusal(config: Config, blocks: int, **operands: TensorSpec) -> str | None:
    for name, x in operands.items():
        if max(*x.shape, *x.strides) >= 2**31:
            return f"sizes and strides must be below 2**31, which TMA's loads ask for, got {name} {x}"
    sizes = {"tile_m": config.tile_m, "tile_n": config.tile_n, "tile_k": config.tile_k}
    return cutile_glue.hint_refusal(config.num_worker_warps, **sizes) or cutile_glue.grid_refusal(blocks)
