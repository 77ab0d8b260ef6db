"""The gradients of attention and attention_lse, for autograd; and what they are refused for."""

from typing import Any

import torch
from torch import Tensor

from tilery.errors import NoBackward
from tilery.ops.attention_backward import attention_backward
from tilery.parts.attention import FP8

_OPTIONS = ("key_mask", "bias", "slopes", "sinks", "q_scale", "k_scale", "v_scale", "window", "softcap")


def gradients(
    op: str, args: Any, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, ...]:
    """One for every argument of the op, from what it gave and their gradients."""
    q, k, v, cu_q, cu_k, *_, scale, causal, _, _, layout, most_q, most_k = args
    require_plain(op, args)
    dout = torch.zeros_like(out) if dout is None else dout
    found = attention_backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scale, causal, layout, most_q, most_k)
    return *found, *[None] * (len(args) - len(found))


def require_plain(op: str, args: Any) -> None:
    """Options that the backward does not have are refused."""
    q, _, _, _, _, *more, _, _, window, softcap, _, _, _ = args
    given = [name for name, value in zip(_OPTIONS, (*more, window, softcap)) if isinstance(value, Tensor) or value]
    given += ["fp8"] if q.dtype in FP8 else []
    if given:
        raise NoBackward(
            f"{op} has no gradients with {', '.join(given)}: its backward knows causal masks, heads that share keys "
            "and packed sequences alone; call it under torch.no_grad()"
        )
