"""A block takes a row, or a few short ones, as one tile, so x is read once; a row too long for that is read twice."""

import cuda.tile as ct

from tilery.backends import cutile_glue
from tilery.backends.cutile_glue import RowConfig as Config
from tilery.backends.cutile_glue import matrix
from tilery.op import Artifact, TensorSpec
from tilery.ops.rms_norm import outputs

archs = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    config = config or default(x, weight)
    return cutile_glue.row_refusal(config, cutile_glue.row_blocks(x, config))


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return cutile_glue.row_default(x)


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return cutile_glue.row_configs(x)


def _load(x, index, shape):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False).astype(ct.float32)


@ct.kernel
def _rms_norm(
    x: ct.IndexedWithInt64, w: ct.IndexedWithInt64, y: ct.IndexedWithInt64, eps,
    ROWS: ct.Constant[int], TILE: ct.Constant[int],
):  # fmt: skip
    row = ct.bid(0)
    x_tile = _load(x, (row, 0), (ROWS, TILE))
    scale = ct.rsqrt(ct.sum(x_tile * x_tile, axis=1, keepdims=True) / x.shape[1] + eps)
    y_tile = x_tile * scale * _load(w, (0,), (TILE,))
    ct.store(y, (row, 0), y_tile.astype(y.dtype), allow_tma=False)  # what lies outside of y is dropped


@ct.kernel
def _rms_norm_long(
    x: ct.IndexedWithInt64, w: ct.IndexedWithInt64, y: ct.IndexedWithInt64, eps,
    ROWS: ct.Constant[int], TILE: ct.Constant[int],
):  # fmt: skip
    row = ct.bid(0)
    tiles = ct.num_tiles(x, 1, (ROWS, TILE))
    squares = ct.zeros((ROWS, TILE), ct.float32)
    for i in range(tiles):
        x_tile = _load(x, (row, i), (ROWS, TILE))
        squares += x_tile * x_tile
    scale = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / x.shape[1] + eps)
    for i in range(tiles):
        y_tile = _load(x, (row, i), (ROWS, TILE)) * scale * _load(w, (i,), (TILE,))
        ct.store(y, (row, i), y_tile.astype(y.dtype), allow_tma=False)


def _prepared(outs, x, weight, eps, config: Config):
    """The kernel and its launch arguments, of tensors for `run` and of specs for `compile`."""
    kernel = _rms_norm if config.tile >= x.shape[-1] else _rms_norm_long
    arguments = (matrix(x), weight, matrix(outs[0]), eps, config.rows, config.tile)
    return cutile_glue.row_hinted(kernel, config), arguments


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.compile(*_prepared(outputs(*specs), *specs, 1e-6, config), arch)


def run(outs, args, config: Config) -> None:
    kernel, arguments = _prepared(outs, *args, config)
    cutile_glue.launch(kernel, cutile_glue.row_blocks(args[0], config), arguments)
