"""What the CPU's attention is given by each op of the family."""

from typing import Any, NamedTuple

from torch import Tensor

from tilery.languages import numba_glue
from tilery.parts.attention import Problem
from tilery.parts.attention_checks import cutting_window
from tilery.parts.numba_attention_pieces import KINDS
from tilery.parts.paged_attention import bound

_Steps = tuple[int, int, int]


class Tensors(NamedTuple):
    """Inside of a kernel their addresses, 0 for what is not there."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any = None
    q_rest: Any = None  # what follows q in a row, and k
    k_rest: Any = None
    cu_q: Any = None
    cu_k: Any = None
    lengths: Any = None
    table: Any = None
    seen: Any = None
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
    lse: _Steps = (0, 0, 0)
    q_rest: _Steps = (0, 0, 0)
    k_rest: _Steps = (0, 0, 0)
    bias: _Steps = (0, 0, 0)
    bias_key: int = 0
    seen: int = 0  # from one sequence to the next, and from one key
    seen_key: int = 1
    table: int = 0
    k_scale: int = 0  # elements; 0: one serves all heads
    v_scale: int = 0


class Sizes(NamedTuple):
    batch: int
    groups: int  # heads of k
    per: int  # heads of q for each
    queries: int  # of a sequence, or of the longest
    keys: int
    q: int
    k: int
    v: int
    q_rest: int = 0
    k_rest: int = 0
    page: int = 0  # tokens of a page; 0: there are none
    packed: int = 0  # tokens of all packed sequences, and of none
    packed_keys: int = 0
    pages: int = 0  # of the cache


class Rules(NamedTuple):
    scale: float
    softcap: float = 0.0
    window: int = 0
    causal: int = 0


class Kinds(NamedTuple):
    """Dtypes, as numbers."""

    q: int
    k: int
    out: int
    bias: int = 0


class Task(NamedTuple):
    tensors: Tensors
    strides: Strides
    sizes: Sizes
    rules: Rules
    kinds: Kinds


def launchable(p: Task) -> tuple[Any, ...]:
    """Flat tuples, all that Numba's threads take: addresses, strides in a row, and the rest."""
    addresses = Tensors(*(t.data_ptr() if isinstance(t, Tensor) else 0 for t in p.tensors))
    flat = [step for steps in p.strides for step in (steps if isinstance(steps, tuple) else (steps,))]
    return addresses, tuple(flat), p.sizes, p.rules, p.kinds


@numba_glue.jit
def raised(s):
    """Strides again."""
    return Strides(
        s[0:3], s[3:6], s[6:9], s[9:12], s[12:15], s[15:18], s[18:21], s[21:24],
        s[24], s[25], s[26], s[27], s[28], s[29],
    )  # fmt: skip


# Of the ops


def of_attention(p: Problem) -> Task:
    """Of attention and attention_lse."""
    size, out_size, packed = p.q.dtype.itemsize, p.out.dtype.itemsize, p.cu_q is not None
    strides = Strides(
        _bytes(p.q_strides, size), _bytes(p.k_strides, size), _bytes(p.v_strides, size), _bytes(p.out_strides, out_size)
    )
    if p.lse is not None:
        strides = strides._replace(lse=steps(p.lse, None if packed else 0, -1, -2))
    if p.bias is not None:
        by = [p.bias.stride(d) if p.bias.shape[d] > 1 else 0 for d in range(3)]
        by_key = p.bias.stride(3) * p.bias.dtype.itemsize
        strides = strides._replace(bias=_bytes((by[0], by[2], by[1]), p.bias.dtype.itemsize), bias_key=by_key)
    if p.key_mask is not None:
        strides = strides._replace(seen=p.key_mask.stride(0), seen_key=p.key_mask.stride(1))
    tensors = Tensors(
        p.q, p.k, p.v, p.out, p.lse, cu_q=p.cu_q, cu_k=p.cu_k, seen=p.key_mask, bias=p.bias, slopes=p.slopes,
        sinks=p.sinks, q_scale=p.q_scale, k_scale=p.k_scale, v_scale=p.v_scale,
    )  # fmt: skip
    kinds = Kinds(KINDS[p.q.dtype], KINDS[p.k.dtype], KINDS[p.out.dtype], 0 if p.bias is None else KINDS[p.bias.dtype])
    per = p.heads // p.kv_heads
    sizes = Sizes(p.batch, p.kv_heads, per, p.queries, p.keys, p.q.shape[-1], p.k.shape[-1], p.value)
    sizes = sizes._replace(packed=p.q.shape[0], packed_keys=p.k.shape[0]) if packed else sizes
    return Task(tensors, strides, sizes, Rules(p.scale, float(p.softcap), p.window, int(p.causal)), kinds)


def of_cache(
    q: Any, k: Any, v: Any, out: Any, lengths: Any, table: Any, k_scale: Any, v_scale: Any, sinks: Any,
    scale: float | None, window: int, softcap: float, cu_q: Any = None, most: int = 0,
) -> Task:  # fmt: skip
    """Of attention_decode and attention_chunked, which has packed queries, `most` for a sequence at most."""
    packed = cu_q is not None
    groups, size = k.shape[2:]
    queries, keys = most if packed else q.shape[1], bound(k, table)
    strides = Strides(
        steps(q, None if packed else 0, -3, -2), steps(k, 0, 1, 2), steps(v, 0, 1, 2),
        steps(out, None if packed else 0, -3, -2),
        table=0 if table is None else table.stride(0) * 4,
        k_scale=_by_head(k_scale), v_scale=_by_head(v_scale),
    )  # fmt: skip
    sizes = Sizes(
        lengths.shape[0], groups, q.shape[-2] // groups, queries, keys, size, size, size,
        page=0 if table is None else k.shape[1], packed=q.shape[0] if packed else 0, pages=k.shape[0],
    )  # fmt: skip
    tensors = Tensors(
        q, k, v, out, cu_q=cu_q, lengths=lengths, table=table, sinks=sinks, k_scale=k_scale, v_scale=v_scale
    )
    factor, window = size**-0.5 if scale is None else float(scale), cutting_window(window, queries, keys)
    rules = Rules(factor, float(softcap), window, 1)
    return Task(tensors, strides, sizes, rules, Kinds(KINDS[q.dtype], KINDS[k.dtype], KINDS[out.dtype]))


def steps(x: Any, sequence: int | None, token: int, head: int | None) -> tuple[int, int, int]:
    """Bytes from one to the next along these dimensions of a tensor or spec; 0 where there is none."""
    return _bytes([0 if d is None else x.stride(d) for d in (sequence, token, head)], x.dtype.itemsize)


def _bytes(strides: Any, size: int) -> tuple[int, int, int]:
    sequence, token, head = (int(step) * size for step in strides)
    return sequence, token, head


def _by_head(scale: Any) -> int:
    return int(scale is not None and scale.shape[0] > 1)
