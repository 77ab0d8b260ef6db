"""The gradients of attention and attention_lse, for autograd; and what they are refused for."""

from typing import Any

import torch
from torch import Tensor

from tilery.ops.attention_backward import attention_backward
from tilery.parts.attention import FP8
from tilery.parts.attention_checks import cutting_window
from tilery.parts.heads import heads

_OPTIONS = ("key_mask", "bias", "slopes", "sinks", "q_scale", "k_scale", "v_scale", "window", "softcap")


def gradients(args: Any, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    """One for every argument of attention or attention_lse, from what it gave and their gradients."""
    q, k, v, cu_q, cu_k, *_, scale, causal, _, _, layout, most_q, most_k = args
    dout = torch.zeros_like(out) if dout is None else dout
    found = attention_backward(dout, dlse, q, k, v, out, lse, cu_q, cu_k, scale, causal, layout, most_q, most_k)
    return *found, *[None] * (len(args) - len(found))


def backward_refusal(*args: Any) -> str | None:
    """`Op.backward_refusal` of attention and attention_lse: the options that their backward does not have."""
    q, k, _, _, _, *more, _, _, window, softcap, layout, _, _ = args
    window = cutting_window(window, heads(q, layout).tokens, heads(k, layout).tokens)
    given = [name for name, value in zip(_OPTIONS, (*more, window, softcap)) if isinstance(value, Tensor) or value]
    given += ["fp8"] if q.dtype in FP8 else []
    if not given:
        return None
    known = "causal masks, heads that share keys and packed sequences alone"
    return f"there are no gradients with {', '.join(given)}, its backward knows {known}"
