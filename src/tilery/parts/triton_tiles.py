"""TEMPORARY: old place of what is in ops/matmul/triton/tiles.py; `default` and `cuts` are the losses' alone."""

import torch

from tilery.base.spec import TensorSpec
from tilery.ops.matmul.triton.tiles import Tiles, product
from tilery.ops.matmul.triton.tiles import needs_int64 as far
from tilery.ops.matmul.triton.tiles import shared_memory_refusal as refusal

__all__ = ["Tiles", "cuts", "default", "far", "product", "refusal"]


def default(x: TensorSpec, weight: TensorSpec, m: int) -> Tiles:
    """fp32 has no tensor cores; rows off 16 bytes go through registers; few rows take narrow tiles."""
    if x.dtype == torch.float32:
        return Tiles(64, 64, 16, num_warps=8, num_stages=3)
    if any(not t.aligned or t.stride(-2) * t.dtype.itemsize % 16 for t in (x, weight) if len(t.shape) > 1):
        return Tiles(64, 64, 32, num_warps=4, num_stages=2)
    if m <= 64:
        return Tiles(64, 64, 128, num_warps=4, num_stages=3)
    return Tiles(128, 128, 64, num_warps=8, num_stages=3)


def cuts(x: TensorSpec) -> list[Tiles]:
    sizes = (
        (64, 64, 16, 8),
        (64, 64, 32, 8),
        (64, 128, 64, 4),
        (128, 128, 64, 8),
        (128, 256, 64, 8),
        (256, 128, 64, 8),
    )
    return [Tiles(*size, stages) for size in sizes for stages in (2, 3, 4)]
