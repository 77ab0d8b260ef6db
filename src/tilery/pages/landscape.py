"""The candidates of a tune, problem by problem: what every config gave, and what has no time. For report and plot."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tilery.measure import timing
from tilery.measure.result import Row
from tilery.measure.store import Run
from tilery.pages.summary import Found, Interval, positive

_FIELD = re.compile(r"""["']?(\w+)["']?\s*[=:]\s*["']?([^,(){}"']+)""")  # Config(warps=4), warps=4 and {"warps": 4}
_NUMBER = re.compile(r"-?\d+")

Value = int | str


@dataclass(frozen=True)
class Landscape:
    """One problem that was tuned in one run."""

    run: Run
    device: str
    op: str
    case: str
    found: tuple[Found, ...]  # fastest first, then what has no time; times are as beside the winner
    fields: tuple[str, ...]  # of the configs: those that have more than one value

    @property
    def timed(self) -> tuple[Found, ...]:
        return tuple(one for one in self.found if one.timed)

    @property
    def winner(self) -> Found | None:
        return next((one for one in self.found if one.row.rank == 0), None)


def landscapes(tunes: Iterable[Found]) -> list[Landscape]:
    """In the order of the runs; of a candidate that was measured several times the last counts: it was the longest."""
    problems: dict[tuple[str, ...], dict[tuple[str, str], Found]] = {}
    for one in tunes:
        row = one.row
        problem = problems.setdefault((one.run.id, row.device, row.op, row.case), {})
        problem[row.kernel, row.config] = one
    return [_landscape(list(problem.values())) for problem in problems.values()]


def _landscape(found: list[Found]) -> Landscape:
    first, found = found[0], _level(found)
    ordered = sorted(found, key=lambda one: (not one.timed, one.row.ms if one.timed else 0.0))  # equals as they came
    values: dict[str, set[Value]] = {}
    for one in found:
        for name, value in config(one.row).items():
            values.setdefault(name, set()).add(value)
    fields = tuple(name for name, seen in values.items() if len(seen) > 1)
    return Landscape(first.run, first.row.device, first.row.op, first.row.case, tuple(ordered), fields)


def _level(found: list[Found]) -> list[Found]:
    """Times of different jobs do not compare, ratios to the reference do: each as it would be in the winner's job."""
    gains = {id(one): ratio[0] for one in found if (ratio := gain(one)) is not None}
    known = sorted((one for one in found if id(one) in gains), key=lambda one: one.row.rank != 0)
    if not known:
        return found
    reference = (known[0].row.ms or math.nan) * gains[id(known[0])]
    return [replace(one, row=_at(one.row, reference / gains[id(one)])) if id(one) in gains else one for one in found]


def _at(row: Row, ms: float) -> Row:
    factor = ms / (row.ms or math.nan)
    low, high = (None if end is None else end * factor for end in (row.ms_low, row.ms_high))
    return replace(row, ms=ms, ms_low=low, ms_high=high)


def config(row: Row) -> dict[str, Value]:
    """The fields of the row's config."""
    pairs = ((name, value.strip()) for name, value in _FIELD.findall(row.config))
    return {name: int(value) if _NUMBER.fullmatch(value) else value for name, value in pairs}


def gain(one: Found) -> Interval | None:
    """How many times faster than its job's reference, round by round; None where it has no time."""
    samples, against = one.row.samples, one.row.against
    if not one.timed or not samples or len(samples) != len(against) or not all(map(positive, (*samples, *against))):
        return None
    return timing.Timing(samples, against).ratio
