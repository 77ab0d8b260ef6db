"""KV caches as engines lay them out: what attention_decode and attention_chunked are checked and timed with."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Case, case
from tilery.core import inputs as random
from tilery.ops.attention.call import FP8
from tilery.ops.attention.cases import for_hopper, write_wrong

# What some kernels refuse.
_FP32 = {"tilelang": "tf32"}
_PLAIN = {"cutile": "plain attention"}
_FP8 = {"tilelang": "a cache of q's dtype"} | _PLAIN
_MORE = {"tilelang": "neither a window nor a softcap nor sinks"} | _PLAIN
_WINDOW = {"tilelang": "neither a window"}
_ODD = {"cutile": "power of two"}
_FAR = {"cutile": "below 2**31"}

_LAYOUTS = ("contiguous", "padded", "misaligned", "far", "together")


# Caches


def draw_cache(
    lengths: list[int], keys: int | list[int], kv_heads: int, size: int, kind: torch.dtype, block_size: int,
    layout: str, g: Any, scattered: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Caches that are NaN where no sequence is, and a table; block_size 0: in one piece, without a table.

    There is room for so many `keys` of each sequence.
    `layout` padded: views of one tensor with more heads; together: views of [blocks, 2, …]; far: tokens far apart.
    A sequence's blocks are anywhere if `scattered`, else one after another.
    """
    room = [keys] * len(lengths) if isinstance(keys, int) else keys
    pages = block_size or max(room, default=keys if isinstance(keys, int) else 0)
    needed = [-(-each // pages) if block_size else 1 for each in room]
    most, held = max(needed, default=0), sum(needed)
    blocks = held + (3 if block_size else 0)
    k, v = _laid((blocks, pages, kv_heads, size), kind, layout, g)
    order = torch.randperm(blocks, generator=g, device=g.device)
    order = order if scattered else torch.arange(blocks, device=g.device)
    counts = torch.tensor(needed, dtype=torch.int64, device=g.device)
    row = torch.repeat_interleave(counts, output_size=held)  # of the table, for each block
    has = row, torch.arange(held, device=g.device) - (counts.cumsum(0) - counts)[row]
    table = torch.full((len(lengths), most), 2**30, dtype=torch.int32, device=g.device)
    table[has] = order[:held].to(torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32, device=g.device).view(-1, 1, 1)
    there = torch.arange(most * pages, device=g.device).view(most, pages) < ends  # [sequences, most, pages]
    where = table[has].long() if block_size else slice(0, len(lengths))
    for cache in (k, v):
        values = torch.randn(held, pages, kv_heads, size, generator=g, device=g.device)
        values = values.masked_fill(~there[has].view(held, pages, 1, 1), float("nan")).to(kind)
        if kind in FP8:  # torch puts bytes, not fp8
            cache, values = cache.view(torch.uint8), values.view(torch.uint8)
        cache[where] = values
    table = table.masked_fill(~there.any(-1), 2**30)  # nobody may look there
    return k, v, table if block_size else None


def _laid(shape: tuple[int, ...], kind: torch.dtype, layout: str, g: Any) -> tuple[Tensor, Tensor]:
    require(layout in _LAYOUTS, f"layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}")
    blocks, tokens, heads, size = shape
    nan = torch.full((), float("nan"), device=g.device)
    if layout == "far":  # memory that is never touched
        step = (2**31 // max(tokens - 1, 1) // 64 + 1) * 64
        both = [torch.empty(blocks * tokens * step, dtype=kind, device=g.device) for _ in range(2)]
        k, v = (x.as_strided(shape, (tokens * step, step, size, 1)) for x in both)
    elif layout == "together":
        k, v = torch.empty(blocks, 2, tokens, heads, size, dtype=kind, device=g.device).unbind(1)
    elif layout == "misaligned":
        flat = [torch.empty(blocks * tokens * heads * (size + 3) + 1, dtype=kind, device=g.device) for _ in range(2)]
        k, v = (x[1:].view(blocks, tokens, heads, size + 3)[..., :size] for x in flat)
    else:
        more = heads + (1 if layout == "padded" else 0)
        k, v = (torch.empty(blocks, tokens, more, size, dtype=kind, device=g.device)[:, :, :heads] for _ in range(2))
    for x in (k, v):
        x.copy_(nan.expand(shape))
    return k, v


def draw_scales(format: str, per: str, kv_heads: int, g: Any) -> list[Tensor | None]:
    if format == "none":
        return [None, None]
    return [torch.rand(1 if per == "tensor" else kv_heads, generator=g, device=g.device) + 0.5 for _ in range(2)]


def draw_sinks(sinks: bool, heads: int, g: Any) -> Tensor | None:
    return torch.randn(heads, generator=g, device=g.device) if sinks else None


def numbers(text: str) -> list[int]:
    """3+0+5 as a list of numbers."""
    return [int(part) for part in text.split("+")]


def integers(values: list[int], g: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=g.device)


def draw_queries(shape: tuple[int, ...], dtype: str, layout: str, g: Any) -> Tensor:
    """[.., H, D]; where the layout is not contiguous, a view of a model's qkv."""
    *most, heads, size = shape
    wide = heads if layout == "contiguous" else heads + 2
    return torch.randn(*most, wide, size, generator=g, device=g.device).to(random.dtype_of(dtype))[..., :heads, :]


def _for_hopper(one: Case) -> Case:
    return for_hopper(one, dict.fromkeys(("sinks", "softcap", "format"), "no more than a window"))


# attention_decode


def decode_inputs(
    m: int, keys: int = 4096, queries: int = 1, heads: int = 4, kv_heads: int = 2, n: int = 64, dtype: str = "bf16",
    lengths: str = "", block_size: int = 0, format: str = "none", per: str = "tensor", sinks: bool = False,
    scale: float = 0.0, window: int = 0, softcap: float = 0.0, wrong: str = "", layout: str = "contiguous",
    device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m sequences of at most `keys` tokens; `lengths`: as 3+0+5, else all are full. block_size 0: in one piece.

    `wrong` entries (cases.write_wrong) are those of lengths, l, and of the table, t.
    """
    g = random.generator(seed, device)
    long = numbers(lengths) if lengths else [keys] * m
    require(len(long) == m and max(long, default=0) <= keys, f"lengths must be {m} of up to {keys}, got {lengths!r}")
    kind = random.dtype_of(dtype if format == "none" else format)
    k, v, table = draw_cache(long, keys, kv_heads, n, kind, block_size, layout, g)
    k_scale, v_scale = draw_scales(format, per, kv_heads, g)
    held = integers(long, g)
    write_wrong(wrong, l=held, t=table)
    return {
        "q": draw_queries((m, queries, heads, n), dtype, layout, g), "k_cache": k, "v_cache": v,
        "lengths": held, "block_table": table,
        "k_scale": k_scale, "v_scale": v_scale, "sinks": draw_sinks(sinks, heads, g),
        "scale": scale or None, "window": window, "softcap": softcap,
    }  # fmt: skip


def decode_cases() -> dict[str, list[Case]]:
    small = [
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
        ),  # keys that are split among programs
        case(
            _FP32, m=2, keys=1100, heads=2, kv_heads=1, n=16, dtype="fp32", lengths="1100+700", block_size=16,
        ),  # keys that are split, and combined again
        case(m=1, keys=100, n=64, dtype="fp16", scale=500.0),  # logits of ±1e4
        case(_FP32, m=1, keys=1, n=16, dtype="fp32"),
        case(_FP32, m=2, keys=0, n=16, dtype="fp32", queries=2),  # no keys: zeros
        case(m=0, keys=64, n=64, dtype="fp16"),  # nothing to launch
        case(m=2, keys=64, n=64, dtype="fp16", lengths="64+20", layout="padded"),
        case(m=2, keys=64, n=64, dtype="fp16", lengths="64+20", block_size=16, layout="together"),
        case(m=2, keys=64, n=64, dtype="bf16", lengths="64+20", block_size=16, layout="misaligned"),
        case(_FAR, m=1, keys=3, n=16, dtype="fp16", lengths="3", layout="far"),  # more than 2**31 elements apart
    ]  # fmt: skip
    llama: dict[str, Any] = {"heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16"}
    sizes = ((1, 1024), (1, 8192), (8, 2048), (16, 8192))
    return {
        "test": list(map(_for_hopper, small)),
        "bench": [
            *(case(m=m, keys=keys, queries=queries, **llama) for m, keys in sizes for queries in (1, 2, 4)),
            *(case(m=m, keys=keys, **llama) for m, keys in ((64, 4096), (1, 131072))),
            *(case(m=16, keys=8192, queries=queries, **llama) for queries in (8, 16)),
            case(m=16, keys=8192, block_size=16, **llama),
            case(m=16, keys=8192, block_size=64, format="e4m3", **llama),
        ],
        "bench_cpu": [case(m=4, keys=2048, **llama | {"dtype": dtype}) for dtype in ("fp32", "bf16")],
    }


# attention_chunked


def chunked_inputs(
    m: int, keys: int = 4096, chunks: str = "", lengths: str = "", heads: int = 4, kv_heads: int = 2, n: int = 64,
    dtype: str = "bf16", block_size: int = 16, format: str = "none", per: str = "tensor", sinks: bool = False,
    scale: float = 0.0, window: int = 0, softcap: float = 0.0, bounded: bool = True, scattered: bool = True,
    wrong: str = "", layout: str = "contiguous", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m tokens in chunks of several sequences, as 3+0+5, or all of one; lengths likewise, or all are full.

    `wrong` entries (cases.write_wrong) are those of cu_seqlens_q, q, of lengths, l, and of the table, t.
    """
    g = random.generator(seed, device)
    parts = numbers(chunks) if chunks else [m]
    long = numbers(lengths) if lengths else [keys] * len(parts)
    require(sum(parts) == m, f"chunks must be {m} tokens in all, got {chunks!r}")
    require(len(long) == len(parts) and max(long) <= keys, f"lengths must be {len(parts)} of up to {keys}")
    kind = random.dtype_of(dtype if format == "none" else format)
    k, v, table = draw_cache(long, keys, kv_heads, n, kind, block_size, layout, g, scattered)
    k_scale, v_scale = draw_scales(format, per, kv_heads, g)
    edges, held = integers([*accumulate(parts, initial=0)], g), integers(long, g)
    write_wrong(wrong, q=edges, l=held, t=table)
    return {
        "q": draw_queries((m, heads, n), dtype, layout, g), "k_cache": k, "v_cache": v,
        "cu_seqlens_q": edges, "lengths": held, "block_table": table,
        "k_scale": k_scale, "v_scale": v_scale, "sinks": draw_sinks(sinks, heads, g),
        "scale": scale or None, "window": window, "softcap": softcap, "max_seqlen_q": max(parts) if bounded else 0,
    }  # fmt: skip


def chunked_cases() -> dict[str, list[Case]]:
    one: dict[str, Any] = {"heads": 2, "kv_heads": 1, "n": 16}
    small = [
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
        case(m=24, keys=40, chunks="9+3+12", **one, dtype="fp32", wrong="q0:-1+q3:1073741824"),
        case(
            m=40, keys=40, chunks="17+3+20", **one, dtype="fp16", wrong="q1:0+q2:25+q3:33"
        ),  # too long, and tokens of no sequence
        case(m=24, keys=40, chunks="9+3+12", **one, dtype="fp16", wrong="l0:-1+l1:2147483647", bounded=False),
        case(m=40, keys=80, chunks="17+3+20", lengths="80+40+49", **one, dtype="fp16", wrong="t4:-1+t10:18+t13:18"),
        case(m=40, keys=200, chunks="33+7", **one, dtype="fp16", window=16, wrong="t3:-1+t5:99+t20:2147483647"),
        case(m=9, keys=1100, chunks="5+4", **one, dtype="fp16", wrong="q0:4+t75:-2147483648"),  # keys that are split
        case(m=1, keys=1, n=16, dtype="fp32"),
        case(m=3, keys=16, chunks="3", lengths="0", n=16, dtype="fp32"),  # no keys: zeros
        case(m=0, keys=64, n=64, dtype="fp16"),  # nothing to launch
        case(m=20, keys=64, n=64, dtype="fp16", layout="padded"),
        case(m=20, keys=64, n=64, dtype="fp16", layout="together"),
        case(m=20, keys=64, n=64, dtype="bf16", layout="misaligned"),
    ]
    # Pages in order: so peers need not gather them, which would be most of their time where chunks are short.
    large: dict[str, Any] = {"n": 128, "dtype": "bf16", "block_size": 64, "scattered": False}
    return {
        "test": list(map(_for_hopper, small)),
        "bench": [
            *(case(m=m, keys=32768, heads=8, kv_heads=1, **large) for m in (256, 512)),
            *(case(m=m, keys=8192, heads=32, kv_heads=8, **large) for m in (256, 512, 2048)),
        ],
        "bench_cpu": [case(m=128, keys=1024, heads=8, kv_heads=2, n=128, dtype=dtype) for dtype in ("fp32", "bf16")],
    }
