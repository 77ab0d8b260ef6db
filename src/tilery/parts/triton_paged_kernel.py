"""The kernel of parts/triton_paged_attention.py: rows of one kv head against a part of a sequence's keys.

A page that is not in the cache is not read, and rows that see a key of it are NaN. That is found out once, after the
mainloop, so that there is no more in it than a comparison of the page.
"""

import triton
import triton.language as tl

from tilery.languages import triton_glue
from tilery.languages.triton_glue import hand_over, take_over
from tilery.parts.triton_attention import base_2, bent, finish, key_range, seen
from tilery.parts.triton_paged import cut, keep, offsets, page_of, sequence, spoilt, stored, with_sink


@triton.jit
def _fetched(
    cache_ptr, inside, d, here, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values [BLOCK_N, BLOCK_D]; MASKED: nothing that is not `here` is read."""
    places = cache_ptr + (inside[:, None] + d[None, :])
    if MASKED and D < BLOCK_D:
        values = tl.load(places, mask=here[:, None] & (d < D)[None, :], other=0)
    elif MASKED:
        values = tl.load(places, mask=here[:, None], other=0)
    elif D < BLOCK_D:
        values = tl.load(places, mask=(d < D)[None, :], other=0)
    else:
        values = tl.load(places)
    return stored(values, FORMAT, NATIVE, DTYPE)


@triton.jit
def _step(
    q, acc, top, total, wrong, k_ptr, v_ptr, page, start, end, place, blocks, scale, softcap, window,
    block_stride, token_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, FAR: tl.constexpr,
    MASKED: tl.constexpr, LATE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The keys from `start` on. LATE: total is a sum per place in the block [M, N], added up when all is done.

    `wrong` becomes 1 for a page that is not there; MASKED: its keys are not read, else all rows see them.
    """
    key, d = start + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    here = key < end
    if PAGE > 0:
        missing = (page < 0) | (page >= blocks)
        page, wrong, here = tl.where(missing, 0, page), wrong | missing.to(tl.int32), here & (missing == 0)
    base, inside = offsets(page, start, block_stride, token_stride, PAGE, BLOCK_N, FAR)
    k = _fetched(k_ptr + base, inside, d, here, D, BLOCK_D, MASKED, FORMAT, NATIVE, q.dtype)
    v = _fetched(v_ptr + base, inside, d, here, D, BLOCK_D, MASKED, FORMAT, NATIVE, q.dtype)
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
    return acc, best, total, wrong


@triton.jit
def _put_rows(
    out_ptr, first_token, count, kv_head, first_row, step, value,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One value for the rows of `count` tokens that this program has: BLOCK_M from first_row on, and of every step."""
    wide, d = tl.full((), 1, tl.int64), tl.arange(0, BLOCK_D)
    values = (tl.zeros((BLOCK_M, BLOCK_D), tl.float32) + value).to(out_ptr.dtype.element_ty)
    for first in range(first_row, count * GROUP, step):
        row = first + tl.arange(0, BLOCK_M)
        rows = wide * (first_token + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
        mask = (row < count * GROUP)[:, None] & (d < D)[None, :]
        tl.store(out_ptr + (rows[:, None] * D + d[None, :]), values, mask=mask)


@triton_glue.early
@triton.jit(do_not_specialize=("sequences", "queries", "tokens", "splits", "blocks", "bound", "window"))
def attend(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, starts_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr,
    out_ptr, parts_ptr, stats_ptr,
    sequences, queries, tokens, splits, blocks, bound, window, scale, softcap,
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
    first_row = tile * BLOCK_M
    if starts_ptr is not None:
        step = tl.num_programs(0) // KV_HEADS * BLOCK_M
        if b == sequences:  # the tokens that no sequence has
            end = tl.load(starts_ptr + sequences, mask=sequences > 0, other=0)
            end = tl.minimum(tl.maximum(end, 0), tokens)
            _put_rows(out_ptr, end, tokens - end, kv_head, first_row, step, 0.0, KV_HEADS, GROUP, D, BLOCK_D, BLOCK_M)
            return
    length, count, first_token, sound = sequence(lengths_ptr, starts_ptr, b, queries, bound, tokens)
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
    if starts_ptr is not None and SPLITS == 1:
        step = tl.num_programs(0) // KV_HEADS * BLOCK_M
        if not sound:
            nan = float("nan")
            _put_rows(out_ptr, first_token, count, kv_head, first_row, step, nan, KV_HEADS, GROUP, D, BLOCK_D, BLOCK_M)
            return
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
    wrong = tl.zeros((BLOCK_N,), tl.int32) if PAGE > 0 and PAGE < BLOCK_N else tl.full((), 0, tl.int32)
    if PLAIN:
        inner, outer = tl.maximum(inner, start), tl.minimum(outer, high)
        page = page_of(table_ptr, b, inner, outer, PAGE, BLOCK_N)
        for at in range(inner, outer, BLOCK_N):
            ahead = page_of(table_ptr, b, at + BLOCK_N, outer, PAGE, BLOCK_N)
            acc, top, total, wrong = _step(
                q, acc, top, total, wrong, k_ptr, v_ptr, page, at, end, place, blocks, scale, softcap, window,
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
        acc, top, total, wrong = _step(
            q, acc, top, total, wrong, k_ptr, v_ptr, page, now, end, place, blocks, scale, softcap, window,
            block_stride, token_stride, D, BLOCK_D, BLOCK_N, PAGE, FAR, True, LATE, WINDOW, SOFTCAP, FORMAT, NATIVE,
        )  # fmt: skip
        page = ahead

    if LATE:
        total = tl.sum(total, 1)
    if PAGE > 0:
        total = spoilt(total, wrong, table_ptr, place, start, end, blocks, window, PAGE, BLOCK_N, WINDOW)
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
        factor, _ = finish(top, tl.where(sound, total, float("nan")))
        tl.store(
            out_ptr + (rows[:, None] * D + d[None, :]), acc * factor[:, None], mask=valid[:, None] & (d < D)[None, :]
        )
