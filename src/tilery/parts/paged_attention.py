"""Attention to a KV cache, in pages or in one piece: checked, costed, drawn; what its ops share."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Case, Cost, TensorSpec, dtype_name
from tilery.core import inputs as random
from tilery.parts import attention_cases, kv_cache
from tilery.parts.attention import attend, pairs
from tilery.parts.attention_checks import check_bend
from tilery.parts.fp8 import ceil_div

SIZES = (16, 32, 64, 80, 96, 128, 192, 256)
# Weights are rounded to the dtype of q before they meet the values; fp8 caches are read as what they hold.
ALLOWED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EIGHT = 8  # splits: where there are so many, each has twice the least


def most_splits(splits: int, keys: int, least: int) -> int:
    """So many of the splits can have a key of sequences of at most `keys`, by the rule that kernels cut them with."""
    return max(min(splits, ceil_div(keys, least), max(EIGHT, ceil_div(keys, 2 * least))), 1)


# Checks


def check_queries(q: TensorSpec, what: str) -> None:
    known = ", ".join(map(dtype_name, ALLOWED))
    require(q.dtype in ALLOWED, f"q must be one of {known}, got {dtype_name(q.dtype)}")
    require(len(q.shape) == len(what.split()), f"q must be {what}, got {list(q.shape)}")
    sizes = ", ".join(map(str, SIZES))
    require(q.shape[-1] in SIZES, f"q must have a head size of {sizes}, got {q.shape[-1]}")
    require(q.stride(-1) == 1, f"q must have stride 1 along its last dimension, got {q.stride(-1)}")


def check_cache(
    q: TensorSpec, k_cache: TensorSpec, v_cache: TensorSpec, block_table: TensorSpec | None,
    k_scale: TensorSpec | None, v_scale: TensorSpec | None, sequences: int,
) -> None:  # fmt: skip
    """Paged with a table, [B, S, kv_heads, D] without."""
    (heads, size), shape = q.shape[-2:], k_cache.shape
    require(len(shape) == 4, f"k_cache must have four dimensions, got {list(shape)}")
    require(
        shape[2] > 0 and heads % shape[2] == 0,
        f"q must have a multiple of k_cache's {shape[2]} heads, got {heads}",
    )
    if block_table is not None:
        kv_cache.check(k_cache, v_cache, k_scale, v_scale, shape[2], size, q.dtype)
        check_ints("block_table", block_table, (sequences, None), "[sequences, most blocks of one]")
        return
    want = f"[{sequences}, keys, {shape[2]}, {size}] without a block_table"
    require((shape[0], shape[3]) == (sequences, size), f"k_cache must be {want}, got {list(shape)}")
    # A sequence in one piece is a block of any size: the rest is what a paged cache must be.
    whole = k_cache._replace(shape=(shape[0], kv_cache.BLOCK_SIZES[0], *shape[2:]))
    same = v_cache.shape == shape and v_cache.strides == k_cache.strides and v_cache.dtype == k_cache.dtype
    require(same, f"v_cache must be as k_cache in shape, strides and dtype, {k_cache}, got {v_cache}")
    kv_cache.check(whole, whole, k_scale, v_scale, shape[2], size, q.dtype)


def check_ints(name: str, x: TensorSpec, shape: tuple[int | None, ...], what: str) -> None:
    require(x.dtype == torch.int32, f"{name} must be int32, got {dtype_name(x.dtype)}")
    fits = len(x.shape) == len(shape) and all(b in (None, a) for a, b in zip(x.shape, shape))
    known = [size for size in shape if size is not None]
    require(fits, f"{name} must be {what}, here {known} of them, got {list(x.shape)}")
    require(x.stride(-1) == 1 or x.shape[-1] <= 1, f"{name} must be contiguous, got strides {list(x.strides)}")


def check_scores(q: TensorSpec, sinks: TensorSpec | None, window: int, softcap: float) -> None:
    if sinks is not None:
        fits = sinks.dtype == torch.float32 and sinks.shape == (q.shape[-2],)
        given = f"{dtype_name(sinks.dtype)}{list(sinks.shape)}"
        require(fits, f"sinks must be fp32[{q.shape[-2]}], one of each head, got {given}")
        require(sinks.stride(0) == 1 or sinks.shape[0] == 1, "sinks must be contiguous; call .contiguous() on them")
    check_bend(window, softcap)


# What it means, and what it costs


def bound(k_cache: Any, block_table: Any) -> int:
    """Keys of a sequence, at most."""
    return int(k_cache.shape[1]) * (1 if block_table is None else int(block_table.shape[1]))


def in_order(cache: Tensor, pages: Tensor, missing: float) -> Tensor:
    """The tokens of these pages in a row; `missing` where there is no such page."""
    shape = len(pages) * cache.shape[1], *cache.shape[2:]
    if not len(cache):
        return cache.new_full(shape, missing)
    there = (pages >= 0) & (pages < len(cache))
    values = cache[pages.clamp(0, len(cache) - 1).long()]
    return values.masked_fill(~there.view(-1, *[1] * (cache.dim() - 1)), missing).view(shape)


def read(
    cache: Tensor, b: int, length: int, block_table: Tensor | None, scale: Tensor | None, dtype: Any, missing: float
) -> Tensor:
    """[length, kv_heads, D] of sequence b, as before they were stored; `missing` where a page is not there."""
    if block_table is None:
        values = cache[b, :length].to(dtype)
    else:
        values = in_order(cache.to(dtype), block_table[b, : -(-length // cache.shape[1])], missing)[:length]
    return values if scale is None else values * scale.to(dtype).unsqueeze(-1)


def one_sequence(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, b: int, length: int, block_table: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, scale: float | None, **how: Any,
) -> Tensor:  # fmt: skip
    """The reference of q [S, H, D], the last of the sequence's tokens; NaN for a length that cannot be.

    A key of a page that is not there is NaN, and so is the row that sees it; its value does not count.
    """
    if not 0 <= length <= bound(k_cache, block_table):
        return torch.full_like(q, torch.nan)
    k = read(k_cache, b, length, block_table, k_scale, q.dtype, torch.nan)
    v = read(v_cache, b, length, block_table, v_scale, q.dtype, 0.0)
    return attend(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal=True, **how)[0]


def cost(
    q: TensorSpec, k_cache: TensorSpec, sequences: int, queries: int, keys: int, window: int
) -> Cost:  # fmt: skip
    """Of sequences as long as they may be: lengths are the device's."""
    seen = min(keys, queries + window - 1) if window else keys
    kv_heads, size = k_cache.shape[2:]
    values = 2 * sequences * seen * kv_heads * size * k_cache.dtype.itemsize
    by_query = pairs(queries, keys, True, window) / max(queries, 1)
    return Cost(int(4 * (q.nbytes // q.dtype.itemsize) * by_query), q.nbytes + values, q.nbytes)


def bucket(q: TensorSpec, k_cache: TensorSpec, paged: bool, window: int, softcap: float, sinks: bool) -> str:
    """What must be the same: not the batch, for a sequence must give the same bits in any."""
    page = k_cache.shape[1] if paged else 0
    exact = f"q={q.shape[-2]},kv={k_cache.shape[2]},d={q.shape[-1]},{dtype_name(q.dtype)}"
    exact += f",cache={dtype_name(k_cache.dtype)},page={page},window={window}"
    return exact + (",softcap" if softcap else "") + (",sinks" if sinks else "")


# Cases


def draw_cache(
    lengths: list[int], keys: int, kv_heads: int, size: int, kind: torch.dtype, block_size: int, layout: str, g: Any,
    scattered: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Caches that are NaN where no sequence is, and a table; block_size 0: in one piece, without a table.

    `layout` padded: views of one tensor with more heads; together: views of [blocks, 2, …]; far: tokens far apart.
    A sequence's blocks are anywhere if `scattered`, else one after another.
    """
    pages = block_size or keys
    most = -(-keys // pages) if block_size else 1
    blocks = len(lengths) * most + (3 if block_size else 0)
    k, v = _laid((blocks, pages, kv_heads, size), kind, layout, g)
    order = torch.randperm(blocks, generator=g, device=g.device)
    order = order if scattered else torch.arange(blocks, device=g.device)
    table = order[: len(lengths) * most].view(len(lengths), most).to(torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32, device=g.device).view(-1, 1, 1)
    there = torch.arange(most * pages, device=g.device).view(most, pages) < ends  # [sequences, most, pages]
    where = table.flatten().long() if block_size else slice(0, len(lengths))
    for cache in (k, v):
        values = torch.randn(len(lengths) * most, pages, kv_heads, size, generator=g, device=g.device)
        values = values.masked_fill(~there.view(len(lengths) * most, pages, 1, 1), float("nan")).to(kind)
        if kind in kv_cache.FORMATS:  # torch puts bytes, not fp8
            cache, values = cache.view(torch.uint8), values.view(torch.uint8)
        cache[where] = values
    table = table.masked_fill(~there.any(-1), 2**30)  # nobody may look there
    return k, v, table if block_size else None


def _laid(shape: tuple[int, ...], kind: torch.dtype, layout: str, g: Any) -> tuple[Tensor, Tensor]:
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
    """3+0+5 as a list."""
    return [int(part) for part in text.split("+")]


def integers(values: list[int], g: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=g.device)


def draw_queries(shape: tuple[int, ...], dtype: str, layout: str, g: Any) -> Tensor:
    """[.., H, D]; of a layout that is not contiguous a view of a model's qkv."""
    *most, heads, size = shape
    wide = heads if layout == "contiguous" else heads + 2
    return torch.randn(*most, wide, size, generator=g, device=g.device).to(random.dtype_of(dtype))[..., :heads, :]


def model_sizes(model: Any) -> list[dict[str, int]]:
    """MLA attends to another cache."""
    from tilery.parts import heads

    return [] if model.kv_lora_rank else heads.model_sizes(model)


def for_hopper(found: list[Case]) -> list[Case]:
    """The cases, with what TMA and wgmma do not take of them."""
    return [attention_cases.for_hopper(one, ("sinks", "softcap", "format"), "no more than a window") for one in found]
