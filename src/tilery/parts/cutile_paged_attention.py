"""Queries against a KV cache in cuTile: a block takes rows of one kv head and a part of the keys; then it is combined.

Rows are query tokens of a sequence times heads that share keys. How a sequence is cut depends on its own length and the
config alone, never on the batch: it gives the same bits in any. What a split found of a row is its running softmax and
the sum of its weighted values, all fp32: parts [splits, rows, E] and stats [2, splits, rows], with all rows B · Q · H.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.tile as ct
import torch

from tilery.base.spec import Artifact, TensorSpec, Work
from tilery.languages import cutile_glue
from tilery.languages.cutile_glue import LegacyLaunch as Launch
from tilery.parts import no_keys
from tilery.parts.cutile_attention import (
    LOG2E,
    begin,
    config_refusal,
    finish,
    online,
    reach_refusal,
    size_refusal,
    strided,
)
from tilery.parts.fp8 import ceil_div, power

archs = ("sm_90", "sm_100")  # on others its tiles spill

_ZERO = ct.PaddingMode.ZERO
_NAN = float("nan")
_COMBINED = 4096  # values that a block of `_combine` holds
_TAIL = 16  # keys of MLA that are masked at a time: to be values they are in registers then
_LEAST_ROWS = 16  # of a product by tensor cores
_FAR = 2**30  # keys: they are numbered in int32, as are those of the tiles behind the last


@dataclass(frozen=True)
class Config:
    rows: int  # of a block: query tokens times heads that share keys
    keys: int
    splits: int  # blocks that share the keys of a row, at most
    num_worker_warps: int = 4


class Problem(NamedTuple):
    """Tensors for a run, specs for a plan. Keys of MLA are also the values: then v is None, and keys have a rope."""

    q: Any  # [B, Q, H, D]
    q_rope: Any  # [B, Q, H, R] or None
    k: Any  # [blocks, block_size, kv_heads, D], or [B, S, kv_heads, D] without a table
    k_rope: Any
    v: Any
    lengths: Any
    table: Any
    out: Any
    lse: Any  # [B, H, Q] or None
    scale: float

    @property
    def group(self) -> int:
        return int(self.q.shape[2]) // int(self.k.shape[2])

    @property
    def bound(self) -> int:
        """Keys of a sequence, at most."""
        return int(self.k.shape[1]) * (1 if self.table is None else int(self.table.shape[1]))

    @property
    def rows(self) -> int:
        """Of all sequences."""
        batch, queries, heads, _ = self.q.shape
        return int(batch * queries * heads)


# The kernels


def _cut(lengths, k, table, b, PAGE, SPLITS, CHUNK):
    """The keys of sequence b, and how many of them a split has; then 0, or NaN where the length is none that may be."""
    bound = k.shape[1] if PAGE == 0 else table.shape[1] * PAGE
    given = ct.load(lengths, (b,), (1,)).item()
    length = min(max(given, 0), bound)
    return length, max(ct.cdiv(ct.cdiv(length, SPLITS), CHUNK), 1) * CHUNK, ct.where(given == length, 0.0, _NAN)


def _pages(table, k, b, j, length, PAGE, N):
    """Blocks of the cache that hold the N keys of tile j; nothing of the table past the sequence's end is read.

    A block that the cache does not have becomes one that it has. The tile's first key of such a block is given too, or
    the length where there is none: no row stands there, so rows that stand before it see no such key.
    """
    pages, end = b, length
    if PAGE >= N:
        page = ct.gather(table, (b, j * N // PAGE))
        pages = max(min(page, k.shape[0] - 1), 0)
        end = ct.where(page == pages, length, j * N)
    elif PAGE > 0:
        each = j * (N // PAGE) + ct.arange(N // PAGE, dtype=ct.int32)
        page = ct.gather(table, (b, each), mask=each * PAGE < length)
        pages = ct.maximum(ct.minimum(page, k.shape[0] - 1), 0)
        end = ct.min(ct.where(page == pages, length, each * PAGE)).item()
    return pages, end


def _fetched(x, pages, j, kv_head, PAGE, N, D):
    """Tile j of a sequence's keys or values, [N, D]."""
    if PAGE == 0:
        tile = ct.load(x, (pages, j, kv_head, 0), (1, N, 1, D), padding_mode=_ZERO)
    elif PAGE >= N:
        tile = ct.load(x, (pages, j % (PAGE // N), kv_head, 0), (1, N, 1, D), padding_mode=_ZERO)
    else:
        where = pages, ct.Slice(0, PAGE), ct.Slice(kv_head, 1), ct.Slice(0, D)
        tile = ct.load_advanced_indexing(x, where, padding_mode=_ZERO)
    return tile.reshape((N, D))


def _step(
    q, q_rope, k, k_rope, v, table, b, kv_head, j, length, place, scale, top, total, acc,
    D, ROPE, N, PAGE, SHARED, MASKED,
):  # fmt: skip
    """Tile j of the keys. Rows that see one of a block that the cache does not have become NaN."""
    pages, end = _pages(table, k, b, j, length, PAGE, N)
    keys = _fetched(k, pages, j, kv_head, PAGE, N, D)
    scores = ct.mma(q, keys.transpose(), ct.zeros((q.shape[0], N), ct.float32))
    if ROPE > 0:
        rope = _fetched(k_rope, pages, j, kv_head, PAGE, N, ROPE)
        scores = ct.mma(q_rope, rope.transpose(), scores)
    scores = scores * scale
    values = keys if SHARED else _fetched(v, pages, j, kv_head, PAGE, N, D)
    if MASKED:
        key = j * N + ct.arange(N, dtype=ct.int32)
        scores = ct.where(key.reshape((1, N)) <= place, scores, float("-inf"))
        there = ct.arange(N, dtype=ct.int32).reshape((N, 1)) < end - j * N
        values = ct.where(there, values, ct.zeros((N, D), values.dtype))  # what is not there may be NaN
    top, total, weights, shrink = online(top, total, scores, 1.0)
    if PAGE > 0:
        total = ct.where(place < end, total, _NAN)
    return top, total, ct.mma(weights.astype(values.dtype), values, acc * shrink)


@ct.kernel
def _attend(
    q, q_rope, k, k_rope, v, lengths, table, out, lse, parts, stats, scale,
    D: ct.Constant[int], ROPE: ct.Constant[int], TOKENS: ct.Constant[int], HEADS: ct.Constant[int],
    N: ct.Constant[int], TAIL: ct.Constant[int], PAGE: ct.Constant[int], SPLITS: ct.Constant[int],
    THERE: ct.Constant[int], SHARED: ct.Constant[bool], LSE: ct.Constant[bool],
):  # fmt: skip
    queries, kv_heads, group = q.shape[1], q.shape[2], q.shape[3]
    tokens, heads = ct.cdiv(queries, TOKENS), ct.cdiv(group, HEADS)
    # Blocks run together that read the keys of all heads, which lie side by side.
    tile, kv_head = divmod(ct.bid(0), kv_heads)
    split, tile = divmod(tile, tokens * heads)
    b, split = divmod(split, THERE)
    token, head = divmod(tile, heads)
    length, size, wrong = _cut(lengths, k, table, b, PAGE, SPLITS, N)
    low, high = split * size, min(split * size + size, length)
    if (low < length) | (THERE == 1):
        where = b, token, kv_head, head, 0
        q_tile = ct.load(q, where, (1, TOKENS, 1, HEADS, D), padding_mode=_ZERO).reshape((TOKENS * HEADS, D))
        rope_tile = q_tile
        if ROPE > 0:
            rope_tile = ct.load(q_rope, where, (1, TOKENS, 1, HEADS, ROPE), padding_mode=_ZERO)
            rope_tile = rope_tile.reshape((TOKENS * HEADS, ROPE))
        first = length - queries + token * TOKENS
        place = first + ct.arange(TOKENS * HEADS, dtype=ct.int32).reshape((TOKENS * HEADS, 1)) // HEADS
        scale = scale * LOG2E
        top, total = begin(TOKENS * HEADS)
        acc = ct.zeros((TOKENS * HEADS, D), ct.float32)
        start = low // N
        outer = max(min(high, first + 1) // N, start)  # tiles before it are seen by all rows
        for j in range(start, outer):
            top, total, acc = _step(
                q_tile, rope_tile, k, k_rope, v, table, b, kv_head, j, length, place, scale, top, total, acc,
                D, ROPE, N, PAGE, SHARED, False,
            )  # fmt: skip
        for j in range(outer * (N // TAIL), ct.cdiv(high, TAIL)):
            top, total, acc = _step(
                q_tile, rope_tile, k, k_rope, v, table, b, kv_head, j, length, place, scale, top, total, acc,
                D, ROPE, TAIL, PAGE, SHARED, True,
            )  # fmt: skip
        row = (1, TOKENS, 1, HEADS)
        if THERE == 1:
            share, logsum = finish(top, total + wrong)
            ct.store(out, where, (acc * share).astype(out.dtype).reshape((1, TOKENS, 1, HEADS, D)))
            if LSE:
                ct.store(lse, (b, token, kv_head, head), logsum.reshape(row))
        else:
            batch = q.shape[0]
            at = split * batch + b
            ct.store(parts, (at, token, kv_head, head, 0), acc.reshape((1, TOKENS, 1, HEADS, D)))
            ct.store(stats, (at, token, kv_head, head), top.reshape(row))
            ct.store(stats, (THERE * batch + at, token, kv_head, head), total.reshape(row))


@ct.kernel
def _combine(
    parts, stats, lengths, k, table, out, lse,
    QUERIES: ct.Constant[int], HEADS: ct.Constant[int], N: ct.Constant[int], PAGE: ct.Constant[int],
    SPLITS: ct.Constant[int], MOST: ct.Constant[int], PIECE: ct.Constant[int], LSE: ct.Constant[bool],
):  # fmt: skip
    """A block takes PIECE values of one row of what all splits found."""
    row, piece = divmod(ct.bid(0), ct.num_tiles(out, 1, (1, PIECE)))
    b, rest = divmod(row, QUERIES * HEADS)
    token, head = divmod(rest, HEADS)
    length, size, wrong = _cut(lengths, k, table, b, PAGE, SPLITS, N)
    live = ct.arange(MOST, dtype=ct.int32).reshape((MOST, 1)) * size < length
    tops = ct.load(stats, (0, 0, row), (1, MOST, 1), padding_mode=_ZERO, allow_tma=False).reshape((MOST, 1))
    totals = ct.load(stats, (1, 0, row), (1, MOST, 1), padding_mode=_ZERO, allow_tma=False).reshape((MOST, 1))
    found = ct.load(parts, (0, row, piece), (MOST, 1, PIECE), padding_mode=_ZERO, allow_tma=False)
    tops = ct.where(live, tops, float("-inf"))
    top = ct.max(tops, axis=0, keepdims=True)
    factor = ct.exp2(tops - ct.where(top == float("-inf"), 0.0, top))
    total = ct.sum(ct.where(live, totals, 0.0) * factor, axis=0, keepdims=True)
    acc = ct.sum(ct.where(live, found.reshape((MOST, PIECE)), 0.0) * factor, axis=0, keepdims=True)
    share, logsum = finish(top, total + wrong)
    ct.store(out, (row, piece), (acc * share).astype(out.dtype), allow_tma=False)
    if LSE and piece == 0:
        ct.store(lse, (b, head, token), logsum.reshape((1, 1, 1)), allow_tma=False)


# How it is cut


def tile_of(p: Problem, config: Config) -> tuple[int, int]:
    """Query tokens and heads of a block; there may be fewer of them."""
    tokens = min(power(p.q.shape[1]), config.rows // min(power(p.group), config.rows))
    return tokens, config.rows // tokens


def splits_there(p: Problem, config: Config) -> int:
    """So many of the splits can have a key."""
    return max(min(config.splits, ceil_div(p.bound, config.keys)), 1)


def blocks(p: Problem, config: Config) -> int:
    tokens, heads = tile_of(p, config)
    batch, queries = p.q.shape[:2]
    tiles = ceil_div(queries, tokens) * ceil_div(p.group, heads)
    return int(batch * p.k.shape[2] * tiles * splits_there(p, config))


def _piece(p: Problem, config: Config) -> int:
    return min(int(p.q.shape[3]), max(_COMBINED // power(splits_there(p, config)), 16))


def refusal(p: Problem, config: Config, name: str) -> str | None:
    """`name` is what the size of a head is called."""
    arrays = {"q": p.q, "the cache": p.k} | ({} if p.q_rope is None else {"q_rope": p.q_rope})
    why = size_refusal(p.q.dtype, **{name: p.q.shape[3]}) or reach_refusal(**arrays)
    if why:
        return why
    if p.bound >= _FAR:
        return f"numbers keys up to {_FAR}, got {p.bound}"
    if config.rows < _LEAST_ROWS:
        return f"rows must be {_LEAST_ROWS} or more, as of a product by tensor cores, got {config.rows}"
    most = max(blocks(p, config), p.rows * (int(p.q.shape[3]) // _piece(p, config)))
    sizes = {"rows": config.rows, "keys": config.keys, "splits": config.splits}
    return config_refusal(most, config.num_worker_warps, **sizes)


def workspace(p: Problem, config: Config) -> tuple[TensorSpec, ...]:
    """Parts and stats; none for a single split, which writes what is right itself."""
    there = splits_there(p, config)
    if there == 1:
        return ()
    parts = TensorSpec.contiguous((there, p.rows, p.q.shape[3]), torch.float32, p.q.device)
    return parts, TensorSpec.contiguous((2, there, p.rows), torch.float32, p.q.device)


def estimate(p: Problem, config: Config) -> Work:
    there = splits_there(p, config)
    tokens, heads = tile_of(p, config)
    keys, size = ceil_div(p.bound, there), int(p.q.shape[3])
    rope = 0 if p.q_rope is None else int(p.q_rope.shape[3])
    read = keys * (size + rope if p.v is None else 2 * size) * int(p.k.dtype.itemsize)
    kept = tokens * heads * size * (8 if there > 1 else int(p.q.dtype.itemsize))
    return Work(blocks(p, config), 2 * tokens * heads * keys * (2 * size + rope), read + kept)


# The launches


def _grouped(x, kv_heads: int):
    """[B, Q, H, D] as [B, Q, kv_heads, heads that share keys, D]."""
    (batch, queries, heads, size), (a, b, c) = x.shape, (x.stride(0), x.stride(1), x.stride(2))
    group = heads // kv_heads
    return strided(x, (batch, queries, kv_heads, group, size), (a, b, c * group, c, 1))


def _launches(p: Problem, config: Config, parts=None, stats=None) -> list[Launch]:
    """In turn; of tensors for `run` and of specs for `compile`."""
    (batch, queries, heads, size), kv_heads, group = p.q.shape, int(p.k.shape[2]), p.group
    there, page = splits_there(p, config), 0 if p.table is None else int(p.k.shape[1])
    q, out = _grouped(p.q, kv_heads), _grouped(p.out, kv_heads)
    q_rope = q if p.q_rope is None else _grouped(p.q_rope, kv_heads)
    rope = 0 if p.q_rope is None else int(p.q_rope.shape[3])
    # What is not there is not read: any tensor will do.
    k_rope, v, table = (p.k if x is None else x for x in (p.k_rope, p.v, p.table))
    lse, kept, counted = out, out, out
    if p.lse is not None:
        lse = strided(p.lse, (batch, queries, kv_heads, group), (heads * queries, 1, group * queries, queries))
    if there > 1:
        shape = there * batch, queries, kv_heads, group
        steps = queries * heads, heads, group, 1
        kept = strided(parts, (*shape, size), (*(step * size for step in steps), 1))
        counted = strided(stats, (2 * shape[0], *shape[1:]), steps)
    kernel = cutile_glue.hinted(_attend, num_worker_warps=config.num_worker_warps)
    tail, given = _TAIL if p.v is None else config.keys, (p.v is None, p.lse is not None)
    inputs = q, q_rope, p.k, k_rope, v, p.lengths, table
    constants = size, rope, *tile_of(p, config), config.keys, tail, page, config.splits, there
    made = [Launch(kernel, blocks(p, config), (*inputs, out, lse, kept, counted, float(p.scale), *constants, *given))]
    if there > 1:
        flat = strided(p.out, (p.rows, size), (size, 1))
        most, piece = power(there), _piece(p, config)
        cuts = queries, heads, config.keys, page, config.splits, most, piece, p.lse is not None
        found = parts, stats, p.lengths, p.k, table, flat, flat if p.lse is None else p.lse
        made.append(Launch(_combine, p.rows * ceil_div(size, piece), (*found, *cuts)))
    return made


def compile(p: Problem, config: Config, arch: str) -> Artifact:
    made = [cutile_glue.legacy_compile(launch, arch) for launch in _launches(p, config, *workspace(p, config))]
    return max(made, key=lambda a: (a.spills or 0, a.registers or 0))


def run(p: Problem, config: Config, *kept) -> None:
    if p.bound == 0 or p.k.shape[0] == 0:  # TMA cannot describe an empty array
        no_keys.fill(p.out, p.lse, p.lengths, p.bound)
        return
    for launch in _launches(p, config, *kept):
        cutile_glue.legacy_run(launch)
