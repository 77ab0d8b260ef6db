"""Contracts of attention, attention_lse (which returns the log-sum-exp too) and their backward."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Bucket, Cost, TensorSpec, dtype_name
from tilery.core.op import Op, op
from tilery.core.peers import baselines
from tilery.ops.attention import backward_cases, cases, flashinfer_peers, peers, reference
from tilery.ops.attention.attention_sinks_backward import attention_sinks_backward
from tilery.ops.attention.call import AttentionCall, BackwardCall
from tilery.ops.attention.checks import (
    check,
    check_packed,
    check_qkv,
    check_results,
    check_scale,
    check_softcap,
    check_window,
    lse_spec,
)
from tilery.ops.attention.indices import require_packed
from tilery.ops.rope import heads

# Probabilities are rounded to the values' dtype, then the sum is: 2.4e-3 in bf16, 3e-4 in fp16. An lse is fp32 always,
# a sum of products that fp8 tensor cores may keep 14 bits of.
ALLOWED = {torch.float32: 5e-6, torch.float16: 6e-4, torch.bfloat16: 4e-3}
_ALLOWED_FP8 = {torch.float32: 1e-3, torch.bfloat16: 4e-3}
# Probabilities and gradients of scores are rounded to q's dtype before they are multiplied, and the sums once more.
_ALLOWED_BACKWARD = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_WITHOUT_GRADIENTS = "key_mask", "bias", "slopes", "q_scale", "k_scale", "v_scale"


def model_sizes(model: Any) -> list[dict[str, int]]:
    """MLA attends to another cache."""
    return [] if model.kv_lora_rank else heads.model_sizes(model)


def indices(call: Any) -> None:
    bounds = call.max_seqlen_q, call.max_seqlen_k
    require_packed(call.q, call.k, call.cu_seqlens_q, call.cu_seqlens_k, *bounds)


def reads(op: Op, call: AttentionCall) -> int:
    """Bytes of all arguments."""
    return sum(x.nbytes for x in op.specs_in(call) if isinstance(x, TensorSpec))


# Backward


def check_backward(call: BackwardCall) -> None:
    heads.check_heads("q", call.q, call.layout)
    check_qkv(call)
    check_packed(call)
    check_window(call.window)
    check_softcap(call.softcap)
    check_results(call)


def backward_outputs(call: BackwardCall) -> dict[str, TensorSpec]:
    arguments = {"dq": call.q, "dk": call.k, "dv": call.v}
    return {name: TensorSpec.contiguous(x.shape, x.dtype, x.device) for name, x in arguments.items()}


def backward_cost(call: BackwardCall) -> Cost:
    """Five products where the forward has two."""
    flops = 2 * call.visible_pairs * (3 * call.head_dim + 2 * call.value_dim)
    return Cost(flops, reads(attention_backward, call), sum(x.nbytes for x in (call.q, call.k, call.v)))


def backward_bucket(call: BackwardCall) -> Bucket:
    options = (",causal" if call.causal else "") + (",softcap" if call.softcap else "")
    return Bucket(_exact(call) + options + _window(call), _scaled(call))


@op(
    check=check_backward, outputs=backward_outputs, cost=backward_cost, bucket=backward_bucket,
    inputs=backward_cases.inputs, allowed=_ALLOWED_BACKWARD, call_type=BackwardCall, rounds_between=True,
    rows_cancel=True, runtime=("scale",), check_runtime=check_scale, indices=indices, model_sizes=model_sizes,
    kernels={
        "numba": "tilery.ops.attention.numba.backward:attention_backward",
        "triton": "tilery.ops.attention.triton.backward:attention_backward",
        "cuda.hopper": "tilery.ops.attention.cuda.backward:attention_backward",
    },
    baselines=baselines(torch=peers.torch_backward, cudnn=peers.cudnn_backward),
    cases={"test": backward_cases.cases(), **backward_cases.bench_cases()},
)  # fmt: skip
def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, result: Tensor, lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, scale: float | None = None,
    causal: bool = False, layout: str = "bshd", max_seqlen_q: int = 0, max_seqlen_k: int = 0, window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of attention_lse, which gave result and lse: dq = scale · dS k, dk = scale · dSᵀ q, dv = Pᵀ dout.

    P = exp(scores - lse) are the probabilities, dS = P · (dout vᵀ - sum(dout · result) + dlse) the gradients of scores,
    which a soft cap multiplies by 1 - (score / softcap)². Heads that share a key add up. dlse None is zero; tokens of
    no sequence have zero, those of an invalid sequence NaN, as in attention. Other arguments are attention's; sinks are
    in the lse, and attention_sinks_backward has their gradient.
    """
    return reference.attention_backward(
        dout, dlse, q, k, v, result, lse, cu_seqlens_q, cu_seqlens_k, scale, causal, layout, max_seqlen_q,
        max_seqlen_k, window, softcap,
    )  # fmt: skip


# Forward


def outputs(call: AttentionCall) -> dict[str, TensorSpec]:
    dtype = torch.bfloat16 if call.is_fp8 else call.q.dtype
    return {"out": TensorSpec.contiguous((*call.q.shape[:-1], call.value_dim), dtype, call.q.device)}


def outputs_lse(call: AttentionCall) -> dict[str, TensorSpec]:
    return outputs(call) | {"lse": lse_spec(call)}


def cost(call: AttentionCall) -> Cost:
    flops = 2 * call.visible_pairs * (call.head_dim + call.value_dim)
    return Cost(flops, reads(attention_lse, call), outputs(call)["out"].nbytes)


def cost_lse(call: AttentionCall) -> Cost:
    flops, read, written = cost(call)
    return Cost(flops, read, written + lse_spec(call).nbytes)


def bucket(call: AttentionCall) -> Bucket:
    options = {
        "causal": call.causal, "softcap": call.softcap, "mask": call.key_mask, "bias": call.bias,
        "slopes": call.slopes, "sinks": call.sinks,
    }  # fmt: skip
    given = "".join(f",{name}" for name, on in options.items() if on)
    return Bucket(_exact(call) + given + _window(call), _scaled(call))


def _exact(call: AttentionCall) -> str:
    sizes = f"q={call.heads},k={call.kv_heads},d={call.head_dim},e={call.value_dim}"
    return f"{sizes},{dtype_name(call.q.dtype)},{call.layout}"


def _window(call: AttentionCall) -> str:
    return f",window={call.effective_window}" if call.effective_window else ""


def _scaled(call: AttentionCall) -> dict[str, int]:
    return {"m": call.queries, "keys": call.keys, "batch": call.batch}


def allowed(call: AttentionCall) -> dict[torch.dtype, float]:
    return _ALLOWED_FP8 if call.is_fp8 else ALLOWED


def backward_refusal(call: Any) -> str | None:
    """The options that the backward does not have."""
    given = [name for name in _WITHOUT_GRADIENTS if getattr(call, name) is not None]
    given += ["fp8"] if call.is_fp8 else []
    if not given:
        return None
    known = "causal masks, windows, soft caps, sinks, heads that share keys and packed sequences"
    return f"there are no gradients with {', '.join(given)}, its backward knows {known}"


def _gradients(
    call: Any, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None, needed: frozenset[str]
) -> dict[str, Tensor]:
    dout, found = torch.zeros_like(out) if dout is None else dout, {}
    if needed & {"q", "k", "v"}:
        found["q"], found["k"], found["v"] = attention_backward(
            dout, dlse, call.q, call.k, call.v, out, lse, call.cu_seqlens_q, call.cu_seqlens_k, scale=call.scale,
            causal=call.causal, layout=call.layout, max_seqlen_q=call.max_seqlen_q, max_seqlen_k=call.max_seqlen_k,
            window=call.window, softcap=call.softcap,
        )  # fmt: skip
    if "sinks" in needed:
        found["sinks"] = attention_sinks_backward(dout, dlse, out, lse, call.sinks, call.layout)
    return found


def _backward_lse(call: Any, grads: Any) -> dict[str, Tensor]:
    return _gradients(call, call.out, call.lse, grads.out, grads.lse, grads.needed)


def _backward(call: Any, grads: Any) -> dict[str, Tensor]:
    """The lse was not kept: it is computed again."""
    out, lse = attention_lse(*(getattr(call, name) for name in attention_lse.names))
    return _gradients(call, out, lse, grads.out, None, grads.needed)


@op(
    check=check, outputs=outputs_lse, cost=cost_lse, bucket=bucket, inputs=cases.inputs, allowed=allowed,
    call_type=AttentionCall, rounds_between=True, runtime=("scale",), check_runtime=check_scale, indices=indices,
    kernels={
        "numba": "tilery.ops.attention.numba.forward:attention",
        "cuda.hopper": "tilery.ops.attention.cuda.forward:attention",
        "triton": "tilery.ops.attention.triton.forward:attention",
    },
    baselines=baselines(torch=peers.torch_sdpa_lse, cudnn=peers.cudnn_lse, flash=peers.flash_lse),
    model_sizes=model_sizes, backward=_backward_lse, backward_refusal=backward_refusal,
    # attention has all of the cases
    cases={"test": [*cases.cases()[:3], *cases.cases()[3::3], *cases.wrong_cases()], **cases.bench_cases()},
)  # fmt: skip
def attention_lse(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    key_mask: Tensor | None = None, bias: Tensor | None = None, slopes: Tensor | None = None,
    sinks: Tensor | None = None, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, scale: float | None = None, causal: bool = False, window: int = 0,
    softcap: float = 0.0, layout: str = "bshd", max_seqlen_q: int = 0, max_seqlen_k: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """attention, and lse = log(sum(exp(scores))) of every query, sinks among them: fp32 [B, H, S], packed [H, T].

    It is -inf for a query that sees nothing. Arguments are those of attention.
    """
    return reference.attention_lse(
        q, k, v, cu_seqlens_q, cu_seqlens_k, key_mask, bias, slopes, sinks, q_scale, k_scale, v_scale,
        scale, causal, window, softcap, layout, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=cases.inputs, allowed=allowed,
    call_type=AttentionCall, rounds_between=True, runtime=("scale",), check_runtime=check_scale, indices=indices,
    kernels={
        "numba": "tilery.ops.attention.numba.forward:attention",
        "cuda.hopper": "tilery.ops.attention.cuda.forward:attention",
        "triton": "tilery.ops.attention.triton.forward:attention",
        "cutile": "tilery.ops.attention.cutile.forward:attention",
    },
    baselines=baselines(
        torch=peers.torch_sdpa, cudnn=peers.cudnn, flash=peers.flash, flashinfer=flashinfer_peers.attention
    ),
    model_sizes=model_sizes, backward=_backward, backward_refusal=backward_refusal,
    cases={"test": cases.cases() + cases.wrong_cases(), **cases.bench_cases()},
)  # fmt: skip
def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    key_mask: Tensor | None = None, bias: Tensor | None = None, slopes: Tensor | None = None,
    sinks: Tensor | None = None, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, scale: float | None = None, causal: bool = False, window: int = 0,
    softcap: float = 0.0, layout: str = "bshd", max_seqlen_q: int = 0, max_seqlen_k: int = 0,
) -> Tensor:  # fmt: skip
    """softmax(scale · q kᵀ, capped and masked) · v; q [B, S, H, D], k [B, T, G, D], v [B, T, G, E] -> [B, S, H, E].

    Or [B, H, S, D] by layout "bhsd", or packed [T, H, D] by "thd": then int32 cu_seqlens [B + 1] say where sequences
    begin and end, max_seqlen bound their lengths; tokens past the last are zero. A sequence that is longer, or whose
    numbers lead outside of the tokens, gives NaN. H / G heads share a key. scale None is 1 / sqrt(D). The last query is
    at the position of the last key: causal queries see keys up to their position, those with a window the ones nearer
    than that. Scores are softcap · tanh(score / softcap) where it is not 0; then slopes [H] times (key - position) and
    bias [1 or B, 1 or H, S, T] are added. key_mask [B, T] is True for keys that are seen; sinks [H] are scores without
    a value. fp8 takes fp32 scales [1] and gives bf16. A query that sees nothing gives zeros.
    A backward computes attention_lse again for the lse; it knows neither key_mask nor what is added to scores.
    """
    return reference.attention_lse(
        q, k, v, cu_seqlens_q, cu_seqlens_k, key_mask, bias, slopes, sinks, q_scale, k_scale, v_scale,
        scale, causal, window, softcap, layout, max_seqlen_q, max_seqlen_k,
    )[0]  # fmt: skip
