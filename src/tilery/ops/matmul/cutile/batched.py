"""bmm and grouped_matmul in cuTile: a block per tile of c; TMA, wgmma and the warps' roles are the compiler's work."""

from dataclasses import replace

import cuda.tile as ct
import torch
import torch.nn.functional as F
from torch import Tensor

from tilery.base.launch import Host, Launch
from tilery.base.spec import Work
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.languages import cutile_glue
from tilery.ops.matmul.call import GroupedCall, batched_work
from tilery.ops.matmul.cutile import tiles
from tilery.ops.matmul.cutile.tiles import Config, enough_tiles, grouped_tile

_ZERO = ct.PaddingMode.ZERO


# bmm


@ct.kernel
def _bmm(
    a, b, c,
    TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_K: ct.Constant[int], TMA_STORE: ct.Constant[bool],
):  # fmt: skip
    tiles_m, tiles_n = ct.cdiv(c.shape[1], TILE_M), ct.cdiv(c.shape[2], TILE_N)
    batch = ct.bid(0) // (tiles_m * tiles_n)
    i, j = grouped_tile(ct.bid(0) % (tiles_m * tiles_n), tiles_m, tiles_n)
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.num_tiles(a, 2, (1, TILE_M, TILE_K))):
        a_tile = ct.load(a, (batch, i, k), (1, TILE_M, TILE_K), padding_mode=_ZERO)
        b_tile = ct.load(b, (batch, k, j), (1, TILE_K, TILE_N), padding_mode=_ZERO)
        # float32 is multiplied as float32: for tf32 one would have to cast
        acc = ct.mma(ct.reshape(a_tile, (TILE_M, TILE_K)), ct.reshape(b_tile, (TILE_K, TILE_N)), acc)
    c_tile = ct.reshape(acc.astype(c.dtype), (1, TILE_M, TILE_N))
    ct.store(c, (batch, i, j), c_tile, allow_tma=TMA_STORE)  # what lies outside of c is dropped


class Bmm(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: Call, config: Config | None = None) -> str | None:
        chosen = config or self.default(call)
        return tiles.refusal(chosen, _tiles(call, chosen), a=call.a, b=call.b)

    def default(self, call: Call) -> Config:
        found, enough = tiles.candidates(call.a, call.b), enough_tiles(call.a.device)
        fitting = tuple(c for c in found if _tiles(call, c) >= enough)
        return tiles.default(fitting or found[-1:], call.a.shape[1])

    def configs(self, call: Call) -> list[Config]:
        found = tiles.configs(tiles.candidates(call.a, call.b), call.a.shape[1])
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: Call, config: Config) -> Work:
        (_, m, k), n, itemsize = call.a.shape, call.b.shape[2], call.a.dtype.itemsize
        return batched_work(_tiles(call, config), m, n, k, itemsize, config.tile_m, config.tile_n)

    def launches(self, call: Call, config: Config) -> list[Launch | Host]:
        if call.a.shape[2] == 0:  # a sum of nothing; TMA cannot describe an empty array
            return [Host(Tensor.zero_, (call.c,))]
        args, options = {"a": call.a, "b": call.b, "c": call.c}, {"num_worker_warps": config.num_worker_warps}
        constants = {**config.constants, "TMA_STORE": cutile_glue.stores_by_tma(call.c)}
        return [Launch(_bmm, _tiles(call, config), args, constants, options)]


def _tiles(call: Call, config: Config) -> int:
    (count, m, _), n = call.a.shape, call.b.shape[2]
    return count * ct.cdiv(m, config.tile_m) * ct.cdiv(n, config.tile_n)


bmm = Bmm()


# grouped_matmul: there are as many blocks as there may be tiles. Each finds its group on the device and multiplies its
# slice of a.

_MOST = 128 * 128  # values of a tile of 16-bit products


def _group_ends(offsets, groups, count, total):
    """Where groups end. One more than there are has the rows that are left."""
    return ct.where(groups >= count, total, ct.gather(offsets, groups))


@ct.kernel
def _grouped_matmul(
    a, b, offsets, c,
    GROUPS: ct.Constant[int], TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_K: ct.Constant[int],
):  # fmt: skip
    count, total, tiles_n = b.shape[0], a.shape[0], ct.cdiv(c.shape[1], TILE_N)
    groups = ct.arange(GROUPS, dtype=ct.int32)
    starts, ends = _group_ends(offsets, groups - 1, count, total), _group_ends(offsets, groups, count, total)
    wrong = ct.max(ct.where(ends < starts, 1, 0)) > 0  # on the way from 0 to T some fall: all rows are left, as NaN
    starts = ct.where(wrong, ct.where(groups > count, total, 0), starts)
    ends = ct.where(wrong & (groups < count), 0, ends)
    last = ct.cumsum((ends - starts + (TILE_M - 1)) // TILE_M) * tiles_n
    passed = last <= ct.bid(0)
    group = ct.sum(ct.where(passed, 1, 0))
    if group <= count:
        # In 64 bits: a slice's offset is start · stride, in the wider of their types.
        start = ct.sum(ct.where(groups == group, starts, 0)).astype(ct.int64)
        end = ct.sum(ct.where(groups == group, ends, 0)).astype(ct.int64)
        tile = ct.bid(0) - ct.max(ct.where(passed, last, 0))
        i, j = grouped_tile(tile, ct.cdiv((end - start).astype(ct.int32), TILE_M), tiles_n)
        rows = a.slice(axis=0, start=start, stop=end)
        acc = ct.zeros((TILE_M, TILE_N), ct.float32)
        depth = ct.where(group < count, ct.num_tiles(a, 1, (TILE_M, TILE_K)), 0)  # rows left are sums of nothing
        for k in range(depth):
            a_tile = ct.load(rows, (i, k), (TILE_M, TILE_K), padding_mode=_ZERO)
            b_tile = ct.load(b, (group, k, j), (1, TILE_K, TILE_N), padding_mode=_ZERO)
            acc = ct.mma(a_tile, ct.reshape(b_tile, (TILE_K, TILE_N)), acc)
        acc = ct.where(wrong, float("nan"), acc)
        ct.store(c.slice(axis=0, start=start, stop=end), (i, j), acc.astype(c.dtype))


def _fill_sums_of_nothing(offsets: Tensor, rows: int, c: Tensor) -> None:
    """Zeros, or NaN where the offsets fall on the way from 0 to `rows`."""
    ends = F.pad(F.pad(offsets.long(), (1, 0)), (0, 1), value=rows)
    c.copy_(torch.where((ends.diff() < 0).any(), float("nan"), 0.0))


class GroupedMatmul(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: GroupedCall, config: Config | None = None) -> str | None:
        chosen = config or self.default(call)
        if call.a.dtype != torch.float32 and chosen.num_worker_warps != 4:
            return f"num_worker_warps must be 4, as tileiras 13.4 builds no large tile with 8, got {chosen}"
        return tiles.refusal(chosen, _most_tiles(call, chosen), a=call.a, b=call.b)

    def default(self, call: GroupedCall) -> Config:
        return tiles.default(_candidates(call), call.rows_per_group)

    def configs(self, call: GroupedCall) -> list[Config]:
        found = tiles.configs(_candidates(call), call.rows_per_group)
        return [c for c in found if self.refusal(call, c) is None]

    def estimate(self, call: GroupedCall, config: Config) -> Work:
        expected = call.tiles_expected(config.tile_m) * ct.cdiv(call.n, config.tile_n)
        sizes = call.rows_per_group, call.n, call.k, call.a.dtype.itemsize
        return batched_work(expected, *sizes, config.tile_m, config.tile_n)

    def launches(self, call: GroupedCall, config: Config) -> list[Launch | Host]:
        if 0 in call.b.shape:  # sums of nothing; TMA cannot describe an empty array
            return [Host(_fill_sums_of_nothing, (call.offsets, call.rows, call.c))]
        args = {"a": call.a, "b": call.b, "offsets": call.offsets, "c": call.c}
        constants = {"GROUPS": 1 << call.groups.bit_length()} | config.constants
        options = {"num_worker_warps": config.num_worker_warps}
        return [Launch(_grouped_matmul, _most_tiles(call, config), args, constants, options)]


def _candidates(call: GroupedCall) -> tuple[Config, ...]:
    found = tiles.candidates(call.a, call.b)
    if call.a.dtype == torch.float32:
        return found
    return tuple(replace(c, num_worker_warps=4) for c in found if c.tile_m * c.tile_n <= _MOST)


def _most_tiles(call: GroupedCall, config: Config) -> int:
    return call.most_tiles(config.tile_m) * ct.cdiv(call.n, config.tile_n)


grouped_matmul = GroupedMatmul()
