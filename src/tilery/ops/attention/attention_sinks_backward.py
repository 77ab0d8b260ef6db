"""Contract of attention_sinks_backward: the gradient of attention's sinks."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, dtype_name
from tilery.core.op import op
from tilery.core.peers import Compiled, baselines
from tilery.ops.attention import backward_cases
from tilery.ops.attention.call import LAYOUTS, SinksBackwardCall
from tilery.ops.attention.checks import HEAD_DIMS, check_per_head, check_results
from tilery.ops.rope import heads

_ALLOWED = {torch.float32: 5e-6}


def check(call: SinksBackwardCall) -> None:
    require(call.layout in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}, got {call.layout!r}")
    shape = list(call.dout.shape)
    require(len(shape) == len(call.layout), f"dout must have as many dimensions as {call.layout!r} names, got {shape}")
    sizes = ", ".join(map(str, HEAD_DIMS))
    require(shape[-1] in HEAD_DIMS, f"dout's heads must be of {sizes}, got {shape[-1]}")
    check_results(call)
    check_per_head("sinks", call.sinks, call.heads)


def outputs(call: SinksBackwardCall) -> dict[str, TensorSpec]:
    return {"dsinks": TensorSpec.contiguous(call.sinks.shape, torch.float32, call.sinks.device)}


def cost(call: SinksBackwardCall) -> Cost:
    given = call.dout, call.dlse, call.result, call.lse, call.sinks
    rows = call.batch * call.heads * call.tokens
    return Cost(2 * rows * call.value_dim, sum(x.nbytes for x in given if x is not None), call.sinks.nbytes)


def bucket(call: SinksBackwardCall) -> Bucket:
    sizes = f"q={call.heads},e={call.value_dim},{dtype_name(call.dout.dtype)},{call.layout}"
    return Bucket(sizes, {"m": call.tokens, "batch": call.batch})


def _torch(dout: Tensor, dlse: Tensor | None, result: Tensor, lse: Tensor, sinks: Tensor, layout: str) -> Tensor:
    """In fp32."""
    delta = (dout.float() * result).sum(-1)
    delta = (delta if layout == "bhsd" else delta.transpose(-1, -2)) - (0 if dlse is None else dlse)
    terms = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks[:, None] - lse) * delta)
    return -terms.sum(-1) if layout == "thd" else -terms.sum((0, 2))


def _heads_of(model: Any) -> list[dict[str, int]]:
    return [{"heads": sizes["heads"], "n": sizes["n"]} for sizes in heads.model_sizes(model)]


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=backward_cases.sinks_inputs, allowed=_ALLOWED,
    call_type=SinksBackwardCall, rows_cancel=True,
    kernels={
        "numba": "tilery.ops.attention.numba.sinks:attention_sinks_backward",
        "triton": "tilery.ops.attention.triton.sinks:attention_sinks_backward",
    },
    baselines=baselines(torch=_torch, compile=Compiled(_torch)), model_sizes=_heads_of,
    cases={"test": backward_cases.sinks_cases(), **backward_cases.sinks_bench_cases()},
)  # fmt: skip
def attention_sinks_backward(
    dout: Tensor, dlse: Tensor | None, result: Tensor, lse: Tensor, sinks: Tensor, layout: str = "bshd"
) -> Tensor:
    """Gradient of attention_lse's sinks: dsinks[h] = -Σ P · (sum(dout · result) - dlse), P = exp(sinks[h] - lse).

    The sum is over all queries, in a fixed order. dlse None is zero; an lse of -inf, as tokens of no sequence have it,
    adds nothing. Shapes are attention_backward's.
    """
    delta = (dout * result).sum(-1)
    delta = (delta if layout == "bhsd" else delta.transpose(-1, -2)) - (0 if dlse is None else dlse)
    seen = lse != -torch.inf
    p = torch.exp(sinks[:, None] - lse.masked_fill(~seen, torch.inf))
    terms = (p * delta).masked_fill(~seen, 0.0)
    return -(terms.sum(-1) if layout == "thd" else terms.sum((0, 2)))
