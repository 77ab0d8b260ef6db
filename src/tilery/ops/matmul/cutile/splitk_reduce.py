"""splitk_reduce in cuTile: a block takes one tile of a few rows and columns and adds up all its parts."""

import cuda.tile as ct
from torch import Tensor

from tilery.base.launch import Host, Launch
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.ops.rows import cutile_rows
from tilery.ops.rows.cutile_rows import Config, CutileRows


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


class SplitkReduce(CutileRows):
    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        _, m, n = call.parts.shape
        total = TensorSpec.contiguous((m, n), call.parts.dtype, call.parts.device)
        return cutile_rows.refusal(total, config or self.default(call))

    def default(self, call: Call) -> Config:
        return _cut(call, 1024)

    def configs(self, call: Call) -> list[Config]:
        cuts = [_cut(call, values) for values in (512, 1024, 2048, 4096)]
        found = [*cuts, *(Config(c.rows, c.tile, num_worker_warps=8) for c in cuts)]
        return [c for c in dict.fromkeys(found) if self.refusal(call, c) is None]

    def launches(self, call: Call, config: Config) -> list[Launch | Host]:
        count, m, n = call.parts.shape
        if count == 0:  # a sum of nothing
            return [Host(Tensor.zero_, (call.c,))]
        constants = {"ROWS": config.rows, "TILE": config.tile}
        blocks = cutile_rows.blocks(config, m, n)
        return [Launch(_reduce, blocks, {"parts": call.parts, "c": call.c}, constants, config.hints)]


def _cut(call: Call, values: int) -> Config:
    """A tile of so many values."""
    tile = min(cutile_rows.width(call.parts.shape[2]), values)
    return Config(rows=values // tile, tile=tile)


splitk_reduce = SplitkReduce()
