"""The online softmax in Triton, masks of scores, and split KV: keys of a sequence are split among programs.

Scores times the scale times log2(e) are base-2 logits, so that exp2 serves. The online softmax of a row is
(row_max, row_sum): the largest logit so far, and the sum of 2 ** (logit - row_max). `finish_softmax` gives the lse as a
natural logarithm again.

How a sequence is split depends on its own length and the config alone, never on the batch: it gives the same bits in
any. A split's result for a row is its online softmax and the sum of P · values, all fp32: partial_out [splits, T, H, E]
and partial_stats [2, splits, T, H], T counting the query tokens of all sequences.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tilery.base.integers import ceil_div, next_power_of_2
from tilery.base.launch import Launch
from tilery.base.spec import TensorSpec
from tilery.languages.triton_glue import pdl_launch_dependents, pdl_wait
from tilery.ops.attention.call import FEW_SPLITS, PagedCall

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_FEW_SPLITS = tl.constexpr(FEW_SPLITS)
_COMBINED = 1024  # values that a program of `_combine` holds: with 8 a thread, all are asked for at once


# Scores


@triton.jit
def logits(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Base-2 logits of scores: softcap · tanh(scale · scores / softcap), or scale · scores without SOFTCAP."""
    if SOFTCAP:
        small = tl.exp2(tl.abs(scores * scale) * (-2.0 * LOG2E) / softcap)
        tanh = (1.0 - small) / (1.0 + small)
        scores = tl.where(scores * scale < 0, -tanh, tanh) * (softcap * LOG2E)
    else:
        scores = scores * (scale * LOG2E)
    return scores


@triton.jit
def visible(position, key, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which of the keys [N] the queries at positions [M] see, as [M, N]; there are `keys` of them."""
    mask = key[None, :] < keys
    if CAUSAL:
        mask = mask & (key[None, :] <= position[:, None])
    if WINDOW:
        mask = mask & (position[:, None] - key[None, :] < window)
        if not CAUSAL:
            mask = mask & (key[None, :] - position[:, None] < window)
    return mask


@triton.jit
def key_range(first, last, keys, window, BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """For queries at positions first to last: blocks of keys from start to end hold all that any of them sees.

    Those from inner to outer are seen by all of them and need no mask. start, inner, outer are multiples of BLOCK.
    """
    start, inner, end, outer = 0, 0, keys, keys
    if CAUSAL:
        end, outer = tl.minimum(keys, last + 1), tl.minimum(keys, first + 1)
    elif WINDOW:
        end, outer = tl.minimum(keys, last + window), tl.minimum(keys, first + window)
    if WINDOW:
        start, inner = tl.maximum(first - window + 1, 0), tl.maximum(last - window + 1, 0)
        start, inner = start // BLOCK * BLOCK, tl.cdiv(inner, BLOCK) * BLOCK
    end, outer = tl.maximum(end, 0), tl.maximum(outer, 0)
    if WINDOW:
        end = tl.maximum(end, start)
        inner = tl.minimum(inner, tl.cdiv(end, BLOCK) * BLOCK)
    return start, inner, tl.maximum(outer // BLOCK * BLOCK, inner), end


# The online softmax


@triton.jit
def begin_softmax(sinks_ptr, head, ROWS: tl.constexpr):
    """(row_max, row_sum) of rows that have seen nothing but the head's sink, if sinks are given."""
    sink, exponential = -float("inf"), 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        exponential = tl.where(sink == -float("inf"), 0.0, 1.0)
    return tl.zeros((ROWS,), tl.float32) + sink, tl.zeros((ROWS,), tl.float32) + exponential


@triton.jit
def online_softmax(row_max, row_sum, scores, scale):
    """Add a block of scores, with logits scores · scale where scale > 0; masked ones are -inf.

    Gives row_max, row_sum, the block's probabilities P [M, N] but for 1 / row_sum, and the rescale factor [M] of what
    was summed before.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    finite = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row that sees nothing yet
    p = tl.exp2(scores * scale - finite[:, None])
    rescale = tl.exp2(row_max - finite)
    return new_max, row_sum * rescale + tl.sum(p, 1), p, rescale


@triton.jit
def finish_softmax(row_max, row_sum):
    """1 / row_sum, 0 for rows that saw nothing, and their lse."""
    inverse = tl.where(row_sum == 0, 0.0, 1.0 / tl.where(row_sum == 0, 1.0, row_sum))
    return inverse, (row_max + tl.log2(row_sum)) * LN2


@triton.jit
def add_sink(row_max, row_sum, sink):
    """An online softmax that has also seen a score without a value; and the rescale factor of what it had summed."""
    sink = sink.to(tl.float32) * LOG2E
    new_max = tl.maximum(row_max, sink)
    finite = tl.where(new_max == -float("inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - finite)
    return new_max, row_sum * rescale + tl.exp2(sink - finite), rescale


# Sequences and their splits


@triton.jit
def clamped_span(first, last, sequence, tokens, longest):
    """Start and end of a packed sequence, inside of the tokens whatever its integers say, and whether it is valid.

    It is not if it has more than `longest` tokens: see indices.py.
    """
    start = tl.where(sequence > 0, tl.minimum(tl.maximum(first, 0), tokens), 0)
    end = tl.minimum(tl.maximum(last, start), tokens)
    return start, end, (start == first) & (end == last) & (end - start <= longest)


@triton.jit
def sequence_of(lengths_ptr, cu_ptr, b, queries, max_keys, tokens):
    """Return sequence b's keys, query tokens, first query token and whether it is valid; if not, it has no keys.

    cu_ptr None: each has `queries`; else so many at most, among `tokens`.
    """
    length = tl.load(lengths_ptr + b, cache_modifier=".cg")
    valid = (length >= 0) & (length <= max_keys)
    start, count = b * queries, queries
    if cu_ptr is not None:
        first = tl.load(cu_ptr + b, cache_modifier=".cg")
        last = tl.load(cu_ptr + b + 1, cache_modifier=".cg")
        start, end, known = clamped_span(first, last, b, tokens, queries)
        count, valid = end - start, valid & known
    return tl.where(valid, length, 0), count, start, valid


@triton.jit
def split_keys(
    length, queries, window, SPLITS: tl.constexpr, BLOCK: tl.constexpr, MIN_KEYS: tl.constexpr, WINDOW: tl.constexpr
):
    """The first key of the first split, and how many keys a split has: multiples of BLOCK. See `call.max_splits`."""
    first = 0
    if WINDOW:
        first = tl.minimum(tl.maximum(length - queries - window + 1, 0), length) // BLOCK * BLOCK
    keys = tl.cdiv(length - first, BLOCK) * BLOCK
    fair, few = tl.cdiv(keys, SPLITS * BLOCK) * BLOCK, tl.cdiv(keys, _FEW_SPLITS * BLOCK) * BLOCK
    return first, tl.maximum(tl.maximum(fair, MIN_KEYS), tl.minimum(few, 2 * MIN_KEYS))


# Pages of a cache


@triton.jit
def page_of(table_ptr, b, start, end, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The page of the cache that holds the BLOCK tokens from `start` on; that of each where a page holds fewer.

    `start` is a multiple of BLOCK; table_ptr is the sequence's row, of which nothing past token end - 1 is read.
    PAGE 0: sequence b is in one piece, page b. Ask for the next block's before this one is worked on and carry it to
    the next turn of the loop: the compiler would take it for a stage of its own, and have half as many loads in flight.
    """
    page = b
    if PAGE > 0:
        key = start if PAGE >= BLOCK else start + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + key // PAGE, mask=key < end, other=0)
    return page


@triton.jit
def page_offsets(page, start, page_stride, token_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr):
    """Where the BLOCK tokens from `start` on lie: a base, and from there each; page is `page_of` them."""
    key, wide = tl.arange(0, BLOCK), tl.full((), 1, tl.int64)
    if PAGE > 0 and PAGE < BLOCK:
        base = wide * 0
        inside = page.to(tl.int64) * page_stride + key % PAGE * (wide * token_stride)
    else:
        first = start if PAGE == 0 else start % PAGE
        base = wide * page * page_stride + wide * first * token_stride
        inside = key.to(tl.int64) * token_stride if FAR else key * token_stride  # past 2**31 elements
    return base, inside


# Results of splits


def workspace(call: PagedCall, splits: int) -> dict[str, TensorSpec]:
    """partial_out and partial_stats; none for a single split, which writes the result itself."""
    if splits == 1:
        return {}
    shape, where = (splits, call.tokens, call.heads), call.q.device
    return {
        "partial_out": TensorSpec.contiguous((*shape, call.head_dim), torch.float32, where),
        "partial_stats": TensorSpec.contiguous((2, *shape), torch.float32, where),
    }


@triton.jit
def store_partial(
    partial_out_ptr, partial_stats_ptr, acc, row_max, row_sum, rows, split, valid, all_rows, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write a split's result for rows [M] among all_rows = T · H."""
    at = split.to(tl.int64) * all_rows + rows
    d = tl.arange(0, BLOCK_D)
    tl.store(partial_out_ptr + (at[:, None] * D + d[None, :]), acc, mask=valid[:, None] & (d < D)[None, :])
    tl.store(partial_stats_ptr + at, row_max, mask=valid)
    tl.store(partial_stats_ptr + splits.to(tl.int64) * all_rows + at, row_sum, mask=valid)


@triton.jit(do_not_specialize=("queries", "tokens", "sequences", "splits", "max_keys", "window"))
def _combine(
    partial_out_ptr, partial_stats_ptr, lengths_ptr, cu_ptr, sinks_ptr, out_ptr, lse_ptr,
    queries, tokens, sequences, splits, max_keys, window,
    HEADS: tl.constexpr, D: tl.constexpr, PIECE: tl.constexpr, SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, MIN_KEYS: tl.constexpr, WINDOW: tl.constexpr,
    LSE_BY_ROW: tl.constexpr,
):  # fmt: skip
    """A program takes PIECE values of one row. LSE_BY_ROW: lse is [T, H]; else [B, H, queries], of as many of each."""
    PIECES: tl.constexpr = (D + PIECE - 1) // PIECE
    piece, row = tl.program_id(0) % PIECES, tl.program_id(0) // PIECES
    token, head = row // HEADS, row % HEADS
    if cu_ptr is None:
        b = token // queries
    else:
        edge = tl.arange(0, BLOCK_SEQUENCES)
        firsts = tl.load(cu_ptr + edge, mask=edge < sequences, other=0, cache_modifier=".cg")
        lasts = tl.load(cu_ptr + 1 + edge, mask=edge < sequences, other=0, cache_modifier=".cg")
        starts, ends, _valid = clamped_span(firsts, lasts, edge, tokens, queries)
        inside = (edge < sequences) & (starts <= token) & (token < ends)
        b = tl.min(tl.where(inside, edge, sequences), 0)
    # Read before the wait: what the splits' launch has waited for is in memory. Not through L1: it may hold what was.
    live, valid = 0, tl.full((), 1, tl.int1)
    if b < sequences:  # a token may belong to none
        length, count, _start, valid = sequence_of(lengths_ptr, cu_ptr, b, queries, max_keys, tokens)
        first, size = split_keys(length, count, window, SPLITS, BLOCK, MIN_KEYS, WINDOW)
        live = tl.cdiv(length - first, size)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, cache_modifier=".cg")
    pdl_wait()
    pdl_launch_dependents()

    s, d = tl.arange(0, BLOCK_SPLITS), piece * PIECE + tl.arange(0, PIECE)
    all_rows = tokens.to(tl.int64) * HEADS
    at = s * all_rows + row
    maxima = tl.load(partial_stats_ptr + at, mask=s < live, other=-float("inf"))
    sums = tl.load(partial_stats_ptr + splits * all_rows + at, mask=s < live, other=0.0)
    inside = (s < live)[:, None] & (d < D)[None, :]
    partial_out = tl.load(partial_out_ptr + (at[:, None] * D + d[None, :]), mask=inside, other=0.0)
    row_max = tl.max(maxima, 0)
    rescale = tl.exp2(maxima - tl.where(row_max == -float("inf"), 0.0, row_max))
    row_sum, acc = tl.sum(sums * rescale, 0), tl.sum(partial_out * rescale[:, None], 0)
    if sinks_ptr is not None:
        row_max, row_sum, rescale_all = add_sink(row_max, row_sum, sink)
        acc *= rescale_all
    inverse, lse = finish_softmax(row_max, tl.where(valid, row_sum, float("nan")))
    tl.store(out_ptr + row.to(tl.int64) * D + d, acc * inverse, mask=d < D)
    if lse_ptr is not None and LSE_BY_ROW:
        tl.store(lse_ptr + row, lse, mask=piece == 0)
    elif lse_ptr is not None:
        tl.store(lse_ptr + (b * HEADS + head).to(tl.int64) * queries + token % queries, lse, mask=piece == 0)


def combine(
    call: PagedCall, splits: int, block: int, min_keys: int, sinks: Any = None, lse: Any = None,
    lse_by_row: bool = False,
) -> Launch:  # fmt: skip
    """The launch that makes out [.., H, E] of the splits' results; splits, block and min_keys are `split_keys`' own."""
    block_splits, size, window = next_power_of_2(splits), call.head_dim, call.effective_window
    piece = min(next_power_of_2(size), max(_COMBINED // block_splits, 16))
    args = {
        "partial_out_ptr": call.partial_out, "partial_stats_ptr": call.partial_stats, "lengths_ptr": call.lengths,
        "cu_ptr": call.cu_seqlens_q, "sinks_ptr": sinks, "out_ptr": call.out, "lse_ptr": lse,
        "queries": call.queries, "tokens": call.tokens, "sequences": call.batch, "splits": call.partial_out.shape[0],
        "max_keys": call.max_keys, "window": window,
    }  # fmt: skip
    constants = {
        "HEADS": call.heads, "D": size, "PIECE": piece, "SPLITS": splits, "BLOCK_SPLITS": block_splits,
        "BLOCK_SEQUENCES": 1 if call.cu_seqlens_q is None else next_power_of_2(call.batch),
        "BLOCK": block, "MIN_KEYS": min_keys, "WINDOW": window > 0, "LSE_BY_ROW": lse_by_row,
    }  # fmt: skip
    options = {"num_warps": max(block_splits * piece // 256, 1)}
    return Launch(_combine, call.tokens * call.heads * ceil_div(size, piece), args, constants, options, pdl=True)
