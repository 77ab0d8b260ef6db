"""A block takes a row, or a few short ones, as one tile, so x is read once; a row too long for that is read three times."""

import cuda.tile as ct

from tilery.backends import cutile_glue
from tilery.backends.cutile_glue import RowConfig as Config
from tilery.backends.cutile_glue import matrix
from tilery.op import Artifact, TensorSpec
from tilery.ops.softmax import outputs

archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def refusal(x: TensorSpec, config: Config | None = None) -> str | None:
    config = config or default(x)
    return cutile_glue.row_refusal(config, cutile_glue.row_blocks(x, config))


def default(x: TensorSpec) -> Config:
    return cutile_glue.row_default(x)


def configs(x: TensorSpec) -> list[Config]:
    return cutile_glue.row_configs(x)


def _load(x, index, shape):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False).astype(ct.float32)


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


def _prepared(outs, x, config: Config):
    """The kernel and its launch arguments, of tensors for `run` and of specs for `compile`."""
    kernel = _softmax if config.tile >= x.shape[-1] else _softmax_long
    return cutile_glue.row_hinted(kernel, config), (matrix(x), matrix(outs[0]), config.rows, config.tile)


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.compile(*_prepared(outputs(*specs), *specs, config), arch)


def run(outs, args, config: Config) -> None:
    kernel, arguments = _prepared(outs, *args, config)
    cutile_glue.launch(kernel, cutile_glue.row_blocks(args[0], config), arguments)
