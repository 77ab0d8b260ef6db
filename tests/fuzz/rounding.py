"""Is an error more than rounding explains? The op's limits are for its own cases; random ones may cancel or overflow.

A kernel computes in fp32. The reference does that too here, a few times over, of inputs that differ in their last bits.
How far its results are apart is how far two right answers may be apart: where a sum cancels, where two logits are
nearly equal, where something overflows.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tilery.core import plan as plan_module
from tilery.core.op import Op
from tilery.measure.check import Limits, Right
from tilery.measure.judge import half_steps

_SAMPLES, _MARGIN = 16, 8  # a backward stable kernel stays below a tenth of that
_FEW = 2048  # elements, whose roundings do not even out
_LAST_BITS = 2.0**-21
_CUBES = 7e12  # beyond this, products of three overflow
_SUMS = 1e37  # and beyond this, sums of a few
_FLUSHED = 2.0**-126


def explained(op: Op, args: tuple[Any, ...], outs: tuple[Tensor, ...], right: Right) -> bool:
    """Whether every output (mutated arguments among them) is as right as arithmetic in fp32 can be."""
    samples = [_reference32(op, args, seed) for seed in range(_SAMPLES)]
    limits = Limits.of(op, op.call(op.specs(args)))
    largest = max(map(_largest, args))
    floats = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    between = torch.finfo(floats[0]).max if op.rounds_between else None
    for i, (out, ref) in enumerate(zip(outs, right)):
        error, slack = (of.get(out.dtype, max(of.values())) for of in (limits.error, limits.slack))
        apart = [sample[i].double() for sample in samples]
        if between and largest > between / 8 and out.is_floating_point():
            wide = out.to(ref.dtype)  # fp8 cannot be asked
            ref = torch.where(wide.isfinite(), ref, wide)  # what is rounded between steps may overflow there
        if out.shape != ref.shape or not _close(out, ref.double(), apart, error, slack, largest):
            return False
    return True


def _reference32(op: Op, args: tuple[Any, ...], seed: int) -> Right:
    g = torch.Generator().manual_seed(seed)

    def narrow(a: Any) -> Any:
        if not isinstance(a, Tensor) or not a.is_floating_point():
            return a
        noise = torch.rand(a.shape, generator=g) * 2 - 1
        return a.float() * (1 + _LAST_BITS * noise).to(a.device)

    given = [narrow(a) for a in args]
    torch.set_flush_denormal(seed % 2 == 1)  # kernels may flush them to zero: 0 · inf is NaN then
    try:
        result = op.reference(*given)
    finally:
        torch.set_flush_denormal(False)
    return (() if result is None else plan_module.packed(result)) + tuple(given[i] for i in op.mutated)


def _largest(a: Any) -> float:
    if not isinstance(a, Tensor) or not a.is_floating_point() or not a.numel():
        return 0.0
    return a.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def _close(
    out: Tensor, ref: Tensor, samples: list[Tensor], error: float, slack: float, largest: float
) -> bool:  # fmt: skip
    """`largest` is the largest number that went in."""
    got, finite = out.double(), ref.isfinite()
    unknown = torch.zeros_like(finite)  # where fp32 has no answer
    apart = torch.zeros_like(ref)
    for sample in samples:
        unknown |= _alike(sample) != _alike(ref)
        apart = torch.maximum(apart, (sample - ref).abs().nan_to_num(0.0, 0.0, 0.0))
    if largest > _CUBES:  # in what order decides whether it is 0, infinity or NaN
        unknown |= apart >= 0.5 * ref.abs()
    if largest > _SUMS:
        unknown |= ~got.isfinite()
    if out.is_floating_point():  # too large for its dtype, or nearly: infinity and the largest number are both right
        most = torch.finfo(out.dtype).max
        unknown |= (ref.abs() * (1 + 2 * slack) > most) & (got * ref.sign() >= most)
    special = ~finite & ~unknown
    if not torch.equal(_alike(got)[special], _alike(ref)[special]):
        return False
    judged = finite & ~unknown
    if not judged.any():
        return True
    rows = torch.where(judged, ref, 0.0).square()
    rms = (rows.mean(-1, keepdim=True) if ref.dim() else rows).sqrt().expand(ref.shape)[judged]
    got, ref, apart = got[judged], ref[judged], apart[judged]
    if not got.isfinite().all():
        return False
    off, least = (got - ref).abs(), half_steps(ref, out.dtype)
    each = off <= 2 * (least + slack * (ref.abs() + rms)) + _MARGIN * apart
    few = 3 if ref.numel() < _FEW else 1
    whole = _norm(off) <= few * error * _norm(ref) + _norm(least) + _MARGIN * _norm(apart)
    return bool(each.all()) and whole


def _alike(x: Tensor) -> Tensor:
    """0 for numbers; NaN, infinity and its negative differ."""
    return torch.where(x.isfinite(), 0.0, x.nan_to_num(nan=2.0, posinf=1.0, neginf=-1.0))


def _norm(x: Tensor) -> float:
    """The norm of values whose squares may overflow."""
    top = x.abs().max().item()
    return top * (x / top).norm().item() if top > _FLUSHED else math.sqrt(x.numel()) * top
