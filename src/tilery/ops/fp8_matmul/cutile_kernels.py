"""fp8_matmul in cuTile: ct.mma adds 128 products, which are scaled and added in fp32; TMA is the compiler's work."""

from dataclasses import dataclass

import cuda.tile as ct
from torch import Tensor

from tilery.base.launch import Host, Launch
from tilery.base.spec import Work, dtype_name
from tilery.core.kernel import Kernel
from tilery.languages import cutile_glue
from tilery.ops.fp8_matmul.call import Fp8MatmulCall
from tilery.ops.matmul.call import gemm_work
from tilery.ops.matmul.cutile.tiles import enough_tiles, grouped_tile
from tilery.ops.quantize.formats import GROUP

_ZERO = ct.PaddingMode.ZERO


@ct.kernel
def _fp8_matmul(
    a, a_scale, b, b_scale, c,
    TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], FAST: ct.Constant[bool], TMA_STORE: ct.Constant[bool],
):  # fmt: skip
    i, j = grouped_tile(ct.bid(0), ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N))
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.num_tiles(a, 1, (TILE_M, GROUP))):
        a_tile = ct.load(a, (i, k), (TILE_M, GROUP), padding_mode=_ZERO)
        b_tile = ct.load(b, (k, j), (GROUP, TILE_N), order=(1, 0), padding_mode=_ZERO)
        scale = ct.load(a_scale, (i, k), (TILE_M, 1), padding_mode=_ZERO)
        scale = scale * ct.load(b_scale, (j * TILE_N // GROUP, k), (1, 1))
        product = ct.mma(a_tile, b_tile, ct.zeros((TILE_M, TILE_N), ct.float32), use_fast_acc=FAST)
        acc = acc + product * scale
    ct.store(c, (i, j), acc.astype(c.dtype), allow_tma=TMA_STORE)  # what lies outside of c is dropped


@dataclass(frozen=True)
class Config:
    tile_m: int
    tile_n: int
    num_worker_warps: int = 4  # those that multiply; the compiler adds others that load
    num_ctas: int = 1  # thread blocks that share one tile of c; from sm_90 on their loads are multicast
    fast: bool = True  # the tensor cores add all 128 products on their own; else the compiler promotes them too
    tile_k: int = GROUP  # as far as a scale goes


# From many rows to few. What of these spills registers, compiled for sm_90, is left out: 128 × 128 that is fast and
# alone. Below 64 rows, where there is no wgmma, sm_90 widens to fp16.
_CONFIGS = (
    Config(128, 128, num_worker_warps=8, num_ctas=2),
    Config(128, 128, num_worker_warps=8, fast=False),
    Config(128, 64, num_worker_warps=8),
    Config(256, 64, num_worker_warps=8),
    Config(128, 64),
    Config(64, 128, num_worker_warps=8),
    Config(64, 64),
    Config(64, 32),
    Config(64, 16),
    Config(32, 32),
    Config(16, 64),
    Config(16, 32),
)


class Fp8Matmul(Kernel):
    archs = ("sm_90", "sm_100", "sm_120")  # cuTile has no fp8 below
    Config = Config

    def refusal(self, call: Fp8MatmulCall, config: Config | None = None) -> str | None:
        a, b = call.a, call.b
        if a.dtype != b.dtype:
            kinds = f"a in {dtype_name(a.dtype)} and b in {dtype_name(b.dtype)}"
            return f"ct.mma takes two tiles of one format, got {kinds}"
        for name, x in (("a", a), ("a_scale", call.a_scale), ("b", b), ("b_scale", call.b_scale)):
            if max(*x.shape, *x.strides) >= 2**31:
                return f"sizes and strides must be below 2**31, which TMA's loads ask for, got {name} {x}"
        c = config or self.default(call)
        if c.tile_k != GROUP:
            return f"tile_k must be {GROUP}, as far as a scale goes, got {c.tile_k}"
        if c.tile_n > GROUP:
            return f"tile_n must be at most {GROUP}, as far as a scale of b goes, got {c.tile_n}"
        if c.num_ctas not in (1, 2, 4, 8, 16):
            return f"num_ctas must be a power of two up to 16, got {c.num_ctas}"
        why = cutile_glue.hint_refusal(c.num_worker_warps, tile_m=c.tile_m, tile_n=c.tile_n)
        return why or cutile_glue.grid_refusal(_tiles(call, c))

    def default(self, call: Fp8MatmulCall) -> Config:
        """The largest tile that a fills, or of 64 rows, that cuts c into enough tiles for the SMs."""
        wgmma = [c for c in _CONFIGS if c.num_ctas == 1 and c.fast and c.tile_m >= 64]  # the others: a tuner says
        enough = enough_tiles(call.a.device)
        fitting = [c for c in wgmma if c.tile_m <= max(64, 2 * call.m - 1) and _tiles(call, c) >= enough]
        return fitting[0] if fitting else wgmma[-1]

    def configs(self, call: Fp8MatmulCall) -> list[Config]:
        m = call.m
        near = [c for c in _CONFIGS if c.tile_m < 8 * max(m, 16) and min(m, 4096) <= 64 * c.tile_m]
        return [c for c in near if self.refusal(call, c) is None]

    def estimate(self, call: Fp8MatmulCall, config: Config) -> Work:
        sizes = call.m, call.n, call.k, call.a.dtype.itemsize
        return gemm_work(*sizes, config.tile_m, config.tile_n, config.num_ctas)

    def launches(self, call: Fp8MatmulCall, config: Config) -> list[Launch | Host]:
        if call.k == 0:  # a sum of nothing; TMA cannot describe an empty array
            return [Host(Tensor.zero_, (call.c,))]
        args = {"a": call.a, "a_scale": call.a_scale, "b": call.b, "b_scale": call.b_scale, "c": call.c}
        constants = {"TILE_M": config.tile_m, "TILE_N": config.tile_n, "FAST": config.fast}
        constants["TMA_STORE"] = cutile_glue.stores_by_tma(call.c)
        options = {"num_worker_warps": config.num_worker_warps, "num_ctas": config.num_ctas}
        return [Launch(_fp8_matmul, _tiles(call, config), args, constants, options)]


def _tiles(call: Fp8MatmulCall, config: Config) -> int:
    return ct.cdiv(call.m, config.tile_m) * ct.cdiv(call.n, config.tile_n)


fp8_matmul = Fp8Matmul()
