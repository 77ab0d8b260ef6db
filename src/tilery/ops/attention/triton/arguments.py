"""Groups of arguments of the forward kernel in Triton; strides in elements."""

from typing import Any, NamedTuple

import torch

from tilery.ops.attention.call import AttentionCall, broadcast_stride


class Lse(NamedTuple):
    ptr: Any  # None where it is not asked for
    sequence: int  # strides
    head: int


class KeyMask(NamedTuple):
    ptr: Any
    sequence: int
    key: int


class Bias(NamedTuple):
    ptr: Any
    sequence: int
    head: int
    query: int
    key: int


class Scoring(NamedTuple):
    """What makes logits of products of queries and keys."""

    scale: Any
    window: int
    softcap: float
    slopes_ptr: Any
    sinks_ptr: Any


class Fp8Scales(NamedTuple):
    q_ptr: Any
    k_ptr: Any
    v_ptr: Any


class Sizes(NamedTuple):
    heads: int
    queries: int  # of a sequence, or all packed tokens
    keys: int


def lse(call: AttentionCall) -> Lse:
    if call.packed:
        return Lse(call.lse, 0, 0 if call.lse is None else call.lse.stride(0))
    return Lse(call.lse, broadcast_stride(call.lse, 0), broadcast_stride(call.lse, 1))


def key_mask(call: AttentionCall) -> KeyMask:
    mask = call.key_mask
    as_bytes = None if mask is None else mask._replace(dtype=torch.uint8)
    return KeyMask(as_bytes, broadcast_stride(mask, 0), broadcast_stride(mask, 1))


def bias(call: AttentionCall) -> Bias:
    sequence, head, query, key = (broadcast_stride(call.bias, dim) for dim in range(4))
    return Bias(call.bias, sequence, head, query, key)
