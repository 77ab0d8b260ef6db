"""A block takes one tile of a few rows and columns: nothing is shared between elements, so any cut will do."""

import cuda.tile as ct

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.parts import cutile_rows
from tilery.parts.cutile_rows import Config, matrix
from tilery.parts.gated import outputs, pair

archs = cutile_rows.archs


def refusal(gate: TensorSpec, up: TensorSpec | None, config: Config | None = None) -> str | None:
    return cutile_rows.refusal(pair(gate, up)[0], config or default(gate, up))


def default(gate: TensorSpec, up: TensorSpec | None) -> Config:
    return _cut(pair(gate, up)[0], 1024)  # 8192 × 14336 on an H200: 203 µs; 258 in tiles of 2048


def configs(gate: TensorSpec, up: TensorSpec | None) -> list[Config]:
    cuts = [_cut(pair(gate, up)[0], values) for values in (1024, 2048, 4096, 8192)]
    found = [*cuts, *(Config(c.rows, c.tile, num_worker_warps=8) for c in cuts)]
    return [c for c in dict.fromkeys(found) if refusal(gate, up, c) is None]


def _cut(gate: TensorSpec, values: int) -> Config:
    tile = min(cutile_rows.width(gate.shape[-1]), values)
    return Config(rows=values // tile, tile=tile)


def _load(x, index, shape):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False).astype(ct.float32)


# Int64: the stride of rows may be 2**31 elements and more.
@ct.kernel
def _silu_mul(
    gate: ct.IndexedWithInt64, up: ct.IndexedWithInt64, y: ct.IndexedWithInt64,
    ROWS: ct.Constant[int], TILE: ct.Constant[int],
):  # fmt: skip
    index = divmod(ct.bid(0), ct.num_tiles(gate, 1, (ROWS, TILE)))  # neighbours take the same rows
    g = _load(gate, index, (ROWS, TILE))
    # The approximate division errs by 2 ulp; an exact one has a branch for every element.
    sigmoid = ct.truediv(1.0, 1.0 + ct.exp(-g), rounding_mode=ct.RoundingMode.APPROX)
    y_tile = g * sigmoid * _load(up, index, (ROWS, TILE))
    ct.store(y, index, y_tile.astype(y.dtype), allow_tma=False)  # what lies outside of y is dropped


def _launch(config: Config, outs, gate, up) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    gate, up = pair(gate, up)
    gate, up, y = matrix(gate), matrix(up), matrix(outs[0])
    blocks = cutile_rows.blocks(config, *gate.shape)
    return Launch(cutile_rows.hinted(_silu_mul, config), blocks, (gate, up, y, config.rows, config.tile))


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(config, outputs(*specs), *specs), arch)


def run(outs, args, config: Config) -> None:
    cutile_glue.legacy_run(_launch(config, outs, *args))
