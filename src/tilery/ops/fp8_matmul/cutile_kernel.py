"""A block per tile of c: ct.mma adds 128 products, which are scaled and added in fp32; TMA is the compiler's work."""

from dataclasses import dataclass

import cuda.tile as ct

from tilery.base.spec import Artifact, TensorSpec, Work, dtype_name
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.parts.fp8 import GROUP
from tilery.parts.fp8_products import outputs
from tilery.parts.tiles import tiled_product

archs = ("sm_90", "sm_100", "sm_120")  # cuTile has no fp8 below

_BAND = 8  # tiles of a column band that run together and share b in L2
_ZERO = ct.PaddingMode.ZERO


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


def refusal(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config | None = None
) -> str | None:
    if a.dtype != b.dtype:
        return f"ct.mma takes two tiles of one format, got a in {dtype_name(a.dtype)} and b in {dtype_name(b.dtype)}"
    for name, x in (("a", a), ("a_scale", a_scale), ("b", b), ("b_scale", b_scale)):
        if max(*x.shape, *x.strides) >= 2**31:
            return f"sizes and strides must be below 2**31, which TMA's loads ask for, got {name} {x}"
    c = config or default(a, a_scale, b, b_scale, out_dtype)
    if c.tile_k != GROUP:
        return f"tile_k must be {GROUP}, as far as a scale goes, got {c.tile_k}"
    if c.tile_n > GROUP:
        return f"tile_n must be at most {GROUP}, as far as a scale of b goes, got {c.tile_n}"
    if c.num_ctas not in (1, 2, 4, 8, 16):
        return f"num_ctas must be a power of two up to 16, got {c.num_ctas}"
    why = cutile_glue.hint_refusal(c.num_worker_warps, tile_m=c.tile_m, tile_n=c.tile_n)
    return why or cutile_glue.grid_refusal(_tiles(a, b, c))


def default(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> Config:
    """The largest tile that a fills, or of 64 rows, that cuts c into enough tiles for the processors of a large GPU."""
    wgmma = [c for c in _CONFIGS if c.num_ctas == 1 and c.fast and c.tile_m >= 64]  # whether others pay, a tuner says
    fitting = [c for c in wgmma if c.tile_m <= max(64, 2 * a.shape[0] - 1) and _tiles(a, b, c) >= 120]
    return fitting[0] if fitting else wgmma[-1]


def configs(a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str) -> list[Config]:
    m = a.shape[0]
    near = [c for c in _CONFIGS if c.tile_m < 8 * max(m, 16) and min(m, 4096) <= 64 * c.tile_m]
    return [c for c in near if refusal(a, a_scale, b, b_scale, out_dtype, c) is None]


def estimate(
    a: TensorSpec, a_scale: TensorSpec, b: TensorSpec, b_scale: TensorSpec, out_dtype: str, config: Config
) -> Work:
    transposed = b._replace(shape=b.shape[::-1], strides=b.strides[::-1])
    return tiled_product(a, transposed, config.tile_m, config.tile_n, config.num_ctas)


def _tiles(a, b, config: Config) -> int:
    return ct.cdiv(a.shape[0], config.tile_m) * ct.cdiv(b.shape[0], config.tile_n)


@ct.kernel
def _product(
    a, a_scale, b, b_scale, c, TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], FAST: ct.Constant[bool]
):  # fmt: skip
    band = _BAND * ct.cdiv(c.shape[1], TILE_N)
    top = ct.bid(0) // band * _BAND
    height = min(ct.cdiv(c.shape[0], TILE_M) - top, _BAND)
    i, j = top + ct.bid(0) % band % height, ct.bid(0) % band // height
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.num_tiles(a, 1, (TILE_M, GROUP))):
        a_tile = ct.load(a, (i, k), (TILE_M, GROUP), padding_mode=_ZERO)
        b_tile = ct.load(b, (k, j), (GROUP, TILE_N), order=(1, 0), padding_mode=_ZERO)
        scale = ct.load(a_scale, (i, k), (TILE_M, 1), padding_mode=_ZERO)
        scale = scale * ct.load(b_scale, (j * TILE_N // GROUP, k), (1, 1))
        product = ct.mma(a_tile, b_tile, ct.zeros((TILE_M, TILE_N), ct.float32), use_fast_acc=FAST)
        acc = acc + product * scale
    ct.store(c, (i, j), acc.astype(c.dtype))  # what lies outside of c is dropped


def _launch(config: Config, outs, a, a_scale, b, b_scale) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    kernel = cutile_glue.hinted(_product, num_worker_warps=config.num_worker_warps, num_ctas=config.num_ctas)
    constants = config.tile_m, config.tile_n, config.fast
    return Launch(kernel, _tiles(a, b, config), (a, a_scale, b, b_scale, outs[0], *constants))


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(config, outputs(*specs), *specs[:4]), arch)


def run(outs, args, config: Config) -> None:
    if args[0].shape[1] == 0:  # a sum of nothing; TMA cannot describe an empty array
        outs[0].zero_()
        return
    cutile_glue.legacy_run(_launch(config, outs, *args[:4]))
