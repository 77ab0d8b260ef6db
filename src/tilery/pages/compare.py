"""Two runs, row by row: how much faster or slower, with an interval. A regression gate."""

from collections.abc import Iterator
from dataclasses import dataclass

from tilery.base.errors import BadInput
from tilery.measure.result import Row, is_ours
from tilery.measure.store import Run, Store


@dataclass(frozen=True)
class Change:
    op: str
    kernel: str
    case: str
    device: str
    speed: float  # of the second run over the first; above 1 is faster
    low: float
    high: float
    by: str  # "ratio" to the baseline, which drifts with the machine as the kernel does; "ms" where there is none

    def regressed(self, threshold: float) -> bool:
        """Slower by more than the threshold, and the whole interval says so."""
        return self.high < 1 - threshold


def compare(store: Store, first: Run, second: Run) -> list[Change]:
    """Every kernel and case that both runs timed on the same device."""
    before = {_key(row): row for row in _timed(store, first)}
    found = [_change(before[_key(row)], row) for row in _timed(store, second) if _key(row) in before]
    if not found:
        raise BadInput(f"{first.id} and {second.id} timed no kernel, case and device in common: nothing to compare")
    return found


def _timed(store: Store, run: Run) -> Iterator[Row]:
    """Kernels of a bench; what they are held against is not theirs to answer for, nor is what a tuner tried."""
    rows = (row for row in store.rows(run.id) if row.ms is not None and is_ours(row.kernel))
    return (row for row in rows if row.stage != "tune")


def _key(row: Row) -> tuple[str, str, str, str]:
    return row.op, row.kernel, row.case, row.device


def _change(a: Row, b: Row) -> Change:
    """Intervals divided end by end: wider than need be, so what is called a change is one."""
    if None not in (a.ratio, a.ratio_low, a.ratio_high, b.ratio, b.ratio_low, b.ratio_high):
        speed, low, high = b.ratio / a.ratio, b.ratio_low / a.ratio_high, b.ratio_high / a.ratio_low  # type: ignore
        return Change(*_key(b), speed, low, high, "ratio")
    return Change(*_key(b), a.ms / b.ms, a.ms_low / b.ms_high, a.ms_high / b.ms_low, "ms")  # type: ignore
