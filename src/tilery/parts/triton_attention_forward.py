"""Attention in Triton, forward: a program per tile of queries of one head, keys and values stream past it.

Key blocks that every query of the tile sees are taken without masks; those at the edges of what is causal, in the
window or there at all come with masks. Heads whose size is no power of two lie in tiles that are, with zeros behind:
of two tiles, 80 as 64 and 16, ptxas 12.8 made code that was wrong.
"""

import triton
import triton.language as tl

from tilery.parts import triton_fp8
from tilery.parts.triton_attention import LOG2E, begin, bent, finish, key_range, online, packed_span, placed, seen


@triton.jit
def operand(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """A tile of q or k as the tensor cores take it: fp8 that is not NATIVE to them comes as bytes, and becomes fp16."""
    if FORMAT != "none" and not NATIVE:
        x = triton_fp8.widen(x, FORMAT, False).to(tl.float16)
    return x


@triton.jit
def values(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """A tile of v; of fp8 always fp16, so that the weights keep eleven bits."""
    return operand(x, FORMAT, NATIVE).to(tl.float16) if FORMAT != "none" else x


@triton.jit
def tile_of_rows(ptr, rows, column, there, COLUMNS: tl.constexpr):
    """Rows of a matrix that has so many columns, by their distance from ptr; what is not there is 0."""
    mask = there[:, None] & (column < COLUMNS)[None, :]
    return tl.load(ptr + (rows[:, None] + column[None, :]), mask=mask, other=0.0)


@triton.jit
def _fetched(
    source, sequence, head, start, from_row, row, n, there,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """A block of keys or values of SIZE, from a pointer to the first one or, by TMA, a descriptor of all of them."""
    if TMA:  # past the ends of a tensor it gives 0
        tile = source.load([sequence, head, from_row + start, 0]).reshape(BLOCK_N, WIDTH)
    else:
        source += tl.full((), 1, tl.int64) * start * row  # past 2**31 elements int32 overflows
        columns = tl.arange(0, WIDTH)
        at = source + (n[:, None] * row + columns[None, :])
        if WIDTH > SIZE:
            inside = (columns < SIZE)[None, :]
            tile = tl.load(at, mask=there[:, None] & inside if MASKED else inside, other=0.0)
        else:
            tile = tl.load(at, mask=there[:, None], other=0.0) if MASKED else tl.load(at)
    return tile


@triton.jit
def _span(
    q, acc, top, total, k, v, mask_ptr, bias_ptr, slope,
    sequence, head, from_row, first, inner, outer, last, place_of, rows, queries, keys,
    k_row, v_row, mask_column, bias_row, bias_column, scale, window, softcap,
    SIZE: tl.constexpr, VALUE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BENT: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr, EDGES: tl.constexpr, TMA: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    """Keys from first to last, in blocks, all of which all queries see unless they are MASKED.

    EDGES: those from inner to outer are seen by all, the others not: one loop, so that the loads never run dry.
    """
    n = tl.arange(0, BLOCK_N)
    wide = tl.full((), 1, tl.int64)
    far_n = n * wide if FAR else n
    for start in range(first, last, BLOCK_N):
        key = start + n
        there = key < keys
        tile = _fetched(k, sequence, head, start, from_row, k_row, far_n, there, SIZE, D, BLOCK_N, MASKED, TMA)
        scores = tl.dot(q, tl.trans(operand(tile, FORMAT, NATIVE)), input_precision="ieee")  # tf32 would lose 13 bits
        if BENT:
            scores = bent(scores, scale, softcap, SOFTCAP)
        if ALIBI:
            scores += slope * (key[None, :] - place_of[:, None]).to(tl.float32)
        if bias_ptr is not None:
            inside = (rows[:, None] < queries) & there[None, :]
            at = bias_ptr + (rows[:, None] * wide * bias_row + key[None, :] * wide * bias_column)
            scores += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
        if EDGES:
            if (start < inner) | (start >= outer):
                scores = tl.where(seen(place_of, key, keys, window, CAUSAL, WINDOW), scores, -float("inf"))
        elif MASKED:
            scores = tl.where(seen(place_of, key, keys, window, CAUSAL, WINDOW), scores, -float("inf"))
        if mask_ptr is not None:
            kept = tl.load(mask_ptr + key * wide * mask_column, mask=there, other=0)
            scores = tl.where(kept[None, :] != 0, scores, -float("inf"))
        top, total, weights, shrink = online(top, total, scores, 1.0 if BENT else scale)
        tile = _fetched(v, sequence, head, start, from_row, v_row, far_n, there, VALUE, E, BLOCK_N, MASKED, TMA)
        if MASKED and TMA:  # the next sequence's values may be NaN, and 0 times that is too
            tile = tl.where(there[:, None], tile, tl.zeros_like(tile))
        tile = values(tile, FORMAT, NATIVE)
        weights = weights.to(tile.dtype)
        acc = tl.dot(weights, tile, acc * shrink[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def bounds(ends_ptr, sequence, sequences, tokens, most):
    """Where a packed sequence begins and ends, inside of what is there, and whether its numbers are sound.

    One sequence more than there are has the tokens that are left.
    """
    first = tl.load(ends_ptr + sequence)
    last = tl.load(ends_ptr + sequence + 1, mask=sequence < sequences, other=tokens)
    return packed_span(first, last, sequence, tokens, most)


@triton.jit
def put_rows(
    out_ptr, lse_ptr, first, last, step, row, left, VALUE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """A head's rows from first to last that this program has, BLOCK of each step: they are left, or of a cut sequence.

    Zeros and an lse of -inf if they are left, else NaN. WIDTH is a power of two from VALUE on.
    """
    column, nan = tl.arange(0, WIDTH), float("nan")
    for start in range(first, last, step):
        rows = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = rows < last
        values = tl.zeros((BLOCK, WIDTH), tl.float32) + tl.where(left, 0.0, nan)
        mask = inside[:, None] & (column < VALUE)[None, :]
        tl.store(out_ptr + (rows[:, None] * row + column[None, :]), values.to(out_ptr.dtype.element_ty), mask=mask)
        if lse_ptr is not None:
            sums = tl.zeros((BLOCK,), tl.float32) + tl.where(left, -float("inf"), nan)
            tl.store(lse_ptr + rows, sums, mask=inside)


@triton.jit(do_not_specialize=["band", "sequences", "tiles", "most_q", "most_k"])
def forward(
    q, k, v, out, lse_ptr, cu_q_ptr, cu_k_ptr, mask_ptr, bias_ptr, slopes_ptr,
    sinks_ptr, q_scale_ptr, k_scale_ptr, v_scale_ptr,
    sequences, heads, queries, keys, most_q, most_k, tiles, band,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    lse_batch, lse_head, mask_batch, mask_column, bias_batch, bias_head, bias_row, bias_column, scale, window, softcap,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BENT: tl.constexpr,
    TMA: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    tile, pair = placed((sequences if cu_q_ptr is None else sequences + 1) * heads, tiles, band, CAUSAL)
    wide = tl.full((), 1, tl.int64)
    sequence, head = pair // heads * wide, pair % heads * wide
    if lse_ptr is not None:
        lse_ptr += head * lse_head
    if cu_q_ptr is not None:  # queries and keys are all tokens
        begin_q, end_q, sound_q = bounds(cu_q_ptr, sequence, sequences, queries, most_q)
        begin_k, end_k, sound_k = bounds(cu_k_ptr, sequence, sequences, keys, most_k)
        left, step = sequence == sequences, tiles * BLOCK_M
        if left | (not (sound_q & sound_k)):
            first_row = begin_q + tile * BLOCK_M
            put_rows(out + head * out_head, lse_ptr, first_row, end_q, step, out_row, left, VALUE, E, BLOCK_M)
            return
        queries, keys = end_q - begin_q, end_k - begin_k
        if tile * BLOCK_M >= queries:
            return
        k_start, v_start, lse_start = wide * begin_k * k_row, wide * begin_k * v_row, wide * begin_q
        q_start, out_start = wide * begin_q * q_row, wide * begin_q * out_row
        sequence *= 0  # all tokens are one
    else:
        k_start, v_start, lse_start = sequence * k_batch, sequence * v_batch, sequence * lse_batch
        q_start, out_start = sequence * q_batch, sequence * out_batch
        begin_q, begin_k = 0, 0

    near_sequence, near_head, kv_head = sequence.to(tl.int32), head.to(tl.int32), head // GROUP
    from_row = begin_q + tile * BLOCK_M
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, far_rows = rows < queries, rows * wide
    if TMA:  # rows past a sequence's end are read, and not written
        q_tile = q.load([near_sequence, near_head, from_row, 0]).reshape(BLOCK_M, D)
    else:
        q += q_start + head * q_head
        q_tile = tile_of_rows(q, far_rows * q_row, tl.arange(0, D), inside, SIZE)
        k += k_start + kv_head * k_head
        v += v_start + kv_head * v_head
    q_tile = operand(q_tile, FORMAT, NATIVE)
    if FORMAT != "none":
        scale *= tl.load(q_scale_ptr) * tl.load(k_scale_ptr)
    if not BENT:
        scale *= LOG2E  # it is positive, so the largest score is the largest logit
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head).to(tl.float32) * LOG2E
    if mask_ptr is not None:
        mask_ptr += sequence * mask_batch
    if bias_ptr is not None:
        bias_ptr += sequence * bias_batch + head * bias_head

    place_of = rows + keys - queries
    first = tile * BLOCK_M + keys - queries
    last = tl.minimum(first + BLOCK_M, keys) - 1
    start, inner, outer, end = key_range(first, last, keys, window, BLOCK_N, CAUSAL, WINDOW)
    top, total = begin(sinks_ptr, head, BLOCK_M)
    acc = tl.zeros((BLOCK_M, E), tl.float32)
    tail = outer
    if TMA:  # a packed sequence's last block of keys is not its alone
        tail = end if cu_q_ptr is None else tl.minimum(tl.cdiv(end, BLOCK_N), keys // BLOCK_N) * BLOCK_N
        tail = tl.maximum(tail, start)
    # Keys that a window cuts, keys that all see, keys that not all see; or, by TMA, all in one loop but for the tail.
    FIRST: tl.constexpr = 3 if TMA else (0 if WINDOW else 1)
    LAST: tl.constexpr = (2 if cu_q_ptr is None else 1) if TMA else 3
    for part in tl.static_range(FIRST, LAST, -1 if TMA else 1):
        acc, top, total = _span(
            q_tile, acc, top, total, k, v, mask_ptr, bias_ptr, slope,
            near_sequence, kv_head.to(tl.int32), begin_k,
            inner if part == 1 else (tail if part == 2 else start), inner, outer,
            inner if part == 0 else (outer if part == 1 else (end if part == 2 else tail)),
            place_of, rows, queries, keys,
            k_row, v_row, mask_column, bias_row, bias_column, scale, window, softcap,
            SIZE, VALUE, D, E, BLOCK_N, FORMAT, NATIVE, CAUSAL, WINDOW, SOFTCAP, BENT,
            slopes_ptr is not None, part == 0 or part == 2, part == 3, TMA, FAR,
        )  # fmt: skip

    share, lse = finish(top, total)
    if FORMAT != "none":
        share *= tl.load(v_scale_ptr)
    acc *= share[:, None]
    if TMA and cu_q_ptr is None:
        out.store([near_sequence, near_head, from_row, 0], acc.to(out.dtype).reshape(1, 1, BLOCK_M, E))
    else:
        at = out + out_start + head * out_head + far_rows[:, None] * out_row
        kind = out.dtype.element_ty
        column = tl.arange(0, E)[None, :]
        tl.store(at + column, acc.to(kind), mask=inside[:, None] & (column < VALUE))
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_start + rows, lse, mask=inside)
