"""How fast is a kernel? Checked first, then timed in turns with what a user would run instead."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tilery import device, dispatch, timing
from tilery.op import Op
from tilery.spec import Case, Cost
from tilery.workbench.check import checked
from tilery.workbench.compile import Compiler
from tilery.workbench.place import not_run, place
from tilery.workbench.result import Row

BASE = "baseline:torch"
CONTROL = "control:torch"  # the baseline once more: how far its ratio is from 1 is what the others' ratios are worth
_COLD_BYTES = 256 * 2**20  # input sets rotate through more than the H200's 60 MB of L2
_MOST_SETS = 1024


def bench(
    op: Op, kernels: list[str], given: list[Case] | None, compiler: Compiler, rounds: int = 20,
    progress: timing.Progress = lambda _: None,
) -> Iterator[Row]:  # fmt: skip
    """Every kernel on the given cases or on its device's own; with each timed case, its baselines."""
    places = {kernel: place(op, kernel) for kernel in kernels}
    for where, own in ((device.default(), "bench"), (torch.device("cpu"), "bench_cpu")):
        able = [k for k, p in places.items() if p.device == where and not p.interpreted]
        if own == "bench" and where.type == "cpu":
            continue
        for case in (given or op.cases[own]) if able else []:
            yield from _timed(op, able, case, where, rounds, progress)
    for kernel, found in places.items():
        if found.device is None or found.interpreted:
            progress(f"compiling {op.name} {kernel}")
            cases = given or op.cases["bench"]
            yield not_run(op, kernel, cases[len(cases) // 2], compiler)


def _timed(
    op: Op, kernels: list[str], case: Case, where: torch.device, rounds: int, progress: timing.Progress
) -> Iterator[Row]:
    good: dict[str, Row] = {}
    for kernel in kernels:
        progress(f"checking {op.name} {kernel} {case}")
        row = checked(op, kernel, case, where)
        if row.status == "pass":
            good[kernel] = row
        else:
            yield row
    sets = _input_sets(op, case, where)
    arms = {name: _baseline(function, sets) for name, function in op.baselines.items()}
    if BASE in arms:
        arms[CONTROL] = _baseline(op.baselines[BASE], sets)
    for kernel, row in good.items():
        plan = dispatch.decide(op, op.specs(sets[0]), kernel, None)
        arms[kernel], row.config = _planned(plan, sets), str(plan.config)
    times = timing.time_arms(arms, len(sets), where, rounds, progress=lambda s: progress(f"{op.name} {case}: {s}"))
    for kernel, row in good.items():
        progress(f"checking {op.name} {kernel} {case} again")
        again = checked(op, kernel, case, where)  # on fresh data: being timed must not have made it wrong
        if again.status != "pass":
            row.status, row.reason = "fail", f"right before it was timed, not after: {again.reason or again.status}"
    cost = op.cost(*op.specs(sets[0]))
    ceilings = device.ceilings(where)
    for name, found in times.items():
        row = good.get(name) or Row(op.name, name, str(case), "pass", device=device.name(where))
        _measured(row, found, times.get(BASE), cost, ceilings, str(case.params.get("dtype", "fp32")))
        yield row


def _input_sets(op: Op, case: Case, where: torch.device) -> list[tuple[Any, ...]]:
    def draw(seed: int) -> tuple[Any, ...]:
        return op.complete((), op.inputs(**case.params, device=where, seed=seed))

    first = draw(0)
    wanted = -(-_COLD_BYTES // max(op.cost(*op.specs(first)).bytes, 1))
    count = min(max(wanted, 2), _MOST_SETS) if where.type == "cuda" else 1
    return [first, *(draw(seed) for seed in range(1, count))]


def _baseline(function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> timing.Arm:
    held: dict[int, Any] = {}  # each set's output stays, so that outputs rotate as inputs do

    def arm(i: int) -> None:
        held[i] = function(*sets[i])

    return arm


def _planned(plan: dispatch.Plan, sets: list[tuple[Any, ...]]) -> timing.Arm:
    return _baseline(lambda *args: plan(args), sets)


def _measured(
    row: Row, found: timing.Timing, base: timing.Timing | None, cost: Cost, ceilings: device.Ceilings, dtype: str
) -> None:
    row.samples = found.samples
    row.ms, (row.ms_low, row.ms_high), row.timed_by = found.median, found.interval, found.how
    row.gbps, row.tflops = cost.bytes / found.median / 1e6, cost.flops / found.median / 1e9
    row.roof = ceilings.roof_ms(cost.flops, cost.bytes, dtype) / found.median
    if base is not None:
        row.ratio, row.ratio_low, row.ratio_high = timing.ratio(found, base)
