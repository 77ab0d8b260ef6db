"""Mixture of experts: what patched experts, routers and sums with shared experts compute, and why others stay."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilery.ops as ops
from tilery.base.errors import BadInput
from tilery.patch.architectures import Experts
from tilery.patch.forwards import run
from tilery.patch.swap import original_class

ASIDE = "gradients are needed, which moe_route does not have; the router of transformers runs"
_TOKENS = 2  # of calls that only ask whether an op or a router is what it should be


def experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, add: Tensor | None = None
) -> Tensor:
    w_gate_up, w_down, b_gate_up, b_down, *how = _operands(self, self.tilery_patch.routed)
    ids, weights = top_k_index.to(torch.int32).contiguous(), top_k_weights.float().contiguous()
    made: Tensor = run(
        self, "fused_moe", hidden_states, w_gate_up, w_down, weights, ids, b_gate_up, b_down, add, None, *how
    )
    return made


def router(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits as torch makes them, weights in fp32 and ids in int32, as fused_moe takes them."""
    how: Experts = self.tilery_patch.routed
    if aside(self, hidden_states):
        base: Any = original_class(self)
        made: tuple[Tensor, Tensor, Tensor] = base.forward(self, hidden_states)
        return made
    rows = hidden_states.reshape(-1, self.hidden_dim)
    if how.wide:
        logits = F.linear(rows.float(), self.weight.float())
    else:
        logits = F.linear(rows, self.weight, getattr(self, "bias", None))
    weights, ids = run(self, "moe_route", logits, *_rule(self, how))
    return logits, weights, ids


def aside(self: nn.Module, hidden_states: Tensor) -> str:
    """Why this call of a router stays in torch; empty if it does not."""
    given = (hidden_states, *self.parameters())
    return ASIDE if torch.is_grad_enabled() and any(x.requires_grad for x in given) else ""


def with_shared(self: Any, hidden_states: Tensor) -> Tensor:
    """The sum of the experts of each token and of the shared ones, rounded once."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, weights, ids = self.gate(hidden_states)
    shared = self.shared_experts(hidden_states).reshape(rows.shape)
    made: Tensor = self.experts(rows, ids, weights, add=shared)
    return made.view(hidden_states.shape)


def _operands(module: Any, how: Experts) -> tuple[Any, ...]:
    """Weights, biases and scalars of fused_moe; weights as views [E, 2I, H] and [E, H, I]."""
    w_gate_up, w_down = module.gate_up_proj, module.down_proj
    if not how.interleaved:
        return w_gate_up, w_down, None, None, False
    biases = module.gate_up_proj_bias, module.down_proj_bias
    return w_gate_up.mT, w_down.mT, *biases, True, float(module.limit), float(module.alpha), 1.0


def _rule(module: Any, how: Experts) -> tuple[Any, ...]:
    """What moe_route takes besides logits."""
    bias = getattr(module, how.bias).float() if how.bias else None
    renormalizes = bool(getattr(module, how.renormalizes) if isinstance(how.renormalizes, str) else how.renormalizes)
    groups = [getattr(module, name) for name in how.groups] or (1, 1)
    scaling = float(getattr(module, how.scaling)) if how.scaling else 1.0
    return bias, module.top_k, how.scoring, renormalizes, *groups, scaling


# Why not


def needed(how: Experts) -> tuple[str, ...]:
    """Attributes of experts."""
    more = ("gate_up_proj_bias", "down_proj_bias", "limit", "alpha") if how.interleaved else ("act_fn",)
    return "gate_up_proj", "down_proj", "is_transposed", "has_bias", *more


def needed_of_router(how: Experts) -> tuple[str, ...]:
    named = (how.renormalizes if isinstance(how.renormalizes, str) else "", how.scaling, how.bias, *how.groups)
    return "weight", "top_k", "hidden_dim", *filter(None, (*named, *how.only[:1]))


def refusal(module: Any, how: Experts, act: str | None) -> str | None:
    """Why these experts stay in torch, in a sentence; None if fused_moe takes them."""
    if (module.is_transposed, module.has_bias) != (how.interleaved, how.interleaved):
        return f"its weights lie otherwise: is_transposed={module.is_transposed}, has_bias={module.has_bias}"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over several processes"
    if not how.interleaved and act != "silu":
        return "its activation has no op, fused_moe takes SiLU"
    if how.interleaved and not module.limit:
        return f"its limit is {module.limit}, fused_moe takes one above 0"
    w_gate_up, w_down, b_gate_up, b_down, *scalars = _operands(module, how)
    x, weights, ids = (
        torch.empty(_TOKENS, size, dtype=dtype, device="meta")
        for size, dtype in ((w_down.shape[1], w_down.dtype), (1, torch.float32), (1, torch.int32))
    )
    return _refused("fused_moe", x, w_gate_up, w_down, weights, ids, b_gate_up, b_down, None, None, *scalars)


@torch.no_grad()
def router_refusal(module: Any, how: Experts) -> str | None:
    """Why this router stays in torch; None if moe_route has its rule, and it returns what the patched one does."""
    if how.only and getattr(module, how.only[0]) != how.only[1]:
        return how.only[2]
    experts = len(module.weight)
    if why := _refused("moe_route", torch.empty(_TOKENS, experts, device="meta"), *_rule(module, how)):
        return why
    made = type(module).forward(module, module.weight.new_zeros(_TOKENS, module.hidden_dim))
    shapes = [tuple(x.shape) for x in made] if isinstance(made, tuple) else []
    wanted = [(_TOKENS, experts), (_TOKENS, module.top_k), (_TOKENS, module.top_k)]
    return None if shapes == wanted else "in this version of transformers it does not return logits, weights and ids"


def _refused(op: str, *args: Any) -> str | None:
    """What the op's own check says of arguments like these."""
    getattr(ops, op)  # imports it, which registers it
    try:
        getattr(torch.ops.tilery, op)(*(x.detach().to("meta") if isinstance(x, Tensor) else x for x in args))
    except BadInput as error:
        return str(error)
    return None
