"""softmax in cuTile: a block takes a row, or a few short ones, as one tile; a longer row is read three times."""

import cuda.tile as ct

from tilery.base.launch import Launch
from tilery.base.rows import matrix
from tilery.core.call import Call
from tilery.ops.rows.cutile_rows import Config, WholeRows


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
def _softmax_reread(x: ct.IndexedWithInt64, y: ct.IndexedWithInt64, ROWS: ct.Constant[int], TILE: ct.Constant[int]):
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


class Softmax(WholeRows):
    def launches(self, call: Call, config: Config) -> list[Launch]:
        x, y = matrix(call.x), matrix(call.y)
        m, n = x.shape
        kernel = _softmax if n <= config.tile else _softmax_reread
        constants = {"ROWS": config.rows, "TILE": config.tile}
        return [Launch(kernel, ct.cdiv(m, config.rows), {"x": x, "y": y}, constants, config.hints)]


softmax = Softmax()
