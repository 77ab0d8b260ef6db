"""Contract of attention_chunked: a chunk of each sequence's tokens against its paged KV cache."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.integers import ceil_div
from tilery.base.spec import Bucket, Cost
from tilery.core.indices import require_offsets
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.ops.attention import flashinfer_peers, paged, paged_peers
from tilery.ops.attention.attention import model_sizes
from tilery.ops.attention.call import PagedCall
from tilery.ops.attention.checks import check_scale
from tilery.ops.attention.indices import require_pages, spans
from tilery.ops.attention.paged_cases import chunked_cases, chunked_inputs


def check(call: PagedCall) -> None:
    paged.check_queries(call.q, "[T, H, D]")
    lengths, most = call.lengths, call.max_seqlen_q
    require(len(lengths.shape) == 1, f"lengths must be [sequences], got {list(lengths.shape)}")
    sequences = lengths.shape[0]
    paged.check_int32("lengths", lengths, (sequences,), "[sequences]")
    paged.check_int32("cu_seqlens_q", call.cu_seqlens_q, (sequences + 1,), "[sequences + 1]")
    paged.check_cache(call, sequences)
    paged.check_scoring(call)
    require(most >= 0, f"max_seqlen_q must be 0 (q's tokens) or the most of one sequence, got {most}")


def indices(call: Any) -> None:
    require_offsets("cu_seqlens_q", call.cu_seqlens_q, call.tokens, call.queries)
    queries = call.cu_seqlens_q.diff()
    require_pages(call.lengths, call.block_table, call.k_cache, call.max_keys, queries, call.window)


def cost(call: PagedCall) -> Cost:
    """As if all sequences had equal chunks."""
    return paged.cost(call, ceil_div(call.tokens, max(call.batch, 1)))


def bucket(call: PagedCall) -> Bucket:
    return Bucket(paged.bucket(call), {"m": call.tokens, "keys": call.max_keys})


@op(
    check=check, outputs=paged.outputs, cost=cost, bucket=bucket, inputs=chunked_inputs, allowed=paged.ALLOWED,
    call_type=PagedCall, rounds_between=True, runtime=("scale",), check_runtime=check_scale, indices=indices,
    kernels={
        "numba": "tilery.ops.attention.numba.forward:attention_chunked",
        "cuda.hopper": "tilery.ops.attention.cuda.paged:attention_chunked",
        "triton": "tilery.ops.attention.triton.paged:attention_chunked",
    },
    baselines=baselines(
        torch=paged_peers.chunked_sdpa, cudnn=paged_peers.chunked_cudnn, flash=paged_peers.chunked_flash,
        flashinfer=flashinfer_peers.chunked,
    ),
    model_sizes=model_sizes, cases=chunked_cases(),
)  # fmt: skip
def attention_chunked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, block_table: Tensor,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, sinks: Tensor | None = None,
    scale: float | None = None, window: int = 0, softcap: float = 0.0, max_seqlen_q: int = 0,
) -> Tensor:  # fmt: skip
    """out = softmax(scale · q · kᵀ) · v of a chunk of each sequence's tokens against its paged KV cache, causal.

    q, out [T, H, D]: tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1] are sequence b's; those past the last of them are
    zero. They are the last of the lengths[b] tokens that its cache holds. All else is as in attention_decode;
    max_seqlen_q is the most tokens of one chunk, which bounds the launch; 0: T. A chunk that is longer, or whose
    numbers lead outside of q, gives NaN.
    """
    out, counts = torch.zeros_like(q), lengths.tolist()
    longest = min(max_seqlen_q, len(q)) if max_seqlen_q else len(q)
    for b, chunk in enumerate(spans(cu_seqlens_q, len(q), longest)):
        out[chunk.tokens] = torch.nan
        if chunk.valid:
            out[chunk.tokens] = paged.attend_sequence(
                q[chunk.tokens], k_cache, v_cache, b, counts[b], block_table, k_scale, v_scale, scale,
                window=window, softcap=softcap, sinks=sinks,
            )  # fmt: skip
    return out
