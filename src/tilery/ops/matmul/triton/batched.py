"""bmm and grouped_matmul in Triton: a program per tile of c, matrix by matrix; the compiler pipelines the loads."""

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.spec import Work
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.ops.matmul.call import GroupedCall, batched_work
from tilery.ops.matmul.triton import tiles
from tilery.ops.matmul.triton.tiles import Matrices, Matrix, Tiles, grouped_tile, store_product

# bmm


@triton.jit
def _bmm(
    a, b, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """a and b are `Matrices`."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    i, j = grouped_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    store_product(
        a.ptr + batch * a.batch, b.ptr + batch * b.batch, c_ptr + batch * M * N, i * BLOCK_M, j * BLOCK_N,
        M, N, K, a.row, a.column, b.row, b.column, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, INT64,
    )  # fmt: skip


class Bmm(Kernel):
    archs = ARCHS
    Config = Tiles

    def refusal(self, call: Call, config: Tiles | None = None) -> str | None:
        return tiles.refusal(call.a, config)

    def default(self, call: Call) -> Tiles:
        return tiles.default(call.a, call.b, call.a.shape[1])

    def configs(self, call: Call) -> list[Tiles]:
        return tiles.configs(call.a)

    def estimate(self, call: Call, config: Tiles) -> Work:
        (_, m, k), n, itemsize = call.a.shape, call.b.shape[2], call.a.dtype.itemsize
        return batched_work(_tiles(call, config), m, n, k, itemsize, config.block_m, config.block_n)

    def launches(self, call: Call, config: Tiles) -> list[Launch]:
        a, b = call.a, call.b
        args = {
            "a": Matrices(a, *a.strides), "b": Matrices(b, *b.strides), "c_ptr": call.c,
            "M": a.shape[1], "N": b.shape[2], "K": a.shape[2],
        }  # fmt: skip
        return [Launch(_bmm, _tiles(call, config), args, tiles.constants(a, b, config), config.options())]


def _tiles(call: Call, config: Tiles) -> int:
    (count, m, _), n = call.a.shape, call.b.shape[2]
    return count * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)


bmm = Bmm()


# grouped_matmul: there are as many programs as there may be tiles. Each finds its group on the device, and those too
# many end at once.


@triton.jit
def _group_end(offset_ptr, group, G, T):
    """Where a group ends. One more than G has the rows that are left."""
    end = tl.load(offset_ptr + group, mask=(group >= 0) & (group < G), other=0)
    return tl.where(group >= G, T, end)


@triton.jit
def _fill_with_nan(c_ptr, T, N, tiles_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes the tile of this program, counted through all of c."""
    rows = (tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(tl.int64)
    columns = (tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    values = tl.full((BLOCK_M, BLOCK_N), float("nan"), tl.float32)
    tl.store(c_ptr + rows * N + columns, values, mask=(rows < T) & (columns < N))


@triton.jit
def _grouped_matmul(
    a, b, offset_ptr, c_ptr, T, N, K, G,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr, INT64: tl.constexpr,
):  # fmt: skip
    """a is a `Matrix`, b `Matrices`; GROUPS is a power of two from G + 1 on."""
    groups, tiles_n = tl.arange(0, GROUPS), tl.cdiv(N, BLOCK_N)
    starts, ends = _group_end(offset_ptr, groups - 1, G, T), _group_end(offset_ptr, groups, G, T)
    if tl.max((ends < starts).to(tl.int32), 0) > 0:  # from 0 to T some fall, so all that is told is wrong
        _fill_with_nan(c_ptr, T, N, tiles_n, BLOCK_M, BLOCK_N)
        return
    last = tl.cumsum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0) * tiles_n
    passed = last <= tl.program_id(0)
    group = tl.sum(passed.to(tl.int32), 0)
    if group > G:
        return
    tile = tl.program_id(0) - tl.max(tl.where(passed, last, 0), 0)
    start, end = _group_end(offset_ptr, group - 1, G, T), _group_end(offset_ptr, group, G, T)
    i, j = grouped_tile(tile, tl.cdiv(end - start, BLOCK_M), tiles_n, GROUP_M)
    depth = tl.where(group < G, K, 0)  # rows that are left are sums of nothing
    store_product(
        a.ptr, b.ptr + group.to(tl.int64) * b.batch, c_ptr, start + i * BLOCK_M, j * BLOCK_N,
        end, N, depth, a.row, a.column, b.row, b.column, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, INT64,
    )  # fmt: skip


class GroupedMatmul(Kernel):
    archs = ARCHS
    Config = Tiles

    def refusal(self, call: GroupedCall, config: Tiles | None = None) -> str | None:
        return tiles.refusal(call.a, config)

    def default(self, call: GroupedCall) -> Tiles:
        rows = call.rows_per_group
        # Sizes vary: blocks of half as much again leave few groups that need a second one, which reads b again.
        return tiles.default(call.a, call.b, rows + rows // 2)

    def configs(self, call: GroupedCall) -> list[Tiles]:
        return tiles.configs(call.a)

    def estimate(self, call: GroupedCall, config: Tiles) -> Work:
        expected = call.tiles_expected(config.block_m) * triton.cdiv(call.n, config.block_n)
        sizes = call.rows_per_group, call.n, call.k, call.a.dtype.itemsize
        return batched_work(expected, *sizes, config.block_m, config.block_n)

    def launches(self, call: GroupedCall, config: Tiles) -> list[Launch]:
        a, b = call.a, call.b
        args = {
            "a": Matrix(a, *a.strides), "b": Matrices(b, *b.strides), "offset_ptr": call.offsets, "c_ptr": call.c,
            "T": call.rows, "N": call.n, "K": call.k, "G": call.groups,
        }  # fmt: skip
        constants = {"GROUPS": triton.next_power_of_2(call.groups + 1)} | tiles.constants(a, b, config)
        grid = call.most_tiles(config.block_m) * triton.cdiv(call.n, config.block_n)
        return [Launch(_grouped_matmul, grid, args, constants, config.options())]


grouped_matmul = GroupedMatmul()
