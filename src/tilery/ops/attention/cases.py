"""Attention's tensors as users lay them out: what attention and attention_lse are checked and timed with."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Case, case
from tilery.core import inputs as random
from tilery.ops.attention.call import FP8


def inputs(
    m: int, heads: int = 4, kv_heads: int = 2, n: int = 64, dtype: str = "bf16", batch: int = 1, keys: int = -1,
    value: int = 0, order: str = "bshd", causal: bool = True, window: int | None = None, softcap: float = 0.0,
    scale: float | None = None, bias: str = "none", slopes: bool = False, sinks: bool = False, padding: bool = False,
    lengths: str = "", key_lengths: str = "", spare: int = 0, strength: float = 1.0, wrong: str = "",
    layout: str = "contiguous", special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m queries of n for each sequence, `keys` keys (-1: m) of n and values of `value` (0: n).

    `order` is the op's layout. `bias` is its dtype, or shared: fp32 for all sequences and heads. `padding`: a key_mask.
    Packed sequences have `lengths` and `key_lengths` of m and `keys` at most, as 3+0+5, else all of m and `keys`; then
    come so many `spare` tokens, full of NaN. q is `strength` times normal. `wrong` says what `write_wrong` writes.
    """
    g = random.generator(seed, device)
    packed, keys = order == "thd", m if keys < 0 else keys
    q_sizes = _lengths(lengths, batch, m) if packed else [m] * batch
    k_sizes = _lengths(key_lengths or (lengths if keys == m else ""), batch, keys) if packed else [keys] * batch
    require(len(q_sizes) == len(k_sizes), f"as many key_lengths as lengths, got {key_lengths!r} and {lengths!r}")
    shared = layout != "contiguous" and keys == m and not value  # views of one tensor, as a model's qkv
    q, k, v = _qkv(sum(q_sizes), sum(k_sizes), spare, (heads, kv_heads), (n, value or n), dtype, g, layout, shared)
    if special != "none" and v.numel():
        v[v.shape[0] // 2, 0, 1] = random.SPECIALS[special]
    if strength != 1.0:
        q.copy_(q * strength)
    if not packed:
        q, k, v = (x.unflatten(0, (batch, -1)) if batch != 1 and len(x) else _empty(x, batch) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v)) if order == "bhsd" else (q, k, v)
    scales = [torch.rand(1, generator=g, device=g.device) + 0.5 if q.dtype in FP8 else None for _ in range(3)]
    vectors = [torch.randn(heads, generator=g, device=g.device) / 4 if on else None for on in (slopes, sinks)]
    ends = [_ends(sizes, g) if packed else None for sizes in (q_sizes, k_sizes)]
    write_wrong(wrong, q=ends[0], k=ends[1])
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1],
        "key_mask": _padding(batch, keys, g) if padding else None,
        "bias": _bias(bias, batch, heads, m, keys, dtype, g), "slopes": vectors[0], "sinks": vectors[1],
        "q_scale": scales[0], "k_scale": scales[1], "v_scale": scales[2], "scale": scale, "causal": causal,
        "window": window or 0, "softcap": softcap, "layout": order,
        "max_seqlen_q": m if packed else 0, "max_seqlen_k": keys if packed else 0,
    }  # fmt: skip


def write_wrong(wrong: str, **tensors: Tensor | None) -> None:
    """Write wrong entries into indices: "q2:90+t0:-1" is 90 for entry 2 of q, and -1 for the first of t."""
    for entry in wrong.split("+") if wrong else []:
        where, value = entry.split(":")
        target = tensors[where[0]]
        require(target is not None, f"there is nothing to write {entry!r} into")
        assert target is not None
        target.view(-1)[int(where[1:])] = int(value)


def _empty(x: Tensor, batch: int) -> Tensor:
    return x.unsqueeze(0) if batch == 1 else x.new_empty(batch, 0, *x.shape[1:])


def _lengths(given: str, batch: int, most: int) -> list[int]:
    sizes = [int(size) for size in given.split("+")] if given else [most] * batch
    require(max(sizes, default=0) <= most, f"lengths must be {most} at most, got {given!r}")
    return sizes


def _qkv(queries, keys, spare, counts, sizes, dtype, g, layout, shared):  # type: ignore[no-untyped-def]
    """q, k and v of all sequences, one after another: [T, heads, size] each."""
    (heads, kv_heads), (n, e) = counts, sizes
    widths = heads * n, kv_heads * n, kv_heads * e
    name = "fp32" if random.dtype_of(dtype) in FP8 else dtype
    if shared:
        flat = list(random.matrix(queries + spare, sum(widths), name, g, layout).split(widths, -1))
    else:
        rows = queries + spare, keys + spare, keys + spare
        flat = [random.matrix(r, width, name, g, layout) for r, width in zip(rows, widths)]
    made = [x.unflatten(-1, (-1, size)) for x, size in zip(flat, (n, n, e))]
    if spare:
        for x in made:
            x[-spare:] = float("nan")
    return [x.to(random.dtype_of(dtype)) for x in made]


def _ends(sizes: list[int], g: torch.Generator) -> Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=g.device)


def _padding(batch: int, keys: int, g: torch.Generator) -> Tensor:
    """A key_mask, True where a key is seen: some keys are not, and none of the second sequence."""
    mask = torch.rand(batch, keys, generator=g, device=g.device) < 0.7
    if batch > 1:
        mask[1] = False
    return mask


def _bias(kind: str, batch: int, heads: int, m: int, keys: int, dtype: str, g: torch.Generator) -> Tensor | None:
    if kind == "none":
        return None
    shape = (1, 1, m, keys) if kind == "shared" else (batch, heads, m, keys)
    return torch.randn(shape, generator=g, device=g.device).to(random.dtype_of("fp32" if kind == "shared" else kind))


# cuTile takes plain attention alone, with heads that are one tile.
_PLAIN = {"cutile": "plain attention"}
_ODD = {"cutile": "power of two"}
_WIDE = {"cutile": "in fp32"}


def for_hopper(one: Case, refused: Mapping[str, str] | None = None) -> Case:
    """The case, with the reason why cuda.hopper refuses it, if it does; `refused` has those for parameters."""
    if one.params["dtype"] not in ("fp16", "bf16"):
        words = "fp16 and bf16 alone"
    elif found := [words for name, words in (refused or {}).items() if one.params.get(name)]:
        words = found[0]
    elif one.params.get("layout") == "misaligned":
        words = "16 bytes"
    else:
        return one
    return Case(one.params, one.refused_by | {"cuda.hopper": words})


def cases() -> list[Case]:
    """What attention and attention_lse must compute rightly."""
    small: dict[str, Any] = {"heads": 2, "kv_heads": 1, "n": 16}
    found = [
        case(m=20, heads=4, kv_heads=2, n=32, dtype="fp32", batch=2),
        case(m=70, heads=4, kv_heads=2, n=64, dtype="fp16"),
        case(m=70, heads=4, kv_heads=2, n=64, dtype="bf16"),
        case(m=150, heads=2, kv_heads=1, n=128, dtype="fp16", order="bhsd", batch=2),  # several tiles each way
        case(m=150, heads=2, kv_heads=2, n=128, dtype="bf16", causal=False),
        case(m=40, keys=150, heads=2, kv_heads=1, n=64, dtype="fp16"),  # the last query is at the last key
        case(m=90, keys=30, heads=2, kv_heads=1, n=32, dtype="fp32"),  # the first queries see nothing
        case(_ODD, m=33, keys=70, heads=3, kv_heads=3, n=80, dtype="fp16", causal=False),
        case(_ODD, m=33, heads=2, kv_heads=1, n=96, dtype="fp32", order="bhsd"),
        case(_ODD, m=40, heads=2, kv_heads=1, n=192, value=128, dtype="fp16"),
        case(m=40, heads=2, kv_heads=1, n=256, dtype="bf16"),
        case(_WIDE, m=33, heads=1, kv_heads=1, n=256, dtype="fp32", causal=False),
        case(_PLAIN, m=150, heads=2, kv_heads=1, n=32, dtype="fp16", window=40),
        case(_PLAIN, m=100, keys=150, heads=2, kv_heads=2, n=32, dtype="fp32", window=20, causal=False, order="bhsd"),
        case(_PLAIN, m=40, **small, dtype="fp32", softcap=5.0, strength=4.0),
        case(_PLAIN, m=40, **small, dtype="fp16", sinks=True, window=8),
        case(_PLAIN, m=40, heads=3, kv_heads=3, n=32, dtype="fp32", slopes=True, scale=0.3),
        case(_PLAIN, m=33, keys=50, heads=3, kv_heads=1, n=32, dtype="fp16", bias="fp16", batch=2, causal=False),
        case(_PLAIN, m=33, keys=50, heads=2, kv_heads=1, n=32, dtype="fp32", bias="shared", batch=2, order="bhsd"),
        case(_PLAIN, m=20, keys=70, heads=2, kv_heads=1, n=32, dtype="fp32", padding=True, batch=3, causal=False),
        case(_PLAIN, m=20, keys=70, **small, dtype="bf16", padding=True, batch=2, sinks=True),
        case(
            _PLAIN, m=40, keys=90, **small, dtype="fp16", bias="fp16", slopes=True, softcap=3.0, window=30, sinks=True,
        ),
        case(_PLAIN, m=30, keys=30, **small, dtype="fp32", order="thd", lengths="5+0+30+1"),
        case(
            _PLAIN, m=70, keys=80, heads=4, kv_heads=2, n=64, dtype="bf16", order="thd", lengths="3+70",
            key_lengths="80+66",
        ),
        case(_PLAIN, m=70, keys=80, **small, dtype="fp16", order="thd", lengths="9+70", key_lengths="0+80", spare=20),
        case(
            _PLAIN, m=20, keys=64, **small, dtype="fp32", order="thd", batch=2, window=9, softcap=4.0, causal=False,
            sinks=True,
        ),
        case(_PLAIN, m=20, **small, dtype="fp16", bias="fp32", order="bhsd", scale=0.3),
        case(_PLAIN, m=20, **small, dtype="bf16", bias="bf16", slopes=True),
        case(_PLAIN, m=70, heads=2, kv_heads=1, n=64, dtype="e4m3"),
        case(_PLAIN, m=40, keys=70, heads=2, kv_heads=1, n=32, dtype="e5m2", causal=False, softcap=4.0, order="thd"),
        case(m=40, heads=2, kv_heads=1, n=64, dtype="fp16", strength=1e3, scale=1.0),  # logits of ±1e4
        case(m=40, **small, dtype="fp32", scale=-0.5),
        case(m=20, **small, dtype="fp32", scale=0.0),
        case(m=20, **small, dtype="fp32", scale=1e-50),  # 0 in fp32
        case(m=1, heads=2, kv_heads=1, n=64, dtype="fp16"),
        case(m=1, keys=100, heads=8, kv_heads=1, n=64, dtype="bf16", batch=2, order="bhsd"),
        case(m=5, keys=0, **small, dtype="fp32"),  # zeros, -inf
        case(_PLAIN, m=5, keys=0, **small, dtype="fp16", sinks=True),
        case(m=0, **small, dtype="fp32"),  # nothing to launch
        case(m=5, **small, dtype="fp32", batch=0),
        case(m=40, heads=2, kv_heads=1, n=64, dtype="fp16", layout="padded", batch=2),
        case(m=40, heads=2, kv_heads=1, n=64, dtype="bf16", layout="misaligned", order="bhsd"),
        case(m=40, heads=2, kv_heads=1, n=32, dtype="fp32", layout="misaligned", causal=False),
        case(_PLAIN, m=40, heads=2, kv_heads=1, n=80, dtype="fp16", layout="misaligned", order="thd"),
        case(_PLAIN, m=3, heads=2, kv_heads=1, n=64, dtype="fp16", layout="far", order="thd"),
        case(m=20, **small, dtype="fp32", causal=False, special="nan"),
        case(m=20, **small, dtype="fp16", causal=False, special="inf"),
        case(m=3, keys=700, **small, dtype="fp32"),  # several blocks of keys in every language
    ]  # fmt: skip
    return list(map(_for_hopper, found))


def _for_hopper(one: Case) -> Case:
    extras = dict.fromkeys(("bias", "slopes", "sinks", "softcap", "padding"), "no more than packed sequences")
    return for_hopper(one, extras | {"value": "of one size"})


def wrong_cases() -> list[Case]:
    """Packed sequences that are invalid (see indices.py) beside valid ones."""
    small: dict[str, Any] = {"order": "thd", "heads": 2, "kv_heads": 1, "n": 16}
    found = [
        case(
            _PLAIN, m=20, **small, dtype="fp32", lengths="5+9+20", spare=6, wrong="q0:-2147483648+q3:1073741824",
        ),  # the first does not begin at 0, the last is beyond the end
        case(_PLAIN, m=30, **small, dtype="fp16", lengths="5+20+5", spare=70, wrong="q3:60", causal=False),  # too long
        case(_PLAIN, m=20, **small, dtype="fp16", lengths="9+20+4", spare=20, wrong="k3:53"),  # too many keys
        case(_PLAIN, m=30, **small, dtype="fp32", lengths="9+20+4+6", wrong="k2:4+k4:2147483647"),  # keys that fall
        case(_PLAIN, m=9, **small, dtype="fp16", lengths="9+3", wrong="q1:-1+q2:-5", sinks=True, window=4),
    ]  # fmt: skip
    return list(map(_for_hopper, found))


def bench_cases() -> dict[str, list[Case]]:
    """Prefills of Llama 8B, of models with other heads, packed ones, a window, a chunk of a long prefill."""
    llama: dict[str, Any] = {"heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16"}
    return {
        "bench": [
            case(m=4096, batch=4, **llama),
            case(m=16384, **llama),
            case(m=4096, batch=4, causal=False, **llama | {"kv_heads": 32}),
            case(m=4096, batch=4, heads=16, kv_heads=16, n=64, dtype="bf16"),
            case(m=4096, batch=2, heads=16, kv_heads=16, n=256, dtype="bf16"),
            case(m=512, batch=32, **llama),
            case(m=2048, batch=8, order="thd", **llama),
            case(m=8192, window=1024, **llama),
            case(m=512, keys=8192, **llama),
        ],
        "bench_cpu": [
            case(m=512, heads=8, kv_heads=2, n=64, dtype="fp32"),
            case(m=512, heads=8, kv_heads=2, n=128, dtype="bf16"),
        ],
    }
