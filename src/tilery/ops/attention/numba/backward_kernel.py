"""The kernel of attention_backward on the CPU: a core keeps queries, or keys, and streams the other side past them.

P is computed for both sides, so that no two cores add to one sum: every run gives the same bits. The query heads that
share a key are rows of one block: row r is head r % group of token r // group.
"""

import numpy as np
from numba import prange

from tilery.languages.numba_elements import FP32, at, exp, f32, load, store
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.attention.numba.backward_arguments import Arguments, Side, Sizes, Strides, Tensors, core_buffers
from tilery.ops.attention.numba.blocks import NAN, address, packed_end, packed_span, tanh
from tilery.ops.attention.numba.products import (
    BLOCK,
    add_product,
    dot,
    fill,
    narrow,
    pack_left_row,
    pack_right_column,
    pack_right_row,
    padded_size,
    store_product,
    widen,
)

# Rows and columns


@jit
def _span(cu_seqlens, sequence, count, tokens):
    """First token and number of tokens of a sequence, and whether it is valid; `tokens` are all packed ones."""
    if cu_seqlens == 0:
        return 0, count, True
    return packed_span(cu_seqlens, sequence, tokens, count)


@jit
def _load_sums(i, side, token, head, buffers, p):
    """A query's lse, and delta = sum(dout · out) - dlse, become the i-th; its dout is in the other line."""
    lse = address(0, p.strides.lse, side.sequence, token, head)
    out = address(p.tensors.out, p.strides.out, side.sequence, token, head)
    widen(out, buffers.line, p.sizes.value, f32(1), p.sizes.dtype)
    delta = dot(buffers.line, buffers.other, p.sizes.value)
    if p.tensors.dlse != 0:
        delta -= load(p.tensors.dlse + lse, 0, FP32)
    known = load(p.tensors.lse + lse, 0, FP32)
    store(buffers.lse, i, -known if known == f32(-np.inf) else known, FP32)  # +inf: P of 0
    store(buffers.delta, i, delta, FP32)


@jit
def _load(row, i, query, again, side, buffers, p):
    """A row of k, or of q times the scale, into the line; of v, or dout, into the other. `again`: nothing else."""
    sequence, strides, dtype = side.sequence, p.strides, p.sizes.dtype
    if query:
        token, head = side.first_query + row // p.sizes.group, side.kv_head * p.sizes.group + row % p.sizes.group
        heads = address(p.tensors.q, strides.q, sequence, token, head)
        values = address(p.tensors.dout, strides.dout, sequence, token, head)
    else:
        token, head = side.first_key + row, side.kv_head
        heads = address(p.tensors.k, strides.k, sequence, token, head)
        values = address(p.tensors.v, strides.v, sequence, token, head)
    widen(values, buffers.other, p.sizes.value, f32(1), dtype)
    if query and not again:
        _load_sums(i, side, token, head, buffers, p)
    widen(heads, buffers.line, p.sizes.head, f32(p.scale) if query else f32(1), dtype)


@jit
def _load_rows(side, buffers, p):
    for i in range(side.rows):
        _load(side.row + i, i, not side.by_key, False, side, buffers, p)
        pack_left_row(buffers.line, buffers.heads, i, buffers.rows, p.sizes.head)
        pack_left_row(buffers.other, buffers.values, i, buffers.rows, p.sizes.value)


@jit
def _multiply_columns(first, count, side, buffers, p):
    """Scores into p: rows of heads · columns of heads; the same of values into ds."""
    for j in range(count):
        _load(first + j, j, side.by_key, False, side, buffers, p)
        pack_right_column(buffers.line, buffers.head_panels, j, p.sizes.head)
        pack_right_column(buffers.other, buffers.value_panels, j, p.sizes.value)
    store_product(buffers.heads, buffers.head_panels, buffers.p, side.rows, buffers.rows, count, p.sizes.head)
    store_product(buffers.values, buffers.value_panels, buffers.ds, side.rows, buffers.rows, count, p.sizes.value)


@jit
def _add_columns(first, count, side, buffers, p):
    """Add ds · columns of heads and, for keys, P · columns of values to the sums."""
    head, value, rows = p.sizes.head, p.sizes.value, side.rows
    for j in range(count):
        _load(first + j, j, side.by_key, True, side, buffers, p)
        pack_right_row(buffers.line, buffers.head_panels, j, head)
        if side.by_key:
            pack_right_row(buffers.other, buffers.value_panels, j, value)
    add_product(buffers.ds, buffers.head_panels, buffers.head_sums, rows, head, count, BLOCK, padded_size(head))
    if side.by_key:
        add_product(buffers.p, buffers.value_panels, buffers.value_sums, rows, value, count, BLOCK, padded_size(value))


# P and the gradients of scores


@jit
def _visible(i, first, count, side, p):
    """Which of the columns from `first` on row i sees, or is seen by."""
    low, high, window, row = 0, count, p.sizes.window, side.row + i
    if side.by_key:
        query = row - side.keys + side.queries  # at the key's position
        if p.sizes.causal:
            low = query * p.sizes.group - first
        elif window:
            low = (query - window + 1) * p.sizes.group - first
        if window:
            high = (query + window) * p.sizes.group - first
    else:
        key = row // p.sizes.group + side.keys - side.queries - first  # at the query's position
        if p.sizes.causal:
            high = key + 1
        elif window:
            high = key + window
        if window:
            low = key - window + 1
    low = min(max(low, 0), count)
    return low, min(max(high, low), count)


@jit
def _soft_cap(row, ds, low, high, softcap):
    """Scores get a soft cap; what is to be their gradients, times its derivative: 4 e / (1 + e)², e = exp(-2 |x|)."""
    for j in range(low, high):
        x = load(row, j, FP32) / softcap
        small = exp(f32(-2) * abs(x))
        store(row, j, softcap * tanh(x), FP32)
        slope = f32(4) * small / ((f32(1) + small) * (f32(1) + small))
        store(ds, j, load(ds, j, FP32) * slope, FP32)


@jit
def _make_ds(i, first, count, side, buffers, p):
    """A row's scores become P, and its products with values the gradients of scores."""
    p_row, ds = at(buffers.p, i * BLOCK, FP32), at(buffers.ds, i * BLOCK, FP32)
    low, high = _visible(i, first, count, side, p)
    fill(p_row, low, f32(0))
    fill(at(p_row, high, FP32), count - high, f32(0))
    if side.by_key:
        for j in range(count):
            store(ds, j, load(ds, j, FP32) - load(buffers.delta, j, FP32), FP32)
    else:
        delta = load(buffers.delta, i, FP32)
        for j in range(count):
            store(ds, j, load(ds, j, FP32) - delta, FP32)
    if p.softcap != 0:
        _soft_cap(p_row, ds, low, high, f32(p.softcap))
    if side.by_key:
        for j in range(low, high):
            store(p_row, j, exp(load(p_row, j, FP32) - load(buffers.lse, j, FP32)), FP32)
    else:
        lse = load(buffers.lse, i, FP32)
        for j in range(low, high):
            store(p_row, j, exp(load(p_row, j, FP32) - lse), FP32)
    for j in range(count):
        store(ds, j, load(p_row, j, FP32) * load(ds, j, FP32), FP32)


@jit
def _columns(side, p):
    """The other side, as far as any of the rows sees it."""
    position, window, group = side.keys - side.queries, p.sizes.window, p.sizes.group
    last = side.row + side.rows - 1
    if side.by_key:
        low, high, total = 0, side.queries * group, side.queries * group
        if p.sizes.causal:
            low = (side.row - position) * group
        elif window:
            low = (side.row - position - window + 1) * group
        if window:
            high = (last - position + window) * group
    else:
        low, high, total = 0, side.keys, side.keys
        if p.sizes.causal:
            high = last // group + position + 1
        elif window:
            high = last // group + position + window
        if window:
            low = side.row // group + position - window + 1
    return min(max(low, 0), total) // BLOCK * BLOCK, min(max(high, 0), total)


@jit
def _write(side, buffers, p):
    head, value, dtype = p.sizes.head, p.sizes.value, p.sizes.dtype
    for i in range(side.rows):
        sums = at(buffers.head_sums, i * padded_size(head), FP32)
        if side.by_key:
            token = side.first_key + side.row + i
            # The columns were q times the scale.
            narrow(sums, address(p.tensors.dk, p.strides.dk, side.sequence, token, side.kv_head), head, f32(1), dtype)
            sums = at(buffers.value_sums, i * padded_size(value), FP32)
            narrow(sums, address(p.tensors.dv, p.strides.dv, side.sequence, token, side.kv_head), value, f32(1), dtype)
        else:
            row = side.row + i
            token, h = side.first_query + row // p.sizes.group, side.kv_head * p.sizes.group + row % p.sizes.group
            narrow(sums, address(p.tensors.dq, p.strides.dq, side.sequence, token, h), head, f32(p.scale), dtype)


@jit
def _fill_sums(value, buffers, p):
    fill(buffers.head_sums, buffers.rows * padded_size(p.sizes.head), value)
    fill(buffers.value_sums, buffers.rows * padded_size(p.sizes.value), value)


@jit
def _mainloop(side, buffers, p):
    _fill_sums(f32(0), buffers, p)
    _load_rows(side, buffers, p)
    start, end = _columns(side, p)
    for first in range(start, end, BLOCK):
        count = min(BLOCK, end - first)
        _multiply_columns(first, count, side, buffers, p)
        for i in range(side.rows):
            _make_ds(i, first, count, side, buffers, p)
        _add_columns(first, count, side, buffers, p)
    _write(side, buffers, p)


@jit
def _write_nan(step, side, buffers, p):
    """NaN for an invalid sequence's rows: those of this block and every `step`-th, as it may have too many."""
    end = side.keys if side.by_key else side.queries * p.sizes.group
    _fill_sums(NAN, buffers, p)
    for row in range(side.row, end, step):
        rows = min(buffers.rows, end - row)
        where = side.sequence, side.kv_head, side.first_query, side.first_key, side.queries, side.keys
        _write(Side(side.by_key, *where, row, rows), buffers, p)


@jit
def _unit(unit, blocks, by_key, buffers, p):
    """Later queries, which see more, and earlier keys, which more queries see, come first."""
    pairs = p.sizes.batch * p.sizes.kv_heads
    pair, block = unit % pairs, unit // pairs
    sequence, kv_head = pair // p.sizes.kv_heads, pair % p.sizes.kv_heads
    first_query, queries, valid = _span(p.tensors.cu_q, sequence, p.sizes.queries, p.sizes.packed)
    first_key, keys, known = _span(p.tensors.cu_k, sequence, p.sizes.keys, p.sizes.packed_keys)
    row = (block if by_key else blocks - 1 - block) * buffers.rows
    rows = min(buffers.rows, (keys if by_key else queries * p.sizes.group) - row)
    side = Side(by_key, sequence, kv_head, first_query, first_key, queries, keys, row, rows)
    if not (valid and known):
        _write_nan(blocks * buffers.rows, side, buffers, p)
    elif rows > 0:
        _mainloop(side, buffers, p)


@jit
def _clear_unused(first, step, tensor, steps, cu_seqlens, tokens, heads, size, buffers, p):
    """Zeros for every `step`-th of the packed tokens that no sequence has."""
    fill(buffers.line, size, f32(0))
    for token in range(packed_end(cu_seqlens, p.sizes.batch, tokens) + first, tokens, step):
        for head in range(heads):
            narrow(buffers.line, address(tensor, steps, 0, token, head), size, f32(1), p.sizes.dtype)


@jit
def _units(thread, threads, memory, rows, tensors, s, sizes, scale, softcap):
    """Every so many of the units, in buffers of its own."""
    strides = Strides(s[0:3], s[3:6], s[6:9], s[9:12], s[12:15], s[15:18], s[18:21], s[21:24], s[24:27])
    p = Arguments(Tensors(*tensors), strides, Sizes(*sizes), scale, softcap)
    tensors, sizes = p.tensors, p.sizes
    buffers, pairs = core_buffers(memory, rows, sizes), sizes.batch * sizes.kv_heads
    of_queries, of_keys = (sizes.queries * sizes.group + rows - 1) // rows, (sizes.keys + rows - 1) // rows
    for unit in range(thread, pairs * (of_queries + of_keys), threads):
        by_key = unit >= pairs * of_queries
        blocks = of_keys if by_key else of_queries
        _unit(unit - pairs * of_queries if by_key else unit, blocks, by_key, buffers, p)
    if sizes.packed or sizes.packed_keys:
        heads, queries, keys = sizes.kv_heads * sizes.group, sizes.packed, sizes.packed_keys
        _clear_unused(thread, threads, tensors.dq, strides.dq, tensors.cu_q, queries, heads, sizes.head, buffers, p)
        heads = sizes.kv_heads
        _clear_unused(thread, threads, tensors.dk, strides.dk, tensors.cu_k, keys, heads, sizes.head, buffers, p)
        _clear_unused(thread, threads, tensors.dv, strides.dv, tensors.cu_k, keys, heads, sizes.value, buffers, p)


@kernel
def backward_kernel(threads, memory, pitch, rows, tensors, strides, sizes, scale, softcap):
    """`pitch`: floats of a thread's memory."""
    if threads > 1:
        for i in prange(threads):
            thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            _units(thread, threads, at(memory, thread * pitch, FP32), rows, tensors, strides, sizes, scale, softcap)
    else:
        one = threads - 1  # not a literal: for that all would be compiled once more
        _units(one, threads, memory, rows, tensors, strides, sizes, scale, softcap)
