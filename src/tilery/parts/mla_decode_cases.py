"""What mla_decode is checked and timed with: queries, and a cache of latent keys in blocks or in one piece."""

from typing import Any

import torch
from torch import Tensor

from tilery.core import inputs as random
from tilery.parts.attention_cases import plant


def draw(
    m: int, context: int, heads: int = 128, latent: int = 512, rope: int = 64, dtype: str = "bf16", queries: int = 1,
    block_size: int = 0, lengths: str = "full", logits: float = 1.0, wrong: str = "", layout: str = "contiguous",
    special: str = "none", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """m sequences; block_size 0: a contiguous cache. Where lengths are `ragged`, what is not seen holds NaN.

    Scores are about as large as `logits`. `wrong` entries (attention_cases.plant) are those of lengths, l, and of the
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
    plant(wrong, l=held, t=table)
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
    table = torch.full((len(seen), most), 2**30, dtype=torch.int32, device=g.device) if block else None
    for s, length in enumerate(seen):
        if table is not None:
            used = -(-length // block)
            table[s, :used] = order[s * most : s * most + used].to(torch.int32)
        if kind != "full":
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
