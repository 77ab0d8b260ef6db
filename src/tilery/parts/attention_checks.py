"""Checks of attention's arguments: tensors, packed sequences, options. They see specs."""

from typing import Any

import torch

from tilery.base.errors import BadInput, require
from tilery.base.spec import TensorSpec, dtype_name
from tilery.parts.heads import LAYOUTS, heads

SIZES = (16, 32, 64, 80, 96, 128, 192, 256)  # of a head
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_LEAST_SOFTCAP = 1e-30
_MOST_SCALE = torch.finfo(torch.float32).max


def check(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, cu_seqlens_q: TensorSpec | None, cu_seqlens_k: TensorSpec | None,
    key_mask: TensorSpec | None, bias: TensorSpec | None, slopes: TensorSpec | None, sinks: TensorSpec | None,
    q_scale: TensorSpec | None, k_scale: TensorSpec | None, v_scale: TensorSpec | None,
    causal: bool, window: int, softcap: float, layout: str, max_seqlen_q: int, max_seqlen_k: int,
) -> None:  # fmt: skip
    check_qkv(q, k, v, layout)
    check_packed(cu_seqlens_q, cu_seqlens_k, layout, max_seqlen_q, max_seqlen_k)
    check_scales(q, q_scale, k_scale, v_scale)
    batch, queries, count, _, _ = heads(q, layout)
    keys = heads(k, layout).tokens
    for name, vector in (("slopes", slopes), ("sinks", sinks)):
        check_vector(name, vector, count)
    for name, given in (("key_mask", key_mask), ("bias", bias)):
        require(given is None or layout != "thd", f"{name} is for layouts bshd and bhsd, got it with layout 'thd'")
    if key_mask is not None:
        fits = key_mask.dtype == torch.bool and tuple(key_mask.shape) == (batch, keys)
        require(fits, f"key_mask must be bool[{batch}, {keys}], True where a key is seen, got {_said(key_mask)}")
    if bias is not None:
        wide = len(bias.shape) == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, count)
        kinds = dict.fromkeys((*([] if q.dtype in FP8 else [q.dtype]), torch.float32))
        fits = wide and tuple(bias.shape[2:]) == (queries, keys) and bias.dtype in kinds
        want = f"{' or '.join(map(dtype_name, kinds))} [1 or {batch}, 1 or {count}, {queries}, {keys}]"
        require(fits, f"bias must be {want}, got {_said(bias)}")
    check_bend(window, softcap)


def check_bend(window: int, softcap: float) -> None:
    require(window >= 0, f"window must be 0 (none) or the number of keys that a query sees, got {window}")
    fits = softcap == 0 or _LEAST_SOFTCAP <= softcap <= 1 / _LEAST_SOFTCAP  # kernels divide by it in fp32
    require(fits, f"softcap must be 0 (none) or a positive number from 1e-30 to 1e30, got {softcap}")


def check_scale(scale: float | None) -> None:
    """`Op.check_runtime` of the family: kernels would not agree on what NaN and infinity mean.

    At every call, so without a message until it is needed.
    """
    if scale is not None and not abs(scale) <= _MOST_SCALE:
        raise BadInput(f"scale must be None (1 / sqrt of a head's size) or a finite number in fp32, got {scale}")


def cutting_window(window: int, queries: int, keys: int) -> int:
    """The window of so many queries and keys; 0 where it hides none of them, so that kernels add no huge number."""
    return 0 if window >= queries + keys else window


def check_qkv(q: TensorSpec, k: TensorSpec, v: TensorSpec, layout: str) -> None:
    require(layout in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    what = {"bshd": "[B, S, H, D]", "bhsd": "[B, H, S, D]", "thd": "[T, H, D]"}[layout]
    known = (*FLOATS, *FP8)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(len(x.shape) == len(layout), f"{name} must be {what} as layout {layout!r} says, got {list(x.shape)}")
        require(x.dtype in known, f"{name} must be one of {_names(known)}, got {dtype_name(x.dtype)}")
        require(x.dtype == q.dtype, f"{name} must be {dtype_name(q.dtype)} as q is, got {dtype_name(x.dtype)}")
        require(
            x.stride(-1) == 1,
            f"{name} must have stride 1 along its last dimension, got strides {list(x.strides)}; "
            "call .contiguous() on it",
        )
        least = 32 if x.dtype in FP8 else 16
        sizes = [size for size in SIZES if size % least == 0]
        require(x.shape[-1] in sizes, f"{name}'s heads must be of {', '.join(map(str, sizes))}, got {x.shape[-1]}")
    one, of_keys, of_values = heads(q, layout), heads(k, layout), heads(v, layout)
    fits = of_keys[:3] == of_values[:3] and of_keys.size == one.size >= of_values.size and of_keys.batch == one.batch
    shapes = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    require(
        fits, f"k must be as q but for tokens and heads, v as k but for a head's size, no larger than k's; {shapes}"
    )
    shared = of_keys.heads > 0 and one.heads % of_keys.heads == 0
    require(shared, f"q's heads must be a multiple of k's, got {one.heads} and {of_keys.heads}")


def check_packed(q: TensorSpec | None, k: TensorSpec | None, layout: str, most_q: int, most_k: int) -> None:
    """The ends of packed sequences, cu_seqlens, and the bounds of their lengths."""
    for name, ends, bound, most in (
        ("cu_seqlens_q", q, "max_seqlen_q", most_q),
        ("cu_seqlens_k", k, "max_seqlen_k", most_k),
    ):
        if layout != "thd":
            require(ends is None and not most, f"{name} and {bound} are for layout 'thd', got them with {layout!r}")
            continue
        require(most > 0, f"{bound} must be given for layout 'thd', the longest sequence or more, got {most}")
        require(ends is not None, f"{name} must be given for layout 'thd', got None")
        assert ends is not None
        dense = ends.dtype == torch.int32 and len(ends.shape) == 1 and ends.shape[0] > 0 and ends.stride(0) == 1
        require(dense, f"{name} must be int32 [sequences + 1] and contiguous, got {_said(ends)}")
    if q is not None and k is not None:
        require(q.shape == k.shape, f"cu_seqlens_k must be as long as cu_seqlens_q, {list(q.shape)}, got {_said(k)}")


def check_scales(q: TensorSpec, *scales: TensorSpec | None) -> None:
    """q_scale, k_scale and v_scale, of fp8 tensors alone."""
    for name, scale in zip(("q_scale", "k_scale", "v_scale"), scales):
        if q.dtype not in FP8:
            require(scale is None, f"{name} is for fp8 tensors, those of {dtype_name(q.dtype)} take None")
            continue
        fits = scale is not None and scale.dtype == torch.float32 and tuple(scale.shape) == (1,)
        came = "None" if scale is None else _said(scale)
        require(fits, f"{name} must be fp32[1] for tensors of {dtype_name(q.dtype)}, got {came}")


def check_vector(name: str, x: TensorSpec | None, count: int) -> None:
    """One fp32 number for every head of q."""
    if x is not None:
        fits = x.dtype == torch.float32 and tuple(x.shape) == (count,) and (count <= 1 or x.stride(0) == 1)
        require(fits, f"{name} must be fp32[{count}], one for each head of q, and contiguous, got {_said(x)}")


def _names(dtypes: Any) -> str:
    return ", ".join(map(dtype_name, dtypes))


def _said(x: TensorSpec) -> str:
    return f"{dtype_name(x.dtype)}{list(x.shape)} with strides {list(x.strides)}"
