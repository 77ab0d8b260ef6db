"""What attention_backward is checked and timed with: gradients of outputs, and what the forward has returned."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Case, case
from tilery.core import inputs as random
from tilery.ops.attention.cases import write_wrong
from tilery.ops.attention.reference import attend


def inputs(
    m: int, keys: int = -1, heads: int = 4, kv_heads: int = 2, n: int = 64, value: int = 0, dtype: str = "bf16",
    batch: int = 1, causal: bool = True, order: str = "bshd", lengths: str = "", dlse: bool = True,
    scale: float | None = None, window: int | None = None, softcap: float = 0.0, sinks: bool = False, wrong: str = "",
    layout: str = "contiguous", special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m queries and `keys` keys (-1: m) for each sequence, heads of n and values of `value` (0: n).

    `order` is the op's layout. `lengths` are those of packed sequences, "3+5": of keys too, or "3:4+5:0".
    Where `layout` is not contiguous, heads of q, k and v lie so; `special` stands in dout, `wrong` entries
    (cases.write_wrong) in cu_seqlens.
    """
    g = random.generator(seed, device)
    keys, value = (m if keys < 0 else keys), value or n
    parts = [tuple(map(int, (part + ":" + part).split(":")[:2])) for part in lengths.split("+")] if lengths else []
    sizes = parts or [(m, keys)] * batch
    padding = 3 if parts else 0  # tokens of no sequence
    tokens, of_keys = (sum(pair[i] for pair in sizes) + padding for i in range(2))

    def drawn(count: int, rows: int, width: int, special: str = "none") -> Tensor:
        return random.matrix(rows, count * width, dtype, g, layout, special).unflatten(-1, (count, width))

    q, k, v = drawn(heads, tokens, n), drawn(kv_heads, of_keys, n), drawn(kv_heads, of_keys, value)
    dout = drawn(heads, tokens, value, special)
    held = _sinks(heads, seed, device) if sinks else None
    how: dict[str, Any] = {"causal": causal, "window": window or 0, "softcap": softcap, "sinks": held}
    out, lse = _forward(q, k, v, sizes, n**-0.5 if scale is None else scale, how)
    given = random.away_from_zero((heads, tokens), g) if dlse else None
    most = [max((pair[i] for pair in parts), default=0) for i in range(2)]
    made = {"dout": dout, "dlse": given, "q": q, "k": k, "v": v, "result": out, "lse": lse}
    if not parts:
        made = {name: _placed(name, x, batch, order) for name, x in made.items()}
    ends = [_ends([pair[i] for pair in parts], device) if parts else None for i in range(2)]
    write_wrong(wrong, q=ends[0], k=ends[1])
    return made | {
        "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1], "scale": scale, "causal": causal, "layout": order,
        "max_seqlen_q": most[0], "max_seqlen_k": most[1], "window": window or 0, "softcap": softcap,
    }  # fmt: skip


def sinks_inputs(
    m: int, heads: int = 4, n: int = 64, dtype: str = "bf16", batch: int = 1, causal: bool = True, order: str = "bshd",
    lengths: str = "", dlse: bool = True, layout: str = "contiguous", special: str = "none", device: str = "cuda",
    seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """What `inputs` makes with sinks, as attention_sinks_backward takes it."""
    given = inputs(
        m, heads=heads, kv_heads=1, n=n, dtype=dtype, batch=batch, causal=causal, order=order, lengths=lengths,
        dlse=dlse, sinks=True, layout=layout, special=special, device=device, seed=seed,
    )  # fmt: skip
    names = "dout", "dlse", "result", "lse", "layout"
    return {name: given[name] for name in names} | {"sinks": _sinks(heads, seed, device)}


def _sinks(heads: int, seed: int, device: str) -> Tensor:
    g = random.generator(seed + 1, device)
    return torch.randn(heads, generator=g, device=g.device)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sizes: list[Any], scale: float, how: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
    first = first_key = 0
    for queries, keys in sizes:
        rows, columns = slice(first, first + queries), slice(first_key, first_key + keys)
        each = q[rows].float(), k[columns].float(), v[columns].float()
        found, lse[:, rows] = attend(*each, scale, **how)
        out[rows] = found.to(q.dtype)
        first, first_key = first + queries, first_key + keys
    return out, lse


def _placed(name: str, x: Tensor | None, batch: int, order: str) -> Tensor | None:
    """Packed tokens as those of `batch` sequences of one length."""
    if x is None:
        return None
    dim = 1 if name in ("lse", "dlse") else 0
    x = x.unflatten(dim, (batch, x.shape[dim] // batch))
    if dim:
        return x.transpose(0, 1).contiguous()
    return x.transpose(1, 2) if order == "bhsd" else x


def _ends(lengths: list[int], device: Any) -> Tensor:
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return torch.tensor(ends, dtype=torch.int32, device=device)


FP32 = {"cuda.hopper": "fp16 and bf16 alone"}
SIZES = {"cuda.hopper": "of one size, multiples of 16 up to 128"}
TMA = {"cuda.hopper": "must start at a multiple of 16 bytes"}


def cases() -> list[Case]:
    return [
        case(m=5, heads=2, kv_heads=1, n=16, dtype="fp32", refused_by=FP32),
        case(m=40, keys=70, heads=4, kv_heads=2, n=64, dtype="fp16"),  # the last query is at the last key
        case(m=40, heads=4, kv_heads=2, n=64, dtype="bf16"),
        case(m=70, keys=33, heads=3, kv_heads=3, n=32, dtype="fp32", refused_by=FP32),  # queries that see nothing
        case(m=37, keys=80, heads=4, kv_heads=1, n=80, dtype="fp16", causal=False, batch=2, order="bhsd"),
        case(m=20, heads=2, kv_heads=2, n=128, dtype="bf16", causal=False, dlse=False),
        case(m=200, keys=230, heads=2, kv_heads=1, n=128, dtype="fp16"),  # several tiles each way
        case(m=0, heads=2, kv_heads=1, n=64, dtype="fp16", order="thd", lengths="210:140+9:0+150:150", causal=False),
        case(m=130, heads=2, kv_heads=1, n=96, value=64, dtype="fp16", dlse=False, refused_by=SIZES),
        case(m=20, heads=2, kv_heads=1, n=192, value=128, dtype="bf16", refused_by=SIZES),
        case(m=12, heads=2, kv_heads=1, n=256, dtype="bf16", refused_by=SIZES),
        case(m=12, heads=2, kv_heads=1, n=256, dtype="fp32", refused_by=FP32),
        case(m=0, heads=4, kv_heads=2, n=32, dtype="fp16", order="thd", lengths="3+17+0+9"),
        case(
            m=0, heads=2, kv_heads=1, n=32, dtype="fp32", order="thd", lengths="3:7+20:5+0:4+4:0", causal=False,
            refused_by=FP32,
        ),
        case(m=0, heads=2, kv_heads=1, n=64, dtype="bf16", order="thd", lengths="70:70+9:33"),
        case(m=20, heads=2, kv_heads=1, n=32, dtype="fp16", scale=-0.3, causal=False),
        case(
            m=0, heads=2, kv_heads=1, n=16, dtype="fp32", order="thd", lengths="3:7+20:5+4:9",
            wrong="q0:1+q3:1073741824", refused_by=FP32,
        ),
        case(m=0, heads=2, kv_heads=1, n=16, dtype="fp16", order="thd", lengths="9+4+20", wrong="k3:36"),
        case(m=1, heads=8, kv_heads=2, n=16, dtype="fp32", refused_by=FP32),  # one key: all of dq comes from dlse
        case(m=5, keys=0, heads=2, kv_heads=1, n=16, dtype="fp32", refused_by=FP32),  # every query sees nothing
        case(m=0, heads=2, kv_heads=1, n=32, dtype="fp16"),  # nothing to launch
        case(m=20, heads=4, kv_heads=2, n=32, dtype="fp16", layout="padded"),
        case(m=20, heads=4, kv_heads=2, n=32, dtype="fp32", refused_by=FP32, layout="misaligned", order="bhsd"),
        case(m=20, heads=4, kv_heads=2, n=32, dtype="bf16", layout="misaligned", refused_by=TMA),
        case(m=6, heads=2, kv_heads=1, n=32, dtype="fp16", layout="far"),
        case(m=5, heads=2, kv_heads=1, n=16, dtype="fp32", refused_by=FP32, special="nan"),
        *_scored_cases(),
    ]  # fmt: skip


def _scored_cases() -> list[Case]:
    """Windows, soft caps and sinks, with more blocks of keys and of queries than a program keeps."""
    small: dict[str, Any] = {"heads": 4, "kv_heads": 2, "n": 32}
    packed: dict[str, Any] = {"m": 0, "order": "thd", "heads": 2, "kv_heads": 1, "n": 32}
    both: dict[str, Any] = {"m": 70, "keys": 130, "heads": 6, "kv_heads": 2, "n": 80, "window": 50, "sinks": True}
    fp32: dict[str, Any] = {"dtype": "fp32", "refused_by": FP32}
    return [
        case(m=150, **small, **fp32, window=40),
        case(m=150, **small, dtype="bf16", window=40),
        case(m=100, keys=170, **small, dtype="fp16", window=33, causal=False, batch=2, order="bhsd"),
        case(m=90, keys=50, **small, **fp32, window=20, causal=False),  # some queries see nothing
        case(m=40, **small, **fp32, window=1),  # each sees its own key alone
        case(m=70, **small, **fp32, softcap=2.0),
        case(  # tanh of it is 1
            m=40, keys=90, **small, dtype="fp16", softcap=0.3, causal=False, scale=-0.3
        ),
        case(m=70, **small, dtype="bf16", softcap=30.0, sinks=True, dlse=False),
        case(**both, dtype="fp16", softcap=5.0),
        case(**packed, **fp32, lengths="3:7+120:95+0:4+70:70", window=30, softcap=4.0),
        case(**packed, dtype="fp16", lengths="33+120", window=17, causal=False, sinks=True),
        case(**packed, **fp32, lengths="20:5+9:30", window=6, sinks=True, wrong="k2:36"),
        case(m=5, keys=0, heads=2, kv_heads=1, n=16, **fp32, sinks=True),  # a query sees its sink alone
    ]


def sinks_cases() -> list[Case]:
    return [
        case(m=9, heads=4, n=32, dtype="fp32"),
        case(m=150, heads=4, n=64, dtype="fp16", batch=3),
        case(m=150, heads=4, n=64, dtype="bf16", batch=3, order="bhsd"),
        case(m=700, heads=3, n=80, dtype="fp32", batch=2, dlse=False),  # more rows than a program takes at a time
        case(m=33, heads=2, n=256, dtype="fp16", causal=False),
        case(m=0, heads=2, n=32, dtype="fp32", order="thd", lengths="3+17+0+9"),  # and tokens of no sequence
        case(m=1, heads=2, n=32, dtype="fp32"),
        case(m=0, heads=2, n=32, dtype="fp16"),  # zeros
        case(m=20, heads=4, n=32, dtype="fp16", layout="padded", order="thd", lengths="20"),
        case(m=20, heads=4, n=32, dtype="fp32", layout="misaligned", order="bhsd"),
        case(m=5, heads=2, n=32, dtype="fp16", layout="far"),
        case(m=5, heads=2, n=16, dtype="fp32", special="nan"),
    ]


def bench_cases() -> dict[str, list[Case]]:
    llama: dict[str, Any] = {"heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16", "dlse": False}
    on_cpu: dict[str, Any] = {"m": 1024, "heads": 8, "kv_heads": 2, "n": 64, "dlse": False}
    return {
        "bench": [
            case(m=4096, batch=4, **llama),
            case(m=4096, batch=4, causal=False, **llama | {"kv_heads": 32}),
            case(m=4096, batch=4, **llama | {"heads": 16, "kv_heads": 16, "n": 64}),
            case(m=16384, **llama),
        ],
        "bench_cpu": [case(dtype=dtype, **on_cpu) for dtype in ("fp32", "bf16")],
    }


def sinks_bench_cases() -> dict[str, list[Case]]:
    return {
        "bench": [case(m=4096, batch=4, heads=64, n=64, dtype="bf16", dlse=False)],
        "bench_cpu": [case(m=1024, heads=8, n=64, dtype=dtype, dlse=False) for dtype in ("fp32", "bf16")],
    }
