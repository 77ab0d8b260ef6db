from typing import Any

from torch import Tensor

from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.ops.attention_lse import attention_lse
from tilery.parts import attention as parts
from tilery.parts import attention_indices
from tilery.parts import attention_peers as peers
from tilery.parts.attention import bucket, cost, outputs
from tilery.parts.attention_cases import bench_cases, cases, draw, wrong_cases
from tilery.parts.attention_checks import check, check_scale
from tilery.parts.attention_gradients import backward_refusal, gradients
from tilery.parts.heads import model_sizes


def _gradients(args: Any, outs: Any, grads: Any) -> Any:
    """The lse was not kept: it is computed again."""
    out, lse = attention_lse(*args)
    return gradients(args, out, lse, grads[0], None)


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=draw, allowed=parts.allowed, rounds_between=True,
    runtime=("scale",), check_runtime=check_scale,
    kernels=("numba", "cuda.hopper", "triton", "cutile"),
    baselines=baselines(torch=peers.default, cudnn=peers.cudnn, flash=peers.flash),
    model_sizes=lambda model: [] if model.kv_lora_rank else model_sizes(model),
    backward=_gradients, backward_refusal=backward_refusal, indices=attention_indices.of_attention,
    cases={"test": cases() + wrong_cases(), **bench_cases()},
)  # fmt: skip
def attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    key_mask: Tensor | None = None, bias: Tensor | None = None, slopes: Tensor | None = None,
    sinks: Tensor | None = None, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, scale: float | None = None, causal: bool = False, window: int = 0,
    softcap: float = 0.0, layout: str = "bshd", max_seqlen_q: int = 0, max_seqlen_k: int = 0,
) -> Tensor:  # fmt: skip
    """softmax(scale · q kᵀ, bent and masked) · v; q [B, S, H, D], k [B, T, G, D], v [B, T, G, E] -> [B, S, H, E].

    Or [B, H, S, D] by layout "bhsd", or packed [T, H, D] by "thd": then int32 cu_seqlens [B + 1] say where sequences
    begin and end, max_seqlen bound their lengths; tokens past the last are zero. A sequence that is longer, or whose
    numbers lead outside of the tokens, gives NaN. H / G heads share a key. scale None is
    1 / sqrt(D). The last query stands at the last key: causal queries see keys up to their place, those with a window
    the ones nearer than that. Scores are softcap · tanh(score / softcap) where it is not 0; then slopes [H] times
    (key - place) and bias [1 or B, 1 or H, S, T] are added. key_mask [B, T] is True for keys that are seen; sinks [H]
    are scores without a value. fp8 takes fp32 scales [1] and gives bf16. A query that sees nothing gives zeros.
    A backward computes attention_lse again for the lse; it knows neither windows nor what is added to scores.
    """
    return parts.reference(
        q, k, v, cu_seqlens_q, cu_seqlens_k, key_mask, bias, slopes, sinks, q_scale, k_scale, v_scale,
        scale, causal, window, softcap, layout, max_seqlen_q, max_seqlen_k,
    )[0]  # fmt: skip
