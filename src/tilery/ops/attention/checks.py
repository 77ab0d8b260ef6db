"""Checks of the arguments of attention's ops on whole sequences: tensors, packed sequences, options."""

from typing import Any

import torch

from tilery.base.errors import BadInput, require
from tilery.base.spec import TensorSpec, dtype_name
from tilery.ops.attention.call import FP8, LAYOUTS, AttentionCall, BackwardCall
from tilery.ops.rope import heads

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_SOFTCAP = 1e-30
_LARGEST_SCALE = torch.finfo(torch.float32).max
_SHAPES = {"bshd": "[B, S, H, D]", "bhsd": "[B, H, S, D]", "thd": "[T, H, D]"}


def check(call: AttentionCall) -> None:
    """Arguments of attention and attention_lse."""
    check_qkv(call)
    check_packed(call)
    for name in ("q_scale", "k_scale", "v_scale"):
        _check_fp8_scale(name, getattr(call, name), call.q)
    for name in ("slopes", "sinks"):
        check_per_head(name, getattr(call, name), call.heads)
    for name in ("key_mask", "bias"):
        given = getattr(call, name) is not None
        require(not given or not call.packed, f"{name} is for layouts bshd and bhsd, got it with layout 'thd'")
    _check_key_mask(call)
    _check_bias(call)
    check_window(call.window)
    check_softcap(call.softcap)


def check_window(window: int) -> None:
    require(window >= 0, f"window must be 0 (none) or the number of keys that a query sees, got {window}")


def check_softcap(softcap: float) -> None:
    fits = softcap == 0 or _LEAST_SOFTCAP <= softcap <= 1 / _LEAST_SOFTCAP  # kernels divide by it in fp32
    require(fits, f"softcap must be 0 (none) or a positive number from 1e-30 to 1e30, got {softcap}")


def check_scale(scale: float | None) -> None:
    """`Op.check_runtime` of the family: kernels would not agree on what NaN and infinity mean.

    It runs at every call, so it makes a message only where one is needed.
    """
    if scale is not None and not abs(scale) <= _LARGEST_SCALE:
        raise BadInput(f"scale must be None (1 / sqrt of a head's size) or a finite number in fp32, got {scale}")


def check_qkv(call: AttentionCall) -> None:
    q, k, v, layout = call.q, call.k, call.v, call.layout
    require(layout in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    known = (*FLOATS, *FP8)
    for name, x in (("q", q), ("k", k), ("v", v)):
        wanted = _SHAPES[layout]
        require(len(x.shape) == len(layout), f"{name} must be {wanted} as layout {layout!r} says, got {list(x.shape)}")
        require(x.dtype in known, f"{name} must be one of {_names(known)}, got {dtype_name(x.dtype)}")
        require(x.dtype == q.dtype, f"{name} must be {dtype_name(q.dtype)} as q is, got {dtype_name(x.dtype)}")
        require(
            x.stride(-1) == 1,
            f"{name} must have stride 1 along its last dimension, got strides {list(x.strides)}; "
            "call .contiguous() on it",
        )
        least = 32 if x.dtype in FP8 else 16
        sizes = [size for size in HEAD_DIMS if size % least == 0]
        require(x.shape[-1] in sizes, f"{name}'s heads must be of {', '.join(map(str, sizes))}, got {x.shape[-1]}")
    *of_keys, k_size = k.shape
    *of_values, v_size = v.shape
    same_batch = call.packed or k.shape[0] == q.shape[0]
    require(
        of_keys == of_values and k_size == q.shape[-1] >= v_size and same_batch,
        "k must be as q but for tokens and heads, v as k but for a head's size, no larger than k's; "
        f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
    )
    grouped = call.kv_heads > 0 and call.heads % call.kv_heads == 0
    require(grouped, f"q's heads must be a multiple of k's, got {call.heads} and {call.kv_heads}")


def lse_spec(call: AttentionCall) -> TensorSpec:
    shape = (call.heads, call.tokens) if call.packed else (call.batch, call.heads, call.tokens)
    return TensorSpec.contiguous(shape, torch.float32, call.q.device)


def check_results(call: BackwardCall) -> None:
    """What a backward is given of the forward, and gradients of that."""
    shape, dtype = (*call.q.shape[:-1], call.value_dim), call.q.dtype
    for name in ("dout", "result"):
        x = getattr(call, name)
        heads.check_heads(name, x, call.layout)
        fits = tuple(x.shape) == shape and x.dtype == dtype
        require(fits, f"{name} must be {dtype_name(dtype)}{list(shape)}, got {dtype_name(x.dtype)}{list(x.shape)}")
    want = lse_spec(call)
    for name, sums in (("lse", call.lse), ("dlse", call.dlse)):
        if sums is not None:
            even = all(size <= 1 or a == b for size, a, b in zip(sums.shape, sums.strides, want.strides))
            fits = sums.dtype == want.dtype and sums.shape == want.shape and even
            require(fits, f"{name} must be fp32{list(want.shape)} and contiguous, got {sums}")


def check_packed(call: AttentionCall) -> None:
    """The ends of packed sequences, cu_seqlens, and the bounds of their lengths."""
    q, k = call.cu_seqlens_q, call.cu_seqlens_k
    for name, ends, bound, longest in (
        ("cu_seqlens_q", q, "max_seqlen_q", call.max_seqlen_q),
        ("cu_seqlens_k", k, "max_seqlen_k", call.max_seqlen_k),
    ):
        if not call.packed:
            alone = ends is None and not longest
            require(alone, f"{name} and {bound} are for layout 'thd', got them with {call.layout!r}")
            continue
        require(longest > 0, f"{bound} must be given for layout 'thd', the longest sequence or more, got {longest}")
        require(ends is not None, f"{name} must be given for layout 'thd', got None")
        assert ends is not None
        dense = ends.dtype == torch.int32 and len(ends.shape) == 1 and ends.shape[0] > 0 and ends.stride(0) == 1
        require(dense, f"{name} must be int32 [sequences + 1] and contiguous, got {_said(ends)}")
    if q is not None and k is not None:
        require(q.shape == k.shape, f"cu_seqlens_k must be as long as cu_seqlens_q, {list(q.shape)}, got {_said(k)}")


def _check_fp8_scale(name: str, scale: TensorSpec | None, q: TensorSpec) -> None:
    if q.dtype not in FP8:
        require(scale is None, f"{name} is for fp8 tensors, those of {dtype_name(q.dtype)} take None")
        return
    fits = scale is not None and scale.dtype == torch.float32 and tuple(scale.shape) == (1,)
    came = "None" if scale is None else _said(scale)
    require(fits, f"{name} must be fp32[1] for tensors of {dtype_name(q.dtype)}, got {came}")


def check_per_head(name: str, x: TensorSpec | None, heads: int) -> None:
    if x is not None:
        fits = x.dtype == torch.float32 and tuple(x.shape) == (heads,) and (heads <= 1 or x.stride(0) == 1)
        require(fits, f"{name} must be fp32[{heads}], one for each head of q, and contiguous, got {_said(x)}")


def _check_key_mask(call: AttentionCall) -> None:
    mask, shape = call.key_mask, (call.batch, call.keys)
    if mask is not None:
        fits = mask.dtype == torch.bool and tuple(mask.shape) == shape
        require(fits, f"key_mask must be bool{list(shape)}, True where a key is seen, got {_said(mask)}")


def _check_bias(call: AttentionCall) -> None:
    bias, batch, heads = call.bias, call.batch, call.heads
    if bias is not None:
        kinds = dict.fromkeys((*([] if call.is_fp8 else [call.q.dtype]), torch.float32))
        wide = len(bias.shape) == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
        fits = wide and tuple(bias.shape[2:]) == (call.queries, call.keys) and bias.dtype in kinds
        want = f"{' or '.join(map(dtype_name, kinds))} [1 or {batch}, 1 or {heads}, {call.queries}, {call.keys}]"
        require(fits, f"bias must be {want}, got {_said(bias)}")


def _names(dtypes: Any) -> str:
    return ", ".join(map(dtype_name, dtypes))


def _said(x: TensorSpec) -> str:
    return f"{dtype_name(x.dtype)}{list(x.shape)} with strides {list(x.strides)}"
