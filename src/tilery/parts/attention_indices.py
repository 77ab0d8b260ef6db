"""Integers that attention reads on the device: ends of packed sequences, lengths, pages. What wrong ones mean.

A sequence whose numbers lead outside of a tensor, or that is longer than declared, is cut: it has the rows that are
there, and all of them are NaN. So is a row that sees a key of a page that is not there. No kernel follows such numbers.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilery.core.indices import require_between, require_offsets


class Span(NamedTuple):
    """A packed sequence's tokens, inside of the tensor whatever its numbers say."""

    start: int
    end: int
    sound: bool  # or it is cut

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.end)


def spans(ends: Tensor, tokens: int, most: int) -> list[Span]:
    """Where each packed sequence lies; `most` is the longest that is declared."""
    made, edges = [], ends.tolist()
    for b, (first, last) in enumerate(pairwise(edges)):
        start = min(max(first, 0), tokens) if b else 0
        end = min(max(last, start), tokens)
        made.append(Span(start, end, (start, end) == (first, last) and end - start <= most))
    return made


def require_packed(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, most_q: int, most_k: int
) -> None:
    """Raise BadInput for the first entry of cu_seqlens that cuts a sequence."""
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        require_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], most_q)
        require_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], most_k)


def require_pages(
    lengths: Tensor, table: Tensor | None, cache: Tensor, bound: int, queries: int | Tensor, window: int = 0
) -> None:
    """Raise BadInput for a length outside of 0 to `bound`, or for a page that is read and is not in the cache.

    `queries` are the query tokens, of every sequence or of each; pages that none of them sees may be anything.
    """
    require_between("lengths", lengths, 0, bound)
    if table is None:
        return
    page, count = cache.shape[1], torch.as_tensor(queries, device=lengths.device).expand_as(lengths)
    start = torch.arange(table.shape[1], device=table.device) * page
    first = (lengths - count - window + 1).clamp(min=0) if window else torch.zeros_like(lengths)
    read = (start < lengths[:, None]) & (start + page > first[:, None]) & (count > 0)[:, None]
    if read.any():
        require_between("block_table", torch.where(read, table, 0), 0, cache.shape[0] - 1)


def of_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, *options: Any
) -> None:
    """`Op.indices` of attention and attention_lse; their last options are the bounds."""
    *_, max_seqlen_q, max_seqlen_k = options
    require_packed(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
