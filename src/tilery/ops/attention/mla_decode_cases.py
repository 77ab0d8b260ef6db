"""What mla_decode is checked and timed with: queries, and a cache of latent keys in blocks or in one piece."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Case, case
from tilery.core import inputs as random
from tilery.ops.attention.cases import write_wrong


def inputs(
    m: int, context: int, heads: int = 128, latent: int = 512, rope: int = 64, dtype: str = "bf16", queries: int = 1,
    block_size: int = 0, lengths: str = "full", logits: float = 1.0, wrong: str = "", layout: str = "contiguous",
    special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m sequences; block_size 0: a contiguous cache. Where lengths are `ragged`, what is not seen holds NaN.

    Scores are about as large as `logits`. `wrong` entries (cases.write_wrong) are those of lengths, l, and of the
    table, t. Where `layout` is not contiguous, q and q_rope are views of one tensor.
    """
    g = random.generator(seed, device)
    if layout == "contiguous":
        q, q_rope = (random.matrix(m * queries * heads, n, dtype, g, special=special) for n in (latent, rope))
    else:
        both = random.matrix(m * queries * heads, latent + rope, dtype, g, layout, special)
        q, q_rope = both.split((latent, rope), -1)
    q, q_rope = (x.unflatten(0, (m, queries, heads)) for x in (q, q_rope))
    seen = _lengths(m, context, queries, lengths)
    cache, table = _cache(seen, context, latent + rope, dtype, block_size, lengths, layout, g)
    held = torch.tensor(seen, dtype=torch.int32, device=device)
    write_wrong(wrong, l=held, t=table)
    return {
        "q": q, "q_rope": q_rope, "cache": cache, "lengths": held,
        "block_table": table, "scale": logits * (latent + rope) ** -0.5,
    }  # fmt: skip


def _lengths(m: int, context: int, queries: int, kind: str) -> list[int]:
    """Ragged: the longest, none at all, fewer than there are queries, then all sorts."""
    if kind == "full":
        return [context] * m
    return [context, 0, max(queries - 1, 1), *((7 * i) % (context + 1) for i in range(3, m))][:m]


def _cache(
    seen: list[int], context: int, width: int, dtype: str, block: int, kind: str, layout: str, g: Any
) -> tuple[Tensor, Tensor | None]:
    """Keys of every sequence and, if there are blocks, where they lie: all over a pool that has some more."""
    most = -(-context // block) if block else 0
    shape = (len(seen) * most + 3, block, width) if block else (len(seen), context, width)
    cache = _laid(shape, random.dtype_of(dtype), layout, g)
    if kind == "full":
        cache.copy_(torch.randn(shape, generator=g, device=g.device))
    else:
        cache.fill_(float("nan"))
    order = torch.randperm(shape[0], generator=g, device=g.device)
    if kind == "full":
        return cache, order[: len(seen) * most].view(len(seen), most).to(torch.int32) if block else None
    table = torch.full((len(seen), most), 2**30, dtype=torch.int32, device=g.device) if block else None
    for s, length in enumerate(seen):
        if table is not None:
            used = -(-length // block)
            table[s, :used] = order[s * most : s * most + used].to(torch.int32)
        _fill(cache, table, s, length, order, most, g)
    return cache, table


def _laid(shape: tuple[int, int, int], kind: torch.dtype, layout: str, g: Any) -> Tensor:
    """Tokens with a gap behind each; `far`: more than 2**31 elements from the first block to the last."""
    apart = shape[2] + {"contiguous": 0, "misaligned": 3}.get(layout, 8)
    far = (2**31 // max(shape[0] - 1, 1) // 64 + 1) * 64 if layout == "far" else 0
    strides = max(apart * max(shape[1], 1), far), apart, 1
    reach = sum((size - 1) * step for size, step in zip(shape, strides)) + 1 if all(shape) else 0
    return torch.empty(reach, dtype=kind, device=g.device).as_strided(shape, strides)


def _fill(cache: Tensor, table: Tensor | None, s: int, length: int, order: Tensor, most: int, g: Any) -> None:
    """What sequence s sees."""
    block = cache.shape[1]
    for start in range(0, length, block):
        count = min(block, length - start)
        values = torch.randn(count, cache.shape[2], generator=g, device=g.device).to(cache.dtype)
        if table is None:
            cache[s, start : start + count] = values
        else:
            here = s * most + start // block
            cache[order[here : here + 1], :count] = values


def _for_hopper(one: Case) -> Case:
    """The case, with the reason why cuda.hopper refuses it, if it does."""
    if (one.params["latent"], one.params["rope"]) == (512, 64):
        return one
    return Case(one.params, one.refused_by | {"cuda.hopper": "512 values of the latent and 64 turned ones alone"})


def cases() -> dict[str, list[Case]]:
    far = {"cutile": "below 2**31"}
    small: dict[str, Any] = {"heads": 3, "latent": 32, "rope": 16}
    deepseek: dict[str, Any] = {"latent": 512, "rope": 64}
    narrow = {"triton": "strides are multiples of 16"}
    large: dict[str, Any] = {**deepseek, "block_size": 64, "dtype": "bf16"}
    found = [
        case(m=2, context=70, block_size=64, dtype="fp32", **small),
        case(m=2, context=70, block_size=64, dtype="fp16", **small),
        case(m=2, context=70, block_size=64, dtype="bf16", **small),
        case(m=2, context=130, block_size=64, dtype="fp16", **deepseek, heads=16),
        case(m=1, context=40, block_size=64, dtype="bf16", queries=2, **deepseek, heads=70),  # these fill no tile
        case(m=5, context=90, dtype="fp16", queries=4, block_size=16, lengths="ragged", **small),
        case(m=4, context=150, dtype="fp32", block_size=32, lengths="ragged", **small),
        case(m=4, context=90, dtype="bf16", queries=3, block_size=256, lengths="ragged", **small),
        case(m=4, context=90, dtype="fp16", queries=2, lengths="ragged", **small),  # contiguous
        case(m=2, context=33, dtype="fp32", queries=16, **small),
        case(m=2, context=600, heads=2, latent=16, rope=16, dtype="fp32", block_size=128),  # in several splits
        case(m=4, context=40, dtype="fp16", queries=2, wrong="l0:-1+l1:41+l2:1073741824", **small),
        case(
            m=6, context=48, queries=3, dtype="fp16", block_size=16, **small,
            wrong="t1:-1+t5:21+t6:2147483647+t11:-2147483648+t14:21+l4:33",
        ),  # the fifth has a page that its last query alone sees
        case(m=2, context=600, heads=2, latent=16, rope=16, dtype="fp32", block_size=128, wrong="l0:601+t7:-1"),
        case(m=1, context=1, block_size=64, heads=8, latent=16, rope=16, dtype="fp32"),  # one key
        case(m=2, context=0, dtype="fp32", **small),  # no key at all
        case(m=2, context=0, block_size=64, dtype="fp16", **small),
        case(m=0, context=16, block_size=64, dtype="fp32", **small),  # nothing to launch
        case(m=3, context=80, block_size=64, dtype="fp32", logits=1e4, lengths="ragged", **small),
        case(m=2, context=70, block_size=64, dtype="fp16", layout="padded", queries=2, **small),
        case(m=2, context=70, block_size=64, dtype="fp16", layout="misaligned", **small),
        case(far, m=1, context=40, dtype="fp16", layout="far", block_size=16, **small),
        case(m=2, context=40, block_size=64, dtype="fp32", special="nan", **small),
        case(m=3, context=90, dtype="bf16", queries=2, lengths="ragged", block_size=16, **deepseek, heads=33),
        case(narrow, m=2, context=70, dtype="fp16", queries=2, **deepseek, heads=1, layout="padded"),  # contiguous
        case(m=1, context=150, dtype="bf16", block_size=32, **deepseek, heads=100),
        case(m=3, context=80, dtype="bf16", block_size=64, lengths="ragged", logits=1e3, **deepseek, heads=128),
        case(
            m=5, context=81, queries=3, dtype="bf16", block_size=16, **deepseek, heads=22,
            wrong="l0:-1+l1:97+t12:-1+t21:3000+t29:2147483647",
        ),  # the last has a page that its last query alone sees
        case(m=2, context=0, block_size=64, dtype="fp16", **deepseek, heads=4),
    ]  # fmt: skip
    return {
        "test": list(map(_for_hopper, found)),
        "bench": [
            *(case(m=m, context=4096, heads=heads, **large) for heads in (128, 16) for m in (1, 16, 128)),
            case(m=1, context=32768, heads=128, **large),
            case(m=16, context=8192, heads=16, queries=4, **large),
        ],
        "bench_cpu": [
            case(m=4, context=1024, heads=16, **large | {"dtype": dtype}) for dtype in ("fp32", "bf16")
        ],
    }  # fmt: skip
