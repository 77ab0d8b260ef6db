"""matmul in cuTile: a block per tile of c, or persistent blocks; TMA, wgmma and the warps' roles are the compiler's."""

from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from tilery.base.launch import Host, Launch
from tilery.base.spec import TensorSpec, Work
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.languages import cutile_glue
from tilery.ops.matmul.call import MatmulCall, gemm_work
from tilery.ops.matmul.cutile.tiles import enough_tiles, grouped_tile

_ZERO = ct.PaddingMode.ZERO


def _multiply(a, b, c, i, j, TILE_M, TILE_N, TILE_K, TMA_STORE):
    """a and b carry their strides: row- and column-major ones are read alike."""
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.num_tiles(a, 1, (TILE_M, TILE_K))):
        a_tile = ct.load(a, (i, k), (TILE_M, TILE_K), padding_mode=_ZERO)
        b_tile = ct.load(b, (k, j), (TILE_K, TILE_N), padding_mode=_ZERO)
        acc = ct.mma(a_tile, b_tile, acc)  # float32 is multiplied as float32: for tf32 one would have to cast
    ct.store(c, (i, j), acc.astype(c.dtype), allow_tma=TMA_STORE)  # what lies outside of c is dropped


@ct.kernel
def _matmul(
    a, b, c,
    TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_K: ct.Constant[int], TMA_STORE: ct.Constant[bool],
):  # fmt: skip
    i, j = grouped_tile(ct.bid(0), ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N))
    _multiply(a, b, c, i, j, TILE_M, TILE_N, TILE_K, TMA_STORE)


@ct.kernel
def _matmul_persistent(
    a, b, c,
    TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_K: ct.Constant[int], TMA_STORE: ct.Constant[bool],
):  # fmt: skip
    tiles_m, tiles_n = ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N)
    for tile in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
        i, j = grouped_tile(tile, tiles_m, tiles_n)
        _multiply(a, b, c, i, j, TILE_M, TILE_N, TILE_K, TMA_STORE)


@dataclass(frozen=True)
class Config:
    tile_m: int
    tile_n: int
    tile_k: int
    num_worker_warps: int = 4  # those that multiply; the compiler adds others that load
    num_ctas: int = 1  # thread blocks that share one tile of c; from sm_90 on their loads are multicast
    persistent: bool = False  # as many blocks as SMs, each going from tile to tile


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


class Matmul(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: MatmulCall, config: Config | None = None) -> str | None:
        for name, x in (("a", call.a), ("b", call.b)):
            if max(*x.shape, *x.strides) >= 2**31:
                return f"sizes and strides must be below 2**31, which TMA's loads ask for, got {name} {x}"
        c = config or self.default(call)
        if c.num_ctas not in (1, 2, 4, 8, 16):
            return f"num_ctas must be a power of two up to 16, got {c.num_ctas}"
        why = cutile_glue.hint_refusal(c.num_worker_warps, tile_m=c.tile_m, tile_n=c.tile_n, tile_k=c.tile_k)
        return why or cutile_glue.grid_refusal(_tiles(call, c))

    def default(self, call: MatmulCall) -> Config:
        """The largest tile that a fills and that cuts c into enough tiles for the SMs."""
        found = [c for c in _candidates(call) if c.num_ctas == 1]  # whether two thread blocks a tile pay, a tuner says
        enough = enough_tiles(call.a.device)
        fitting = [c for c in found if c.tile_m < 2 * call.m and _tiles(call, c) >= enough]
        return fitting[0] if fitting else found[-1]

    def configs(self, call: MatmulCall) -> list[Config]:
        m = call.m
        near = [c for c in _candidates(call) if c.tile_m < 8 * max(m, 16) and min(m, 4096) <= 64 * c.tile_m]
        return [c for c in near if self.refusal(call, c) is None]

    def estimate(self, call: MatmulCall, config: Config) -> Work:
        sizes = call.m, call.n, call.k, call.a.dtype.itemsize
        return gemm_work(*sizes, config.tile_m, config.tile_n, config.num_ctas)

    def launches(self, call: MatmulCall, config: Config) -> list[Launch | Host]:
        if call.k == 0:  # a sum of nothing; TMA cannot describe an empty array
            return [Host(Tensor.zero_, (call.c,))]
        kernel, blocks = _matmul, _tiles(call, config)
        if config.persistent:
            kernel, blocks = _matmul_persistent, min(blocks, gpu(call.a.device).sms // config.num_ctas)
        constants = {"TILE_M": config.tile_m, "TILE_N": config.tile_n, "TILE_K": config.tile_k}
        constants["TMA_STORE"] = cutile_glue.stores_by_tma(call.c)
        options = {"num_worker_warps": config.num_worker_warps, "num_ctas": config.num_ctas}
        return [Launch(kernel, blocks, {"a": call.a, "b": call.b, "c": call.c}, constants, options)]


def _candidates(call: MatmulCall) -> tuple[Config, ...]:
    if call.a.dtype == torch.float32:
        return _FLOAT
    return _HALF if _tma_loads(call.a) and _tma_loads(call.b) else _HALF_UNALIGNED


def _tma_loads(x: TensorSpec) -> bool:
    """Whether every row, or column where those are contiguous, starts on 16 bytes."""
    return x.aligned and max(x.strides) * x.dtype.itemsize % 16 == 0


def _tiles(call: MatmulCall, config: Config) -> int:
    return ct.cdiv(call.m, config.tile_m) * ct.cdiv(call.n, config.tile_n)


matmul = Matmul()
