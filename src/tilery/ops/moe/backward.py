"""Gradients of fused_moe, of other ops: nothing waits for the device, and every sum has a fixed order."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilery.ops.matmul.grouped_matmul import grouped_matmul, grouped_matmul_backward
from tilery.ops.moe.moe_align import moe_align

_OF_GATE_UP = {"x", "w_gate_up", "b_gate_up"}  # they need the gradient of what the first product makes


class _Sorted(NamedTuple):
    """Assignments in the order of their experts; slots past the last have numbers of something, and count nowhere."""

    ends: Tensor  # [E] of each expert's slots
    token: Tensor  # [A] of each slot
    assignment: Tensor
    expert: Tensor
    inverse: Tensor  # [T, k] slot of each assignment, -1 of one that is not here

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Rows [A, …] by slot as [T, k, …], 0 of what is not here."""
        found = rows.index_select(0, self.inverse.flatten().clamp(min=0)).unflatten(0, self.inverse.shape)
        away = (self.inverse < 0).view(*self.inverse.shape, *[1] * (found.dim() - 2))
        return found.masked_fill(away, 0)

    def sum_of_experts(self, rows: Tensor) -> Tensor:
        """The sum of each expert's rows [A, N], as a product sums: in fp32."""
        return grouped_matmul_backward(rows, rows.new_ones(len(rows), 1), self.ends).squeeze(1)


def _sorted(ids: Tensor, expert_map: Tensor | None, experts: int) -> _Sorted:
    (tokens, topk), assignments = ids.shape, ids.numel()
    order, inverse, offsets, _, _ = moe_align(ids, expert_map, experts)
    ends = offsets[1:]
    expert = torch.searchsorted(ends, torch.arange(assignments, device=ids.device), right=True)
    return _Sorted(
        ends, (order // topk).clamp(max=tokens - 1), order.clamp(max=assignments - 1), expert.clamp(max=experts - 1),
        inverse,
    )  # fmt: skip


def _gate_and_up(call: Any, rows: Tensor, of: _Sorted) -> tuple[Tensor, Tensor]:
    """What the forward does not store, in fp32 of numbers rounded to x's dtype."""
    both = grouped_matmul(rows, call.w_gate_up.transpose(1, 2), of.ends).to(_wide(rows))
    if call.b_gate_up is not None:
        both = both + call.b_gate_up[of.expert]
    if call.interleaved:
        return both[:, ::2], both[:, 1::2]
    gate, up = both.chunk(2, dim=1)
    return gate, up


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def fused_moe_backward(call: Any, grads: Any) -> dict[str, Any]:
    """Gradients by the names of those that are needed.

    Gate and up are computed again and rounded to x's dtype: one that rounds to the other side of the limit has the
    gradient of that side.
    """
    found = {"add": grads.y} if "add" in grads.needed else {}
    if not grads.needed - {"add"}:
        return found
    of = _sorted(call.ids, call.expert_map, call.w_down.shape[0])
    rows, dy = (t.index_select(0, of.token) for t in (call.x, grads.y))
    gate, up = _gate_and_up(call, rows, of)
    kept_gate, kept_up = (gate.clamp(max=call.limit), up.clamp(-call.limit, call.limit)) if call.limit else (gate, up)
    share, offset_up = torch.sigmoid(call.alpha * kept_gate), kept_up + call.up_offset
    h = (kept_gate * share * offset_up).to(rows.dtype)
    weight = call.weights.flatten().index_select(0, of.assignment).unsqueeze(1)
    back = grouped_matmul(dy, call.w_down, of.ends).to(gate.dtype)  # the gradient of h, not weighted yet
    weighted = (dy * weight).to(dy.dtype)
    if "weights" in grads.needed:
        dots = (back * h).sum(1)
        if call.b_down is not None:
            dots = dots + (dy.to(gate.dtype) * call.b_down[of.expert]).sum(1)
        found["weights"] = of.to_tokens(dots).to(call.weights.dtype)
    if "w_down" in grads.needed:
        found["w_down"] = grouped_matmul_backward(h, weighted, of.ends)
    if "b_down" in grads.needed:
        found["b_down"] = of.sum_of_experts(weighted)
    if not grads.needed & _OF_GATE_UP:
        return found
    dh = back * weight
    dgate = dh * offset_up * share * (1 + call.alpha * kept_gate * (1 - share))
    dup = dh * kept_gate * share
    if call.limit:
        dgate, dup = dgate.masked_fill(gate > call.limit, 0), dup.masked_fill(up.abs() > call.limit, 0)
    both = torch.stack((dgate, dup), 2).flatten(1) if call.interleaved else torch.cat((dgate, dup), 1)
    dboth = both.to(rows.dtype)
    if "x" in grads.needed:
        drows = of.to_tokens(grouped_matmul(dboth, call.w_gate_up, of.ends))
        found["x"] = drows.sum(1, dtype=gate.dtype).to(rows.dtype)
    if "w_gate_up" in grads.needed:
        found["w_gate_up"] = grouped_matmul_backward(rows, dboth, of.ends)
    if "b_gate_up" in grads.needed:
        found["b_gate_up"] = of.sum_of_experts(dboth)
    return found
