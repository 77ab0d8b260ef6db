"""A block per tile of c, or blocks that walk over tiles; TMA, wgmma and the warps' roles are the compiler's work."""

from dataclasses import dataclass

import cuda.tile as ct
import torch

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware.device import ARCHS
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.ops.matmul import outputs
from tilery.parts.tiles import tiled_product

archs = ARCHS

_GROUP = 8  # tiles of a column band that run together and share b in L2
_ZERO = ct.PaddingMode.ZERO


@dataclass(frozen=True)
class Config:
    tile_m: int
    tile_n: int
    tile_k: int
    num_worker_warps: int = 4  # those that multiply; the compiler adds others that load
    num_ctas: int = 1  # thread blocks that share one tile of c; from sm_90 on their loads are multicast
    persistent: bool = False  # as many blocks as processors, each walking over tiles


# From many rows to few. What of these spills registers, compiled for sm_90, is left out.
_HALF = (
    Config(256, 256, 64, num_worker_warps=8, num_ctas=2, persistent=True),
    Config(128, 256, 64, num_worker_warps=8, persistent=True),
    Config(128, 256, 64, num_worker_warps=8),
    Config(128, 128, 64, num_worker_warps=8),
    Config(128, 64, 64),
    Config(64, 64, 128),
    Config(64, 32, 128),
    Config(32, 32, 256),
    Config(16, 32, 256),
)
_HALF_UNALIGNED = (Config(128, 128, 64, num_worker_warps=8), Config(64, 64, 32), Config(32, 32, 64), Config(16, 32, 64))
_FLOAT = (
    Config(128, 64, 8, num_worker_warps=8),
    Config(64, 64, 16, num_worker_warps=8),
    Config(64, 32, 16, num_worker_warps=8),
    Config(32, 32, 16, num_worker_warps=8),
)


def refusal(a: TensorSpec, b: TensorSpec, precision: str, config: Config | None = None) -> str | None:
    for name, x in (("a", a), ("b", b)):
        if max(*x.shape, *x.strides) >= 2**31:
            return f"sizes and strides must be below 2**31, which TMA's loads ask for, got {name} {x}"
    c = config or default(a, b, precision)
    if c.num_ctas not in (1, 2, 4, 8, 16):
        return f"num_ctas must be a power of two up to 16, got {c.num_ctas}"
    why = cutile_glue.hint_refusal(c.num_worker_warps, tile_m=c.tile_m, tile_n=c.tile_n, tile_k=c.tile_k)
    return why or cutile_glue.grid_refusal(_tiles(a, b, c))


def default(a: TensorSpec, b: TensorSpec, precision: str) -> Config:
    """The largest tile that a fills and that cuts c into enough tiles for the processors of a large GPU."""
    found = [c for c in _candidates(a, b) if c.num_ctas == 1]  # whether two thread blocks a tile pay, a tuner says
    fitting = [c for c in found if c.tile_m < 2 * a.shape[0] and _tiles(a, b, c) >= 120]
    return fitting[0] if fitting else found[-1]


def configs(a: TensorSpec, b: TensorSpec, precision: str) -> list[Config]:
    m = a.shape[0]
    near = [c for c in _candidates(a, b) if c.tile_m < 8 * max(m, 16) and min(m, 4096) <= 64 * c.tile_m]
    return [c for c in near if refusal(a, b, precision, c) is None]


def estimate(a: TensorSpec, b: TensorSpec, precision: str, config: Config) -> Work:
    return tiled_product(a, b, config.tile_m, config.tile_n, config.num_ctas)


def _candidates(a: TensorSpec, b: TensorSpec) -> tuple[Config, ...]:
    if a.dtype == torch.float32:
        return _FLOAT
    return _HALF if _tma_loads(a) and _tma_loads(b) else _HALF_UNALIGNED


def _tma_loads(x: TensorSpec) -> bool:
    """Whether every row, or column where those are contiguous, starts on 16 bytes."""
    return x.aligned and max(x.strides) * x.dtype.itemsize % 16 == 0


def _tiles(a, b, config: Config) -> int:
    return ct.cdiv(a.shape[0], config.tile_m) * ct.cdiv(b.shape[1], config.tile_n)


def _position(tile, c, TILE_M, TILE_N):
    """Row and column of a tile of c, counted down bands of _GROUP rows."""
    band = _GROUP * ct.cdiv(c.shape[1], TILE_N)
    first = tile // band * _GROUP
    height = min(ct.cdiv(c.shape[0], TILE_M) - first, _GROUP)
    return first + tile % band % height, tile % band // height


def _multiply(a, b, c, i, j, TILE_M, TILE_N, TILE_K):
    """a and b carry their strides: row- and column-major ones are read alike."""
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.num_tiles(a, 1, (TILE_M, TILE_K))):
        a_tile = ct.load(a, (i, k), (TILE_M, TILE_K), padding_mode=_ZERO)
        b_tile = ct.load(b, (k, j), (TILE_K, TILE_N), padding_mode=_ZERO)
        acc = ct.mma(a_tile, b_tile, acc)  # float32 is multiplied as float32: for tf32 one would have to cast
    ct.store(c, (i, j), acc.astype(c.dtype))  # what lies outside of c is dropped


@ct.kernel
def _matmul(a, b, c, TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_K: ct.Constant[int]):
    i, j = _position(ct.bid(0), c, TILE_M, TILE_N)
    _multiply(a, b, c, i, j, TILE_M, TILE_N, TILE_K)


@ct.kernel
def _matmul_persistent(a, b, c, TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_K: ct.Constant[int]):
    tiles = ct.cdiv(c.shape[0], TILE_M) * ct.cdiv(c.shape[1], TILE_N)
    for tile in range(ct.bid(0), tiles, ct.num_blocks(0)):
        i, j = _position(tile, c, TILE_M, TILE_N)
        _multiply(a, b, c, i, j, TILE_M, TILE_N, TILE_K)


def _launch(config: Config, processors: int, outs, a, b) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    kernel = _matmul_persistent if config.persistent else _matmul
    kernel = cutile_glue.hinted(kernel, num_worker_warps=config.num_worker_warps, num_ctas=config.num_ctas)
    blocks = _tiles(a, b, config)
    if config.persistent:
        blocks = min(blocks, processors // config.num_ctas)
    return Launch(kernel, blocks, (a, b, outs[0], config.tile_m, config.tile_n, config.tile_k))


def compile(specs, config: Config, arch: str) -> Artifact:
    a, b, _ = specs
    return cutile_glue.legacy_compile(_launch(config, 1, outputs(*specs), a, b), arch)


def run(outs, args, config: Config) -> None:
    a, b, _ = args
    if a.shape[1] == 0:  # a sum of nothing; TMA cannot describe an empty array
        outs[0].zero_()
        return
    cutile_glue.legacy_run(_launch(config, cutile_glue.processors(a.device.index), outs, a, b))
