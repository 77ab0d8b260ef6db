"""Known bytes around every tensor: a wrong write changes them, a wrong read takes a NaN or a wild integer."""

from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import TensorSpec
from tilery.measure.check import poisoned

# same: the strides it has; offset: the same, one element further; padded: rows with a gap, on 16 bytes; odd: with a gap
# that is not; transposed: columns next to each other; outer: of more dimensions, the two before the last change places.
LAYOUTS = ("same", "offset", "contiguous", "padded", "odd", "transposed", "outer")
# NaNs with a payload, so that a NaN that a kernel writes is not one of them; integers that lead far outside.
_BITS = {1: -1, 2: 0x7FD5, 4: 0x7FD5A5A5, 8: 0x7FFDA5A55A5AA5A5}
_HALF = 0x7ED5
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LEAD, _MOST = 512, 2**25  # bytes; what spans more, with rows far apart, is left where it lies


class Guarded:
    """The guarded tensors of one call."""

    def __init__(self) -> None:
        self._buffers: list[tuple[str, Tensor, Tensor, int]] = []

    def copy(self, name: str, x: Tensor, layout: str = "same") -> Tensor:
        """`x` as `layout` says, with guards before, behind and in its gaps."""
        strides, shift = _strides(x.shape, x.stride(), layout, x.itemsize)
        if layout == "same" and x.data_ptr() % 16:
            shift = 1
        if _span(x.shape, strides) * x.itemsize > _MOST:
            return x.clone(memory_format=torch.preserve_format) if x.is_contiguous() else _apart(x)
        made = self._make(name, x.shape, strides, shift, x.dtype, x.device)
        made.copy_(x)
        return made

    def poisoned(self, spec: TensorSpec, name: str = "an output or workspace") -> Tensor:
        """What check_call would allocate, guarded."""
        made = self._make(name, spec.shape, spec.strides, 0, spec.dtype, spec.device)
        fill = poisoned(TensorSpec.contiguous((1,), spec.dtype, spec.device))
        made.copy_(fill.expand(made.shape) if made.dim() else fill[0])
        return made

    def broken(self) -> str | None:
        """Which guard was written, in words."""
        for name, buffer, outside, bits in self._buffers:
            wrong = (buffer != bits) & outside
            if wrong.any():
                first = int(wrong.nonzero()[0])
                inside = (~outside).nonzero()
                lead, end = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (first, first)
                where = (
                    f"{lead - first} before" if first < lead else f"{first - end} behind" if first >= end else "inside"
                )
                return f"wrote outside of {name}: element {where} it ({int(wrong.sum())} in all)"
        return None

    def _make(self, name: str, shape: Any, strides: Any, shift: int, dtype: torch.dtype, device: Any) -> Tensor:
        size = dtype.itemsize
        lead, span = _LEAD // size + shift, _span(shape, strides)
        bits = _HALF if dtype == torch.float16 else _BITS[size]
        buffer = torch.full((lead + span + _LEAD // size,), bits, dtype=_INTEGERS[size], device=device)
        outside = torch.ones(buffer.shape, dtype=torch.bool, device=device)
        outside.as_strided(shape, strides, lead).fill_(False)
        self._buffers.append((name, buffer, outside, bits))
        return buffer.view(dtype).as_strided(shape, strides, lead)


def _apart(x: Tensor) -> Tensor:
    """A copy with the same strides, in memory that is not touched between its elements."""
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    made.copy_(x)
    return made


def _span(shape: Any, strides: Any) -> int:
    return sum((size - 1) * stride for size, stride in zip(shape, strides)) + 1 if all(shape) else 0


def _strides(shape: Any, strides: Any, layout: str, size: int) -> tuple[tuple[int, ...], int]:
    """Strides of the layout, and by how many elements it starts off 16 bytes."""
    dims = len(shape)
    if layout in ("same", "offset") or dims < (3 if layout == "outer" else 2):
        return tuple(strides), 1 if layout in ("offset", "odd") else 0
    order = list(range(dims))  # from the outermost in memory to the innermost
    if layout == "transposed":
        order[-2:] = order[:-3:-1]
    elif layout == "outer":
        order[-3], order[-2] = order[-2], order[-3]
    gap = {"padded": 16 // size, "outer": 16 // size, "odd": 3}.get(layout, 0)
    made, step = [0] * dims, 1
    for place, dim in enumerate(reversed(order)):
        made[dim] = step
        step *= max(shape[dim], 1)
        if place == 0 and gap:
            step = -(-step // gap) * gap + gap if layout != "odd" else step + gap
    return tuple(made), 1 if layout == "odd" else 0
