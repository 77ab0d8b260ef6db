from typing import Any

from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.parts import attention as parts
from tilery.parts import attention_indices
from tilery.parts import attention_peers as peers
from tilery.parts.attention import bucket, cost_lse, outputs_lse
from tilery.parts.attention_cases import bench_cases, cases, draw, wrong_cases
from tilery.parts.attention_checks import check, check_scale
from tilery.parts.attention_gradients import backward_refusal, gradients
from tilery.parts.heads import model_sizes


def _torch(*args: Any) -> Any:
    """It gives no lse."""
    return peers.default(*args), None


def _cudnn(*args: Any) -> Any:
    """As torch calls it, it gives no lse."""
    return peers.cudnn(*args), None


def _gradients(args: Any, outs: Any, grads: Any) -> Any:
    return gradients(args, *outs, *grads)


@op(
    check=check, outputs=outputs_lse, cost=cost_lse, bucket=bucket, inputs=draw, allowed=parts.allowed,
    rounds_between=True,
    runtime=("scale",), check_runtime=check_scale,
    kernels=("numba", "cuda.hopper", "triton"),
    baselines=baselines(torch=_torch, cudnn=_cudnn, flash=peers.flash_lse),
    model_sizes=lambda model: [] if model.kv_lora_rank else model_sizes(model),
    backward=_gradients, backward_refusal=backward_refusal, indices=attention_indices.of_attention,
    cases={"test": cases()[:3] + cases()[3::3] + wrong_cases(), **bench_cases()},  # attention bears all of them
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
    return parts.reference(
        q, k, v, cu_seqlens_q, cu_seqlens_k, key_mask, bias, slopes, sinks, q_scale, k_scale, v_scale,
        scale, causal, window, softcap, layout, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
