"""Who attention to a KV cache is held against: torch's attention, with the cache made ready in nobody's time.

Torch knows neither pages nor lengths: sequences are gathered in one piece, zeros past their ends, and keys that are not
seen are masked.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilery.core.peers import Saved

host_list = Saved(lambda x: x.tolist())


def require_without(who: str, **given: Any) -> None:
    """Refuse what the peer does not know."""
    for name, value in given.items():
        if isinstance(value, Tensor) or value:
            raise NotImplementedError(f"{who} has no {name}")


def max_keys(cache: Tensor, table: Tensor | None) -> int:
    return cache.shape[1] * (1 if table is None else table.shape[1])


def full(cache: Tensor, lengths: Tensor, table: Tensor | None) -> bool:
    """Whether every sequence is as long as it may be."""
    return all(n == max_keys(cache, table) for n in host_list(lengths))


def in_one_piece(cache: Tensor, lengths: Tensor, table: Tensor | None) -> Tensor:
    """[B, S, ..] of a cache [B, S, ..] or, with a table, of pages."""
    return cache if table is None and full(cache, lengths, table) else _gathered(cache, lengths, table)


def _gather(cache: Tensor, lengths: Tensor, table: Tensor | None) -> Tensor:
    kind = cache.dtype
    cache = cache.view(torch.uint8) if kind.itemsize == 1 else cache  # torch picks and fills bytes, not fp8
    made = cache if table is None else cache[table.clamp(0, len(cache) - 1).long()].flatten(1, 2)
    there = torch.arange(made.shape[1], device=made.device) < lengths.unsqueeze(1)
    return made.masked_fill(~there.view(*there.shape, *[1] * (made.dim() - 2)), 0).view(kind)


_gathered = Saved(_gather)


def _one_sequence(cache: Tensor, b: int, lengths: Tensor, table: Tensor) -> Tensor:
    """[length, kv_heads, D]: a view of the pages where they lie one after another."""
    length = host_list(lengths)[b]
    pages = host_list(table)[b][: -(-length // cache.shape[1])]
    if pages and pages == list(range(pages[0], pages[0] + len(pages))):
        return cache[pages[0] : pages[0] + len(pages)].flatten(0, 1)[:length]
    return in_one_piece(cache, lengths, table)[b, :length]


def _mask(position: Tensor, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of queries at these positions: 0, and -inf where a key is not seen."""
    key, position = torch.arange(keys, device=position.device), position.unsqueeze(-1)
    seen = (key <= position) & (position - key < window) if window else key <= position
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def _masks_of_batch(lengths: Tensor, queries: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    position = lengths.unsqueeze(1) - queries + torch.arange(queries, device=lengths.device)
    return _mask(position, keys, window, dtype).unsqueeze(1)


def _masks_of_chunks(lengths: Tensor, chunks: tuple[int, ...], window: int, dtype: torch.dtype) -> list[Tensor]:
    pairs = zip(chunks, lengths.tolist())
    return [_mask(torch.arange(n - rows, n, device=lengths.device), n, window, dtype) for rows, n in pairs]


masks = Saved(_masks_of_batch)  # [B, 1, Q, S]
masks_of_chunks = Saved(_masks_of_chunks)  # [Q, S] of each sequence


# attention_decode


def _ready(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, table: Tensor | None, k_scale: Any, v_scale: Any
) -> list[Tensor]:
    """q, k and v as [B, heads, tokens, D]; an fp8 cache is widened, which a user would do at every step."""
    kv = [in_one_piece(x, lengths, table) for x in (k_cache, v_cache)]
    if k_cache.dtype != q.dtype:
        kv = [x.to(q.dtype) * by.to(q.dtype).unsqueeze(-1) for x, by in zip(kv, (k_scale, v_scale))]
    return [x.transpose(1, 2) for x in (q, *kv)]


def decode_sdpa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, k_scale: Any,
    v_scale: Any, sinks: Any, scale: float | None, window: int, softcap: float, *, masked: bool = False,
) -> Tensor:  # fmt: skip
    """With a mask where sequences are not full, and always for several queries if `masked`."""
    require_without("torch's attention", sinks=sinks, softcap=softcap)
    query, k, v = _ready(q, k_cache, v_cache, lengths, block_table, k_scale, v_scale)
    queries, keys, mask = q.shape[1], max_keys(k_cache, block_table), None
    if window or not full(k_cache, lengths, block_table) or (masked and queries > 1) or queries > keys:
        mask = masks(lengths, queries, keys, window, q.dtype)
    elif queries > 1:
        from torch.nn.attention.bias import causal_lower_right  # imports Triton

        mask = causal_lower_right(queries, keys)
    return F.scaled_dot_product_attention(query, k, v, mask, scale=scale, enable_gqa=True).transpose(1, 2)


def decode_cudnn(*args: Any) -> Tensor:
    """Torch gives it no causal mask of fewer queries than keys, so several have one that is added."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return decode_sdpa(*args, masked=True)


def decode_cudnn_each(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, k_scale: Any,
    v_scale: Any, sinks: Any, scale: float | None, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """A call for each token, which sees the keys before it and needs no mask."""
    require_without("cuDNN, a call for each token,", sinks=sinks, window=window, softcap=softcap)
    queries, keys = q.shape[1], max_keys(k_cache, block_table)
    if queries == 1:
        raise NotImplementedError("for one token this is what cuDNN does anyway")
    if queries > keys or not full(k_cache, lengths, block_table):
        raise NotImplementedError("cuDNN, a call for each token, takes full sequences alone")
    query, k, v = _ready(q, k_cache, v_cache, lengths, block_table, k_scale, v_scale)
    out = torch.empty_like(q)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for t in range(queries):
            seen = keys - queries + t + 1
            one = query[:, :, t : t + 1], k[:, :, :seen], v[:, :, :seen]
            out[:, t : t + 1] = F.scaled_dot_product_attention(*one, scale=scale, enable_gqa=True).transpose(1, 2)
    return out


def decode_flash(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor | None, k_scale: Any,
    v_scale: Any, sinks: Any, scale: float | None, window: int, softcap: float,
) -> Tensor:  # fmt: skip
    """It takes no mask: all sequences must be full; its causal queries are at the last positions."""
    require_without("torch's FlashAttention", sinks=sinks, window=window, softcap=softcap)
    if not full(k_cache, lengths, block_table):
        raise NotImplementedError("torch's FlashAttention takes full sequences alone")
    qkv = _ready(q, k_cache, v_cache, lengths, block_table, k_scale, v_scale)
    made: Any = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, q.shape[1] > 1, scale=scale)
    out: Tensor = made[0]
    return out.transpose(1, 2)


# attention_chunked


def _chunks(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, table: Tensor
) -> Iterator[tuple[int, slice, list[Tensor]]]:
    """Each sequence that has queries: which it is, where they are, q, k and v as [1, heads, tokens, D]."""
    for b, (start, end) in enumerate(pairwise(host_list(cu_seqlens_q))):
        if end > start:
            kv = [_one_sequence(x, b, lengths, table) for x in (k_cache, v_cache)]
            yield b, slice(start, end), [x.transpose(0, 1).unsqueeze(0) for x in (q[start:end], *kv)]


def chunked_sdpa(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, block_table: Tensor,
    k_scale: Any, v_scale: Any, sinks: Any, scale: float | None, window: int, softcap: float, max_seqlen_q: int,
    *, masked: bool = False,
) -> Tensor:  # fmt: skip
    """A call for each sequence, sizes known to the host; with a mask in memory for windows, or if `masked`."""
    from torch.nn.attention.bias import causal_lower_right  # imports Triton

    require_without("torch's attention", k_scale=k_scale, sinks=sinks, softcap=softcap)
    out, sizes = torch.empty_like(q), tuple(b - a for a, b in pairwise(host_list(cu_seqlens_q)))
    for b, tokens, (query, k, v) in _chunks(q, k_cache, v_cache, cu_seqlens_q, lengths, block_table):
        rows, keys = query.shape[2], k.shape[2]
        if masked or window or rows > keys:
            mask = masks_of_chunks(lengths, sizes, window, q.dtype)[b]
        else:
            mask = causal_lower_right(rows, keys)
        made = F.scaled_dot_product_attention(query, k, v, mask, scale=scale, enable_gqa=True)
        out[tokens] = made[0].transpose(0, 1)
    return out


def chunked_cudnn(*args: Any) -> Tensor:
    """Torch gives it no causal mask of fewer queries than keys, so it has one that is added."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return chunked_sdpa(*args, masked=True)


def chunked_flash(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, block_table: Tensor,
    k_scale: Any, v_scale: Any, sinks: Any, scale: float | None, window: int, softcap: float, max_seqlen_q: int,
) -> Tensor:  # fmt: skip
    """Its causal mask is bottom-right."""
    require_without("torch's FlashAttention", k_scale=k_scale, sinks=sinks, window=window, softcap=softcap)
    out = torch.empty_like(q)
    for _, tokens, qkv in _chunks(q, k_cache, v_cache, cu_seqlens_q, lengths, block_table):
        made: Any = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, True, scale=scale)
        out[tokens] = made[0][0].transpose(0, 1)
    return out


def _prefix_of(cu_prefix_q: Tensor, sequences: int, queries: int) -> Tensor:
    """The prefix of each sequence's first token; one past the last where it has none."""
    first = torch.arange(sequences, device=cu_prefix_q.device, dtype=torch.int32) * queries
    return torch.searchsorted(cu_prefix_q[1:], first, right=True)


def _prefix_and_own(
    cache: Tensor, lengths: Tensor, table: Tensor, prefix_lengths: Tensor, prefix_table: Tensor, cu_prefix_q: Tensor,
    queries: int,
) -> Tensor:  # fmt: skip
    """[B, G, keys of a prefix and own ones, D]: every sequence has its prefix for itself."""
    which = _prefix_of(cu_prefix_q, len(lengths), queries).clamp(max=len(prefix_lengths) - 1)
    shared, own = _gather(cache, prefix_lengths, prefix_table)[which], _gather(cache, lengths, table)
    return torch.cat((shared, own), 1).transpose(1, 2).contiguous()


_keys, _values = Saved(_prefix_and_own), Saved(_prefix_and_own)


def cascade(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, block_table: Tensor, prefix_lengths: Tensor,
    prefix_table: Tensor, cu_prefix_q: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float,
) -> Tensor:  # fmt: skip
    """Each sequence with a copy of its prefix, which all of its tokens must have."""
    require_without("torch's attention", k_scale=k_scale, v_scale=v_scale, sinks=sinks, softcap=softcap)
    sequences, queries = q.shape[:2]
    where = lengths, block_table, prefix_lengths, prefix_table, cu_prefix_q, queries
    k, v = _keys(k_cache, *where), _values(v_cache, *where)
    most = k_cache.shape[1] * prefix_table.shape[1]
    of_prefix = torch.cat((prefix_lengths, prefix_lengths.new_zeros(1)))[_prefix_of(cu_prefix_q, sequences, queries)]
    key, token = (torch.arange(size, device=q.device) for size in (k.shape[2], queries))
    own = key - most <= lengths.view(-1, 1, 1) - queries + token.view(-1, 1)
    seen = torch.where(key < most, key < of_prefix.view(-1, 1, 1), own).unsqueeze(1)
    by_head = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, seen, scale=scale, enable_gqa=True)
    return by_head.transpose(1, 2)
