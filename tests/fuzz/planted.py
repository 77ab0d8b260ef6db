"""Bugs for the fuzzer to find: each puts one into the Numba kernel of softmax (y = softmax(x), one output)."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilery.base.launch import Host
from tilery.core.op import REGISTRY


def _put(spoil: Callable[[Tensor, Tensor], None]) -> None:
    """After the kernel has run, `spoil` is given x and y."""
    kind = type(REGISTRY["softmax"].kernel("numba"))
    right = kind.launches

    def inside_of_guards(x: Tensor, y: Tensor) -> None:
        if y.numel() and y.storage_offset():
            spoil(x, y)

    def launches(self: Any, call: Any, config: Any) -> list[Any]:
        return [*right(self, call, config), Host(inside_of_guards, (call.x, call.y))]

    kind.launches = launches


def _flat(t: Tensor, more: int = 0) -> Tensor:
    """All elements of a contiguous tensor, and so many that lie behind it."""
    return t.as_strided((t.numel() + more,), (1,))


def write_behind() -> None:
    """One element past the end of the output."""
    _put(lambda x, y: _flat(y, 1)[-1:].fill_(1.0))


def write_in_a_gap() -> None:
    """Between two rows of the input, where there is a gap."""

    def spoil(x: Tensor, y: Tensor) -> None:
        if x.dim() == 2 and x.shape[0] > 1 and x.stride(0) > x.shape[1]:
            x.as_strided((1,), (1,), x.storage_offset() + x.shape[1]).fill_(1.0)

    _put(spoil)


def read_behind() -> None:
    """What stands behind the last row of x goes into the last value of y."""

    def spoil(x: Tensor, y: Tensor) -> None:
        end = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1
        end = min(end, x.untyped_storage().nbytes() // x.itemsize - x.storage_offset() - 1)
        behind = x.as_strided((1,), (1,), x.storage_offset() + end)
        _flat(y)[-1:].add_(behind * 0)

    _put(spoil)


def dropped_tail() -> None:
    """The last value of rows that are no multiple of 16 is not written."""
    _put(lambda x, y: y[..., -1].fill_(-24576) if x.shape[-1] % 16 else None)


def wrong_element() -> None:
    """One value a little too large, in rows of more than 100."""
    _put(lambda x, y: _flat(y)[:1].mul_(1.5) if x.shape[-1] > 100 else None)


def wrote_its_input() -> None:
    _put(lambda x, y: x.view(-1)[:1].fill_(0.5) if x.is_contiguous() else None)


def nondeterministic() -> None:
    """The last bit of a value is another every time."""
    times = iter(range(2**62))
    _put(lambda x, y: _flat(y)[:1].mul_(1 + 2.0**-23 * (next(times) % 2)) if x.dtype == torch.float32 else None)


def raises() -> None:
    def spoil(x: Tensor, y: Tensor) -> None:
        if x.shape[-1] == 1:
            raise ZeroDivisionError("rows of one value")

    _put(spoil)


def aborts() -> None:
    """Rows of an odd length end the process."""
    _put(lambda x, y: os.abort() if x.shape[-1] % 2 else None)
