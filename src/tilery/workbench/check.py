"""Is a kernel right? Poisoned outputs, a float64 reference, and refusals held to what the case declares."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilery import dispatch
from tilery.errors import Wrong
from tilery.op import Case, Op, dtype_name

# Finite, in every dtype, far from any result: an element that is not written gives itself away even where NaN is right.
_POISON = -24576.0


@dataclass(frozen=True)
class Checked:
    errors: tuple[float, ...]  # one per output
    refused: str | None = None  # as the case declares


def error(out: Tensor, ref: Tensor) -> float:
    """rms(out - ref) / rms(ref) in float64 over what is finite; inf unless NaN and infinities stand where they should."""
    out = out.double()
    if not torch.equal(torch.where(ref.isfinite(), 0.0, ref).nan_to_num(nan=1.5), _special(out, ref)):
        return float("inf")
    finite = ref.isfinite()
    difference = (out - ref)[finite].square().sum()
    return (difference / ref[finite].square().sum()).sqrt().item() if difference != 0 else 0.0


def _special(out: Tensor, ref: Tensor) -> Tensor:
    """`out` where it or `ref` is not finite, 0 elsewhere; NaN as 1.5."""
    return torch.where(ref.isfinite() & out.isfinite(), 0.0, out).nan_to_num(nan=1.5)


def poisoned(spec: Any) -> Tensor:
    return spec.empty().fill_(_POISON)


def check(op: Op, kernel: str, case: Case, device: Any, seed: int | None = None, config: Any = None) -> Checked:
    """The error of each output, or the refusal the case declares; raises Wrong."""
    seed = random.randrange(2**31) if seed is None else seed
    where = f"{op.name} {kernel} {case} seed={seed}" + (f" {config}" if config is not None else "")
    args = op.complete((), op.inputs(**case.params, device=device, seed=seed))
    specs = op.specs(args)
    op.validate(specs)
    why, expected = dispatch.refusal(op, kernel, specs, config), case.refused_by.get(kernel)
    if expected is not None:
        if why is None or expected not in why:
            raise Wrong(f"{where}: should refuse with {expected!r}, said {why!r}")
        return Checked((), why)
    if why is not None:
        raise Wrong(f"{where}: should take it, refused: {why}")
    plan = dispatch.decide(op, specs, kernel, config)
    outs = tuple(poisoned(spec) for spec in plan.outs)
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    plan.launch(outs, args)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    _require_inputs_kept(op, where, before, args)
    return Checked(_errors(op, where, before, (*outs, *(args[i] for i in plan.mutated))))


def _require_inputs_kept(op: Op, where: str, before: list[Any], after: tuple[Any, ...]) -> None:
    for name, a, b in zip(op.names, before, after):
        if isinstance(a, Tensor) and name not in op.mutates and not torch.equal(_bits(a), _bits(b)):
            raise Wrong(f"{where}: wrote its input {name}")


def _bits(t: Tensor) -> Tensor:
    """Compared as bits: NaN is equal to itself."""
    return t.contiguous().view(torch.uint8)


def _errors(op: Op, where: str, args: list[Any], outs: tuple[Tensor, ...]) -> tuple[float, ...]:
    """`outs` are the op's outputs, then its mutated arguments."""
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    result = op.reference(*wide)
    refs = (() if result is None else dispatch.packed(result)) + tuple(wide[i] for i in op._mutated)
    errors = tuple(error(out, ref) for out, ref in zip(outs, refs, strict=True))
    for i, (out, err) in enumerate(zip(outs, errors)):
        if not err <= op.allowed[out.dtype]:  # written so that NaN fails
            raise Wrong(f"{where}: output {i} has error {err:.2e}, allowed {op.allowed[out.dtype]:.0e} in {dtype_name(out.dtype)}")
    return errors
