"""Checks of the integers that ops read on the device: lengths, offsets, pages, slots, targets, ids.

Kernels never follow such an index outside of a tensor: they clip or skip it. With TILERY_CHECK_INDICES=1 the host looks
first and names the first wrong entry, for the price of a synchronisation at every call.
"""

import torch
from torch import Tensor

from tilery.base.errors import BadInput


def require_between(name: str, indices: Tensor, low: int, high: int, *, allow: int | None = None) -> None:
    """Raise BadInput for the first entry that is not from `low` to `high`, both included, nor `allow`."""
    wrong = (indices < low) | (indices > high)
    if allow is not None:
        wrong &= indices != allow
    if not wrong.any():
        return
    where = tuple(wrong.nonzero()[0].tolist())
    also = "" if allow is None else f" or {allow}"
    came = indices[where].item()
    raise BadInput(f"{name}{list(where)} must be from {low} to {high}{also}, got {came}")


def require_offsets(name: str, offsets: Tensor, total: int, longest: int | None = None) -> None:
    """Raise BadInput unless cumulative lengths start at 0, never fall and end within `total`; each within `longest`."""
    require_between(name, offsets, 0, total)
    lengths = offsets.diff()
    if offsets[:1].any():
        raise BadInput(f"{name}[0] must be 0, got {offsets[0].item()}")
    if (lengths < 0).any():
        i = int((lengths < 0).nonzero()[0]) + 1
        raise BadInput(
            f"{name}[{i}] must be {offsets[i - 1].item()} or more, as the entry before, got {offsets[i].item()}"
        )
    if longest is not None and (lengths > longest).any():
        i = int((lengths > longest).nonzero()[0])
        raise BadInput(
            f"{name} gives sequence {i} {lengths[i].item()} tokens, more than the {longest} that are declared"
        )


def require_no_capture() -> None:
    """Raise BadInput while a CUDA graph is captured: the host cannot look at what is on the device then."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise BadInput("indices cannot be checked while a CUDA graph is captured; unset TILERY_CHECK_INDICES")
