"""Attention and its gradients in plain torch: what every op of the family means, for one sequence and for a batch."""

from typing import Any

import torch
from torch import Tensor

from tilery.ops.attention.indices import spans


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, window: int = 0, softcap: float = 0.0,
    key_mask: Tensor | None = None, bias: Tensor | None = None, slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence: q [S, H, D], k [T, G, D], v [T, G, E] -> out [S, H, E], lse [H, S]; H / G heads share a key.

    Query i is at position i + T - S among the keys, so the last query is at the last key. With `causal` it sees keys up
    to its position, with `window` those nearer than that; key_mask [T] is False for padding. Scores get a soft cap
    first; then bias [1 or H, S, T] and slopes [H], times key - position, are added. sinks [H] are scores without a
    value. A query that sees nothing has zeros and an lse of -inf.
    """
    size, made = q.shape[1] // k.shape[1], []
    for head in range(k.shape[1]):  # one after another: the scores of all heads may be more than a GPU holds
        group = slice(head * size, (head + 1) * size)
        own_bias = bias if bias is None or bias.shape[0] == 1 else bias[group]
        own_slopes, own_sinks = (x if x is None else x[group] for x in (slopes, sinks))
        found = _attend_group(
            q[:, group], k[:, head], v[:, head], scale, causal, window, softcap, key_mask, own_bias, own_slopes,
            own_sinks,
        )  # fmt: skip
        made.append(found)
    return torch.cat([out for out, _ in made], 1), torch.cat([lse for _, lse in made])


def _attend_group(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, softcap: float, key_mask: Tensor | None,
    bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attend` for the heads that share k [T, D] and v [T, E]."""
    (queries, heads), keys = q.shape[:2], k.shape[0]
    scores = torch.einsum("shd,td->hst", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.to(q.dtype)[:, None, None] * _apart(queries, keys, q.device)
    if bias is not None:
        scores = scores + bias
    visible = _visible(queries, keys, causal, window, q.device)
    if key_mask is not None:
        visible = visible & key_mask
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1) if keys else scores.new_full((heads, queries), -torch.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(q.dtype)[:, None])
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return torch.einsum("hst,te->she", p, v), lse


def _apart(queries: int, keys: int, where: torch.device) -> Tensor:
    """Positions of queries less those of keys [S, T]: the last query is at the last key."""
    return torch.arange(queries, device=where).unsqueeze(1) + keys - queries - torch.arange(keys, device=where)


def _visible(queries: int, keys: int, causal: bool, window: int, where: torch.device) -> Tensor:
    """Which keys each query sees [S, T]."""
    apart = _apart(queries, keys, where)
    visible = apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool)
    return visible & (apart.abs() < window) if window else visible


def attention_lse(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, key_mask: Tensor | None,
    bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None, q_scale: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, scale: float | None, causal: bool, window: int, softcap: float, layout: str,
    max_seqlen_q: int, max_seqlen_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All sequences. Packed tokens of no sequence are zero with an lse of -inf; those of an invalid one are NaN."""
    q, k, v = (x if s is None else x * s for x, s in ((q, q_scale), (k, k_scale), (v, v_scale)))
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "slopes": slopes, "sinks": sinks}
    how["scale"] = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full((q.shape[1], q.shape[0]), -torch.inf)
        for mine, keys in zip(spans(cu_seqlens_q, len(q), max_seqlen_q), spans(cu_seqlens_k, len(k), max_seqlen_k)):
            out[mine.tokens], lse[:, mine.tokens] = torch.nan, torch.nan
            if mine.valid and keys.valid:
                found = attend(q[mine.tokens], k[keys.tokens], v[keys.tokens], **how)
                out[mine.tokens], lse[:, mine.tokens] = found
        return out, lse
    by_token = _as_bshd(layout, q, k, v)
    made = [
        attend(*each, key_mask=None if key_mask is None else key_mask[b], bias=_bias_of(bias, b), **how)
        for b, each in enumerate(zip(*by_token))
    ]
    batch, queries, heads, _ = by_token[0].shape
    out = torch.stack([o for o, _ in made]) if made else q.new_zeros(batch, queries, heads, v.shape[-1])
    lse = torch.stack([e for _, e in made]) if made else q.new_zeros(batch, heads, queries)
    return _as_bshd(layout, out)[0], lse


def _as_bshd(layout: str, *tensors: Tensor) -> list[Tensor]:
    """Tensors of this layout as [B, S, H, D], or such tensors as ones of this layout."""
    return [x.transpose(1, 2) if layout == "bhsd" else x for x in tensors]


def _bias_of(bias: Tensor | None, sequence: int) -> Tensor | None:
    return bias if bias is None else bias[sequence if bias.shape[0] > 1 else 0]


# Gradients


def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, scale: float | None, causal: bool, layout: str,
    max_seqlen_q: int, max_seqlen_k: int, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv of all sequences; packed tokens of no sequence have zero, those of an invalid one NaN."""
    how = q.shape[-1] ** -0.5 if scale is None else scale, causal, window, softcap
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for mine, keys in zip(spans(cu_seqlens_q, len(q), max_seqlen_q), spans(cu_seqlens_k, len(k), max_seqlen_k)):
            a, b = mine.tokens, keys.tokens
            dq[a], dk[b], dv[b] = torch.nan, torch.nan, torch.nan
            if mine.valid and keys.valid:
                own_dlse = None if dlse is None else dlse[:, a]
                dq[a], dk[b], dv[b] = _gradients(dout[a], own_dlse, q[a], k[b], v[b], out[a], lse[:, a], *how)
        return dq, dk, dv
    by_token = _as_bshd(layout, dout, q, k, v, out)
    made = [
        _gradients(do, None if dlse is None else dlse[b], a, c, d, o, lse[b], *how)
        for b, (do, a, c, d, o) in enumerate(zip(*by_token))
    ]
    if not made:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dq, dk, dv = _as_bshd(layout, *(torch.stack(x) for x in zip(*made)))
    return dq, dk, dv


def _gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One sequence: q [S, H, D], k [T, G, D], v [T, G, E], lse [H, S]; keys one head after another, for memory."""
    size, made = q.shape[1] // k.shape[1], []
    for head in range(k.shape[1]):
        g = slice(head * size, (head + 1) * size)
        given = dout[:, g], None if dlse is None else dlse[g], q[:, g], k[:, head], v[:, head], out[:, g], lse[g]
        made.append(_group_gradients(*given, scale, causal, window, softcap))
    dq, dk, dv = zip(*made)
    return torch.cat(dq, 1), torch.stack(dk, 1), torch.stack(dv, 1)


def _group_gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`_gradients` for the heads that share k [T, D] and v [T, E]."""
    queries, keys = q.shape[0], k.shape[0]
    scores = torch.einsum("shd,td->hst", q, k) * scale
    slope: Any = scale
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores, slope = softcap * tanh, scale * (1 - tanh.square())
    scores = scores.masked_fill(~_visible(queries, keys, causal, window, q.device), -torch.inf)
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).to(q.dtype)
    delta = (dout * out).sum(-1).t() - (0 if dlse is None else dlse)
    ds = p * (torch.einsum("she,te->hst", dout, v) - delta.unsqueeze(-1)).to(q.dtype) * slope
    dk, dv = torch.einsum("hst,shd->td", ds, q), torch.einsum("hst,she->te", p, dout)
    return torch.einsum("hst,td->shd", ds, k), dk, dv
