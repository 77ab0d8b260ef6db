"""A block takes a row, or a few short ones, as one tile, so x is read once; a row too long for that, twice."""

import cuda.tile as ct

from tilery.base.spec import Artifact, TensorSpec
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.ops.rms_norm import outputs
from tilery.parts import cutile_rows
from tilery.parts.cutile_rows import Config, matrix
from tilery.parts.rows import heads_refusal

archs = cutile_rows.archs


def refusal(x: TensorSpec, weight: TensorSpec, config: Config | None = None) -> str | None:
    return heads_refusal(x) or cutile_rows.refusal(x, config or default(x, weight))


def default(x: TensorSpec, weight: TensorSpec) -> Config:
    return cutile_rows.default(x)


def configs(x: TensorSpec, weight: TensorSpec) -> list[Config]:
    return cutile_rows.configs(x)


def _load(x, index, shape):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False).astype(ct.float32)


# Int64: the stride of rows may be 2**31 elements and more.
@ct.kernel
def _rms_norm(
    x: ct.IndexedWithInt64, w: ct.IndexedWithInt64, y: ct.IndexedWithInt64, eps, offset,
    ROWS: ct.Constant[int], TILE: ct.Constant[int],
):  # fmt: skip
    row = ct.bid(0)
    x_tile = _load(x, (row, 0), (ROWS, TILE))
    scale = ct.rsqrt(ct.sum(x_tile * x_tile, axis=1, keepdims=True) / x.shape[1] + eps)
    y_tile = x_tile * scale * (_load(w, (0,), (TILE,)) + offset)
    ct.store(y, (row, 0), y_tile.astype(y.dtype), allow_tma=False)  # what lies outside of y is dropped


@ct.kernel
def _rms_norm_long(
    x: ct.IndexedWithInt64, w: ct.IndexedWithInt64, y: ct.IndexedWithInt64, eps, offset,
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
        y_tile = _load(x, (row, i), (ROWS, TILE)) * scale * (_load(w, (i,), (TILE,)) + offset)
        ct.store(y, (row, i), y_tile.astype(y.dtype), allow_tma=False)


def _launch(config: Config, outs, x, weight, eps=1e-6, offset=0.0) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    x, y = matrix(x), matrix(outs[0])
    m, n = x.shape
    kernel = cutile_rows.hinted(_rms_norm if n <= config.tile else _rms_norm_long, config)
    return Launch(kernel, ct.cdiv(m, config.rows), (x, weight, y, float(eps), float(offset), config.rows, config.tile))


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(config, outputs(*specs), *specs), arch)


def run(outs, args, config: Config) -> None:
    cutile_glue.legacy_run(_launch(config, outs, *args))
