"""Rows of attention's output on the CPU: what sums become, zeros for tokens that are left, NaN for cut sequences."""

import numpy as np

from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, exp, f32, load, rank, store, unrank
from tilery.parts.numba_attention_blocks import NAN, NOTHING, address, head_and_token, packed_end
from tilery.parts.numba_attention_pieces import fill, narrow


@numba_glue.jit
def finish(r, sums, top, total, block, p):
    """A row of out and its lse; a sink is one more score, without a value."""
    head, token = head_and_token(r, block, p)
    token += block.first_query
    base = f32(0) if top == NOTHING else top
    factor = f32(1)
    if p.tensors.sinks != 0:
        sink = load(p.tensors.sinks, head, FP32)
        top = unrank(max(rank(top), rank(sink)))
        shifted = f32(0) if top == NOTHING else top
        factor, base = exp(base - shifted) if total != 0 else f32(0), shifted
        total = total * factor + exp(sink - shifted)
    out = address(p.tensors.out, p.strides.out, block.sequence, token, head)
    if total == 0:
        fill(sums, p.sizes.v, f32(0))
    else:
        factor /= total
    if p.tensors.v_scale != 0:
        factor *= load(p.tensors.v_scale, block.group * p.strides.v_scale, FP32)
    narrow(sums, out, p.sizes.v, factor, p.kinds.out)
    if p.tensors.lse != 0:
        lse = NOTHING if total == 0 else base + f32(np.log(total))
        store(address(p.tensors.lse, p.strides.lse, block.sequence, token, head), 0, lse, FP32)


@numba_glue.jit
def spoil(step, block, room, p):
    """NaN for a cut sequence's rows: those of this block and, as there may be more than declared, every `step`-th."""
    fill(room.line, p.sizes.v, NAN)
    for first in range(block.row, block.queries * p.sizes.per, step):
        for row in range(first, min(first + room.rows, block.queries * p.sizes.per)):
            head, token = block.group * p.sizes.per + row % p.sizes.per, block.first_query + row // p.sizes.per
            out = address(p.tensors.out, p.strides.out, block.sequence, token, head)
            narrow(room.line, out, p.sizes.v, f32(1), p.kinds.out)
            if p.tensors.lse != 0:
                store(address(p.tensors.lse, p.strides.lse, block.sequence, token, head), 0, NAN, FP32)


@numba_glue.jit
def clear(first, step, room, p):
    """Zeros for every `step`-th of the packed tokens that no sequence has."""
    fill(room.line, p.sizes.v, f32(0))
    for token in range(packed_end(p.tensors.cu_q, p.sizes.batch, p.sizes.packed) + first, p.sizes.packed, step):
        for head in range(p.sizes.groups * p.sizes.per):
            narrow(room.line, address(p.tensors.out, p.strides.out, 0, token, head), p.sizes.v, f32(1), p.kinds.out)
            if p.tensors.lse != 0:
                store(address(p.tensors.lse, p.strides.lse, 0, token, head), 0, NOTHING, FP32)
