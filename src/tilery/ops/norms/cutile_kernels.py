"""rms_norm in cuTile: a block takes a row, or a few short ones, as one tile, so x is read once; a longer row, twice."""

import cuda.tile as ct

from tilery.base.launch import Launch
from tilery.base.rows import matrix
from tilery.core.call import Call
from tilery.ops.rows.cutile_rows import Config, WholeRows


def _load(x, index, shape):
    # Without TMA: with it a block gets four more warps and 255 registers a thread, compiled for sm_90.
    return ct.load(x, index, shape, padding_mode=ct.PaddingMode.ZERO, allow_tma=False).astype(ct.float32)


# Int64: the stride of rows may be 2**31 elements and more.
@ct.kernel
def _rms_norm(
    x: ct.IndexedWithInt64, weight: ct.IndexedWithInt64, y: ct.IndexedWithInt64, eps, offset,
    ROWS: ct.Constant[int], TILE: ct.Constant[int],
):  # fmt: skip
    row = ct.bid(0)
    x_tile = _load(x, (row, 0), (ROWS, TILE))
    rstd = ct.rsqrt(ct.sum(x_tile * x_tile, axis=1, keepdims=True) / x.shape[1] + eps)
    y_tile = x_tile * rstd * (_load(weight, (0,), (TILE,)) + offset)
    ct.store(y, (row, 0), y_tile.astype(y.dtype), allow_tma=False)  # what lies outside of y is dropped


@ct.kernel
def _rms_norm_reread(
    x: ct.IndexedWithInt64, weight: ct.IndexedWithInt64, y: ct.IndexedWithInt64, eps, offset,
    ROWS: ct.Constant[int], TILE: ct.Constant[int],
):  # fmt: skip
    row = ct.bid(0)
    tiles = ct.num_tiles(x, 1, (ROWS, TILE))
    squares = ct.zeros((ROWS, TILE), ct.float32)
    for i in range(tiles):
        x_tile = _load(x, (row, i), (ROWS, TILE))
        squares += x_tile * x_tile
    rstd = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / x.shape[1] + eps)
    for i in range(tiles):
        y_tile = _load(x, (row, i), (ROWS, TILE)) * rstd * (_load(weight, (i,), (TILE,)) + offset)
        ct.store(y, (row, i), y_tile.astype(y.dtype), allow_tma=False)


class RmsNorm(WholeRows):
    def launches(self, call: Call, config: Config) -> list[Launch]:
        x, y = matrix(call.x), matrix(call.y)
        m, n = x.shape
        kernel = _rms_norm if n <= config.tile else _rms_norm_reread
        args = {"x": x, "weight": call.weight, "y": y, "eps": call.eps, "offset": call.offset}
        constants = {"ROWS": config.rows, "TILE": config.tile}
        return [Launch(kernel, ct.cdiv(m, config.rows), args, constants, config.hints)]


rms_norm = RmsNorm()
