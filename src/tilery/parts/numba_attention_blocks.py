"""Blocks of queries and of keys for attention on the CPU: where they are, their scores and weights.

The query heads that share a key are rows of one block: row r is head r % per of token r // per. Keys may lie in
tensors, in packed sequences or in the pages of a cache.
"""

from typing import NamedTuple

import numpy as np

from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, at, exp, f32, integer, load, rank, store, unrank
from tilery.parts.numba_attention_pieces import (
    BLOCK,
    BYTES,
    FEW,
    add_product,
    add_scaled,
    dot,
    fill,
    lay_across,
    lay_along,
    lay_row,
    put_product,
    widen,
)
from tilery.parts.numba_softmax import row_top

NOTHING, NAN = f32(-np.inf), f32(np.nan)


class Block(NamedTuple):
    """Rows of queries of one sequence, and the keys that they see."""

    sequence: int
    group: int
    first_query: int  # the sequence's first token, among packed ones
    first_key: int
    queries: int
    place: int  # of the sequence's first query among its keys
    row: int
    rows: int
    low: int
    high: int
    sound: bool  # or the sequence is cut, and its rows are NaN: see attention_indices.py


class Room(NamedTuple):
    """Addresses of a core's own buffers, all fp32."""

    queries: int
    scores: int
    panels: int
    sums: int
    tops: int
    totals: int
    line: int
    rows: int  # how many there is room for
    pitch: int  # of sums


# Where things are


@numba_glue.jit
def packed_span(ends, sequence, tokens, most):
    """First token and number of tokens of a packed sequence, inside of what is there, and whether it is sound."""
    first, last = integer(ends, sequence, 4), integer(ends, sequence + 1, 4)
    start = min(max(first, 0), tokens) if sequence > 0 else 0
    end = min(max(last, start), tokens)
    return start, end - start, start == first and end == last and end - start <= most


@numba_glue.jit
def packed_end(ends, sequences, tokens):
    """The first token that no packed sequence has."""
    return min(max(integer(ends, sequences, 4), 0), tokens) if sequences > 0 else 0


@numba_glue.jit
def find_block(sequence, group, row, rows, p):
    """Return the block of at most `rows` rows from `row` on; no rows past the sequence, no keys where it is cut."""
    tensors, sizes, rules = p.tensors, p.sizes, p.rules
    first_query, queries, first_key, keys = 0, sizes.queries, 0, sizes.keys
    sound, known = True, True
    if tensors.cu_q != 0:
        first_query, queries, sound = packed_span(tensors.cu_q, sequence, sizes.packed, sizes.queries)
    if tensors.cu_k != 0:
        first_key, keys, known = packed_span(tensors.cu_k, sequence, sizes.packed_keys, sizes.keys)
    if tensors.lengths != 0:
        length = integer(tensors.lengths, sequence, 4)
        keys, known = length, 0 <= length <= keys
    sound = sound and known
    keys = keys if sound else 0
    rows = max(min(rows, queries * sizes.per - row), 0)
    place = keys - queries
    low, high, last = 0, keys, place + (row + rows - 1) // sizes.per
    if rules.causal:
        high = min(high, last + 1)
    if rules.window:
        low, high = max(place + row // sizes.per - rules.window + 1, 0), min(high, last + rules.window)
    return Block(sequence, group, first_query, first_key, queries, place, row, rows, low, high, sound)


@numba_glue.jit
def head_and_token(row, block, p):
    row += block.row
    return block.group * p.sizes.per + row % p.sizes.per, row // p.sizes.per


@numba_glue.jit
def address(tensor, steps, sequence, token, head):
    by_sequence, by_token, by_head = steps
    return tensor + sequence * by_sequence + token * by_token + head * by_head


@numba_glue.jit
def _page_and_token(key, block, p):
    if p.sizes.page == 0:
        return block.sequence, block.first_key + key
    page = integer(p.tensors.table + block.sequence * p.strides.table, key // p.sizes.page, 4)
    return page if 0 <= page < p.sizes.pages else -1, key % p.sizes.page


@numba_glue.jit
def load_key(key, target, block, p):
    """A key of a page that is not there is NaN, and so are the rows that see it."""
    page, token = _page_and_token(key, block, p)
    if page < 0:
        fill(target, p.sizes.k + p.sizes.k_rest, NAN)
        return
    widen(address(p.tensors.k, p.strides.k, page, token, block.group), target, p.sizes.k, f32(1), p.kinds.k)
    if p.sizes.k_rest:
        rest = address(p.tensors.k_rest, p.strides.k_rest, page, token, block.group)
        widen(rest, at(target, p.sizes.k, FP32), p.sizes.k_rest, f32(1), p.kinds.k)


@numba_glue.jit
def load_value(key, target, block, p):
    page, token = _page_and_token(key, block, p)
    if page < 0:
        fill(target, p.sizes.v, f32(0))  # those that do not see it add 0 times this
        return
    widen(address(p.tensors.v, p.strides.v, page, token, block.group), target, p.sizes.v, f32(1), p.kinds.k)


@numba_glue.jit
def load_query(row, target, factor, block, p):
    head, token = head_and_token(row, block, p)
    token += block.first_query
    widen(address(p.tensors.q, p.strides.q, block.sequence, token, head), target, p.sizes.q, factor, p.kinds.q)
    if p.sizes.q_rest:
        rest = address(p.tensors.q_rest, p.strides.q_rest, block.sequence, token, head)
        widen(rest, at(target, p.sizes.q, FP32), p.sizes.q_rest, factor, p.kinds.q)


@numba_glue.jit
def load_queries(room, block, p):
    """Times the scale, and those of fp8."""
    factor = f32(p.rules.scale)
    if p.tensors.q_scale != 0:
        factor *= load(p.tensors.q_scale, 0, FP32)
    if p.tensors.k_scale != 0:
        factor *= load(p.tensors.k_scale, block.group * p.strides.k_scale, FP32)
    for row in range(block.rows):
        load_query(row, room.line, factor, block, p)
        lay_row(room.line, room.queries, row, room.rows, p.sizes.q + p.sizes.q_rest)


# Scores and weights


@numba_glue.jit
def _tanh(x):
    """Near 0 by its series: the difference of exponentials would lose digits there."""
    square = x * x
    series = ((f32(62 / 2835) * square - f32(17 / 315)) * square + f32(2 / 15)) * square - f32(1 / 3)
    near = x + x * square * series
    far = f32(1) - f32(2) / (exp(x + x) + f32(1))
    return near if abs(x) < f32(0.3) else far


@numba_glue.jit
def _bend(scores, count, softcap):
    for j in range(count):
        store(scores, j, softcap * _tanh(load(scores, j, FP32) / softcap), FP32)


@numba_glue.jit
def _gather(row, first, line, count, step, size, kind):
    """Elements of `size` bytes from `first` on, `step` bytes apart."""
    if step == size:
        widen(row + first * step, line, count, f32(1), kind)
    else:
        for j in range(count):
            widen(row + (first + j) * step, at(line, j, FP32), 1, f32(1), kind)


@numba_glue.jit
def _add_terms(scores, first, count, head, token, line, block, p):
    """What comes to the scores of keys from `first` on besides the product; what is masked becomes -inf."""
    if p.rules.softcap != 0:
        _bend(scores, count, f32(p.rules.softcap))
    if p.tensors.slopes != 0:
        slope, away = load(p.tensors.slopes, head, FP32), first - block.place - token
        for j in range(count):
            store(scores, j, load(scores, j, FP32) + slope * f32(away + j), FP32)
    if p.tensors.bias != 0:
        row = address(p.tensors.bias, p.strides.bias, block.sequence, token, head)
        _gather(row, first, line, count, p.strides.bias_key, 4 if p.kinds.bias == 0 else 2, p.kinds.bias)
        add_scaled(scores, line, count, f32(1))
    if p.tensors.seen != 0:
        _gather(p.tensors.seen + block.sequence * p.strides.seen, first, line, count, p.strides.seen_key, 1, BYTES)
        for j in range(count):
            store(scores, j, load(scores, j, FP32) if load(line, j, FP32) != f32(0) else NOTHING, FP32)


@numba_glue.jit
def span(place, first, count, rules):
    """Which of `count` keys from `first` on the query at `place` sees."""
    low, high = 0, count
    if rules.causal:
        high = min(high, place + 1 - first)
    if rules.window:
        low, high = max(place - rules.window + 1 - first, 0), min(high, place + rules.window - first)
    low = min(low, count)
    return low, max(high, low)


@numba_glue.jit
def _weigh(scores, count, base):
    total = f32(0)
    for j in range(count):
        weight = exp(load(scores, j, FP32) - base)
        store(scores, j, weight, FP32)
        total += weight
    return total


@numba_glue.jit
def weigh_row(r, first, count, room, block, p):
    """A row's scores of keys from `first` on become weights; its sums so far are brought to the new maximum."""
    head, token = head_and_token(r, block, p)
    row = at(room.scores, r * BLOCK, FP32)
    low, high = span(block.place + token, first, count, p.rules)
    fill(row, low, f32(0))
    fill(at(row, high, FP32), count - high, f32(0))
    if low == high:
        return
    seen, width = at(row, low, FP32), high - low
    _add_terms(seen, first + low, width, head, token, room.line, block, p)
    before = load(room.tops, r, FP32)
    top = unrank(max(rank(before), rank(row_top(seen, width, FP32))))
    base = f32(0) if top == NOTHING else top
    shrink = exp(before - base)
    store(room.tops, r, top, FP32)
    store(room.totals, r, load(room.totals, r, FP32) * shrink + _weigh(seen, width, base), FP32)
    if shrink != f32(1):
        sums = at(room.sums, r * room.pitch, FP32)
        for i in range(p.sizes.v):
            store(sums, i, load(sums, i, FP32) * shrink, FP32)


# Blocks of keys


@numba_glue.jit
def put_scores(first, count, room, block, p):
    """Few rows meet each key as it comes; more are multiplied with all of the keys at once."""
    depth, few = p.sizes.k + p.sizes.k_rest, block.rows <= FEW
    for j in range(count):
        load_key(first + j, room.line, block, p)
        if not few:
            lay_across(room.line, room.panels, j, depth)
            continue
        for r in range(block.rows):
            total = f32(0)
            for start in range(0, depth, BLOCK):
                query = at(room.queries, start * room.rows + r * BLOCK, FP32)
                total += dot(query, at(room.line, start, FP32), min(BLOCK, depth - start))
            store(room.scores, r * BLOCK + j, total, FP32)
    if not few:
        put_product(room.queries, room.panels, room.scores, block.rows, room.rows, count, depth)


@numba_glue.jit
def add_values(first, count, room, block, p):
    few = block.rows <= FEW
    for j in range(count):
        load_value(first + j, room.line, block, p)
        if not few:
            lay_along(room.line, room.panels, j, p.sizes.v)
            continue
        for r in range(block.rows):
            weight = load(room.scores, r * BLOCK + j, FP32)
            add_scaled(at(room.sums, r * room.pitch, FP32), room.line, p.sizes.v, weight)
    if not few:
        add_product(room.scores, room.panels, room.sums, block.rows, p.sizes.v, count, BLOCK, room.pitch)
