"""The attention function that Hugging Face models call: what they pass is honoured or refused."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput, require
from tilery.ops.attention.attention import attention
from tilery.ops.attention.attention_decode import attention_decode
from tilery.ops.attention.paged import MAX_QUERIES
from tilery.patch.attention_masks import Mask

BACKENDS = "tilery_backends"  # the attribute of an attention module that says which kernels a patch asked for
# What models hand on to every layer and no score depends on.
_UNRELATED = {
    "cache_position", "deterministic", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "shift_labels", "use_cache",
}  # fmt: skip
_REASONS = {
    "output_attentions": "the weights are never all there",
    "head_mask": "heads are not scaled one by one",
    "cache": "it reads no paged cache of transformers",
    **dict.fromkeys(
        ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        "position_ids alone tell it which sequences are packed",
    ),
}


def forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Mask | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, is_causal: bool | None = None, s_aux: Tensor | None = None,
    position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """query [B, H, S, D], key [B, G, T, D], value [B, G, T, E] -> [B, S, H, E], and no weights.

    A mask says all: causal and window as given count where there is none, or one of padding alone.
    """
    require(not dropout, f"attn_implementation 'tilery' has no dropout, got {dropout}; set attention_dropout=0")
    _refuse(others)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    said = _said(attention_mask, query, key, is_causal, sliding_window)
    if position_bias is not None:
        position_bias = position_bias.expand(-1, -1, query.shape[2], key.shape[2])
        said["bias"] = position_bias if "bias" not in said else position_bias + said["bias"]
    sinks = None if s_aux is None else s_aux.float().flatten()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    backends = getattr(module, BACKENDS, {})
    scoring: dict[str, Any] = {"sinks": sinks, "scale": scaling, "softcap": softcap or 0.0}
    if _few(q, k, v, sinks, said):
        lengths = torch.full((q.shape[0],), k.shape[1], dtype=torch.int32, device=q.device)
        scoring |= _chosen(backends, "attention_decode")
        return attention_decode(q, k, v, lengths, window=said["window"], **scoring), None
    return attention(q, k, v, **said, **scoring, **_chosen(backends, "attention")), None


def _chosen(backends: Any, op: str) -> dict[str, str]:
    return {"backend": backends[op]} if op in backends else {}


def _few(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, said: dict[str, Any]) -> bool:
    """Whether it is a step of decoding, which attention_decode takes; sequences with padding are not."""
    step = q.shape[1] == 1 or (q.shape[1] <= MAX_QUERIES and said.get("causal", False))
    plain = said.get("bias") is None and said.get("key_mask") is None
    alike = v.shape == k.shape and v.stride() == k.stride()
    graded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
    return step and plain and alike and not graded


def _refuse(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in _UNRELATED and value is not None and value is not False:
            why = _REASONS.get(name, "it does not know what that means for attention")
            raise BadInput(f"attn_implementation 'tilery' does not take {name}: {why}; leave it out or set 'sdpa'")


def _said(mask: Any, query: Tensor, key: Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    """The arguments of tilery.attention that a mask means."""
    if isinstance(mask, Mask):
        return _of_mask(mask, query, key, window)
    if mask is None or (mask.ndim == 2 and not mask.is_floating_point()):
        require(
            causal or not window,
            f"a sliding window of {window} in attention that is not causal comes with a mask, got none",
        )
        return {"causal": causal, "window": window or 0, "key_mask": None if mask is None else mask != 0}
    require(mask.ndim == 4, f"a mask must be [B, keys] of bools or [B, 1 or H, queries, keys], got {list(mask.shape)}")
    if mask.dtype != torch.bool:
        return {"bias": mask.expand(-1, -1, query.shape[2], -1)}
    if mask.shape[1] == mask.shape[2] == 1:  # the same for all queries, as for a single one
        return {"key_mask": mask[:, 0, 0].expand(query.shape[0], -1)}
    zero = torch.zeros((), dtype=query.dtype, device=mask.device)
    return {"bias": torch.where(mask, zero, -torch.inf).expand(-1, -1, query.shape[2], -1)}


def _of_mask(mask: Mask, query: Tensor, key: Tensor, window: int | None) -> dict[str, Any]:
    came = query.shape[2], key.shape[2]
    require(
        came == (mask.queries, mask.keys),
        f"the mask is of {mask.queries} queries and {mask.keys} keys, the layer has {came[0]} and {came[1]}",
    )
    require(
        not window or bool(mask.window) or mask.keys <= window,
        f"the layer has a sliding window of {window}, the mask that the model made for it has none",
    )
    return {"causal": mask.causal, "window": mask.window, "key_mask": mask.seen}
