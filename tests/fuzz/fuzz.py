"""Many calls of one kernel: counted, and what fails told with a line that does it again."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fuzz.call import Call
from fuzz.child import ENDED, Child
from fuzz.run import Outcome
from fuzz.shrink import shrunk
from fuzz.strategies import draw
from tilery.core.op import Op
from tilery.measure.place import place

_SAME = 12  # letters, by which two failures are alike
_TRIES, _FEW_TRIES = 150, 12  # to make a call smaller; few where each may end a process
_WIDE = 200  # calls, from which on dtypes are combined in every way: each combination is compiled
_INTERPRETED = 15  # times fewer calls of a kernel that Triton interprets: one takes a second


@dataclass
class Report:
    """What the calls of one kernel came to."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)  # of refusals
    failures: list[tuple[Call, str]] = field(default_factory=list)

    def add(self, call: Call, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        if outcome.kind == "refused":
            self.reasons[outcome.detail] += 1
        elif outcome.kind == "failed":
            self.failures.append((call, outcome.detail))

    @property
    def told(self) -> str:
        return "\n".join(f"{why}\n  {call.reproduction}" for call, why in self.failures)


def calls_of(op: Op, kernel: str, seed: str, count: int) -> Iterator[Call]:
    """The calls that a seed stands for; none of a kernel that does not run here."""
    where = place(op, kernel)
    if where.device is None:
        return
    few = max(count // _INTERPRETED, 1) if where.interpreted else count
    for i in range(few):
        yield draw(op, kernel, f"{seed}/{i}", where.interpreted, count >= _WIDE)


def fuzz(
    op: Op, kernel: str, seed: str, count: int, child: Child, progress: Callable[[Call], None] = lambda _: None
) -> Report:
    """Runs them all; the first failure is made smaller."""
    report = Report()
    for call in calls_of(op, kernel, seed, count):
        progress(call)
        outcome = child.run(call)
        if outcome.kind == "failed" and not report.failures:
            call, outcome = _smaller(call, outcome, child)
        report.add(call, outcome)
    return report


def _smaller(call: Call, outcome: Outcome, child: Child) -> tuple[Call, Outcome]:
    """The call made smaller, as long as it fails in the same way."""

    def fails(simpler: Call) -> bool:
        found = child.run(simpler)
        return found.kind == "failed" and found.detail[:_SAME] == outcome.detail[:_SAME]

    smaller = shrunk(call, fails, _FEW_TRIES if outcome.detail.startswith(ENDED) else _TRIES)
    found = child.run(smaller)
    return (smaller, found) if found.kind == "failed" else (call, outcome)  # one that does not come again is not lost
