"""Few queries against many keys in Triton: keys are cut among programs (split KV), and what each found is combined.

How a sequence is cut depends on its own length and the config alone, never on the batch: it gives the same bits in any.
What a split found of a row is its running softmax (top, total) in base 2 and the sum of its weighted values, all fp32:
parts [splits, T, H, E] and stats [2, splits, T, H], T counting the query tokens of all sequences.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.spec import TensorSpec
from tilery.languages import triton_glue
from tilery.languages.triton_glue import hand_over, take_over
from tilery.parts import paged_attention
from tilery.parts.fp8 import ceil_div, power
from tilery.parts.triton_attention import LOG2E, finish, packed_span
from tilery.parts.triton_fp8 import widen

EIGHT = tl.constexpr(paged_attention.EIGHT)
_COMBINED = 1024  # values that a program of `_combine` holds: with 8 a thread, all are asked for at once


def workspace(splits: int, tokens: int, heads: int, size: int, where: torch.device) -> tuple[TensorSpec, ...]:
    """Parts and stats; none for a single split, which writes what is right itself."""
    if splits == 1:
        return ()
    parts = TensorSpec.contiguous((splits, tokens, heads, size), torch.float32, where)
    return parts, TensorSpec.contiguous((2, splits, tokens, heads), torch.float32, where)


@triton.jit
def sequence(lengths_ptr, starts_ptr, b, queries, bound, tokens):
    """Return sequence b's keys, query tokens, first query token and whether its indices are valid; if not, no keys.

    starts_ptr None: each has `queries`; else so many at most, among `tokens`.
    """
    length = tl.load(lengths_ptr + b, cache_modifier=".cg")
    sound = (length >= 0) & (length <= bound)
    start, count = b * queries, queries
    if starts_ptr is not None:
        first = tl.load(starts_ptr + b, cache_modifier=".cg")
        last = tl.load(starts_ptr + b + 1, cache_modifier=".cg")
        start, end, known = packed_span(first, last, b, tokens, queries)
        count, sound = end - start, sound & known
    return tl.where(sound, length, 0), count, start, sound


@triton.jit
def cut(length, queries, window, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that a split begins with, and how many a split has: multiples of BLOCK.

    LEAST or more, twice as many where there are EIGHT splits all the same: `paged_attention.most_splits`.
    """
    first = 0
    if WINDOW:
        first = tl.minimum(tl.maximum(length - queries - window + 1, 0), length) // BLOCK * BLOCK
    keys = tl.cdiv(length - first, BLOCK) * BLOCK
    fair, eighth = tl.cdiv(keys, SPLITS * BLOCK) * BLOCK, tl.cdiv(keys, EIGHT * BLOCK) * BLOCK
    return first, tl.maximum(tl.maximum(fair, LEAST), tl.minimum(eighth, 2 * LEAST))


@triton.jit
def page_of(table_ptr, b, start, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The block of the cache that holds the BLOCK tokens from `start` on; that of each where a block holds fewer.

    `start` is a multiple of BLOCK; table_ptr is the sequence's row, of which nothing past token end - 1 is read.
    PAGE 0: sequence b is in one piece, block b. Ask for the next block's before this one is worked on and carry it to
    the next turn of the loop: the compiler would take it for a stage of its own, and have half as many loads in flight.
    """
    page = b
    if PAGE > 0:
        key = start if PAGE >= BLOCK else start + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + key // PAGE, mask=key < end, other=0)
    return page


@triton.jit
def offsets(page, start, block_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr):
    """Where the BLOCK tokens from `start` on lie: a base, and from there each; page is `page_of` them."""
    key, wide = tl.arange(0, BLOCK), tl.full((), 1, tl.int64)
    if PAGE > 0 and PAGE < BLOCK:
        base = wide * 0
        inside = page.to(tl.int64) * block_stride + key % PAGE * (wide * token_stride)
    else:
        first = start if PAGE == 0 else start % PAGE
        base = wide * page * block_stride + wide * first * token_stride
        inside = key.to(tl.int64) * token_stride if FAR else key * token_stride  # past 2**31 elements
    return base, inside


@triton.jit
def spoilt(
    total, wrong, table_ptr, place, start, end, blocks, window,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The totals of rows at `place` that met keys from start to end: NaN for those that see a page that is not there.

    `wrong` is 0 if all pages are there, one number or BLOCK of them: so this costs nothing where they are.
    """
    if PAGE < BLOCK:
        wrong = tl.max(wrong, 0)
    if wrong != 0:
        for i in range(start // PAGE, tl.cdiv(end, PAGE)):
            page = tl.load(table_ptr + i)
            sees = (place >= tl.maximum(i * PAGE, start)) & ((page < 0) | (page >= blocks))
            if WINDOW:
                sees = sees & (tl.minimum(i * PAGE + PAGE, end) > place - window + 1)
            total = tl.where(sees, float("nan"), total)
    return total


@triton.jit
def stored(values, FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr):
    """What a cache holds as the product takes it; FORMAT None: the cache is of the model's own dtype."""
    if FORMAT is not None:
        values = widen(values, FORMAT, NATIVE).to(DTYPE)
    return values


@triton.jit
def keep(
    parts_ptr, stats_ptr, acc, top, total, rows, split, valid, all_rows, splits, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Writes what a split found of rows [M] among all_rows = T · H."""
    at = split.to(tl.int64) * all_rows + rows
    d = tl.arange(0, BLOCK_D)
    tl.store(parts_ptr + (at[:, None] * D + d[None, :]), acc, mask=valid[:, None] & (d < D)[None, :])
    tl.store(stats_ptr + at, top, mask=valid)
    tl.store(stats_ptr + splits.to(tl.int64) * all_rows + at, total, mask=valid)


@triton.jit
def with_sink(top, total, sink):
    """A running softmax that has also seen a score without a value; and the factor of what it had summed."""
    sink = sink.to(tl.float32) * LOG2E
    best = tl.maximum(top, sink)
    safe = tl.where(best == -float("inf"), 0.0, best)
    shrink = tl.exp2(top - safe)
    return best, total * shrink + tl.exp2(sink - safe), shrink


@triton_glue.early
@triton.jit(do_not_specialize=("queries", "tokens", "sequences", "splits", "bound", "window"))
def _combine(
    parts_ptr, stats_ptr, lengths_ptr, starts_ptr, sinks_ptr, out_ptr, lse_ptr,
    queries, tokens, sequences, splits, bound, window,
    HEADS: tl.constexpr, D: tl.constexpr, PIECE: tl.constexpr, SPLITS: tl.constexpr, MOST: tl.constexpr,
    SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A program takes PIECE values of one row; lse [B, H, queries] is given for equal numbers of queries alone."""
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    piece, row = tl.program_id(0) % PIECES, tl.program_id(0) // PIECES
    token, head = row // HEADS, row % HEADS
    if starts_ptr is None:
        b = token // queries
    else:
        edge = tl.arange(0, SEQUENCES)
        firsts = tl.load(starts_ptr + edge, mask=edge < sequences, other=0, cache_modifier=".cg")
        lasts = tl.load(starts_ptr + 1 + edge, mask=edge < sequences, other=0, cache_modifier=".cg")
        starts, ends, _known = packed_span(firsts, lasts, edge, tokens, queries)
        inside = (edge < sequences) & (starts <= token) & (token < ends)
        b = tl.min(tl.where(inside, edge, sequences), 0)
    # Read before the wait: what the splits' launch has waited for is in memory. Not through L1: it may hold what was.
    live, sound = 0, tl.full((), 1, tl.int1)
    if b < sequences:  # a token may belong to none
        length, count, _start, sound = sequence(lengths_ptr, starts_ptr, b, queries, bound, tokens)
        first, size = cut(length, count, window, SPLITS, BLOCK, LEAST, WINDOW)
        live = tl.cdiv(length - first, size)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, cache_modifier=".cg")
    take_over()
    hand_over()

    s, d = tl.arange(0, MOST), piece * PIECE + tl.arange(0, PIECE)
    all_rows = tokens.to(tl.int64) * HEADS
    at = s * all_rows + row
    tops = tl.load(stats_ptr + at, mask=s < live, other=-float("inf"))
    totals = tl.load(stats_ptr + splits * all_rows + at, mask=s < live, other=0.0)
    inside = (s < live)[:, None] & (d < D)[None, :]
    parts = tl.load(parts_ptr + (at[:, None] * D + d[None, :]), mask=inside, other=0.0)
    top = tl.max(tops, 0)
    share = tl.exp2(tops - tl.where(top == -float("inf"), 0.0, top))
    total, acc = tl.sum(totals * share, 0), tl.sum(parts * share[:, None], 0)
    if sinks_ptr is not None:
        top, total, shrink = with_sink(top, total, sink)
        acc *= shrink
    factor, lse = finish(top, tl.where(sound, total, float("nan")))
    tl.store(out_ptr + row.to(tl.int64) * D + d, acc * factor, mask=d < D)
    if lse_ptr is not None:
        tl.store(lse_ptr + (b * HEADS + head).to(tl.int64) * queries + token % queries, lse, mask=piece == 0)


def combination(
    parts, stats, lengths, starts, sinks, out, lse, queries: int, bound: int, window: int, splits: int, block: int,
    least: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Kernel, grid, arguments, constants and options that make out [.., H, E] of what splits kept.

    Of tensors for a launch and of specs for a compile. `splits`, `block` and `least` are those that `cut` took.
    """
    there, tokens, heads, size = parts.shape
    sequences, most = lengths.shape[0], power(splits)
    piece = min(power(size), max(_COMBINED // most, 16))
    constants = {
        "HEADS": heads, "D": size, "PIECE": piece, "SPLITS": splits, "MOST": most,
        "SEQUENCES": power(sequences) if starts is not None else 1,
        "BLOCK": block, "LEAST": least, "WINDOW": window > 0,
    }  # fmt: skip
    arguments = parts, stats, lengths, starts, sinks, out, lse, queries, tokens, sequences, there, bound, window
    options = {"num_warps": max(most * piece // 256, 1)}
    return _combine, (tokens * heads * ceil_div(size, piece),), arguments, constants, options
