"""Contract of attention_cascade: attention_decode for sequences of which several share a prefix, which is read once."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Bucket, Cost
from tilery.core.indices import require_offsets
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.ops.attention import cascade_cases, paged, paged_peers
from tilery.ops.attention.attention import model_sizes
from tilery.ops.attention.attention_decode import check_tokens
from tilery.ops.attention.cascade import CascadeCall
from tilery.ops.attention.checks import check_scale
from tilery.ops.attention.indices import require_pages, spans
from tilery.ops.attention.reference import attend


def check(call: CascadeCall) -> None:
    sequences = check_tokens(call)
    paged.check_cache(call, sequences)
    paged.check_int32("lengths", call.lengths, (sequences,), "[sequences]")
    paged.check_scoring(call)
    require(
        call.even,
        f"q's tokens must lie at one distance from each other, got strides {list(call.q.strides)}; "
        "call .contiguous() on it",
    )
    shape = call.prefix_lengths.shape
    require(len(shape) == 1, f"prefix_lengths must be [prefixes], got {list(shape)}")
    paged.check_int32("prefix_lengths", call.prefix_lengths, tuple(shape), "[prefixes]")
    paged.check_int32("prefix_table", call.prefix_table, (*shape, None), "[prefixes, most blocks of one]")
    paged.check_int32("cu_prefix_q", call.cu_prefix_q, (shape[0] + 1,), "[prefixes + 1]")


def indices(call: Any) -> None:
    require_pages(call.lengths, call.block_table, call.k_cache, call.max_keys, call.queries)
    require_offsets("cu_prefix_q", call.cu_prefix_q, call.tokens, call.tokens)
    queries, names = call.cu_prefix_q.diff(), ("prefix_lengths", "prefix_table")
    shared = call.prefix_lengths, call.prefix_table
    require_pages(*shared, call.k_cache, call.max_prefix_keys, queries, names=names)


def cost(call: CascadeCall) -> Cost:
    """As if all prefixes and sequences were as long as they may be, and every token had a prefix."""
    own, cache = paged.cost(call, call.queries), call.k_cache
    flops = 4 * call.tokens * call.heads * call.head_dim * call.max_prefix_keys
    prefixes = min(call.prefixes, call.tokens) * call.max_prefix_keys
    keys = 2 * prefixes * call.kv_heads * call.head_dim * cache.dtype.itemsize
    return Cost(own.flops + flops, own.reads + keys, own.writes)


def bucket(call: CascadeCall) -> Bucket:
    exact = f"{paged.bucket(call)},queries={call.queries}"
    return Bucket(exact, {"m": call.tokens, "keys": call.max_keys, "prefix": call.max_prefix_keys})


@op(
    check=check, outputs=paged.outputs, cost=cost, bucket=bucket, inputs=cascade_cases.inputs, allowed=paged.ALLOWED,
    call_type=CascadeCall, rounds_between=True, runtime=("scale",), check_runtime=check_scale, indices=indices,
    kernels={
        "numba": "tilery.ops.attention.numba.cascade:attention_cascade",
        "triton": "tilery.ops.attention.triton.cascade:attention_cascade",
    },
    baselines=baselines(torch=paged_peers.cascade), model_sizes=model_sizes, cases=cascade_cases.cases(),
)  # fmt: skip
def attention_cascade(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor, prefix_lengths: Tensor,
    prefix_table: Tensor, cu_prefix_q: Tensor, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    sinks: Tensor | None = None, scale: float | None = None, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """attention_decode for sequences that share a prefix, as a system prompt: its keys are read once for all of them.

    The B · Q query tokens are numbered in order: those from cu_prefix_q[p] to cu_prefix_q[p + 1] have prefix p, which
    is prefix_lengths[p] keys in the pages prefix_table[p, :] [P, most]; tokens past the last have none. Every token
    sees all of its prefix. lengths and block_table are of the keys that a sequence has for itself, its Q tokens among
    them, and mean what they mean in attention_decode, as all other arguments do. A prefix whose integers lead outside
    gives its tokens NaN. Results of both passes are merged by their lse in fp32, as merge_attention does.
    """
    out, tokens = torch.full_like(q, torch.nan).flatten(0, 1), q.flatten(0, 1)
    prefix_of: list[int | None] = [None] * len(tokens)
    known = [spans(cu_prefix_q, len(tokens), len(tokens)), prefix_lengths.tolist()]
    for p, (span, _) in enumerate(zip(*known)):
        prefix_of[span.tokens] = [p] * (span.end - span.start)
    most, most_of_prefix = (k_cache.shape[1] * table.shape[1] for table in (block_table, prefix_table))
    default = q.shape[-1] ** -0.5 if scale is None else scale

    def keys(table: Tensor, row: int, length: int) -> tuple[Tensor, Tensor]:
        return tuple(
            paged.read(cache, row, length, table, scale, q.dtype, missing)
            for cache, scale, missing in ((k_cache, k_scale, torch.nan), (v_cache, v_scale, 0.0))
        )  # type: ignore[return-value]

    for i, prefix in enumerate(prefix_of):
        b, t = divmod(i, q.shape[1])
        length = int(lengths[b])
        if not 0 <= length <= most:
            continue
        k, v = keys(block_table, b, length)
        seen = max(length - q.shape[1] + t + 1, 0)
        k, v = k[:seen], v[:seen]
        if prefix is not None:
            if not (known[0][prefix].valid and 0 <= known[1][prefix] <= most_of_prefix):
                continue
            shared = keys(prefix_table, prefix, known[1][prefix])
            k, v = torch.cat((shared[0], k)), torch.cat((shared[1], v))
        out[i] = attend(tokens[i : i + 1], k, v, default, softcap=softcap, sinks=sinks)[0][0]
    return out.view(q.shape)
