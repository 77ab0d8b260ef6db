"""A block per tile of c that there may be: each finds its group on the device and multiplies its slice of a."""

from dataclasses import replace

import cuda.tile as ct
import torch
import torch.nn.functional as F

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.ops.grouped_matmul import groups_hit, outputs, tiles_expected
from tilery.parts import batches, cutile_batches
from tilery.parts.cutile_batches import Config, archs, place

__all__ = ["Config", "archs", "compile", "configs", "default", "estimate", "refusal", "run"]

_ZERO = ct.PaddingMode.ZERO
_MOST = 128 * 128  # values of a tile of 16-bit products


def refusal(a: TensorSpec, b: TensorSpec, offsets: TensorSpec, config: Config | None = None) -> str | None:
    chosen = config or default(a, b, offsets)
    if a.dtype != torch.float32 and chosen.num_worker_warps != 4:
        return f"num_worker_warps must be 4, as tileiras 13.4 builds no large tile with 8, got {chosen}"
    return cutile_batches.refusal(chosen, _blocks(a, b, chosen), a=a, b=b)


def default(a: TensorSpec, b: TensorSpec, offsets: TensorSpec) -> Config:
    return cutile_batches.default(_candidates(a, b), _rows(a, b))


def configs(a: TensorSpec, b: TensorSpec, offsets: TensorSpec) -> list[Config]:
    found = cutile_batches.configs(_candidates(a, b), _rows(a, b))
    return [c for c in found if refusal(a, b, offsets, c) is None]


def estimate(a: TensorSpec, b: TensorSpec, offsets: TensorSpec, config: Config) -> Work:
    (total, k), (groups, _, n) = a.shape, b.shape
    tiles = tiles_expected(total, groups, config.tile_m) * ct.cdiv(n, config.tile_n)
    return batches.tiled(tiles, _rows(a, b), n, k, config.tile_m, config.tile_n, a.dtype.itemsize)


def _candidates(a: TensorSpec, b: TensorSpec) -> tuple[Config, ...]:
    found = cutile_batches.candidates(a, b)
    if a.dtype == torch.float32:
        return found
    return tuple(replace(c, num_worker_warps=4) for c in found if c.tile_m * c.tile_n <= _MOST)


def _rows(a: TensorSpec, b: TensorSpec) -> int:
    """Of a group that has any, about."""
    return ct.cdiv(a.shape[0], max(groups_hit(a.shape[0], b.shape[0]), 1))


def _blocks(a, b, config: Config) -> int:
    """A group has a tile that is not full at most, and so have the rows that are left."""
    (t, _), (groups, _, n) = a.shape, b.shape
    tiles = (t + min(groups + 1, t) * (config.tile_m - 1)) // config.tile_m
    return tiles * ct.cdiv(n, config.tile_n)


def _edges(offsets, groups, count, total):
    """Where groups end. One more than there are has the rows that are left."""
    return ct.where(groups >= count, total, ct.gather(offsets, groups))


@ct.kernel
def _grouped_matmul(
    a, b, offsets, c,
    GROUPS: ct.Constant[int], TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], TILE_K: ct.Constant[int],
):  # fmt: skip
    count, total, tiles_n = b.shape[0], a.shape[0], ct.cdiv(c.shape[1], TILE_N)
    groups = ct.arange(GROUPS, dtype=ct.int32)
    starts, ends = _edges(offsets, groups - 1, count, total), _edges(offsets, groups, count, total)
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
        i, j = place(tile, ct.cdiv((end - start).astype(ct.int32), TILE_M), tiles_n)
        rows = a.slice(axis=0, start=start, stop=end)
        acc = ct.zeros((TILE_M, TILE_N), ct.float32)
        depth = ct.where(group < count, ct.num_tiles(a, 1, (TILE_M, TILE_K)), 0)  # rows left are sums of nothing
        for k in range(depth):
            a_tile = ct.load(rows, (i, k), (TILE_M, TILE_K), padding_mode=_ZERO)
            b_tile = ct.load(b, (group, k, j), (1, TILE_K, TILE_N), padding_mode=_ZERO)
            acc = ct.mma(a_tile, ct.reshape(b_tile, (TILE_K, TILE_N)), acc)
        acc = ct.where(wrong, float("nan"), acc)
        ct.store(c.slice(axis=0, start=start, stop=end), (i, j), acc.astype(c.dtype))


def _launch(config: Config, outs, a, b, offsets) -> Launch:
    """Of tensors for `run` and of specs for `compile`."""
    kernel = cutile_glue.hinted(_grouped_matmul, num_worker_warps=config.num_worker_warps)
    constants = 1 << b.shape[0].bit_length(), config.tile_m, config.tile_n, config.tile_k
    return Launch(kernel, _blocks(a, b, config), (a, b, offsets, outs[0], *constants))


def compile(specs, config: Config, arch: str) -> Artifact:
    return cutile_glue.legacy_compile(_launch(config, outputs(*specs), *specs), arch)


def run(outs, args, config: Config) -> None:
    if args[1].numel() == 0:  # sums of nothing; TMA cannot describe an empty array
        edges = F.pad(F.pad(args[2].long(), (1, 0)), (0, 1), value=args[0].shape[0])
        outs[0].copy_(torch.where((edges.diff() < 0).any(), float("nan"), 0.0))
        return
    cutile_glue.legacy_run(_launch(config, outs, *args))
