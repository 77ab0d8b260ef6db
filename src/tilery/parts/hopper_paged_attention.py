"""Attention to a KV cache on Hopper by TMA and wgmma: which tiles, and how the kernel is built and launched.

ops/attention_chunked/hopper.cu is the device side. Rows of a tile are query tokens times the heads that share keys. Of
tiles of 64 a processor works on two: one is multiplied while the other waits. How a sequence's keys are cut depends on
its own length and the config alone.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilery.base.spec import Artifact, TensorSpec, Work, dtype_name
from tilery.languages import cuda_glue, tensor_maps
from tilery.parts import hopper_attention
from tilery.parts.attention_checks import cutting_window
from tilery.parts.fp8 import ceil_div
from tilery.parts.hopper_attention import columns
from tilery.parts.paged_attention import most_splits

_SOURCE = Path(__file__).parents[1] / "ops" / "attention_chunked" / "hopper.cu"
# Of a block, by the rows of a tile and the columns of a head, what is likely best first; more do not fit the registers.
KEYS = {
    128: {64: (128, 192), 128: (160, 128, 176), 192: (112, 96), 256: (80, 64)},
    64: {64: (128, 64), 128: (64, 32), 192: (32,), 256: ()},
}
_RESIDENT = {128: 1, 64: 2}  # blocks of threads on a processor
_KEPT = 4096  # launches' maps: a model has one or two for each of its layers
_FAR = 2**29  # more than a query sees, or than is numbered
MOST_SPLITS = 32  # a lane of a warp has one
_WHOLE = 2**30  # tokens of a "page" that is a sequence
_THREADS = 128  # that combine


@dataclass(frozen=True)
class Config:
    block_n: int  # keys
    stages: int  # blocks of keys or of values that are under way
    splits: int = 1  # blocks of threads that share the keys of a row, at most
    share: int = 1  # blocks of a cluster that fetch keys and values for each other
    persistent: bool = True  # blocks go from tile to tile, else each has one
    block_m: int = 128  # rows
    least: int = 1  # blocks of keys of a split, where there are so many


class Problem(NamedTuple):
    """Of specs for a plan, of tensors for a run; sizes are read once."""

    q: Any  # [T, H, D] with starts, else [B, Q, H, D]
    k: Any
    v: Any
    starts: Any
    lengths: Any
    table: Any  # None: sequence b is page b
    out: Any
    tokens: int
    heads: int
    size: int
    pages: int
    page: int
    kv_heads: int
    group: int  # heads that share keys
    sequences: int
    bound: int  # keys of a sequence, at most
    most: int  # queries of one
    window: int
    scale: float
    extras: tuple[str, ...] = ()  # what is asked for beyond that

    @property
    def keys(self) -> int:
        """That any query of a sequence sees, at most."""
        return min(self.bound, self.most + self.window - 1) if self.window else self.bound

    @property
    def rows(self) -> int:
        """Of a sequence and a kv head, at most."""
        return self.most * self.group

    def tiles(self, config: Config) -> int:
        """Of a kv head, each for blocks that share."""
        return ceil_div(self.rows, config.block_m * config.share)

    def blocks(self, config: Config) -> int:
        """Of threads, for each split."""
        return self.sequences * self.kv_heads * self.tiles(config) * config.share

    def splits(self, config: Config) -> int:
        """Those that can have a key; a window begins anywhere in a block."""
        keys = self.keys + (config.block_n if self.window else 0)
        return most_splits(config.splits, keys, config.block_n * config.least)

    def fetched(self, config: Config) -> int:
        """Rows of a tile: those of whole queries."""
        return min(self.most, config.block_m // self.group) * self.group


def problem(tensors: tuple[Any, ...], out: Any, most: int, window: int, scale: float | None, *extras: str) -> Problem:
    """Of q, k_cache, v_cache, starts, lengths and table; all of `extras` is refused."""
    q, k, _, _, lengths, table = tensors
    (*tokens, heads, size), (pages, page, kv_heads, _) = q.shape, k.shape
    bound = page if table is None else table.shape[1] * page
    made = math.prod(tokens), heads, size, pages, page, kv_heads, heads // kv_heads, lengths.shape[0], bound
    rest = most, cutting_window(window, most, bound), size**-0.5 if scale is None else scale, extras
    return Problem._make((*tensors, out, *made, *rest))


def asked(k_scale: Any, sinks: Any, softcap: float) -> list[str]:
    """What is asked for that the kernel does not do."""
    there = {"an fp8 cache": k_scale is not None, "sinks": sinks is not None, "softcap": softcap > 0}
    return [name for name, given in there.items() if given]


def refusal(p: Problem, config: Config | None) -> str | None:
    if p.q.dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies fp16 and bf16 alone, got {dtype_name(p.q.dtype)}"
    if p.extras:
        return f"takes no more than a window, got {', '.join(p.extras)}"
    if why := _group_refusal(p, max(KEYS)):
        return why
    tiles = 2 * p.sequences * p.kv_heads * ceil_div(p.rows, min(KEYS))
    if (most := max(p.tokens * p.heads, p.bound, tiles * MOST_SPLITS)) >= _FAR:
        return f"numbers rows, keys and tiles up to {_FAR}, got {most}"
    if _token_stride(p.q.shape, p.q.strides) is None:
        return f"tokens of q must be equally far apart for TMA to fetch them, got strides {list(p.q.strides)}"
    q, cache = _views(p.q.shape, p.q.strides, p.k.shape, p.k.strides)
    for name, x, view in (("q", p.q, q), ("k_cache", p.k, cache), ("v_cache", p.v, cache)):
        if all(view[0]) and (why := tensor_maps.heads_refusal(name, x, *view)):
            return why
    return None if config is None else _config_refusal(p, config)


def _group_refusal(p: Problem, most: int) -> str | None:
    """A tile has all heads of a query; the next begins where a power of two ends."""
    if p.group <= most and (p.rows <= most or not p.group & (p.group - 1)):
        return None
    return f"heads that share keys must be a power of two up to {most} for TMA to fetch as rows, got {p.group}"


def _config_refusal(p: Problem, config: Config) -> str | None:
    width = columns(p.size)
    if config.block_m not in KEYS:
        return f"block_m must be {' or '.join(map(str, KEYS))}, got {config.block_m}"
    if why := _group_refusal(p, config.block_m):
        return why
    known = KEYS[config.block_m][width]
    if config.block_n not in known:
        what = f"block_n of heads of {p.size} in tiles of {config.block_m} rows must be"
        return f"{what} {' or '.join(map(str, known)) or 'that of larger tiles'}, got {config.block_n}"
    most = stages(config.block_m, config.block_n, width)
    if not 2 <= config.stages <= most:
        return f"stages must be 2 to {most} for shared memory to hold them, got {config.stages}"
    if not 1 <= config.splits <= MOST_SPLITS or config.share not in (1, 2) or config.least < 1:
        got = f"{config.splits}, {config.share} and {config.least}"
        return f"splits must be 1 to {MOST_SPLITS}, share 1 or 2 and least 1 or more, got {got}"
    return None


def stages(block_m: int, block_n: int, width: int) -> int:
    """That shared memory has room for."""
    return hopper_attention.fitting(block_m, block_n, width, _RESIDENT[block_m])


def estimate(p: Problem, config: Config) -> Work:
    splits = p.splits(config)
    keys = ceil_div(p.keys, splits)
    moved = (keys + min(p.rows, config.block_m)) * 2 * p.size * p.q.dtype.itemsize
    return Work(p.blocks(config) * splits, 4 * config.block_m * keys * columns(p.size), moved)


def workspace(p: Problem, config: Config) -> tuple[TensorSpec, ...]:
    """What each split found: sums [splits, T, H, D], and tops and totals [2, splits, T, H]."""
    splits = p.splits(config)
    if splits == 1:
        return ()
    shapes = (splits, p.tokens, p.heads, p.size), (2, splits, p.tokens, p.heads)
    return tuple(TensorSpec.contiguous(shape, torch.float32, p.q.device) for shape in shapes)


# Launches


_Sizes = tuple[int, ...]


def _token_stride(q: _Sizes, strides: _Sizes) -> int | None:
    """From each token of all sequences to the next; None where there is no such stride."""
    if len(q) == 3 or q[1] == 1:
        return strides[0]
    return strides[1] if q[0] <= 1 or strides[0] == q[1] * strides[1] else None


def _views(q: _Sizes, q_strides: _Sizes, k: _Sizes, k_strides: _Sizes) -> tuple[tuple[_Sizes, _Sizes], ...]:
    """q as [tokens, kv heads, heads that share one, values], a cache as [pages, kv heads, tokens, values].

    Sizes, innermost first, and the strides of all but the values.
    """
    (*tokens, heads, size), (pages, page, kv_heads, _) = q, k
    group, head, step = heads // kv_heads, q_strides[-2], _token_stride(q, q_strides)
    assert step is not None
    rows = (size, group, kv_heads, math.prod(tokens)), (head, head * group, step)
    return rows, ((size, page, kv_heads, pages), (k_strides[1], k_strides[2], k_strides[0]))


@functools.cache
def _kernel(dtype: torch.dtype, size: int, config: Config) -> cuda_glue.Kernel:
    how = hopper_attention.Config(config.block_m, config.block_n, config.stages)
    sizes = f"{size}, {config.block_n}, {config.block_m // 64}, {config.stages}, {config.share}"
    name, shared = f"paged_attention<{cuda_glue.TYPES[dtype]}, {sizes}>", how.shared(columns(size))
    return cuda_glue.Kernel(_SOURCE, name, (None,) * 4, how.threads, shared, config.share, early=True)


@functools.cache
def combination(dtype: torch.dtype, size: int) -> cuda_glue.Kernel:
    name = f"combine_splits<{cuda_glue.TYPES[dtype]}, {size}>"
    return cuda_glue.Kernel(_SOURCE, name, "PPPii", _THREADS, early=True)


@functools.lru_cache(maxsize=_KEPT)
def maps(
    addresses: _Sizes, q: _Sizes, q_strides: _Sizes, k: _Sizes, k_strides: _Sizes, dtype: torch.dtype, paged: bool,
    fetched: int, part: int,
) -> list[Any]:  # fmt: skip
    """Return the TMA maps of q, k_cache and v_cache. One lookup for all three takes less than one for each.

    Keys of a page that is not in the cache are NaN, so that every row that sees one of them is; its values are zeros.
    """
    rows, cache = _views(q, q_strides, k, k_strides)
    group, most = rows[0][1], part & -part
    height = min(k[1], most) if paged else most  # boxes must not pass the end of a page
    views = (rows, (group, 1, fetched // group), None), (cache, (height,), dtype), (cache, (height,), None)
    return [tensor_maps.heads_at(at, 2, *view, *box, nan=nan) for at, (view, box, nan) in zip(addresses, views)]


def _without_pages(p: Problem) -> Problem:
    """The problem with a cache of one page that no table names: TMA has no map of nothing."""
    page = p.q.new_empty(1, max(p.page, 1), p.kv_heads, p.size)
    table = p.table if p.table is None else torch.full_like(p.table, -1)
    return p._replace(k=page, v=page, table=table)


def run(p: Problem, config: Config, parts: Any = None, stats: Any = None) -> None:
    if p.pages == 0 or p.page == 0:
        p = _without_pages(p)
    q, k, out, table, fetched = p.q, p.k, p.out.data_ptr(), p.table, p.fetched(config)
    addresses, part = (q.data_ptr(), k.data_ptr(), p.v.data_ptr()), config.block_n // config.share
    made = maps(addresses, q.shape, q.stride(), k.shape, k.stride(), q.dtype, table is not None, fetched, part)
    splits, kept = (1, (0, 0)) if parts is None else (parts.shape[0], (parts.data_ptr(), stats.data_ptr()))
    kernel, blocks = _kernel(q.dtype, p.size, config), max(p.blocks(config) * splits, config.share)
    if config.persistent:
        blocks = min(blocks, kernel.resident() // config.share * config.share)
    starts = 0 if p.starts is None else p.starts.data_ptr()
    pages, row, page = (0, 0, _WHOLE) if table is None else (table.data_ptr(), table.stride(0), p.page)
    shapes = p.sequences, p.tokens, p.kv_heads, p.group, p.tiles(config)
    cuts = splits, config.splits if splits > 1 else 1, config.least
    left = min(p.window, _FAR) - 1 if p.window else _FAR
    pointers, sizes = (pages, starts, p.lengths.data_ptr(), out, *kept), (fetched, page, p.most, p.bound, left)
    values = *pointers, row, *shapes, *cuts, *sizes, float(p.scale)
    kernel.launch(blocks, *made, cuda_glue.params(_SOURCE, "paged_attention", *values))
    if parts is not None:
        rows = p.tokens * p.heads
        combination(q.dtype, p.size).launch(ceil_div(rows, _THREADS // 32), *kept, out, rows, splits)


def compile(p: Problem, config: Config, arch: str) -> Artifact:
    if p.splits(config) > 1:
        combination(p.q.dtype, p.size).compile(arch)
    return _kernel(p.q.dtype, p.size, config).compile(arch)
