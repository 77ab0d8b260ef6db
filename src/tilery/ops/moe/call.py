"""What kernels of experts ask of a call."""

import torch

from tilery.base.spec import TensorSpec

SCORINGS = ("softmax", "sigmoid", "softmax_topk")


def most_blocks(assignments: int, experts: int, block: int) -> int:
    """The most blocks there may be: every expert has at most one that is not full."""
    return (assignments + min(experts, assignments) * (block - 1)) // block


def aligned_specs(ids: TensorSpec, experts: int, block: int) -> dict[str, TensorSpec]:
    """What moe_align makes of ids [T, k], by its names."""
    blocks = most_blocks(ids.shape[0] * ids.shape[1], experts, block)
    shapes = {
        "order": (blocks * block,), "inverse": tuple(ids.shape), "offsets": (experts + 1,), "counts": (experts,),
        "block_experts": (blocks,),
    }  # fmt: skip
    return {name: TensorSpec.contiguous(shape, torch.int32, ids.device) for name, shape in shapes.items()}
