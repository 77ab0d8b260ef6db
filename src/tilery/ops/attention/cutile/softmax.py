"""The online softmax in cuTile, and what attention's cuTile kernels refuse alike.

Scores times the scale times log2(e) are base-2 logits. The online softmax of rows is (row_max, row_sum), [M, 1] each:
the largest logit so far, and the sum of 2 ** (logit - row_max).
"""

import cuda.tile as ct
import torch

from tilery.base.spec import TensorSpec
from tilery.languages import cutile_glue

ARCHS = ("sm_90", "sm_100")  # on others its tiles spill
LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_NEG_INF = float("-inf")
_MAX_FP32 = 64  # of a head in fp32: without tensor cores tiles of more spill registers, compiled for sm_90


def begin_softmax(ROWS):
    """(row_max, row_sum) of rows that have seen nothing."""
    return ct.full((ROWS, 1), _NEG_INF, ct.float32), ct.zeros((ROWS, 1), ct.float32)


def online_softmax(row_max, row_sum, scores, scale):
    """Add a tile of scores, with logits scores · scale where scale > 0; masked ones are -inf.

    Gives row_max, row_sum, the tile's probabilities P [M, N] but for 1 / row_sum, and the rescale factor [M, 1] of what
    was summed before.
    """
    new_max = ct.maximum(row_max, ct.max(scores, axis=1, keepdims=True) * scale)
    finite = ct.where(new_max == _NEG_INF, 0.0, new_max)  # a row that sees nothing yet
    p = ct.exp2(scores * scale - finite, flush_to_zero=True)
    rescale = ct.exp2(row_max - finite, flush_to_zero=True)
    return new_max, row_sum * rescale + ct.sum(p, axis=1, keepdims=True), p, rescale


def finish_softmax(row_max, row_sum):
    """1 / row_sum, 0 for rows that saw nothing, and their lse."""
    inverse = ct.where(row_sum == 0.0, 0.0, 1.0 / ct.where(row_sum == 0.0, 1.0, row_sum))
    return inverse, (row_max + ct.log2(row_sum)) * _LN2


# Refusals


def size_refusal(dtype: torch.dtype, **sizes: int) -> str | None:
    """What does not lie in one tile."""
    for name, size in sizes.items():
        if size & (size - 1):
            return f"{name} must be a power of two, as a tile's sizes are, got {size}"
        if dtype == torch.float32 and size > _MAX_FP32:
            return f"{name} must be up to {_MAX_FP32} in fp32, of which larger tiles spill registers, got {size}"
    return None


def reach_refusal(**arrays: TensorSpec) -> str | None:
    for name, x in arrays.items():
        if max(*x.shape, *x.strides) >= 2**31:
            return f"sizes and strides must be below 2**31, which TMA's loads ask for, got {name} {x}"
    return None


def config_refusal(blocks: int, num_worker_warps: int, **sizes: int) -> str | None:
    why = cutile_glue.hint_refusal(num_worker_warps, **sizes)
    return why or cutile_glue.grid_refusal(blocks)
