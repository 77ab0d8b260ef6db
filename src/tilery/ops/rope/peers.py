"""RoPE as others do it, for all rotary ops: torch out of place, the others in place and without interleaved pairs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilery.core.peers import load


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str, interleaved: bool) -> Tensor:
    """As Hugging Face's models do, x · cos + rotate_half(x) · sin; the table is doubled on the way."""
    cos, sin = (_doubled(t, x, positions, layout, interleaved) for t in (cos, sin))
    size = cos.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    a, b = part.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else part.chunk(2, -1)
    other = torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)
    made = part * cos + other * sin
    return torch.cat((made, rest), -1) if rest.shape[-1] else made


def _doubled(table: Tensor, x: Tensor, positions: Tensor | None, layout: str, interleaved: bool) -> Tensor:
    rows = _rows(table, x, positions, layout)
    both = rows.repeat_interleave(2, -1) if interleaved else torch.cat((rows, rows), -1)
    return both.unsqueeze(-3 if layout == "bhsd" else -2)


def _rows(table: Tensor, x: Tensor, positions: Tensor | None, layout: str) -> Tensor:
    tokens = x.shape[{"bshd": 1, "bhsd": 2, "thd": 0}[layout]]
    return (table[:tokens] if positions is None else table[positions]).to(x.dtype)


def rope(q: Tensor, k: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    return rotated(q, *how), rotated(k, *how)


def rope_(q: Tensor, k: Tensor, *how: Any) -> None:
    for x in (q, k):
        x.copy_(rotated(x, *how))


def _in_place(peer: Callable[..., Any]) -> Callable[..., None]:
    """A peer that rotates [B, H, S, D] in place by rows of cos and sin [B or 1, S, R / 2], called as the op is."""

    def call(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str, interleaved: bool
    ) -> None:
        if interleaved:
            raise NotImplementedError("it rotates halves alone, not interleaved pairs")
        views = [x if layout == "bhsd" else (x.unsqueeze(0) if layout == "thd" else x).transpose(1, 2) for x in (q, k)]
        rows = [_rows(t, q, positions, layout) for t in (cos, sin)]
        peer(*views, *(r if r.dim() == 3 else r.unsqueeze(0) for r in rows), 2 * cos.shape[1])

    return call


def cloned(in_place: Callable[..., None]) -> Callable[..., tuple[Tensor, Tensor]]:
    """A peer that works in place copies q and k first, where the op must keep them."""

    def call(q: Tensor, k: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        q, k = q.clone(), k.clone()
        in_place(q, k, *how)
        return q, k

    return call


@_in_place
def liger_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> None:
    load("liger_kernel.ops").LigerRopeFunction.apply(q, k, cos, sin, None, 1, rotary)


@_in_place
def tilegym_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rotary: int) -> None:
    if rotary != q.shape[-1]:
        raise NotImplementedError("it wants both halves of the table to rotate a part of a head")
    load("tilegym.ops").apply_rope_base(q, k, cos, sin)  # for a whole head it reads the first half of the table alone
