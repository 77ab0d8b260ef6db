"""Who attention and its backward are held against: torch's own, as it chooses or forced to cuDNN or FlashAttention."""

import functools
import inspect
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilery.core.peers import Saved
from tilery.ops.attention import reference
from tilery.ops.attention.call import AttentionCall
from tilery.ops.attention.paged_peers import host_list

_NAMES = tuple(inspect.signature(reference.attention_lse).parameters)  # the arguments of attention, in their order


def named(args: tuple[Any, ...]) -> Any:
    return AttentionCall(dict(zip(_NAMES, args, strict=True)))


def _require_without(call: Any, who: str, *names: str) -> None:
    for name in names:
        given = getattr(call, name)
        if isinstance(given, Tensor) or given:
            raise NotImplementedError(f"{who} has no {name}")


def _require_in_torch(call: Any, who: str) -> None:
    _require_without(call, who, "softcap", "slopes", "sinks", "q_scale")
    if call.scale is not None and call.scale <= 0:
        raise NotImplementedError(f"{who} gives NaN where a scale is not positive, got {call.scale}")


def torch_sdpa(*args: Any) -> Tensor:
    """scaled_dot_product_attention, with the kernel that torch chooses; of packed sequences a call for each."""
    call = named(args)
    if call.cu_seqlens_q is None:
        return _sdpa(call, "torch's attention")
    _require_in_torch(call, "torch's attention")
    _require_without(call, "torch's attention of packed sequences", "window", "bias")
    out = call.q.new_zeros(*call.q.shape[:2], call.v.shape[2])
    starts = (host_list(x) for x in (call.cu_seqlens_q, call.cu_seqlens_k))
    for (q0, q1), (k0, k1) in zip(*map(pairwise, starts)):
        if q1 > q0 and k1 > k0:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (call.q[q0:q1], call.k[k0:k1], call.v[k0:k1]))
            mask, causal = _causal_mask(q1 - q0, k1 - k0) if call.causal else (None, False)
            made = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=call.scale, enable_gqa=True)
            out[q0:q1] = made[0].transpose(0, 1)
    return out


def cudnn(*args: Any) -> Tensor:
    call = named(args)
    if call.causal and call.tokens != call.key_tokens:
        raise NotImplementedError("torch gives cuDNN no mask of fewer queries than keys")
    _require_without(call, "cuDNN, as torch calls it,", "cu_seqlens_q", "window")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(call, "cuDNN, as torch calls it,")


def flash(*args: Any) -> Tensor:
    return flash_lse(*args)[0]


def torch_sdpa_lse(*args: Any) -> tuple[Tensor, None]:
    """It gives no lse."""
    return torch_sdpa(*args), None


def cudnn_lse(*args: Any) -> tuple[Tensor, None]:
    """As torch calls it, it gives no lse."""
    return cudnn(*args), None


def flash_lse(*args: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention-2, as torch's attention calls it."""
    call = named(args)
    _require_without(call, "torch's FlashAttention", "key_mask", "bias", "slopes", "sinks", "softcap", "q_scale")
    turned = call.layout == "bhsd"
    q, k, v = (x.transpose(1, 2) if turned else x for x in (call.q, call.k, call.v))
    window = call.window
    sides = (window - 1, 0 if call.causal else window - 1) if window else (None, None)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, call.cu_seqlens_q, call.cu_seqlens_k,
        call.max_seqlen_q or q.shape[1], call.max_seqlen_k or k.shape[1], 0.0, call.causal, False,
        scale=call.scale, window_size_left=sides[0], window_size_right=sides[1],
    )  # fmt: skip
    return out.transpose(1, 2) if turned else out, lse


def _sdpa(call: Any, who: str) -> Tensor:
    _require_in_torch(call, who)
    turned = call.layout == "bshd"
    q, k, v = (x.transpose(1, 2) if turned else x for x in (call.q, call.k, call.v))
    mask, causal = _mask(call)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2) if turned else out


def _mask(call: Any) -> tuple[Any, bool]:
    """The mask that torch's attention takes, and whether it is causal by itself: it aligns that at the first key."""
    seen, bias, queries, keys = call.key_mask, call.bias, call.queries, call.keys
    if call.window:
        _require_without(call, "torch's attention with a window", "key_mask", "bias")
        return _window_mask(queries, keys, call.window, call.causal, call.q.device), False
    if seen is None and bias is None:
        return _causal_mask(queries, keys) if call.causal else (None, False)
    mask = bias if seen is None else seen[:, None, None, :]
    if seen is not None and bias is not None:
        mask = bias.masked_fill(~mask, -torch.inf)
    if call.causal:
        visible = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(keys - queries)
        mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
    return (mask if mask.dtype == torch.bool else mask.to(call.q.dtype)), False


def _causal_mask(queries: int, keys: int) -> tuple[Any, bool]:
    """The last query sees all keys."""
    if queries == keys:
        return None, True
    from torch.nn.attention.bias import causal_lower_right  # imports Triton

    return causal_lower_right(queries, keys), False


@functools.lru_cache(maxsize=2)
def _window_mask(queries: int, keys: int, window: int, causal: bool, where: torch.device) -> Tensor:
    """[queries, keys], made before it is timed."""
    apart = torch.arange(queries, device=where).unsqueeze(1) + keys - queries - torch.arange(keys, device=where)
    return (apart < window) & (apart >= 0 if causal else apart > -window)


def torch_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, scale: float | None, causal: bool, layout: str,
    max_seqlen_q: int, max_seqlen_k: int, window: int, softcap: float,
) -> Any:  # fmt: skip
    """FlashAttention-2 as torch has it, from what a forward saved; its own for a CPU takes a key for every head."""
    given = [_by_head(x, layout) for x in (dout, q, k, v, result)]
    queries, keys = given[1].shape[2], given[2].shape[2]
    _require_backward(dlse, cu_seqlens_q, causal and queries != keys, window or softcap)
    if q.is_cuda:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        none = torch.empty(0, dtype=torch.int64, device=q.device)
        grads = backward(*given, lse, None, None, queries, keys, 0.0, causal, none, none, scale=scale)
    else:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        group = given[1].shape[1] // given[2].shape[1]
        given[2:4] = [x.repeat_interleave(group, 1) for x in given[2:4]]
        dq, *both = backward(*given, lse, 0.0, causal, scale=scale)
        grads = dq, *(x.unflatten(1, (-1, group)).sum(2) for x in both)
    return tuple(_by_head(x, layout) for x in grads)


def cudnn_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, scale: float | None, causal: bool, layout: str,
    max_seqlen_q: int, max_seqlen_k: int, window: int, softcap: float,
) -> Any:  # fmt: skip
    """cuDNN as torch has it, from what its own forward saved."""
    given = [_by_head(x, layout) for x in (dout, q, k, v)]
    _require_backward(dlse, cu_seqlens_q, causal and given[1].shape[2] != given[2].shape[2], window or softcap)
    out, own_lse, *sizes, seed, offset, _ = _cudnn_saved(q, k, v, layout, scale, causal)
    backward = _cudnn_op("_backward")
    grads = backward(*given, out, own_lse, seed, offset, None, *sizes, 0.0, causal, scale=scale)
    return tuple(_by_head(x, layout) for x in grads)


def _by_head(x: Tensor, layout: str) -> Tensor:
    """[B, H, S, D] of a tensor of the op's layout, or back."""
    return x if layout == "bhsd" else x.transpose(1, 2)


def _require_backward(dlse: Tensor | None, cu_seqlens: Tensor | None, longer_keys: bool, scored: float) -> None:
    if dlse is not None or cu_seqlens is not None or longer_keys:
        raise NotImplementedError("torch's backward has no gradient of lse, no packed sequences and no longer keys")
    if scored:
        raise NotImplementedError("torch's backward has neither windows nor soft caps")


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, layout: str, scale: float | None, causal: bool) -> Any:
    given = [_by_head(x, layout) for x in (q, k, v)]
    return _cudnn_op()(*given, None, True, 0.0, causal, False, scale=scale)


def _cudnn_op(more: str = "") -> Any:
    if not torch.cuda.is_available():
        raise NotImplementedError("cuDNN runs on a GPU alone")
    return getattr(torch.ops.aten, f"_scaled_dot_product_cudnn_attention{more}")


_cudnn_saved = Saved(_cudnn_forward)
