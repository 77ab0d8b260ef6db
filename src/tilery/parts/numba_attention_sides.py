"""The two sides of attention's gradients on the CPU: rows of queries or keys that stay, and columns that pass by.

The query heads that share a key are rows of one block: row r is head r % per of token r // per.
"""

from typing import Any, NamedTuple

import numpy as np

from tilery.languages import numba_glue
from tilery.languages.numba_elements import COLUMNS, FP32, at, f32, load, store
from tilery.parts.numba_attention_blocks import address, packed_span
from tilery.parts.numba_attention_pieces import (
    BLOCK,
    add_product,
    dot,
    lay_across,
    lay_along,
    lay_row,
    padded,
    put_product,
    widen,
)

_Steps = tuple[int, int, int]


class Tensors(NamedTuple):
    """Inside of a kernel their addresses, 0 for what is not there."""

    q: Any
    k: Any
    v: Any
    out: Any
    dout: Any
    lse: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    cu_q: Any
    cu_k: Any


class Strides(NamedTuple):
    """Bytes from one sequence, token and head to the next; those of lse are dlse's too."""

    q: _Steps
    k: _Steps
    v: _Steps
    out: _Steps
    dout: _Steps
    lse: _Steps
    dq: _Steps
    dk: _Steps
    dv: _Steps


class Sizes(NamedTuple):
    batch: int
    groups: int  # heads of k
    per: int  # heads of q for each
    queries: int  # of a sequence, or of the longest
    keys: int
    head: int
    value: int
    packed_queries: int  # tokens of all packed sequences, and of none
    packed_keys: int
    causal: int
    kind: int  # of all tensors but lse


class Task(NamedTuple):
    """Inside of a kernel."""

    tensors: Any
    strides: Any
    sizes: Any
    scale: float


class Walk(NamedTuple):
    """Of a block of rows over the other side, in a sequence and a group of heads."""

    by_key: bool  # rows are keys, and columns queries
    sequence: int
    group: int
    first_query: int  # the sequence's first token, among packed ones
    first_key: int
    queries: int
    keys: int
    row: int
    rows: int


class Room(NamedTuple):
    """Addresses of a core's own buffers, all fp32."""

    heads: int  # rows of q or k
    values: int  # rows of dout or v
    weights: int
    grads: int
    head_sums: int
    value_sums: int
    head_panels: int  # columns of k or q
    value_panels: int
    line: int
    other: int  # one more line
    lses: int  # of the queries, rows or columns
    shifts: int
    rows: int  # how many there is room for


def floats(rows: int, head: int, value: int) -> int:
    """What `_room` takes."""
    sums = rows * (4 * BLOCK + padded(head) + padded(value))
    return sums + BLOCK * (padded(head) + padded(value)) + 2 * BLOCK + 2 * max(rows, BLOCK)


@numba_glue.jit
def wide(size):
    return (size + COLUMNS - 1) // COLUMNS * COLUMNS


@numba_glue.jit
def find_room(work, rows, sizes):
    head, value, most = wide(sizes.head), wide(sizes.value), max(rows, BLOCK)
    values = at(work, rows * BLOCK, FP32)
    weights = at(values, rows * BLOCK, FP32)
    grads = at(weights, rows * BLOCK, FP32)
    head_sums = at(grads, rows * BLOCK, FP32)
    value_sums = at(head_sums, rows * head, FP32)
    panels = at(value_sums, rows * value, FP32)
    value_panels = at(panels, BLOCK * head, FP32)
    line = at(value_panels, BLOCK * value, FP32)
    other = at(line, BLOCK, FP32)
    lses = at(other, BLOCK, FP32)
    shifts = at(lses, most, FP32)
    return Room(
        work, values, weights, grads, head_sums, value_sums, panels, value_panels, line, other, lses, shifts, rows
    )  # fmt: skip


# One side and the other


@numba_glue.jit
def span(cu, sequence, count, tokens):
    """First token and number of tokens of a sequence, and whether it is sound; `tokens` are all packed ones."""
    if cu == 0:
        return 0, count, True
    return packed_span(cu, sequence, tokens, count)


@numba_glue.jit
def _shift_query(i, walk, token, head, room, p):
    """The lse of a query, and what its gradients are shifted by, become the i-th; its dout is in the other line."""
    lse = address(0, p.strides.lse, walk.sequence, token, head)
    out = address(p.tensors.out, p.strides.out, walk.sequence, token, head)
    widen(out, room.line, p.sizes.value, f32(1), p.sizes.kind)
    shift = dot(room.line, room.other, p.sizes.value)
    if p.tensors.dlse != 0:
        shift -= load(p.tensors.dlse + lse, 0, FP32)
    known = load(p.tensors.lse + lse, 0, FP32)
    store(room.lses, i, -known if known == f32(-np.inf) else known, FP32)  # +inf: weights of 0
    store(room.shifts, i, shift, FP32)


@numba_glue.jit
def _load(row, i, query, again, walk, room, p):
    """A row of k, or of q times the scale, into the line; of v, or dout, into the other. `again`: nothing else."""
    sequence, strides, kind = walk.sequence, p.strides, p.sizes.kind
    if query:
        token, head = walk.first_query + row // p.sizes.per, walk.group * p.sizes.per + row % p.sizes.per
        heads = address(p.tensors.q, strides.q, sequence, token, head)
        values = address(p.tensors.dout, strides.dout, sequence, token, head)
    else:
        token, head = walk.first_key + row, walk.group
        heads = address(p.tensors.k, strides.k, sequence, token, head)
        values = address(p.tensors.v, strides.v, sequence, token, head)
    widen(values, room.other, p.sizes.value, f32(1), kind)
    if query and not again:
        _shift_query(i, walk, token, head, room, p)
    widen(heads, room.line, p.sizes.head, f32(p.scale) if query else f32(1), kind)


@numba_glue.jit
def lay_rows(walk, room, p):
    for i in range(walk.rows):
        _load(walk.row + i, i, not walk.by_key, False, walk, room, p)
        lay_row(room.line, room.heads, i, room.rows, p.sizes.head)
        lay_row(room.other, room.values, i, room.rows, p.sizes.value)


@numba_glue.jit
def multiply_columns(first, count, walk, room, p):
    """weights = rows of heads · columns of heads, grads = the same of values."""
    for j in range(count):
        _load(first + j, j, walk.by_key, False, walk, room, p)
        lay_across(room.line, room.head_panels, j, p.sizes.head)
        lay_across(room.other, room.value_panels, j, p.sizes.value)
    put_product(room.heads, room.head_panels, room.weights, walk.rows, room.rows, count, p.sizes.head)
    put_product(room.values, room.value_panels, room.grads, walk.rows, room.rows, count, p.sizes.value)


@numba_glue.jit
def add_columns(first, count, walk, room, p):
    """Adds grads · columns of heads and, of keys, weights · columns of values to the sums."""
    head, value = p.sizes.head, p.sizes.value
    for j in range(count):
        _load(first + j, j, walk.by_key, True, walk, room, p)
        lay_along(room.line, room.head_panels, j, head)
        if walk.by_key:
            lay_along(room.other, room.value_panels, j, value)
    add_product(room.grads, room.head_panels, room.head_sums, walk.rows, head, count, BLOCK, wide(head))
    if walk.by_key:
        add_product(room.weights, room.value_panels, room.value_sums, walk.rows, value, count, BLOCK, wide(value))
