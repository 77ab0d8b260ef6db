"""Blocks of queries and of keys for attention on the CPU: where they are, their scores, the online softmax of a row.

The query heads that share a key are rows of one block: row r is head r % group of token r // group. Keys may lie in
tensors, in packed sequences or in the pages of a cache.
"""

from typing import Any, NamedTuple

import numpy as np

from tilery.languages.numba_elements import FP32, at, exp, f32, integer, load, rank, row_max, store, unrank
from tilery.languages.numba_glue import jit
from tilery.ops.attention.numba.products import (
    BLOCK,
    BYTES,
    add_product,
    add_scaled,
    dot,
    fill,
    pack_left_row,
    pack_right_column,
    pack_right_row,
    store_product,
    widen,
)

NEG_INF, NAN = f32(-np.inf), f32(np.nan)
_DOT_ROWS = 8  # up to so many rows take dot products


class Arguments(NamedTuple):
    """All that a kernel is given, in groups; forward.py says what is in them."""

    tensors: Any
    strides: Any
    sizes: Any
    scoring: Any
    dtypes: Any


class Block(NamedTuple):
    """Rows of queries of one sequence, and the keys that they see."""

    sequence: int
    kv_head: int
    first_query: int  # the sequence's first token, among packed ones
    first_key: int
    queries: int
    position: int  # of the sequence's first query among its keys
    row: int
    rows: int
    low: int
    high: int
    valid: bool  # or the rows of the sequence are NaN: see indices.py


class Buffers(NamedTuple):
    """Addresses of a core's own buffers, all fp32."""

    queries: int
    scores: int
    panels: int
    acc: int
    row_max: int
    row_sum: int
    line: int
    rows: int  # how many there is room for
    pitch: int  # of acc


# Where things are


@jit
def packed_span(cu_seqlens, sequence, tokens, longest):
    """First token and number of tokens of a packed sequence, inside of what is there, and whether it is valid."""
    first, last = integer(cu_seqlens, sequence, 4), integer(cu_seqlens, sequence + 1, 4)
    start = min(max(first, 0), tokens) if sequence > 0 else 0
    end = min(max(last, start), tokens)
    return start, end - start, start == first and end == last and end - start <= longest


@jit
def packed_end(cu_seqlens, sequences, tokens):
    """The first token that no packed sequence has."""
    return min(max(integer(cu_seqlens, sequences, 4), 0), tokens) if sequences > 0 else 0


@jit
def find_block(sequence, kv_head, row, rows, p):
    """Return the block of at most `rows` rows from `row` on; no rows past the sequence, no keys where it is invalid."""
    tensors, sizes, scoring = p.tensors, p.sizes, p.scoring
    first_query, queries, first_key, keys = 0, sizes.queries, 0, sizes.keys
    valid, known = True, True
    if tensors.cu_q != 0:
        first_query, queries, valid = packed_span(tensors.cu_q, sequence, sizes.packed, sizes.queries)
    if tensors.cu_k != 0:
        first_key, keys, known = packed_span(tensors.cu_k, sequence, sizes.packed_keys, sizes.keys)
    if tensors.lengths != 0:
        length = integer(tensors.lengths, sequence, 4)
        keys, known = length, 0 <= length <= keys
    valid = valid and known
    keys = keys if valid else 0
    rows = max(min(rows, queries * sizes.group - row), 0)
    position = keys - queries
    low, high, last = 0, keys, position + (row + rows - 1) // sizes.group
    if scoring.causal:
        high = min(high, last + 1)
    if scoring.window:
        low = max(position + row // sizes.group - scoring.window + 1, 0)
        high = min(high, last + scoring.window)
    return Block(sequence, kv_head, first_query, first_key, queries, position, row, rows, low, high, valid)


@jit
def head_and_token(row, block, p):
    row += block.row
    return block.kv_head * p.sizes.group + row % p.sizes.group, row // p.sizes.group


@jit
def address(tensor, strides, sequence, token, head):
    by_sequence, by_token, by_head = strides
    return tensor + sequence * by_sequence + token * by_token + head * by_head


@jit
def _page_and_token(key, block, p):
    if p.sizes.page == 0:
        return block.sequence, block.first_key + key
    page = integer(p.tensors.table + block.sequence * p.strides.table, key // p.sizes.page, 4)
    return page if 0 <= page < p.sizes.pages else -1, key % p.sizes.page


@jit
def _load_key(key, target, block, p):
    """A key of a page that is not there is NaN, and so are the rows that see it."""
    page, token = _page_and_token(key, block, p)
    if page < 0:
        fill(target, p.sizes.k + p.sizes.k_rope, NAN)
        return
    widen(address(p.tensors.k, p.strides.k, page, token, block.kv_head), target, p.sizes.k, f32(1), p.dtypes.k)
    if p.sizes.k_rope:
        rope = address(p.tensors.k_rope, p.strides.k_rope, page, token, block.kv_head)
        widen(rope, at(target, p.sizes.k, FP32), p.sizes.k_rope, f32(1), p.dtypes.k)


@jit
def _load_value(key, target, block, p):
    page, token = _page_and_token(key, block, p)
    if page < 0:
        fill(target, p.sizes.v, f32(0))  # rows that do not see it add 0 times this
        return
    widen(address(p.tensors.v, p.strides.v, page, token, block.kv_head), target, p.sizes.v, f32(1), p.dtypes.k)


@jit
def _load_query(row, target, factor, block, p):
    head, token = head_and_token(row, block, p)
    token += block.first_query
    widen(address(p.tensors.q, p.strides.q, block.sequence, token, head), target, p.sizes.q, factor, p.dtypes.q)
    if p.sizes.q_rope:
        rope = address(p.tensors.q_rope, p.strides.q_rope, block.sequence, token, head)
        widen(rope, at(target, p.sizes.q, FP32), p.sizes.q_rope, factor, p.dtypes.q)


@jit
def load_queries(buffers, block, p):
    """Queries times the scale, and times the scales of fp8."""
    factor = f32(p.scoring.scale)
    if p.tensors.q_scale != 0:
        factor *= load(p.tensors.q_scale, 0, FP32)
    if p.tensors.k_scale != 0:
        factor *= load(p.tensors.k_scale, block.kv_head * p.strides.k_scale, FP32)
    for row in range(block.rows):
        _load_query(row, buffers.line, factor, block, p)
        pack_left_row(buffers.line, buffers.queries, row, buffers.rows, p.sizes.q + p.sizes.q_rope)


# Scores


@jit
def tanh(x):
    """Near 0 by its series: the difference of exponentials would lose digits there."""
    square = x * x
    series = ((f32(62 / 2835) * square - f32(17 / 315)) * square + f32(2 / 15)) * square - f32(1 / 3)
    near = x + x * square * series
    far = f32(1) - f32(2) / (exp(x + x) + f32(1))
    return near if abs(x) < f32(0.3) else far


@jit
def _soft_cap(scores, count, softcap):
    for j in range(count):
        store(scores, j, softcap * tanh(load(scores, j, FP32) / softcap), FP32)


@jit
def _gather(row, first, line, count, step, size, dtype):
    """Elements of `size` bytes from `first` on, `step` bytes apart."""
    if step == size:
        widen(row + first * step, line, count, f32(1), dtype)
    else:
        for j in range(count):
            widen(row + (first + j) * step, at(line, j, FP32), 1, f32(1), dtype)


@jit
def _add_terms(scores, first, count, head, token, line, block, p):
    """What is done to the scores of keys from `first` on besides the product; what is masked becomes -inf."""
    if p.scoring.softcap != 0:
        _soft_cap(scores, count, f32(p.scoring.softcap))
    if p.tensors.slopes != 0:
        slope, away = load(p.tensors.slopes, head, FP32), first - block.position - token
        for j in range(count):
            store(scores, j, load(scores, j, FP32) + slope * f32(away + j), FP32)
    if p.tensors.bias != 0:
        row = address(p.tensors.bias, p.strides.bias, block.sequence, token, head)
        _gather(row, first, line, count, p.strides.bias_key, 4 if p.dtypes.bias == 0 else 2, p.dtypes.bias)
        add_scaled(scores, line, count, f32(1))
    if p.tensors.key_mask != 0:
        mask = p.tensors.key_mask + block.sequence * p.strides.key_mask
        _gather(mask, first, line, count, p.strides.key_mask_key, 1, BYTES)
        for j in range(count):
            store(scores, j, load(scores, j, FP32) if load(line, j, FP32) != f32(0) else NEG_INF, FP32)


@jit
def _visible(position, first, count, scoring):
    """Which of `count` keys from `first` on the query at `position` sees."""
    low, high = 0, count
    if scoring.causal:
        high = min(high, position + 1 - first)
    if scoring.window:
        low, high = max(position - scoring.window + 1 - first, 0), min(high, position + scoring.window - first)
    low = min(low, count)
    return low, max(high, low)


@jit
def _exponentials(scores, count, base):
    """exp(scores - base) in place, and their sum."""
    total = f32(0)
    for j in range(count):
        p = exp(load(scores, j, FP32) - base)
        store(scores, j, p, FP32)
        total += p
    return total


@jit
def online_softmax(r, first, count, buffers, block, p):
    """A row's scores of keys from `first` on become P; its sums so far are rescaled to the new maximum."""
    head, token = head_and_token(r, block, p)
    row = at(buffers.scores, r * BLOCK, FP32)
    low, high = _visible(block.position + token, first, count, p.scoring)
    fill(row, low, f32(0))
    fill(at(row, high, FP32), count - high, f32(0))
    if low == high:
        return
    visible, width = at(row, low, FP32), high - low
    _add_terms(visible, first + low, width, head, token, buffers.line, block, p)
    old_max = load(buffers.row_max, r, FP32)
    new_max = unrank(max(rank(old_max), rank(row_max(visible, width, FP32))))
    base = f32(0) if new_max == NEG_INF else new_max
    rescale = exp(old_max - base)
    store(buffers.row_max, r, new_max, FP32)
    rescaled = load(buffers.row_sum, r, FP32) * rescale
    store(buffers.row_sum, r, rescaled + _exponentials(visible, width, base), FP32)
    if rescale != f32(1):
        acc = at(buffers.acc, r * buffers.pitch, FP32)
        for i in range(p.sizes.v):
            store(acc, i, load(acc, i, FP32) * rescale, FP32)


# Blocks of keys


@jit
def store_scores(first, count, buffers, block, p):
    """Few rows meet each key as it comes; more are multiplied with all of the keys at once."""
    depth, few = p.sizes.k + p.sizes.k_rope, block.rows <= _DOT_ROWS
    for j in range(count):
        _load_key(first + j, buffers.line, block, p)
        if not few:
            pack_right_column(buffers.line, buffers.panels, j, depth)
            continue
        for r in range(block.rows):
            total = f32(0)
            for start in range(0, depth, BLOCK):
                query = at(buffers.queries, start * buffers.rows + r * BLOCK, FP32)
                total += dot(query, at(buffers.line, start, FP32), min(BLOCK, depth - start))
            store(buffers.scores, r * BLOCK + j, total, FP32)
    if not few:
        store_product(buffers.queries, buffers.panels, buffers.scores, block.rows, buffers.rows, count, depth)


@jit
def add_values(first, count, buffers, block, p):
    """acc += P · values of keys from `first` on."""
    few = block.rows <= _DOT_ROWS
    for j in range(count):
        _load_value(first + j, buffers.line, block, p)
        if not few:
            pack_right_row(buffers.line, buffers.panels, j, p.sizes.v)
            continue
        for r in range(block.rows):
            probability = load(buffers.scores, r * BLOCK + j, FP32)
            add_scaled(at(buffers.acc, r * buffers.pitch, FP32), buffers.line, p.sizes.v, probability)
    if not few:
        add_product(
            buffers.scores, buffers.panels, buffers.acc, block.rows, p.sizes.v, count, BLOCK, buffers.pitch
        )  # fmt: skip
