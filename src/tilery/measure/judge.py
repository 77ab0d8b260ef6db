"""How far a result is from what is right: over all of it, and at its worst element."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**24  # elements compared at a time: float64 copies of a whole output would fill a laptop
_SHORT = 8  # elements of a row
_FLUSHED = 2.0**-126  # what is smaller may be flushed to zero on its way: the least normal fp32


@dataclass(frozen=True)
class Judged:
    """One output beside the float64 reference; both are inf unless NaN and infinities are in place."""

    error: float  # rms(out - ref) / rms(ref) over what is finite, less what subnormal numbers must be off by
    largest: float = 0.0  # the largest |out - ref| of an element
    excess: float = 0.0  # the largest of an element as a multiple of what it is allowed
    element: tuple[int, ...] = ()  # where that is


def judge(out: Tensor, ref: Tensor, slack: float, whole: bool = False) -> Judged:
    """Compare by the rms and by the element.

    An element may be off by half a step of out's dtype at its own size, which is the last rounding, and by `slack`
    times (its own size + the rms of its row, along the last dimension), which is the arithmetic before. `whole`: the
    rms of all rows stands for that of a row that is smaller, where terms of one size cancel in some rows and not in
    others. So it does for short rows, which say too little of the size of their terms.
    """
    shape = ref.shape
    n = shape[-1] if ref.dim() and shape[-1] else 1
    difference = total = largest = excess = 0.0
    worst = start = 0
    rows = max(_CHUNK // n, 1)
    least = _rms(ref, n) if whole or n < _SHORT else 0.0  # rms of a row
    for o, r in zip(out.reshape(-1, n).split(rows), ref.reshape(-1, n).split(rows)):
        o, r = o.double(), r.double()
        finite = r.isfinite()
        in_place = torch.equal(o[~finite].nan_to_num(nan=1.5), r[~finite].nan_to_num(nan=1.5))
        if not in_place or not o[finite].isfinite().all():
            return Judged(math.inf, math.inf, math.inf)
        off, r = (o - r).abs_().masked_fill_(~finite, 0.0), r.masked_fill(~finite, 0.0)
        squares = r.square()
        difference += max(off.square().sum().item() - _subnormal_rounding(r, out.dtype), 0.0)
        total += squares.sum().item()
        largest = max(largest, off.max().item() if off.numel() else 0.0)
        bound = r.abs() + squares.mean(-1, keepdim=True).sqrt_().clamp_(min=least)
        bound = half_steps(r, out.dtype).add_(bound, alpha=slack)
        ratio = off.div_(bound).flatten()
        if ratio.numel() and (most := ratio.max().item()) > excess:
            excess, worst = most, start + int(ratio.argmax())
        start += r.numel()
    if difference == 0:
        return Judged(0.0)
    error = math.sqrt(difference / total) if total else math.inf
    return Judged(error, largest, excess, _index(worst, shape))


def _rms(ref: Tensor, n: int) -> float:
    """Root mean square of all elements that are finite."""
    chunks = ref.reshape(-1, n).split(max(_CHUNK // n, 1))
    total = sum(c.double().nan_to_num(0.0, 0.0, 0.0).square().sum().item() for c in chunks)
    return math.sqrt(total / max(ref.numel(), 1))


def _subnormal_rounding(ref: Tensor, dtype: torch.dtype) -> float:
    """Sum of squares that rounding to `dtype` costs elements below its least normal number.

    Their steps do not shrink with them: a softmax over 150,000 classes in fp16 has an error of 1.6e-3 for this alone.
    """
    if not dtype.is_floating_point or dtype == torch.float64:
        return 0.0
    kind = torch.finfo(dtype)
    count = ((ref != 0) & (ref.abs() < kind.smallest_normal)).sum().item()
    return count * (kind.smallest_normal * kind.eps) ** 2 / 12  # uniform over a step


def half_steps(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of `dtype` at the size of each float64 value; 0 where it is not a float."""
    if not dtype.is_floating_point or dtype == torch.float64:
        return torch.full_like(values, _FLUSHED)
    kind = torch.finfo(dtype)
    least, mantissa = int(math.log2(kind.smallest_normal)), int(-math.log2(kind.eps))
    exponent = ((values.view(torch.int64) >> 52) & 0x7FF).sub_(1023).clamp_(min=least)
    return exponent.sub_(mantissa + 1 - 1023).bitwise_left_shift_(52).view(torch.float64).add_(_FLUSHED)


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape)) if shape else ()
