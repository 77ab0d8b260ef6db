"""The Triton kernel of attention_decode and attention_chunked: rows of one key head against a split of the keys.

Rows are the query tokens of a sequence times the heads that share keys. A page that is not in the cache is not read,
and rows that see a key of it are NaN. That is found out once, after the mainloop, so that there is no more in it than a
comparison of the page.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.languages.triton_glue import pdl_launch_dependents, pdl_wait
from tilery.ops.attention.triton.softmax import (
    LOG2E,
    add_sink,
    finish_softmax,
    key_range,
    logits,
    page_of,
    page_offsets,
    sequence_of,
    split_keys,
    store_partial,
    visible,
)
from tilery.ops.quantize.triton_fp8 import widen


class Cache(NamedTuple):
    k_ptr: Any
    v_ptr: Any
    k_scale_ptr: Any
    v_scale_ptr: Any
    page: int  # strides
    token: int
    head: int


class Sequences(NamedTuple):
    lengths_ptr: Any
    cu_ptr: Any  # ends of packed queries, or None
    table_ptr: Any
    table_row: int  # stride


class Scoring(NamedTuple):
    scale: Any
    softcap: float
    sinks_ptr: Any


class Results(NamedTuple):
    """Where rows are written: out and, if it is asked for, their lse [T, H]; or the results of splits."""

    out_ptr: Any
    partial_out_ptr: Any
    partial_stats_ptr: Any
    lse_ptr: Any = None


@triton.jit
def _load_block(
    cache_ptr, inside, d, here, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values [BLOCK_N, BLOCK_D] as the product takes it; MASKED: what is not `here` is not read.

    FORMAT None: the cache is of the model's own dtype.
    """
    places = cache_ptr + (inside[:, None] + d[None, :])
    if MASKED and D < BLOCK_D:
        values = tl.load(places, mask=here[:, None] & (d < D)[None, :], other=0)
    elif MASKED:
        values = tl.load(places, mask=here[:, None], other=0)
    elif D < BLOCK_D:
        values = tl.load(places, mask=(d < D)[None, :], other=0)
    else:
        values = tl.load(places)
    if FORMAT is not None:
        values = widen(values, FORMAT, NATIVE).to(DTYPE)
    return values


@triton.jit
def _base_2_scale(scale):
    """The factor from scores to base-2 logits; a scale of 0 is made tiny, so that -inf stays what it is."""
    return tl.where(scale == 0, 1e-30, scale * LOG2E)


@triton.jit
def _step(
    q, acc, row_max, row_sum, missing_any, k_ptr, v_ptr, page, start, end, position, pages, scale, softcap, window,
    page_stride, token_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr,
    MASKED: tl.constexpr, LATE_SUM: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The keys from `start` on. LATE_SUM: row_sum is a sum per column of the block [M, N], added up at the end.

    `missing_any` becomes 1 for a page that is not there; MASKED: its keys are not read, else all rows see them.
    """
    key, d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    here = key < end
    if PAGE > 0:
        missing = (page < 0) | (page >= pages)
        page, missing_any = tl.where(missing, 0, page), missing_any | missing.to(tl.int32)
        here = here & (missing == 0)
    base, inside = page_offsets(page, start, page_stride, token_stride, PAGE, BLOCK_N, FAR)
    k = _load_block(k_ptr + base, inside, d, here, D, BLOCK_D, MASKED, FORMAT, NATIVE, q.dtype)
    v = _load_block(v_ptr + base, inside, d, here, D, BLOCK_D, MASKED, FORMAT, NATIVE, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        scores = logits(scores, scale, softcap, True)
        factor = 1.0
    else:
        factor = _base_2_scale(scale)
    if MASKED:
        scores = tl.where(visible(position, key, end, window, True, WINDOW), scores, -float("inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    finite = tl.where(new_max == -float("inf"), 0.0, new_max)  # a row that sees nothing yet
    p = tl.exp2(scores * factor - finite[:, None])
    rescale = tl.exp2(row_max - finite)
    if LATE_SUM:
        row_sum = row_sum * rescale[:, None] + p
    else:
        row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, row_sum, missing_any


@triton.jit
def _nan_where_missing(
    row_sum, missing_any, table_ptr, position, start, end, pages, window,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The sums of rows at `position` that met keys from start to end: NaN for those that see a page that is missing.

    `missing_any` is 0 if all pages are there, one number or BLOCK of them: so this costs nothing where they are.
    """
    if PAGE < BLOCK:
        missing_any = tl.max(missing_any, 0)
    if missing_any != 0:
        for i in range(start // PAGE, tl.cdiv(end, PAGE)):
            page = tl.load(table_ptr + i)
            sees = (position >= tl.maximum(i * PAGE, start)) & ((page < 0) | (page >= pages))
            if WINDOW:
                sees = sees & (tl.minimum(i * PAGE + PAGE, end) > position - window + 1)
            row_sum = tl.where(sees, float("nan"), row_sum)
    return row_sum


@triton.jit
def _fill_rows(
    out_ptr, lse_ptr, first_token, count, kv_head, first_row, step, value,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One value for the rows of `count` tokens that this program has: BLOCK_M from first_row on, and of every step.

    Their lse is -inf where it is zero.
    """
    wide, d = tl.full((), 1, tl.int64), tl.arange(0, BLOCK_D)
    values = (tl.zeros((BLOCK_M, BLOCK_D), tl.float32) + value).to(out_ptr.dtype.element_ty)
    for first in range(first_row, count * GROUP, step):
        row = first + tl.arange(0, BLOCK_M)
        rows = wide * (first_token + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
        mask = (row < count * GROUP)[:, None] & (d < D)[None, :]
        tl.store(out_ptr + (rows[:, None] * D + d[None, :]), values, mask=mask)
        if lse_ptr is not None:
            sums = tl.zeros((BLOCK_M,), tl.float32) + tl.where(value == 0, -float("inf"), value)
            tl.store(lse_ptr + rows, sums, mask=row < count * GROUP)


@triton.jit(do_not_specialize=("sequences", "queries", "tokens", "splits", "pages", "max_keys", "window"))
def paged_attention(
    q_ptr, q_strides, cache, sequence, scoring, results,
    sequences, queries, tokens, splits, pages, max_keys, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    K_PER_HEAD: tl.constexpr, V_PER_HEAD: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,
    MIN_KEYS: tl.constexpr, UNMASKED_LOOP: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FAR: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    # Programs run together that read the keys of all heads, which lie side by side, for all tiles.
    kv_head, tile = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    split, b = tl.program_id(1), tl.program_id(2)
    wide = tl.full((), 1, tl.int64)  # offsets pass 2**31
    pdl_wait()
    pdl_launch_dependents()
    cu_ptr, out_ptr, scale = sequence.cu_ptr, results.out_ptr, scoring.scale
    first_row = tile * BLOCK_M
    if cu_ptr is not None:
        step = tl.num_programs(0) // KV_HEADS * BLOCK_M
        if b == sequences:  # the tokens of no sequence
            end = tl.load(cu_ptr + sequences, mask=sequences > 0, other=0)
            end = tl.minimum(tl.maximum(end, 0), tokens)
            _fill_rows(
                out_ptr, results.lse_ptr, end, tokens - end, kv_head, first_row, step, 0.0,
                KV_HEADS, GROUP, D, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            return
    length, count, first_token, valid = sequence_of(sequence.lengths_ptr, cu_ptr, b, queries, max_keys, tokens)
    row = first_row + tl.arange(0, BLOCK_M)
    t, head = row // GROUP, kv_head * GROUP + row % GROUP
    inside, d = t < count, tl.arange(0, BLOCK_D)
    q_ptr += wide * b * q_strides.sequence
    if cu_ptr is not None:
        q_ptr += wide * first_token * q_strides.token
    q_places = q_ptr + ((wide * t * q_strides.token + wide * head * q_strides.head)[:, None] + d[None, :])
    # All that does not hang on the length is asked for before it is looked at: the answers come together.
    q = tl.load(q_places, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    if FORMAT is not None:
        scale *= tl.load(cache.k_scale_ptr + kv_head) if K_PER_HEAD else tl.load(cache.k_scale_ptr)
        v_scale = tl.load(cache.v_scale_ptr + kv_head) if V_PER_HEAD else tl.load(cache.v_scale_ptr)
    q, scale = tl.where(scale < 0, -q, q), tl.abs(scale)  # so that what is masked, -inf, stays so
    if cu_ptr is not None and SPLITS == 1:
        step = tl.num_programs(0) // KV_HEADS * BLOCK_M
        if not valid:
            nan = float("nan")
            _fill_rows(
                out_ptr, results.lse_ptr, first_token, count, kv_head, first_row, step, nan,
                KV_HEADS, GROUP, D, BLOCK_D, BLOCK_M,
            )  # fmt: skip
            return
    first, size = split_keys(length, count, window, SPLITS, BLOCK_N, MIN_KEYS, WINDOW)
    low = first + split * size
    # One way out for both: the compiler would put the first before the length is asked for.
    if (first_row >= count * GROUP) | ((SPLITS > 1) & (low >= length)):
        return

    # Blocks from inner to outer are seen by every row of the tile.
    if CAUSAL:
        position = length - count + t
        last_t = tl.minimum((first_row + BLOCK_M - 1) // GROUP, count - 1)
        start, inner, outer, end = key_range(
            length - count + first_row // GROUP, length - count + last_t, length, window, BLOCK_N, True, WINDOW
        )
    else:  # all of them are at the last key
        position = length - 1 + t * 0
        start, inner, outer, end = key_range(length - 1, length - 1, length, window, BLOCK_N, True, WINDOW)
    high = low + size
    start, end = tl.maximum(start, low), tl.minimum(end, high)
    k_ptr = cache.k_ptr + wide * kv_head * cache.head
    v_ptr = cache.v_ptr + wide * kv_head * cache.head
    table_ptr = sequence.table_ptr
    if table_ptr is not None:
        table_ptr += wide * b * sequence.table_row
    LATE_SUM: tl.constexpr = BLOCK_M < 64  # warps share a row: a sum across them in each step would make them wait
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    if LATE_SUM:
        row_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        row_sum = tl.zeros((BLOCK_M,), tl.float32)
    missing_any = tl.zeros((BLOCK_N,), tl.int32) if PAGE > 0 and PAGE < BLOCK_N else tl.full((), 0, tl.int32)
    if UNMASKED_LOOP:
        inner, outer = tl.maximum(inner, start), tl.minimum(outer, high)
        page = page_of(table_ptr, b, inner, outer, PAGE, BLOCK_N)
        for at in range(inner, outer, BLOCK_N):
            ahead = page_of(table_ptr, b, at + BLOCK_N, outer, PAGE, BLOCK_N)
            acc, row_max, row_sum, missing_any = _step(
                q, acc, row_max, row_sum, missing_any, k_ptr, v_ptr, page, at, end, position, pages,
                scale, scoring.softcap, window, cache.page, cache.token, D, BLOCK_D, BLOCK_N, PAGE, FAR,
                False, LATE_SUM, WINDOW, SOFTCAP, FORMAT, NATIVE,
            )  # fmt: skip
            page = ahead
    else:
        inner, outer = start, start
    # Blocks that need a mask are before inner and from outer on.
    gap = tl.maximum(outer - inner, 0)
    first_masked = tl.where(inner > start, start, start + gap)
    page = page_of(table_ptr, b, first_masked, end, PAGE, BLOCK_N)
    for at in range(start, end - gap, BLOCK_N):
        now = at if not UNMASKED_LOOP else tl.where(at < inner, at, at + gap)
        then = at + BLOCK_N if not UNMASKED_LOOP else tl.where(at + BLOCK_N < inner, at + BLOCK_N, at + BLOCK_N + gap)
        ahead = page_of(table_ptr, b, then, end, PAGE, BLOCK_N)
        acc, row_max, row_sum, missing_any = _step(
            q, acc, row_max, row_sum, missing_any, k_ptr, v_ptr, page, now, end, position, pages,
            scale, scoring.softcap, window, cache.page, cache.token, D, BLOCK_D, BLOCK_N, PAGE, FAR,
            True, LATE_SUM, WINDOW, SOFTCAP, FORMAT, NATIVE,
        )  # fmt: skip
        page = ahead

    if LATE_SUM:
        row_sum = tl.sum(row_sum, 1)
    if PAGE > 0:
        row_sum = _nan_where_missing(
            row_sum, missing_any, table_ptr, position, start, end, pages, window, PAGE, BLOCK_N, WINDOW
        )
    if FORMAT is not None:
        acc *= v_scale
    rows = wide * (first_token + t) * (KV_HEADS * GROUP) + head
    if SPLITS > 1:
        all_rows = wide * tokens * (KV_HEADS * GROUP)
        store_partial(
            results.partial_out_ptr, results.partial_stats_ptr, acc, row_max, row_sum, rows, split, inside, all_rows,
            splits, D, BLOCK_D,
        )  # fmt: skip
    else:
        if scoring.sinks_ptr is not None:
            row_max, row_sum, rescale = add_sink(
                row_max, row_sum, tl.load(scoring.sinks_ptr + head, mask=inside, other=0.0)
            )
            acc *= rescale[:, None]
        inverse, lse = finish_softmax(row_max, tl.where(valid, row_sum, float("nan")))
        tl.store(
            out_ptr + (rows[:, None] * D + d[None, :]), acc * inverse[:, None], mask=inside[:, None] & (d < D)[None, :]
        )
        if results.lse_ptr is not None:
            tl.store(results.lse_ptr + rows, lse, mask=inside)
