"""Contracts of attention to a KV cache, in pages or in one piece: what its ops share."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import require
from tilery.base.spec import Cost, TensorSpec, dtype_name
from tilery.ops.attention.call import PagedCall, visible_pairs
from tilery.ops.attention.checks import HEAD_DIMS, check_softcap, check_window
from tilery.ops.attention.reference import attend
from tilery.ops.rope import kv_cache

# Probabilities are rounded to the dtype of q before they meet the values; fp8 caches are read as what they hold.
ALLOWED = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MAX_QUERIES = 16  # query tokens of a sequence in attention_decode and mla_decode


# Checks


def check_queries(q: TensorSpec, shape: str) -> None:
    known = ", ".join(map(dtype_name, ALLOWED))
    require(q.dtype in ALLOWED, f"q must be one of {known}, got {dtype_name(q.dtype)}")
    require(len(q.shape) == len(shape.split()), f"q must be {shape}, got {list(q.shape)}")
    sizes = ", ".join(map(str, HEAD_DIMS))
    require(q.shape[-1] in HEAD_DIMS, f"q must have a head size of {sizes}, got {q.shape[-1]}")
    require(q.stride(-1) == 1, f"q must have stride 1 along its last dimension, got {q.stride(-1)}")


def check_cache(call: PagedCall, sequences: int) -> None:
    """Paged with a table, [B, S, kv_heads, D] without."""
    q, k_cache, v_cache, table = call.q, call.k_cache, call.v_cache, call.block_table
    (heads, size), shape = q.shape[-2:], k_cache.shape
    require(len(shape) == 4, f"k_cache must have four dimensions, got {list(shape)}")
    require(
        shape[2] > 0 and heads % shape[2] == 0,
        f"q must have a multiple of k_cache's {shape[2]} heads, got {heads}",
    )
    if table is not None:
        kv_cache.check(k_cache, v_cache, call.k_scale, call.v_scale, shape[2], size, q.dtype)
        check_int32("block_table", table, (sequences, None), "[sequences, most blocks of one]")
        return
    want = f"[{sequences}, keys, {shape[2]}, {size}] without a block_table"
    require((shape[0], shape[3]) == (sequences, size), f"k_cache must be {want}, got {list(shape)}")
    # A sequence in one piece is a block of any size: the rest is what a paged cache must be.
    whole = k_cache._replace(shape=(shape[0], kv_cache.BLOCK_SIZES[0], *shape[2:]))
    same = v_cache.shape == shape and v_cache.strides == k_cache.strides and v_cache.dtype == k_cache.dtype
    require(same, f"v_cache must be as k_cache in shape, strides and dtype, {k_cache}, got {v_cache}")
    kv_cache.check(whole, whole, call.k_scale, call.v_scale, shape[2], size, q.dtype)


def check_int32(name: str, x: TensorSpec, shape: tuple[int | None, ...], what: str) -> None:
    require(x.dtype == torch.int32, f"{name} must be int32, got {dtype_name(x.dtype)}")
    fits = len(x.shape) == len(shape) and all(b in (None, a) for a, b in zip(x.shape, shape))
    known = [size for size in shape if size is not None]
    require(fits, f"{name} must be {what}, here {known} of them, got {list(x.shape)}")
    require(x.stride(-1) == 1 or x.shape[-1] <= 1, f"{name} must be contiguous, got strides {list(x.strides)}")


def check_scoring(call: PagedCall) -> None:
    sinks, heads = call.sinks, call.q.shape[-2]
    if sinks is not None:
        fits = sinks.dtype == torch.float32 and sinks.shape == (heads,)
        given = f"{dtype_name(sinks.dtype)}{list(sinks.shape)}"
        require(fits, f"sinks must be fp32[{heads}], one of each head, got {given}")
        require(sinks.stride(0) == 1 or sinks.shape[0] == 1, "sinks must be contiguous; call .contiguous() on them")
    check_window(call.window)
    check_softcap(call.softcap)


# What it means, and what it costs


def outputs(call: PagedCall) -> dict[str, TensorSpec]:
    return {"out": TensorSpec.contiguous(call.q.shape, call.q.dtype, call.q.device)}


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


def attend_sequence(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, b: int, length: int, block_table: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, scale: float | None, **how: Any,
) -> Tensor:  # fmt: skip
    """The reference for q [S, H, D], the last of the sequence's tokens; NaN for a length that cannot be.

    A key of a page that is not there is NaN, and so is the row that sees it; its value does not count.
    """
    most = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not 0 <= length <= most:
        return torch.full_like(q, torch.nan)
    k = read(k_cache, b, length, block_table, k_scale, q.dtype, torch.nan)
    v = read(v_cache, b, length, block_table, v_scale, q.dtype, 0.0)
    return attend(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, causal=True, **how)[0]


def cost(call: PagedCall, queries: int) -> Cost:
    """Sequences count as if all were as long as they may be, with so many queries: lengths are on the device."""
    q, cache, keys, window = call.q, call.k_cache, call.max_keys, call.window
    seen = min(keys, queries + window - 1) if window else keys
    values = 2 * call.batch * seen * call.kv_heads * cache.shape[3] * cache.dtype.itemsize
    keys_of_query = visible_pairs(queries, keys, True, window) / max(queries, 1)
    return Cost(int(4 * (q.nbytes // q.dtype.itemsize) * keys_of_query), q.nbytes + values, q.nbytes)


def bucket(call: PagedCall) -> str:
    """What must be the same: not the batch, for a sequence must give the same bits in any."""
    exact = f"q={call.heads},kv={call.kv_heads},d={call.head_dim},{dtype_name(call.q.dtype)}"
    exact += f",cache={dtype_name(call.k_cache.dtype)},page={call.page},window={call.effective_window}"
    return exact + (",softcap" if call.softcap else "") + (",sinks" if call.sinks is not None else "")
