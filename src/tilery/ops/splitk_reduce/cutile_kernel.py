"""A block takes one tile of a few rows and columns and adds up all its parts."""

import cuda.tile as ct

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.ops.splitk_reduce import outputs
from tilery.parts import cutile_rows
from tilery.parts.cutile_rows import Config

archs = cutile_rows.archs


def refusal(parts: TensorSpec, out_dtype: str, config: Config | None = None) -> str | None:
    return cutile_rows.refusal(_sum(parts), config or default(parts, out_dtype))


def default(parts: TensorSpec, out_dtype: str) -> Config:
    return _cut(parts, 1024)


def configs(parts: TensorSpec, out_dtype: str) -> list[Config]:
    cuts = [_cut(parts, values) for values in (512, 1024, 2048, 4096)]
    found = [*cuts, *(Config(c.rows, c.tile, num_worker_warps=8) for c in cuts)]
    return [c for c in dict.fromkeys(found) if refusal(parts, out_dtype, c) is None]


def _sum(parts: TensorSpec) -> TensorSpec:
    return TensorSpec.contiguous(parts.shape[1:], parts.dtype, parts.device)


def _cut(parts: TensorSpec, values: int) -> Config:
    tile = min(cutile_rows.width(parts.shape[2]), values)
    return Config(rows=values // tile, tile=tile)


# Int64: the stride of parts may be 2**31 elements and more.
@ct.kernel
def _reduce(parts: ct.IndexedWithInt64, c: ct.IndexedWithInt64, ROWS: ct.Constant[int], TILE: ct.Constant[int]):
    row, column = divmod(ct.bid(0), ct.num_tiles(c, 1, (ROWS, TILE)))  # neighbours take the same rows
    total = ct.zeros((1, ROWS, TILE), ct.float32)
    for part in range(parts.shape[0]):
        # Without TMA, as every kernel that is bound by memory here: it would take four warps more.
        shape = (1, ROWS, TILE)
        total += ct.load(parts, (part, row, column), shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    ct.store(c, (row, column), ct.reshape(total, (ROWS, TILE)).astype(c.dtype), allow_tma=False)


def _launch(config: Config, outs, parts) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    _, m, n = parts.shape
    blocks = cutile_rows.blocks(config, m, n)
    return Launch(cutile_rows.hinted(_reduce, config), blocks, (parts, outs[0], config.rows, config.tile))


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(config, outputs(*specs), specs[0]), arch)


def run(outs, args, config: Config) -> None:
    if args[0].shape[0] == 0:  # a sum of nothing
        outs[0].zero_()
        return
    cutile_glue.legacy_run(_launch(config, outs, args[0]))
