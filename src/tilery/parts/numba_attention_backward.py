"""Gradients of attention on the CPU: a core takes a block of queries, or of keys, and walks over the other side.

Weights are computed in both walks, so that no two cores add to one sum: every run gives the same bits.
"""

import numpy as np
from numba import prange

from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, at, exp, f32, load, store
from tilery.parts.numba_attention_blocks import NAN, address, packed_end
from tilery.parts.numba_attention_pieces import BLOCK, fill, narrow
from tilery.parts.numba_attention_sides import (
    Strides,
    Task,
    Walk,
    add_columns,
    find_room,
    lay_rows,
    multiply_columns,
    span,
    wide,
)

# Weights and their gradients


@numba_glue.jit
def _seen(i, first, count, walk, p):
    """Which of the columns from `first` on row i sees."""
    if not p.sizes.causal:
        return 0, count
    place = walk.keys - walk.queries
    if walk.by_key:
        low = (walk.row + i - place) * p.sizes.per - first
        return min(max(low, 0), count), count
    high = place + (walk.row + i) // p.sizes.per + 1 - first
    return 0, min(max(high, 0), count)


@numba_glue.jit
def _weigh(i, first, count, walk, room, p):
    """A row's scores become weights, and its products with values the gradients of scores."""
    weights, grads = at(room.weights, i * BLOCK, FP32), at(room.grads, i * BLOCK, FP32)
    low, high = _seen(i, first, count, walk, p)
    fill(weights, low, f32(0))
    fill(at(weights, high, FP32), count - high, f32(0))
    if walk.by_key:
        for j in range(low, high):
            store(weights, j, exp(load(weights, j, FP32) - load(room.lses, j, FP32)), FP32)
        for j in range(count):
            store(grads, j, load(weights, j, FP32) * (load(grads, j, FP32) - load(room.shifts, j, FP32)), FP32)
    else:
        lse, shift = load(room.lses, i, FP32), load(room.shifts, i, FP32)
        for j in range(low, high):
            store(weights, j, exp(load(weights, j, FP32) - lse), FP32)
        for j in range(count):
            store(grads, j, load(weights, j, FP32) * (load(grads, j, FP32) - shift), FP32)


@numba_glue.jit
def _columns(walk, p):
    """The other side, as far as any of the rows sees it."""
    place, total = walk.keys - walk.queries, walk.queries * p.sizes.per
    if walk.by_key:
        low = max(walk.row - place, 0) * p.sizes.per if p.sizes.causal else 0
        return min(low, total) // BLOCK * BLOCK, total
    last = place + (walk.row + walk.rows - 1) // p.sizes.per
    return 0, min(walk.keys, max(last + 1, 0)) if p.sizes.causal else walk.keys


@numba_glue.jit
def _write(walk, room, p):
    head, value, kind = p.sizes.head, p.sizes.value, p.sizes.kind
    for i in range(walk.rows):
        sums = at(room.head_sums, i * wide(head), FP32)
        if walk.by_key:
            token = walk.first_key + walk.row + i
            # The columns were q times the scale.
            narrow(sums, address(p.tensors.dk, p.strides.dk, walk.sequence, token, walk.group), head, f32(1), kind)
            sums = at(room.value_sums, i * wide(value), FP32)
            narrow(sums, address(p.tensors.dv, p.strides.dv, walk.sequence, token, walk.group), value, f32(1), kind)
        else:
            row = walk.row + i
            token, h = walk.first_query + row // p.sizes.per, walk.group * p.sizes.per + row % p.sizes.per
            narrow(sums, address(p.tensors.dq, p.strides.dq, walk.sequence, token, h), head, f32(p.scale), kind)


@numba_glue.jit
def _walk(walk, room, p):
    fill(room.head_sums, room.rows * wide(p.sizes.head), f32(0))
    fill(room.value_sums, room.rows * wide(p.sizes.value), f32(0))
    lay_rows(walk, room, p)
    start, end = _columns(walk, p)
    for first in range(start, end, BLOCK):
        count = min(BLOCK, end - first)
        multiply_columns(first, count, walk, room, p)
        for i in range(walk.rows):
            _weigh(i, first, count, walk, room, p)
        add_columns(first, count, walk, room, p)
    _write(walk, room, p)


@numba_glue.jit
def _spoil(step, walk, room, p):
    """NaN for a cut sequence's rows: those of this block and, as there may be more than declared, every `step`-th."""
    end = walk.keys if walk.by_key else walk.queries * p.sizes.per
    fill(room.head_sums, room.rows * wide(p.sizes.head), NAN)
    fill(room.value_sums, room.rows * wide(p.sizes.value), NAN)
    for row in range(walk.row, end, step):
        rows = min(room.rows, end - row)
        where = walk.sequence, walk.group, walk.first_query, walk.first_key, walk.queries, walk.keys
        _write(Walk(walk.by_key, *where, row, rows), room, p)


@numba_glue.jit
def _unit(unit, blocks, by_key, room, p):
    """Later queries, which see more, and earlier keys, which more queries see, come first."""
    pairs = p.sizes.batch * p.sizes.groups
    pair, block = unit % pairs, unit // pairs
    sequence, group = pair // p.sizes.groups, pair % p.sizes.groups
    first_query, queries, sound = span(p.tensors.cu_q, sequence, p.sizes.queries, p.sizes.packed_queries)
    first_key, keys, known = span(p.tensors.cu_k, sequence, p.sizes.keys, p.sizes.packed_keys)
    row = (block if by_key else blocks - 1 - block) * room.rows
    rows = min(room.rows, (keys if by_key else queries * p.sizes.per) - row)
    if not (sound and known):
        walk = Walk(by_key, sequence, group, first_query, first_key, queries, keys, row, rows)
        _spoil(blocks * room.rows, walk, room, p)
    elif rows > 0:
        _walk(Walk(by_key, sequence, group, first_query, first_key, queries, keys, row, rows), room, p)


@numba_glue.jit
def _clear(first, step, tensor, steps, cu, tokens, heads, size, room, p):
    """Zeros for every `step`-th of the packed tokens that no sequence has."""
    fill(room.line, size, f32(0))
    for token in range(packed_end(cu, p.sizes.batch, tokens) + first, tokens, step):
        for head in range(heads):
            narrow(room.line, address(tensor, steps, 0, token, head), size, f32(1), p.sizes.kind)


@numba_glue.jit
def _part(thread, threads, work, rows, tensors, s, sizes, scale):
    """Every so many of the units, in buffers of its own."""
    strides = Strides(s[0:3], s[3:6], s[6:9], s[9:12], s[12:15], s[15:18], s[18:21], s[21:24], s[24:27])
    p = Task(tensors, strides, sizes, scale)
    room, pairs = find_room(work, rows, sizes), sizes.batch * sizes.groups
    of_queries, of_keys = (sizes.queries * sizes.per + rows - 1) // rows, (sizes.keys + rows - 1) // rows
    for unit in range(thread, pairs * (of_queries + of_keys), threads):
        by_key = unit >= pairs * of_queries
        blocks = of_keys if by_key else of_queries
        _unit(unit - pairs * of_queries if by_key else unit, blocks, by_key, room, p)
    if sizes.packed_queries or sizes.packed_keys:
        heads, queries, keys = sizes.groups * sizes.per, sizes.packed_queries, sizes.packed_keys
        _clear(thread, threads, tensors.dq, strides.dq, tensors.cu_q, queries, heads, sizes.head, room, p)
        _clear(thread, threads, tensors.dk, strides.dk, tensors.cu_k, keys, sizes.groups, sizes.head, room, p)
        _clear(thread, threads, tensors.dv, strides.dv, tensors.cu_k, keys, sizes.groups, sizes.value, room, p)


@numba_glue.kernel
def gradients(threads, work, size, rows, tensors, strides, sizes, scale, dtype):
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _part(thread, threads, at(work, thread * size, FP32), rows, tensors, strides, sizes, scale)
    else:
        one = threads - 1  # not a literal: for that all would be compiled once more
        _part(one, threads, work, rows, tensors, strides, sizes, scale)
