"""What the kernel of attention_backward on the CPU is given, and the buffers of a core."""

from typing import Any, NamedTuple

from tilery.languages.numba_elements import FP32, at
from tilery.languages.numba_glue import jit
from tilery.ops.attention.numba.products import BLOCK, padded, padded_size

_Steps = tuple[int, int, int]


class Tensors(NamedTuple):
    """Inside of the kernel their addresses, 0 for what is not there."""

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
    kv_heads: int
    group: int  # query heads for each
    queries: int  # of a sequence, or of the longest
    keys: int
    head: int
    value: int
    packed: int  # tokens of all packed sequences, and of none
    packed_keys: int
    causal: int
    window: int
    dtype: int  # of all tensors but lse


class Arguments(NamedTuple):
    tensors: Any
    strides: Any
    sizes: Any
    scale: float
    softcap: float


class Side(NamedTuple):
    """Rows that a core keeps, in a sequence and a group of heads; the other side's rows are columns."""

    by_key: bool  # rows are keys, and columns queries
    sequence: int
    kv_head: int
    first_query: int  # the sequence's first token, among packed ones
    first_key: int
    queries: int
    keys: int
    row: int
    rows: int


class Buffers(NamedTuple):
    """Addresses of a core's own buffers, all fp32."""

    heads: int  # rows of q or k
    values: int  # rows of dout or v
    p: int
    ds: int  # gradients of scores
    head_sums: int
    value_sums: int
    head_panels: int  # columns of k or q
    value_panels: int
    line: int
    other: int  # one more line
    lse: int  # of the queries, rows or columns
    delta: int
    rows: int  # how many there is room for


def buffer_floats(rows: int, head: int, value: int) -> int:
    """What `core_buffers` takes."""
    sums = rows * (4 * BLOCK + padded(head) + padded(value))
    return sums + BLOCK * (padded(head) + padded(value)) + 2 * BLOCK + 2 * max(rows, BLOCK)


@jit
def core_buffers(memory, rows, sizes):
    head, value, most = padded_size(sizes.head), padded_size(sizes.value), max(rows, BLOCK)
    values = at(memory, rows * BLOCK, FP32)
    p = at(values, rows * BLOCK, FP32)
    ds = at(p, rows * BLOCK, FP32)
    head_sums = at(ds, rows * BLOCK, FP32)
    value_sums = at(head_sums, rows * head, FP32)
    panels = at(value_sums, rows * value, FP32)
    value_panels = at(panels, BLOCK * head, FP32)
    line = at(value_panels, BLOCK * value, FP32)
    other = at(line, BLOCK, FP32)
    lse = at(other, BLOCK, FP32)
    delta = at(lse, most, FP32)
    return Buffers(memory, values, p, ds, head_sums, value_sums, panels, value_panels, line, other, lse, delta, rows)
