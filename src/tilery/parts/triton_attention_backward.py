"""Gradients of attention in Triton: a program keeps a block of keys, or of queries, and walks over the other side.

Weights are computed anew in both passes, so that no two programs add to one sum: every run gives the same bits.
"""

import triton
import triton.language as tl

from tilery.parts.triton_attention import LOG2E, key_range, packed_span


@triton.jit
def _span(cu_ptr, sequence, most, tokens):
    """First token and number of tokens of a packed sequence, inside of what is there, and whether it is sound."""
    first, last = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
    first, end, sound = packed_span(first, last, sequence, tokens, most)
    return first, end - first, sound


@triton.jit
def _spoil(ptr, first, row, count, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """NaN in a cut sequence's rows from `row` on, and in every one that many programs further: it may have too many."""
    values = tl.zeros((ROWS, BLOCK), tl.float32) + float("nan")
    rows = tl.arange(0, ROWS)
    ptr += tl.full((), 1, tl.int64) * first * step
    for start in range(row, count, tl.num_programs(0) * ROWS):
        _put(ptr, values, start, rows, count, step, WIDTH, BLOCK)


@triton.jit
def _rows(
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
def _put(ptr, values, first, rows, count, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    places = ptr + (first + rows).to(tl.int64)[:, None] * step + columns[None, :]
    tl.store(places, values, mask=(rows < count - first)[:, None] & (columns[None, :] < WIDTH))


@triton.jit
def shifts(
    dout_ptr, out_ptr, dlse_ptr, shift_ptr, tokens, dout_sequence, dout_token, dout_head, out_sequence, out_token,
    out_head, shift_sequence, shift_token, shift_head,
    VALUE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """sum(dout · out) - dlse of every query and head."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (token < tokens)[:, None] & (columns < VALUE)
    dout_ptr += sequence * dout_sequence + head * dout_head
    out_ptr += sequence * out_sequence + head * out_head
    dout = tl.load(dout_ptr + token[:, None] * dout_token + columns, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + token[:, None] * out_token + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.sum(dout * out, axis=1)
    place = sequence * shift_sequence + head * shift_head + token * shift_token
    if dlse_ptr is not None:
        shift -= tl.load(dlse_ptr + place, mask=token < tokens, other=0.0)
    tl.store(shift_ptr + place, shift, mask=token < tokens)


@triton.jit
def _lse(ptr, first, rows, count):
    """In base 2; +inf for queries that see nothing or are not there, whose weights are zero so."""
    lse = tl.load(ptr + first + rows, mask=rows < count - first, other=-float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse * LOG2E)


@triton.jit
def key_gradients(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, shift_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, queries, keys, tokens,
    key_tokens, scale,
    q_sequence, q_token, q_head, k_sequence, k_token, k_head, v_sequence, v_token, v_head, dout_sequence, dout_token,
    dout_head, dk_sequence, dk_token, dk_head, dv_sequence, dv_token, dv_head, lse_sequence, lse_head,
    PER: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, from every head that shares them; the first keys, which most queries see, first.

    One loop over heads and queries, masked throughout: one for each head, or one without masks, would spill registers.
    """
    key, group, sequence = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_query, first_key = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if cu_q_ptr is not None:
        first_query, queries, sound = _span(cu_q_ptr, sequence, queries, tokens)
        first_key, keys, known = _span(cu_k_ptr, sequence, keys, key_tokens)
        if not (sound & known):
            _spoil(dk_ptr + group * dk_head, first_key, key, keys, dk_token, SIZE, BLOCK_D, ROWS)
            _spoil(dv_ptr + group * dv_head, first_key, key, keys, dv_token, VALUE, BLOCK_E, ROWS)
            return
    if key < keys:
        wide = tl.full((), 1, tl.int64)
        k_ptr += sequence * k_sequence + group * k_head + wide * first_key * k_token
        v_ptr += sequence * v_sequence + group * v_head + wide * first_key * v_token
        q_ptr += sequence * q_sequence + group * PER * q_head + wide * first_query * q_token
        dout_ptr += sequence * dout_sequence + group * PER * dout_head + wide * first_query * dout_token
        lse_ptr += sequence * lse_sequence + group * PER * lse_head + first_query
        shift_ptr += sequence * lse_sequence + group * PER * lse_head + first_query
        row, column = tl.arange(0, ROWS), tl.arange(0, STEP)
        k = _rows(k_ptr, key, row, keys, k_token, SIZE, BLOCK_D, FAR, False)
        v = _rows(v_ptr, key, row, keys, v_token, VALUE, BLOCK_E, FAR, False)
        dk, dv = tl.zeros((ROWS, BLOCK_D), tl.float32), tl.zeros((ROWS, BLOCK_E), tl.float32)
        start, logit = 0, scale * LOG2E
        if CAUSAL:
            start = tl.minimum(tl.maximum(key - keys + queries, 0), queries) // STEP * STEP
        blocks = tl.cdiv(queries - start, STEP)
        for i in range(PER * blocks):
            head, first = wide * (i // blocks), start + i % blocks * STEP
            q = _rows(q_ptr + head * q_head, first, column, queries, q_token, SIZE, BLOCK_D, FAR, False)
            dout = _rows(dout_ptr + head * dout_head, first, column, queries, dout_token, VALUE, BLOCK_E, FAR, False)
            lse = _lse(lse_ptr + head * lse_head, first, column, queries)
            shift = tl.load(shift_ptr + head * lse_head + first + column, mask=column < queries - first, other=0.0)
            weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * logit - lse[None, :])
            if CAUSAL:
                away = row[:, None] - column[None, :]
                weights = tl.where(away <= keys - queries + first - key, weights, 0.0)
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
            grad = weights * (tl.dot(v, tl.trans(dout), input_precision="ieee") - shift[None, :])
            dk = tl.dot(grad.to(q.dtype), q, dk, input_precision="ieee")
        dk_ptr += sequence * dk_sequence + group * dk_head + wide * first_key * dk_token
        dv_ptr += sequence * dv_sequence + group * dv_head + wide * first_key * dv_token
        _put(dk_ptr, dk * scale, key, row, keys, dk_token, SIZE, BLOCK_D)
        _put(dv_ptr, dv, key, row, keys, dv_token, VALUE, BLOCK_E)


@triton.jit
def _query_sums(
    dq, q, dout, lse, shift, k_ptr, v_ptr, start, end, keys, place, logit, k_token, v_token,
    SIZE: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Adds what the keys from start to end, all of them or masked, give to dq."""
    rows = tl.arange(0, STEP)
    for first in range(start, end, STEP):
        k = _rows(k_ptr, first, rows, keys, k_token, SIZE, BLOCK_D, FAR, not MASKED)
        v = _rows(v_ptr, first, rows, keys, v_token, VALUE, BLOCK_E, FAR, not MASKED)
        weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision="ieee") * logit - lse[:, None])
        if MASKED:
            kept = rows[None, :] < keys - first
            if CAUSAL:
                kept = kept & (first + rows[None, :] <= place[:, None])
            weights = tl.where(kept, weights, 0.0)
        grad = weights * (tl.dot(dout, tl.trans(v), input_precision="ieee") - shift[:, None])
        dq = tl.dot(grad.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def query_gradients(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, shift_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, queries, keys, tokens,
    key_tokens, scale,
    q_sequence, q_token, q_head, k_sequence, k_token, k_head, v_sequence, v_token, v_head, dout_sequence, dout_token,
    dout_head, dq_sequence, dq_token, dq_head, lse_sequence, lse_head,
    PER: tl.constexpr, SIZE: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, CAUSAL: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries; the last ones, which see most keys, first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head, sequence = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_query, first_key = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if cu_q_ptr is not None:
        first_query, queries, sound = _span(cu_q_ptr, sequence, queries, tokens)
        first_key, keys, known = _span(cu_k_ptr, sequence, keys, key_tokens)
        if not (sound & known):
            _spoil(dq_ptr + head * dq_head, first_query, first, queries, dq_token, SIZE, BLOCK_D, ROWS)
            return
    if first < queries:
        wide = tl.full((), 1, tl.int64)
        rows = tl.arange(0, ROWS)
        q_ptr += sequence * q_sequence + head * q_head + wide * first_query * q_token
        dout_ptr += sequence * dout_sequence + head * dout_head + wide * first_query * dout_token
        q = _rows(q_ptr, first, rows, queries, q_token, SIZE, BLOCK_D, FAR, False)
        dout = _rows(dout_ptr, first, rows, queries, dout_token, VALUE, BLOCK_E, FAR, False)
        lse_ptr += sequence * lse_sequence + head * lse_head + first_query
        lse = _lse(lse_ptr, first, rows, queries)
        shift_ptr += sequence * lse_sequence + head * lse_head + first_query
        shift = tl.load(shift_ptr + first + rows, mask=rows < queries - first, other=0.0)
        k_ptr += sequence * k_sequence + head // PER * k_head + wide * first_key * k_token
        v_ptr += sequence * v_sequence + head // PER * v_head + wide * first_key * v_token
        place = first + keys - queries
        _, _, outer, end = key_range(place, tl.minimum(place + ROWS, keys) - 1, keys, 0, STEP, CAUSAL, False)
        dq = tl.zeros((ROWS, BLOCK_D), tl.float32)
        dq = _query_sums(
            dq, q, dout, lse, shift, k_ptr, v_ptr, 0, outer, keys, place + rows, scale * LOG2E, k_token, v_token,
            SIZE, VALUE, BLOCK_D, BLOCK_E, STEP, False, CAUSAL, FAR,
        )  # fmt: skip
        dq = _query_sums(
            dq, q, dout, lse, shift, k_ptr, v_ptr, outer, end, keys, place + rows, scale * LOG2E, k_token, v_token,
            SIZE, VALUE, BLOCK_D, BLOCK_E, STEP, True, CAUSAL, FAR,
        )  # fmt: skip
        dq_ptr += sequence * dq_sequence + head * dq_head + wide * first_query * dq_token
        _put(dq_ptr, dq * scale, first, rows, queries, dq_token, SIZE, BLOCK_D)


@triton.jit
def clear(ptr, cu_ptr, sequences, tokens, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the rows, `width` long, of tokens of no sequence."""
    last = tl.load(cu_ptr + sequences, mask=sequences > 0, other=0)
    token = tl.program_id(0) * ROWS
    if token + ROWS > last:
        rows = token + tl.arange(0, ROWS)
        outside = (rows < tokens) & (rows >= last)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            places = ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
            mask = outside[:, None] & (columns < width)[None, :]
            tl.store(places, tl.zeros((ROWS, BLOCK), ptr.dtype.element_ty), mask=mask)
