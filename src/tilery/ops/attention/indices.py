"""Integers that attention reads on the device: ends of packed sequences, lengths, pages; and what wrong ones mean.

A sequence is invalid whose integers lead outside of a tensor, or that is longer than declared. It has the rows that are
there, and all of them are NaN. So is a row that sees a key of a page that is not in the cache. No kernel follows such
an integer.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilery.core.indices import require_between, require_offsets


class Span(NamedTuple):
    """A packed sequence's tokens, inside of the tensor whatever its integers say."""

    start: int
    end: int
    valid: bool

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.end)


def spans(cu_seqlens: Tensor, tokens: int, longest: int) -> list[Span]:
    """Where each packed sequence lies; `longest` is the length that is declared."""
    made, edges = [], cu_seqlens.tolist()
    for b, (first, last) in enumerate(pairwise(edges)):
        start = min(max(first, 0), tokens) if b else 0
        end = min(max(last, start), tokens)
        made.append(Span(start, end, (start, end) == (first, last) and end - start <= longest))
    return made


def require_packed(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, longest_q: int, longest_k: int
) -> None:
    """Raise BadInput for the first entry of cu_seqlens that makes a sequence invalid."""
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        require_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], longest_q)
        require_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], longest_k)


def require_pages(
    lengths: Tensor, table: Tensor | None, cache: Tensor, max_keys: int, queries: int | Tensor, window: int = 0,
    names: tuple[str, str] = ("lengths", "block_table"),
) -> None:  # fmt: skip
    """Raise BadInput for a length outside of 0 to `max_keys`, or for a page that is read and is not in the cache.

    `queries` are the query tokens, of every sequence or of each; pages that none of them sees may be anything.
    """
    require_between(names[0], lengths, 0, max_keys)
    if table is None:
        return
    page, count = cache.shape[1], torch.as_tensor(queries, device=lengths.device).expand_as(lengths)
    start = torch.arange(table.shape[1], device=table.device) * page
    first = (lengths - count - window + 1).clamp(min=0) if window else torch.zeros_like(lengths)
    read = (start < lengths[:, None]) & (start + page > first[:, None]) & (count > 0)[:, None]
    if read.any():
        require_between(names[1], torch.where(read, table, 0), 0, cache.shape[0] - 1)


def fill_without_keys(out: Tensor, lse: Tensor | None, lengths: Tensor, max_keys: int) -> None:
    """Write out [B, Q, H, D] and lse [B, H, Q] of a cache that holds no key at all, for which no kernel is launched.

    Rows are zeros, with an lse of -inf. A sequence whose length is not from 0 to `max_keys` is NaN. So is every row
    that sees a key, as no page of it is there.
    """
    queries = out.shape[1]
    position = lengths[:, None].long() - queries + torch.arange(queries, device=lengths.device)
    wrong = (lengths[:, None] < 0) | (lengths[:, None] > max_keys) | (position >= 0)
    out.zero_().masked_fill_(wrong[:, :, None, None], torch.nan)
    if lse is not None:
        lse.fill_(-torch.inf).masked_fill_(wrong[:, None, :], torch.nan)
