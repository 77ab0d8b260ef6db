"""Who attention is held against: torch's own, as it chooses, and forced to cuDNN and to FlashAttention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_NAMES = (
    "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "key_mask", "bias", "slopes", "sinks", "q_scale", "k_scale",
    "v_scale", "scale", "causal", "window", "softcap", "layout", "max_seqlen_q", "max_seqlen_k",
)  # fmt: skip


def _without(given: dict[str, Any], who: str, *names: str) -> None:
    for name in names:
        if isinstance(given[name], Tensor) or given[name]:
            raise NotImplementedError(f"{who} has no {name}")


def default(*args: Any) -> Tensor:
    """scaled_dot_product_attention, with the kernel that torch chooses."""
    return _sdpa(dict(zip(_NAMES, args)), "torch's attention")


def cudnn(*args: Any) -> Tensor:
    given = dict(zip(_NAMES, args))
    if given["causal"] and len({given[name].shape[_token(given["layout"])] for name in "qk"}) > 1:
        raise NotImplementedError("torch gives cuDNN no mask of fewer queries than keys")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(given, "cuDNN, as torch calls it,")


def flash(*args: Any) -> Tensor:
    return flash_lse(*args)[0]


def flash_lse(*args: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, as torch's attention calls it."""
    given = dict(zip(_NAMES, args))
    options = ("key_mask", "bias", "slopes", "sinks", "softcap", "q_scale")
    _without(given, "torch's FlashAttention", *options)
    turned = given["layout"] == "bhsd"
    q, k, v = (given[name].transpose(1, 2) if turned else given[name] for name in "qkv")
    causal, window = given["causal"], given["window"]
    sides = (window - 1, 0 if causal else window - 1) if window else (None, None)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, given["cu_seqlens_q"], given["cu_seqlens_k"],
        given["max_seqlen_q"] or q.shape[1], given["max_seqlen_k"] or k.shape[1], 0.0, causal, False,
        scale=given["scale"], window_size_left=sides[0], window_size_right=sides[1],
    )  # fmt: skip
    return out.transpose(1, 2) if turned else out, lse


def _token(layout: str) -> int:
    return {"bshd": 1, "bhsd": 2, "thd": 0}[layout]


def _sdpa(given: dict[str, Any], who: str) -> Tensor:
    _without(given, who, "cu_seqlens_q", "window", "softcap", "slopes", "sinks", "q_scale")
    if given["scale"] is not None and given["scale"] <= 0:
        raise NotImplementedError(f"{who} gives NaN where a scale is not positive, got {given['scale']}")
    turned = given["layout"] == "bshd"
    q, k, v = (given[name].transpose(1, 2) if turned else given[name] for name in "qkv")
    mask, causal = _mask(given, q.shape[-2], k.shape[-2])
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=given["scale"], enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2) if turned else out


def _mask(given: dict[str, Any], queries: int, keys: int) -> tuple[Tensor | None, bool]:
    """What it takes as a mask, and whether it is causal by itself: its own alignment is at the first key."""
    seen, bias, causal = given["key_mask"], given["bias"], given["causal"]
    if seen is None and bias is None:
        if causal and queries != keys:
            from torch.nn.attention.bias import causal_lower_right  # imports Triton

            return causal_lower_right(queries, keys), False
        return None, causal
    mask = bias if seen is None else seen[:, None, None, :]
    if seen is not None and bias is not None:
        mask = bias.masked_fill(~mask, -torch.inf)
    if causal:
        kept = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
        mask = mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, -torch.inf)
    return (mask if mask.dtype == torch.bool else mask.to(given["q"].dtype)), False
