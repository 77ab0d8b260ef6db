"""How fast is a kernel? Checked, timed in turns with what a user would run instead, and checked again."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilery.base import settings
from tilery.base.spec import Case, Cost
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY, Op
from tilery.core.peers import PEERS
from tilery.hardware import device
from tilery.measure import ceilings, timing
from tilery.measure.check import check_baseline, checked
from tilery.measure.place import place
from tilery.measure.result import BASE, CONTROL, COPY, Row, is_peer
from tilery.measure.source_hash import source_hash

_COLD_BYTES = 256 * 2**20  # input sets rotate through more than the H200's 60 MB of L2
_MOST_SETS = 1024
_MOST_BYTES = 16 * 2**30
_IMPOSSIBLE = 0.9  # of the time at the measured ceilings: less is no speed; they are the best of a few tries

Sets = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Unit:
    """One case of one op, and the arms to time on it. Plain data: it may be measured in another process."""

    op: str
    case: Case
    device: str
    kernels: tuple[str, ...]
    peers: tuple[str, ...]  # "baseline:…"
    depth: timing.Depth = timing.FULL
    cold: bool = True
    tuned: bool = True  # False: defaults are timed, whatever is tuned

    def without(self, arms: set[str]) -> "Unit":
        kernels, peers = (tuple(a for a in names if a not in arms) for names in (self.kernels, self.peers))
        return dataclasses.replace(self, kernels=kernels, peers=peers)


def units(
    op: Op, kernels: list[str], peers: list[str], given: list[Case] | None, depth: timing.Depth, cold: bool = True,
    defaults: bool = False,
) -> list[Unit]:  # fmt: skip
    """Every kernel that runs here on the given cases or on its device's own; with each, the peers of that device.

    With `defaults` only the kernel that an untuned call gets, if it is one of `kernels`.
    """
    places = {kernel: place(op, kernel) for kernel in kernels}
    found = []
    for where, own in ((device.default(), "bench"), (torch.device("cpu"), "bench_cpu")):
        if own == "bench" and where.type == "cpu":
            continue
        able = tuple(k for k, p in places.items() if p.device == where and not p.interpreted)
        with_them = tuple(p for p in peers if where.type == "cuda" or not PEERS[p.removeprefix("baseline:")].gpu)
        for case in (op.cases[own] if given is None else given) if able else []:
            timed = tuple(k for k in able if k == dispatched(op, case, where)) if defaults else able
            found.append(Unit(op.name, case, str(where), timed, with_them, depth, cold, not defaults))
    return found


def dispatched(op: Op, case: Case, where: torch.device) -> str:
    """The kernel that an untuned call gets."""
    with settings.override(tuned=False):
        return op.plan(specs_for(op, case, str(where))).kernel


def measure(unit: Unit, progress: timing.Progress = lambda arm, what: None) -> Iterator[Row]:
    """A row for every arm, and for the controls."""
    with settings.override(tuned=unit.tuned):
        yield from _measured(unit, progress)


def _measured(unit: Unit, progress: timing.Progress) -> Iterator[Row]:
    op, where = REGISTRY[unit.op], torch.device(unit.device)
    good: dict[str, Row] = {}
    for name in (*unit.peers, *unit.kernels):
        progress(name, "checking")
        row = _checked(op, name, unit.case, where)
        if row.status == "pass":
            good[name] = row
        else:
            yield row
    progress("", "drawing inputs")  # what fails from here on is no arm's fault
    sets = input_sets(op, lambda seed: drawn(op, unit.case, where, seed), where, unit.cold)
    cost, params = op.cost(op.call(op.specs(sets[0]))), unit.case.params
    dtype = "tf32" if params.get("precision") == "tf32" else str(params.get("dtype", "fp32"))
    roof = ceilings.ceilings(where)
    arms = {name: _arm(op, name, sets, row) for name, row in good.items()}
    if BASE in arms:
        arms[CONTROL] = _arm(op, BASE, sets, Row("", "", "", ""))
    arithmetic = roof.arithmetic_ms(cost, dtype) > roof.memory_ms(cost)
    if not arithmetic:
        arms[COPY] = _copies(cost.bytes, len(sets), where)
    base = BASE if BASE in arms else None
    paired = arithmetic and base is not None and len(arms) > 1  # power limits arithmetic
    times = timing.time_arms(arms, len(sets), where, unit.depth, base, paired, unit.cold, progress)
    inputs = said(unit.cold, sets, cost, where)
    if any(impossible(found.median, roof, cost, dtype, inputs) for found in times.values()):
        progress("", "measuring this machine's ceilings again")  # it may have been busy when they were measured
        roof = ceilings.raised(where)
    for name, row in good.items():
        progress(name, "checking again")
        again = _checked(op, name, unit.case, where)  # on fresh data: being timed must not have made it wrong
        if again.status != "pass":
            row.status, row.reason = "fail", f"right before it was timed, not after: {again.reason or again.status}"
    for name, found in times.items():
        row = good.get(name) or Row(op.name, name, str(unit.case), "pass", device=device.name(where))
        row.inputs, row.dtype, row.flops, row.bytes = inputs, dtype, cost.flops, cost.bytes
        note(row, found, cost, roof)
        why = impossible(found.median, roof, cost, dtype, row.inputs)
        if row.status == "pass" and why is not None:
            reject(row, why)
        yield row


def _checked(op: Op, name: str, case: Case, where: torch.device) -> Row:
    if not is_peer(name):
        return checked(op, name, case, where)
    return checked(op, name, case, where, check_baseline)


def drawn(op: Op, case: Case, where: torch.device, seed: int) -> tuple[Any, ...]:
    return op.complete((), op.inputs(**case.params, device=where, seed=seed))


def input_sets(op: Op, draw: Callable[[int], tuple[Any, ...]], where: torch.device, cold: bool = True) -> Sets:
    """Input sets, so many that a GPU's cache holds none when its turn comes; `draw` is given seeds from 0 on."""
    first = draw(0)
    if where.type != "cuda" or not cold:
        return [first]  # on a CPU the caches are overwritten instead
    wanted = -(-_COLD_BYTES // max(op.cost(op.call(op.specs(first))).bytes, 1))
    # Of a table or of rows far apart much more than is read.
    held = sum(a.untyped_storage().nbytes() for a in first if isinstance(a, Tensor))
    count = min(max(wanted, 2), _MOST_SETS, max(_MOST_BYTES // max(held, 1), 1))
    return [first, *(draw(seed) for seed in range(1, count))]


def said(cold: bool, sets: Sets, cost: Cost, where: torch.device) -> str:
    """Cold only where the sets are several times the cache: of the smallest problems no number of sets is."""
    if not cold:
        return "warm"
    if where.type != "cuda":
        return "cold"
    cache = torch.cuda.get_device_properties(where).L2_cache_size
    return "cold" if len(sets) * cost.bytes > 3 * cache else "warm"


def _arm(op: Op, name: str, sets: Sets, row: Row) -> timing.Arm:
    if not is_peer(name):
        row.config, row.source = str(op.plan(op.specs(sets[0]), name).config), source_hash(op, name)
    return rotating(call_of(op, name, sets[0]), sets)


def call_of(op: Op, name: str, args: tuple[Any, ...]) -> Callable[..., Any]:
    """The peer, or the kernel with the config that it is given for such arguments."""
    if is_peer(name):
        return op.baselines[name]
    plan = op.plan(op.specs(args), name)
    return lambda *given: plan(given)


def rotating(call: Callable[..., Any], sets: Sets) -> timing.Arm:
    """Each set's output stays, so that outputs rotate as inputs do."""
    held: dict[int, Any] = {}

    def arm(i: int) -> None:
        held[i] = call(*sets[i])

    return arm


def _copies(nbytes: int, sets: int, where: torch.device) -> timing.Arm:
    """Reads half of the bytes and writes half, by a kernel: in a graph `copy_` would be a slower memcpy node."""
    sources = [torch.randn(max(nbytes // 8, 1), device=where) for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]
    return lambda i: torch.mul(sources[i], 1.5, out=targets[i])


def note(row: Row, found: timing.Timing, cost: Cost, roof: ceilings.Ceilings) -> None:
    row.samples, row.against, row.timed_by = found.samples, found.against, found.how
    if found.conditions is not None:
        row.clock, row.power, row.temperature = found.conditions
    row.ms, (row.ms_low, row.ms_high) = found.median, found.interval
    row.gbps, row.tflops = cost.bytes / found.median / 1e6, cost.flops / found.median / 1e9
    row.roof = roof.roof_ms(cost, row.dtype) / found.median
    if found.ratio is not None:
        row.ratio, row.ratio_low, row.ratio_high = found.ratio


def impossible(ms: float, roof: ceilings.Ceilings, cost: Cost, dtype: str, inputs: str) -> str | None:
    """Why a time cannot be true. What lies in a cache may be faster than memory, not than arithmetic."""
    least = roof.roof_ms(cost, dtype) if inputs == "cold" else roof.arithmetic_ms(cost, dtype)
    if ms >= _IMPOSSIBLE * least:
        return None
    return (
        f"a measurement error, not a speed: {ms:.4g} ms, where this machine needs {least:.4g} ms at the rates "
        "measured on it (`tilery doctor --measure` measures them again)"
    )


def reject(row: Row, why: str) -> None:
    """A time that cannot be true gives no speed and no ratio; its samples stay, to be looked at."""
    row.status, row.reason = "fail", why
    row.ms = row.ms_low = row.ms_high = row.gbps = row.tflops = row.roof = None
    row.ratio = row.ratio_low = row.ratio_high = None
