"""Attention to a KV cache that holds no key at all: no kernel is launched, and rows are zeros or NaN all the same."""

from typing import Any

import torch


def fill(out: Any, lse: Any, lengths: Any, bound: int) -> None:
    """Write out [B, Q, H, D] and lse [B, H, Q] (or None) of a cache without blocks, or with a bound of no keys.

    A sequence whose length is not from 0 to `bound` is NaN. So is every row that sees a key, as no page of it is there.
    """
    queries = out.shape[1]
    place = lengths[:, None].long() - queries + torch.arange(queries, device=lengths.device)
    wrong = (lengths[:, None] < 0) | (lengths[:, None] > bound) | (place >= 0)
    out.zero_().masked_fill_(wrong[:, :, None, None], torch.nan)
    if lse is not None:
        lse.fill_(-torch.inf).masked_fill_(wrong[:, None, :], torch.nan)
