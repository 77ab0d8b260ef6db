from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost, TensorSpec, case, dtype_name
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.parts.attention import pairs
from tilery.parts.attention_checks import check_packed, check_qkv, check_scale
from tilery.parts.attention_gradient_cases import draw
from tilery.parts.attention_indices import require_packed, spans
from tilery.parts.heads import check_heads, heads, model_sizes

# Weights and gradients of scores are rounded to q's dtype before they are multiplied, and the sums once more.
ALLOWED = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Problem(NamedTuple):
    """Of tensors for a run, of specs for a plan; strides are elements from one sequence, token, head to the next."""

    dout: Any
    dlse: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    cu_q: Any
    cu_k: Any
    dq: Any
    dk: Any
    dv: Any
    scale: float
    causal: bool
    batch: int  # sequences
    heads: int
    kv_heads: int
    queries: int  # of a sequence; of packed ones the most
    keys: int
    size: int  # D
    value: int  # E
    tokens: int  # of q and of k in one sequence; of packed ones all
    key_tokens: int
    layout: str

    def strides(self, *names: str) -> tuple[int, ...]:
        return tuple(step for name in names for step in heads(getattr(self, name), self.layout).strides)

    @property
    def lse_strides(self) -> tuple[int, int, int]:
        """Of lse, dlse and what is kept beside them: [B, H, S], packed [H, T]."""
        packed = self.layout == "thd"
        return (0 if packed else self.heads * self.tokens), 1, self.tokens


def problem(outs: Any, specs: tuple[Any, ...], scale: float | None = None) -> Problem:
    """`specs` are all arguments but the scale."""
    dout, dlse, q, k, v, out, lse, cu_q, cu_k, causal, layout, most_q, most_k = specs
    one, of_keys, packed = heads(q, layout), heads(k, layout), layout == "thd"
    queries, keys = one.tokens, of_keys.tokens
    return Problem(
        dout, dlse, q, k, v, out, lse, cu_q, cu_k, outs[0], outs[1], outs[2],
        one.size**-0.5 if scale is None else float(scale), causal,
        cu_q.shape[0] - 1 if packed else one.batch, one.heads, of_keys.heads,
        min(most_q, queries) if packed else queries, min(most_k, keys) if packed else keys, one.size, v.shape[-1],
        queries, keys, layout,
    )  # fmt: skip


def problem_of_run(outs: Any, args: tuple[Any, ...]) -> Problem:
    """The same of all arguments, as `run` has them."""
    return problem(outs, (*args[:9], *args[10:]), args[9])


def check(
    dout: TensorSpec, dlse: TensorSpec | None, q: TensorSpec, k: TensorSpec, v: TensorSpec, result: TensorSpec,
    lse: TensorSpec, cu_seqlens_q: TensorSpec | None, cu_seqlens_k: TensorSpec | None,
    causal: bool, layout: str, max_seqlen_q: int, max_seqlen_k: int,
) -> None:  # fmt: skip
    check_heads("q", q, layout)
    check_qkv(q, k, v, layout)
    check_packed(cu_seqlens_q, cu_seqlens_k, layout, max_seqlen_q, max_seqlen_k)
    shape = (*q.shape[:-1], v.shape[-1])
    for name, x in (("dout", dout), ("result", result)):
        check_heads(name, x, layout)
        fits = tuple(x.shape) == shape and x.dtype == q.dtype
        require(fits, f"{name} must be {dtype_name(q.dtype)}{list(shape)}, got {dtype_name(x.dtype)}{list(x.shape)}")
    batch, tokens, count, _, _ = heads(q, layout)
    of_lse = (count, tokens) if layout == "thd" else (batch, count, tokens)
    want = TensorSpec.contiguous(of_lse, torch.float32, q.device)
    for name, sums in (("lse", lse), ("dlse", dlse)):
        if sums is not None:
            even = all(size <= 1 or a == b for size, a, b in zip(sums.shape, sums.strides, want.strides))
            fits = sums.dtype == want.dtype and sums.shape == want.shape and even
            require(fits, f"{name} must be fp32{list(want.shape)} and contiguous, got {sums}")


def outputs(dout: TensorSpec, dlse: TensorSpec | None, q: TensorSpec, k: TensorSpec, v: TensorSpec, *_: Any) -> Any:
    return tuple(TensorSpec.contiguous(x.shape, x.dtype, x.device) for x in (q, k, v))


def indices(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, scale: float | None, causal: bool, layout: str,
    max_seqlen_q: int, max_seqlen_k: int,
) -> None:  # fmt: skip
    require_packed(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def cost(*specs: Any) -> Cost:
    """Five products of what the forward has two; packed sequences count as if all were as long."""
    p = problem(outputs(*specs), specs)
    queries, keys = p.queries, p.keys
    if p.cu_q is not None:
        queries, keys = (-(-x.shape[0] // max(p.batch, 1)) for x in (p.q, p.k))
    flops = 2 * p.batch * p.heads * pairs(queries, keys, p.causal, 0) * (3 * p.size + 2 * p.value)
    reads = sum(x.nbytes for x in specs if isinstance(x, TensorSpec))
    return Cost(flops, reads, sum(x.nbytes for x in (p.dq, p.dk, p.dv)))


def bucket(*specs: Any) -> Bucket:
    p = problem(outputs(*specs), specs)
    exact = f"q={p.heads},k={p.kv_heads},d={p.size},e={p.value},{dtype_name(p.q.dtype)},{p.layout}"
    exact += ",causal" if p.causal else ""
    return Bucket(exact=exact, scaled={"m": p.queries, "keys": p.keys, "batch": p.batch})


# Peers and cases


def _torch(dout: Tensor, dlse: Tensor | None, *rest: Any) -> Any:
    """FlashAttention-2 as torch has it, from what a forward saved; its own of a CPU takes a key for every head."""
    q, k, v, out, lse, cu_q, _, scale, causal, layout, _, _ = rest
    if dlse is not None or cu_q is not None or (causal and _lengths_differ(q, k, layout)):
        raise NotImplementedError("torch's backward has no gradient of lse, no packed sequences and no longer keys")
    given = [x if layout == "bhsd" else x.transpose(1, 2) for x in (dout, q, k, v, out)]
    if q.is_cuda:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        none, most = torch.empty(0, dtype=torch.int64, device=q.device), (given[1].shape[2], given[2].shape[2])
        grads = flash(*given, lse, None, None, *most, 0.0, causal, none, none, scale=scale)
    else:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        count = given[1].shape[1] // given[2].shape[1]
        given[2:4] = [x.repeat_interleave(count, 1) for x in given[2:4]]
        dq, *both = flash(*given, lse, 0.0, causal, scale=scale)
        grads = dq, *(x.unflatten(1, (-1, count)).sum(2) for x in both)
    return tuple(x if layout == "bhsd" else x.transpose(1, 2) for x in grads)


def _lengths_differ(q: Tensor, k: Tensor, layout: str) -> bool:
    return heads(q, layout).tokens != heads(k, layout).tokens


_LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16", "dlse": False}
_CPU: dict[str, Any] = {"m": 1024, "heads": 8, "kv_heads": 2, "n": 64, "dlse": False}


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=draw, allowed=ALLOWED,
    rounds_between=True, rows_cancel=True, runtime=("scale",),
    check_runtime=check_scale,
    kernels=("numba", "triton"), baselines=baselines(torch=_torch),
    indices=indices,
    model_sizes=lambda model: [] if model.kv_lora_rank else model_sizes(model),
    cases={
        "test": [
            case(m=5, heads=2, kv_heads=1, n=16, dtype="fp32"),
            case(m=40, keys=70, heads=4, kv_heads=2, n=64, dtype="fp16"),  # the last query at the last key
            case(m=40, heads=4, kv_heads=2, n=64, dtype="bf16"),
            case(m=70, keys=33, heads=3, kv_heads=3, n=32, dtype="fp32"),  # queries that see nothing
            case(m=37, keys=80, heads=4, kv_heads=1, n=80, dtype="fp16", causal=False, batch=2, order="bhsd"),
            case(m=20, heads=2, kv_heads=2, n=128, dtype="bf16", causal=False, dlse=False),
            case(m=130, heads=2, kv_heads=1, n=96, value=64, dtype="fp16", dlse=False),
            case(m=20, heads=2, kv_heads=1, n=192, value=128, dtype="bf16"),
            case(m=12, heads=2, kv_heads=1, n=256, dtype="bf16"),
            case(m=12, heads=2, kv_heads=1, n=256, dtype="fp32"),
            case(m=0, heads=4, kv_heads=2, n=32, dtype="fp16", order="thd", lengths="3+17+0+9"),
            case(m=0, heads=2, kv_heads=1, n=32, dtype="fp32", order="thd", lengths="3:7+20:5+0:4+4:0", causal=False),
            case(m=0, heads=2, kv_heads=1, n=64, dtype="bf16", order="thd", lengths="70:70+9:33"),
            case(m=20, heads=2, kv_heads=1, n=32, dtype="fp16", scale=-0.3, causal=False),
            case(
                m=0, heads=2, kv_heads=1, n=16, dtype="fp32", order="thd", lengths="3:7+20:5+4:9",
                wrong="q0:1+q3:1073741824",
            ),
            case(m=0, heads=2, kv_heads=1, n=16, dtype="fp16", order="thd", lengths="9+4+20", wrong="k3:36"),
            case(m=1, heads=8, kv_heads=2, n=16, dtype="fp32"),  # one key: all of dq comes from dlse
            case(m=5, keys=0, heads=2, kv_heads=1, n=16, dtype="fp32"),  # every query sees nothing
            case(m=0, heads=2, kv_heads=1, n=32, dtype="fp16"),  # nothing to launch
            case(m=20, heads=4, kv_heads=2, n=32, dtype="fp16", layout="padded"),
            case(m=20, heads=4, kv_heads=2, n=32, dtype="fp32", layout="misaligned", order="bhsd"),
            case(m=20, heads=4, kv_heads=2, n=32, dtype="bf16", layout="misaligned"),
            case(m=6, heads=2, kv_heads=1, n=32, dtype="fp16", layout="far"),
            case(m=5, heads=2, kv_heads=1, n=16, dtype="fp32", special="nan"),
        ],
        "bench": [
            case(m=4096, batch=4, **_LLAMA),
            case(m=4096, batch=4, causal=False, **_LLAMA | {"kv_heads": 32}),
            case(m=4096, batch=4, **_LLAMA | {"heads": 16, "kv_heads": 16, "n": 64}),
            case(m=16384, **_LLAMA),
        ],
        "bench_cpu": [case(dtype=dtype, **_CPU) for dtype in ("fp32", "bf16")],
    },
)  # fmt: skip
def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, scale: float | None = None,
    causal: bool = False, layout: str = "bshd", max_seqlen_q: int = 0, max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of attention_lse: dq = scale · g k, dk = scale · gᵀ q, dv = wᵀ dout; result and lse are the forward's.

    w = exp(scores - lse) are the weights, g = w · (dout vᵀ - sum(dout · result) + dlse) the gradients of scores. Heads
    that share a key add up. dlse None is zero; tokens of no sequence have zero, those of a sequence that is cut NaN, as
    in attention. Other arguments are attention's.
    """
    how = q.shape[-1] ** -0.5 if scale is None else scale, causal
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        of_keys = spans(cu_seqlens_k, len(k), max_seqlen_k)
        for mine, keys in zip(spans(cu_seqlens_q, len(q), max_seqlen_q), of_keys):
            a, c = mine.tokens, keys.tokens
            dq[a], dk[c], dv[c] = torch.nan, torch.nan, torch.nan
            if mine.sound and keys.sound:
                of_lse = None if dlse is None else dlse[:, a]
                given = dout[a], of_lse, q[a], k[c], v[c], result[a], lse[:, a]
                dq[a], dk[c], dv[c] = _gradients(*given, *how)
        return dq, dk, dv
    turned = [x.transpose(1, 2) if layout == "bhsd" else x for x in (dout, q, k, v, result)]
    made = [
        _gradients(do, None if dlse is None else dlse[b], a, c, d, o, lse[b], *how)
        for b, (do, a, c, d, o) in enumerate(zip(*turned))
    ]
    grads = [torch.stack(x) for x in zip(*made)] if made else [torch.zeros_like(x) for x in turned[1:4]]
    dq, dk, dv = (x.transpose(1, 2) if layout == "bhsd" else x for x in grads)
    return dq, dk, dv


def _gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of one sequence: q [S, H, D], k [T, G, D], v [T, G, E], lse [H, S]; keys one head after another, for memory."""
    share, made = q.shape[1] // k.shape[1], []
    for group in range(k.shape[1]):
        of = slice(group * share, (group + 1) * share)
        mine = dout[:, of], None if dlse is None else dlse[of], q[:, of], k[:, group], v[:, group], out[:, of], lse[of]
        made.append(_group(*mine, scale, causal))
    dq, dk, dv = zip(*made)
    return torch.cat(dq, 1), torch.stack(dk, 1), torch.stack(dv, 1)


def _group(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Of the heads that share k [T, D] and v [T, E]."""
    queries, keys = q.shape[0], k.shape[0]
    scores = torch.einsum("shd,td->hst", q, k) * scale
    if causal:
        place = torch.arange(queries, device=q.device).unsqueeze(1) + keys - queries
        scores = scores.masked_fill(torch.arange(keys, device=q.device) > place, -torch.inf)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1)).to(q.dtype)
    shift = (dout * out).sum(-1).t() - (0 if dlse is None else dlse)
    grad = weights * (torch.einsum("she,te->hst", dout, v) - shift.unsqueeze(-1)).to(q.dtype) * scale
    dk, dv = torch.einsum("hst,shd->td", grad, q), torch.einsum("hst,she->te", weights, dout)
    return torch.einsum("hst,td->shd", grad, k), dk, dv
