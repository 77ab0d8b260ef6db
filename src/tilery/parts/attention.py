"""Attention: what every op of the family means, for one sequence; and the contract of attention and attention_lse.

Their arguments but for the scale, which no decision depends on, are in their order: `Problem` names what they hold.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, dtype_name
from tilery.parts import attention_checks
from tilery.parts.attention_checks import cutting_window
from tilery.parts.attention_indices import spans
from tilery.parts.heads import heads

FP8 = attention_checks.FP8
# The weights are rounded to the values' dtype, then the sum is: 2.4e-3 in bf16, 3e-4 in fp16. An lse is fp32 always,
# of products that fp8 tensor cores may keep 14 bits of.
ALLOWED = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}
ALLOWED_FP8 = {torch.float32: 1e-3, torch.bfloat16: 4e-3}
_SCALE = 12  # where the scale stands among all arguments


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, window: int = 0, softcap: float = 0.0,
    seen: Tensor | None = None, bias: Tensor | None = None, slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The reference: q [S, H, D], k [T, G, D], v [T, G, E] -> out [S, H, E], lse [H, S]; H / G heads share a key.

    Query i stands at place i + T - S among the keys, so the last query stands at the last key. `causal`: it sees keys
    up to its place; `window`: those nearer than that; `seen` [T]: those that are no padding; `bias` [1 or H, S, T] and
    `slopes` [H] (times key - place) are added to scores, which `softcap` has bent before. `sinks` [H] are scores
    without a value. A query that sees nothing has zeros and an lse of -inf.
    """
    share, made = q.shape[1] // k.shape[1], []
    for group in range(k.shape[1]):  # one after another: the scores of all heads may be more than a GPU holds
        of = slice(group * share, (group + 1) * share)
        each = bias if bias is None or bias.shape[0] == 1 else bias[of]
        per_head = (x if x is None else x[of] for x in (slopes, sinks))
        made.append(_group(q[:, of], k[:, group], v[:, group], scale, causal, window, softcap, seen, each, *per_head))
    return torch.cat([out for out, _ in made], 1), torch.cat([lse for _, lse in made])


def _group(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int, softcap: float, seen: Tensor | None,
    bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attend` of the heads that share k [T, D] and v [T, E]."""
    (queries, heads), keys = q.shape[:2], k.shape[0]
    scores = torch.einsum("shd,td->hst", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(queries, device=q.device).unsqueeze(1) + keys - queries
    key = torch.arange(keys, device=q.device)
    if slopes is not None:
        scores = scores + slopes.to(q.dtype)[:, None, None] * (key - place)
    if bias is not None:
        scores = scores + bias
    kept = key <= place if causal else torch.ones_like(key <= place)
    if window:
        kept = kept & ((place - key).abs() < window)
    if seen is not None:
        kept = kept & seen
    scores = scores.masked_fill(~kept, -torch.inf)
    lse = scores.logsumexp(-1) if keys else scores.new_full((heads, queries), -torch.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(q.dtype)[:, None])
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return torch.einsum("hst,te->she", weights, v), lse


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, key_mask: Tensor | None,
    bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None, q_scale: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, scale: float | None, causal: bool, window: int, softcap: float, layout: str,
    max_seqlen_q: int, max_seqlen_k: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sequence by sequence; packed tokens that no sequence has are zero, with an lse of -inf, those of cut ones NaN."""
    q, k, v = (x if s is None else x * s for x, s in ((q, q_scale), (k, k_scale), (v, v_scale)))
    how: dict[str, Any] = {"causal": causal, "window": window, "softcap": softcap, "slopes": slopes, "sinks": sinks}
    how["scale"] = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        out, lse = q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full((q.shape[1], q.shape[0]), -torch.inf)
        of_keys = spans(cu_seqlens_k, len(k), max_seqlen_k)
        for mine, keys in zip(spans(cu_seqlens_q, len(q), max_seqlen_q), of_keys):
            out[mine.tokens], lse[:, mine.tokens] = torch.nan, torch.nan
            if mine.sound and keys.sound:
                found = attend(q[mine.tokens], k[keys.tokens], v[keys.tokens], **how)
                out[mine.tokens], lse[:, mine.tokens] = found
        return out, lse
    turned = [x.transpose(1, 2) if layout == "bhsd" else x for x in (q, k, v)]
    made = [
        attend(*each, seen=key_mask if key_mask is None else key_mask[b], bias=_of(bias, b), **how)
        for b, each in enumerate(zip(*turned))
    ]
    batch, queries, count, _ = turned[0].shape
    out = torch.stack([o for o, _ in made]) if made else q.new_zeros(batch, queries, count, v.shape[-1])
    lse = torch.stack([e for _, e in made]) if made else q.new_zeros(batch, count, queries)
    return out.transpose(1, 2) if layout == "bhsd" else out, lse


def _of(bias: Tensor | None, sequence: int) -> Tensor | None:
    return bias if bias is None else bias[sequence if bias.shape[0] > 1 else 0]


# What kernels are given, and what it costs


class Problem(NamedTuple):
    """Of tensors for a run, of specs for a plan; strides are elements from one sequence, token, head to the next."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any  # None where it is not asked for
    cu_q: Any
    cu_k: Any
    key_mask: Any
    bias: Any
    slopes: Any
    sinks: Any
    q_scale: Any
    k_scale: Any
    v_scale: Any
    scale: float
    causal: bool
    window: int
    softcap: float
    batch: int  # sequences
    heads: int
    kv_heads: int
    queries: int  # of a sequence; of packed ones the most
    keys: int
    size: int  # D
    value: int  # E
    q_strides: tuple[int, int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    out_strides: tuple[int, int, int]


def problem(outs: Any, specs: tuple[Any, ...], scale: float | None = None) -> Problem:
    """`specs` are all arguments but the scale."""
    *inputs, causal, window, softcap, layout, most_q, most_k = specs
    q, k, v, cu_q, *_ = inputs
    one, of_keys, of_values = heads(q, layout), heads(k, layout), heads(v, layout)
    packed = layout == "thd"
    queries, keys = one.tokens, of_keys.tokens
    if packed:  # no sequence has more tokens than there are
        queries, keys = min(most_q, queries), min(most_k, keys)
    made: tuple[Any, ...] = (
        *inputs[:3], outs[0], outs[1] if len(outs) > 1 else None, *inputs[3:],
        one.size**-0.5 if scale is None else float(scale),
        causal, cutting_window(window, queries, keys), softcap,
        cu_q.shape[0] - 1 if packed else one.batch, one.heads, of_keys.heads,
        queries, keys, one.size, of_values.size,
        one.strides, of_keys.strides, of_values.strides, heads(outs[0], layout).strides,
    )  # fmt: skip
    return Problem(*made)


def problem_of_run(outs: Any, args: tuple[Any, ...]) -> Problem:
    """The same of all arguments, as `run` has them."""
    return problem(outs, (*args[:_SCALE], *args[_SCALE + 1 :]), args[_SCALE])


def outputs(q: TensorSpec, k: TensorSpec, v: TensorSpec, *_: Any) -> tuple[TensorSpec, ...]:
    kind = torch.bfloat16 if q.dtype in FP8 else q.dtype
    return (TensorSpec.contiguous((*q.shape[:-1], v.shape[-1]), kind, q.device),)


def outputs_lse(q: TensorSpec, k: TensorSpec, v: TensorSpec, *rest: Any) -> tuple[TensorSpec, ...]:
    layout = rest[-3]
    batch, queries, count, _, _ = heads(q, layout)
    shape = (count, queries) if layout == "thd" else (batch, count, queries)
    return *outputs(q, k, v), TensorSpec.contiguous(shape, torch.float32, q.device)


def allowed(q: TensorSpec, *_: Any) -> dict[torch.dtype, float]:
    return ALLOWED_FP8 if q.dtype in FP8 else ALLOWED


def pairs(queries: int, keys: int, causal: bool, window: int) -> int:
    """Of query and key that see each other, in one sequence."""

    def below(shift: int) -> int:
        """The keys up to a query's place + shift, summed over the queries."""

        def ramp(x: int) -> int:
            return 0 if x <= 0 else x * (x + 1) // 2 if x <= keys else keys * (keys + 1) // 2 + (x - keys) * keys

        return ramp(keys - 1 + shift) - ramp(keys - queries - 1 + shift)

    last = 1 if causal else window
    return (below(last) if last else queries * keys) - (below(1 - window) if window else 0)


def cost(q: TensorSpec, k: TensorSpec, v: TensorSpec, *rest: Any) -> Cost:
    """Packed sequences count as if all were as long: their lengths are the device's."""
    p = problem(outputs(q, k, v), (q, k, v, *rest))
    batch, queries, keys = p.batch, p.queries, p.keys
    if p.cu_q is not None:
        queries, keys = (-(-x.shape[0] // max(batch, 1)) for x in (q, k))
    flops = 2 * batch * p.heads * pairs(queries, keys, p.causal, p.window) * (p.size + p.value)
    reads = sum(x.nbytes for x in (q, k, v, *rest) if isinstance(x, TensorSpec))
    return Cost(flops, reads, p.out.nbytes)


def cost_lse(q: TensorSpec, k: TensorSpec, v: TensorSpec, *rest: Any) -> Cost:
    flops, reads, writes = cost(q, k, v, *rest)
    return Cost(flops, reads, writes + outputs_lse(q, k, v, *rest)[1].nbytes)


def bucket(q: TensorSpec, k: TensorSpec, v: TensorSpec, *rest: Any) -> Bucket:
    p, layout = problem(outputs(q, k, v), (q, k, v, *rest)), rest[-3]
    exact = f"q={p.heads},k={p.kv_heads},d={p.size},e={p.value},{dtype_name(q.dtype)},{layout}"
    options = {"causal": p.causal, "softcap": p.softcap, "mask": p.key_mask, "bias": p.bias, "slopes": p.slopes}
    options["sinks"] = p.sinks
    exact += "".join(f",{name}" for name, on in options.items() if on) + (f",window={p.window}" if p.window else "")
    return Bucket(exact=exact, scaled={"m": p.queries, "keys": p.keys, "batch": p.batch})
