"""A job, done in this process: every candidate checked, then the good ones timed in turns, and checked again."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilery.base.errors import CompileFailed, Wrong
from tilery.core.op import REGISTRY, Op
from tilery.core.plan import Plan
from tilery.measure import ceilings, timing
from tilery.measure.check import Right, check_call, poisoned, reference
from tilery.tuning.candidates import dtype_of
from tilery.tuning.data import GOOD, Candidate, Job, Measured, Problem
from tilery.workbench import bench

Progress = Callable[[int | None, str], None]  # (number of the candidate, what is under way)
Arguments = tuple[Any, ...]

_WORDS = 2**24  # digested at a time


def measured(job: Job, progress: Progress) -> Iterator[tuple[int, Measured]]:
    """Bad ones as they are found, the good ones at the end: they were timed together or not at all."""
    op, where = REGISTRY[job.problem.op], torch.device(job.problem.device)
    progress(None, "drawing inputs")
    draw = _drawing(op, job.problem, where)
    good: dict[int, Measured] = {}
    for number, found in _checked(op, job, draw(0), range(len(job.candidates)), progress):
        if found.status == GOOD:
            good[number] = found
        else:
            yield number, found
    if not good:
        return
    progress(None, "drawing inputs")
    timed = _timed(op, job, good, bench.input_sets(op, draw, where), progress)
    # On other data, as far as there is any: being timed must not have made it wrong.
    for number, again in _checked(op, job, draw(1), list(timed), progress):
        if again.status != GOOD:
            reason = f"right before it was timed, not after: {again.reason}"
            timed[number] = Measured(again.candidate, again.status, reason)
    yield from timed.items()


def _drawing(op: Op, problem: Problem, where: torch.device) -> Callable[[int], Arguments]:
    """Gives arguments of its own for every seed; those of a saved call are the same for all."""
    case = problem.case
    if case is not None:
        return lambda seed: bench.drawn(op, case, where, seed)
    args = torch.load(str(problem.saved), map_location=where, weights_only=True)
    return lambda seed: _twins(args)


def _twins(args: Arguments) -> Arguments:
    return tuple(_twin(a) if isinstance(a, Tensor) else a for a in args)


def _twin(t: Tensor) -> Tensor:
    """A copy with the same strides and alignment: `clone` closes gaps between rows, and plans depend on them."""
    skip = t.data_ptr() % 16 // t.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) + 1 if t.numel() else 0
    storage = torch.empty(skip + reach, dtype=t.dtype, device=t.device)
    return storage.as_strided(t.shape, t.stride(), skip).copy_(t.detach())


def _plan(op: Op, candidate: Candidate, specs: tuple[Any, ...]) -> Plan:
    config = op.kernel(candidate.kernel).Config(**candidate.config)
    return op.plan(specs, candidate.kernel, config)


# Is it right?


def _checked(
    op: Op, job: Job, args: Arguments, numbers: Iterable[int], progress: Progress
) -> Iterator[tuple[int, Measured]]:
    progress(None, "computing the reference")
    right = reference(op, _twins(args))
    for number in numbers:
        progress(number, "checking")
        yield number, _judged(op, job.candidates[number], args, right)


def _judged(op: Op, candidate: Candidate, args: Arguments, right: Right) -> Measured:
    try:
        config = op.kernel(candidate.kernel).Config(**candidate.config)
        found = check_call(op, candidate.kernel, _twins(args), f"{op.name} {candidate.kernel}", config, right)
        if found.refused is not None:
            return Measured(candidate, "refused", found.refused)
        first, second = (_outcome(op, candidate, args) for _ in range(2))
    except Wrong as error:
        return Measured(candidate, "wrong", str(error))
    except CompileFailed as error:
        return Measured(candidate, "does not build", str(error))
    except Exception as error:  # a kernel may raise anything; the others go on, if the context still works
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return Measured(candidate, "crashed", f"{type(error).__name__}: {error}")
    repeats = all(map(torch.equal, first, second))
    return Measured(candidate, error=max(found.errors, default=0.0), repeats=repeats, digest=_digest(first))


def _outcome(op: Op, candidate: Candidate, args: Arguments) -> list[Tensor]:
    """The bits of what it writes, into memory that held something else."""
    plan, mine = _plan(op, candidate, op.specs(args)), _twins(args)
    outs, workspace = (tuple(map(poisoned, specs)) for specs in (plan.outs, plan.workspace))
    plan.launch(outs, mine, workspace)
    return [t.reshape(-1).view(torch.uint8) for t in (*outs, *(mine[i] for i in op.mutated))]


def _digest(bits: list[Tensor]) -> str:
    """Made where the bits are: two sums of all words, each weighted by its place, in whole numbers that wrap."""
    found = hashlib.sha256()
    for t in bits:
        padded = torch.nn.functional.pad(t, (0, -t.numel() % 8)).view(torch.int64)
        for first, words in zip(range(0, padded.numel(), _WORDS), padded.split(_WORDS)):
            place = torch.arange(first, first + words.numel(), device=t.device) * 2 + 1
            mixed = (words ^ (words >> 29)) * -7046029254386353131
            sums = torch.stack([(words * place).sum(), (mixed * place).sum()])
            found.update(sums.cpu().numpy().tobytes())
        found.update(str(t.numel()).encode())
    return found.hexdigest()


# How fast is it?


def _timed(op: Op, job: Job, good: dict[int, Measured], sets: bench.Sets, progress: Progress) -> dict[int, Measured]:
    """All in turns, held against the first."""
    where, specs = torch.device(job.problem.device), op.specs(sets[0])
    arms = {str(number): _arm(_plan(op, found.candidate, specs), sets) for number, found in good.items()}
    judge = _Speeds(op, specs, sets, where) if where.type == "cuda" else None
    paired = judge is not None and judge.arithmetic and len(arms) > 1
    times = timing.time_arms(
        arms, len(sets), where, job.depth, base=next(iter(arms)), paired=paired,
        progress=lambda arm, what: progress(int(arm), what),
    )  # fmt: skip
    timed = {}
    for number, found in good.items():
        time = times[str(number)]
        why = judge.impossible(time.median) if judge is not None else None
        timed[number] = replace(found, samples=time.samples, against=time.against)
        if why is not None:
            timed[number] = replace(timed[number], status="wrong", reason=why)
    return timed


def _arm(plan: Plan, sets: bench.Sets) -> timing.Arm:
    return bench.rotating(lambda *args: plan(args), sets)


class _Speeds:
    """What a GPU can do with this problem. A CPU's rates change with its neighbours: there only ratios count."""

    def __init__(self, op: Op, specs: tuple[Any, ...], sets: bench.Sets, where: torch.device) -> None:
        self.where, self.cost, self.roof = where, op.cost(op.call(specs)), ceilings.ceilings(where)
        self.dtype, self.inputs = dtype_of(specs), bench.said(True, sets, self.cost, where)

    @property
    def arithmetic(self) -> bool:
        """Power limits it, so what ran before a candidate decides how fast it is."""
        return self.roof.arithmetic_ms(self.cost, self.dtype) > self.roof.memory_ms(self.cost)

    def impossible(self, ms: float) -> str | None:
        return bench.impossible(ms, self.roof, self.cost, self.dtype, self.inputs)
