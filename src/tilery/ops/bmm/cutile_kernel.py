"""A block per tile of c, matrix by matrix; TMA, wgmma and the warps' roles are the compiler's work."""

import cuda.tile as ct

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.ops.bmm import outputs
from tilery.parts import batches, cutile_batches
from tilery.parts.cutile_batches import Config, archs, place

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

_ZERO = ct.PaddingMode.ZERO


def refusal(a: TensorSpec, b: TensorSpec, config: Config | None = None) -> str | None:
    chosen = config or default(a, b)
    return cutile_batches.refusal(chosen, _tiles(a, b, chosen), a=a, b=b)


def default(a: TensorSpec, b: TensorSpec) -> Config:
    found = cutile_batches.candidates(a, b)
    enough = tuple(c for c in found if _tiles(a, b, c) >= 120)  # for the processors of a large GPU
    return cutile_batches.default(enough or found[-1:], a.shape[1])


def configs(a: TensorSpec, b: TensorSpec) -> list[Config]:
    found = cutile_batches.configs(cutile_batches.candidates(a, b), a.shape[1])
    return [c for c in found if refusal(a, b, c) is None]


def estimate(a: TensorSpec, b: TensorSpec, config: Config) -> Work:
    (_, m, k), n = a.shape, b.shape[2]
    return batches.tiled(_tiles(a, b, config), m, n, k, config.tile_m, config.tile_n, a.dtype.itemsize)


def _tiles(a, b, config: Config) -> int:
    return a.shape[0] * ct.cdiv(a.shape[1], config.tile_m) * ct.cdiv(b.shape[2], config.tile_n)


@ct.kernel
def _bmm(a, b, c, TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_K: ct.Constant[int]):
    tiles_m, tiles_n = ct.cdiv(c.shape[1], TILE_M), ct.cdiv(c.shape[2], TILE_N)
    batch = ct.bid(0) // (tiles_m * tiles_n)
    i, j = place(ct.bid(0) % (tiles_m * tiles_n), tiles_m, tiles_n)
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.num_tiles(a, 2, (1, TILE_M, TILE_K))):
        a_tile = ct.load(a, (batch, i, k), (1, TILE_M, TILE_K), padding_mode=_ZERO)
        b_tile = ct.load(b, (batch, k, j), (1, TILE_K, TILE_N), padding_mode=_ZERO)
        # float32 is multiplied as float32: for tf32 one would have to cast
        acc = ct.mma(ct.reshape(a_tile, (TILE_M, TILE_K)), ct.reshape(b_tile, (TILE_K, TILE_N)), acc)
    ct.store(c, (batch, i, j), ct.reshape(acc.astype(c.dtype), (1, TILE_M, TILE_N)))  # what lies outside is dropped


def _launch(config: Config, outs, a, b) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    kernel = cutile_glue.hinted(_bmm, num_worker_warps=config.num_worker_warps)
    return Launch(kernel, _tiles(a, b, config), (a, b, outs[0], config.tile_m, config.tile_n, config.tile_k))


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(config, outputs(*specs), *specs), arch)


def run(outs, args, config: Config) -> None:
    if args[0].shape[2] == 0:  # a sum of nothing; TMA cannot describe an empty array
        outs[0].zero_()
        return
    cutile_glue.legacy_run(_launch(config, outs, *args))
