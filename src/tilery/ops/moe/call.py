"""What kernels of experts ask of a call."""

import math
from typing import Any

import torch

from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call

ALIGNED = ("order", "inverse", "offsets", "counts", "block_experts")  # outputs of moe_align
SCORINGS = ("softmax", "sigmoid", "softmax_topk")


def most_blocks(assignments: int, experts: int, block: int) -> int:
    """The most blocks there may be: every expert has at most one that is not full."""
    return (assignments + min(experts, assignments) * (block - 1)) // block


def aligned_specs(ids: TensorSpec, experts: int, block: int) -> dict[str, TensorSpec]:
    """What moe_align makes of ids [T, k], by its names."""
    blocks = most_blocks(ids.shape[0] * ids.shape[1], experts, block)
    shapes = (blocks * block,), tuple(ids.shape), (experts + 1,), (experts,), (blocks,)
    return {name: TensorSpec.contiguous(shape, torch.int32, ids.device) for name, shape in zip(ALIGNED, shapes)}


class FusedMoeCall(Call):
    """A call of fused_moe: x [tokens, hidden], experts of `size` columns between their products."""

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    @property
    def hidden(self) -> int:
        return self.x.shape[1]

    @property
    def size(self) -> int:
        return self.w_down.shape[2]

    @property
    def experts(self) -> int:
        """Experts that are here."""
        return self.w_down.shape[0]

    @property
    def topk(self) -> int:
        return self.ids.shape[1]

    @property
    def assignments(self) -> int:
        return self.tokens * self.topk

    @property
    def known(self) -> int:
        """Experts here and elsewhere."""
        return self.experts if self.expert_map is None else max(self.expert_map.shape[0], self.experts)

    @property
    def expected(self) -> int:
        """Approximate number of assignments whose expert is here, where all experts are as likely."""
        return -(-self.assignments * self.experts // self.known)

    @property
    def experts_hit(self) -> int:
        """Expected number of experts with a token, at least 1; a token's experts are different ones."""
        missed = (1 - min(self.topk / self.known, 1.0)) ** self.tokens
        return max(round(self.experts * (1 - missed)), 1)

    @property
    def rows_per_expert(self) -> int:
        """Approximate number of rows of an expert that has any."""
        return -(-self.expected // self.experts_hit)

    @property
    def add_stride(self) -> int:
        return rows(self.add).stride if self.add is not None else 0

    def aligned(self, block: int) -> dict[str, TensorSpec]:
        """Workspace for what moe_align makes of the ids."""
        return aligned_specs(self.ids, self.experts, block)

    @property
    def sorted(self) -> dict[str, Any]:
        """That workspace, once it is the call's."""
        return {name: getattr(self, name) for name in ALIGNED}


def limit_of(limit: float) -> float:
    """What gate and up are clamped to; 0 stands for no limit."""
    return limit or math.inf
