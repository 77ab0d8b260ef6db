"""A block per tile of c, or a few blocks that walk all tiles; the compiler turns loads and mma into TMA, wgmma and warp roles.

The arrays carry their strides, so the same code reads a and b row- and column-major."""

from dataclasses import dataclass

import cuda.tile as ct
import torch

from tilery.backends import cutile_glue
from tilery.op import Artifact, TensorSpec
from tilery.ops.matmul import outputs

archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")

_GROUP = 8  # tiles of a column band that run together and share b in L2
_ZERO = ct.PaddingMode.ZERO


@dataclass(frozen=True)
class Config:
    tile_m: int
    tile_n: int
    tile_k: int
    num_worker_warps: int = 4
    num_ctas: int = 1  # thread blocks that share one tile of c; from sm_90 on their loads are multicast
    persistent: bool = False  # as many blocks as processors, each walking over tiles


# For 16 bits, from many rows to few, and for fp32, which runs without tensor cores: larger tiles spill on sm_90.
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
_FLOAT = (Config(64, 64, 16), Config(64, 32, 16, num_worker_warps=8), Config(32, 32, 32))


def refusal(a: TensorSpec, b: TensorSpec, config: Config | None = None) -> str | None:
    for name, x in (("a", a), ("b", b)):
        if max(*x.shape, *x.strides) >= 2**31:
            return f"sizes and strides must be below 2**31, which TMA's loads ask for, got {name} {x}"
    c = config or default(a, b)
    if c.num_ctas not in (1, 2, 4, 8, 16):
        return f"num_ctas must be a power of two up to 16, got {c.num_ctas}"
    return cutile_glue.refusal(
        _tiles(a, b, c), c.num_worker_warps, None, tile_m=c.tile_m, tile_n=c.tile_n, tile_k=c.tile_k
    )


def default(a: TensorSpec, b: TensorSpec) -> Config:
    """The largest tile that a fills and that cuts c into enough tiles for the processors of a large GPU."""
    found = _FLOAT if a.dtype == torch.float32 else _HALF[1:]  # whether a pair of thread blocks pays, a tuner says
    fitting = [c for c in found if c.tile_m < 2 * a.shape[0] and _tiles(a, b, c) >= 120]
    return fitting[0] if fitting else found[-1]


def configs(a: TensorSpec, b: TensorSpec) -> list[Config]:
    m = a.shape[0]
    near = [c for c in _HALF if c.tile_m < 8 * max(m, 16) and min(m, 4096) <= 64 * c.tile_m]
    return [c for c in (_FLOAT if a.dtype == torch.float32 else near) if refusal(a, b, c) is None]


def _tiles(a, b, config: Config) -> int:
    return ct.cdiv(a.shape[0], config.tile_m) * ct.cdiv(b.shape[1], config.tile_n)


def _position(tile, c, TILE_M, TILE_N):
    """Row and column of a tile of c, counted down bands of _GROUP rows."""
    band = _GROUP * ct.cdiv(c.shape[1], TILE_N)
    first = tile // band * _GROUP
    height = min(ct.cdiv(c.shape[0], TILE_M) - first, _GROUP)
    return first + tile % band % height, tile % band // height


def _multiply(a, b, c, i, j, TILE_M, TILE_N, TILE_K):
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


def _prepared(outs, a, b, config: Config):
    """The kernel and its launch arguments, of tensors for `run` and of specs for `compile`."""
    kernel = cutile_glue.hinted(
        _matmul_persistent if config.persistent else _matmul,
        num_worker_warps=config.num_worker_warps,
        num_ctas=config.num_ctas,
    )
    return kernel, (a, b, outs[0], config.tile_m, config.tile_n, config.tile_k)


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.compile(*_prepared(outputs(*specs), *specs, config), arch)


def run(outs, args, config: Config) -> None:
    a, b = args
    if a.shape[1] == 0:  # a sum of nothing; TMA has no descriptor for an empty array
        outs[0].zero_()
        return
    kernel, arguments = _prepared(outs, a, b, config)
    blocks = _tiles(a, b, config)
    if config.persistent:
        blocks = min(blocks, cutile_glue.processors(a.device.index) // config.num_ctas)
    cutile_glue.launch(kernel, blocks, arguments)
