"""silu_mul in cuTile: a block takes one tile of a few rows and columns."""

import cuda.tile as ct

from tilery.base.launch import Launch
from tilery.base.rows import matrix
from tilery.base.spec import TensorSpec
from tilery.ops.gated.call import GatedCall
from tilery.ops.rows import cutile_rows
from tilery.ops.rows.cutile_rows import Config, CutileRows


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


class SiluMul(CutileRows):
    def refusal(self, call: GatedCall, config: Config | None = None) -> str | None:
        return cutile_rows.refusal(call.halves[0], config or self.default(call))

    def default(self, call: GatedCall) -> Config:
        return _tile(call.halves[0], 1024)  # 8192 × 14336 on an H200: 203 µs; 258 in tiles of 2048

    def configs(self, call: GatedCall) -> list[Config]:
        tiles = [_tile(call.halves[0], values) for values in (1024, 2048, 4096, 8192)]
        found = [*tiles, *(Config(c.rows, c.tile, num_worker_warps=8) for c in tiles)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def launches(self, call: GatedCall, config: Config) -> list[Launch]:
        gate, up, y = (matrix(x) for x in (*call.halves, call.y))
        constants = {"ROWS": config.rows, "TILE": config.tile}
        blocks = cutile_rows.blocks(config, *gate.shape)
        return [Launch(_silu_mul, blocks, {"gate": gate, "up": up, "y": y}, constants, config.hints)]


def _tile(gate: TensorSpec, values: int) -> Config:
    """Whole rows, or a part of one, of so many values."""
    tile = min(cutile_rows.width(gate.shape[-1]), values)
    return Config(rows=values // tile, tile=tile)


silu_mul = SiluMul()
