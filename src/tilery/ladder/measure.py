"""Rungs on one problem: checked against float64, timed in turns with torch, checked again. Runs in a child process."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilery.base.spec import Case
from tilery.hardware import device
from tilery.ladder.rungs import RUNGS, Step, product
from tilery.measure import ceilings, timing
from tilery.measure.check import Limits, poisoned, reference
from tilery.measure.child import relay, serve
from tilery.measure.result import BASE, Row
from tilery.workbench import bench
from tilery.workbench.bench import Unit

OP = "ladder"  # what the rows call it: rungs are no kernels of matmul, and no table of those may count them


class _Torch:
    """cuBLAS, as torch calls it."""

    def refusal(self, a: Any, b: Any) -> str | None:
        return None

    def run(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        torch.matmul(a, b, out=c)


def unit(case: Case, names: Iterable[str], depth: timing.Depth) -> Unit:
    return Unit(OP, case, str(device.default()), tuple(names), (BASE,), depth)


def measure(given: Unit, progress: timing.Progress = lambda arm, what: None) -> Iterator[Row]:
    """A row for torch and for every rung."""
    op, where = product(), torch.device(given.device)
    steps: dict[str, Any] = {name: _Torch() for name in given.peers} | {name: RUNGS[name] for name in given.kernels}
    good: dict[str, Row] = {}
    for name, row in _checked(steps, given.case, where, progress):
        if row.status == "pass":
            good[name] = row
        else:
            yield row
    progress("", "drawing inputs")  # what fails from here on is no rung's fault
    sets = bench.input_sets(op, lambda seed: bench.drawn(op, given.case, where, seed), where)
    cost, roof, dtype = op.cost(op.call(op.specs(sets[0]))), ceilings.ceilings(where), str(given.case.params["dtype"])
    arms = {name: bench.rotating(_call(steps[name]), sets) for name in good}
    base = BASE if BASE in arms else None
    paired = base is not None and len(arms) > 1  # power limits products: each stands between two turns of torch
    times = timing.time_arms(arms, len(sets), where, given.depth, base, paired, progress=progress)
    again = dict(_checked({name: steps[name] for name in good}, given.case, where, progress))
    for name, row in good.items():
        if again[name].status != "pass":
            row.status, row.reason = "fail", f"right before it was timed, not after: {again[name].reason}"
        row.inputs, row.dtype = bench.said(True, sets, cost, where), dtype
        row.flops, row.bytes = cost.flops, cost.bytes
        row.source = RUNGS[name].source_hash if name in RUNGS else ""
        bench.note(row, times[name], cost, roof)
        why = bench.impossible(times[name].median, roof, cost, dtype, row.inputs)
        if row.status == "pass" and why is not None:
            bench.reject(row, why)
        yield row


def _call(step: Step) -> Callable[..., Tensor]:
    def call(a: Tensor, b: Tensor, precision: str) -> Tensor:
        c = a.new_empty(a.shape[0], b.shape[1])
        step.run(a, b, c)
        return c

    return call


def _checked(
    steps: dict[str, Any], case: Case, where: torch.device, progress: timing.Progress
) -> Iterator[tuple[str, Row]]:
    """All of them on the same fresh data, each into a poisoned output."""
    op, seed = product(), random.randrange(2**31)
    progress("", "computing the reference")
    args = bench.drawn(op, case, where, seed)
    call = op.call(op.specs(args))
    a, b = call.a, call.b
    (right,) = reference(op, args)
    for name, step in steps.items():
        progress(name, "checking")
        row = Row(OP, name, str(case), "pass", device=device.name(where))
        if why := step.refusal(a, b):
            row.status, row.reason = "refused", why
        else:
            _judge(row, step, args, right, seed)
        yield name, row


def _judge(row: Row, step: Step, args: tuple[Any, ...], right: Tensor, seed: int) -> None:
    """Whatever it raises is its row's; a spoilt context shows at the next `progress`."""
    op, (a, b, _) = product(), args
    call = op.call(op.specs(args))
    c = poisoned(op.output_specs(call)[0])
    try:
        step.run(a, b, c)
        if c.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:
        row.status, row.reason = "fail", f"{type(error).__name__}: {error}"
        return
    found, why = Limits.of(op, call).reason(c, right)
    row.error, row.max_diff = found.error, found.largest
    if why is not None:
        row.status, row.reason = "fail", f"c {why}, seed={seed}"


if __name__ == "__main__":
    serve(relay(measure))
