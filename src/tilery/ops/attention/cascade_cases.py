"""Sequences that share prefixes in the pages of a cache: what attention_cascade is checked and timed with."""

from itertools import accumulate
from typing import Any

from tilery.base.errors import require
from tilery.base.spec import Case, case
from tilery.core import inputs as random
from tilery.ops.attention import paged_cases
from tilery.ops.attention.cases import write_wrong


def inputs(
    m: int, keys: int = 64, prefix: int = 256, queries: int = 1, heads: int = 4, kv_heads: int = 2, n: int = 64,
    dtype: str = "bf16", lengths: str = "", groups: str = "", prefix_lengths: str = "", block_size: int = 16,
    format: str = "none", per: str = "tensor", sinks: bool = False, scale: float = 0.0, softcap: float = 0.0,
    wrong: str = "", layout: str = "contiguous", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m sequences of at most `keys` tokens of their own, and prefixes of at most `prefix`.

    `groups`, as 3+0+5, are how many sequences share each prefix; else all share one. Those past the last have none.
    `wrong` entries (cases.write_wrong) are those of lengths, l, of the table, t, of prefix_lengths, m, of the prefixes'
    table, p, and of cu_prefix_q, q.
    """
    g = random.generator(seed, device)
    sharing = paged_cases.numbers(groups) if groups else [m]
    own = paged_cases.numbers(lengths) if lengths else [keys] * m
    long = paged_cases.numbers(prefix_lengths) if prefix_lengths else [prefix] * len(sharing)
    require(sum(sharing) <= m, f"groups must be {m} sequences at most, got {groups!r}")
    require(len(own) == m and len(long) == len(sharing), f"lengths must be {m}, prefix_lengths {len(sharing)}")
    # One cache: a table of all, of which the prefixes' rows are the first.
    room = [prefix] * len(long) + [keys] * m
    kind = random.dtype_of(dtype if format == "none" else format)
    k, v, table = paged_cases.draw_cache([*long, *own], room, kv_heads, n, kind, block_size, layout, g)
    assert table is not None
    ends = [end * queries for end in accumulate(sharing, initial=0)]
    held, shared, edges = (paged_cases.integers(x, g) for x in (own, long, ends))
    own_table, prefix_table = (
        rows[:, : -(-size // block_size)].contiguous()
        for rows, size in ((table[len(long) :], keys), (table[: len(long)], prefix))
    )
    write_wrong(wrong, l=held, t=own_table, m=shared, p=prefix_table, q=edges)
    k_scale, v_scale = paged_cases.draw_scales(format, per, kv_heads, g)
    return {
        "q": paged_cases.draw_queries((m, queries, heads, n), dtype, layout, g), "k_cache": k, "v_cache": v,
        "lengths": held, "block_table": own_table, "prefix_lengths": shared, "prefix_table": prefix_table,
        "cu_prefix_q": edges, "k_scale": k_scale, "v_scale": v_scale, "sinks": paged_cases.draw_sinks(sinks, heads, g),
        "scale": scale or None, "softcap": softcap,
    }  # fmt: skip


def cases() -> dict[str, list[Case]]:
    one: dict[str, Any] = {"heads": 2, "kv_heads": 1, "n": 16}
    test = [
        case(m=3, keys=40, prefix=70, n=32, dtype="fp32"),
        case(m=3, keys=40, prefix=70, n=32, dtype="fp16", lengths="40+1+17"),
        case(m=3, keys=40, prefix=70, n=32, dtype="bf16"),
        case(m=5, keys=40, prefix=200, queries=3, n=64, dtype="fp16", groups="2+3", prefix_lengths="200+33"),
        case(m=6, keys=70, prefix=90, n=32, dtype="fp32", groups="2+0+1", prefix_lengths="90+9+0"),  # three have none
        case(m=20, keys=33, prefix=600, heads=8, kv_heads=2, n=64, dtype="fp16", block_size=32),  # several tiles
        case(m=2, keys=1100, prefix=1100, **one, dtype="fp32", block_size=64),  # keys that are split
        case(m=3, keys=40, prefix=70, queries=5, **one, dtype="fp16", lengths="3+0+40"),  # fewer own keys than queries
        case(m=2, keys=0, prefix=40, **one, dtype="fp32"),
        case(m=2, keys=40, prefix=0, **one, dtype="fp32"),
        case(m=4, keys=40, prefix=70, n=64, dtype="fp16", sinks=True, softcap=5.0, heads=8),
        case(m=2, keys=30, prefix=50, n=80, dtype="fp16", heads=3, kv_heads=3, scale=-0.3),
        case(m=2, keys=30, prefix=50, n=256, dtype="bf16", block_size=128),
        case(m=4, keys=40, prefix=70, n=64, dtype="fp16", heads=8, format="e4m3"),
        case(m=3, keys=40, prefix=70, n=32, dtype="fp32", format="e5m2", per="head"),
        case(m=2, keys=40, prefix=100, n=64, dtype="fp16", scale=500.0),  # logits of ±1e4
        case(m=6, keys=40, prefix=70, **one, dtype="fp16", groups="2+2+2", wrong="l0:-1+m1:81+l5:1073741824"),
        case(m=6, keys=40, prefix=70, **one, dtype="fp32", groups="2+2+2", wrong="t0:-1+t5:99+p6:2147483647+p14:-1"),
        case(m=6, keys=40, prefix=70, **one, dtype="fp32", groups="2+2+2", wrong="q0:-1+q3:1073741824"),
        case(m=3, keys=40, prefix=700, **one, dtype="fp16", wrong="p20:99+m0:705"),
        case(m=0, keys=40, prefix=70, **one, dtype="fp16"),  # nothing to launch
        case(m=3, keys=40, prefix=70, queries=2, n=64, dtype="fp16", layout="padded"),
        case(m=3, keys=40, prefix=70, n=64, dtype="fp16", layout="together"),
        case(m=3, keys=40, prefix=70, n=64, dtype="bf16", layout="misaligned"),
    ]
    llama: dict[str, Any] = {"heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16", "block_size": 64}
    return {
        "test": test,
        "bench": [
            case(m=64, keys=512, prefix=32768, **llama),
            case(m=16, keys=512, prefix=8192, **llama),
            case(m=64, keys=512, prefix=8192, groups="32+32", **llama),
        ],
        "bench_cpu": [case(m=8, keys=128, prefix=2048, **llama | {"dtype": dtype}) for dtype in ("fp32", "bf16")],
    }
