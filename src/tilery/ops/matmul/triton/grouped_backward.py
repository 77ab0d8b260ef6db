"""grouped_matmul_backward in Triton: a program per tile of a group's matrix, which sums over the group's own rows."""

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.spec import Work
from tilery.core.call import Call
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS
from tilery.ops.matmul.call import batched_work
from tilery.ops.matmul.triton import tiles
from tilery.ops.matmul.triton.tiles import GROUP_M, Matrix, Tiles, grouped_tile, needs_int64, product


@triton.jit
def _sound(offset_ptr, G, T, GROUPS: tl.constexpr):
    """Whether the ends of groups never fall and lie between 0 and T."""
    groups = tl.arange(0, GROUPS)
    starts = tl.load(offset_ptr + groups - 1, mask=(groups > 0) & (groups <= G), other=0)
    ends = tl.load(offset_ptr + groups, mask=groups < G, other=T)
    return tl.max((ends < starts).to(tl.int32), 0) == 0


@triton.jit
def _grouped_backward(
    a, dc, offset_ptr, db_ptr, T, N, K, G,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    INT64: tl.constexpr,
):  # fmt: skip
    """a [T, K] and dc [T, N] are `Matrix`, db is [G, K, N]; GROUPS is a power of two from G + 1 on."""
    tiles_k, tiles_n = tl.cdiv(K, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (tiles_k * tiles_n)
    i, j = grouped_tile(tl.program_id(0) % (tiles_k * tiles_n), tiles_k, tiles_n, GROUP_M)
    start = tl.load(offset_ptr + group - 1, mask=group > 0, other=0)
    sound = _sound(offset_ptr, G, T, GROUPS)
    count = tl.where(sound, tl.load(offset_ptr + group) - start, 0)  # of wrong ends none is followed
    first = start.to(tl.int64)  # row * stride overflows int32 past 2**31 elements
    acc = product(
        a.ptr + first * a.row, dc.ptr + first * dc.row, i * BLOCK_M, j * BLOCK_N, K, N, count,
        a.column, a.row, dc.row, dc.column, BLOCK_M, BLOCK_N, BLOCK_K, INT64,
    )  # fmt: skip
    acc = tl.where(sound, acc, float("nan"))
    rows, columns = (i * BLOCK_M + tl.arange(0, BLOCK_M))[:, None], (j * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    db_ptr += group.to(tl.int64) * K * N
    tl.store(db_ptr + (rows.to(tl.int64) * N + columns), acc, mask=(rows < K) & (columns < N))


class GroupedMatmulBackward(Kernel):
    archs = ARCHS
    Config = Tiles

    def refusal(self, call: Call, config: Tiles | None = None) -> str | None:
        return tiles.refusal(call.a, config)

    def default(self, call: Call) -> Tiles:
        return tiles.default(call.a, call.dc, call.a.shape[1])

    def configs(self, call: Call) -> list[Tiles]:
        return tiles.configs(call.a)

    def estimate(self, call: Call, config: Tiles) -> Work:
        """As if the groups had equally many rows."""
        (rows, k), n, groups = call.a.shape, call.dc.shape[1], max(call.offsets.shape[0], 1)
        deep = -(-rows // groups)
        return batched_work(_tiles(call, config), k, n, deep, call.a.dtype.itemsize, config.block_m, config.block_n)

    def launches(self, call: Call, config: Tiles) -> list[Launch]:
        a, dc, groups = call.a, call.dc, call.offsets.shape[0]
        args = {
            "a": Matrix(a, *a.strides), "dc": Matrix(dc, *dc.strides), "offset_ptr": call.offsets, "db_ptr": call.db,
            "T": a.shape[0], "N": dc.shape[1], "K": a.shape[1], "G": groups,
        }  # fmt: skip
        constants = {"GROUPS": triton.next_power_of_2(groups + 1)} | config.constants()
        constants |= {"GROUP_M": GROUP_M, "INT64": needs_int64(*a.strides, *dc.strides)}
        return [Launch(_grouped_backward, _tiles(call, config), args, constants, config.options())]


def _tiles(call: Call, config: Tiles) -> int:
    k, n = call.a.shape[1], call.dc.shape[1]
    return call.offsets.shape[0] * triton.cdiv(k, config.block_m) * triton.cdiv(n, config.block_n)


grouped_matmul_backward = GroupedMatmulBackward()
