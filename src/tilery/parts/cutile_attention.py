"""Pieces of cuTile kernels for attention: scores become base-2 logits and are summed as they come.

A running softmax of rows is (top, total), [M, 1] each: the largest logit so far, and the sum of 2 ** (logit - top).
"""

import cuda.tile as ct
import torch

from tilery.base.spec import TensorSpec
from tilery.languages import cutile_glue

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
_NONE = float("-inf")
_MOST_FLOAT = 64  # of a head in fp32: without tensor cores tiles of more spill registers, compiled for sm_90


# Kernels


def begin(ROWS):
    """(top, total) of rows that have seen nothing."""
    return ct.full((ROWS, 1), _NONE, ct.float32), ct.zeros((ROWS, 1), ct.float32)


def online(top, total, scores, scale):
    """Adds a tile of scores, logits of scores · scale with scale > 0; masked ones are -inf.

    Gives top, total, the tile's weights [M, N], and the factor [M, 1] by which earlier sums shrink.
    """
    best = ct.maximum(top, ct.max(scores, axis=1, keepdims=True) * scale)
    safe = ct.where(best == _NONE, 0.0, best)  # a row that sees nothing yet
    weights = ct.exp2(scores * scale - safe, flush_to_zero=True)
    shrink = ct.exp2(top - safe, flush_to_zero=True)
    return best, total * shrink + ct.sum(weights, axis=1, keepdims=True), weights, shrink


def finish(top, total):
    """The factor that makes sums an average, 0 for rows that saw nothing, and their lse."""
    share = ct.where(total == 0.0, 0.0, 1.0 / ct.where(total == 0.0, 1.0, total))
    return share, (top + ct.log2(total)) * LN2


# Their hosts


def strided(x, shape: tuple[int, ...], strides: tuple[int, ...]):
    """A view: of a tensor for a launch, of a spec for a compile."""
    if isinstance(x, TensorSpec):
        return x._replace(shape=shape, strides=strides)
    return x.as_strided(shape, strides)


def size_refusal(dtype: torch.dtype, **sizes: int) -> str | None:
    """What does not lie in one tile."""
    for name, size in sizes.items():
        if size & (size - 1):
            return f"{name} must be a power of two, as a tile's sizes are, got {size}"
        if dtype == torch.float32 and size > _MOST_FLOAT:
            return f"{name} must be up to {_MOST_FLOAT} in fp32, of which larger tiles spill registers, got {size}"
    return None


def reach_refusal(**arrays: TensorSpec) -> str | None:
    for name, x in arrays.items():
        if max(*x.shape, *x.strides) >= 2**31:
            return f"sizes and strides must be below 2**31, which TMA's loads ask for, got {name} {x}"
    return None


def config_refusal(blocks: int, num_worker_warps: int, **sizes: int) -> str | None:
    why = cutile_glue.hint_refusal(num_worker_warps, **sizes)
    return why or cutile_glue.grid_refusal(blocks)
