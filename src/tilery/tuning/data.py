"""What a tuner passes between its parts, its processes and its files. Plain data."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from tilery.base.spec import Case
from tilery.measure import timing

GOOD = "good"
BAD = ("refused", "pruned", "does not build", "spills", "wrong", "crashed", "hung")  # why a candidate may not win


@dataclass(frozen=True)
class Candidate:
    """A kernel with a config."""

    kernel: str
    config: dict[str, Any]  # the fields of the kernel's Config
    origin: str = ""  # the device that an imported one was tuned for

    def __str__(self) -> str:
        fields = ",".join(f"{name}={value}" for name, value in sorted(self.config.items()))
        return f"{self.kernel} {fields}" if fields else self.kernel


@dataclass(frozen=True)
class Problem:
    """One call to tune: of a case, or of arguments that were saved to a file."""

    op: str
    device: str  # cpu, cuda:0
    case: Case | None = None
    saved: str | None = None
    weight: float = 1.0  # what time saved here is worth
    kernels: tuple[str, ...] = ()  # those that may win, if not all that were asked for
    use: str = ""  # sglang: only configs that its kernels can run may win, and they are kept for its files alone

    def __str__(self) -> str:
        return f"{self.op} {self.case if self.case is not None else 'call'}"


@dataclass(frozen=True)
class Built:
    """What a compiler said of a candidate."""

    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    failure: str = ""  # empty where it builds


@dataclass(frozen=True)
class Job:
    """Candidates of one problem, to be checked and timed in turns. The first is what the others are held against."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    depth: timing.Depth


@dataclass(frozen=True)
class Measured:
    """What one job found of one candidate."""

    candidate: Candidate
    status: str = GOOD  # or one of BAD
    reason: str = ""
    samples: tuple[float, ...] = ()  # ms a call, one a round
    against: tuple[float, ...] = ()  # those of the job's first, in the same rounds
    error: float = 0.0  # against float64
    repeats: bool = True  # two runs gave the same bits
    digest: str = ""  # of its outputs on the problem's first inputs: the same for the same bits
    built: Built = field(default_factory=Built)

    @property
    def ms(self) -> float:
        return statistics.median(self.samples)

    @property
    def slower(self) -> float:
        """How many times slower than the job's first: comparable between jobs, as times are not."""
        return statistics.median(mine / first for mine, first in zip(self.samples, self.against, strict=True))
