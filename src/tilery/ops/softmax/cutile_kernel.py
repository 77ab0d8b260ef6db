"""A block takes a row, or a few short ones, as one tile, so x is read once; a row too long for that, three times."""

import cuda.tile as ct

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.ops.softmax import outputs
from tilery.parts import cutile_rows
from tilery.parts.cutile_rows import Config, matrix

archs = cutile_rows.archs


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    return cutile_rows.refusal(x, config or default(x))


def default(x: TensorSpec) -> Config:
    return cutile_rows.default(x)


def configs(x: TensorSpec) -> list[Config]:
    return cutile_rows.configs(x)


def _load(x, index, shape):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False).astype(ct.float32)


# Int64: the stride of rows may be 2**31 elements and more.
@ct.kernel
def _softmax(x: ct.IndexedWithInt64, y: ct.IndexedWithInt64, ROWS: ct.Constant[int], TILE: ct.Constant[int]):
    row = ct.bid(0)
    x_tile = _load(x, (row, 0), (ROWS, TILE))
    e = ct.exp(x_tile - ct.max(x_tile, axis=1, keepdims=True))  # max drops NaN, the sum carries it to the whole row
    y_tile = e * (1 / ct.sum(e, axis=1, keepdims=True))  # one exact division a row, not one an element
    ct.store(y, (row, 0), y_tile.astype(y.dtype), allow_tma=False)  # what lies outside of y is dropped


@ct.kernel
def _softmax_long(x: ct.IndexedWithInt64, y: ct.IndexedWithInt64, ROWS: ct.Constant[int], TILE: ct.Constant[int]):
    row = ct.bid(0)
    tiles = ct.num_tiles(x, 1, (ROWS, TILE))
    tops = ct.full((ROWS, TILE), float("-inf"), ct.float32)
    for i in range(tiles):
        tops = ct.maximum(tops, _load(x, (row, i), (ROWS, TILE)))
    top = ct.max(tops, axis=1, keepdims=True)
    sums = ct.zeros((ROWS, TILE), ct.float32)
    for i in range(tiles):
        sums += ct.exp(_load(x, (row, i), (ROWS, TILE)) - top)
    scale = 1 / ct.sum(sums, axis=1, keepdims=True)
    for i in range(tiles):
        y_tile = ct.exp(_load(x, (row, i), (ROWS, TILE)) - top) * scale
        ct.store(y, (row, i), y_tile.astype(y.dtype), allow_tma=False)


def _launch(config: Config, outs, x) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    x, y = matrix(x), matrix(outs[0])
    m, n = x.shape
    kernel = cutile_rows.hinted(_softmax if n <= config.tile else _softmax_long, config)
    return Launch(kernel, ct.cdiv(m, config.rows), (x, y, config.rows, config.tile))


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(config, outputs(*specs), *specs), arch)


def run(outs, args, config: Config) -> None:
    cutile_glue.legacy_run(_launch(config, outs, *args))
