"""A program per tile of c that there may be: each finds its group on the device, and the ones too many end at once."""

import triton
import triton.language as tl

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.hardware.device import ARCHS
from tilery.languages import triton_glue
from tilery.ops.grouped_matmul import groups_hit, outputs, tiles_expected
from tilery.parts import batches, triton_batches
from tilery.parts.triton_batches import BAND, multiply, place
from tilery.parts.triton_tiles import Tiles as Config

archs = ARCHS


def refusal(a: TensorSpec, b: TensorSpec, offsets: TensorSpec, config: Config | None = None) -> str | None:
    return triton_batches.refusal(a, config)


def default(a: TensorSpec, b: TensorSpec, offsets: TensorSpec) -> Config:
    rows = _rows(a, b)
    # Sizes vary: blocks of half as much again leave few groups that need a second one, which reads b again.
    return triton_batches.default(a, b, rows + rows // 2)


def configs(a: TensorSpec, b: TensorSpec, offsets: TensorSpec) -> list[Config]:
    return triton_batches.configs(a)


def estimate(a: TensorSpec, b: TensorSpec, offsets: TensorSpec, config: Config) -> Work:
    (total, k), (groups, _, n) = a.shape, b.shape
    tiles = tiles_expected(total, groups, config.block_m) * triton.cdiv(n, config.block_n)
    return batches.tiled(tiles, _rows(a, b), n, k, config.block_m, config.block_n, a.dtype.itemsize)


def _rows(a: TensorSpec, b: TensorSpec) -> int:
    """Of a group that has any, about."""
    return triton.cdiv(a.shape[0], max(groups_hit(a.shape[0], b.shape[0]), 1))


@triton.jit
def _edge(offset_ptr, group, G, T):
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
    a_ptr, b_ptr, offset_ptr, c_ptr, T, N, K, G, a_row, a_column, b_group, b_row, b_column,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    EVEN_K: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    groups, tiles_n = tl.arange(0, GROUPS), tl.cdiv(N, BLOCK_N)
    starts, ends = _edge(offset_ptr, groups - 1, G, T), _edge(offset_ptr, groups, G, T)
    if tl.max((ends < starts).to(tl.int32), 0) > 0:  # from 0 to T some fall, so all that is told is wrong
        _fill_with_nan(c_ptr, T, N, tiles_n, BLOCK_M, BLOCK_N)
        return
    last = tl.cumsum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0) * tiles_n
    passed = last <= tl.program_id(0)
    group = tl.sum(passed.to(tl.int32), 0)
    if group > G:
        return
    tile = tl.program_id(0) - tl.max(tl.where(passed, last, 0), 0)
    start, end = _edge(offset_ptr, group - 1, G, T), _edge(offset_ptr, group, G, T)
    i, j = place(tile, tl.cdiv(end - start, BLOCK_M), tiles_n, BAND)
    depth = tl.where(group < G, K, 0)  # rows that are left are sums of nothing
    multiply(
        a_ptr, b_ptr + group.to(tl.int64) * b_group, c_ptr, start + i * BLOCK_M, j * BLOCK_N,
        end, N, depth, a_row, a_column, b_row, b_column, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, FAR,
    )  # fmt: skip


def _arguments(outs, a, b, offsets, config: Config):
    """The launch arguments, of tensors for `run` and of specs for `compile`."""
    (t, k), (groups, _, n) = a.shape, b.shape
    shapes = t, n, k, groups, a.stride(0), a.stride(1), b.stride(0), b.stride(1), b.stride(2)
    constants = {"GROUPS": triton.next_power_of_2(groups + 1), "BAND": BAND}
    return (a, b, offsets, outs[0], *shapes), constants | triton_batches.constants(a, b, config)


def compile(specs, config: Config, arch: str) -> Artifact:
    arguments, constants = _arguments(outputs(*specs), *specs, config)
    return triton_glue.legacy_compile(_grouped_matmul, arguments, constants, config.options(), arch)


def run(outs, args, config: Config) -> None:
    (t, _), (groups, _, n) = args[0].shape, args[1].shape
    arguments, constants = _arguments(outs, *args, config)
    # A group has a tile that is not full at most, and so have the rows that are left.
    tiles = (t + min(groups + 1, t) * (config.block_m - 1)) // config.block_m
    _grouped_matmul[(tiles * triton.cdiv(n, config.block_n),)](*arguments, **constants, **config.options())
