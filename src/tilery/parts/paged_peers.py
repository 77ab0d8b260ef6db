"""What torch's attention is given for a KV cache; how it is made ready is in nobody's time.

Torch knows neither pages nor lengths: sequences are gathered in one piece, zeros past their ends, and keys that are not
seen are masked.
"""

from typing import Any

import torch
from torch import Tensor

from tilery.core.peers import Saved
from tilery.parts.paged_attention import bound

host_list = Saved(lambda x: x.tolist())


def without(who: str, **given: Any) -> None:
    """Refuses what the peer does not know."""
    for name, value in given.items():
        if isinstance(value, Tensor) or value:
            raise NotImplementedError(f"{who} has no {name}")


def full(cache: Tensor, lengths: Tensor, table: Tensor | None) -> bool:
    """Whether every sequence is as long as it may be."""
    return all(n == bound(cache, table) for n in host_list(lengths))


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


def one_sequence(cache: Tensor, b: int, lengths: Tensor, table: Tensor) -> Tensor:
    """[length, kv_heads, D]: a view of the pages where they lie one after another."""
    length = host_list(lengths)[b]
    pages = host_list(table)[b][: -(-length // cache.shape[1])]
    if pages and pages == list(range(pages[0], pages[0] + len(pages))):
        return cache[pages[0] : pages[0] + len(pages)].flatten(0, 1)[:length]
    return in_one_piece(cache, lengths, table)[b, :length]


def _added(place: Tensor, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of queries at these places: 0, and -inf where a key is not seen."""
    key, place = torch.arange(keys, device=place.device), place.unsqueeze(-1)
    seen = (key <= place) & (place - key < window) if window else key <= place
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


def _of_batch(lengths: Tensor, queries: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    place = lengths.unsqueeze(1) - queries + torch.arange(queries, device=lengths.device)
    return _added(place, keys, window, dtype).unsqueeze(1)


def _of_chunks(lengths: Tensor, chunks: tuple[int, ...], window: int, dtype: torch.dtype) -> list[Tensor]:
    pairs = zip(chunks, lengths.tolist())
    return [_added(torch.arange(n - rows, n, device=lengths.device), n, window, dtype) for rows, n in pairs]


masks = Saved(_of_batch)  # [B, 1, Q, S]
masks_of_chunks = Saved(_of_chunks)  # [Q, S] of each sequence
