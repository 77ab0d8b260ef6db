from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilery.base.errors import require
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case
from tilery.core import inputs as random
from tilery.core.indices import require_offsets
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.parts import paged_attention as paged
from tilery.parts import paged_peers
from tilery.parts.attention_cases import plant
from tilery.parts.attention_checks import check_scale, cutting_window
from tilery.parts.attention_indices import require_pages, spans
from tilery.parts.paged_attention import ALLOWED


def check(
    q: TensorSpec, k_cache: TensorSpec, v_cache: TensorSpec, cu_seqlens_q: TensorSpec, lengths: TensorSpec,
    block_table: TensorSpec, k_scale: TensorSpec | None, v_scale: TensorSpec | None, sinks: TensorSpec | None,
    window: int, softcap: float, max_seqlen_q: int,
) -> None:  # fmt: skip
    paged.check_queries(q, "[T, H, D]")
    require(len(lengths.shape) == 1, f"lengths must be [sequences], got {list(lengths.shape)}")
    sequences = lengths.shape[0]
    paged.check_ints("lengths", lengths, (sequences,), "[sequences]")
    paged.check_ints("cu_seqlens_q", cu_seqlens_q, (sequences + 1,), "[sequences + 1]")
    paged.check_cache(q, k_cache, v_cache, block_table, k_scale, v_scale, sequences)
    paged.check_scores(q, sinks, window, softcap)
    require(max_seqlen_q >= 0, f"max_seqlen_q must be 0 (q's tokens) or the most of one sequence, got {max_seqlen_q}")


def outputs(q: TensorSpec, *rest: Any) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(q.shape, q.dtype, q.device),)


def queries(q: Any, max_seqlen_q: int) -> int:
    """Of one sequence, at most."""
    return min(max_seqlen_q, int(q.shape[0])) if max_seqlen_q else int(q.shape[0])


def indices(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, block_table: Tensor,
    *options: Any,
) -> None:  # fmt: skip
    *_, window, _, max_seqlen_q = options
    require_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], queries(q, max_seqlen_q))
    require_pages(lengths, block_table, k_cache, paged.bound(k_cache, block_table), cu_seqlens_q.diff(), window)


def cost(q: TensorSpec, k_cache: TensorSpec, v_cache: TensorSpec, *rest: Any) -> Cost:
    """As if all sequences had equal chunks."""
    _, lengths, table, *_, window, _, _ = rest
    sequences = lengths.shape[0]
    chunk = -(-q.shape[0] // max(sequences, 1))
    return paged.cost(q, k_cache, sequences, chunk, paged.bound(k_cache, table), window)


def bucket(q: TensorSpec, k_cache: TensorSpec, v_cache: TensorSpec, *rest: Any) -> Bucket:
    _, _, table, _, _, sinks, window, softcap, most = rest
    keys = paged.bound(k_cache, table)
    window = cutting_window(window, queries(q, most), keys)
    exact = paged.bucket(q, k_cache, True, window, softcap, sinks is not None)
    return Bucket(exact, {"m": q.shape[0], "keys": keys})


def inputs(
    m: int, keys: int = 4096, chunks: str = "", lengths: str = "", heads: int = 4, kv_heads: int = 2, n: int = 64,
    dtype: str = "bf16", block_size: int = 16, format: str = "none", per: str = "tensor", sinks: bool = False,
    scale: float = 0.0, window: int = 0, softcap: float = 0.0, bounded: bool = True, scattered: bool = True,
    wrong: str = "", layout: str = "contiguous", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m tokens of sequences whose chunks are as 3+0+5, of one if none are given; lengths too, else all are full.

    `wrong` entries (attention_cases.plant) are those of cu_seqlens_q, q, of lengths, l, and of the table, t.
    """
    g = random.generator(seed, device)
    parts = paged.numbers(chunks) if chunks else [m]
    long = paged.numbers(lengths) if lengths else [keys] * len(parts)
    require(sum(parts) == m, f"chunks must be {m} tokens in all, got {chunks!r}")
    require(len(long) == len(parts) and max(long) <= keys, f"lengths must be {len(parts)} of up to {keys}")
    kind = random.dtype_of(dtype if format == "none" else format)
    k, v, table = paged.draw_cache(long, keys, kv_heads, n, kind, block_size, layout, g, scattered)
    k_scale, v_scale = paged.draw_scales(format, per, kv_heads, g)
    edges, held = paged.integers([*accumulate(parts, initial=0)], g), paged.integers(long, g)
    plant(wrong, q=edges, l=held, t=table)
    return {
        "q": paged.draw_queries((m, heads, n), dtype, layout, g), "k_cache": k, "v_cache": v,
        "cu_seqlens_q": edges, "lengths": held, "block_table": table,
        "k_scale": k_scale, "v_scale": v_scale, "sinks": paged.draw_sinks(sinks, heads, g),
        "scale": scale or None, "window": window, "softcap": softcap, "max_seqlen_q": max(parts) if bounded else 0,
    }  # fmt: skip


def _each(q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, table: Tensor) -> Any:
    """Of each sequence that has queries: which it is, where they are, q, k and v as [1, heads, tokens, D]."""
    edges = paged_peers.host_list(cu_seqlens_q)
    for b, (start, end) in enumerate(pairwise(edges)):
        if end > start:
            kv = [paged_peers.one_sequence(x, b, lengths, table) for x in (k_cache, v_cache)]
            yield b, slice(start, end), [x.transpose(0, 1).unsqueeze(0) for x in (q[start:end], *kv)]


def _sdpa(q: Tensor, *args: Any, masked: bool = False) -> Tensor:
    """A call for each sequence, sizes known to the host; with a mask in memory for windows, or if `masked`."""
    from torch.nn.attention.bias import causal_lower_right  # imports Triton

    *tensors, k_scale, _, sinks, scale, window, softcap, _ = args
    paged_peers.without("torch's attention", k_scale=k_scale, sinks=sinks, softcap=softcap)
    edges, out = paged_peers.host_list(tensors[2]), torch.empty_like(q)
    chunks = tuple(b - a for a, b in pairwise(edges))
    for b, where, (query, k, v) in _each(q, *tensors):
        rows, keys = query.shape[2], k.shape[2]
        if masked or window or rows > keys:
            mask = paged_peers.masks_of_chunks(tensors[3], chunks, window, q.dtype)[b]
        else:
            mask = causal_lower_right(rows, keys)
        made = F.scaled_dot_product_attention(query, k, v, mask, scale=scale, enable_gqa=True)
        out[where] = made[0].transpose(0, 1)
    return out


def _cudnn(*args: Any) -> Tensor:
    """Torch gives it no causal mask of fewer queries than keys, so it has one that is added."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(*args, masked=True)


def _flash(q: Tensor, *args: Any) -> Tensor:
    """Its causal mask is bottom-right."""
    *tensors, k_scale, _, sinks, scale, window, softcap, _ = args
    paged_peers.without("torch's FlashAttention", k_scale=k_scale, sinks=sinks, window=window, softcap=softcap)
    out = torch.empty_like(q)
    for _, where, qkv in _each(q, *tensors):
        made = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, True, scale=scale)
        out[where] = made[0][0].transpose(0, 1)
    return out


_ONE: dict[str, Any] = {"heads": 2, "kv_heads": 1, "n": 16}


def _cases() -> list[Case]:
    return [
        case(m=40, keys=70, chunks="33+7", lengths="70+33", n=32, dtype="fp32"),
        case(m=12, keys=70, chunks="7+5", lengths="70+33", heads=2, kv_heads=1, n=32, dtype="fp16"),
        case(m=45, keys=200, chunks="40+0+5", lengths="200+77+131", heads=8, kv_heads=2, n=64, dtype="fp16"),
        case(m=45, keys=200, chunks="40+0+5", lengths="200+77+131", heads=8, kv_heads=2, n=128, dtype="bf16"),
        case(m=70, keys=300, heads=4, kv_heads=1, n=64, dtype="fp16", block_size=128, bounded=False),
        case(
            m=20, keys=96, chunks="16+4", lengths="11+0", n=64, dtype="fp16", block_size=32
        ),  # fewer keys than queries
        case(m=33, keys=260, n=80, dtype="fp16", block_size=256, heads=3, kv_heads=3),
        case(m=30, keys=128, chunks="17+13", lengths="128+99", n=96, dtype="bf16", block_size=64),
        case(m=48, keys=200, n=192, dtype="bf16"),
        case(m=9, keys=40, n=256, dtype="fp16", heads=2, kv_heads=1),
        case(m=40, keys=200, chunks="33+7", lengths="200+61", n=64, dtype="fp16", window=50, sinks=True),
        case(m=30, keys=100, chunks="21+9", lengths="100+9", n=32, dtype="fp32", window=7, block_size=64),
        case(m=40, keys=100, n=64, dtype="fp16", softcap=5.0, sinks=True, heads=8),
        case(m=40, keys=96, n=64, dtype="fp16", block_size=32, format="e4m3", heads=8),
        case(m=17, keys=80, n=32, dtype="fp32", format="e5m2", per="head"),
        case(m=40, keys=128, heads=8, n=128, dtype="bf16", format="e4m3", per="head"),
        case(m=40, keys=100, n=64, dtype="fp16", scale=500.0),  # logits of ±1e4
        case(m=20, keys=50, heads=2, kv_heads=1, n=16, dtype="fp32", scale=-0.5),
        case(m=24, keys=40, chunks="9+3+12", **_ONE, dtype="fp32", wrong="q0:-1+q3:1073741824"),
        case(m=40, keys=40, chunks="17+3+20", **_ONE, dtype="fp16", wrong="q1:0+q2:25+q3:33"),  # too long, and left
        case(m=24, keys=40, chunks="9+3+12", **_ONE, dtype="fp16", wrong="l0:-1+l1:2147483647", bounded=False),
        case(m=40, keys=80, chunks="17+3+20", lengths="80+40+49", **_ONE, dtype="fp16", wrong="t4:-1+t10:18+t13:18"),
        case(m=40, keys=200, chunks="33+7", **_ONE, dtype="fp16", window=16, wrong="t3:-1+t5:99+t20:2147483647"),
        case(m=9, keys=1100, chunks="5+4", **_ONE, dtype="fp16", wrong="q0:4+t75:-2147483648"),  # keys that are cut
        case(m=1, keys=1, n=16, dtype="fp32"),
        case(m=3, keys=16, chunks="3", lengths="0", n=16, dtype="fp32"),  # no keys: zeros
        case(m=0, keys=64, n=64, dtype="fp16"),  # nothing to launch
        case(m=20, keys=64, n=64, dtype="fp16", layout="padded"),
        case(m=20, keys=64, n=64, dtype="fp16", layout="together"),
        case(m=20, keys=64, n=64, dtype="bf16", layout="misaligned"),
    ]


# Pages in order: so peers need not gather them, which would be most of their time where chunks are short.
_BENCH: dict[str, Any] = {"n": 128, "dtype": "bf16", "block_size": 64, "scattered": False}


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    rounds_between=True, runtime=("scale",),
    check_runtime=check_scale,
    kernels=("numba", "cuda.hopper", "triton"), model_sizes=paged.model_sizes,
    baselines=baselines(torch=_sdpa, cudnn=_cudnn, flash=_flash), indices=indices,
    cases={
        "test": paged.for_hopper(_cases()),
        "bench": [
            *(case(m=m, keys=32768, heads=8, kv_heads=1, **_BENCH) for m in (256, 512)),
            *(case(m=m, keys=8192, heads=32, kv_heads=8, **_BENCH) for m in (256, 512, 2048)),
        ],
        "bench_cpu": [case(m=128, keys=1024, heads=8, kv_heads=2, n=128, dtype=dtype) for dtype in ("fp32", "bf16")],
    },
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
    out, long = torch.zeros_like(q), lengths.tolist()
    for b, mine in enumerate(spans(cu_seqlens_q, len(q), queries(q, max_seqlen_q))):
        out[mine.tokens] = torch.nan
        if mine.sound:
            out[mine.tokens] = paged.one_sequence(
                q[mine.tokens], k_cache, v_cache, b, long[b], block_table, k_scale, v_scale, scale,
                window=window, softcap=softcap, sinks=sinks,
            )  # fmt: skip
    return out
