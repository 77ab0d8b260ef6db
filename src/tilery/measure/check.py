"""Is a kernel right? Poisoned outputs, a float64 reference, and refusals held to what the case declares."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import BadInput, Wrong
from tilery.base.spec import Case, TensorSpec
from tilery.core import policy
from tilery.core.call import Call
from tilery.core.cases import call_for
from tilery.core.op import Op
from tilery.core.plan import packed
from tilery.hardware import device
from tilery.measure.compile import Compiler
from tilery.measure.judge import Judged, judge
from tilery.measure.place import Place, not_run, place
from tilery.measure.result import Row

# Finite, far from any result: an element that is not written gives itself away even where NaN is right.
_POISON = {torch.float8_e4m3fn: -416.0, torch.int8: -99, torch.uint8: 199, torch.bool: True}
_POISON_ELSE = -24576
_GUARD = 512  # bytes of poison before and behind each output: a write there is seen
_PEER_ALLOWED = 2e-2  # of what reads 16 bits or fewer: some round between their steps
_PEER_SLACK = 8 * _PEER_ALLOWED


@dataclass(frozen=True)
class Checked:
    errors: tuple[float, ...]  # one per output
    refused: str | None = None  # as the case declares
    max_diff: float = 0.0  # the largest difference of any element that is finite
    allowed: tuple[float, ...] = ()  # what each error may be


Right = tuple[Tensor, ...]  # outputs, then mutated arguments


@dataclass(frozen=True)
class Limits:
    """What an op's results may be off by, by dtype; see judge.py."""

    error: dict[torch.dtype, float]  # of all elements: rms(out - ref) / rms(ref)
    slack: dict[torch.dtype, float]  # of an element, besides its last rounding
    whole: bool = False  # the slack is of all rows' rms, not of each row's

    @classmethod
    def of(cls, op: Op, call: Call) -> "Limits":
        return cls(op.tolerance(call), op.slack(call), op.rows_cancel)

    def allowed(self, out: Tensor) -> float:
        """The error that `out` may have."""
        return _of(self.error, out.dtype)

    def reason(self, out: Tensor, ref: Tensor) -> tuple[Judged, str | None]:
        """How far `out` is from `ref`, and in words why that is too far; None if it is not."""
        error, slack = (_of(limits, out.dtype) for limits in (self.error, self.slack))
        found = judge(out, ref, slack, self.whole)
        if not found.error <= error:  # written so that NaN fails
            return found, f"has error {found.error:.2e}, allowed {error:.0e}"
        if not found.excess <= 1:
            at = list(found.element)
            came, wanted = out[found.element].item(), ref[found.element].item()
            return (
                found,
                f"is {came:.6g} at {at} where {wanted:.6g} is right, {found.excess:.2g} × what rounding allows",
            )
        return found, None


def _of(limits: dict[torch.dtype, float], dtype: torch.dtype) -> float:
    return limits.get(dtype, max(limits.values()))  # a peer may answer in another dtype


def error(out: Tensor, ref: Tensor) -> float:
    """rms(out - ref) / rms(ref) in float64 over what is finite; inf unless NaN and infinities are in place."""
    return judge(out, ref, 0.0).error


def poisoned(spec: TensorSpec) -> Tensor:
    return spec.empty().fill_(_POISON.get(spec.dtype, _POISON_ELSE))


class Guards:
    """Poisoned memory for the outputs and the workspace of a call, and more of it around them."""

    def __init__(self) -> None:
        self._around: list[Tensor] = []

    def allocate(self, spec: TensorSpec) -> Tensor:
        size, lead = spec.dtype.itemsize, _GUARD // spec.dtype.itemsize
        end = lead + (1 + sum((n - 1) * step for n, step in zip(spec.shape, spec.strides)) if spec.nbytes else 0)
        memory = poisoned(TensorSpec.contiguous((end + _GUARD // size,), spec.dtype, spec.device))
        self._around += [memory[:lead], memory[end:]]
        return memory.as_strided(spec.shape, spec.strides, lead)

    def require_kept(self, where: str) -> None:
        for side, guard in zip(itertools.cycle(("before", "behind")), self._around):
            wrong = _bits(guard) != _bits(poisoned(TensorSpec.of(guard)))
            if count := int(wrong.view(len(guard), -1).any(1).sum()):
                raise Wrong(
                    f"{where}: wrote outside of an output or workspace: {count} of {len(guard)} elements {side} it"
                )


def check(op: Op, kernel: str, case: Case, target: Any, seed: int | None = None, config: Any = None) -> Checked:
    """The error of each output, or the kernel's refusal; raises Wrong."""
    where, args = _drawn(op, kernel, case, target, seed)
    return check_call(op, kernel, args, where, config)


def check_call(
    op: Op, kernel: str, args: tuple[Any, ...], where: str, config: Any = None, right: Right | None = None,
    allocate: Callable[[TensorSpec], Tensor] | None = None,
) -> Checked:  # fmt: skip
    """`check` for given arguments; `where` is what is checked, in words. `right`: what `reference` said of them.

    `allocate` makes the outputs, then the workspace, instead of `Guards`.
    """
    where += f" {config}" if config is not None else ""
    call = op.call(op.specs(args))
    if why := policy.refusal(op, kernel, call, config):
        return Checked((), why)
    plan = policy.decide(op, call, kernel, config)
    guards = Guards()
    outs, workspace = (tuple(map(allocate or guards.allocate, specs)) for specs in (plan.outs, plan.workspace))

    def launch(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        plan.launch(outs, args, workspace)
        return outs

    found = judge_call(op, where, args, launch, Limits.of(op, call), right)
    guards.require_kept(where)
    return found


def reference(op: Op, args: Sequence[Any]) -> Right:
    """What is right: the outputs, then the mutated arguments, in float64."""
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    result = op.reference(*wide)
    return (() if result is None else packed(result)) + tuple(wide[i] for i in op.mutated)


def check_baseline(op: Op, name: str, case: Case, target: Any, seed: int | None = None) -> Checked:
    """`check` for a peer. It makes its outputs itself, so the memory that torch will give it is poisoned.

    It may round more than our kernels may, as long as it does the same work; what it does not compute is None.
    """
    where, args = _drawn(op, name, case, target, seed)
    spoilt = [poisoned(spec) for spec in op.output_specs(op.call(op.specs(args)))]
    del spoilt

    def call(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        made = op.baselines[name](*args)
        return () if op.mutates or made is None else packed(made)

    narrow = any(isinstance(a, Tensor) and a.is_floating_point() and a.itemsize < 4 for a in args)
    limits = Limits.of(op, op.call(op.specs(args)))
    if narrow:
        most, slack = (
            {dtype: max(value, least) for dtype, value in ours.items()}
            for ours, least in ((limits.error, _PEER_ALLOWED), (limits.slack, _PEER_SLACK))
        )
        limits = Limits(most, slack, limits.whole)
    return judge_call(op, where, args, call, limits)


def fresh_seed() -> int:
    """Another one every time: what was checked yesterday is not checked again."""
    return random.randrange(2**31)


def _drawn(op: Op, arm: str, case: Case, target: Any, seed: int | None) -> tuple[str, tuple[Any, ...]]:
    """What is checked, in words, and its arguments."""
    seed = fresh_seed() if seed is None else seed
    args = op.complete((), op.inputs(**case.params, device=target, seed=seed))
    return f"{op.name} {arm} {case} seed={seed}", args


def judge_call(
    op: Op, where: str, args: tuple[Any, ...], call: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    limits: Limits, right: Right | None = None,
) -> Checked:  # fmt: skip
    """Runs it and compares outputs, then mutated arguments, with the float64 reference; other inputs must be kept."""
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    outs = call(args)
    if any(isinstance(a, Tensor) and a.is_cuda for a in args):
        torch.cuda.synchronize()
    _require_inputs_kept(op, where, before, args)
    outs = (*outs, *(args[i] for i in op.mutated))
    return _held(where, reference(op, before) if right is None else right, outs, limits)


def conform(op: Op, kernel: str, case: Case, target: Any, seed: int | None = None) -> Checked:
    """`check`, and a refusal must be what the case declares: no more, no less."""
    found, expected = check(op, kernel, case, target, seed), case.refused_by.get(kernel)
    if expected is None and found.refused is not None:
        raise Wrong(f"{op.name} {kernel} {case}: should take it, refused: {found.refused}")
    if expected is not None and (found.refused is None or expected not in found.refused):
        raise Wrong(f"{op.name} {kernel} {case}: should refuse with {expected!r}, said {found.refused!r}")
    return found


def _require_inputs_kept(op: Op, where: str, before: list[Any], after: tuple[Any, ...]) -> None:
    for name, a, b in zip(op.names, before, after):
        if isinstance(a, Tensor) and name not in op.mutates and not torch.equal(_bits(a), _bits(b)):
            raise Wrong(f"{where}: wrote its input {name}")


def _bits(t: Tensor) -> Tensor:
    """Compared as bits: NaN is equal to itself."""
    return t.contiguous().as_strided((t.numel(),), (1,)).view(torch.uint8)  # a size of 1 may have any stride


def _held(where: str, refs: Right, outs: tuple[Any, ...], limits: Limits) -> Checked:
    """`outs` are the op's outputs, then its mutated arguments; None is one that a peer does not compute."""
    if len(outs) != len(refs):
        raise Wrong(f"{where}: should give {len(refs)} outputs, gave {len(outs)}")
    errors, allowed, largest = [], [], 0.0
    for i, (out, ref) in enumerate(zip(outs, refs)):
        if out is None:
            continue
        if out.shape != ref.shape:
            raise Wrong(f"{where}: output {i} must be {list(ref.shape)}, is {list(out.shape)}")
        found, why = limits.reason(out, ref)
        if why is not None:
            raise Wrong(f"{where}: output {i} {why}", found.error, limits.allowed(out))
        errors.append(found.error)
        allowed.append(limits.allowed(out))
        largest = max(largest, found.largest)
    return Checked(tuple(errors), max_diff=largest, allowed=tuple(allowed))


def rows(
    op: Op, kernels: list[str], cases: list[Case], compiler: Compiler, progress: Callable[[str], None] = lambda _: None,
    seed: int | None = None,
) -> Iterator[Row]:  # fmt: skip
    """A row for every kernel and case that runs here; one compiled row per dtype for a kernel that does not.

    Inputs are drawn from `seed`; from another one for every row if it is None.
    """
    for kernel in kernels:
        where = place(op, kernel)
        if where.device is None:
            for case in _one_per_dtype(cases):
                progress(f"compiling {op.name} {kernel} {case}")
                yield not_run(op, kernel, case, compiler)
            continue
        for case in cases:
            progress(f"checking {op.name} {kernel} {case}")
            yield _row(op, kernel, case, where, seed)


def _one_per_dtype(cases: list[Case]) -> list[Case]:
    return list({case.params.get("dtype"): case for case in reversed(cases)}.values())[::-1]


def _row(op: Op, kernel: str, case: Case, where: Place, seed: int | None) -> Row:
    assert where.device is not None
    call = call_for(op, case, "cpu") if where.interpreted else None
    if call and (why := policy.environment_refusal(op, kernel, where.device, call)):
        return Row(op.name, kernel, str(case), "skipped", why, device=where.interpreted)
    ours = any(case is known for known in op.cases["test"])  # a user's own case declares no refusals
    row = checked(op, kernel, case, where.device, conform if ours else check, seed)
    row.device = where.interpreted or row.device
    return row


def checked(
    op: Op, kernel: str, case: Case, target: torch.device, checker: Callable[..., Checked] = check,
    seed: int | None = None,
) -> Row:  # fmt: skip
    """What the checker finds, as a row, whatever it raises."""
    seed = fresh_seed() if seed is None else seed
    row = Row(op.name, kernel, str(case), "pass", device=device.name(target), seed=seed)
    try:
        found = checker(op, kernel, case, target, seed)
    except BadInput:  # the case is not one of the op's
        raise
    except Exception as error:  # a kernel may raise anything; its row says what, and the others go on
        row.status, row.reason = "fail", str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
        if isinstance(error, Wrong):
            row.error, row.allowed = error.error, error.allowed
        return row
    if found.refused is not None:
        row.status, row.reason = "refused", found.refused
    else:
        worst = max(zip(found.errors, found.allowed), key=lambda one: one[0], default=(0.0, None))
        (row.error, row.allowed), row.max_diff = worst, found.max_diff
    return row
