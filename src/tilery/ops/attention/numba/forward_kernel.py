"""Attention on the CPU: a core takes a block of queries and streams the keys they see past it, with an online softmax.

One kernel serves attention, attention_lse, mla and attention to caches. Where a cache is long its keys are split into
chunks, whose results are combined in order: neither the split nor a sum depends on how many cores there are, or on the
other sequences.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import prange

from tilery.languages.numba_elements import DEPTH, FP32, ROWS, at, exp, f32, load, rank, store, unrank
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.attention.numba.blocks import (
    NAN,
    NEG_INF,
    Arguments,
    Buffers,
    add_values,
    address,
    find_block,
    head_and_token,
    load_queries,
    online_softmax,
    packed_end,
    store_scores,
)
from tilery.ops.attention.numba.products import BLOCK, add_scaled, fill, narrow, padded_size

_Steps = tuple[int, int, int]
_NONE: _Steps = (0, 0, 0)


# What the kernel is given


class Tensors(NamedTuple):
    """Inside of the kernel their addresses, 0 for what is not there."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any = None
    q_rope: Any = None  # what follows q in a row, and k
    k_rope: Any = None
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    table: Any = None
    key_mask: Any = None
    bias: Any = None
    slopes: Any = None
    sinks: Any = None
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None


class Strides(NamedTuple):
    """Bytes from one sequence (or page), token and head to the next."""

    q: _Steps
    k: _Steps
    v: _Steps
    out: _Steps
    lse: _Steps = _NONE
    q_rope: _Steps = _NONE
    k_rope: _Steps = _NONE
    bias: _Steps = _NONE
    bias_key: int = 0
    key_mask: int = 0  # from one sequence to the next, and from one key
    key_mask_key: int = 1
    table: int = 0
    k_scale: int = 0  # elements; 0: one serves all heads
    v_scale: int = 0


class Sizes(NamedTuple):
    batch: int
    kv_heads: int
    group: int  # query heads for each
    queries: int  # of a sequence, or of the longest
    keys: int
    q: int
    k: int
    v: int
    q_rope: int = 0
    k_rope: int = 0
    page: int = 0  # tokens of a page; 0: there are none
    packed: int = 0  # tokens of all packed sequences, and of none
    packed_keys: int = 0
    pages: int = 0  # of the cache


class Scoring(NamedTuple):
    scale: Any
    softcap: float = 0.0
    window: int = 0
    causal: int = 0


class Dtypes(NamedTuple):
    """Codes of dtypes."""

    q: int
    k: int
    out: int
    bias: int = 0


@jit
def _grouped(tensors, s, sizes, scoring, dtypes):
    """The arguments by name again: Numba's threads take flat tuples alone."""
    strides = Strides(
        s[0:3], s[3:6], s[6:9], s[9:12], s[12:15], s[15:18], s[18:21], s[21:24],
        s[24], s[25], s[26], s[27], s[28], s[29],
    )  # fmt: skip
    return Arguments(Tensors(*tensors), strides, Sizes(*sizes), Scoring(*scoring), Dtypes(*dtypes))


# Rows of the output


@jit
def _write_row(r, acc, row_max, row_sum, block, p):
    """A row of out and its lse; a sink is one more score, without a value."""
    head, token = head_and_token(r, block, p)
    token += block.first_query
    base = f32(0) if row_max == NEG_INF else row_max
    factor = f32(1)
    if p.tensors.sinks != 0:
        sink = load(p.tensors.sinks, head, FP32)
        row_max = unrank(max(rank(row_max), rank(sink)))
        new_base = f32(0) if row_max == NEG_INF else row_max
        factor, base = exp(base - new_base) if row_sum != 0 else f32(0), new_base
        row_sum = row_sum * factor + exp(sink - new_base)
    out = address(p.tensors.out, p.strides.out, block.sequence, token, head)
    if row_sum == 0:
        fill(acc, p.sizes.v, f32(0))
    else:
        factor /= row_sum
    if p.tensors.v_scale != 0:
        factor *= load(p.tensors.v_scale, block.kv_head * p.strides.v_scale, FP32)
    narrow(acc, out, p.sizes.v, factor, p.dtypes.out)
    if p.tensors.lse != 0:
        lse = NEG_INF if row_sum == 0 else base + f32(np.log(row_sum))
        store(address(p.tensors.lse, p.strides.lse, block.sequence, token, head), 0, lse, FP32)


@jit
def _write_nan(step, block, buffers, p):
    """NaN for an invalid sequence's rows: those of this block and every `step`-th, as it may have too many."""
    fill(buffers.line, p.sizes.v, NAN)
    for first in range(block.row, block.queries * p.sizes.group, step):
        for row in range(first, min(first + buffers.rows, block.queries * p.sizes.group)):
            head, token = block.kv_head * p.sizes.group + row % p.sizes.group, block.first_query + row // p.sizes.group
            out = address(p.tensors.out, p.strides.out, block.sequence, token, head)
            narrow(buffers.line, out, p.sizes.v, f32(1), p.dtypes.out)
            if p.tensors.lse != 0:
                store(address(p.tensors.lse, p.strides.lse, block.sequence, token, head), 0, NAN, FP32)


@jit
def _clear_unused(first, step, buffers, p):
    """Zeros for every `step`-th of the packed tokens that no sequence has."""
    fill(buffers.line, p.sizes.v, f32(0))
    for token in range(packed_end(p.tensors.cu_q, p.sizes.batch, p.sizes.packed) + first, p.sizes.packed, step):
        for head in range(p.sizes.kv_heads * p.sizes.group):
            out = address(p.tensors.out, p.strides.out, 0, token, head)
            narrow(buffers.line, out, p.sizes.v, f32(1), p.dtypes.out)
            if p.tensors.lse != 0:
                store(address(p.tensors.lse, p.strides.lse, 0, token, head), 0, NEG_INF, FP32)


# The kernel


@jit
def _buffers(memory, rows, p):
    depth, pitch = p.sizes.k + p.sizes.k_rope, padded_size(p.sizes.v)
    scores = at(memory, (depth + DEPTH - 1) // DEPTH * DEPTH * rows, FP32)
    acc = at(scores, rows * BLOCK, FP32)
    row_max = at(acc, rows * pitch, FP32)
    panels = at(row_max, 2 * rows, FP32)
    line = at(panels, BLOCK * max(depth, pitch), FP32)
    return Buffers(memory, scores, panels, acc, row_max, at(row_max, rows, FP32), line, rows, pitch)


@jit
def _mainloop(low, high, buffers, block, p):
    """Sums, maxima and sums of exponentials of the block's rows over the keys from low to high."""
    fill(buffers.acc, (block.rows + ROWS - 1) // ROWS * ROWS * buffers.pitch, f32(0))
    fill(buffers.row_max, block.rows, NEG_INF)
    fill(buffers.row_sum, block.rows, f32(0))
    load_queries(buffers, block, p)
    first = low
    while first < high:
        count = min(first // BLOCK * BLOCK + BLOCK, high) - first
        store_scores(first, count, buffers, block, p)
        for r in range(block.rows):
            online_softmax(r, first, count, buffers, block, p)
        add_values(first, count, buffers, block, p)
        first += count


@jit
def _partial(partials, r, chunk, chunks, block, p):
    """Where a row's result of a chunk lies."""
    rows = p.sizes.queries * p.sizes.group
    row = ((block.sequence * p.sizes.kv_heads + block.kv_head) * chunks + chunk) * rows + block.row + r
    return at(partials, row * (p.sizes.v + 2), FP32)


@jit
def _store_partials(partials, chunk, chunks, buffers, block, p):
    for r in range(block.rows):
        result = _partial(partials, r, chunk, chunks, block, p)
        fill(result, p.sizes.v, f32(0))
        add_scaled(result, at(buffers.acc, r * buffers.pitch, FP32), p.sizes.v, f32(1))
        store(result, p.sizes.v, load(buffers.row_max, r, FP32), FP32)
        store(result, p.sizes.v + 1, load(buffers.row_sum, r, FP32), FP32)


@jit
def _combine(partials, chunk, chunks, buffers, block, p):
    """Combine the results of chunks, first to last."""
    first, last = block.low // chunk, (block.high + chunk - 1) // chunk
    for r in range(block.rows):
        row_max, row_sum = NEG_INF, f32(0)
        for c in range(first, last):
            of_chunk = load(_partial(partials, r, c, chunks, block, p), p.sizes.v, FP32)
            row_max = unrank(max(rank(row_max), rank(of_chunk)))
        base = f32(0) if row_max == NEG_INF else row_max
        fill(buffers.acc, p.sizes.v, f32(0))
        for c in range(first, last):
            result = _partial(partials, r, c, chunks, block, p)
            rescale = exp(load(result, p.sizes.v, FP32) - base)
            row_sum += rescale * load(result, p.sizes.v + 1, FP32)
            add_scaled(buffers.acc, result, p.sizes.v, rescale)
        _write_row(r, buffers.acc, row_max, row_sum, block, p)


@jit
def _unit(unit, combining, partials, rows, chunk, chunks, buffers, p):
    """A block of queries against a chunk of keys, or what combines its chunks; later queries, which see more, first."""
    blocks, pairs = (p.sizes.queries * p.sizes.group + rows - 1) // rows, p.sizes.batch * p.sizes.kv_heads
    c, unit = (0, unit) if combining else (unit % chunks, unit // chunks)
    pair, row = unit % pairs, (blocks - 1 - unit // pairs) * rows
    block = find_block(pair // p.sizes.kv_heads, pair % p.sizes.kv_heads, row, rows, p)
    if not block.valid:
        if combining or chunks == 1:
            _write_nan(blocks * rows, block, buffers, p)
        return
    if combining:
        _combine(partials, chunk, chunks, buffers, block, p)
        return
    low, high = block.low, block.high
    if chunks > 1:
        low, high = max(low, c * chunk), min(high, (c + 1) * chunk)
        if low >= high:
            return
    if block.rows:
        _mainloop(low, high, buffers, block, p)
    if chunks > 1:
        _store_partials(partials, c, chunks, buffers, block, p)
    else:
        for r in range(block.rows):
            acc = at(buffers.acc, r * buffers.pitch, FP32)
            _write_row(r, acc, load(buffers.row_max, r, FP32), load(buffers.row_sum, r, FP32), block, p)


@jit
def _units(first, step, combining, memory, partials, cut, tensors, strides, sizes, scoring, dtypes):
    """Every `step`-th unit, in buffers of its own."""
    p, (rows, chunk, chunks) = _grouped(tensors, strides, sizes, scoring, dtypes), cut
    buffers = _buffers(memory, rows, p)
    units = (p.sizes.queries * p.sizes.group + rows - 1) // rows * p.sizes.batch * p.sizes.kv_heads
    for unit in range(first, units if combining else units * chunks, step):
        _unit(unit, combining, partials, rows, chunk, chunks, buffers, p)
    if p.sizes.packed and not combining:
        _clear_unused(first, step, buffers, p)


@kernel
def attention_kernel(threads, memory, partials, pitch, cut, tensors, strides, sizes, scoring, dtypes):
    """`cut`: rows of a block, keys of a chunk and how many chunks there are; `pitch`: floats of a thread's memory."""
    for combining in range(2 if cut[2] > 1 else 1):
        if threads > 1:
            for i in prange(threads):
                thread = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
                own = at(memory, thread * pitch, FP32)
                _units(thread, threads, combining, own, partials, cut, tensors, strides, sizes, scoring, dtypes)
        else:
            one = threads - 1  # not a literal: for that all would be compiled once more
            _units(one, threads, combining, memory, partials, cut, tensors, strides, sizes, scoring, dtypes)
