"""Contract of attention_decode: 1 to 16 query tokens a sequence against its KV cache."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.ops.attention import flashinfer_peers, paged, paged_peers
from tilery.ops.attention.attention import model_sizes
from tilery.ops.attention.call import PagedCall
from tilery.ops.attention.checks import check_scale
from tilery.ops.attention.indices import require_pages
from tilery.ops.attention.paged import MAX_QUERIES
from tilery.ops.attention.paged_cases import decode_cases, decode_inputs


def check_tokens(call: PagedCall) -> int:
    """Queries of sequences with a few tokens each; how many sequences there are."""
    paged.check_queries(call.q, "[B, Q, H, D]")
    sequences, queries = call.q.shape[:2]
    require(
        1 <= queries <= MAX_QUERIES,
        f"q [B, Q, H, D] must have 1 to {MAX_QUERIES} query tokens, got {queries}; attention_chunked takes more",
    )
    return sequences


def check(call: PagedCall) -> None:
    sequences = check_tokens(call)
    paged.check_cache(call, sequences)
    paged.check_int32("lengths", call.lengths, (sequences,), "[sequences]")
    paged.check_scoring(call)


def indices(call: Any) -> None:
    require_pages(call.lengths, call.block_table, call.k_cache, call.max_keys, call.queries, call.window)


def cost(call: PagedCall) -> Cost:
    return paged.cost(call, call.queries)


def bucket(call: PagedCall) -> Bucket:
    return Bucket(f"{paged.bucket(call)},queries={call.queries}", {"keys": call.max_keys})


@op(
    check=check, outputs=paged.outputs, cost=cost, bucket=bucket, inputs=decode_inputs, allowed=paged.ALLOWED,
    call_type=PagedCall, rounds_between=True, runtime=("scale",), check_runtime=check_scale, indices=indices,
    kernels={
        "numba": "tilery.ops.attention.numba.forward:attention_decode",
        "cuda.hopper": "tilery.ops.attention.cuda.paged:attention_decode",
        "triton": "tilery.ops.attention.triton.paged:attention_decode",
        "cutile": "tilery.ops.attention.cutile.paged:attention_decode",
        "tilelang": "tilelang_kernels:attention_decode",
    },
    baselines=baselines(
        torch=paged_peers.decode_sdpa, cudnn=paged_peers.decode_cudnn, cudnn_each=paged_peers.decode_cudnn_each,
        flash=paged_peers.decode_flash, flashinfer=flashinfer_peers.decode,
    ),
    model_sizes=model_sizes, cases=decode_cases(),
)  # fmt: skip
def attention_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, sinks: Tensor | None = None,
    scale: float | None = None, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """out = softmax(scale · q · kᵀ) · v of 1 to 16 query tokens a sequence against its KV cache.

    q, out [B, Q, H, D]; caches [blocks, block_size, kv_heads, D] with block_table [B, most] as in docs/kv_cache.md, or
    [B, S, kv_heads, D] without. lengths [B] counts the keys, those of the Q tokens among them: query t sees keys up to
    lengths - Q + t, with `window` the last so many of these; one that sees none gives zeros. scale None: D ** -0.5;
    with `softcap` scores are softcap · tanh(score / softcap); sinks [H] are scores without a value. A length that is
    negative or more than the cache can hold gives NaN, and so does a page that a query sees and that is not there.
    A sequence gives the same bits in any batch.
    """
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        out[b] = paged.attend_sequence(
            q[b], k_cache, v_cache, b, length, block_table, k_scale, v_scale, scale,
            window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    return out
