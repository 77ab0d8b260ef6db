"""Queries against a KV cache in Triton: a program takes rows of one kv head and a part of the keys.

Rows are the query tokens of a sequence times the heads that share keys. parts/triton_paged.py cuts and combines.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilery import device
from tilery.backends import triton_glue
from tilery.backends.triton_glue import hand_over, take_over
from tilery.device import ARCHS
from tilery.parts import kv_cache, triton_paged
from tilery.parts.fp8 import ceil_div, power
from tilery.parts.paged_attention import most_splits
from tilery.parts.triton_attention import base_2, bent, finish, key_range, seen
from tilery.parts.triton_fp8 import as_bytes, native
from tilery.parts.triton_paged import cut, keep, offsets, page_of, sequence, stored, with_sink
from tilery.spec import Artifact, TensorSpec, Work

archs = ARCHS
_LEAST = 128
_MOST_SEQUENCES = 65535  # along a grid's third axis


@dataclass(frozen=True)
class Config:
    block_m: int  # rows: query tokens times the heads that share keys
    block_n: int  # keys
    splits: int  # programs that share the keys of a row, at most
    num_warps: int
    num_stages: int

    @property
    def least(self) -> int:
        """Keys of a split: with fewer, what it keeps of them costs more than what is gained."""
        return max(self.block_n, _LEAST)

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


class Problem(NamedTuple):
    """Of an op's arguments, tensors or specs. starts None: q [B, Q, H, D]; else packed q [T, H, D]."""

    q: Any
    k_cache: Any
    v_cache: Any
    starts: Any
    lengths: Any
    table: Any
    k_scale: Any
    v_scale: Any
    sinks: Any
    queries: int  # of a sequence, at most
    window: int
    softcap: float
    scale: float | None = None

    @property
    def heads(self) -> int:
        return self.q.shape[-2]

    @property
    def size(self) -> int:
        return int(self.q.shape[-1])

    @property
    def tokens(self) -> int:
        return int(self.q.shape[0]) * (1 if self.starts is not None else self.queries)

    @property
    def kv_heads(self) -> int:
        return int(self.k_cache.shape[2])

    @property
    def rows(self) -> int:
        """Of a sequence and a kv head, at most."""
        return self.queries * (self.heads // self.kv_heads)

    @property
    def bound(self) -> int:
        """Keys of a sequence, at most."""
        return int(self.k_cache.shape[1]) * (1 if self.table is None else int(self.table.shape[1]))

    @property
    def span(self) -> int:
        """Keys that the queries of a sequence see, at most."""
        return min(self.bound, self.queries + self.window - 1) if self.window else self.bound


def width(size: int) -> int:
    return max(power(size), 16)


def shared(p: Problem, config: Config) -> int:
    """Bytes that q and the tiles in flight take; without wgmma a tile is in registers when the next takes its place."""
    held = max(config.num_stages - (0 if config.block_m >= 64 else 1), 1)
    tiles = held * 2 * config.block_n * int(p.k_cache.dtype.itemsize)
    return width(p.size) * (tiles + config.block_m * int(p.q.dtype.itemsize))


def refusal(p: Problem, config: Config | None) -> str | None:
    if (sequences := int(p.lengths.shape[0])) > _MOST_SEQUENCES:
        return f"takes up to {_MOST_SEQUENCES} sequences, got {sequences}"
    if config is None:
        return None
    sizes = config.block_m, config.block_n, config.splits
    if any(size < least or size & (size - 1) for size, least in zip(sizes, (16, 16, 1))):
        return f"blocks must be powers of two from 16 on and splits one from 1 on, got {config}"
    most = device.shared_limit(device.arch(p.q.device))
    if (need := shared(p, config)) > most:
        return f"{config} needs {need} bytes of shared memory, a block has {most}"
    return None


def fitting(p: Problem, block_m: int, block_n: int, splits: int, num_warps: int, num_stages: int) -> Config:
    """With fewer stages or keys where shared memory is short; with less than three a load is waited for at once."""
    scratch = 3 * 1024 if block_m >= 64 else 8 * 1024
    most = device.shared_limit(device.arch(p.q.device)) - scratch
    while shared(p, config := Config(block_m, block_n, splits, num_warps, num_stages)) > most and block_n > 16:
        if num_stages > 3 or (num_stages == 3 and block_n <= 32):
            num_stages -= 1
        else:
            block_n //= 2
    return config


# The kernel


@triton.jit
def _fetched(
    cache_ptr, inside, d, key, end, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values [BLOCK_N, BLOCK_D]; nothing from token `end` on is read."""
    places = cache_ptr + (inside[:, None] + d[None, :])
    if MASKED and D < BLOCK_D:
        values = tl.load(places, mask=(key < end)[:, None] & (d < D)[None, :], other=0)
    elif MASKED:
        values = tl.load(places, mask=(key < end)[:, None], other=0)
    elif D < BLOCK_D:
        values = tl.load(places, mask=(d < D)[None, :], other=0)
    else:
        values = tl.load(places)
    return stored(values, FORMAT, NATIVE, DTYPE)


@triton.jit
def _step(
    q, acc, top, total, k_ptr, v_ptr, page, start, end, place, scale, softcap, window, block_stride, token_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr,
    MASKED: tl.constexpr, LATE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The keys from `start` on. LATE: total is a sum per place in the block [M, N], added up when all is done."""
    key, d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    base, inside = offsets(page, start, block_stride, token_stride, PAGE, BLOCK_N, FAR)
    k = _fetched(k_ptr + base, inside, d, key, end, D, BLOCK_D, MASKED, FORMAT, NATIVE, q.dtype)
    v = _fetched(v_ptr + base, inside, d, key, end, D, BLOCK_D, MASKED, FORMAT, NATIVE, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        scores = bent(scores, scale, softcap, True)
        factor = 1.0
    else:
        factor = base_2(scale)
    if MASKED:
        scores = tl.where(seen(place, key, end, window, True, WINDOW), scores, -float("inf"))
    best = tl.maximum(top, tl.max(scores, 1) * factor)
    safe = tl.where(best == -float("inf"), 0.0, best)  # a row that sees nothing yet
    weights = tl.exp2(scores * factor - safe[:, None])
    shrink = tl.exp2(top - safe)
    if LATE:
        total = total * shrink[:, None] + weights
    else:
        total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, best, total


@triton_glue.early
@triton.jit(do_not_specialize=("queries", "tokens", "splits", "bound", "window"))
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, starts_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    out_ptr, parts_ptr, stats_ptr,
    queries, tokens, splits, bound, window, scale, softcap,
    q_batch, q_token, q_head, block_stride, token_stride, head_stride, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    PLAIN: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    # Programs run together that read the keys of all heads, which lie side by side, for all tiles.
    kv_head, tile = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    split, b = tl.program_id(1), tl.program_id(2)
    wide = tl.full((), 1, tl.int64)  # offsets pass 2**31
    take_over()
    hand_over()
    length, count, first_token = sequence(lengths_ptr, starts_ptr, b, queries, bound)
    first_row = tile * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    t, head = row // GROUP, kv_head * GROUP + row % GROUP
    valid, d = t < count, tl.arange(0, BLOCK_D)
    q_ptr += wide * b * q_batch
    if starts_ptr is not None:
        q_ptr += wide * first_token * q_token
    q_places = q_ptr + ((wide * t * q_token + wide * head * q_head)[:, None] + d[None, :])
    # All that does not hang on the length is asked for before it is looked at: the answers come together.
    q = tl.load(q_places, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    if FORMAT is not None:
        scale *= tl.load(k_scale_ptr + kv_head) if K_PER_HEAD else tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr + kv_head) if V_PER_HEAD else tl.load(v_scale_ptr)
    q, scale = tl.where(scale < 0, -q, q), tl.abs(scale)  # so that what is masked, -inf, stays so
    first, size = cut(length, count, window, SPLITS, BLOCK_N, LEAST, WINDOW)
    low = first + split * size
    # One way out for both: the compiler would put the first before the length is asked for.
    if (first_row >= count * GROUP) | ((SPLITS > 1) & (low >= length)):
        return

    place = length - count + t
    # Blocks from inner to outer are seen by every row of the tile.
    last_t = tl.minimum((first_row + BLOCK_M - 1) // GROUP, count - 1)
    start, inner, outer, end = key_range(
        length - count + first_row // GROUP, length - count + last_t, length, window, BLOCK_N, True, WINDOW
    )
    high = low + size
    start, end = tl.maximum(start, low), tl.minimum(end, high)
    k_ptr += wide * kv_head * head_stride
    v_ptr += wide * kv_head * head_stride
    if table_ptr is not None:
        table_ptr += wide * b * table_row
    LATE: tl.constexpr = BLOCK_M < 64  # warps share a row: a sum across them in each step would make them wait
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if LATE:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        total = tl.zeros((BLOCK_M,), tl.float32)
    if PLAIN:
        inner, outer = tl.maximum(inner, start), tl.minimum(outer, high)
        page = page_of(table_ptr, b, inner, outer, PAGE, BLOCK_N)
        for at in range(inner, outer, BLOCK_N):
            ahead = page_of(table_ptr, b, at + BLOCK_N, outer, PAGE, BLOCK_N)
            acc, top, total = _step(
                q, acc, top, total, k_ptr, v_ptr, page, at, end, place, scale, softcap, window,
                block_stride, token_stride, D, BLOCK_D, BLOCK_N, PAGE, FAR,
                False, LATE, WINDOW, SOFTCAP, FORMAT, NATIVE,
            )  # fmt: skip
            page = ahead
    else:
        inner, outer = start, start
    # Blocks that need a mask are before inner and from outer on.
    gap = tl.maximum(outer - inner, 0)
    place_of = tl.where(inner > start, start, start + gap)
    page = page_of(table_ptr, b, place_of, end, PAGE, BLOCK_N)
    for at in range(start, end - gap, BLOCK_N):
        now = at if not PLAIN else tl.where(at < inner, at, at + gap)
        then = at + BLOCK_N if not PLAIN else tl.where(at + BLOCK_N < inner, at + BLOCK_N, at + BLOCK_N + gap)
        ahead = page_of(table_ptr, b, then, end, PAGE, BLOCK_N)
        acc, top, total = _step(
            q, acc, top, total, k_ptr, v_ptr, page, now, end, place, scale, softcap, window,
            block_stride, token_stride, D, BLOCK_D, BLOCK_N, PAGE, FAR, True, LATE, WINDOW, SOFTCAP, FORMAT, NATIVE,
        )  # fmt: skip
        page = ahead

    if LATE:
        total = tl.sum(total, 1)
    if FORMAT is not None:
        acc *= v_scale
    rows = wide * (first_token + t) * (KV_HEADS * GROUP) + head
    if SPLITS > 1:
        all_rows = wide * tokens * (KV_HEADS * GROUP)
        keep(parts_ptr, stats_ptr, acc, top, total, rows, split, valid, all_rows, splits, D, BLOCK_D)
    else:
        if sinks_ptr is not None:
            top, total, shrink = with_sink(top, total, tl.load(sinks_ptr + head, mask=valid, other=0.0))
            acc *= shrink[:, None]
        factor, _ = finish(top, total)
        tl.store(
            out_ptr + (rows[:, None] * D + d[None, :]), acc * factor[:, None], mask=valid[:, None] & (d < D)[None, :]
        )


# The launches


def workspace(p: Problem, config: Config) -> tuple[TensorSpec, ...]:
    keys = p.span + (config.block_n if p.window else 0)  # a window begins anywhere in a block
    splits = most_splits(config.splits, keys, config.least)
    return triton_paged.workspace(splits, p.tokens, p.heads, p.size, p.q.device)


def estimate(p: Problem, config: Config) -> Work:
    """Few programs that share a row's keys are the same as many: what counts is what one of them reads."""
    splits = most_splits(config.splits, p.span, config.least)
    tiles, keys = ceil_div(p.rows, config.block_m), ceil_div(p.span, splits)
    nbytes = 2 * keys * p.size * int(p.k_cache.dtype.itemsize) + min(p.rows, config.block_m) * p.size * 4
    programs = int(p.lengths.shape[0]) * p.kv_heads * tiles * splits
    return Work(programs, 4 * config.block_m * keys * width(p.size), nbytes)


def _strides(p: Problem) -> tuple[int, ...]:
    """Of q by sequence, token and head; of the caches by block, token and head; of the table by row."""
    q = (p.q.stride(0), p.q.stride(1), p.q.stride(2)) if p.starts is None else (0, p.q.stride(0), p.q.stride(1))
    cache = tuple(p.k_cache.stride(d) for d in range(3))
    return *q, *cache, p.table.stride(0) if p.table is not None else 0


def _launches(outs, p: Problem, config: Config, parts: Any = None, stats: Any = None) -> list[tuple[Any, ...]]:
    """Kernel, grid, arguments, constants and options, in turn; of tensors for `run` and of specs for `compile`."""
    format, sequences = kv_cache.FORMATS.get(p.k_cache.dtype), int(p.lengths.shape[0])
    splits = parts.shape[0] if parts is not None else 1
    tiles, strides = ceil_div(p.rows, config.block_m), _strides(p)
    caches = (as_bytes(p.k_cache), as_bytes(p.v_cache)) if format else (p.k_cache, p.v_cache)
    scale = p.size**-0.5 if p.scale is None else float(p.scale)
    arguments = (
        p.q, *caches, p.table, p.lengths, p.starts, p.k_scale, p.v_scale, p.sinks, outs[0], parts, stats,
        p.queries, p.tokens, splits, p.bound, p.window, scale, float(p.softcap), *strides,
    )  # fmt: skip
    per_head = [scale is not None and scale.shape[0] > 1 for scale in (p.k_scale, p.v_scale)]
    constants = {
        "KV_HEADS": p.kv_heads, "GROUP": p.heads // p.kv_heads, "D": p.size,
        "PAGE": 0 if p.table is None else int(p.k_cache.shape[1]),
        "K_PER_HEAD": per_head[0], "V_PER_HEAD": per_head[1],
        "FORMAT": format, "NATIVE": format is not None and native(p.q.device),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_D": width(p.size),
        "SPLITS": config.splits if splits > 1 else 1, "LEAST": config.least,
        "PLAIN": config.block_m >= 64, "WINDOW": p.window > 0, "SOFTCAP": p.softcap > 0,
        "FAR": p.k_cache.stride(1) * config.block_n >= 2**30,
    }  # fmt: skip
    options = config.options()
    grid = tiles * p.kv_heads, splits, sequences
    made: list[tuple[Any, ...]] = [(_attend, grid, arguments, constants, options)]
    if parts is not None:
        how = p.queries, p.bound, p.window, config.splits, config.block_n, config.least
        made.append(triton_paged.combination(parts, stats, p.lengths, p.starts, p.sinks, outs[0], None, *how))
    return made


def compile(p: Problem, outs: tuple[TensorSpec, ...], config: Config, arch: str) -> Artifact:
    made = _launches(outs, p, config, *workspace(p, config))
    return triton_glue.greediest(
        [triton_glue.compile(k, given, how, options, arch) for k, _, given, how, options in made]
    )


def run(p: Problem, outs: tuple[torch.Tensor, ...], config: Config, *kept: torch.Tensor) -> None:
    for kernel, grid, given, how, options in _launches(outs, p, config, *kept):
        triton_glue.launch(kernel, grid, given, how, options)
