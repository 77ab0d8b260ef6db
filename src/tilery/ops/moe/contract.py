"""What contracts of experts share: which expert an id means, and how ids and maps are checked and drawn."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import TensorSpec, dtype_name
from tilery.core.indices import require_between

_OUTSIDE = (-1, 2**31 - 1, -(2**31), 1000)  # ids that are no expert's


def check_ids(ids: TensorSpec, expert_map: TensorSpec | None) -> None:
    for name, x, shape in (("ids", ids, "[T, k]"), ("expert_map", expert_map, "[G]")):
        if x is None:
            continue
        require(
            x.dtype == torch.int32 and len(x.shape) == shape.count(",") + 1,
            f"{name} must be int32{shape}, got {dtype_name(x.dtype)}{list(x.shape)}",
        )
        dense = TensorSpec.contiguous(x.shape, x.dtype, x.device).strides
        lies = all(a == b or size <= 1 for a, b, size in zip(x.strides, dense, x.shape))
        require(lies, f"{name} must be contiguous, got strides {list(x.strides)}; call .contiguous() on it")
    require(ids.shape[1] >= 1, f"ids must be [T, k] with k from 1 on, got {list(ids.shape)}")


def check_indices(call: Any, experts: int) -> None:
    """-1 says by itself that an expert is not here."""
    if call.expert_map is not None:
        require_between("expert_map", call.expert_map, -1, experts - 1)
    known = experts if call.expert_map is None else call.expert_map.shape[0]
    require_between("ids", call.ids, -1, known - 1)


def local_experts(ids: Tensor, expert_map: Tensor | None, experts: int) -> Tensor:
    """The expert of each assignment, in int64; `experts` for one that is not here."""
    local = ids.long()
    if expert_map is not None:
        padded = torch.cat((expert_map.long(), expert_map.new_full((1,), -1).long()))
        known = (local >= 0) & (local < len(expert_map))
        local = padded[torch.where(known, local, len(expert_map))]
    return torch.where((local >= 0) & (local < experts), local, experts)


def draw_ids(m: int, topk: int, experts: int, spread: str, outside: bool, g: torch.Generator) -> Tensor:
    """Each token's experts, all different: random ones, or with spread "one" the same first ones for all.

    `outside`: every fifth assignment has an id that is no expert's.
    """
    require(1 <= topk <= experts, f"topk must be 1 to {experts}, the number of experts, got {topk}")
    if spread == "one":
        ids = torch.arange(topk, device=g.device).expand(m, topk)
    else:
        ids = torch.rand(m, experts, generator=g, device=g.device).topk(topk, dim=-1).indices
    ids = ids.to(torch.int32).contiguous()
    if outside and m:
        wrong = torch.tensor(_OUTSIDE, dtype=torch.int32, device=g.device).repeat(m * topk)
        spoilt = ids.view(-1)[::5]
        spoilt.copy_(wrong[: len(spoilt)])
    return ids


def draw_map(experts: int, away: int, g: torch.Generator) -> Tensor | None:
    """Where each of experts + away experts is: a number below `experts`, or -1. None if none is away."""
    if not away:
        return None
    places = torch.randperm(experts + away, generator=g, device=g.device).to(torch.int32)
    return torch.where(places < experts, places, -1)
