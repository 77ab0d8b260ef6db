"""The Triton kernels of attention_backward: a program keeps a block of keys, or of queries, and streams the other side.

P is computed anew in both passes, so that no two programs add to one sum: every run gives the same bits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilery.ops.attention.triton.softmax import LOG2E, clamped_span, key_range


class Strided(NamedTuple):
    ptr: Any
    sequence: int  # strides
    token: int
    head: int


class RowSums(NamedTuple):
    """lse and delta, whose tokens are contiguous."""

    lse_ptr: Any
    delta_ptr: Any
    sequence: int  # strides
    head: int


class Scoring(NamedTuple):
    scale: Any
    window: int | None  # None where there is none: a kernel is compiled for what is not None
    softcap: float | None


class Sizes(NamedTuple):
    queries: int  # of a sequence, of packed ones at most
    keys: int
    tokens: int  # of a sequence, of packed ones all
    key_tokens: int


@triton.jit
def _packed_span(cu_ptr, sequence, longest, tokens):
    """First token and number of tokens of a packed sequence, inside of what is there, and whether it is valid."""
    first, last = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    first, end, valid = clamped_span(first, last, sequence, tokens, longest)
    return first, end - first, valid


@triton.jit
def _load_rows(
    ptr, first, rows, count, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FAR: tl.constexpr, EVEN: tl.constexpr
):
    """Rows from `first` on of heads of WIDTH, zeros past `count` and past WIDTH; EVEN: all of them are there."""
    columns = tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64) * step if FAR else rows * step
    places = ptr + tl.full((), 1, tl.int64) * first * step + offsets[:, None] + columns[None, :]
    if EVEN and WIDTH == BLOCK:
        return tl.load(places)
    if EVEN:
        return tl.load(places, mask=columns[None, :] < WIDTH, other=0.0)
    mask = (rows < count - first)[:, None]
    return tl.load(places, mask=mask if WIDTH == BLOCK else mask & (columns[None, :] < WIDTH), other=0.0)


@triton.jit
def _store_rows(ptr, values, first, rows, count, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    places = ptr + (first + rows).to(tl.int64)[:, None] * step + columns[None, :]
    tl.store(places, values, mask=(rows < count - first)[:, None] & (columns[None, :] < WIDTH))


@triton.jit
def _fill_nan(ptr, first, row, count, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """NaN in an invalid sequence's rows from `row` on, and further on: it may have more than there are programs for."""
    values = tl.zeros((ROWS, BLOCK), tl.float32) + float("nan")
    rows = tl.arange(0, ROWS)
    ptr += tl.full((), 1, tl.int64) * first * step
    for start in range(row, count, tl.num_programs(0) * ROWS):
        _store_rows(ptr, values, start, rows, count, step, WIDTH, BLOCK)


@triton.jit
def _in_window(away, window, CAUSAL: tl.constexpr):
    """Which pairs are near enough, whose position and key are so far apart."""
    mask = away < window
    if not CAUSAL:
        mask = mask & (away > -window)
    return mask


@triton.jit
def _soft_cap(scores, scoring):
    """Base-2 logits of products, and the derivative of scores after the soft cap by those before.

    1 - tanh² is 4 · small / (1 + small)², small = exp(-2 |x|): exact where tanh is 1 in fp32.
    """
    x = scores * scoring.scale
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E) / scoring.softcap)
    inverse = 1.0 / (1.0 + small)
    tanh = (1.0 - small) * inverse
    return tl.where(x < 0, -tanh, tanh) * (scoring.softcap * LOG2E), 4.0 * small * inverse * inverse


@triton.jit
def _load_lse(ptr, first, rows, count):
    """In base 2; +inf for queries that see nothing or are not there, whose P is zero so."""
    lse = tl.load(ptr + first + rows, mask=rows < count - first, other=-float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)


@triton.jit
def backward_delta(
    dout, out, dlse_ptr, delta, tokens, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """sum(dout · out) - dlse of every query and head."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (token < tokens)[:, None] & (columns < VALUE_DIM)
    dout_ptr = dout.ptr + sequence * dout.sequence + head * dout.head
    out_ptr = out.ptr + sequence * out.sequence + head * out.head
    dout_rows = tl.load(dout_ptr + token[:, None] * dout.token + columns, mask=mask, other=0.0).to(tl.float32)
    out_rows = tl.load(out_ptr + token[:, None] * out.token + columns, mask=mask, other=0.0).to(tl.float32)
    sums = tl.sum(dout_rows * out_rows, axis=1)
    place = sequence * delta.sequence + head * delta.head + token * delta.token
    if dlse_ptr is not None:
        sums -= tl.load(dlse_ptr + place, mask=token < tokens, other=0.0)
    tl.store(delta.ptr + place, sums, mask=token < tokens)


@triton.jit
def backward_dkdv(
    q, k, v, dout, sums, dk, dv, cu_seqlens, sizes, scoring,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, from every head that shares them; the first keys, which most queries see, first.

    One loop over heads and queries, masked throughout: one for each head, or one without masks, would spill registers.
    """
    key, kv_head, sequence = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    queries, keys, scale = sizes.queries, sizes.keys, scoring.scale
    first_query, first_key = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if cu_seqlens.q_ptr is not None:
        first_query, queries, valid_q = _packed_span(cu_seqlens.q_ptr, sequence, queries, sizes.tokens)
        first_key, keys, valid_k = _packed_span(cu_seqlens.k_ptr, sequence, keys, sizes.key_tokens)
        if not (valid_q & valid_k):
            _fill_nan(dk.ptr + kv_head * dk.head, first_key, key, keys, dk.token, HEAD_DIM, D, ROWS)
            _fill_nan(dv.ptr + kv_head * dv.head, first_key, key, keys, dv.token, VALUE_DIM, E, ROWS)
            return
    if key < keys:
        wide = tl.full((), 1, tl.int64)
        head = kv_head * GROUP
        k_ptr = k.ptr + (sequence * k.sequence + kv_head * k.head + wide * first_key * k.token)
        v_ptr = v.ptr + (sequence * v.sequence + kv_head * v.head + wide * first_key * v.token)
        q_ptr = q.ptr + (sequence * q.sequence + head * q.head + wide * first_query * q.token)
        dout_ptr = dout.ptr + (sequence * dout.sequence + head * dout.head + wide * first_query * dout.token)
        lse_ptr = sums.lse_ptr + (sequence * sums.sequence + head * sums.head + first_query)
        delta_ptr = sums.delta_ptr + (sequence * sums.sequence + head * sums.head + first_query)
        row, column = tl.arange(0, ROWS), tl.arange(0, STEP)
        k_rows = _load_rows(k_ptr, key, row, keys, k.token, HEAD_DIM, D, FAR, False)
        v_rows = _load_rows(v_ptr, key, row, keys, v.token, VALUE_DIM, E, FAR, False)
        dk_acc, dv_acc = tl.zeros((ROWS, D), tl.float32), tl.zeros((ROWS, E), tl.float32)
        start, end, logit_scale = 0, queries, scale * LOG2E
        if CAUSAL:
            start = tl.minimum(tl.maximum(key - keys + queries, 0), queries) // STEP * STEP
        if scoring.window is not None:
            if not CAUSAL:
                start = tl.minimum(tl.maximum(key - scoring.window + 1 - keys + queries, 0), queries) // STEP * STEP
            end = tl.maximum(tl.minimum(key + ROWS - 1 + scoring.window - keys + queries, queries), start)
        blocks = tl.cdiv(end - start, STEP)
        for i in range(GROUP * blocks):
            h, first = wide * (i // blocks), start + i % blocks * STEP
            q_rows = _load_rows(q_ptr + h * q.head, first, column, queries, q.token, HEAD_DIM, D, FAR, False)
            dout_rows = _load_rows(
                dout_ptr + h * dout.head, first, column, queries, dout.token, VALUE_DIM, E, FAR, False
            )
            lse = _load_lse(lse_ptr + h * sums.head, first, column, queries)
            delta = tl.load(delta_ptr + h * sums.head + first + column, mask=column < queries - first, other=0.0)
            scores = tl.dot(k_rows, tl.trans(q_rows), input_precision="ieee")
            if scoring.softcap is None:
                p = tl.exp2(scores * logit_scale - lse[None, :])
            else:
                logits, slope = _soft_cap(scores, scoring)
                p = tl.exp2(logits - lse[None, :])
            if CAUSAL:
                away = row[:, None] - column[None, :]
                p = tl.where(away <= keys - queries + first - key, p, 0.0)
            if scoring.window is not None:
                apart = keys - queries + first - key + column[None, :] - row[:, None]
                p = tl.where(_in_window(apart, scoring.window, CAUSAL), p, 0.0)
            dv_acc = tl.dot(p.to(dout_rows.dtype), dout_rows, dv_acc, input_precision="ieee")
            ds = p * (tl.dot(v_rows, tl.trans(dout_rows), input_precision="ieee") - delta[None, :])
            if scoring.softcap is not None:
                ds *= slope
            dk_acc = tl.dot(ds.to(q_rows.dtype), q_rows, dk_acc, input_precision="ieee")
        dk_ptr = dk.ptr + (sequence * dk.sequence + kv_head * dk.head + wide * first_key * dk.token)
        dv_ptr = dv.ptr + (sequence * dv.sequence + kv_head * dv.head + wide * first_key * dv.token)
        _store_rows(dk_ptr, dk_acc * scale, key, row, keys, dk.token, HEAD_DIM, D)
        _store_rows(dv_ptr, dv_acc, key, row, keys, dv.token, VALUE_DIM, E)


@triton.jit
def _add_dq(
    dq, q, dout, lse, delta, k_ptr, v_ptr, start, end, keys, position, scoring, logit_scale, k_token, v_token,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STEP: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Add what the keys from start to end, all of them or masked, give to dq."""
    rows = tl.arange(0, STEP)
    for first in range(start, end, STEP):
        k = _load_rows(k_ptr, first, rows, keys, k_token, HEAD_DIM, D, FAR, not MASKED)
        v = _load_rows(v_ptr, first, rows, keys, v_token, VALUE_DIM, E, FAR, not MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if scoring.softcap is None:
            p = tl.exp2(scores * logit_scale - lse[:, None])
        else:
            logits, slope = _soft_cap(scores, scoring)
            p = tl.exp2(logits - lse[:, None])
        if MASKED:
            visible = rows[None, :] < keys - first
            if CAUSAL:
                visible = visible & (first + rows[None, :] <= position[:, None])
            if scoring.window is not None:
                apart = position[:, None] - (first + rows[None, :])
                visible = visible & _in_window(apart, scoring.window, CAUSAL)
            p = tl.where(visible, p, 0.0)
        ds = p * (tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])
        if scoring.softcap is not None:
            ds *= slope
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def backward_dq(
    q, k, v, dout, sums, dq, cu_seqlens, sizes, scoring,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries; the last ones, which see most keys, first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    queries, keys, scale = sizes.queries, sizes.keys, scoring.scale
    first_query, first_key = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if cu_seqlens.q_ptr is not None:
        first_query, queries, valid_q = _packed_span(cu_seqlens.q_ptr, sequence, queries, sizes.tokens)
        first_key, keys, valid_k = _packed_span(cu_seqlens.k_ptr, sequence, keys, sizes.key_tokens)
        if not (valid_q & valid_k):
            _fill_nan(dq.ptr + head * dq.head, first_query, first, queries, dq.token, HEAD_DIM, D, ROWS)
            return
    if first < queries:
        wide = tl.full((), 1, tl.int64)
        rows, kv_head = tl.arange(0, ROWS), head // GROUP
        q_ptr = q.ptr + (sequence * q.sequence + head * q.head + wide * first_query * q.token)
        dout_ptr = dout.ptr + (sequence * dout.sequence + head * dout.head + wide * first_query * dout.token)
        q_rows = _load_rows(q_ptr, first, rows, queries, q.token, HEAD_DIM, D, FAR, False)
        dout_rows = _load_rows(dout_ptr, first, rows, queries, dout.token, VALUE_DIM, E, FAR, False)
        lse_ptr = sums.lse_ptr + (sequence * sums.sequence + head * sums.head + first_query)
        lse = _load_lse(lse_ptr, first, rows, queries)
        delta_ptr = sums.delta_ptr + (sequence * sums.sequence + head * sums.head + first_query)
        delta = tl.load(delta_ptr + first + rows, mask=rows < queries - first, other=0.0)
        k_ptr = k.ptr + (sequence * k.sequence + kv_head * k.head + wide * first_key * k.token)
        v_ptr = v.ptr + (sequence * v.sequence + kv_head * v.head + wide * first_key * v.token)
        position = first + keys - queries
        last = tl.minimum(position + ROWS, keys) - 1
        WINDOW: tl.constexpr = scoring.window is not None
        start, inner, outer, end = key_range(position, last, keys, scoring.window, STEP, CAUSAL, WINDOW)
        acc = tl.zeros((ROWS, D), tl.float32)
        if WINDOW:
            acc = _add_dq(
                acc, q_rows, dout_rows, lse, delta, k_ptr, v_ptr, start, inner, keys, position + rows, scoring,
                scale * LOG2E, k.token, v.token, HEAD_DIM, VALUE_DIM, D, E, STEP, True, CAUSAL, FAR,
            )  # fmt: skip
        acc = _add_dq(
            acc, q_rows, dout_rows, lse, delta, k_ptr, v_ptr, inner, outer, keys, position + rows, scoring,
            scale * LOG2E, k.token, v.token, HEAD_DIM, VALUE_DIM, D, E, STEP, False, CAUSAL, FAR,
        )  # fmt: skip
        acc = _add_dq(
            acc, q_rows, dout_rows, lse, delta, k_ptr, v_ptr, outer, end, keys, position + rows, scoring,
            scale * LOG2E, k.token, v.token, HEAD_DIM, VALUE_DIM, D, E, STEP, True, CAUSAL, FAR,
        )  # fmt: skip
        dq_ptr = dq.ptr + (sequence * dq.sequence + head * dq.head + wide * first_query * dq.token)
        _store_rows(dq_ptr, acc * scale, first, rows, queries, dq.token, HEAD_DIM, D)


@triton.jit
def clear_unused(ptr, cu_ptr, sequences, tokens, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the rows, `width` long, of packed tokens of no sequence."""
    last = tl.load(cu_ptr + sequences, mask=sequences > 0, other=0)
    token = tl.program_id(0) * ROWS
    if token + ROWS > last:
        rows = token + tl.arange(0, ROWS)
        unused = (rows < tokens) & (rows >= last)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            places = ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
            mask = unused[:, None] & (columns < width)[None, :]
            tl.store(places, tl.zeros((ROWS, BLOCK), ptr.dtype.element_ty), mask=mask)
