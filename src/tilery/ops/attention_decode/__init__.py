from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilery.base.errors import require
from tilery.base.spec import Bucket, Case, Cost, TensorSpec, case
from tilery.core import inputs as random
from tilery.core.op import op
from tilery.core.peers import baselines
from tilery.parts import paged_attention as paged
from tilery.parts import paged_peers
from tilery.parts.attention_cases import plant
from tilery.parts.attention_checks import check_scale, cutting_window
from tilery.parts.attention_indices import require_pages
from tilery.parts.paged_attention import ALLOWED

MOST_QUERIES = 16
# What some kernels do not take.
_FP32 = {"tilelang": "tf32"}
_PLAIN = {"cutile": "plain attention"}
_FP8 = {"tilelang": "a cache of q's dtype"} | _PLAIN
_MORE = {"tilelang": "neither a window nor a softcap nor sinks"} | _PLAIN
_WINDOW = {"tilelang": "neither a window"}
_ODD = {"cutile": "power of two"}
_FAR = {"cutile": "below 2**31"}


def check(
    q: TensorSpec, k_cache: TensorSpec, v_cache: TensorSpec, lengths: TensorSpec, block_table: TensorSpec | None,
    k_scale: TensorSpec | None, v_scale: TensorSpec | None, sinks: TensorSpec | None, window: int, softcap: float,
) -> None:  # fmt: skip
    paged.check_queries(q, "[B, Q, H, D]")
    require(
        1 <= q.shape[1] <= MOST_QUERIES,
        f"q [B, Q, H, D] must have 1 to {MOST_QUERIES} query tokens, got {q.shape[1]}; attention_chunked takes more",
    )
    paged.check_cache(q, k_cache, v_cache, block_table, k_scale, v_scale, q.shape[0])
    paged.check_ints("lengths", lengths, (q.shape[0],), "[sequences]")
    paged.check_scores(q, sinks, window, softcap)


def outputs(q: TensorSpec, *rest: Any) -> tuple[TensorSpec, ...]:
    return (TensorSpec.contiguous(q.shape, q.dtype, q.device),)


def indices(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, *options: Any
) -> None:
    *_, window, _ = options
    require_pages(lengths, block_table, k_cache, paged.bound(k_cache, block_table), q.shape[1], window)


def cost(q: TensorSpec, k_cache: TensorSpec, v_cache: TensorSpec, lengths: TensorSpec, *rest: Any) -> Cost:
    return paged.cost(q, k_cache, q.shape[0], q.shape[1], paged.bound(k_cache, rest[0]), rest[-2])


def bucket(q: TensorSpec, k_cache: TensorSpec, v_cache: TensorSpec, lengths: TensorSpec, *rest: Any) -> Bucket:
    table, _, _, sinks, window, softcap = rest
    keys = paged.bound(k_cache, table)
    window = cutting_window(window, q.shape[1], keys)
    exact = paged.bucket(q, k_cache, table is not None, window, softcap, sinks is not None)
    return Bucket(f"{exact},queries={q.shape[1]}", {"keys": keys})


def inputs(
    m: int, keys: int = 4096, queries: int = 1, heads: int = 4, kv_heads: int = 2, n: int = 64, dtype: str = "bf16",
    lengths: str = "", block_size: int = 0, format: str = "none", per: str = "tensor", sinks: bool = False,
    scale: float = 0.0, window: int = 0, softcap: float = 0.0, wrong: str = "", layout: str = "contiguous",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m sequences of at most `keys` tokens; `lengths`: as 3+0+5, else all are full. block_size 0: in one piece.

    `wrong` entries (attention_cases.plant) are those of lengths, l, and of the table, t.
    """
    g = random.generator(seed, device)
    long = paged.numbers(lengths) if lengths else [keys] * m
    require(len(long) == m and max(long, default=0) <= keys, f"lengths must be {m} of up to {keys}, got {lengths!r}")
    kind = random.dtype_of(dtype if format == "none" else format)
    k, v, table = paged.draw_cache(long, keys, kv_heads, n, kind, block_size, layout, g)
    k_scale, v_scale = paged.draw_scales(format, per, kv_heads, g)
    held = paged.integers(long, g)
    plant(wrong, l=held, t=table)
    return {
        "q": paged.draw_queries((m, queries, heads, n), dtype, layout, g), "k_cache": k, "v_cache": v,
        "lengths": held, "block_table": table,
        "k_scale": k_scale, "v_scale": v_scale, "sinks": paged.draw_sinks(sinks, heads, g),
        "scale": scale or None, "window": window, "softcap": softcap,
    }  # fmt: skip


def _ready(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Any, *scales: Any) -> list[Tensor]:
    """q, k and v as [B, heads, tokens, D]; an fp8 cache is widened, which a user would do at every step."""
    kv = [paged_peers.in_one_piece(x, lengths, table) for x in (k_cache, v_cache)]
    if k_cache.dtype != q.dtype:
        kv = [x.to(q.dtype) * by.to(q.dtype).unsqueeze(-1) for x, by in zip(kv, scales)]
    return [x.transpose(1, 2) for x in (q, *kv)]


def _sdpa(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *rest: Any, masked: bool = False) -> Tensor:
    """With a mask where sequences are not full, and always for several queries if `masked`."""
    table, k_scale, v_scale, sinks, scale, window, softcap = rest
    paged_peers.without("torch's attention", sinks=sinks, softcap=softcap)
    query, k, v = _ready(q, k_cache, v_cache, lengths, table, k_scale, v_scale)
    keys, mask = paged.bound(k_cache, table), None
    if window or not paged_peers.full(k_cache, lengths, table) or (masked and q.shape[1] > 1) or q.shape[1] > keys:
        mask = paged_peers.masks(lengths, q.shape[1], keys, window, q.dtype)
    elif q.shape[1] > 1:
        from torch.nn.attention.bias import causal_lower_right  # imports Triton

        mask = causal_lower_right(q.shape[1], keys)
    return F.scaled_dot_product_attention(query, k, v, mask, scale=scale, enable_gqa=True).transpose(1, 2)


def _cudnn(*args: Any) -> Tensor:
    """Torch gives it no causal mask of fewer queries than keys, so several have one that is added."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _sdpa(*args, masked=True)


def _flash(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, *rest: Any) -> Tensor:
    """Takes no mask: all sequences are full, and its causal queries stand at the end."""
    table, k_scale, v_scale, sinks, scale, window, softcap = rest
    paged_peers.without("torch's FlashAttention", sinks=sinks, window=window, softcap=softcap)
    if not paged_peers.full(k_cache, lengths, table):
        raise NotImplementedError("torch's FlashAttention takes full sequences alone")
    qkv = _ready(q, k_cache, v_cache, lengths, table, k_scale, v_scale)
    made = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, q.shape[1] > 1, scale=scale)
    return made[0].transpose(1, 2)


def _cases() -> list[Case]:
    return [
        case(_FP32, m=2, keys=70, n=32, dtype="fp32", lengths="70+33"),
        case(_FP32, m=2, keys=70, n=32, dtype="fp32", lengths="70+33", scale=-0.5),  # the least score counts most
        case(m=2, keys=70, heads=2, kv_heads=1, n=32, dtype="fp16", lengths="70+33"),
        case(m=3, keys=200, heads=8, kv_heads=2, n=64, dtype="fp16", lengths="200+0+131"),
        case(m=3, keys=200, heads=8, kv_heads=2, n=128, dtype="bf16", lengths="200+1+131"),
        case(m=3, keys=96, queries=5, n=64, dtype="fp16", lengths="96+3+0", block_size=16),  # fewer keys than queries
        case(_ODD, m=2, keys=256, queries=2, heads=6, kv_heads=2, n=80, dtype="fp16", lengths="256+65", block_size=128),
        # rows of two tiles
        case(_ODD, m=1, keys=64, queries=16, heads=8, kv_heads=1, n=96, dtype="fp16", block_size=32),
        case(_ODD, m=1, keys=40, heads=3, kv_heads=3, n=192, dtype="fp16"),  # no heads share keys
        case(m=1, keys=150, queries=3, heads=4, kv_heads=1, n=256, dtype="bf16", lengths="149", block_size=64),
        case(_FP32 | _PLAIN, m=2, keys=128, queries=3, n=32, dtype="fp32", lengths="128+90", block_size=16, window=20),
        case(_MORE, m=2, keys=192, n=64, dtype="fp16", lengths="192+7", window=70, sinks=True),
        case(
            _MORE, m=2, keys=100, queries=2, n=64, dtype="fp16", lengths="100+0", softcap=5.0, sinks=True,
            block_size=256,
        ),
        case(_FP8, m=2, keys=96, queries=2, heads=8, n=64, dtype="fp16", lengths="96+50", block_size=32, format="e4m3"),
        case(
            _FP32 | _PLAIN, m=2, keys=80, n=32, dtype="fp32", lengths="80+17", format="e5m2", per="head", softcap=20.0,
        ),
        case(
            _FP8, m=2, keys=128, heads=8, n=128, dtype="bf16", lengths="128+77", block_size=16, format="e4m3",
            per="head",
        ),
        case(m=4, keys=70, heads=2, kv_heads=1, n=16, dtype="fp16", wrong="l0:-1+l1:71+l2:1073741824"),
        case(
            m=6, keys=64, queries=3, heads=2, kv_heads=1, n=16, dtype="fp16", lengths="64+64+64+64+49+33",
            block_size=16, wrong="t1:-1+t6:27+t11:2147483647+t12:-2147483648+t19:27+l3:65",
        ),  # one of a page that the last query alone sees, and one page that nobody does
        case(
            _PLAIN | _WINDOW, m=2, keys=64, queries=2, heads=2, kv_heads=1, n=16, dtype="fp16", block_size=16,
            window=16, wrong="t0:-1+t1:99+t6:-1",
        ),  # a page before a window may be anything
        case(
            _FP32, m=2, keys=1100, heads=2, kv_heads=1, n=16, dtype="fp32", block_size=64, wrong="l1:-5+t2:1073741824",
        ),  # keys that are cut among programs
        case(
            _FP32, m=2, keys=1100, heads=2, kv_heads=1, n=16, dtype="fp32", lengths="1100+700", block_size=16,
        ),  # keys that are cut, and joined again
        case(m=1, keys=100, n=64, dtype="fp16", scale=500.0),  # logits of ±1e4
        case(_FP32, m=1, keys=1, n=16, dtype="fp32"),
        case(_FP32, m=2, keys=0, n=16, dtype="fp32", queries=2),  # no keys: zeros
        case(m=0, keys=64, n=64, dtype="fp16"),  # nothing to launch
        case(m=2, keys=64, n=64, dtype="fp16", lengths="64+20", layout="padded"),
        case(m=2, keys=64, n=64, dtype="fp16", lengths="64+20", block_size=16, layout="together"),
        case(m=2, keys=64, n=64, dtype="bf16", lengths="64+20", block_size=16, layout="misaligned"),
        case(_FAR, m=1, keys=3, n=16, dtype="fp16", lengths="3", layout="far"),  # more than 2**31 elements apart
    ]  # fmt: skip


_LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16"}
_BENCH = [(1, 1024), (1, 8192), (8, 2048), (16, 8192)]


@op(
    check=check, outputs=outputs, cost=cost, bucket=bucket, inputs=inputs, allowed=ALLOWED,
    rounds_between=True, runtime=("scale",),
    check_runtime=check_scale,
    kernels=("numba", "cuda.hopper", "triton", "cutile", "tilelang"), model_sizes=paged.model_sizes,
    baselines=baselines(torch=_sdpa, cudnn=_cudnn, flash=_flash), indices=indices,
    cases={
        "test": paged.for_hopper(_cases()),
        "bench": [
            *(case(m=m, keys=keys, queries=queries, **_LLAMA) for m, keys in _BENCH for queries in (1, 2, 4)),
            *(case(m=m, keys=keys, **_LLAMA) for m, keys in ((64, 4096), (1, 131072))),
            *(case(m=16, keys=8192, queries=queries, **_LLAMA) for queries in (8, 16)),
            case(m=16, keys=8192, block_size=16, **_LLAMA),
            case(m=16, keys=8192, block_size=64, format="e4m3", **_LLAMA),
        ],
        "bench_cpu": [case(m=4, keys=2048, **_LLAMA | {"dtype": dtype}) for dtype in ("fp32", "bf16")],
    },
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
    `softcap` bends scores to softcap · tanh(score / softcap); sinks [H] are scores without a value. A length that is
    negative or more than the cache can hold gives NaN, and so does a page that a query sees and that is not there.
    A sequence gives the same bits in any batch.
    """
    out = torch.zeros_like(q)
    for b, length in enumerate(lengths.tolist()):
        out[b] = paged.one_sequence(
            q[b], k_cache, v_cache, b, length, block_table, k_scale, v_scale, scale,
            window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
    return out
