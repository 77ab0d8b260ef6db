"""Checks of queries and keys, heads of every layout, and how many heads models have."""

from typing import Any

import torch

from tilery.base.errors import require
from tilery.base.spec import TensorSpec, dtype_name
from tilery.ops.rope.call import heads

LAYOUTS = ("bshd", "bhsd", "thd")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_heads(name: str, x: TensorSpec, layout: str) -> None:
    require(layout in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    known = ", ".join(map(dtype_name, DTYPES))
    require(x.dtype in DTYPES, f"{name} must be one of {known}, got {dtype_name(x.dtype)}")
    what = {"bshd": "[B, S, H, D]", "bhsd": "[B, H, S, D]", "thd": "[T, H, D]"}[layout]
    require(len(x.shape) == len(layout), f"{name} must be {what} as layout {layout!r} says, got {list(x.shape)}")
    require(
        x.stride(-1) == 1 or x.shape[-1] <= 1,
        f"{name} must have stride 1 along its last dimension, got strides {list(x.strides)}; call .contiguous() on it",
    )


def check_beside(name: str, x: TensorSpec, other: str, y: TensorSpec, layout: str) -> None:
    """x must differ from y in nothing but strides and the number of heads."""
    check_heads(name, x, layout)
    require(x.dtype == y.dtype, f"{name} must be {dtype_name(y.dtype)} as {other} is, got {dtype_name(x.dtype)}")
    (*a, _, d, _), (*b, _, e, _) = heads(x, layout), heads(y, layout)
    require(
        (*a, d) == (*b, e),
        f"{name} must differ from {other} in the number of heads alone, got {list(x.shape)} beside {list(y.shape)}",
    )


def model_sizes(model: Any) -> list[dict[str, int]]:
    """Sizes of the heads that are rotated on one rank; MLA rotates a part of q and one key."""
    q_heads = model.num_attention_heads // model.tp
    if model.kv_lora_rank:
        return [{"heads": q_heads, "kv_heads": 1, "n": model.qk_rope_head_dim}]
    size = model.head_dim or model.hidden_size // model.num_attention_heads
    return [{"heads": q_heads, "kv_heads": max(model.num_key_value_heads // model.tp, 1), "n": size}]
